"""From text to shards: indexes the documents, deals them out, has the shards made.

This process imports no TensorFlow (for paths without "://"): its workers do.
"""

import contextlib
import datetime
import os
import re
import time

from bert_tf import files, ownership
from bert_tf.config import read_json_object
from bert_tf.data import documents, sharding
from bert_tf.data.manifest import (
    NAME,
    VOCABULARY_NAME,
    Manifest,
    check_entry,
    entry_name,
    shard_name,
)
from bert_tf.errors import UserError
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

SPILL = ".unpacked"


def write_shards(settings, log=lambda line: None):
    """Makes the shards that WriteShardsSettings say, or those still missing; returns the Manifest.

    `log` takes lines of progress. Raises UserError on input that cannot be used, or where the
    folder holds shards of other settings.
    """
    vocabulary = Vocabulary.load(settings.vocab)
    lower = settings.do_lower_case
    lower = not vocabulary.looks_cased() if lower is None else lower
    tokenizer = {"do_lower_case": lower, "strip_accents": settings.strip_accents}
    directory = settings.output_dir
    is_here = not files.is_remote(directory)
    paths = documents.find_files(settings.input, os.path.realpath(directory) if is_here else None)
    _check_directory(directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ownership.sole_writer(directory))
        spill_dir = os.path.join(directory, SPILL)
        stack.callback(files.remove_own, spill_dir, re.compile(r"\d+"))

        log(f"indexing {len(paths)} files, {'lower-casing' if lower else 'cased'}")
        began, stamps = time.monotonic(), [files.stamp(path) for path in paths]
        index = documents.index(paths, settings.input_format, settings.text_field, spill_dir)
        num_bytes = int(index.lengths.sum())
        log(
            f"{len(index):,} documents, {num_bytes / 1e6:.1f} MB of text "
            f"({num_bytes / 1e6 / max(time.monotonic() - began, 1e-3):.0f} MB/s)"
        )
        sharding.check(index, settings)
        manifest = Manifest.plan(
            directory,
            settings,
            vocabulary,
            {**tokenizer, "tables_sha256": unicode_tables.sha256()},
            {"documents": len(index), "sha256": index.sha256},
        )
        entries = finished_entries(manifest, settings.num_shards)
        missing = [number for number in range(settings.num_shards) if number not in entries]
        if not missing:
            if VOCABULARY_NAME not in files.listdir(directory):
                manifest.save_vocabulary(vocabulary)
            complete(manifest, entries, settings.num_shards)
            log(f"{directory}: finished, nothing to do")
            return manifest
        begin(manifest, vocabulary, entries)
        if entries:
            log(f"{directory}: going on, {len(entries)} of {settings.num_shards} shards are there")
        arguments = (settings, vocabulary, tokenizer, manifest.plan_sha256)
        _make(_runner(settings.runner), arguments, index, missing, log)
        for path, stamp in zip(paths, stamps, strict=True):
            if files.stamp(path) != stamp:
                raise UserError(
                    f"{path}: was changed while it was read; name a new --output_dir, since shards "
                    f"in {directory} may hold either text"
                )
        complete(manifest, finished_entries(manifest, settings.num_shards), settings.num_shards)
    log(_summary(manifest))
    return manifest


def _make(runner, arguments, index, missing, log):
    """Has the missing shards made, and says how it goes."""
    settings = arguments[0]
    tasks = ((number, sharding.spans(index, number, settings.num_shards)) for number in missing)
    began = time.monotonic()
    try:
        with runner(*arguments, num_tasks=len(missing)) as make:
            log(f"ready after {time.monotonic() - began:.1f} s")
            progress = _Progress(index, missing, settings, log)
            for _ in make(tasks):
                progress.count()
    except (KeyboardInterrupt, SystemExit):
        log(
            f"stopped; {settings.output_dir} keeps the shards that are whole; the same command "
            "goes on"
        )
        raise


