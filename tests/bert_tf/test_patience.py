"""Early stopping: a run ends at the same step, even if it is killed anywhere."""

import json
import math
import os
import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW
from bert_tf.errors import DivergenceError
from bert_tf.runs.checkpoints import CheckpointManager, read
from bert_tf.runs.run import Run
from bert_tf.train import loop
from bert_tf.train.distribution import make_strategy
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.losses import softmax_cross_entropy
from bert_tf.train.signals import Interrupted
from bert_tf.train.step import TrainStep
from tests import small
from tests.pretraining import stop_at

LAST = 12
# One evaluation per two steps. The best is the second; an equal score is no improvement.
SCORES = {2: 0.5, 4: 0.7, 6: 0.6, 8: 0.7, 10: 0.7, 12: 0.9}


class Killed(BaseException):
    """Simulated end of the process."""


class Linear(keras.Model):
    """Smallest possible model."""

    def build(self, inputs_shape=None):
        self.head = keras.layers.Dense(3, name="head")
        self.head.build((None, 7))

    def call(self, inputs, training=False, seed=None):
        return {"label": self.head(tf.cast(inputs["input_ids"], tf.float32))}


@pytest.fixture
def train(tmp_path, config, vocabulary):
    """Return a function that trains or resumes a run whose evaluations return SCORES."""

    def call(name="run", patience=3, scores=SCORES, last=LAST, optimizer=None, log_every=5):
        path, said = tmp_path / name, []
        if Run.exists(path):
            run = Run.open(path)
        else:
            run = Run.create(path, config, vocabulary, {})
        keras.utils.set_random_seed(0)
        model = Linear(name="linear")
        model.build()
        losses = {"label": softmax_cross_entropy}
        optimizer = optimizer or AdamW(1e-3)
        step = TrainStep(model, losses, optimizer, make_strategy("none"), seed=0)

        def evaluate():
            score = scores[int(step.optimizer.iterations)]
            return score, {"dev_accuracy": score}

        TrainingLoop(
            run,
            step,
            lambda step, local: small.batches().skip(step),
            last,
            save_every=3,
            log_every=log_every,
            log=said.append,
            evaluate=evaluate if scores else None,
            evaluate_every=2,
            patience=patience,
        ).train()
        return run, said

    return call


def lines_of(run):
    return [
        {name: value for name, value in line.items() if name != "examples_per_second"}
        for line in run.metrics()
    ]


@pytest.mark.parametrize(("patience", "last"), [(1, 6), (2, 8), (3, 10), (4, 12), (None, 12)])
def test_a_run_ends_after_the_given_number_of_evaluations_without_improvement(
    train, patience, last
):
    run, said = train(patience=patience)
    assert run.checkpoints.steps()[-1] == last
    scores = [(line["step"], line["score"]) for line in run.metrics() if "score" in line]
    assert scores == [(step, score) for step, score in SCORES.items() if step <= last]
    stopped = [line for line in said if line.startswith("stopped early")]
    if last == LAST:
        assert stopped == []
    else:
        assert stopped == [
            f"stopped early at step {last} of 12: no better score in the last {patience} "
            f"evaluation{'s' * (patience > 1)}"
        ]
    assert run.is_finished(LAST, True, patience)
    assert run.is_finished(LAST, True, None) == (last == LAST)
    assert not run.is_finished(LAST + 1, True, None)
    # Another call does nothing.
    before = lines_of(run)
    again, said = train(patience=patience)
    assert not [line for line in said if line.startswith("step ")]
    assert lines_of(again) == before and again.checkpoints.steps()[-1] == last


def test_without_evaluations_a_checkpoint_is_saved_where_they_would_be(train, monkeypatch):
    saved, save = [], CheckpointManager.save

    def recorded(self, step, variables):
        saved.append(step)
        save(self, step, variables)

    monkeypatch.setattr(CheckpointManager, "save", recorded)
    train(scores=None)
    assert saved == [2, 3, 4, 6, 8, 9, 10, 12]


