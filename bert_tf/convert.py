"""Turns pretrained weights of another form into a run directory.

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
    from_: str = command.flag("weights to read")
    to: str = command.flag("directory to make")
    format: str = command.flag("form to write", "run", choices=("run",))
    do_lower_case: bool | None = command.flag(
        "lower-case the text; by default what the source says", None
    )

    def __post_init__(self):
        if not files.is_remote(self.to):
            run_directory.check_free(self.to)

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        sources.check(self.from_)


def main(settings):
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