def _runner(name):
    if name == "local":
        from bert_tf.data.workers import run_local as runner
    else:
        try:
            from bert_tf.data.beam import run_on_beam as runner
        except ModuleNotFoundError as error:
            raise UserError(
                f"--runner=beam: {error.name} is not installed; pip install 'bert_tf[beam]'"
            ) from None
    return runner


def _check_directory(directory):
    names = files.listdir(directory)
    if NAME not in names and any(not name.startswith(".") for name in names):
        raise UserError(f"{directory}: there is something else there; name a new --output_dir")


def begin(manifest, vocabulary, entries):
    """Writes what tells the next process what the shards of this folder are going to be."""
    manifest.values |= {"complete": False, "shards": list(entries.values())}
    manifest.save()
    manifest.save_vocabulary(vocabulary)


def complete(manifest, entries, num_shards):
    """Writes the whole manifest, after which the shards' own entries are not needed."""
    manifest.values |= {"complete": True, "shards": [entries[n] for n in range(num_shards)]}
    if not Manifest.load(manifest.directory).values["complete"]:
        manifest.save()
    names = set(files.listdir(manifest.directory))
    for number in range(num_shards):
        if entry_name(number, num_shards) in names:
            files.remove(manifest.path(entry_name(number, num_shards)))


def finished_entries(manifest, num_shards):
    """{number: entry} of shards that are there; sweeps what killed processes left.

    Raises UserError where the folder's shards were begun with other settings, text or versions.
    """
    names = set(files.listdir(manifest.directory))
    for name in names:
        if files.is_temporary(name):
            files.remove(manifest.path(name))
    if NAME not in names:
        return {}
    on_disk = Manifest.load(manifest.directory)
    on_disk.check_same_plan(manifest)
    known = {entry["file"]: entry for entry in on_disk.values.get("shards", [])}
    finished = {}
    for number in range(num_shards):
        name, own = shard_name(number, num_shards), entry_name(number, num_shards)
        if own in names:
            entry = _read_entry(manifest.path(own), on_disk.plan_sha256)
            if entry is None:
                files.remove(manifest.path(own))
            else:
                known[name] = entry
        if name in known and files.size(manifest.path(name)) == known[name]["bytes"]:
            finished[number] = known[name]
    if len(finished) < num_shards:
        on_disk.check_same_versions(manifest)
    return finished


def _read_entry(path, plan_sha256):
    """A shard's own entry, None if it is damaged or of other shards."""
    try:
        entry = read_json_object(path)
        check_entry(entry, path)
        return entry if entry.pop("plan", None) == plan_sha256 else None
    except UserError:
        return None


class _Progress:
    """A line every few seconds: shards, rate, time left."""

    def __init__(self, index, missing, settings, log, every=5.0):
        self.log, self.every, self.num_shards = log, every, settings.num_shards
        self.bytes_per_shard = index.lengths.sum() / settings.num_shards
        self.left, self.done = len(missing), 0
        self.began = self.logged = time.monotonic()

    def count(self):
        self.done += 1
        now = time.monotonic()
        if now - self.logged < self.every and self.done < self.left:
            return
        self.logged = now
        rate = self.done * self.bytes_per_shard / (now - self.began)
        seconds = round((self.left - self.done) * self.bytes_per_shard / rate)
        self.log(
            f"shard {self.num_shards - self.left + self.done}/{self.num_shards}  "
            f"{rate / 1e6:.1f} MB/s  ETA {datetime.timedelta(seconds=seconds)}"
        )


def _summary(manifest):
    tokens = sum(entry["tokens"] for entry in manifest.shards)
    num_positions = manifest.num_examples * manifest.settings["max_seq_length"]
    random_next = sum(entry["random_next"] for entry in manifest.shards)
    return (
        f"{manifest.directory}: {manifest.num_examples:,} examples in {len(manifest.shards)} "
        f"shards, {sum(entry['bytes'] for entry in manifest.shards) / 1e6:.1f} MB; {tokens:,} "
        f"tokens, {1 - tokens / num_positions:.1%} of {num_positions:,} places are padding; "
        f"{random_next / manifest.num_examples:.1%} random next"
    )
