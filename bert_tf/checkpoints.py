"""Checkpoints: a flat {name: variable} dictionary in a folder that appears whole or not at all.

    RUN/checkpoints/step-00000120/variables.index, variables.data-*    TensorFlow's tensor bundle, a
    tensor a name RUN/checkpoints/step-00000120/checkpoint.json                      step, score and
    metrics (once evaluated)

Names are the variables' paths ("bert/layer_0/attention/query/kernel"), slots "<path>/adam_m" and
"<path>/adam_v", and "step"; `tf.train.load_checkpoint(folder + "/variables")` reads them, each with
a checksum.
"""

import errno
import json
import os
import pathlib
import re
import shutil

import keras
import tensorflow as tf

from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.files import replace_file, sync

_FOLDER = re.compile(r"step-(\d{8,})")
TRAINING_ONLY = re.compile(r"(.*/adam_[mv]|step)")  # What a checkpoint holds beside the model.


def model_variables(model):
    """{name: variable} of a Keras model or encoder; a name is a path below the model."""
    # An encoder is "bert/..." whatever its layer is called.
    root = "" if isinstance(model, keras.Model) else "bert/"
    names = [root + variable.path.removeprefix(f"{model.name}/") for variable in model.variables]
    assert len(set(names)) == len(names), "two variables share a path"
    return dict(zip(names, model.variables, strict=True))


def read(folder):
    """{name: array} of one checkpoint folder. Raises UserError if it is missing or damaged."""
    return read_bundle(pathlib.Path(folder) / "variables")


def read_bundle(prefix):
    """{name: array} of a TensorFlow checkpoint by its prefix. Raises UserError if unreadable.

    Every tensor's checksum is checked on the way.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    # As which of these TensorFlow reports a missing, short or altered file depends on the place.
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{prefix}: not a readable TensorFlow checkpoint: {error}") from None


def assign(variables, values, where, ignore=re.compile("(?!)")):
    """Sets {name: variable} from {name: array}, total on both sides but for names `ignore` matches.

    Raises UserError naming a variable without value, a value without variable, or two shapes that
    differ.
    """
    missing = sorted(set(variables) - set(values))
    left_over = sorted(name for name in set(values) - set(variables) if not ignore.fullmatch(name))
    if missing:
        raise UserError(
            f"{where}: nothing there for {len(missing)} variables, the first {missing[0]}"
        )
    if left_over:
        raise UserError(
            f"{where}: {len(left_over)} tensors have no variable here, the first {left_over[0]}"
        )
    for name, variable in variables.items():
        if tuple(values[name].shape) != tuple(variable.shape):
            raise UserError(
                f"{where}: {name} has shape {tuple(values[name].shape)}, the model wants "
                f"{tuple(variable.shape)}"
            )
    for name, variable in variables.items():
        variable.assign(values[name])


class Checkpoints:
    """The checkpoints of a run: the newest `keep`, and the best of those that were evaluated.

    With `writes` False nothing is changed: another process, which does the same, writes.
    """

    def __init__(self, directory, keep=2, writes=True):
        self.directory = pathlib.Path(directory)
        self.keep, self.writes = keep, writes

    def folder(self, step):
        return self.directory / f"step-{step:08d}"

    def steps(self):
        """Steps of the complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = (
            _FOLDER.fullmatch(path.name)
            for path in self.directory.iterdir()
            if (path / "checkpoint.json").is_file()
        )
        return sorted(int(match[1]) for match in matches if match)

    def info(self, step):
        """{"step", and once evaluated "score", "metrics"}."""
        return read_json_object(self.folder(step) / "checkpoint.json")

    def best_step(self):
        """The step with the highest score, the later of equals; None if none was evaluated."""
        scores = {step: self.info(step).get("score") for step in self.steps()}
        scored = [step for step, score in scores.items() if score is not None]
        return max(scored, key=lambda step: (scores[step], step), default=None)

    def chosen_step(self):
        """The best step where one was evaluated, else the newest. Raises UserError if none."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no complete checkpoint there")
        best = self.best_step()
        return steps[-1] if best is None else best

    def save(self, step, variables):
        """Writes {name: variable} as the checkpoint of `step`; a crash harms none of the others."""
        if not self.writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".writing-{step:08d}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            tf.raw_ops.SaveV2(
                prefix=str(temporary / "variables"),
                tensor_names=list(variables),
                shape_and_slices=[""] * len(variables),
                tensors=[tf.convert_to_tensor(variable) for variable in variables.values()],
            )
            replace_file(temporary / "checkpoint.json", json.dumps({"step": step}))
            for path in temporary.iterdir():
                sync(path)
            sync(temporary)
        except (tf.errors.OpError, OSError) as error:
            # Of a full disk TensorFlow says one of several things.
            shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(error, "message", None) or error.strerror
            reason = reason.split(";")[-1].split("[Op:")[0].strip()
            raise OSError(
                errno.EIO,
                f"step {step} cannot be saved ({reason}); the checkpoints before it are whole, the "
                "same command goes on from there",
                str(self.folder(step)),
            ) from None
        shutil.rmtree(
            self.folder(step), ignore_errors=True
        )  # Left by a run that was killed and came here again.
        os.rename(temporary, self.folder(step))
        sync(self.directory)
        self._sweep()

    def annotate(self, step, score, metrics):
        """Records what the evaluation of a saved step gave."""
        if not self.writes:
            return
        replace_file(
            self.folder(step) / "checkpoint.json",
            json.dumps({"step": step, "score": score, "metrics": metrics}),
        )
        self._sweep()

    def restore_newest(self, variables, say):
        """Restores {name: variable} from the newest readable checkpoint; returns its step or None.

        A damaged one is named, passed over and set aside. Raises UserError if there are some and
        none can be read.
        """
        steps, damaged = self.steps(), []
        for step in reversed(steps):
            try:
                assign(variables, read(self.folder(step)), where=str(self.folder(step)))
            except UserError as error:
                say(f"warning: {error}; trying the checkpoint before")
                damaged.append(self.folder(step))
                continue
            for folder in (
                damaged if self.writes else ()
            ):  # Out of the way of what will be saved next.
                shutil.rmtree(folder.with_name(f"damaged-{folder.name}"), ignore_errors=True)
                os.rename(folder, folder.with_name(f"damaged-{folder.name}"))
            return step
        if steps:
            raise UserError(
                f"{self.directory}: none of its {len(steps)} checkpoints can be restored; start "
                "anew in "
                "another --output_dir"
            )
        return None

    def _sweep(self):
        kept = {*self.steps()[-self.keep :], self.best_step()}
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.folder(step))
        for path in self.directory.glob(".writing-*"):  # Litter of a killed save.
            shutil.rmtree(path, ignore_errors=True)
