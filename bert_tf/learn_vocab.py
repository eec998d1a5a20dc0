"""Learn a WordPiece vocabulary from raw text.

    bert-tf learn_vocab --input=GLOB[,GLOB] --output=vocab.txt

Input files are UTF-8, plain or gzip. [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4. The result is
deterministic. Every 100th line is held out to measure pieces per word and [UNK] on new text.
"""

import dataclasses

from bert_tf.data import documents
from bert_tf.errors import UserError
from bert_tf.storage import files, ownership, paths
from bert_tf.system import command
from bert_tf.text.vocabulary import SPECIALS


@dataclasses.dataclass(frozen=True)
class LearnVocabSettings:
    """Settings of bert-tf learn_vocab, one per flag."""

    input: tuple[str, ...] = command.flag("text files or globs")
    output: str = command.flag("vocab.txt to write")
    vocab_size: int = command.flag("exact number of entries", 30522, bounds={">": len(SPECIALS)})
    do_lower_case: bool = command.flag("lower-casing of text", True)
    strip_accents: bool | None = command.flag(
        "removal of accents; default: as --do_lower_case", None
    )
    input_format: str = command.flag(
        "lines or text: one sentence or paragraph per line; jsonl: one object per line",
        "lines",
        choices=documents.FORMATS,
    )
    text_field: str = command.flag("key of the text in jsonl", "text")
    overwrite: bool = command.flag("replacement of an existing --output file", False)

    def __post_init__(self) -> None:
        command.check_bounds(self)
        if not self.input:
            raise UserError("--input: expected text files or globs")
        # Remote patterns are expanded later, since this needs TensorFlow.
        local = [pattern for pattern in self.input if not files.is_remote(pattern)]
        found = documents.find_files(local) if local else []
        paths.check_output(self.output, [*found, *self.input], self.overwrite)


def main(settings: LearnVocabSettings) -> None:
    """Learn the vocabulary and write it atomically."""
    from bert_tf.data.vocabulary_learning import learn

    with ownership.sole_output(settings.output, settings.overwrite):
        vocabulary = learn(
            documents.find_files(settings.input),
            settings.input_format,
            settings.text_field,
            settings.vocab_size,
            settings.do_lower_case,
            settings.strip_accents,
            command.log,
        )
        vocabulary.save(settings.output)
    command.log(f"{settings.output}: {len(vocabulary):,} entries")


if __name__ == "__main__":
    command.run_main(main, LearnVocabSettings, __doc__)
