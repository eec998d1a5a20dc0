"""Training of a `TaskModel` with Keras `fit` on rows: lists, pandas columns, files, datasets.

Rows are tokenized once and padded per batch. All epochs are one dataset whose order is drawn from
(seed, epoch), so that a `fit` that BackupAndRestore resumes sees the same batches.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.layout import to_padded
from bert_tf.train.optimizer import FitSchedule
from tasks.evaluation import Evaluator, FeatureExamples
from tasks.examples import EncodedExamples, Examples
from tasks.prediction import jsonable
from tasks.readers.memory import as_list
from tasks.readers.rows import RowError
from tasks.registry import task_class
from tasks.settings import task_defaults

if TYPE_CHECKING:
    from tasks.task_model import TaskModel


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a file, as `fit`, `evaluate` and `predict` take them.

    Attributes:
        x: N strings, or lists of strings, by input name.
        y: N labels: names, numbers, entities or answers; empty if unlabelled.
        labels: The distinct labels in the order of a task's ids; empty if the task has none.
        source: The file.
    """

    x: dict[str, list]
    y: list
    labels: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))


def read_examples(
    path: str | os.PathLike[str],
    task_type: str = "classification",
    *,
    labelled: bool = True,
    **options: Any,
) -> Rows:
    """Read a file in a format of a task type.

    Args:
        path: .csv, .tsv, .jsonl or a format of the task type (docs/data-formats.md).
        task_type: Name of the task type.
        labelled: Whether the rows have labels.
        **options: Fields of the task that name columns, such as text_columns=("a", "b").

    Raises:
        UserError: At the first bad row.
    """
    max_seq_length = task_defaults(task_type)["max_seq_length"]
    task = task_class(task_type).from_data(
        os.fspath(path), max_seq_length=max_seq_length, **options
    )
    examples = task.load_examples(os.fspath(path), labelled)
    y = [task.decode_label(label) for label in examples.labels]
    return Rows(examples.texts, y, tuple(getattr(task, "labels", ())), os.fspath(path))


def encode(model: TaskModel, x: Any, y: Any, sample_weight: Any = None) -> EncodedExamples:
    """Tokenize labelled rows for training or evaluation.

    Args:
        model: The model.
        x: Rows, see `fit`.
        y: Labels, see `fit`.
        sample_weight: Loss weight per row.

    Raises:
        UserError: If rows and labels differ in number, or a label does not fit the task.
    """
    return _encode(model, _examples(model, x, y, sample_weight))


