"""Write pretraining shards: index the documents, assign them to shards and run the workers.

For local paths, this process does not import TensorFlow: only its workers do.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable

from bert_tf.data import documents, entries, shard_jobs, sharding
from bert_tf.data.manifest import NAME, VOCABULARY_NAME, Manifest
from bert_tf.data.settings import WriterArguments, WriteShardsSettings
from bert_tf.errors import UserError
from bert_tf.storage import files, ownership
from bert_tf.system import command
from bert_tf.system.progress import Progress
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

SPILL = ".unpacked"


def write_shards(
    settings: WriteShardsSettings, log: Callable[[str], None] = lambda line: None
) -> Manifest:
    """Write the shards of a corpus, or those that are still missing.

    Args:
        settings: The settings, one per flag.
        log: Receives lines of progress.

    Returns:
        The manifest of the complete shards.

    Raises:
        UserError: If the input cannot be used, or if --output_dir contains shards of other
            settings, text or versions.
    """
    vocabulary = Vocabulary.load(settings.vocab)
    lower = settings.do_lower_case
    lower = not vocabulary.looks_cased() if lower is None else lower
    tokenizer = {
        "do_lower_case": lower,
        "strip_accents": settings.strip_accents,
        "max_input_chars_per_word": settings.max_input_chars_per_word,
    }
    directory = settings.output_dir
    is_here = not files.is_remote(directory)
    paths = documents.find_files(settings.input, os.path.realpath(directory) if is_here else None)
    _check_directory(directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ownership.sole_writer(directory))
        spill_dir = os.path.join(directory, SPILL)
        stack.callback(files.remove_own, spill_dir, re.compile(r"\d+"))

        log(f"indexing: {len(paths)} files, {'uncased' if lower else 'cased'}")
        # Workers read the documents again by offset, so files must not change until the end.
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
        finished = finished_entries(manifest)
        missing = [number for number in range(settings.num_shards) if number not in finished]
        if not missing:
            if VOCABULARY_NAME not in files.listdir(directory):
                manifest.save_vocabulary(vocabulary)
            manifest.complete(finished)
            log(f"{directory}: already complete, nothing to do")
            _warn(manifest, log)
            return manifest
        manifest.begin(vocabulary, finished)
        if finished:
            log(f"{directory}: resuming: {len(finished)}/{settings.num_shards} shards complete")
        arguments = WriterArguments(settings, vocabulary, tokenizer, manifest.plan_sha256)
        _make(arguments, index, missing, log)
        for path, stamp in zip(paths, stamps, strict=True):
            if files.stamp(path) != stamp:
                raise UserError(
                    f"{path}: was changed while it was read; name a new --output_dir, since shards "
                    f"in {directory} may contain the old or the new text"
                )
        finished = finished_entries(manifest)
        entries.check_all(directory, finished, settings.num_shards)
        manifest.complete(finished)
    log(_summary(manifest))
    _warn(manifest, log)
    return manifest


def _warn(manifest, log):
    if warning := manifest.next_sentence_warning():
        log(f"warning: {warning}")


def _make(arguments, index, missing, log):
    """Run the workers that write the missing shards, and log their progress."""
    settings = arguments.settings
    tasks = ((number, sharding.spans(index, number, settings.num_shards)) for number in missing)
    began = time.monotonic()
    try:
        with shard_jobs.run(settings, arguments, len(missing)) as make:
            log(f"workers ready after {time.monotonic() - began:.1f} s")
            done = settings.num_shards - len(missing)
            with Progress(log, "shards", settings.num_shards, done) as progress:
                make(tasks, lambda entry: progress.update(progress.done + 1))
    except (KeyboardInterrupt, SystemExit):
        log(
            f"stopped: complete shards remain in {settings.output_dir}; rerun the command to resume"
        )
        raise


def _check_directory(directory):
    names = files.listdir(directory)
    if NAME not in names and any(not name.startswith(".") for name in names):
        raise UserError(f"{directory}: contains other files; name a new --output_dir")


def finished_entries(manifest: Manifest) -> dict[int, entries.ShardEntry]:
    """Return the entries of complete shards, and remove temporary files of killed processes.

    Args:
        manifest: The planned manifest.

    Returns:
        Manifest entries by shard number.

    Raises:
        UserError: If the directory contains shards of other settings, text or versions.
    """
    directory, shards = manifest.directory, manifest.shard_names
    entries.remove_temporary(directory)
    if not files.exists(manifest.path(NAME)):
        return {}
    on_disk = Manifest.load(directory)
    on_disk.check_same_plan(manifest, command.defaults(WriteShardsSettings))
    finished = entries.finished(
        directory, shards, on_disk.shards, on_disk.plan_sha256, entries.check_entry
    )
    # Complete shards remain usable with other package versions, but cannot be mixed with new ones.
    if len(finished) < len(shards):
        on_disk.check_same_versions(manifest)
    return finished


def _summary(manifest):
    tokens = sum(entry["tokens"] for entry in manifest.shards)
    num_positions = manifest.num_examples * manifest.settings["max_seq_length"]
    return (
        f"{manifest.directory}: {manifest.num_examples:,} examples in {len(manifest.shards)} "
        f"shards, {sum(entry['bytes'] for entry in manifest.shards) / 1e6:.1f} MB; {tokens:,} "
        f"tokens, {1 - tokens / num_positions:.1%} of {num_positions:,} positions are padding; "
        f"{manifest.random_next:.1%} random next"
    )
