"""Checks a folder of pretraining shards, tells how its examples are distributed, shows some.

    python -m bert_tf.inspect_shards --shards=SHARDS --vocab=vocab.txt

--write_manifest first writes the manifest of shards that another program made with the released
features.
"""

import dataclasses

from bert_tf import command, files
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class InspectShardsSettings:
    shards: str = command.flag("folder of shards")
    vocab: str | None = command.flag(
        "vocab.txt that they were made with; by default the one beside them", None
    )
    num_examples: int = command.flag("examples to show", 3)
    write_manifest: bool = command.flag(
        "write the manifest of shards that google-research/bert or others made",
        False,
        former_name="adopt",
    )

    def __post_init__(self):
        if self.num_examples < 0:
            raise UserError(f"--num_examples={self.num_examples}: wanted at least 0")
        if self.write_manifest and not self.vocab:
            raise UserError(
                "--write_manifest: wants --vocab, the vocab.txt that the shards were made with"
            )

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        if self.vocab and not files.is_remote(self.vocab):
            Vocabulary.load(self.vocab)
        if not self.write_manifest and not files.is_remote(self.shards):
            Manifest.load(self.shards)


def main(settings):
    from bert_tf.data import inspection

    vocabulary = Vocabulary.load(settings.vocab) if settings.vocab else None
    if settings.write_manifest:
        manifest = inspection.write_manifest(settings.shards, vocabulary)
    else:
        manifest = Manifest.load(settings.shards)
    vocabulary = vocabulary or manifest.vocabulary()
    statistics = inspection.inspect(manifest, vocabulary, command.log)
    print(f"{settings.shards}: {len(manifest.shards)} shards are as they were written")
    for line in statistics.lines(manifest.settings["max_seq_length"]):
        print(line)
    for example in inspection.first_examples(manifest, settings.num_examples):
        print()
        for line in inspection.format_example(example, vocabulary):
            print(line)


if __name__ == "__main__":
    command.run_main(main, InspectShardsSettings, __doc__)
