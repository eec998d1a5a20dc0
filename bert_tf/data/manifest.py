"""Manifest of pretraining shards: settings, versions, and size and SHA-256 of each shard.

SHARDS/manifest.json                         the manifest
SHARDS/vocab.txt                             the vocabulary of the shards
SHARDS/examples-00007-of-00064.tfrecord      a shard; see `bert_tf.data.sharded_output`
"""

import concurrent.futures
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from bert_tf.config import TOKENIZER_SETTINGS, read_json_object
from bert_tf.data.settings import MASK_SETTINGS, WriteShardsSettings
from bert_tf.data.sharded_output import NAME, Entry, ShardManifest, check_size, shard_names
from bert_tf.errors import UserError
from bert_tf.storage import files, format_versions
from bert_tf.storage.strict_json import field
from bert_tf.system import command
from bert_tf.system.processes import count_processors
from bert_tf.system.progress import Progress
from bert_tf.system.versions import versions
from bert_tf.text.vocabulary import Vocabulary, placeholder

MAX_NAME_LENGTH = 255
MAX_SEQ_LENGTH = 1 << 16
VOCABULARY_NAME = "vocab.txt"
MAX_RANDOM_NEXT = 0.9  # About 0.5 in text of several sentences per document, 0.67 with two.
_REMEDY = "delete it and rerun the write_shards command to write it again"
_FIELDS = (
    *("complete", "settings", "vocabulary", "tokenizer", "corpus", "versions", "input", "shards"),
)
_PACKAGES = ("numpy", "tensorflow", "tensorflow-text", "nupunkt")


