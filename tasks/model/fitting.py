"""Training of a `TaskModel` with Keras `fit` on rows: lists, pandas columns, files, datasets.

Rows are tokenized once. All epochs are one dataset whose order is drawn from (seed, epoch), so that
a `fit` that BackupAndRestore resumes sees the same batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.system.scalars import to_python
from bert_tf.text.encoder_inputs import to_flat, to_packed, to_padded
from bert_tf.train.optimizer import FitSchedule
from tasks.data.examples import EncodedExamples, Examples
from tasks.graph.evaluation import FeatureExamples
from tasks.model import compiling, streaming
from tasks.model.labelled_rows import check_dataset, examples_of, first_batches, positive

if TYPE_CHECKING:
    from tasks.base.task import Task
    from tasks.model.task_model import TaskModel

_UNSUPPORTED = {
    "sample_weight": "expected none in an evaluation, whose metrics count every row once",
    "callbacks": "expected with token ids only, since strings are not read batch by batch",
}
_TRAINED = ", trained with fit"


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
    examples = _unweighted(examples_of(model.task, x, y))
    return EncodedExamples.encode(examples, model.serving.pipeline, to_flat)


def check_none(**arguments: Any) -> None:
    """Raise UserError at the first argument of Keras that rows of strings do not support."""
    for name, value in arguments.items():
        if value is not None and value != []:
            raise UserError(f"{name}: {_UNSUPPORTED[name]}")


def _unweighted(examples):
    """Return the rows of an evaluation; raises UserError if they have weights other than 1."""
    if any(weight != 1 for weight in examples.weights):
        raise UserError(f"sample_weight: {_UNSUPPORTED['sample_weight']}")
    return examples


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
    validation_steps: int | None = None,
    validation_batch_size: int = 64,
) -> keras.callbacks.History:
    """Train on rows; arguments as of keras.Model.fit.

    Args:
        model: The compiled model.
        keras_fit: keras.Model.fit of the model.
        x: Strings: a list, tuple, NumPy array or pandas column; for two inputs a tuple of two, or a
            dict or DataFrame with a column per input; `Rows` of `read_examples`, with y; or a
            tf.data.Dataset of batches (x, y) or (x, y, sample_weight). TextClassifier and
            TextRegressor read a dataset batch by batch in its own order, all others once.
        y: Labels per row: names or ids of classes, numbers, entities, answers or choices. Integers
            are names if the labels are numbers that no ids could be; they are refused if both are
            possible. Predicted labels are names, as strings.
        batch_size: Sequences per step over all replicas; by default that of the task type. A
            dataset has its own.
        epochs: By default those of the task type.
        verbose: As in Keras.
        callbacks: As in Keras. Logs contain each metric of the task on the validation rows as
            val_NAME.
        validation_split: Fraction of the rows, the last ones, for validation.
        validation_data: Rows for validation: (x, y), `Rows` or a dataset. Every row counts once.
        validation_freq: Epochs per validation.
        shuffle: Draws the order of rows in memory anew in each epoch, from the model's seed.
        class_weight: Loss weight by label name or id.
        sample_weight: Loss weight per row.
        initial_epoch: Number of the first epoch.
        steps_per_epoch: Steps per epoch; by default all rows once. Required for a dataset of
            unknown or infinite length.
        validation_steps: Batches of a dataset as `validation_data` that are read; by default all.
        validation_batch_size: Sequences per validation step and replica; by default 64.

    Returns:
        The Keras History.

    Raises:
        UserError: If a column, label, type or length is wrong.
    """
    strategy = model.distribute_strategy
    is_streamed = isinstance(x, tf.data.Dataset) and model.task.can_stream
    if isinstance(x, tf.data.Dataset):
        check_dataset(x, y=y, sample_weight=sample_weight, batch_size=batch_size)
    epochs = model.fit_defaults["epochs"] if epochs is None else epochs
    epochs = positive("epochs", epochs)
    if steps_per_epoch is not None:
        steps_per_epoch = positive("steps_per_epoch", steps_per_epoch)
    dev = first_step = None
    size_of_dev = positive("validation_batch_size", validation_batch_size)
    if validation_data is not None:
        validation_data = first_batches(validation_data, validation_steps, "validation_steps")
        try:
            dev = labelled_rows(model.task, validation_data)
        except UserError as error:
            raise UserError(f"validation_data: {error}") from None
    if is_streamed:
        if validation_split:
            raise UserError(
                "validation_split: expected none for a dataset; pass validation_data instead"
            )
        num_steps = streaming.num_steps(x, steps_per_epoch)
        batches = streaming.batches(model, x, class_weight)
        encoded_dev = None if dev is None else _encode(model, dev)
    else:
        size = _batch_size(model, x, batch_size)
        train = examples_of(model.task, x, y, sample_weight, class_weight)
        if dev is None and validation_split:
            train, dev = _split(train, validation_split)
        encoded, encoded_dev = _encode_both(model, train, dev)
        steps_per_epoch = num_steps = steps_per_epoch or math.ceil(len(encoded) / size)
        # A variable, because it is set after Keras has received the dataset.
        first_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        batches = encoded.fit_batches(
            size,
            num_epochs=epochs,
            steps_per_epoch=num_steps,
            seed=model.seed,
            shuffle=shuffle,
            first_step=first_step,
            multiple_of=strategy.num_replicas_in_sync,
        )
    if not is_streamed:
        init_head(model, encoded)
    compiling.set_directions(callbacks or ())
    if encoded_dev is not None:
        object.__setattr__(
            model, "_validation", lambda: model.evaluator(size_of_dev).metrics(encoded_dev)
        )
    try:
        with _changing_weights(model), streaming.raising_row_errors():
            history = keras_fit(
                batches,
                epochs=epochs,
                verbose=verbose,
                # Last, since BackupAndRestore restores weights and epoch in the same event.
                callbacks=[
                    *(callbacks or ()),
                    _StartOfFit(num_steps, epochs, initial_epoch, first_step),
                ],
                validation_data=None if dev is None else _placeholder(strategy),
                validation_freq=validation_freq,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                shuffle=False,  # The dataset is shuffled already.
            )
    finally:
        object.__setattr__(model, "_validation", None)
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
    return tuple(
        None if data is None else FeatureExamples(data, model.evaluator(), lambda line: None)
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
        UserError: If the number of steps is unknown, or replicas cannot share a batch.
    """
    steps = steps_per_epoch
    batch_size = kwargs.get("batch_size") or 32  # The default of Keras.
    if model.distribute_strategy.num_replicas_in_sync > 1:
        _batch_size(model, x, batch_size)
    if isinstance(x, tf.data.Dataset):
        kwargs["shuffle"] = False  # Keras warns otherwise.
        steps = streaming.num_steps(x, steps_per_epoch)
    elif steps is None:
        steps = math.ceil(len(x["input_ids"]) / batch_size)
    start = _StartOfFit(steps, kwargs.get("epochs", 1), kwargs.get("initial_epoch", 0))
    kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), start]
    with _changing_weights(model):
        return keras_fit(x, y, steps_per_epoch=steps_per_epoch, **kwargs)


