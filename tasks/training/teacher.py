"""Teachers of a distillation: fine-tuned models whose outputs a student learns.

Shape suffixes: N examples, C labels or choices.
"""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.runs import checkpoints
from bert_tf.storage import files
from bert_tf.system.progress import Progress
from bert_tf.train.distribution import exact_float32
from tasks.base.task import task_from_dict
from tasks.data.examples import Arrays, EncodedExamples, Examples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.graph.preprocessor import Preprocessor
from tasks.graph.run_checkpoint import RunCheckpoint
from tasks.training.settings import check_teacher, is_saved_model

if TYPE_CHECKING:
    from tasks.base.task import Task
    from tasks.data.examples import Layout

# Served probabilities are float32: nearer to 0 or 1 than this, their logit is not known.
_SMALLEST = 1e-7
_ROWS_PER_CALL = 256


class Teacher(abc.ABC):
    """Base class of the teachers.

    Attributes:
        name: The teacher in messages.
        task: Its task.
        record: Its entry in train.json: "source" and the "sha256" of its weights.
    """

    name: str
    task: Task
    record: Mapping[str, str]

    def check_fits(self, task: Task) -> None:
        """Check that the outputs are those that a student of a task learns.

        Raises:
            UserError: If labels or inputs differ, or the windows of long texts.
        """
        names = ["kind", "labels", "multi_label", "input_names"]
        if task.has_windows:  # There is an output per token.
            names += ["max_seq_length", "doc_stride", "max_query_length"]
        for name in names:
            own, expected = (getattr(one, name, None) for one in (self.task, task))
            if own != expected:
                raise UserError(
                    f"{self.name}: {name} differs. Expected that of the student, "
                    f"{_joined(expected)}. Received: {_joined(own)}"
                )

    @abc.abstractmethod
    def outputs(
        self, student: EncodedExamples, layout: Layout, log: Callable[[str], None]
    ) -> Arrays:
        """Return the outputs for a student's examples, in the order of its samples.

        Args:
            student: The examples, with the windows of the student.
            layout: Layout of batches.
            log: Callable that takes lines of progress.

        Returns:
            float32 arrays by output name. Outputs per token are padded to max_seq_length.

        Raises:
            UserError: If the teacher splits long texts into other tokens.
        """


class ModelTeacher(Teacher):
    """A model in this process.

    Args:
        task: Its task.
        network: Its network.
        pipeline: Returns its pipeline, once it is needed.
        strategy: Strategy in whose scope the network was created.
        name: The teacher in messages.
    """

    def __init__(
        self,
        task: Task,
        network: keras.Model,
        pipeline: Callable[[], Pipeline],
        strategy: tf.distribute.Strategy,
        name: str = "--teacher",
    ) -> None:
        self.name, self.task = name, task
        self._network, self._pipeline, self._strategy = network, pipeline, strategy
        values = {
            name: variable.numpy()
            for name, variable in checkpoints.model_variables(network).items()
        }
        self.record = {"source": "model", "sha256": _sha256(values)}

    def outputs(
        self, student: EncodedExamples, layout: Layout, log: Callable[[str], None]
    ) -> Arrays:
        """Return the outputs of the network."""
        unlabelled = Examples(student.examples.texts, [])
        encoded = EncodedExamples.encode(unlabelled, self._pipeline(), layout, student.static_shape)
        if self.task.has_windows:
            own, expected = (data.windows.packed.input_ids for data in (encoded, student))
            if not all(
                np.array_equal(getattr(own, part), getattr(expected, part))
                for part in ("row_splits", "flat_values")
            ):
                raise UserError(
                    f"{self.name}: splits texts into other tokens; expected the vocabulary and "
                    "lower-casing of the student"
                )
        evaluator = Evaluator(self.task, self._network, self._strategy, log=log)
        return evaluator.network_outputs(encoded)


