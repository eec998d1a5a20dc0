"""From text to shards: indexes the documents, deals them out, has the shards made.

This process imports no TensorFlow (for paths without "://"): its workers do.
"""

import contextlib
import datetime
import json
import os
import re
import time

from bert_tf import files
from bert_tf.data import documents
from bert_tf.data.manifest import NAME, Manifest, entry_name, shard_name
from bert_tf.errors import UserError
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

MIN_DOCUMENTS = 5  # A shard; random next segments come from the shard's other documents.
MAX_SHARD_BYTES = 128 << 20  # Of text: about twice that is held in memory.
SPILL = ".unpacked"
_LEFT = re.compile(
    r"\.+(examples-.*|manifest\.json|vocab\.txt)\.\d+"
)  # What is written and has no name yet.


def write_shards(settings, say=lambda line: None):
    """Makes the shards that WriteShardsSettings say, or those still missing; returns the Manifest.

    `say` takes lines of progress. Raises UserError on input that cannot be used, or where the
    folder holds shards of other settings.
    """
    vocabulary = Vocabulary.load(settings.vocab)
    lower = settings.do_lower_case
    lower = not vocabulary.looks_cased() if lower is None else lower
    tokenizer = {"do_lower_case": lower, "strip_accents": settings.strip_accents}
    paths = documents.find_files(settings.input)
    folder = settings.output_dir
    _check_folder(folder)
    files.make_folder(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.sole_user(folder))
        spill_dir = os.path.join(folder, SPILL)
        stack.callback(documents.forget_spilled, spill_dir)
        say(f"indexing {len(paths)} files, {'lower-casing' if lower else 'cased'}")
        began = time.monotonic()
        index = documents.index(paths, settings.input_format, settings.text_field, spill_dir)
        num_bytes = int(index.lengths.sum())
        say(
            f"{len(index):,} documents, {num_bytes / 1e6:.1f} MB of text "
            f"({num_bytes / 1e6 / max(time.monotonic() - began, 1e-3):.0f} MB/s)"
        )
        _check_dealt(index, settings)
        corpus = {"documents": len(index), "bytes": num_bytes, "sha256": index.sha256}
        tables = {**tokenizer, "tables_sha256": unicode_tables.sha256()}
        manifest = Manifest.plan(folder, settings, vocabulary, tables, corpus)
        entries = _finished(manifest, settings)
        missing = [number for number in range(settings.num_shards) if number not in entries]
        if missing:
            manifest.values["shards"] = list(entries.values())
            manifest.save_vocabulary(vocabulary)
            manifest.save()
            if entries:
                say(f"{folder}: going on, {len(entries)} of {settings.num_shards} shards are there")
            tasks = ((number, _spans(index, number, settings.num_shards)) for number in missing)
            began = time.monotonic()
            try:
                with _runner(settings.runner)(settings, vocabulary, tokenizer) as make:
                    say(f"ready after {time.monotonic() - began:.1f} s")
                    progress = _Progress(index, missing, settings, say)
                    for _ in make(tasks):
                        progress.count()
            except (KeyboardInterrupt, SystemExit):
                say(f"stopped; {folder} keeps the shards that are whole; the same command goes on")
                raise
            entries = _finished(manifest, settings)
        manifest.values["shards"] = [entries[number] for number in range(settings.num_shards)]
        manifest.values["complete"] = True
        manifest.save()
        for number in range(settings.num_shards):
            with contextlib.suppress(FileNotFoundError):
                files.remove(manifest.path(entry_name(number, settings.num_shards)))
    say(_summary(manifest) if missing else f"{folder}: finished, nothing to do")
    return manifest


def _runner(name):
    if name == "local":
        from bert_tf.data.workers import local as runner
    else:
        try:
            from bert_tf.data.beam import on_beam as runner
        except ModuleNotFoundError as error:
            raise UserError(
                f"--runner=beam: {error.name} is not installed; pip install 'bert_tf[beam]'"
            ) from None
    return runner