def test_the_rate_counts_the_time_of_each_step(train, monkeypatch):
    """A step takes one second of this clock, and the first one is not counted."""
    now, steps = [0.0], TrainingLoop._steps

    def timed(self, *arguments):
        now[0] += 1
        return steps(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "_steps", timed)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    run, _ = train(scores=None)
    rates = [line["examples_per_second"] for line in run.metrics() if "loss" in line]
    assert rates == [8.0] * 3  # A batch has 8 rows.


def test_the_first_call_has_no_rate(train):
    """It is not timed, since it builds the graph."""
    run, said = train(scores=None, last=3, log_every=1)
    assert ["examples_per_second" in line for line in run.metrics()] == [False, True, True]
    for text in ("examples/s", "ETA"):
        assert [text in line for line in said] == [False, True, True]


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_a_gpu_computes_the_next_call_while_the_host_reads_and_logs(
    train, monkeypatch, is_accelerated
):
    """Step 4 is saved and step 5 is logged; a CPU has computed the results already."""
    with monkeypatch.context() as context:
        context.setattr(loop, "is_accelerated", lambda strategy: is_accelerated)
        events = []
        for name in ("_steps", "_log_step"):
            original = getattr(TrainingLoop, name)

            def call(*arguments, original=original, name=name):
                events.append(name)
                return original(*arguments)

            context.setattr(TrainingLoop, name, call)
        run, _ = train(scores=None, last=6)
    late = ["_steps", "_steps", "_log_step", "_log_step"]
    at_once = ["_steps", "_log_step", "_steps", "_log_step"]
    assert events == ["_steps"] * 4 + (late if is_accelerated else at_once)
    assert lines_of(run) == lines_of(train("other", scores=None, last=6)[0])


def test_what_was_not_read_yet_is_logged_before_an_error(train, tmp_path, monkeypatch):
    steps = TrainingLoop._steps

    def fail(self, iterator, step, *rest):
        if step == 5:
            raise tf.errors.InternalError(None, None, "of the device")
        return steps(self, iterator, step, *rest)

    monkeypatch.setattr(loop, "is_accelerated", lambda strategy: True)
    monkeypatch.setattr(TrainingLoop, "_steps", fail)
    with pytest.raises(tf.errors.InternalError, match="of the device"):
        train(scores=None, last=6)
    assert [line["step"] for line in Run.open(tmp_path / "run").metrics()] == [5]


def test_a_nan_score_is_no_improvement(train):
    run, _ = train(patience=2, scores={2: math.nan, 4: math.nan, 6: 1.0})
    assert run.checkpoints.steps()[-1] == 4


