"""Checkpoints: a flat {name: variable} dictionary in a folder of its own, here or on gs://.

    RUN/checkpoints/step-00000120/variables.index, variables.data-*
                      TensorFlow's tensor bundle, a tensor a name
    RUN/checkpoints/step-00000120/checkpoint.json
                      step; score and metrics, once evaluated; tuned, the values that were fitted to
                      its outputs. Written last: without it a folder is what a killed save left, and
                      counts for nothing

Names are the variables' paths ("bert/layer_0/attention/query/kernel"), slots "<path>/adam_m" and
"<path>/adam_v", and "step"; `tf.train.load_checkpoint(directory + "/variables")` reads them, each
with a checksum.
"""

import errno
import json
import os
import re

from bert_tf import files, run_directory
from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.strict_json import field

OPTIMIZER_STATE = re.compile(r"(.*/adam_[mv]|step)")  # What a checkpoint holds beside the model.


def model_variables(model):
    """{name: variable} of a Keras model or encoder; a name is a path below the model."""
    import keras

    # An encoder is "bert/..." whatever its layer is called.
    root = "" if isinstance(model, keras.Model) else "bert/"
    names = [root + variable.path.removeprefix(f"{model.name}/") for variable in model.variables]
    assert len(set(names)) == len(names), "two variables share a path"
    return dict(zip(names, model.variables, strict=True))


def read(directory):
    """{name: array} of one checkpoint folder. Raises UserError if it is missing or damaged."""
    return read_bundle(os.path.join(directory, "variables"))


def read_bundle(prefix):
    """{name: array} of a TensorFlow checkpoint by its prefix. Raises UserError if unreadable.

    Every tensor's checksum is checked on the way.
    """
    import tensorflow as tf

    try:
        reader = tf.compat.v1.train.NewCheckpointReader(str(prefix))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    # As which of these TensorFlow reports a missing, short or altered file depends on the place.
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{prefix}: not a readable TensorFlow checkpoint: {error}") from None


def assign(variables, values, where, ignore=re.compile("(?!)")):
    """Sets {name: variable} from {name: array}, total on both sides but for names `ignore` matches.

    Raises UserError naming a variable without value, a value without variable, or two shapes that
    differ.
    """
    left_over = sorted(name for name in set(values) - set(variables) if not ignore.fullmatch(name))
    if left_over:
        raise UserError(
            f"{where}: {len(left_over)} tensors have no variable here, the first {left_over[0]}"
        )
    check_shapes({name: variable.shape for name, variable in variables.items()}, values, where)
    for name, variable in variables.items():
        variable.assign(values[name])


def check_shapes(shapes, values, where):
    """Raises UserError where {name: array} lacks one of {name: shape}, or has another shape."""
    missing = sorted(set(shapes) - set(values))
    if missing:
        raise UserError(
            f"{where}: nothing there for {len(missing)} variables, the first {missing[0]}"
        )
    for name, shape in shapes.items():
        if tuple(values[name].shape) != tuple(shape):
            raise UserError(
                f"{where}: {name} has shape {tuple(values[name].shape)}, the model wants "
                f"{tuple(shape)}"
            )


