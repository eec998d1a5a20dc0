"""The callback of `TaskModel.fit` that keeps what BERT needs exact."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from bert_tf.errors import DivergenceError, UserError, tensorflow_reason
from bert_tf.train.optimizer import NOT_FINITE
from bert_tf.train.step import batch_counter, innermost
from tasks.model.labelled_rows import positive
from tasks.model.private_keras import fit_schedule


class FitCallback(keras.callbacks.Callback):
    """Set epoch and schedule; check losses; add the metrics of validation rows.

    It comes before all other callbacks, which read these metrics. The first epoch is known when it
    begins, since BackupAndRestore sets it after Keras has received dataset and optimizer.

    Args:
        epoch: Set to the number of each epoch, which the order of the rows depends on.
        validate: Returns the metrics of the validation rows by name; `None` if there are none.
        validation_freq: Epochs per validation, or a list of epochs, as in Keras.
    """

    def __init__(
        self,
        epoch: tf.Variable,
        validate: Callable[[], dict[str, float]] | None,
        validation_freq: int | Sequence[int] = 1,
    ) -> None:
        super().__init__()
        self.epoch = epoch
        if not isinstance(validation_freq, list | tuple | set):
            validation_freq = positive("validation_freq", validation_freq)
        self.validate, self.validation_freq = validate, validation_freq
        self.is_started = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Set the epoch, and before the first one the steps of the schedule; check their number."""
        self.epoch.assign(epoch)
        if self.is_started:
            return
        self.is_started, steps = True, self.params["steps"]
        schedule = fit_schedule(self.model.optimizer)
        if steps is None:
            if schedule is None:
                return
            raise UserError(
                "steps_per_epoch: expected a number for a dataset of unknown length, which the "
                "learning rate decays over; or compile with an optimizer of constant rate"
            )
        per_update = innermost(self.model.optimizer).gradient_accumulation_steps or 1
        # Batches that the fit before has left over belong to the first update.
        start = batches_seen(self.model) - epoch * steps
        end = start + steps * self.params["epochs"]
        num_updates = end // per_update - start // per_update
        if not num_updates:
            raise UserError(
                f"fit: {end - start} batches are less than an update with "
                f"gradient_accumulation_steps={per_update}; expected {per_update} or more"
            )
        if schedule is not None:
            schedule.set_steps(start // per_update, num_updates, per_update)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stop where XLA drops the check that raises an error."""
        if not math.isfinite((logs or {})["loss"]):
            raise diverged(self.model)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Add the metrics of the validation rows."""
        every = self.validation_freq
        is_due = (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every
        if self.validate and is_due and logs is not None:
            logs.update({f"val_{name}": value for name, value in self.validate().items()})


def batches_seen(model: keras.Model) -> int:
    """Return the number of batches that the optimizer of a model has seen."""
    return int(batch_counter(model.optimizer).numpy())


def diverged(model: keras.Model) -> DivergenceError:
    """Return the error for a loss or gradient that is not finite."""
    return DivergenceError(
        f"step {batches_seen(model)}: {NOT_FINITE}; the update was not applied; try a lower "
        "learning_rate"
    )


@contextlib.contextmanager
def training_errors(model: keras.Model) -> Iterator[None]:
    """Raise in one line what fails in the graph of a step or of a dataset of strings."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if NOT_FINITE in str(error):
            raise diverged(model) from None
        if "UserError: " not in str(error):
            raise
        raise UserError(tensorflow_reason(error).partition("UserError: ")[2]) from None
