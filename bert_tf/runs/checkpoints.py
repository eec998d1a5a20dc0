"""Checkpoints: one local or remote directory per saved step, with a flat dict of tensors.

    RUN/checkpoints/step-00000120/variables.index, variables.data-*
                      TensorFlow tensor bundle, one tensor per name
    RUN/checkpoints/step-00000120/checkpoint.json
                      "step"; "score" and "metrics" once evaluated; "tuned", the values fitted to
                      its outputs. Written last: a directory without it is not a checkpoint
    RUN/checkpoints/.writing-checkpoint
                      a checkpoint that is being written, before its directory is renamed, or one
                      that is being deleted. On a remote file system, which cannot rename a
                      directory at once, the files are written in their place
    RUN/checkpoints/damaged-step-00000120
                      what could not be read, or was not complete, when its step was trained again

A checkpoint is deleted only if it is complete, newer complete ones exist, and it is neither among
the latest `KEPT` nor the best. Nothing else is deleted.

Names are variable paths ("bert/layer_0/attention/query/kernel"), optimizer slots "<path>/adam_m"
and "<path>/adam_v", and "step". `tf.train.load_checkpoint(directory + "/variables")` reads the
tensors, each protected by a checksum.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.storage import files, format_versions
from bert_tf.storage.strict_json import field

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

STATE = "checkpoint.json"
KEPT = 2  # Latest checkpoints of a run.
# As "step-" and 8 digits are written: other digits, or more zeros, are not of a run.
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
CHECKPOINT_FILES = (STATE, "variables.index", "variables.data-00000-of-00001")  # Read to resume.
_FIELDS = ("step", "score", "metrics", "tuned")  # Of checkpoint.json.
# Names that are not of the model.
OPTIMIZER_STATE = re.compile(r"(.*/adam_[mv]|step|loss_scale|finite_steps)")


def sha256_of(values: "Mapping[str, np.ndarray]") -> str:
    """Return the hash of weights by name; the state of dropout is none."""
    digest = hashlib.sha256()
    for name in sorted(name for name in values if not name.startswith("dropout_seed/")):
        digest.update(f"{name} {values[name].shape} {values[name].dtype} ".encode())
        digest.update(values[name].tobytes())
    return digest.hexdigest()


def model_variables(model: "keras.Model | keras.Layer") -> "dict[str, keras.Variable]":
    """Return the variables of a Keras model or encoder by their path below the model."""
    import keras

    # The variables of an encoder are "bert/..." whatever the name of its layer.
    root = "" if isinstance(model, keras.Model) else "bert/"
    names = [root + variable.path.removeprefix(f"{model.name}/") for variable in model.variables]
    assert len(set(names)) == len(names), "two variables share a path"
    return dict(zip(names, model.variables, strict=True))


def read(directory: str | os.PathLike) -> "dict[str, np.ndarray]":
    """Return the tensors of a checkpoint directory by name; errors as of `read_bundle`."""
    return read_bundle(os.path.join(directory, "variables"))


def read_bundle(prefix: str | os.PathLike) -> "dict[str, np.ndarray]":
    """Return the tensors of a TensorFlow checkpoint by name, verifying their checksums.

    `prefix` is the path without ".index" and ".data-*".

    Raises:
        UserError: If a file is missing or damaged.
        OSError: If the storage fails.
    """
    import tensorflow as tf

    def tensors():
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}

    # TensorFlow reports a missing, truncated or altered file by any of these, and a storage that
    # fails as well.
    errors = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
    with files.without_pattern(prefix) as path:
        try:
            return tensors()
        except errors:
            _check_storage(prefix)
        try:
            return tensors()
        except errors as error:
            reason = str(error).replace(path, str(prefix))
            raise UserError(f"{prefix}: not a readable TensorFlow checkpoint: {reason}") from None


def _check_storage(prefix):
    """Read all bytes of a TensorFlow checkpoint; raise OSError if the storage fails."""
    directory, start = os.path.split(prefix)
    for name in files.listdir(directory):
        if name.startswith(f"{start}."):
            with contextlib.suppress(FileNotFoundError):  # Removed in the meantime.
                files.sha256(os.path.join(directory, name))


def write_bundle(prefix: str | os.PathLike, tensors: Mapping[str, Any]) -> None:
    """Write tensors, arrays or variables by name as a TensorFlow checkpoint; see `read_bundle`."""
    import tensorflow as tf

    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=[tf.convert_to_tensor(tensor) for tensor in tensors.values()],
    )


def load_saved_model(directory: str | os.PathLike) -> Any:
    """Return `tf.saved_model.load` of a directory with any name.

    Raises:
        OSError: If there is no SavedModel.
        tf.errors.OpError: If it is damaged.
    """
    import tensorflow as tf

    with files.without_pattern(directory) as path:
        return tf.saved_model.load(path)


def assign(
    variables: "Mapping[str, tf.Variable | keras.Variable]",
    values: "Mapping[str, np.ndarray]",
    where: str,
    ignore: re.Pattern = re.compile("(?!)"),
) -> None:
    """Assign each value to the variable of the same name.

    Names in `values` that match `ignore` need no variable. `where` is the checkpoint, for messages.

    Raises:
        UserError: If names or shapes do not match. Nothing is assigned then.
    """
    left_over = sorted(name for name in set(values) - set(variables) if not ignore.fullmatch(name))
    if left_over:
        raise UserError(
            f"{where}: {len(left_over)} tensors are unknown to the model, e.g. {left_over[0]}. "
            "Check that config.json belongs to this checkpoint."
        )
    check_shapes({name: variable.shape for name, variable in variables.items()}, values, where)
    for name, variable in variables.items():
        variable.assign(values[name])


def check_shapes(
    shapes: "Mapping[str, tuple[int, ...] | tf.TensorShape]",
    values: "Mapping[str, np.ndarray]",
    where: str,
) -> None:
    """Raise UserError unless there is an array of the expected shape for each name.

    `values` may have other names too. `where` is the checkpoint, for messages.
    """
    missing = sorted(set(shapes) - set(values))
    if missing:
        raise UserError(
            f"{where}: {len(missing)} variables are missing, e.g. {missing[0]}. Check that "
            "config.json belongs to this checkpoint."
        )
    for name, shape in shapes.items():
        if tuple(values[name].shape) != tuple(shape):
            raise UserError(
                f"{where}: {name}: shape mismatch. Expected: {tuple(shape)}. Received: "
                f"{tuple(values[name].shape)}. Check that config.json belongs to this checkpoint."
            )


class CheckpointManager:
    """Save, list and restore the checkpoints of a run.

    The latest checkpoints, `KEPT` of them, and the one with the best score are kept.

    Args:
        directory: RUN/checkpoints.
        is_writer: False in all but one of several synchronized processes: nothing is written.
    """

    def __init__(self, directory: str | os.PathLike, is_writer: bool = True) -> None:
        self.directory, self.is_writer = str(directory), is_writer
        self._any_checkpoint = os.path.join(self.directory, "checkpoint")  # For one temporary name.

    def path(self, step: int) -> str:
        """Return the directory of the checkpoint of `step`."""
        return os.path.join(self.directory, f"step-{step:08d}")

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        matches = map(STEP.fullmatch, files.listdir(self.directory))
        steps = sorted(int(match[1]) for match in matches if match)
        return [step for step in steps if files.exists(self._state(step))]

    def step_of(self, name: str) -> int:
        """Return the step of a complete checkpoint such as "step-00000120", or raise UserError."""
        match = STEP.fullmatch(name.rstrip("/"))
        if match is None or int(match[1]) not in self.steps():
            there = ", ".join(os.path.basename(self.path(step)) for step in self.steps())
            raise UserError(
                f"--checkpoint={name}: no complete checkpoint in {self.directory}; expected one of "
                f"{there or 'none: no checkpoint has been saved yet'}"
            )
        return int(match[1])

    def info(self, step: int) -> dict[str, Any]:
        """Return checkpoint.json: "step"; "score" and "metrics" once evaluated; "tuned" once tuned.

        Raises:
            UserError: If the file is missing or damaged.
        """
        path = self._state(step)
        values = read_json_object(path, parse_constant=float)  # A metric may be NaN.
        values = format_versions.without_version(values, path, _FIELDS)
        if values.get("score") is not None:
            field(values, "score", float, path)
            for name in field(values, "metrics", dict, path):
                field(values["metrics"], name, float, f"{path}: metrics")
        if values.get("tuned") is not None:
            tuned = field(values, "tuned", dict, path)
            field(tuned, "values", dict, f"{path}: tuned")
            field(tuned, "metrics", dict, f"{path}: tuned")
        return values

    def is_readable(self, step: int) -> bool:
        """Return True if the checkpoint of `step` is undamaged. All tensors are read.

        Raises:
            OSError: If the storage fails.
        """
        try:
            return bool(self.info(step)) and bool(read(self.path(step)))
        except UserError:
            return False

    def latest_readable(self) -> int | None:
        """Return the latest step whose checkpoint is undamaged, or `None`."""
        return next(filter(self.is_readable, reversed(self.steps())), None)

    def best_step(self) -> int | None:
        """Return the step with the highest score, the later on ties, or `None` if not evaluated."""
        ranked = []
        for step in self.steps():
            try:
                score = self.info(step).get("score")
            except (UserError, OSError):
                # A training process may have removed this checkpoint in the meantime.
                if files.exists(self._state(step)):
                    raise
                continue
            if score is not None:
                is_number = score == score  # NaN ranks below any other score.
                ranked.append((is_number, score if is_number else 0.0, step))
        return max(ranked)[-1] if ranked else None

    def best_or_latest_step(self) -> int:
        """Return the best step, or the latest if none was evaluated; UserError without any."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no complete checkpoint in this directory")
        best = self.best_step()
        return steps[-1] if best is None else best

    def save(self, step: int, variables: "Mapping[str, tf.Variable | keras.Variable]") -> None:
        """Write the checkpoint of a step atomically, then delete superseded ones.

        Raises:
            OSError: If the checkpoint cannot be written. Earlier ones are unaffected.
        """
        if not self.is_writer:
            return
        import tensorflow as tf

        directory = self.path(step)
        try:
            if files.is_remote(directory):
                self._write(directory, step, variables)
            else:
                with files.staging_directory(self._any_checkpoint) as staging:
                    self._write(staging, step, variables)
                    if files.exists(directory):  # Such as an incomplete copy.
                        self._set_aside(step)
                    files.rename_directory(staging, directory)
        except (tf.errors.OpError, OSError) as error:
            # TensorFlow appends the operation and the device to the reason, such as a full disk.
            reason = str(getattr(error, "message", None) or error.strerror)
            reason = reason.split(";")[-1].split("[Op:")[0].strip()
            raise OSError(
                errno.EIO,
                f"step {step} cannot be saved ({reason}); earlier checkpoints are intact, rerun "
                "the command to resume from them",
                directory,
            ) from None
        self._sweep()

    def _write(self, directory, step, variables):
        """Write the files of a checkpoint, the state last."""
        files.makedirs(directory)
        write_bundle(os.path.join(directory, "variables"), variables)
        files.sync_directory(directory)
        self._write_state(directory, {"step": step})

    def annotate(self, step: int, score: float, metrics: Mapping[str, float]) -> bool:
        """Record the evaluation of a saved step. Return True if it is now the best step."""
        if not self.is_writer:
            return False
        self._add(step, score=score, metrics=metrics)
        self._sweep()
        return self.best_step() == step

    def set_tuned(self, step: int, tuned: dict[str, Any]) -> None:
        """Record the tuned values of a saved step, a JSON object, in one atomic write."""
        if self.is_writer:
            self._add(step, tuned=tuned)

    def _add(self, step, **entries):
        self._write_state(self.path(step), {**self.info(step), **entries})

    def _write_state(self, directory, values):
        text = json.dumps(format_versions.with_version(values), ensure_ascii=False)
        files.atomic_write_text(os.path.join(directory, STATE), text)

    def restore_latest(
        self,
        variables: "Mapping[str, tf.Variable | keras.Variable]",
        log: Callable[[str], None],
    ) -> int | None:
        """Assign the latest undamaged checkpoint to variables by name.

        Damaged checkpoints are logged, skipped and renamed to "damaged-*".

        Returns:
            The restored step, or `None` if there is no checkpoint.

        Raises:
            UserError: If all checkpoints are damaged.
            OSError: If the storage fails. No checkpoint is renamed then.
        """
        steps, damaged, restored = self.steps(), [], None
        for step in reversed(steps):
            try:
                self.info(step)  # Checked for all steps, since `best_step` reads it for all.
                if restored is None:
                    assign(variables, read(self.path(step)), where=self.path(step))
                    restored = step
            except UserError as error:
                what_now = "trying the previous checkpoint" if restored is None else "set aside"
                log(f"warning: {error}; {what_now}")
                damaged.append(step)
        if steps and restored is None:
            raise UserError(
                f"{self.directory}: none of the {len(steps)} checkpoints can be restored; start "
                "again with a new --output_dir"
            )
        for step in damaged if self.is_writer else ():
            self._set_aside(step)
        return restored

    def _set_aside(self, step):
        """Rename a checkpoint that cannot be used, so that its step can be saved again."""
        name = f"damaged-{os.path.basename(self.path(step))}"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        paths = (os.path.join(self.directory, name) for name in names)
        aside = next(path for path in paths if not files.exists(path))
        files.rename_directory(self.path(step), aside)

    def _sweep(self):
        """Delete superseded checkpoints, unless they have files of others."""
        temporary = files.temporary_name(self._any_checkpoint)
        files.remove_tree(temporary)  # Left by a killed process.
        for step in {*self.steps()[:-KEPT]} - {self.best_step()}:
            directory = self.path(step)
            if all(map(_is_own, files.listdir(directory))):
                # Renamed at once: if interrupted, it does not look complete.
                files.rename_directory(directory, temporary)
                files.remove_tree(temporary)

    def _state(self, step):
        return os.path.join(self.path(step), STATE)


def _is_own(name):
    """Return True if a file of a checkpoint is ours."""
    return name == STATE or name.startswith("variables.") or files.is_temporary(name)
