"""Fill the masks of a text: print the most probable tokens at each [MASK].

    bert-tf fill_mask --model=RUN --text="The [MASK] of France is [MASK]."

Each line of stdout is a JSON object for one mask: {"token": [...], "score": [...]}, best first.
"""

import dataclasses

from bert_tf.errors import UserError
from bert_tf.storage import strict_json
from bert_tf.system import command
from bert_tf.weights import sources


@dataclasses.dataclass(frozen=True)
class FillMaskSettings:
    """Flags of the command."""

    model: str = command.flag(
        "weights with a masked language model head: id of the Hugging Face hub, run, Hugging Face "
        "directory, Google release or keras-hub preset"
    )
    text: str = command.flag("text with at least one [MASK]")
    top_k: int = command.flag("candidates per mask", 5, bounds={">=": 1})
    do_lower_case: bool | None = command.flag(
        "lower-casing of the text; by default as configured in the model", None
    )

    def __post_init__(self) -> None:
        command.check_bounds(self)
        command.check_text("text", self.text)
        if "[MASK]" not in self.text:
            raise UserError(f"--text={self.text!r:.80}: expected a text with [MASK]")

    def check(self) -> None:
        """Check the model without TensorFlow; raises UserError."""
        sources.check(self.model)


def main(settings: FillMaskSettings) -> None:
    """Print the candidates of each mask."""
    from bert_tf.pretraining.masked_tokens import check_head, fill_masks
    from bert_tf.pretraining.model import PretrainingModel
    from bert_tf.text.tokenizer import Tokenizer
    from bert_tf.train.distribution import use_precision

    use_precision("float32")
    pretrained = sources.read_pretrained(settings.model, settings.do_lower_case)
    command.log(pretrained.origin)
    check_head(pretrained)
    model = PretrainingModel(pretrained.config)
    pretrained.assign_to(model)
    tokenizer = Tokenizer.from_config(pretrained.config, pretrained.vocabulary)
    for candidates in fill_masks(model, tokenizer, settings.text, settings.top_k):
        print(strict_json.dumps_result(candidates, pretrained.origin))


if __name__ == "__main__":
    command.run_main(main, FillMaskSettings, __doc__)
