"""The training loop of every run: step, tell, save, evaluate, stop when asked, go on."""

import dataclasses
import datetime
import math
import signal
import time
from collections.abc import Callable

import tensorflow as tf

from bert_tf.checkpoints import model_variables
from bert_tf.data.batches import bad_record
from bert_tf.errors import DivergenceError, UserError
from bert_tf.run import Run
from bert_tf.train.distribution import (
    barrier,
    distribute,
    from_chief,
    is_chief,
    is_multi_worker,
    lost_worker,
)
from bert_tf.train.signals import Interrupted, defer_signals
from bert_tf.train.step import COUNTS, TrainStep


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """What a run does at which step. All intervals count steps.

    `batches(first_step)` gives the tf.data dataset from that step on, a replica batch an element,
    one for each replica a step: the position in the data is the step, nothing else has to be saved.
    `evaluate()` returns (score, metrics); the highest score is the best. `log` takes a line of
    progress, in which the rate counts `throughput_unit`, "examples" or "tokens". With `last_step`
    it ends there, before num_train_steps. `flops_per_token` are the model's, forward and backward.
    `describe_position` tells where in the data a step reads. With `steps_per_execution` TensorFlow
    is called once for so many steps, or for those that are left until there is something to do
    between two. With `patience` it ends early, once so many evaluations in a row were not better
    than the best before them; Run.is_finished tells afterwards that there is nothing left to do.
    """

    run: Run
    step: TrainStep
    batches: Callable[[int], tf.data.Dataset]
    num_train_steps: int
    save_every: int
    log_every: int
    log: Callable[[str], None]
    evaluate: Callable[[], tuple[float, dict]] | None = None
    evaluate_every: int = 0
    throughput_unit: str = "examples"
    last_step: int | None = None
    flops_per_token: float | None = None
    describe_position: Callable[[int], str] | None = None
    steps_per_execution: int = 1
    patience: int | None = None

    def train(self):
        """Trains to the end from the newest checkpoint, or from the model as it is.

        Raises Interrupted after Ctrl-C or SIGTERM, once the current step is saved.
        """
        checkpoints, variables = self.run.checkpoints, self.variables()
        end = self.num_train_steps if self.last_step is None else self.last_step
        step = self._restore(variables)
        if step is None:
            step = 0
        else:
            if step > end or (step == end and not self._is_due(step)):
                return
            self.log(f"resuming at step {step} of {self.num_train_steps}")
        # The process may have ended between a save and its evaluation.
        is_due = self._is_due(step)
        self.run.forget_metrics_after(step, and_evaluation=is_due)
        iterator = iter(distribute(lambda: self.batches(step), self.step.strategy))
        clock = _Clock(self.throughput_unit)
        with defer_signals() as signal_arrived:
            if is_due:
                self._evaluate(step)
            patience_exhausted = self._patience_exhausted()
            while step < end and not patience_exhausted:
                count = self._steps_until_next_event(step, end)
                logs = self._steps(iterator, step, signal_arrived() is not None, count)
                step += count
                clock.count(logs, count)
                if step % self.log_every == 0 or step == end:
                    self._log_step(step, logs, clock)
                evaluates, signum = self._evaluates_at(step), self._asked(logs, signal_arrived())
                is_last = step == end
                if evaluates or is_last or signum or step % self.save_every == 0:
                    checkpoints.save(step, variables)
                if signum:
                    raise Interrupted(
                        f"{signal.Signals(signum).name}: stopped and saved at step {step} of "
                        f"{self.num_train_steps} in {self.run.path}; the same command goes on",
                        signum,
                    )
                if evaluates:
                    self._evaluate(step)
                    clock.restart()
                    patience_exhausted = self._patience_exhausted()
        if patience_exhausted and step < end:
            self.log(
                f"stopped early at step {step} of {self.num_train_steps}: no better score in the "
                f"last {self.patience} evaluation{'s' * (self.patience > 1)}"
            )

    def _restore(self, variables):
        """The newest checkpoint's step, the same in all processes; the chief sets damage aside."""
        strategy, step = self.step.strategy, None
        for is_turn in (is_chief(strategy), not is_chief(strategy)):
            if is_turn:
                step = self.run.checkpoints.restore_latest(variables, self.log)
            barrier(strategy)
        number = -1 if step is None else step
        if from_chief(strategy, lambda: number) != number:
            raise UserError(
                f"{self.run.checkpoints.directory}: this worker restored "
                f"{'nothing' if step is None else f'step {step}'}, the first one something else; "
                "all workers need the same directory on shared storage"
            )
        return step

    def _asked(self, logs, signum):
        """The signal to stop for, or None; with several processes the one that all know of."""
        if not is_multi_worker(self.step.strategy):
            return signum
        return (signum or signal.SIGTERM) if int(logs["asked_to_stop"]) else None

    def _steps_until_next_event(self, step, end):
        """How many steps the next call makes: none of them but the last is told, saved, ..."""
        intervals = [self.log_every, self.save_every]
        if self.evaluate is not None:
            intervals.append(self.evaluate_every)
        return min(
            self.steps_per_execution, end - step, *(every - step % every for every in intervals)
        )

    def _steps(self, iterator, step, is_asked_to_stop, count):
        asked = tf.constant(is_asked_to_stop)
        try:
            if self.steps_per_execution == 1:
                logs = self.step(iterator, asked)
            else:
                logs = self.step(iterator, asked, tf.constant(count))
        except tf.errors.OpError as error:
            user_error = self._user_error(error, step)
            if user_error is None:
                raise
            raise user_error from None
        if not math.isfinite(logs["gradient_norm"]):  # Compiled by XLA, where no check raises.
            raise self._not_finite()
        return logs

    def _user_error(self, error, step):
        """The UserError that an error of TensorFlow's in a step comes to, or None."""
        user_error = bad_record(error)
        if user_error is not None:
            return user_error
        if isinstance(error, tf.errors.InvalidArgumentError) and "not finite" in str(error):
            return self._not_finite()
        if isinstance(error, tf.errors.DataLossError):
            return UserError(
                f"{self._where(step)}: a shard is damaged ({error.message.splitlines()[0]}); "
                "bert_tf.inspect_shards names it"
            )
        return lost_worker(error, f"{self._where(step)}: ")

    def _not_finite(self):
        # Of several steps in a call the optimizer knows which it did not make.
        where = self._where(int(self.step.optimizer.iterations))
        return DivergenceError(
            f"{where}: the loss or its gradient is not finite; the update was not made, nothing "
            f"of it is in {self.run.checkpoints.directory}; try a lower --learning_rate in a "
            "new --output_dir"
        )

    def _where(self, step):
        return f"step {step}" + (
            f" ({self.describe_position(step)})" if self.describe_position else ""
        )

    def variables(self):
        """{name: variable} of all a checkpoint holds: model, dropout seeds, slots, step."""
        self.step.optimizer.build(self.step.model.trainable_variables)
        model = model_variables(self.step.model)
        names = {variable.path: name for name, variable in model.items()}
        return {**model, **self.step.optimizer.state(names)}

    def _evaluates_at(self, step):
        is_end = step == self.num_train_steps
        return (
            self.evaluate is not None and step > 0 and (is_end or step % self.evaluate_every == 0)
        )

    def _is_due(self, step):
        """True if the saved step still has to be evaluated."""
        return self._evaluates_at(step) and from_chief(
            self.step.strategy, lambda: "score" not in self.run.checkpoints.info(step)
        )

    def _evaluate(self, step):
        score, metrics = self.evaluate()
        self.run.log_metrics({"step": step, "score": score, **metrics})
        is_best = self.run.checkpoints.annotate(step, score, metrics)
        best = "  (best so far)" if is_best else ""
        self.log(
            f"step {step}  "
            + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            + best
        )

    def _patience_exhausted(self):
        return self.patience is not None and from_chief(
            self.step.strategy, lambda: self.run.patience_exhausted(self.patience)
        )

    def _log_step(self, step, logs, clock):
        values = {name: float(value) for name, value in logs.items() if name not in COUNTS}
        rate = clock.units_per_second()
        self.run.log_metrics(
            {"step": step, **values, f"{self.throughput_unit}_per_second": round(rate, 1)}
        )
        left = round(clock.seconds_per_step() * (self.num_train_steps - step))
        parts = [f"step {step}/{self.num_train_steps}", f"loss {values['loss']:.4f}"]
        parts += [f"{name} {values[name]:.4f}" for name in self.step.metrics]
        parts += [f"lr {values['learning_rate']:.2e}", f"{rate:.0f} {self.throughput_unit}/s"]
        if self.flops_per_token is not None:
            parts.append(f"{clock.tokens_per_second() * self.flops_per_token / 1e12:.3f} TFLOP/s")
        parts.append(f"ETA {datetime.timedelta(seconds=left)}")
        self.log("  ".join(parts))


class _Clock:
    """Rates over the steps so far, but for the first call, which builds the graph."""

    def __init__(self, throughput_unit):
        self.throughput_unit = throughput_unit
        self.first_call_is_over = False
        self.steps = self.units = self.tokens = self.seconds = 0
        self.since = time.monotonic()

    def count(self, logs, steps):
        units, tokens = int(logs[self.throughput_unit]), int(logs["tokens"])  # Waits for the step.
        now = time.monotonic()
        if self.first_call_is_over:
            self.steps += steps
            self.units += units
            self.tokens += tokens
            self.seconds += now - self.since
        self.first_call_is_over, self.since = True, now

    def restart(self):
        """Leaves the time since the last step out: it went into an evaluation."""
        self.since = time.monotonic()

    def units_per_second(self):
        return self.units / self.seconds if self.seconds else 0.0

    def tokens_per_second(self):
        return self.tokens / self.seconds if self.seconds else 0.0

    def seconds_per_step(self):
        return self.seconds / self.steps if self.steps else 0.0
