"""Convert pretrained weights to a run directory.

    python -m bert_tf.convert --from=PATH --to=RUN

PATH is a Hugging Face directory (config.json, model.safetensors, vocab.txt), a Google release
(bert_config.json, bert_model.ckpt.*, vocab.txt), a keras-nlp BERT preset (directory or name), or a
run.
"""

import dataclasses

from bert_tf import command, files, run_directory
from bert_tf.weights import sources


@dataclasses.dataclass(frozen=True)
class ConvertSettings:
    """Settings of bert_tf.convert, one per flag."""

    from_: str = command.flag("pretrained weights to read")
    to: str = command.flag("run directory to create")
    format: str = command.flag("output format", "run", choices=("run",))
    do_lower_case: bool | None = command.flag(
        "lower-casing of text; default: as in the source", None
    )

    def __post_init__(self) -> None:
        if not files.is_remote(self.to):
            run_directory.check_free(self.to)

    def check(self) -> None:
        """Check the source without TensorFlow.

        Raises:
            UserError: If the weights cannot be read.
        """
        sources.check(self.from_)


def main(settings: ConvertSettings) -> None:
    """Convert the weights and log their size and origin."""
    from bert_tf.weights.sources import read_pretrained

    pretrained = read_pretrained(settings.from_, settings.do_lower_case)
    run = pretrained.save(settings.to)
    config = pretrained.config
    command.log(
        f"{run.path}: {sum(array.size for array in pretrained.weights.values()):,} parameters in "
        f"{len(pretrained.weights)} tensors from {pretrained.origin}; {config.num_hidden_layers} "
        "layers, hidden size "
        f"{config.hidden_size}, {config.hidden_act}, "
        f"{'uncased' if config.do_lower_case else 'cased'}; heads: "
        f"{', '.join(pretrained.heads) or 'none'}"
    )


if __name__ == "__main__":
    command.run_main(main, ConvertSettings, __doc__)