@contextlib.contextmanager
def _changing_weights(model):
    """Let what was tuned or recorded for the weights end with them, once a batch has changed them.

    An error before leaves the model as it was.
    """
    tuned, before = model.task, _batches_seen(model)
    model.preprocessor.task = tuned.with_tuned({})
    try:
        yield
    finally:
        if _batches_seen(model) == before:
            model.preprocessor.task = tuned
        else:
            model.has_new_head = False
            origin = model.record.get("origin", "new weights").removesuffix(_TRAINED)
            model.record["origin"] = origin + _TRAINED


def _batches_seen(model):
    return int(compiling.batch_counter(model.optimizer).numpy())


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
        optimizer = compiling.innermost(self.model.optimizer)
        per_update = optimizer.gradient_accumulation_steps or 1
        # Batches that the fit before has left over belong to the first update.
        start = _batches_seen(self.model) - first_step
        end = start + self.steps_per_epoch * self.epochs
        num_updates = end // per_update - start // per_update
        if not num_updates:
            raise UserError(
                f"fit: {end - start} batches are less than an update with "
                f"gradient_accumulation_steps={per_update}; expected {per_update} or more"
            )
        if isinstance(optimizer._learning_rate, FitSchedule):
            optimizer._learning_rate.set_steps(start // per_update, num_updates, per_update)


def _encode(model, examples):
    layout = to_padded if compiling.needs_padding(model) else to_flat
    if model.jit_compile and model.distribute_strategy.num_replicas_in_sync == 1:
        layout = to_packed  # Keras could not divide its rows between replicas.
    return EncodedExamples.encode(
        examples, model.serving.pipeline, layout, static_shape=bool(model.jit_compile)
    )


def select_training_examples(task: Task, examples: Examples) -> Examples:
    """Return the rows that training uses; raises UserError if there are none."""
    selected = task.select_training_examples(examples)
    if not len(selected):
        raise UserError("x: expected at least one row to train on, received none")
    return selected


def labelled_rows(task: Task, data: Any) -> Examples:
    """Return the examples of (x, y), `Rows` or a dataset, for an evaluation.

    A list of columns is a tuple, as in Keras; weights other than 1 raise UserError.
    """
    if isinstance(data, list) and not any(isinstance(entry, str) for entry in data):
        data = tuple(data)
    if not isinstance(data, tuple):
        return _unweighted(examples_of(task, data))
    if not 2 <= len(data) <= 3:
        raise UserError(f"expected (x, y) or (x, y, sample_weight), received {len(data)} entries")
    return _unweighted(examples_of(task, *data))


def init_head(model: TaskModel, encoded: EncodedExamples) -> None:
    """Initialize a new head from training rows."""
    if model.has_new_head:
        model.task.init_head(model.network, encoded)


def _split(examples, fraction):
    """Return the first rows for training and the last ones for validation, as Keras does."""
    fraction = to_python(fraction)
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"validation_split={fraction!r:.80}: expected a number > 0 and < 1")
    first = math.floor(len(examples) * (1 - fraction))
    if not 0 < first < len(examples):
        raise UserError(
            f"validation_split={fraction}: of {len(examples)} rows, one part would be empty"
        )
    return examples.filter(lambda row: row < first), examples.filter(lambda row: row >= first)


def _batch_size(model, x, batch_size):
    """Return the batch size of rows in memory; raises UserError if replicas cannot share it."""
    if isinstance(x, tf.data.Dataset):
        batch_size = next((int(tf.nest.flatten(batch)[0].shape[0]) for batch in x), None)
        if batch_size is None:
            raise UserError("x: expected at least one batch, received an empty dataset")
    elif batch_size is None:
        batch_size = model.fit_defaults["global_batch_size"]
    batch_size = positive("batch_size", batch_size)
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    if batch_size % num_replicas:
        raise UserError(
            f"batch_size={batch_size}: expected a multiple of {num_replicas}, the number of "
            "replicas"
        )
    return batch_size