class RunTeacher(Teacher):
    """The best checkpoint of a run, else the latest; it is loaded when it is needed."""

    def __init__(self, path: str, strategy: tf.distribute.Strategy) -> None:
        self._source, self._strategy = RunCheckpoint.open(path), strategy
        self.name, self.task = f"--teacher={path}", self._source.task
        values = {
            name: value
            for name, value in checkpoints.read(self._source.path).items()
            if not checkpoints.OPTIMIZER_STATE.fullmatch(name)
        }
        self.record = {"source": f"run {self._source.path}", "sha256": _sha256(values)}

    def outputs(
        self, student: EncodedExamples, layout: Layout, log: Callable[[str], None]
    ) -> Arrays:
        """Return the outputs of the network."""
        source, task = self._source, self.task
        weights, config = source.read(), source.run.config
        with exact_float32():  # Whatever the precision of the student.
            with self._strategy.scope():
                network = task.build_model(config)
            source.assign(weights, network)
            tokenizer = Preprocessor.of(task, config, source.run.vocabulary).tokenizer
            pipeline = Pipeline(task, tokenizer, network)
            teacher = ModelTeacher(task, network, lambda: pipeline, self._strategy, self.name)
            return teacher.outputs(student, layout, log)


class SavedModelTeacher(Teacher):
    """A published version, as it is served: with its temperature, in its precision."""

    def __init__(self, path: str, kind: str) -> None:
        self.name, self._path = f"--teacher={path}", path
        self.task = task_from_dict(check_teacher(path, kind) or {})
        digest = hashlib.sha256()
        variables = os.path.join(path, "variables")
        for name in ["saved_model.pb", *(f"variables/{name}" for name in files.listdir(variables))]:
            digest.update(f"{name} {files.sha256(os.path.join(path, name))}".encode())
        self.record = {"source": f"SavedModel {path}", "sha256": digest.hexdigest()}

    def outputs(
        self, student: EncodedExamples, layout: Layout, log: Callable[[str], None]
    ) -> Arrays:
        """Return logits with the probabilities that are served, or the values."""
        try:
            serve = checkpoints.load_saved_model(self._path).signatures["serving_default"]
        except (OSError, KeyError, tf.errors.OpError) as error:
            raise UserError(f"{self.name}: not a loadable SavedModel: {error}") from None
        parts, (output,) = [], self.task.soft_losses
        with Progress(log, "rows", len(student.examples)) as progress:
            for texts in student.examples.slices(_ROWS_PER_CALL):
                parts.append(self._logits(serve(**texts)))
                progress.update(progress.done + len(parts[-1]))
        width = max(part.shape[1] for part in parts)  # Slices have their own number of choices.
        return {
            output: np.concatenate(
                [
                    np.pad(part, [(0, 0), (0, width - part.shape[1])], constant_values=MASKED_SCORE)
                    for part in parts
                ]
            )
        }

    def _logits(self, served):
        """Return logits `(N, C)` whose softmax or sigmoid is the prediction."""
        if self.task.kind == "regression":
            return served["value"].numpy()[:, np.newaxis]
        probabilities_NC = served["probabilities"].numpy()
        log_NC = np.log(np.clip(probabilities_NC, _SMALLEST, 1.0))
        if self.task.kind == "multiple_choice":
            return np.where(probabilities_NC > 0, log_NC, MASKED_SCORE).astype(np.float32)
        if self.task.multi_label:
            return log_NC - np.log(np.clip(1.0 - probabilities_NC, _SMALLEST, 1.0))
        return log_NC[:, 1:] - log_NC[:, :1] if self.task.is_binary else log_NC


def read_teacher(path: str, kind: str, strategy: tf.distribute.Strategy) -> Teacher:
    """Return a teacher on disk, of which the weights may be read later.

    Args:
        path: Run directory, or directory of a published version.
        kind: The student's task type.
        strategy: Strategy of the student.

    Raises:
        UserError: If there is no model of this task type.
    """
    check_teacher(path, kind)
    return SavedModelTeacher(path, kind) if is_saved_model(path) else RunTeacher(path, strategy)


def _sha256(values):
    """Return the hash of weights by name; the state of dropout is none."""
    digest = hashlib.sha256()
    for name in sorted(name for name in values if not name.startswith("dropout_seed/")):
        digest.update(f"{name} {values[name].shape} {values[name].dtype} ".encode())
        digest.update(np.ascontiguousarray(values[name]).tobytes())
    return digest.hexdigest()


def _joined(value):
    return ", ".join(map(str, value))[:200] if isinstance(value, tuple | list) else value
