"""Learns a vocabulary of WordPiece from raw text, with this project's normalization.

    python -m bert_tf.learn_vocab --input=GLOB[,GLOB] --output=vocab.txt

The files are UTF-8, plain or gzip. [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4; the same text
gives the same file. Every 100th line is held out, to tell what the vocabulary makes of it.
"""

import dataclasses

from bert_tf import command, files, ownership, paths
from bert_tf.data import documents
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import SPECIALS


@dataclasses.dataclass(frozen=True)
class LearnVocabSettings:
    input: tuple[str, ...] = command.flag("files of text, or globs of them")
    output: str = command.flag("vocab.txt to write")
    vocab_size: int = command.flag("entries, exactly", 30522)
    do_lower_case: bool = command.flag("lower-case the text", True)
    strip_accents: bool | None = command.flag(
        "take accents off; by default where the text is lower-cased", None
    )
    input_format: str = command.flag(
        "lines and text: a sentence or paragraph a line; jsonl: an object a line",
        "lines",
        choices=documents.FORMATS,
    )
    text_field: str = command.flag("key of the text in jsonl", "text")
    overwrite: bool = command.flag("replace the file of --output", False)

    def __post_init__(self):
        if self.vocab_size <= len(SPECIALS):
            raise UserError(f"--vocab_size={self.vocab_size}: wanted over {len(SPECIALS)}")
        if not self.input:
            raise UserError("--input: wanted files of text, or globs of them")
        # What is remote is looked for later, since that needs TensorFlow.
        local = [pattern for pattern in self.input if not files.is_remote(pattern)]
        found = documents.find_files(local) if local else []
        paths.check_output(self.output, [*found, *self.input], self.overwrite)


def main(settings):
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
        files.atomic_write_text(settings.output, vocabulary.to_bytes().decode())
    command.log(f"{settings.output}: {len(vocabulary):,} entries")


if __name__ == "__main__":
    command.run_main(main, LearnVocabSettings, __doc__)