def fit(
    model: TaskModel,
    keras_fit: Callable[..., keras.callbacks.History],
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    verbose: Any = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    validation_freq: int = 1,
    shuffle: bool = True,
    class_weight: Mapping[Any, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
) -> keras.callbacks.History:
    """Train on rows; arguments as of keras.Model.fit.

    Args:
        model: The compiled model.
        keras_fit: keras.Model.fit of the model.
        x: Strings: a list, tuple, NumPy array or pandas column; for two inputs a tuple of two, or a
            dict or DataFrame with a column per input; `Rows` of `read_examples`, with y; or a
            finite tf.data.Dataset of batches (x, y) or (x, y, sample_weight).
        y: Labels per row: names or ids of classes, numbers, entities, answers or choices.
        batch_size: Sequences per step over all replicas; by default that of the task type.
        epochs: By default those of the task type.
        verbose: As in Keras.
        callbacks: As in Keras. Logs contain each metric of the task on the validation rows as
            val_NAME.
        validation_split: Fraction of the rows, the last ones, for validation.
        validation_data: Rows for validation: (x, y), `Rows` or a dataset.
        validation_freq: Epochs per validation.
        shuffle: Draws the order anew in each epoch, from the model's seed.
        class_weight: Loss weight by label name or id.
        sample_weight: Loss weight per row.
        initial_epoch: Number of the first epoch.
        steps_per_epoch: Steps per epoch; by default all rows once.

    Returns:
        The Keras History.

    Raises:
        UserError: If a column, label, type or length is wrong.
    """
    defaults, strategy = model.fit_defaults, model.distribute_strategy
    if batch_size is None:
        is_dataset = isinstance(x, tf.data.Dataset)
        batch_size = _batch_size_of(x) if is_dataset else defaults["global_batch_size"]
    epochs = defaults["epochs"] if epochs is None else epochs
    check_positive("batch_size", batch_size)
    check_positive("epochs", epochs)
    if batch_size % strategy.num_replicas_in_sync:
        raise UserError(
            f"batch_size={batch_size}: expected a multiple of {strategy.num_replicas_in_sync}, "
            "the number of replicas"
        )
    if strategy.num_replicas_in_sync > 1 and model.task.INPUT_RANKS:
        # Keras splits token ids and labels by their first axis, here of different sizes.
        raise UserError(
            f"fit of {type(model).__name__}: expected one replica, received "
            f"{strategy.num_replicas_in_sync}; run tasks.finetune --strategy=mirrored"
        )
    # Values tuned for the weights before are those of another model.
    model.preprocessor.task = model.task.with_tuned({})
    train, dev = _examples(model, x, y, sample_weight, class_weight), None
    if validation_data is not None:
        try:
            dev = _examples(model, *_pair(validation_data))
        except UserError as error:
            raise UserError(f"validation_data: {error}") from None
    elif validation_split:
        train, dev = _split(train, validation_split)
    encoded, encoded_dev = _encode_both(model, train, dev)
    if int(model.optimizer.iterations.numpy()) == 0:
        model.task.init_head(model.network, encoded)
    data = FitData(
        encoded,
        encoded_dev,
        batch_size,
        epochs,
        steps_per_epoch or math.ceil(len(encoded) / batch_size),
        model.seed,
        shuffle,
    )
    object.__setattr__(model, "_data", data)
    try:
        history = keras_fit(
            data.batches(strategy.num_replicas_in_sync),
            epochs=data.epochs,
            verbose=verbose,
            # Last, since BackupAndRestore restores weights and epoch in the same event.
            callbacks=[
                *(callbacks or ()),
                _StartOfFit(data.steps_per_epoch, data.epochs, initial_epoch, data.first_step),
            ],
            # Keras requires a dataset; `evaluate` reads the encoded rows instead.
            validation_data=None if dev is None else tf.data.Dataset.from_tensors(0),
            validation_freq=validation_freq,
            initial_epoch=initial_epoch,
            steps_per_epoch=data.steps_per_epoch,
            shuffle=False,  # The dataset is shuffled already.
        )
    finally:
        object.__setattr__(model, "_data", None)
    if encoded_dev is not None and model.task.tunable_fields:
        model.tune_on(encoded_dev)
    return history


def _encode_both(model, train, dev):
    """Return the encoded training and validation rows."""
    train = _encode(model, _selected(model, train))
    dev = None if dev is None else _encode(model, dev)
    if not model.task.trains_on_vectors:
        return train, dev
    evaluator = Evaluator(model.task, model.network, model.distribute_strategy)
    return tuple(
        None if data is None else FeatureExamples(data, evaluator, lambda line: None)
        for data in (train, dev)
    )


def fit_batches(
    model: TaskModel,
    keras_fit: Callable[..., keras.callbacks.History],
    x: Any,
    y: Any = None,
    *,
    steps_per_epoch: int | None = None,
    **kwargs: Any,
) -> keras.callbacks.History:
    """Train on token ids, which go to Keras untouched.

    Args:
        model: The compiled model.
        keras_fit: keras.Model.fit of the model.
        x: Dict of token ids, or a dataset of batches (x, y) or (x, y, sample_weight).
        y: Labels by output name; none for a dataset.
        steps_per_epoch: Steps per epoch; required for a dataset of unknown or infinite length.
        **kwargs: Other arguments of keras.Model.fit.

    Raises:
        UserError: If the number of steps is unknown.
    """
    steps = steps_per_epoch
    if isinstance(x, tf.data.Dataset):
        kwargs["shuffle"] = False  # Keras warns otherwise.
        steps = int(x.cardinality().numpy()) if steps is None else steps
        if steps < 0:
            raise UserError("steps_per_epoch: expected a number for a dataset of unknown length")
    elif steps is None:
        # The batch size is the default of Keras.
        steps = math.ceil(len(x["input_ids"]) / (kwargs.get("batch_size") or 32))
    start = _StartOfFit(steps, kwargs.get("epochs", 1), kwargs.get("initial_epoch", 0))
    kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), start]
    return keras_fit(x, y, steps_per_epoch=steps_per_epoch, **kwargs)