def _check_folder(folder):
    names = files.names(folder)
    if names and NAME not in names and ".lock" not in names:
        raise UserError(f"{folder}: there is something else there; name a new --output_dir")


def _check_dealt(index, settings):
    """Raises UserError where shards would be too few documents, or too much text."""
    least = 1 if settings.same_document_next else MIN_DOCUMENTS
    if len(index) < least * settings.num_shards:
        possible = len(index) // least
        advice = (
            f"use --num_shards={possible} or less"
            if possible
            else "separate documents by blank lines (or see --input_format)"
        )
        raise UserError(
            f"--num_shards={settings.num_shards}: {len(index)} documents, wanted at least {least} "
            f"a shard, since random next segments come from a shard's other documents; {advice}"
        )
    num_bytes = index.lengths.sum() / settings.num_shards
    if num_bytes > MAX_SHARD_BYTES:
        raise UserError(
            f"--num_shards={settings.num_shards}: {num_bytes / 1e6:.0f} MB of text a shard, wanted "
            f"at most {MAX_SHARD_BYTES / 1e6:.0f}, which is what fits in memory; use "
            f"--num_shards={int(index.lengths.sum() / MAX_SHARD_BYTES * 1.2) + 1}"
        )


def _finished(manifest, settings):
    """{number: entry} of shards that are there; sweeps what killed processes left.

    Raises UserError where the folder's shards were begun with other settings or other text.
    """
    names = files.names(manifest.folder)
    if NAME not in names:
        return {}
    on_disk = Manifest.load(manifest.folder)
    on_disk.check_same_plan(manifest)
    known = {entry["file"]: entry for entry in on_disk.values.get("shards", [])}
    finished = {}
    for number in range(settings.num_shards):
        name, entry_path = shard_name(number, settings.num_shards), None
        if entry_name(number, settings.num_shards) in names:
            entry_path = manifest.path(entry_name(number, settings.num_shards))
            known[name] = json.loads(files.read_text(entry_path))
        if name in known and files.size(manifest.path(name)) == known[name]["bytes"]:
            finished[number] = known[name]
        elif entry_path:
            files.remove(entry_path)
    for name in names:
        if _LEFT.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                files.remove(manifest.path(name))
    return finished


def _spans(index, number, num_shards):
    """(path, offset, length) of the documents of a shard: every num_shards-th."""
    dealt = slice(number, None, num_shards)
    return [
        (index.paths[file], offset, length)
        for file, offset, length in zip(
            index.files[dealt].tolist(),
            index.offsets[dealt].tolist(),
            index.lengths[dealt].tolist(),
            strict=True,
        )
    ]


class _Progress:
    """A line every few seconds: shards, rate, time left."""

    def __init__(self, index, missing, settings, say, every=5.0):
        self.say, self.every, self.num_shards = say, every, settings.num_shards
        self.bytes_a_shard = index.lengths.sum() / settings.num_shards
        self.left, self.done = len(missing), 0
        self.began = self.said = time.monotonic()

    def count(self):
        self.done += 1
        now = time.monotonic()
        if now - self.said < self.every and self.done < self.left:
            return
        self.said = now
        rate = self.done * self.bytes_a_shard / (now - self.began)
        seconds = round((self.left - self.done) * self.bytes_a_shard / rate)
        self.say(
            f"shard {self.num_shards - self.left + self.done}/{self.num_shards}  "
            f"{rate / 1e6:.1f} MB/s  ETA {datetime.timedelta(seconds=seconds)}"
        )


def _summary(manifest):
    tokens = sum(entry["tokens"] for entry in manifest.shards)
    places = manifest.num_examples * manifest.settings["max_seq_length"]
    random_next = sum(entry["random_next"] for entry in manifest.shards)
    return (
        f"{manifest.folder}: {manifest.num_examples:,} examples in {len(manifest.shards)} shards, "
        f"{sum(entry['bytes'] for entry in manifest.shards) / 1e6:.1f} MB; {tokens:,} tokens, "
        f"{1 - tokens / places:.1%} of {places:,} places are padding; "
        f"{random_next / manifest.num_examples:.1%} random next"
    )
