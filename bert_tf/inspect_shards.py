"""Verify pretraining shards, print statistics and the first examples.

    bert-tf inspect_shards --shards=SHARDS --vocab=vocab.txt

With --write_manifest, shards from google-research/bert or another program with the same features
get a manifest first.
"""

import dataclasses

from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system import command
from bert_tf.text.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class InspectShardsSettings:
    """Settings of bert-tf inspect_shards, one per flag."""

    shards: str = command.flag("directory of shards")
    vocab: str | None = command.flag(
        "vocab.txt of the shards; default: the one in their directory", None
    )
    num_examples: int = command.flag("number of examples to print", 3, bounds={">=": 0})
    write_manifest: bool = command.flag(
        "write the manifest of shards from google-research/bert or another program",
        False,
    )

    def __post_init__(self) -> None:
        command.check_bounds(self)
        if self.write_manifest and not self.vocab:
            raise UserError("--write_manifest: requires --vocab, the vocab.txt of the shards")

    def check(self) -> None:
        """Check local files without TensorFlow; raises UserError."""
        if self.vocab and not files.is_remote(self.vocab):
            Vocabulary.load(self.vocab)
        if not self.write_manifest and not files.is_remote(self.shards):
            Manifest.load(self.shards)


def main(settings: InspectShardsSettings) -> None:
    """Verify the shards and print statistics and examples."""
    from bert_tf.data import inspection

    vocabulary = Vocabulary.load(settings.vocab) if settings.vocab else None
    if settings.write_manifest and vocabulary:
        manifest = inspection.write_manifest(settings.shards, vocabulary)
    else:
        manifest = Manifest.load(settings.shards)
    vocabulary = vocabulary or manifest.vocabulary()
    statistics = inspection.inspect(manifest, vocabulary, command.log)
    print(f"{settings.shards}: {len(manifest.shards)} shards verified")
    for line in statistics.lines(manifest.settings["max_seq_length"]):
        print(line)
    for warning in manifest.warnings(allows_unknown=True):
        command.log(f"warning: {warning}")
    for example in inspection.first_examples(manifest, settings.num_examples):
        print()
        for line in inspection.format_example(example, vocabulary):
            print(line)


if __name__ == "__main__":
    command.run_main(main, InspectShardsSettings, __doc__)
