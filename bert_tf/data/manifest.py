"""The manifest of a folder of shards: what they were made of, and what they have to be.

SHARDS/manifest.json                         this
SHARDS/vocab.txt                             the vocabulary they were made with
SHARDS/examples-00007-of-00064.tfrecord      a shard
SHARDS/.examples-00007-of-00064.json         its entry, until the manifest is complete
"""

import concurrent.futures
import hashlib
import json
import os
import platform
from importlib import metadata

from bert_tf import files
from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.strict_json import field
from bert_tf.text.vocabulary import Vocabulary

NAME = "manifest.json"
MAX_SEQ_LENGTH = 1 << 16
VOCABULARY_NAME = "vocab.txt"
_MEND = "delete it and give the write_shards command again, which makes what is missing"
_PACKAGES = ("numpy", "tensorflow", "tensorflow-text", "nupunkt")


def shard_name(number, num_shards):
    return f"examples-{number:05d}-of-{num_shards:05d}.tfrecord"


def entry_name(number, num_shards):
    return f".{shard_name(number, num_shards).removesuffix('.tfrecord')}.json"


class Manifest:
    """The values of a manifest.json, and the folder it lies in."""

    def __init__(self, directory, values):
        self.directory, self.values = str(directory), values

    @classmethod
    def plan(cls, directory, settings, vocabulary, tokenizer, corpus):
        """A manifest before the first shard: all that decides their bytes."""
        return cls(
            directory,
            {
                "complete": False,
                "settings": settings.recorded(),
                "vocabulary": {"sha256": vocabulary.sha256, "entries": len(vocabulary)},
                "tokenizer": tokenizer,
                "corpus": corpus,
                "versions": {
                    "python": platform.python_version(),
                    **{package: metadata.version(package) for package in _PACKAGES},
                },
                "input": list(settings.input),
            },
        )

    @classmethod
    def load(cls, directory):
        """Raises UserError where there is none, or none that can be read."""
        path = os.path.join(directory, NAME)
        if not files.exists(path):
            raise UserError(
                f"{path}: no such file, wanted a folder that bert_tf.write_shards made; shards of "
                "other programs get a manifest by bert_tf.inspect_shards --write_manifest"
            )
        try:
            values = read_json_object(path)
            _check(values, path)
        except UserError as error:
            what = str(error).removeprefix(f"{path}: ")
            raise UserError(f"{path}: damaged ({what}); write the shards again") from None
        return cls(directory, values)

    def save(self):
        text = json.dumps(self.values, indent=1, ensure_ascii=False) + "\n"
        files.atomic_write_text(self.path(NAME), text)

    def path(self, name):
        return os.path.join(self.directory, name)

    @property
    def settings(self):
        return self.values["settings"]

    def save_vocabulary(self, vocabulary):
        files.atomic_write_text(self.path(VOCABULARY_NAME), vocabulary.to_bytes().decode("utf-8"))

    def vocabulary(self):
        """The folder's own vocab.txt. Raises UserError if it is not the one of the shards."""
        path = self.path(VOCABULARY_NAME)
        if not files.exists(path):
            raise UserError(f"{path}: no such file; put the vocab.txt of these shards there")
        try:
            text = files.read_text(path)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
        vocabulary = Vocabulary(text.removesuffix("\n").split("\n"), where=path)
        if vocabulary.sha256 != self.values["vocabulary"]["sha256"]:
            raise UserError(
                f"{path}: {len(vocabulary)} entries, not the vocabulary that the shards were made "
                f"with ({self.values['vocabulary']['entries']} entries)"
            )
        return vocabulary

    @property
    def shards(self):
        """Of each shard {"file", "records", "bytes", "sha256", ...}."""
        return self.values["shards"]

    @property
    def num_examples(self):
        return sum(entry["records"] for entry in self.shards)

    @property
    def sha256(self):
        """Of what trains: equal for equal shards, however they were made."""
        return hashlib.sha256(
            "".join(entry["sha256"] for entry in self.shards).encode()
        ).hexdigest()

    @property
    def plan_sha256(self):
        """Of all that decides the shards' bytes; an entry of another plan is of other shards."""
        names = ("settings", "vocabulary", "tokenizer", "corpus", "versions")
        plan = json.dumps([self.values[name] for name in names], sort_keys=True)
        return hashlib.sha256(plan.encode()).hexdigest()

    def check_same_plan(self, planned):
        """Raises UserError naming what differs between this, on disk, and what is asked for now."""
        before, now = self.settings, planned.settings
        for name in sorted(set(before) | set(now)):
            if before.get(name) != now.get(name):
                raise UserError(
                    f"--{name}: was {before.get(name)!r} when {self.directory} began, is "
                    f"{now.get(name)!r}; give the old value to go on, or a new --output_dir"
                )
        for name, what in (
            ("vocabulary", "--vocab: the vocabulary"),
            ("tokenizer", "--do_lower_case, --strip_accents: the tokenizer"),
            ("corpus", "--input: the text"),
        ):
            if self.values[name] != planned.values[name]:
                raise UserError(
                    f"{what} is not the one that {self.directory} began with "
                    f"({self.values[name]}, now {planned.values[name]}); name a new --output_dir"
                )

    def check_same_versions(self, planned):
        """Raises UserError naming a package of another version than made the first shards."""
        before, now = self.values["versions"], planned.values["versions"]
        for name in now:
            if before.get(name) != now[name]:
                raise UserError(
                    f"{self.directory}: begun with {name} {before.get(name)}, here is {now[name]}, "
                    "which may make other bytes; install the former, or name a new --output_dir"
                )

    def check_complete(self):
        if not self.values["complete"]:
            raise UserError(
                f"{self.path(NAME)}: not complete; the write_shards command that began it makes "
                "the shards that are missing"
            )

    def check_files(self, hashes=True):
        """Raises UserError naming the first shard that is missing, cut short, or altered."""
        self.check_complete()
        for entry in self.shards:
            path = self.path(entry["file"])
            found = files.size(path)
            if found != entry["bytes"]:
                has = "no such file" if found is None else f"{found} bytes"
                raise UserError(f"{path}: {has}, wanted {entry['bytes']} bytes; {_MEND}")
        extra = {name for name in files.listdir(self.directory) if name.endswith(".tfrecord")} - {
            entry["file"] for entry in self.shards
        }
        if extra:
            raise UserError(f"{self.path(min(extra))}: is not in {NAME}; take it out of the folder")
        if hashes:
            self._check_hashes()

    def _check_hashes(self):
        paths = [self.path(entry["file"]) for entry in self.shards]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            for entry, path, found in zip(
                self.shards, paths, threads.map(files.sha256, paths), strict=True
            ):
                if found != entry["sha256"]:
                    raise UserError(
                        f"{path}: its content is not what was written (sha256 {found[:12]}..., "
                        f"wanted {entry['sha256'][:12]}...); {_MEND}"
                    )


