"""Training loop of pretraining and fine-tuning: step, log, save, evaluate, stop, resume."""

import dataclasses
import datetime
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from bert_tf.data.batches import bad_record
from bert_tf.errors import DivergenceError
from bert_tf.runs.checkpoints import CHECKPOINT_FILES, assign, model_variables, read
from bert_tf.runs.run import Run
from bert_tf.system.progress import Progress
from bert_tf.train.compilation import is_accelerated
from bert_tf.train.distribution import (
    LocalReplicas,
    distribute,
    from_chief,
    in_any_process,
    is_chief,
    is_multi_worker,
    lost_worker,
)
from bert_tf.train.optimizer import NOT_FINITE
from bert_tf.train.shared_files import wait_for_files
from bert_tf.train.signals import Interrupted, defer_signals
from bert_tf.train.step import COUNTS, TrainStep


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """Train, log, save and evaluate at fixed step intervals.

    The position in the data follows from the step, so a checkpoint needs no iterator state.

    Attributes:
        run: Run directory, open.
        step: Train step; holds model, optimizer and strategy.
        batches: Callable from the first step and the replicas of this process to a
            `tf.data.Dataset`. Each element is one replica's batch; a step reads one element per
            replica.
        num_train_steps: Total number of steps.
        save_every: Steps between checkpoints.
        log_every: Steps between progress lines.
        log: Receives one line per call.
        evaluate: Returns the score and a dict of metrics. The highest score is the best. `None`
            for no evaluation.
        evaluate_every: Steps between evaluations, such as an epoch; the last step is always
            evaluated. A checkpoint is saved there without `evaluate` as well.
        throughput_unit: "examples" or "tokens", the unit of the logged rate.
        last_step: Step to stop at before `num_train_steps`, the end of a phase.
        flops_per_token: Floating-point operations per token, forward and backward. Adds TFLOP/s to
            the progress lines.
        describe_position: Maps a step to its position in the data, for error messages.
        steps_per_execution: Steps per tf.function call, fewer if something is due earlier.
        patience: Evaluations without improvement before stopping. `Run.is_finished` recognizes
            such a run afterwards. `None` for no early stopping.
        log_wait: Receives lines on files that this worker waits for, also if `log` is silent.
    """

    run: Run
    step: TrainStep
    batches: Callable[[int, LocalReplicas], tf.data.Dataset]
    num_train_steps: int
    save_every: int
    log_every: int
    log: Callable[[str], None]
    evaluate: Callable[[], tuple[float, dict[str, float]]] | None = None
    evaluate_every: int = 0
    throughput_unit: str = "examples"
    last_step: int | None = None
    flops_per_token: float | None = None
    describe_position: Callable[[int], str] | None = None
    steps_per_execution: int = 1
    patience: int | None = None
    log_wait: Callable[[str], None] = lambda line: None

    def train(self) -> None:
        """Train to the last step, from the latest checkpoint if there is one.

        Raises:
            Interrupted: After Ctrl-C or SIGTERM, once the current step is saved.
            DivergenceError: The loss or its gradient is not finite.
            UserError: A shard is missing or damaged, or a worker is lost.
        """
        checkpoints, variables = self.run.checkpoints, self.variables()
        end = self._end
        step = self._restore(variables)
        if step is None:
            step = 0
        else:
            # A finished phase is skipped; the last one that was reached evaluates what is missing.
            is_past = step > end and end < self.num_train_steps
            if is_past or (step >= end and not self._is_due(step)):
                return
            self.log(f"resuming at step {step} of {self.num_train_steps}")
        # The process may have been killed between a save and its evaluation.
        is_due = self._is_due(step)
        self.run.forget_metrics_after(step, and_evaluation=is_due)
        # The order of the examples is a function of the seed, so a dataset that starts at the
        # restored step continues exactly where the previous process stopped.
        iterator = iter(
            distribute(
                lambda replicas: self.batches(step, replicas),
                self.step.strategy,
                self.step.is_compiled,
            )
        )
        clock, is_late = _Clock(self.throughput_unit), is_accelerated(self.step.strategy)
        progress = Progress(self.log, "steps", self.num_train_steps, step)
        with defer_signals() as signal_arrived, progress:
            if is_due:
                self._evaluate(step)
            patience_exhausted = self._patience_exhausted()
            # Results of calls, their first steps, and their numbers of steps.
            unread: list[tuple[dict[str, tf.Tensor], int, int]] = []
            logs, no_norm = None, tf.constant(0.0)
            while step < end and not patience_exhausted:
                # A call never crosses a log line, checkpoint or evaluation, so Python handles each
                # in time.
                count = self._steps_until_next_event(step, end)
                norm = unread[-1][0]["gradient_norm"] if unread else no_norm
                asked = signal_arrived() is not None
                try:
                    results = self._steps(iterator, step, asked, count, norm)
                except Exception:
                    self._read(unread, 0, clock, progress)  # The steps before are logged.
                    raise
                unread.append((results, step, count))
                step += count
                evaluates, is_last = self._evaluates_at(step), step == end
                is_saved = is_last or any(step % every == 0 for every in self._save_intervals)
                # Results are read one call late, so that a GPU never waits for Python, unless
                # something is due that needs them. The clock starts at the end of the first call.
                # A CPU has computed them already.
                is_read = is_saved or not clock.first_call_is_over or not is_late
                logs = self._read(unread, 0 if is_read else 1, clock, progress) or logs
                progress.move(step)
                signum = self._asked(logs, signal_arrived())
                # The checkpoint precedes the evaluation: if the process dies while it evaluates, a
                # restart repeats the evaluation only.
                if is_saved or signum:
                    logs = self._read(unread, 0, clock, progress) or logs
                    checkpoints.save(step, variables)
                if signum:
                    raise self._interrupted(step, signum)
                if evaluates:
                    self._evaluate(step)
                    clock.restart()
                    patience_exhausted = self._patience_exhausted()
            # No step follows that would see a signal of the last evaluation, but further phases,
            # runs of a sweep and tuning do.
            if in_any_process(self.step.strategy, signal_arrived() is not None):
                raise self._interrupted(step, signal_arrived() or signal.SIGTERM)
        if patience_exhausted and step < end:
            self.log(
                f"stopped early at step {step} of {self.num_train_steps}: no better score in the "
                f"last {self.patience} evaluation{'s' * (self.patience != 1)}"
            )

    def _read(self, unread, num_kept, clock, progress):
        """Read the results of all calls but the last `num_kept`; return the last read, or `None`.

        Reading waits for the call to end. Its last step is logged if a progress line is due.
        """
        logs = None
        while len(unread) > num_kept:
            logs, first, count = unread.pop(0)
            try:
                is_finite = math.isfinite(logs["gradient_norm"])  # XLA drops the check that raises.
            except tf.errors.OpError as error:
                raise self._user_error(error, first, count) or error from None
            if not is_finite:
                raise self._not_finite(first, count)
            clock.count(logs, count)
            step = first + count
            if step == self._end or step % self.log_every == 0:
                self._log_step(step, logs, clock, progress)
        return logs

    def _restore(self, variables):
        """Restore the latest checkpoint; return its step, or `None` if there is none.

        The chief sets damaged checkpoints aside and selects the step, which the others read.
        """
        strategy, checkpoints = self.step.strategy, self.run.checkpoints

        def restore():
            step = checkpoints.restore_latest(variables, self.log)
            return -1 if step is None else step

        step = from_chief(strategy, restore)
        if step < 0:
            return None
        directory = checkpoints.path(step)
        wait_for_files(strategy, directory, CHECKPOINT_FILES, self.log_wait)
        if not is_chief(strategy):
            assign(variables, read(directory), where=directory)
        return step

    def _asked(self, logs, signum):
        """Return the signal to stop for, or `None`.

        With several workers, the one that the last step reported to all of them.
        """
        if not is_multi_worker(self.step.strategy):
            return signum
        # All workers have to stop at the same step, so they act on the all-reduced count of the
        # step and not on the signal that they have received themselves.
        is_asked = logs is not None and int(logs["asked_to_stop"])
        return (signum or signal.SIGTERM) if is_asked else None

    def _interrupted(self, step, signum):
        """Return the error after a signal; the checkpoint of the step is saved."""
        return Interrupted(
            f"{signal.Signals(signum).name}: stopped and saved at step {step} of "
            f"{self.num_train_steps} in {self.run.path}; rerun the same command to resume",
            signum,
        )

    def _steps_until_next_event(self, step, end):
        """Return the number of steps until the next log line, checkpoint, evaluation or end."""
        intervals = [self.log_every, *self._save_intervals]
        return min(
            self.steps_per_execution, end - step, *(every - step % every for every in intervals)
        )

    @property
    def _end(self):
        """Step at which this phase ends."""
        return self.num_train_steps if self.last_step is None else self.last_step

    @property
    def _save_intervals(self):
        """Steps between checkpoints, and between evaluations, which follow a checkpoint."""
        return [every for every in (self.save_every, self.evaluate_every) if every]

    def _steps(self, iterator, step, is_asked_to_stop, count, norm):
        """Run `count` steps in one call, after one that returned `norm`; translate their errors."""
        # A tensor, because each Python value would be traced as a new function.
        asked = tf.constant(is_asked_to_stop)
        try:
            if self.steps_per_execution == 1:
                return self.step(iterator, asked, gradient_norm=norm)
            return self.step(iterator, asked, tf.constant(count), norm)
        except tf.errors.OpError as error:
            raise self._user_error(error, step, count) or error from None

    def _user_error(self, error, step, count):
        """Return the `UserError` for a TensorFlow error of `count` steps from `step`, or `None`."""
        if isinstance(error, tf.errors.InvalidArgumentError) and NOT_FINITE in str(error):
            return self._not_finite(step, count)
        where = f"{self._where(step)}: "
        return bad_record(error, where) or lost_worker(error, where)

    def _not_finite(self, step, count):
        """Return the error for a loss or gradient that is not finite, in `count` steps."""
        optimizer = self.step.optimizer
        if not optimizer.scales_loss:  # Otherwise it does not count the updates that it skipped.
            # With several steps per call only the optimizer knows at which one it stopped.
            step, count = int(optimizer.iterations), 1
        return DivergenceError(
            f"{self._where(step, count)}: {NOT_FINITE}; the update was not applied and "
            f"{self.run.checkpoints.directory} is unaffected; try a lower --learning_rate in a "
            "new --output_dir"
        )

    def _where(self, step, count=1):
        """Describe a step, or one of several, and the position of the first in the data."""
        steps = f"step {step}" if count == 1 else f"steps {step} to {step + count - 1}"
        return steps + (f" ({self.describe_position(step)})" if self.describe_position else "")

    def variables(self) -> dict[str, Any]:
        """Return all variables of a checkpoint by name: model, dropout seeds, slots, step."""
        self.step.optimizer.build(self.step.model.trainable_variables)
        model = model_variables(self.step.model)
        names = {variable.path: name for name, variable in model.items()}
        return {**model, **self.step.optimizer.state(names)}

    def _evaluates_at(self, step):
        """Return True if an evaluation follows this step."""
        is_end = step >= self.num_train_steps  # Their number may have been lowered.
        return (
            self.evaluate is not None and step > 0 and (is_end or step % self.evaluate_every == 0)
        )

    def _is_due(self, step):
        """Return True if the saved step still has to be evaluated."""
        return self._evaluates_at(step) and from_chief(
            self.step.strategy, lambda: "score" not in self.run.checkpoints.info(step)
        )

    def _evaluate(self, step):
        """Evaluate, record the metrics and annotate the checkpoint with its score."""
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
        """Return the chief's decision on early stopping, in all processes."""
        return self.patience is not None and from_chief(
            self.step.strategy, lambda: self.run.patience_exhausted(self.patience)
        )

    def _log_step(self, step, logs, clock, progress):
        """Record the metrics of a step and show them."""
        values = {name: float(value) for name, value in logs.items() if name not in COUNTS}
        parts = [f"step {step}/{self.num_train_steps}", f"loss {values['loss']:.4f}"]
        parts += [f"{name} {values[name]:.4f}" for name in self.step.metrics]
        parts.append(f"lr {values['learning_rate']:.2e}")
        if clock.seconds:  # Nothing is known of the time of a step after the first call alone.
            rate = clock.units / clock.seconds
            values[f"{self.throughput_unit}_per_second"] = round(rate, 1)
            parts.append(f"{rate:.0f} {self.throughput_unit}/s")
            if self.flops_per_token is not None:
                flops = clock.tokens / clock.seconds * self.flops_per_token
                parts.append(f"{flops / 1e12:.3f} TFLOP/s")
            left = round(clock.seconds / clock.steps * (self.num_train_steps - step))
            parts.append(f"ETA {datetime.timedelta(seconds=left)}")
        self.run.log_metrics({"step": step, **values})
        progress.show("  ".join(parts), loss=f"{values['loss']:.4f}")


class _Clock:
    """Rates over the steps so far, without the first call, which builds the graph."""

    def __init__(self, throughput_unit: str) -> None:
        self.throughput_unit = throughput_unit
        self.first_call_is_over = False
        self.steps = self.units = self.tokens = 0
        self.seconds = 0.0
        self.since = time.monotonic()

    def count(self, logs: Mapping[str, tf.Tensor], steps: int) -> None:
        """Add the counts of a call of `steps` steps."""
        units, tokens = int(logs[self.throughput_unit]), int(logs["tokens"])  # Blocks until done.
        now = time.monotonic()
        if self.first_call_is_over:
            self.steps += steps
            self.units += units
            self.tokens += tokens
            self.seconds += now - self.since
        self.first_call_is_over, self.since = True, now

    def restart(self) -> None:
        """Exclude the time since the last step, which was spent on an evaluation."""
        self.since = time.monotonic()
