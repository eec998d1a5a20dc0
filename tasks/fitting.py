"""Training of a `TaskModel` with Keras `fit` on rows: lists, pandas columns, files, datasets.

Rows are tokenized once. All epochs are one dataset whose order is drawn from (seed, epoch), so that
a `fit` that BackupAndRestore resumes sees the same batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.layout import to_flat, to_padded
from bert_tf.train.distribution import choose_layout
from bert_tf.train.optimizer import FitSchedule
from tasks.evaluation import Evaluator, FeatureExamples
from tasks.examples import EncodedExamples, Examples
from tasks.rows import check_positive, examples_of

if TYPE_CHECKING:
    from tasks.task import Task
    from tasks.task_model import TaskModel


def encode(model: TaskModel, x: Any, y: Any = None) -> EncodedExamples:
    """Tokenize labelled rows for evaluation.

    Args:
        model: The model.
        x: Rows, see `fit`; or rows that are tokenized already.
        y: Labels, see `fit`.

    Raises:
        UserError: If rows and labels differ in number, or a label does not fit the task.
    """
    if isinstance(x, EncodedExamples):
        return x
    layout = choose_layout(model.distribute_strategy)
    return EncodedExamples.encode(examples_of(model.task, x, y), model.serving.pipeline, layout)


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
    train, dev = examples_of(model.task, x, y, sample_weight, class_weight), None
    if validation_data is not None:
        try:
            dev = labelled_rows(model.task, validation_data)
        except UserError as error:
            raise UserError(f"validation_data: {error}") from None
    elif validation_split:
        train, dev = _split(train, validation_split)
    encoded, encoded_dev = _encode_both(model, train, dev)
    init_head(model, encoded)
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
            validation_data=None if dev is None else _placeholder(strategy),
            validation_freq=validation_freq,
            initial_epoch=initial_epoch,
            steps_per_epoch=data.steps_per_epoch,
            shuffle=False,  # The dataset is shuffled already.
        )
    finally:
        object.__setattr__(model, "_data", None)
    if encoded_dev is not None and model.task.tunable_fields:
        model.tune(encoded_dev)
    return history


def _placeholder(strategy):
    """Return a dataset, which Keras requires; `evaluate` reads the encoded rows instead."""
    return tf.data.Dataset.from_tensors(tf.zeros([strategy.num_replicas_in_sync]))


def _encode_both(model, train, dev):
    """Return the encoded training and validation rows."""
    train = _encode(model, select_training_examples(model.task, train))
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
    # Keras splits a batch between replicas by the first axis, which must count sequences.
    is_padded = model.jit_compile or model.distribute_strategy.num_replicas_in_sync > 1
    return EncodedExamples.encode(
        examples,
        model.serving.pipeline,
        to_padded if is_padded else to_flat,
        static_shape=bool(model.jit_compile),
    )


def select_training_examples(task: Task, examples: Examples) -> Examples:
    """Return the rows that training uses; raises UserError if there are none."""
    selected = task.select_training_examples(examples)
    if not len(selected):
        raise UserError("x: expected at least one row to train on, received none")
    return selected


def labelled_rows(task: Task, data: Any) -> Examples:
    """Return the examples of (x, y), (x, y, sample_weight), `Rows` or a dataset."""
    if not isinstance(data, tuple):
        return examples_of(task, data)
    if not 2 <= len(data) <= 3:
        raise UserError(f"expected (x, y) or (x, y, sample_weight), received {len(data)} entries")
    return examples_of(task, *data)


def init_head(model: TaskModel, encoded: EncodedExamples) -> None:
    """Initialize a new head from training rows, unless `fit` has trained it already."""
    if not model.compiled or int(model.optimizer.iterations.numpy()) == 0:
        model.task.init_head(model.network, encoded)


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
    for batch in dataset:
        return len(tf.nest.flatten(batch)[0])
    raise UserError("x: expected at least one batch, received an empty dataset")