def _check(values, path):
    """Raises UserError where something that is read from a manifest is missing or cannot be."""
    settings = field(values, "settings", dict, path)
    vocabulary = field(values, "vocabulary", dict, path)
    _check_size(settings, "max_seq_length", f"{path}: settings", minimum=1, maximum=MAX_SEQ_LENGTH)
    _check_size(settings, "max_predictions_per_seq", f"{path}: settings", maximum=MAX_SEQ_LENGTH)
    _check_size(vocabulary, "entries", f"{path}: vocabulary", minimum=1)
    field(vocabulary, "sha256", str, f"{path}: vocabulary")
    masking = field(settings, "masking", str, f"{path}: settings")
    if masking not in ("static", "dynamic"):
        raise UserError(f"{path}: masking is {masking!r:.40}, wanted static or dynamic")
    if masking == "dynamic":
        field(settings, "masked_lm_prob", float, f"{path}: settings")
        for name in ("whole_word_mask", "replace_with_any"):
            field(settings, name, bool, f"{path}: settings")
    if values.get("tokenizer"):  # Shards of other programs have none.
        tokenizer = field(values, "tokenizer", dict, path)
        field(tokenizer, "do_lower_case", bool, f"{path}: tokenizer")
    if "corpus" in values:  # Then all that plan_sha256 is of.
        for name in ("corpus", "tokenizer", "versions"):
            field(values, name, dict, path)
    is_complete = field(values, "complete", bool, path)
    if not is_complete and "shards" not in values:
        return
    shards = field(values, "shards", list, path)
    if is_complete and not shards:
        raise UserError(f"{path}: shards holds none")
    for number, entry in enumerate(shards):
        check_entry(entry, f"{path}: shards[{number}]")


def check_entry(entry, location):
    """Raises UserError naming the place where what a manifest holds of a shard cannot be."""
    name = field(entry, "file", str, location)
    if name != os.path.basename(name) or "tfrecord" not in name:
        raise UserError(f"{location}: file is {name!r:.40}, wanted the name of a TFRecord file")
    field(entry, "sha256", str, location)
    for size in ("records", "bytes", "tokens", "random_next"):
        _check_size(entry, size, location)


def _check_size(node, name, location, minimum=0, maximum=1 << 62):
    size = field(node, name, int, location)
    if not minimum <= size <= maximum:
        raise UserError(f"{location}: {name} is {size}, wanted {minimum} to {maximum}")