class Manifest(ShardManifest):
    """Manifest of pretraining shards, built by `planned`, `describe` or `load`."""

    CONTENT: ClassVar[str] = "text"
    # Records, one per example; bytes; tokens without padding; and examples with a random next
    # segment. Entries of write_shards also have the number of "documents".
    SIZES: ClassVar[tuple[str, ...]] = ("records", "bytes", "tokens", "random_next")

    def __init__(
        self,
        directory: str | os.PathLike,
        values: dict[str, Any],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__(directory, values)
        self._vocabulary = vocabulary  # Saved with a planned manifest.

    @classmethod
    def planned(
        cls,
        directory: str | os.PathLike,
        settings: WriteShardsSettings,
        vocabulary: Vocabulary,
        tokenizer: dict[str, Any],
        corpus: dict[str, Any],
    ) -> Self:
        """Build the manifest before any shard is written: all that determines their content.

        `tokenizer` are its settings and the SHA-256 of its Unicode tables, `corpus` the number of
        documents and their SHA-256.
        """
        return cls(
            directory,
            {
                "complete": False,
                "settings": settings.recorded(),
                "vocabulary": _identity(vocabulary),
                "tokenizer": tokenizer,
                "corpus": corpus,
                "versions": versions(_PACKAGES),
                "input": list(settings.input),
            },
            vocabulary,
        )

    @classmethod
    def describe(
        cls,
        directory: str | os.PathLike,
        vocabulary: Vocabulary,
        max_seq_length: int,
        max_predictions_per_seq: int,
        shards: Iterable[Entry],
    ) -> Self:
        """Build the manifest of complete shards of another program; lengths are with padding."""
        return cls(
            directory,
            {
                "complete": True,
                "settings": {
                    "max_seq_length": max_seq_length,
                    "max_predictions_per_seq": max_predictions_per_seq,
                    "masking": "static",
                },
                "vocabulary": _identity(vocabulary),
                "shards": list(shards),
            },
        )

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Read the manifest of a directory; raises UserError if it is missing or damaged."""
        path = os.path.join(directory, NAME)
        if not files.exists(path):
            raise UserError(
                f"{path}: no such file; expected a directory written by bert-tf write_shards (for "
                "shards of other programs, run bert-tf inspect_shards --write_manifest)"
            )
        try:
            values = read_json_object(path)
            _check(values, path)
        except UserError as error:
            what = str(error).removeprefix(f"{path}: ")
            raise UserError(f"{path}: damaged ({what}); write the shards again") from None
        return cls(directory, format_versions.without_version(values, path, _FIELDS))

    def save(self, finished: Mapping[int, Entry]) -> None:
        """Save the manifest and the vocabulary of the shards; see `ShardManifest.save`."""
        super().save(finished)
        if self._vocabulary and (
            not self.is_complete or VOCABULARY_NAME not in files.listdir(self.directory)
        ):
            self._vocabulary.save(self.path(VOCABULARY_NAME))

    @property
    def shard_names(self) -> list[str]:
        """File names of all shards."""
        return shard_names("examples", self.settings["num_shards"], "tfrecord")

    @property
    def plan(self) -> list[Any]:
        """All that determines the content of the shards."""
        names = ("settings", "vocabulary", "tokenizer", "corpus", "versions")
        return [self._values[name] for name in names]

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """Tokenizer settings, or `None` for shards of other programs."""
        return self._values.get("tokenizer")

    @property
    def corpus(self) -> dict[str, Any]:
        """Number of documents and SHA-256 of the text; empty for shards of other programs."""
        return self._values.get("corpus", {})

    @property
    def vocab_size(self) -> int:
        """Number of entries of the vocabulary."""
        return self._values["vocabulary"]["entries"]

    @property
    def vocabulary_sha256(self) -> str:
        """SHA-256 of the vocabulary."""
        return self._values["vocabulary"]["sha256"]

    def has(self, vocabulary: Vocabulary) -> bool:
        """Return whether a vocabulary is that of the shards, perhaps with placeholders at its end.

        Those are of the further rows of an embedding table.
        """
        if vocabulary.sha256 == self.vocabulary_sha256:
            return True
        if len(vocabulary) <= self.vocab_size:
            return False
        further = map(placeholder, range(self.vocab_size, len(vocabulary)))
        return vocabulary.lines == (*self.vocabulary().lines, *further)

    def vocabulary(self) -> Vocabulary:
        """Read the vocab.txt in the directory; raises UserError if it is not that of the shards."""
        path = self.path(VOCABULARY_NAME)
        if not files.exists(path):
            raise UserError(f"{path}: no such file; copy the vocab.txt of these shards there")
        vocabulary = Vocabulary.load(path)
        if vocabulary.sha256 != self.vocabulary_sha256:
            raise UserError(
                f"{path}: {len(vocabulary)} entries, not the vocabulary of the shards "
                f"({self.vocab_size} entries)"
            )
        return vocabulary

    @property
    def num_examples(self) -> int:
        """Number of examples in all shards."""
        return sum(entry["records"] for entry in self.shards)

    @property
    def has_next_sentence(self) -> bool:
        """Whether the examples are pairs of segments with a label."""
        return self.settings.get("next_sentence", True)

    @property
    def random_next(self) -> float:
        """Fraction of the examples with a random next segment."""
        return sum(entry["random_next"] for entry in self.shards) / max(self.num_examples, 1)

    def warnings(self, allows_unknown: bool = False) -> list[str]:
        """Return one line per fault of the text and its examples; see `TokenCounts.warnings`."""
        of_examples = self.next_sentence_warning()
        of_tokens = self.token_counts.warnings(self.directory, allows_unknown)
        return [*of_tokens, *filter(None, [of_examples])]

    def next_sentence_warning(self) -> str | None:
        """Return a warning with the likely cause if almost every next segment is random."""
        if self.random_next <= MAX_RANDOM_NEXT:
            return None
        input_format = self.settings.get("input_format")  # `None` for shards of other programs.
        passes = self.settings.get("dupe_factor", 1)
        documents = self.corpus.get("documents")
        if documents and self.num_examples > 1.5 * documents * passes:
            cause = "most sentences are longer than --max_seq_length; " + (
                "write one sentence per line"
                if input_format == "lines"
                else "they are split at full stops"
            )
        else:
            cause = "most documents have one sentence; " + {
                "lines": "blank lines separate documents, not sentences",
                "text": "each file is one document (see --input_format)",
                "jsonl": "each line is one document, with all sentences of a text",
            }.get(input_format or "", "a document needs several")
        return (
            f"{self.directory}: {self.random_next:.1%} random next, expected about 50%: next "
            f"sentence prediction cannot be learned from these examples, since {cause}; for texts "
            "of one sentence use --next_sentence=false of write_shards"
        )

    @property
    def sha256(self) -> str:
        """SHA-256 of the shards' content: equal for equal shards, however they were written."""
        digests = "".join(entry["sha256"] for entry in self.shards)
        return hashlib.sha256(digests.encode()).hexdigest()

    @property
    def masks(self) -> dict[str, Any] | None:
        """Settings of the masks that training draws, or `None` if the shards contain the masks."""
        if self.settings["masking"] == "static":
            return None
        return {name: self.settings[name] for name in MASK_SETTINGS}

    def check_same_plan(self, planned: Self) -> None:
        """Check settings, vocabulary, tokenizer and text; see `ShardManifest.check_same_plan`."""
        format_versions.check_same_settings(
            self.directory,
            self.settings,
            planned.settings,
            command.defaults(WriteShardsSettings),
        )
        tokenizer_flags = ", ".join(f"--{name}" for name in TOKENIZER_SETTINGS)
        for name, what in (
            ("vocabulary", "--vocab: the vocabulary"),
            ("tokenizer", f"{tokenizer_flags}: the tokenizer"),
            ("corpus", "--input: the text"),
        ):
            before, now = self._values.get(name), planned._values.get(name)
            if before != now:
                raise UserError(
                    f"{what} is not that of {self.directory}. Expected: {before}. "
                    f"Received: {now}. Name a new --output_dir."
                )

    @classmethod
    def check_entry(cls, entry: Any, location: str) -> Entry:
        """Return the entry of a shard; see `ShardManifest.check_entry`."""
        entry = super().check_entry(entry, location)
        name = entry["file"]
        if name != os.path.basename(name) or "tfrecord" not in name or len(name) > MAX_NAME_LENGTH:
            raise UserError(
                f"{location}: file is {name!r:.40}; expected the name of a TFRecord file"
            )
        return entry

    def check_complete(self) -> None:
        """Raise `UserError` if shards are missing."""
        if not self.is_complete:
            raise UserError(
                f"{self.path(NAME)}: not complete; rerun the write_shards command to write the "
                "missing shards"
            )

    def check_files(
        self,
        log: Callable[[str], None] = lambda line: None,
        verified: Mapping[str, Any] | None = None,
    ) -> dict[str, list[Any]]:
        """Check that all shards are as they were written, by their sizes and SHA-256.

        All bytes are read, except for shards of the same size and modification time as in
        `verified`, what an earlier call returned.

        Returns:
            Size in bytes, modification time in ns and SHA-256 of each shard, by path.

        Raises:
            UserError: If a shard is missing, truncated, altered or not in the manifest. The
                message names the first one.
        """
        self.check_complete()
        found: dict[str, list[Any]] = {}
        for entry in self.shards:
            path = self.path(entry["file"])
            size, changed = files.stamp(path) if files.exists(path) else (None, None)
            if size != entry["bytes"]:
                has = "no such file" if size is None else content_fault(path) or f"{size} bytes"
                raise UserError(f"{path}: {has}; expected {entry['bytes']} bytes; {_REMEDY}")
            found[path] = [size, changed, entry["sha256"]]
        extra = {name for name in files.listdir(self.directory) if name.endswith(".tfrecord")} - {
            entry["file"] for entry in self.shards
        }
        if extra:
            raise UserError(
                f"{self.path(min(extra))}: is not in {NAME}; remove it from the directory"
            )
        known = verified or {}
        _check_hashes({path: of for path, of in found.items() if known.get(path) != of}, log)
        return found


def content_fault(path: str | os.PathLike) -> str | None:
    """Return why a file cannot have TFRecords, because it is empty or compressed, or `None`."""
    with files.open_file(path) as stream:
        head = stream.read(64)
    try:
        zlib.decompressobj(wbits=47).decompress(head)  # After a header of gzip or zlib.
    except zlib.error:
        return None
    return "compressed with gzip or zlib" if head else "0 bytes"


def _check_hashes(shards, log):
    """Read shards and compare their SHA-256 with those of `Manifest.check_files`."""
    megabytes = sum(size for size, _, _ in shards.values()) / 1e6
    # Threads help, since hashlib releases the global interpreter lock.
    with (
        Progress(log, "MB", round(megabytes)) as progress,
        concurrent.futures.ThreadPoolExecutor(count_processors()) as threads,
    ):
        done = 0
        for (path, (size, _, expected)), found in zip(
            shards.items(), threads.map(files.sha256, shards), strict=True
        ):
            if found != expected:
                raise UserError(
                    f"{path}: content was altered (expected SHA-256 {expected[:12]}..., "
                    f"received {found[:12]}...); {_REMEDY}"
                )
            done += size
            progress.update(round(done / 1e6))


def _identity(vocabulary):
    return {"sha256": vocabulary.sha256, "entries": len(vocabulary)}


def _check(values, path):
    """Raise `UserError` if an entry of a manifest is missing or invalid."""
    settings = field(values, "settings", dict, path)
    vocabulary = field(values, "vocabulary", dict, path)
    # Only settings that are read later are checked: those of `describe` have no others.
    for name, minimum in (("max_seq_length", 1), ("max_predictions_per_seq", 0)):
        check_size(settings, name, f"{path}: settings", minimum, MAX_SEQ_LENGTH)
    check_size(vocabulary, "entries", f"{path}: vocabulary", minimum=1)
    field(vocabulary, "sha256", str, f"{path}: vocabulary")
    if "next_sentence" in settings:
        field(settings, "next_sentence", bool, f"{path}: settings")
    masking = field(settings, "masking", str, f"{path}: settings")
    if masking not in ("static", "dynamic"):
        raise UserError(f"{path}: masking is {masking!r:.40}; expected static or dynamic")
    if masking == "dynamic":
        field(settings, "masked_lm_prob", float, f"{path}: settings")
        for name in ("whole_word_mask", "replace_with_any"):
            field(settings, name, bool, f"{path}: settings")
    if values.get("tokenizer"):  # Shards of other programs have none.
        tokenizer = field(values, "tokenizer", dict, path)
        field(tokenizer, "do_lower_case", bool, f"{path}: tokenizer")
        if tokenizer.get("strip_accents") is not None:
            field(tokenizer, "strip_accents", bool, f"{path}: tokenizer")
        field(tokenizer, "max_input_chars_per_word", int, f"{path}: tokenizer")
    if "corpus" in values:  # Then all inputs of `plan_sha256` are required.
        for name in ("corpus", "tokenizer", "versions"):
            field(values, name, dict, path)
    is_complete = field(values, "complete", bool, path)
    if not is_complete and "shards" not in values:
        return
    shards = field(values, "shards", list, path)
    if is_complete and not shards:
        raise UserError(f"{path}: shards is empty")
    for number, entry in enumerate(shards):
        Manifest.check_entry(entry, f"{path}: shards[{number}]")