def kill_at(monkeypatch, owner, name, step, after):
    """End the process before, or after, `owner.name` at that step."""
    original = getattr(owner, name)

    def killed(self, first, *rest):
        at = first["step"] if isinstance(first, dict) else first
        # Log calls of training at that step are not meant.
        is_it = at == step and (not isinstance(first, dict) or "score" in first)
        if is_it and not after:
            raise Killed
        original(self, first, *rest)
        if is_it:
            raise Killed

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("owner", "name", "after", "step"),
    [
        pytest.param(CheckpointManager, "save", False, 10, marks=pytest.mark.slow),
        (CheckpointManager, "save", True, 10),
        (Run, "log_metrics", True, 10),
        pytest.param(CheckpointManager, "annotate", True, 10, marks=pytest.mark.slow),
        pytest.param(Run, "log_metrics", True, 6, marks=pytest.mark.slow),
        pytest.param(CheckpointManager, "annotate", True, 6, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_anywhere_stops_at_the_same_step(train, monkeypatch, owner, name, after, step):
    complete, _ = train("whole")
    with monkeypatch.context() as context:
        kill_at(context, owner, name, step, after)
        with pytest.raises(Killed):
            train("killed")
    killed = Run.open(complete.path.replace("whole", "killed"))
    # Nothing remains to be done only if the last evaluation was recorded.
    assert killed.is_finished(LAST, True, 3) == (step == 10 and name == "annotate")
    run, said = train("killed")
    assert run.is_finished(LAST, True, 3) and said[-1].startswith("stopped early at step 10 of 12")
    assert lines_of(run) == lines_of(complete)
    weights, expected = (read(one.checkpoints.path(10)) for one in (run, complete))
    for key, array in expected.items():
        np.testing.assert_array_equal(weights[key], array, err_msg=key)


def test_a_stop_request_at_an_evaluation_is_honored_after_it_at_the_same_step(train, monkeypatch):
    original = TrainingLoop._steps

    def step(loop, iterator, number, asked, count, norm):
        logs = original(loop, iterator, number, asked, count, norm)
        if number + count == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return logs

    with monkeypatch.context() as context:
        context.setattr(TrainingLoop, "_steps", step)
        with pytest.raises(Interrupted, match="stopped and saved at step 10 of 12"):
            train()
    run, said = train()
    assert said[-1].startswith("stopped early at step 10") and run.checkpoints.steps()[-1] == 10
    assert [line["step"] for line in run.metrics() if "score" in line] == [2, 4, 6, 8, 10]


def test_a_stop_request_during_the_last_evaluation_is_honored_after_it(train, monkeypatch):
    """Otherwise what follows the loop, such as the next run of a sweep, would start."""
    original = TrainingLoop._evaluate

    def evaluate(loop, step):
        if step == LAST:
            signal.raise_signal(signal.SIGTERM)
        original(loop, step)

    with monkeypatch.context() as context:
        context.setattr(TrainingLoop, "_evaluate", evaluate)
        with pytest.raises(Interrupted, match="SIGTERM: stopped and saved at step 12 of 12"):
            train(patience=None)
    run, said = train(patience=None)
    assert run.is_finished(LAST, True) and said == []


def test_a_run_beyond_a_lowered_number_of_steps_is_evaluated(train, monkeypatch):
    scores = {2: 0.5, 3: 0.7}
    with monkeypatch.context() as context:
        stop_at(context, 3)
        with pytest.raises(Interrupted, match="stopped and saved at step 3 of 4"):
            train(patience=None, scores=scores, last=4)
    run, _ = train(patience=None, scores=scores, last=2)
    assert run.is_finished(2, True) and run.checkpoints.steps()[-1] == 3
    assert {line["step"]: line["score"] for line in run.metrics() if "score" in line} == scores
    assert train(patience=None, scores=scores, last=2)[1] == []


def test_a_diverged_run_with_a_scaled_loss_counts_the_updates_that_it_skipped(train):
    """Let the first update make the weights infinite; then 15 skipped ones halve the scale to 1."""
    with pytest.raises(DivergenceError, match="^step 16: the loss or its gradient is not finite"):
        train(scores=None, last=20, optimizer=AdamW(math.inf, scales_loss=True))


def test_a_damaged_last_checkpoint_is_trained_again(train):
    run, _ = train()
    before = lines_of(run)
    data = f"{run.checkpoints.path(10)}/variables.data-00000-of-00001"
    os.truncate(data, os.path.getsize(data) // 2)
    assert not run.is_finished(LAST, True, 3)
    run, said = train()
    assert said[-1].startswith("stopped early at step 10 of 12") and run.is_finished(LAST, True, 3)
    assert lines_of(run) == before


def test_a_partial_line_of_a_killed_process_is_ignored(train):
    run, _ = train()
    before = run.metrics()
    with open(run.file("metrics.jsonl"), "a") as lines:
        lines.write(json.dumps({"step": 11, "loss": 1.0})[:9])
    assert run.metrics() == before and run.is_finished(LAST, True, 3)


def test_a_run_without_evaluations_is_finished_at_its_last_step(tmp_path, config, vocabulary):
    run = Run.create(tmp_path / "run", config, vocabulary, {})
    assert not run.is_finished(0, False)
    run.checkpoints.save(5, {"step": AdamW(1e-3).iterations})
    assert run.is_finished(5, False) and run.is_finished(4, False) and not run.is_finished(6, False)
    assert not run.is_finished(5, True)  # The evaluation is missing.
