"""Distillation (Hinton et al. 2015): a student learns the outputs of a teacher.

    loss = alpha T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - alpha) loss of labels

Each term is a weighted mean over its own rows: the teacher's over all of them, that of the labels
over the labelled ones, with the weights of classes and rows. The teacher's outputs are computed
once, before training, and kept in RUN/teacher.npz.

Shape suffixes: S samples, W windows, (L) tokens of a window (ragged), T tokens of all windows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.storage import files
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.windows import concat

if TYPE_CHECKING:
    from bert_tf.runs.run import Run
    from tasks.base.task import Task
    from tasks.data.examples import Layout
    from tasks.graph.pipeline import Pipeline
    from tasks.training.teacher import Teacher

_FILE = "teacher.npz"
_PREFIX = "teacher_"  # Of the terms' names in the loss.


class Distillation:
    """The teacher of a training, and its unlabelled rows.

    Args:
        teacher: The teacher.
        temperature: Divisor of the logits of both.
        alpha: Weight of the teacher's term, from 0 to 1.
        unlabelled: Rows for the teacher's term alone.
    """

    def __init__(
        self,
        teacher: Teacher,
        temperature: float,
        alpha: float,
        unlabelled: Sequence[Examples] = (),
    ) -> None:
        self.teacher, self.temperature, self.alpha = teacher, temperature, alpha
        self.unlabelled = unlabelled

    def check(self, task: Task, run: Run | None) -> None:
        """Check that teacher and task fit, and that a run to resume had the same teacher.

        Raises:
            UserError: If not.
        """
        if not task.soft_losses:
            raise UserError(f"--teacher: not supported by task {task.kind}, which has no logits")
        if any(self.unlabelled) and getattr(task, "balanced_sampling", False):
            raise UserError("--balanced_sampling: cannot be combined with --unlabelled")
        self.teacher.check_fits(task)
        before = run.train.get("teacher", {}) if run else self.teacher.record
        if run and before.get("sha256") != self.teacher.record["sha256"]:
            raise UserError(
                f"--teacher: has other weights than when {run.path} was started, with "
                f"{before.get('source')}; choose a new --output_dir"
            )

    def losses(self, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return `losses` and `more_losses` of `TrainStep`."""

        def scaled(loss, factor):
            return lambda labels, output: factor * loss(labels, output)

        soft = {
            name: functools.partial(loss, temperature=self.temperature)
            for name, loss in task.soft_losses.items()
        }
        return (
            {name: scaled(loss, 1.0 - self.alpha) for name, loss in task.losses.items()},
            {_PREFIX + name: (name, scaled(loss, self.alpha)) for name, loss in soft.items()},
        )

    def encode(
        self, pipeline: Pipeline, layout: Layout, static_shape: bool
    ) -> list[EncodedExamples]:
        """Return the unlabelled rows as token ids."""
        return [
            EncodedExamples.encode(examples, pipeline, layout, static_shape)
            for examples in self.unlabelled
        ]

    def distilled(
        self,
        labelled: EncodedExamples,
        unlabelled: Sequence[EncodedExamples],
        run: Run | None,
        log: Callable[[str], None],
    ) -> DistilledExamples:
        """Return the examples with the outputs of the teacher.

        Args:
            labelled: The training examples.
            unlabelled: Result of `encode`.
            run: A run to resume, whose file is read if it is of this teacher and these examples.
            log: Callable that takes log lines.

        Raises:
            UserError: If the teacher splits long texts into other tokens.
        """
        distilled = DistilledExamples(labelled, unlabelled)
        outputs = run and _read(run.file(_FILE), self._key(distilled))
        if not outputs:
            log(
                f"teacher: {len(distilled)} samples, once; "
                f"{len(distilled) - len(labelled)} of them without labels"
            )
            outputs = {
                name: distilled.without_padding(values)
                for name, values in self.teacher.outputs(distilled, distilled.layout, log).items()
            }
        distilled.learn_from(outputs)
        return distilled

    def save(self, distilled: DistilledExamples, run: Run) -> None:
        """Write the outputs of the teacher to the run, if they are not there."""
        path, key = run.file(_FILE), self._key(distilled)
        if run.is_writer and not _read(path, key):
            arrays: dict[str, Any] = {"key": np.array(key), **distilled.outputs}
            with files.atomic_bytes_writer(path) as stream:
                np.savez(stream, **arrays)

    def _key(self, distilled):
        """Return the hash of everything that the teacher's outputs depend on."""
        digest = hashlib.sha256(self.teacher.record["sha256"].encode())
        for name, texts in sorted(distilled.examples.texts.items()):
            digest.update(json.dumps([name, texts]).encode())
        return digest.hexdigest()


