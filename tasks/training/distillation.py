"""Distillation (Hinton et al. 2015): a student learns the outputs of a teacher.

    loss = alpha T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - alpha) loss of labels

Each term is a weighted mean over its own rows: the teacher's over all of them, that of the labels
over the labelled ones, with the weights of classes and rows. Embedders learn the vectors of their
teacher instead of logits, also without any labels. The teacher's outputs are computed once, before
training, and kept in RUN/teacher.npz.

Shape suffixes: N examples, C labels or choices, S samples, W windows, (L) tokens of a window
(ragged), T tokens of all windows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.runs import checkpoints
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.progress import Progress
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import exact_float32
from bert_tf.weights.sentence_transformers import KIND
from bert_tf.weights.sources import read_pretrained
from tasks.base.task import task_from_dict
from tasks.data.examples import HOST, Arrays, EncodedExamples, Examples
from tasks.data.windows import concat
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline, PublishedModel, concat_padded
from tasks.graph.published import is_saved_model, published_task
from tasks.graph.run_checkpoint import RunCheckpoint
from tasks.training.settings import check_teacher

if TYPE_CHECKING:
    from tasks.base.task import Task

_FILE = "teacher.npz"
_PREFIX = "teacher_"  # Of the terms' names in the loss.
# Served probabilities are float32: nearer to 0 or 1 than this, their logit is not known.
_SMALLEST = 1e-7
_ROWS_PER_CALL = 256


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A fine-tuned model whose outputs a student learns.

    Attributes:
        name: The teacher in messages.
        task: Its task.
        record: Its entry in train.json: "source" and the "sha256" of its weights.
        vector_size: Size of its vectors, if it is an embedder.
        outputs: Function from a student's examples, with the windows of the student, and a callable
            that takes lines of progress, to the outputs in the order of its samples: float32 arrays
            by name. Outputs per token are padded to max_seq_length. It raises UserError if the
            teacher splits long texts into other tokens.
    """

    name: str
    task: Task
    record: Mapping[str, str]
    outputs: Callable[[EncodedExamples, Callable[[str], None]], Arrays]
    vector_size: int | None = None

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

    def check_size(self, size: int | None) -> None:
        """Check the size of the vectors of a student, `None` if it has none.

        Raises:
            UserError: If those of the teacher have another size.
        """
        if size != self.vector_size:
            raise UserError(
                f"{self.name}: its vectors have {self.vector_size} numbers, those of the student "
                f"{size}; expected dense_units={self.vector_size}, a projection of the student"
            )


def model_teacher(
    task: Task,
    network: keras.Model,
    pipeline: Callable[[], Pipeline],
    strategy: tf.distribute.Strategy,
) -> Teacher:
    """Return a model in this process as a teacher.

    The network was created in the scope of `strategy`. `pipeline` is called once it is needed.
    """
    values = {
        name: variable.numpy() for name, variable in checkpoints.model_variables(network).items()
    }
    name = "--teacher"

    def outputs(student, log):
        return _network_outputs(name, task, network, pipeline(), strategy, student, log)

    record = {"source": "model", "sha256": checkpoints.sha256_of(values)}
    return Teacher(name, task, record, outputs, task.vector_size(network.encoder.config))


def read_teacher(path: str, kind: str, strategy: tf.distribute.Strategy) -> Teacher:
    """Return a run or a published version as a teacher, of which weights may be read later.

    Args:
        path: Its directory.
        kind: The student's task type.
        strategy: Strategy of the student.

    Raises:
        UserError: If there is no model of this task type.
    """
    check_teacher(path, kind)
    if kind == KIND and not Run.exists(path):
        return _embedder_teacher(path, strategy)
    if is_saved_model(path):
        return _saved_model_teacher(path)
    return _run_teacher(path, strategy)


def _run_teacher(path, strategy):
    """Return the best checkpoint of a run, else the latest, which is loaded when it is needed."""
    source = RunCheckpoint.open(path)
    values = {
        name: value
        for name, value in checkpoints.read(source.path).items()
        if not checkpoints.OPTIMIZER_STATE.fullmatch(name)
    }

    return _stored_teacher(
        *(path, source.task, source.run.config, source.run.vocabulary),
        {"source": f"run {source.path}", "sha256": checkpoints.sha256_of(values)},
        lambda: functools.partial(source.assign, source.read()),
        strategy,
    )


def _embedder_teacher(path, strategy):
    """Return an embedder that is no run."""
    pretrained = read_pretrained(path)
    task = task_from_dict(pretrained.embedder or {})
    head = pretrained.head_for(task.to_dict(), keep=True)
    # Its files may be edited: another pooling gives other vectors of the same weights.
    settings = np.frombuffer(json.dumps(pretrained.embedder).encode(), np.uint8)
    return _stored_teacher(
        *(path, task, pretrained.config, pretrained.vocabulary),
        {
            "source": pretrained.source,
            "sha256": checkpoints.sha256_of({**pretrained.weights, "settings": settings}),
        },
        lambda: functools.partial(pretrained.assign_to, head=head),
        strategy,
    )


