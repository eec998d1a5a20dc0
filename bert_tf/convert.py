"""Convert BERT weights to a run directory, or to the format of another library.

    bert-tf convert --from=google-bert/bert-base-uncased --to=RUN
    bert-tf convert --from=PATH --to=DIR --format=huggingface

PATH is an id of the Hugging Face hub, which is downloaded, owner/name or owner/name@revision, or a
Hugging Face directory (config.json, model.safetensors, vocab.txt), also one of
sentence-transformers (modules.json), or a run. It may be a Google release or the prefix of a
fine-tuned TensorFlow checkpoint (bert_config.json, vocab.txt, DIR/model.ckpt-343), or a keras-hub
BERT preset (directory or name). The head of a fine-tuned model is converted too: the run can be
evaluated, exported and loaded.
"""

import dataclasses
import os

from bert_tf.conversion import growth
from bert_tf.errors import UserError
from bert_tf.runs.run import check_free
from bert_tf.storage import files
from bert_tf.system import command
from bert_tf.weights import heads, sources


@dataclasses.dataclass(frozen=True)
class ConvertSettings:
    """Settings of bert-tf convert, one per flag."""

    from_: str = command.flag("pretrained weights or run to read, or an id of the Hugging Face hub")
    to: str = command.flag("run directory, or directory of another format, to create")
    format: str = command.flag(
        "output format",
        "run",
        choices=("run", "huggingface", "google", "keras", "sentence-transformers"),
    )
    do_lower_case: bool | None = command.flag(
        "lower-casing of text; default: as in the source", None
    )
    labels: tuple[str, ...] = command.flag(
        "names of a classifier's labels, in the order of its outputs; default: as in the source, "
        "else numbers from 0",
        (),
    )
    pairs: bool = command.flag("a sequence classifier reads pairs of texts", False)
    config_file: str | None = command.flag(
        "bert_config.json of a TensorFlow checkpoint; default: in its directory or one level up",
        None,
    )
    vocab_file: str | None = command.flag(
        "vocab.txt of a TensorFlow checkpoint; default: in its directory or one level up", None
    )
    add_tokens: str | None = command.flag(
        "file of words to add to the vocabulary, one per line", None
    )
    extend_positions: int | None = command.flag(
        "new number of positions; more than before", None, bounds={">=": 1}
    )
    verify_python: str | None = command.flag(
        "Python interpreter with torch and transformers, which runs the result for comparison", None
    )

    def __post_init__(self) -> None:
        command.check_bounds(self)
        if self.verify_python and self.format != "huggingface":
            raise UserError(
                f"--verify_python: expected --format=huggingface. Received: --format={self.format}"
            )
        if self.format != "run":
            if files.is_remote(self.to):
                raise UserError(f"--to={self.to}: expected a directory of this machine")
            if os.path.lexists(self.to):
                raise UserError(f"{self.to}: exists; name a new directory")
        elif not files.is_remote(self.to):
            check_free(self.to)

    def check(self) -> None:
        """Check the source and the words without TensorFlow; raises UserError."""
        sources.check(
            self.from_, self.config_file, self.vocab_file, labels=self.labels, pairs=self.pairs
        )
        if self.add_tokens and not files.is_remote(self.add_tokens):
            growth.read_words(self.add_tokens)


def main(settings: ConvertSettings) -> None:
    """Convert the weights, check what was written, and log its size and origin."""
    from bert_tf.conversion import checked_conversion, exported_model

    pretrained = sources.read_pretrained(
        settings.from_,
        settings.do_lower_case,
        config_file=settings.config_file,
        vocab_file=settings.vocab_file,
        labels=settings.labels,
        pairs=settings.pairs,
    )
    _check_flags_of_head(pretrained, settings)
    pretrained = _grown(pretrained, settings)
    if settings.format == "run":
        report = checked_conversion.save_run(pretrained, settings.to)
    else:
        model = exported_model.from_pretrained(pretrained, settings.from_)
        report = checked_conversion.convert(
            model, settings.to, settings.format, settings.verify_python
        )
    for line in checked_conversion.summary(report):
        command.log(line)
    config = pretrained.config
    command.log(
        f"{settings.to}: {report['parameters']:,} parameters in {report['tensors']} tensors from "
        f"{pretrained.origin}; {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {config.hidden_act}, "
        f"{'uncased' if config.do_lower_case else 'cased'}; heads: "
        f"{', '.join(pretrained.heads) or 'none'}"
        + (f"; task {pretrained.run_task['kind']}" if pretrained.run_task else "")
    )


def _check_flags_of_head(pretrained: sources.PretrainedWeights, settings: ConvertSettings) -> None:
    """Raise UserError if --labels or --pairs is given, but the weights' head cannot use it."""
    task = pretrained.task
    found = f"the head of task {task['kind']}" if task else "no head of a task"
    for flag, is_used in (
        ("labels", task is not None and "labels" in task),
        ("pairs", task is not None and heads.reads_pairs(task)),
    ):
        if getattr(settings, flag) and not is_used:
            raise UserError(
                f"--{flag}: expected weights with a head that fits it. Received: "
                f"{pretrained.origin}, with {found}. Correct the flag or omit it."
            )


def _grown(
    pretrained: sources.PretrainedWeights, settings: ConvertSettings
) -> sources.PretrainedWeights:
    """Return the weights with the words and positions that the settings ask for."""
    if settings.add_tokens:
        words = growth.read_words(settings.add_tokens)
        pretrained, added = growth.add_tokens(pretrained, words, settings.add_tokens)
        command.log(f"{settings.add_tokens}: {added}")
    if settings.extend_positions:
        pretrained = growth.extend_positions(pretrained, settings.extend_positions)
    return pretrained


if __name__ == "__main__":
    command.run_main(main, ConvertSettings, __doc__)