class CheckpointManager:
    """The checkpoints of a run: the newest `max_to_keep`, and the best of those evaluated.

    With `is_writer` False nothing is changed: another process, which does the same, writes.
    """

    def __init__(self, directory, max_to_keep=2, is_writer=True):
        self.directory = str(directory)
        self.max_to_keep, self.is_writer = max_to_keep, is_writer

    def path(self, step):
        return os.path.join(self.directory, f"step-{step:08d}")

    def steps(self):
        """Steps of the complete checkpoints, oldest first."""
        return run_directory.complete_steps(self.directory)

    def step_of(self, name: str) -> int:
        """Return the step of the complete checkpoint in the directory `name`.

        Raises UserError if there is none.
        """
        match = run_directory.STEP.fullmatch(name.rstrip("/"))
        if match is None or int(match[1]) not in self.steps():
            there = ", ".join(os.path.basename(self.path(step)) for step in self.steps())
            raise UserError(
                f"--checkpoint={name}: no complete checkpoint in {self.directory}; expected one of "
                f"{there or 'none: the run has saved nothing yet'}"
            )
        return int(match[1])

    def info(self, step):
        """{"step", once evaluated "score", "metrics", and once tuned "tuned"}."""
        path = self._state(step)
        values = read_json_object(path, parse_constant=float)  # As a figure may be.
        if values.get("score") is not None:
            field(values, "score", float, path)
            for name in field(values, "metrics", dict, path):
                field(values["metrics"], name, float, f"{path}: metrics")
        if values.get("tuned") is not None:
            tuned = field(values, "tuned", dict, path)
            field(tuned, "values", dict, f"{path}: tuned")
            field(tuned, "metrics", dict, f"{path}: tuned")
        return values

    def is_readable(self, step):
        """True if nothing of a checkpoint is damaged; all of it is read for that."""
        try:
            return bool(self.info(step)) and bool(read(self.path(step)))
        except UserError:
            return False

    def latest_readable(self) -> int | None:
        """Return the newest step whose checkpoint is not damaged, or `None`."""
        return next(filter(self.is_readable, reversed(self.steps())), None)

    def best_step(self):
        """The step with the highest score, the later of equals; None if none was evaluated."""
        scores = {}
        for step in self.steps():
            try:
                scores[step] = self.info(step).get("score")
            except (UserError, OSError):
                # The process that trains may have removed it since.
                if files.exists(self._state(step)):
                    raise
        scored = [step for step, score in scores.items() if score is not None]

        def rank(step):
            is_number = scores[step] == scores[step]  # NaN is less than any other score.
            return is_number, scores[step] if is_number else 0.0, step

        return max(scored, key=rank, default=None)

    def best_or_latest_step(self):
        """The best step where one was evaluated, else the newest. Raises UserError if none."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no complete checkpoint there")
        best = self.best_step()
        return steps[-1] if best is None else best

    def save(self, step, variables):
        """Writes {name: variable} as the checkpoint of `step`; a crash harms none of the others."""
        if not self.is_writer:
            return
        import tensorflow as tf

        directory = self.path(step)
        self._remove(directory)  # Left by a save that was killed.
        try:
            files.makedirs(directory)
            saving = os.path.join(directory, run_directory.SAVING)
            # A killed save leaves it, an incomplete copy does not.
            files.atomic_write_bytes(saving, b"")
            tf.raw_ops.SaveV2(
                prefix=os.path.join(directory, "variables"),
                tensor_names=list(variables),
                shape_and_slices=[""] * len(variables),
                tensors=[tf.convert_to_tensor(variable) for variable in variables.values()],
            )
            files.sync_directory(directory)
            files.atomic_write_text(self._state(step), json.dumps({"step": step}))
            files.remove(saving)
        except (tf.errors.OpError, OSError) as error:
            # Of a full disk TensorFlow says one of several things.
            self._remove(directory)
            reason = getattr(error, "message", None) or error.strerror
            reason = reason.split(";")[-1].split("[Op:")[0].strip()
            raise OSError(
                errno.EIO,
                f"step {step} cannot be saved ({reason}); the checkpoints before it are whole, the "
                "same command goes on from there",
                directory,
            ) from None
        self._sweep()

    def annotate(self, step, score, metrics):
        """Records what the evaluation of a saved step gave; returns True if it is the best."""
        if not self.is_writer:
            return False
        self._add(step, score=score, metrics=metrics)
        self._sweep()
        return self.best_step() == step

    def set_tuned(self, step: int, tuned: dict) -> None:
        """Record what was tuned for a saved step, a JSON object, in one atomic write."""
        if self.is_writer:
            self._add(step, tuned=tuned)

    def _add(self, step, **entries):
        state = {**self.info(step), **entries}
        files.atomic_write_text(self._state(step), json.dumps(state, ensure_ascii=False))

    def restore_latest(self, variables, log):
        """Restores {name: variable} from the newest readable checkpoint; returns its step or None.

        A damaged one is named, passed over and set aside. Raises UserError if there are some and
        none can be read.
        """
        steps, damaged, restored = self.steps(), [], None
        for step in reversed(steps):
            try:
                self.info(step)  # What chooses the best one reads this of all of them.
                if restored is None:
                    assign(variables, read(self.path(step)), where=self.path(step))
                    restored = step
            except UserError as error:
                what_now = "trying the checkpoint before" if restored is None else "set aside"
                log(f"warning: {error}; {what_now}")
                damaged.append(step)
        if steps and restored is None:
            raise UserError(
                f"{self.directory}: none of its {len(steps)} checkpoints can be restored; start "
                "anew in another --output_dir"
            )
        for step in damaged if self.is_writer else ():
            self._set_aside(step)
        return restored

    def _set_aside(self, step):
        """Out of the way of what will be saved next."""
        directory = self.path(step)
        aside = os.path.join(self.directory, f"damaged-{os.path.basename(directory)}")
        self._remove(aside)
        files.makedirs(aside)
        for name in files.listdir(directory):
            files.move(os.path.join(directory, name), os.path.join(aside, name))
        files.remove_if_empty(directory)

    def _sweep(self):
        """Removes what is neither new nor best, and what killed saves left."""
        kept = {*self.steps()[-self.max_to_keep :], self.best_step()}
        for name in files.listdir(self.directory):
            match = run_directory.STEP.fullmatch(name)
            if match and int(match[1]) not in kept:
                self._remove(os.path.join(self.directory, name))

    def _remove(self, directory):
        """Remove our files, the state first: if this is killed, nothing looks complete."""
        state = os.path.join(directory, run_directory.STATE)
        if files.exists(state):
            files.remove(state)
        files.remove_own(directory, run_directory.OF_CHECKPOINT)

    def _state(self, step):
        return os.path.join(self.path(step), run_directory.STATE)