def check_positive(name: str, value: Any) -> None:
    """Raise UserError unless a value is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name}={value!r:.80}: expected an integer > 0")


@dataclasses.dataclass
class FitData:
    """Training and validation rows of one `fit`."""

    train: EncodedExamples
    dev: EncodedExamples | None
    batch_size: int
    epochs: int
    steps_per_epoch: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        # A variable, because it is set after Keras has received the dataset.
        self.first_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._evaluator: Evaluator | None = None

    def batches(self, num_replicas: int) -> tf.data.Dataset:
        """Return the batches of all epochs from `first_step` on."""
        return self.train.fit_batches(
            self.batch_size,
            num_epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            seed=self.seed,
            shuffle=self.shuffle,
            first_step=self.first_step,
            multiple_of=num_replicas,
        )

    def validation_metrics(self, model: TaskModel) -> dict[str, float]:
        """Return the metrics on the validation rows."""
        assert self.dev is not None  # Keras validates only with validation data.
        if self._evaluator is None:  # Its graph is built once per fit.
            self._evaluator = Evaluator(model.task, model.network, model.distribute_strategy)
        return self._evaluator.metrics(self.dev)


class _StartOfFit(keras.callbacks.Callback):
    """Set the first batch and the learning rate schedule for the epoch that training starts with.

    BackupAndRestore sets that epoch after Keras has received dataset and optimizer.
    """

    def __init__(self, steps_per_epoch, epochs, initial_epoch, first_step=None):
        super().__init__()
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        self.initial_epoch, self.first_step = initial_epoch, first_step

    def on_train_begin(self, logs=None):
        first_step = (self.model._initial_epoch or self.initial_epoch) * self.steps_per_epoch
        if self.first_step is not None:
            self.first_step.assign(first_step)
        schedule = self.model.optimizer._learning_rate
        if isinstance(schedule, FitSchedule):
            iterations = int(self.model.optimizer.iterations.numpy())
            schedule.set_steps(iterations - first_step, self.steps_per_epoch * self.epochs)


def _encode(model, examples):
    return EncodedExamples.encode(
        examples, model.serving.pipeline, to_padded, static_shape=bool(model.jit_compile)
    )


def _examples(model, x, y=None, sample_weight=None, class_weight=None):
    """Return rows as `Examples` with labels in the representation of the task."""
    if isinstance(x, tf.data.Dataset):
        if y is not None:
            raise UserError("y: expected none, since the dataset x contains the labels")
        x, y, sample_weight = _read_dataset(x)
    if isinstance(x, Rows):
        x, y = x.x, x.y if y is None else y
    task = model.task
    texts = task.columns(x)
    count = len(next(iter(texts.values())))
    y = task.default_labels(count) if y is None else as_list(y, "y")
    if len(y) != count:
        raise UserError(f"y: expected {count} labels, one per row of x, received {len(y)}")
    labels = []
    for row, label in enumerate(y):
        try:
            text = {name: values[row] for name, values in texts.items()}
            labels.append(task.encode_label(label, text))
        except (ValueError, TypeError, RowError) as error:
            raise UserError(f"y[{row}]: {error}") from None
    weights = _weights(task, labels, sample_weight, class_weight)
    return Examples(texts, labels, weights=weights)


def _weights(task, labels, sample_weight, class_weight):
    """Return the loss weight per row, or () if all are 1."""
    if sample_weight is None and class_weight is None:
        return ()
    weights = [1.0] * len(labels)
    if sample_weight is not None:
        given = as_list(sample_weight, "sample_weight")
        if len(given) != len(labels):
            raise UserError(
                f"sample_weight: expected {len(labels)} weights, one per row, received {len(given)}"
            )
        weights = [_weight(f"sample_weight[{row}]", value) for row, value in enumerate(given)]
    if class_weight is not None:
        names = getattr(task, "labels", None)
        if names is None or not isinstance(labels[0], int):
            raise UserError(f"class_weight: not supported by {task.kind}, which has no classes")
        if not isinstance(class_weight, Mapping):
            raise UserError(
                f"class_weight: expected a dict of label and weight, received {class_weight!r:.80}"
            )
        try:
            factors = {
                task.encode_label(name, {}): _weight(repr(name), factor)
                for name, factor in class_weight.items()
            }
        except ValueError as error:
            raise UserError(f"class_weight: {error}") from None
        weights = [
            weight * factors.get(label, 1.0) for weight, label in zip(weights, labels, strict=True)
        ]
    return tuple(weights)


def _weight(what, value):
    """Return a loss weight as a float."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise UserError(f"{what}: expected a number >= 0, received {value!r:.80}")
    return float(value)


def _selected(model, examples):
    selected = model.task.select_training_examples(examples)
    if not len(selected):
        raise UserError("x: expected at least one row to train on, received none")
    return selected


def _pair(data):
    """Return (x, y, sample_weight) of validation data."""
    if isinstance(data, tuple) and not isinstance(data, Rows):
        if not 2 <= len(data) <= 3:
            raise UserError(
                f"expected (x, y) or (x, y, sample_weight), received {len(data)} entries"
            )
        return (*data, None)[:3]
    return data, None, None


def _split(examples, fraction):
    """Return the first rows for training and the last ones for validation, as Keras does."""
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"validation_split={fraction!r:.80}: expected a number > 0 and < 1")
    first = math.floor(len(examples) * (1 - fraction))
    if not 0 < first < len(examples):
        raise UserError(
            f"validation_split={fraction}: of {len(examples)} rows, one part would be empty"
        )
    return examples.filter(lambda row: row < first), examples.filter(lambda row: row >= first)


def _batch_size_of(dataset):
    """Return the number of rows in the first batch of a dataset."""
    return len(tf.nest.flatten(next(iter(dataset)))[0])


def _read_dataset(dataset):
    """Return the rows of a finite dataset of batches (x, y) or (x, y, sample_weight)."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError("x: expected a finite dataset, received one that repeats; remove repeat()")
    parts = [part if isinstance(part, tuple) else (part,) for part in dataset.as_numpy_iterator()]
    if not parts:
        raise UserError("x: expected at least one batch, received an empty dataset")

    def joined(values):
        if isinstance(values[0], Mapping):
            return {name: joined([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], tuple):
            return tuple(map(joined, zip(*values, strict=True)))
        return [row for value in values for row in jsonable(value)]

    x, y, weight = (*map(joined, zip(*parts, strict=True)), None, None)[:3]
    return x, y, weight