def _stored_teacher(path, task, config, vocabulary, record, read, strategy):
    """Return a teacher that is loaded when it is needed.

    `read` returns the function that assigns the weights to a network.
    """
    name = f"--teacher={path}"

    def outputs(student, log):
        assign = read()
        with exact_float32():  # Whatever the precision of the student.
            with strategy.scope():
                network = task.build_model(config)
            assign(network)
            tokenizer = Tokenizer.from_config(config, vocabulary)
            pipeline = Pipeline(task, tokenizer, network)
            return _network_outputs(name, task, network, pipeline, strategy, student, log)

    return Teacher(name, task, record, outputs, task.vector_size(config))


def _network_outputs(name, task, network, pipeline, strategy, student, log):
    """Return the outputs of a network for the examples of a student; see `Teacher`."""
    unlabelled = Examples(student.examples.texts, [])
    encoded = EncodedExamples.encode(unlabelled, pipeline, student.layout, student.static_shape)
    if task.has_windows:
        own, expected = (data.windows.packed.input_ids for data in (encoded, student))
        if not all(
            np.array_equal(getattr(own, part), getattr(expected, part))
            for part in ("row_splits", "flat_values")
        ):
            raise UserError(
                f"{name}: splits texts into other tokens; expected the vocabulary and "
                "lower-casing of the student"
            )
    return Evaluator(task, network, strategy, log=log).outputs(encoded, reduced=False)


def _saved_model_teacher(path):
    """Return a published version, as it is served: with its temperature, in its precision.

    Its outputs are logits with the probabilities that are served, or the values.
    """
    task, digest = task_from_dict(published_task(path)), hashlib.sha256()
    variables = files.listdir(os.path.join(path, "variables"))
    for file in ["saved_model.pb", *(f"variables/{file}" for file in variables)]:
        digest.update(f"{file} {files.sha256(os.path.join(path, file))}".encode())

    def outputs(student, log):
        published = PublishedModel(path)
        serve = published.signatures["serving_default"]
        parts, (output,) = [], task.soft_losses
        with Progress(log, "rows", len(student.examples)) as progress:
            for texts in student.examples.slices(_ROWS_PER_CALL):
                parts.append(_logits(task, serve(*(texts[name] for name in task.input_names))))
                progress.update(progress.done + len(parts[-1]))
        # Slices have their own number of choices.
        return {output: concat_padded(parts, MASKED_SCORE)}

    record = {"source": f"SavedModel {path}", "sha256": digest.hexdigest()}
    return Teacher(f"--teacher={path}", task, record, outputs)


def _logits(task, served):
    """Return logits `(N, C)` whose softmax or sigmoid is the prediction."""
    if task.kind == "regression":
        return served["value"].numpy()[:, np.newaxis]
    probabilities_NC = served["probabilities"].numpy()
    log_NC = np.log(np.clip(probabilities_NC, _SMALLEST, 1.0))
    if task.kind == "multiple_choice":
        return np.where(probabilities_NC > 0, log_NC, MASKED_SCORE).astype(np.float32)
    if task.multi_label:
        return log_NC - np.log(np.clip(1.0 - probabilities_NC, _SMALLEST, 1.0))
    return log_NC[:, 1:] - log_NC[:, :1] if task.is_binary else log_NC


def _joined(value):
    return ", ".join(map(str, value))[:200] if isinstance(value, tuple | list) else value


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The teacher of a training, and its unlabelled rows.

    Attributes:
        teacher: The teacher.
        temperature: Divisor of the logits of both.
        alpha: Weight of the teacher's term, from 0 to 1.
        unlabelled: Rows for the teacher's term alone.
    """

    teacher: Teacher
    temperature: float
    alpha: float
    unlabelled: Sequence[Examples] = ()

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

    def losses(self, distilled: DistilledExamples) -> dict[str, dict[str, Any]]:
        """Return the arguments of `TrainStep` that are its losses, and their weights."""
        task, is_labelled = distilled.task, bool(distilled.labelled.labels)
        losses = dict(task.losses) if is_labelled else {}
        soft = {
            _PREFIX + name: (name, functools.partial(loss, temperature=self.temperature))
            for name, loss in task.soft_losses.items()
        }
        weights = {
            **dict.fromkeys(losses, 1.0 - self.alpha),
            **dict.fromkeys(soft, self.alpha if is_labelled else 1.0),
        }
        return {"losses": losses, "more_losses": soft, "loss_weights": weights}

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
            unlabelled: The encoded unlabelled examples.
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
                for name, values in self.teacher.outputs(distilled, log).items()
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
            of_teacher = soft[name]
            if isinstance(of_teacher, tf.RaggedTensor):  # The labels say what a word is.
                own = self.labelled.weights[name]
                of_teacher = tf.concat([own, of_teacher[num_labelled:]], axis=0)
            if windows.choice_W is not None:
                # A SavedModel returns choices that are empty in all rows too.
                values = values[:, : int(np.max(windows.choice_W, initial=0)) + 1]
            if self.task.has_windows:
                with tf.device(HOST):
                    values = windows.packed.input_ids.with_flat_values(values)
            labels[_PREFIX + name], weights[_PREFIX + name] = values, of_teacher
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
    except (ValueError, EOFError, zipfile.BadZipFile):  # Damaged, and computed again.
        return {}
    return outputs if str(outputs.pop("key", "")) == key else {}
