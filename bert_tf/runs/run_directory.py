"""Names of the files in a run directory, and where a run may start or resume. No TensorFlow."""

import os
import re

from bert_tf.errors import UserError
from bert_tf.storage import files, ownership

STATE = "checkpoint.json"
VERIFIED_SHARDS = "verified_shards.json"  # Of pretraining: what does not have to be read again.
SAVING = ".saving"  # Exists in a checkpoint while it is being written.
# As "step-" and 8 digits are written: other digits, or more zeros, are not of a run.
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
# The files of a run and of a checkpoint that are read to resume. Only fine-tuned runs have a task.
FILES = ("checkpoints", "config.json", "vocab.txt", "train.json", "task.json")
CHECKPOINT_FILES = (STATE, "variables.index", "variables.data-00000-of-00001")
_TEMPORARY = r"\.[0-9a-f]{32}"
_SMALL = r"(checkpoint\.json|\.saving)"
_CHECKPOINT = rf"({_SMALL}|\.{_SMALL}{_TEMPORARY}|variables\.[^/]*)?"
OF_CHECKPOINT = re.compile(_CHECKPOINT)
_PART = (
    r"((config|task|train|conversion|verified_shards)\.json|vocab\.txt|metrics\.jsonl|loss\.png"
    r"|teacher\.npz)"
)
OF_RUN = re.compile(
    rf"{_PART}|\.{_PART}{_TEMPORARY}|tensorboard/(events\.out\.tfevents\.[^/]*)?"
    rf"|checkpoints/((damaged-)?{STEP.pattern}/{_CHECKPOINT})?"
)


def is_run(path: str | os.PathLike) -> bool:
    """Return True if a directory is a run: it contains config.json and checkpoints/."""
    config, checkpoints = (os.path.join(path, name) for name in ("config.json", "checkpoints"))
    return files.exists(config) and files.isdir(checkpoints)


def complete_steps(checkpoints: str | os.PathLike) -> list[int]:
    """Return the steps of the complete checkpoints in RUN/checkpoints, oldest first."""
    matches = map(STEP.fullmatch, files.listdir(checkpoints))
    found = sorted((int(match[1]), match[0]) for match in matches if match)
    return [step for step, name in found if files.exists(os.path.join(checkpoints, name, STATE))]


def check(path: str | os.PathLike) -> None:
    """Raise `UserError` unless a run can start or resume in this directory.

    A run can resume from a complete checkpoint. It can start in a missing or empty directory, or
    where a marked run was killed before its first checkpoint.
    """
    checkpoints = os.path.join(path, "checkpoints")
    if not (is_run(path) and complete_steps(checkpoints)):
        check_free(path)


def check_free(path: str | os.PathLike) -> None:
    """Raise `UserError` unless a run can start in this directory."""
    if files.is_remote(path) and files.has_pattern(path):
        raise UserError(
            f"{path}: expected a remote path without * ? [ and \\, since TensorFlow takes the path "
            "of a checkpoint for a pattern; name another directory"
        )
    if not files.exists(path):
        return
    if not files.isdir(path):
        raise UserError(f"{path}: is a file; expected a directory")
    found = [name for name in files.listdir(path) if name != ownership.MARKER]
    if not found:
        return
    for directory in _checkpoints_without_state(path) if is_run(path) else ():
        raise UserError(
            f"{directory}: contains weights but no {STATE}, as after an incomplete copy; copy the "
            "run again, or name a new directory"
        )
    if ownership.is_marked(path) and not complete_steps(os.path.join(path, "checkpoints")):
        found = [name for name in files.walk(path) if not OF_RUN.fullmatch(name)]
        if found == [ownership.MARKER]:
            return
        found.remove(ownership.MARKER)
    raise UserError(
        f"{path}: contains other files; name a new directory (found {', '.join(found[:3])}, "
        "but no run that this command can resume)"
    )


def _checkpoints_without_state(path):
    checkpoints = os.path.join(path, "checkpoints")
    for name in filter(STEP.fullmatch, files.listdir(checkpoints)):
        parts = files.listdir(os.path.join(checkpoints, name))
        if "variables.index" in parts and STATE not in parts and SAVING not in parts:
            yield os.path.join(checkpoints, name)