class DistilledExamples(EncodedExamples):
    """Labelled examples, then unlabelled ones, with the outputs of a teacher as further labels.

    Attributes:
        outputs: Outputs of the teacher by name, float32 `(S, ...)`, or `(T, ...)` if per token.
    """

    task: Task
    outputs: dict[str, np.ndarray]

    def __init__(self, labelled: EncodedExamples, unlabelled: Sequence[EncodedExamples]) -> None:
        """Join the examples.

        Args:
            labelled: The labelled examples.
            unlabelled: The others, of the same task, vocabulary and layout.
        """
        parts = [labelled, *unlabelled]
        texts = {
            name: [text for part in parts for text in part.examples.texts[name]]
            for name in labelled.examples.texts
        }
        super().__init__(
            labelled.task,
            # With labels they would be encoded again, for all rows.
            Examples(texts, []) if unlabelled else labelled.examples,
            concat([part.windows for part in parts], [len(part.examples) for part in parts]),
            labelled.vocabulary,
            labelled.layout,
            labelled.static_shape,
        )
        self.labelled, self.outputs = labelled, {}

    def learn_from(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs of the teacher, as in `outputs`, to labels and weights."""
        self.outputs = dict(outputs)
        windows, num_labelled = self.windows, len(self.labelled)
        factor_S = self.labelled._weights_of_samples()
        soft = self.task.soft_weights(windows, len(self))
        labels, weights = {}, {}
        for name, of_labelled in self.labelled.weights.items():
            scaled = of_labelled if factor_S is None else _times(of_labelled, factor_S)
            labels[name] = self._filled(self.labelled.labels[name])
            weights[name] = self._filled(scaled)
        for name, values in self.outputs.items():
            own, others = self.labelled.weights[name], soft[name][num_labelled:]
            if self.task.has_windows:
                values = windows.packed.input_ids.with_flat_values(values)
            labels[_PREFIX + name] = values
            weights[_PREFIX + name] = tf.concat([own, others], axis=0)
        self.labels, self.weights = labels, weights

    def without_padding(self, values: np.ndarray) -> np.ndarray:
        """Return outputs per token as `(T, ...)`; other outputs are returned unchanged."""
        if not self.task.has_windows:
            return values
        lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
        return values[np.arange(values.shape[1]) < lengths_W[:, np.newaxis]]

    def _filled(self, values):
        """Append zeros to labels or weights for the samples without labels."""
        missing = len(self) - len(self.labelled)
        if not isinstance(values, tf.RaggedTensor):
            zeros = np.zeros((missing, *values.shape[1:]), values.dtype)
            return np.concatenate([values, zeros])
        ids = self.windows.packed.input_ids[len(self.labelled) :]
        return tf.concat([values, tf.cast(tf.zeros_like(ids), values.dtype)], axis=0)

    def _weights_of_samples(self):
        # They are part of the weights of the labels; the teacher's are 1.
        return None


def _times(weights, factor_S):
    """Multiply weights by a factor per sample, in float32 as batches are."""
    factor_S = np.asarray(factor_S, np.float32)
    if isinstance(weights, tf.RaggedTensor):
        return weights * factor_S[:, np.newaxis]
    return weights * factor_S


def _read(path, key):
    """Return the arrays of a file by name, or an empty dict if it is missing or of another key."""
    if not files.exists(path):
        return {}
    try:
        with files.open_file(path) as stream, np.load(stream) as arrays:
            outputs = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # They are computed again.
        return {}
    return outputs if str(outputs.pop("key", "")) == key else {}
