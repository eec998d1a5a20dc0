"""Fine-tuning: it learns, resumes bitwise equal, stops on request, and rejects bad input."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, Vocabulary
from bert_tf.config import read_json_object
from bert_tf.model import encoder
from bert_tf.model.layout import infer_layout
from bert_tf.pretraining.recipe import pretrain
from bert_tf.pretraining.settings import PretrainSettings
from bert_tf.runs.checkpoints import read
from bert_tf.runs.run import Run
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.signals import Interrupted
from bert_tf.weights import name_map
from tasks.base.task import task_from_dict
from tasks.finetuning.recipe import finetune
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.conftest import ROOT, WORDS
from tests.corpus import ENTRIES, config_of, write_shards
from tests.pretraining import prepared


def metrics_of(run):
    """Return the lines of metrics.jsonl without the values that depend on the clock."""
    lines = run.metrics()
    return [
        {name: value for name, value in line.items() if name != "examples_per_second"}
        for line in lines
    ]


@pytest.fixture
def settings(huggingface_dir, complaints, tmp_path):
    return small.settings(huggingface_dir, complaints, tmp_path / "run")


def flags(settings, **changes):
    values = {**dataclasses.asdict(settings), **changes}
    return [
        f"--{name}={','.join(value) if isinstance(value, tuple) else value}"
        for name, value in values.items()
        if value not in (None, ())
    ]


@pytest.mark.slow
def test_it_learns_and_the_run_directory_records_it(settings):
    said = []
    run = finetune(dataclasses.replace(settings, epochs=12, seed=1), said.append)
    assert run.checkpoints.info(run.checkpoints.best_step())["metrics"]["dev_accuracy"] == 1.0
    labels = ("billing", "hardware", "software")
    assert task_from_dict(run.task) == ClassificationTask(labels=labels, max_seq_length=12)
    written = read_json_object(run.file("train.json"))
    assert written["settings"]["learning_rate"] == 1e-2
    assert "output_dir" not in written["settings"]
    assert written["origin"] == "Hugging Face directory huggingface"
    assert set(written["data"]) == {settings.train, *settings.dev}
    steps = [line["step"] for line in metrics_of(run) if "dev_accuracy" in line]
    assert steps == [*range(4, 49, 4)]  # 27 rows in batches of 8: 4 steps per epoch.
    assert any(
        line.startswith("step 2/48  loss ") and "examples/s  ETA 0:00:" in line for line in said
    )


@pytest.mark.slow
def test_no_padding_is_computed_in_training_evaluation_and_prediction(settings, monkeypatch):
    is_flat = []

    def spy(inputs):
        is_flat.append("row_splits" in inputs)
        return infer_layout(inputs)

    monkeypatch.setattr(encoder, "infer_layout", spy)
    run = finetune(dataclasses.replace(settings, epochs=1))
    in_training = len(is_flat)
    load_model(run.path).serving.pipeline.predict(text=tf.constant(["the bill"]))
    assert 2 <= in_training < len(is_flat) and all(is_flat)


@pytest.mark.slow
def test_a_checkpoint_covers_model_optimizer_and_seeds(settings):
    run = finetune(dataclasses.replace(settings, epochs=1))
    weights = {*name_map.weight_shapes(run.config), "classifier/kernel", "classifier/bias"}
    slots = {f"{name}/{slot}" for name in weights for slot in ("adam_m", "adam_v")}
    assert set(read(run.checkpoints.path(4))) == weights | slots | {
        "step",
        "dropout_seed/seed_generator_state",
    }


@pytest.mark.slow
def test_stopped_at_any_step_it_resumes_bitwise_equal(settings, tmp_path, monkeypatch):
    complete = finetune(settings)
    final = read(complete.checkpoints.path(8))
    for stop in (1, 4):  # Within an epoch, and at its end before the evaluation.
        changed = dataclasses.replace(settings, output_dir=str(tmp_path / f"stopped{stop}"))
        original, count = TrainingLoop._steps, []

        def step(
            loop, iterator, number, asked, steps, norm, original=original, count=count, stop=stop
        ):
            logs = original(loop, iterator, number, asked, steps, norm)
            count.append(number)
            if len(count) == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return logs

        monkeypatch.setattr(TrainingLoop, "_steps", step)
        with pytest.raises(
            Interrupted,
            match=f"SIGTERM: stopped and saved at step {stop} of 8 .*; rerun the same command to",
        ):
            finetune(changed)
        monkeypatch.setattr(TrainingLoop, "_steps", original)
        said = []
        resumed = finetune(changed, said.append)
        assert any(line == f"resuming at step {stop} of 8" for line in said)
        for name, array in read(resumed.checkpoints.path(8)).items():
            np.testing.assert_array_equal(array, final[name], err_msg=f"{name}, stopped at {stop}")
        assert metrics_of(resumed) == metrics_of(complete)


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_last_save(settings, tmp_path):
    complete = finetune(settings)
    code = (
        "import os, sys\nfrom bert_tf.train.loop import TrainingLoop\n"
        "from tasks.finetuning import recipe, settings\noriginal = TrainingLoop._steps\n"
        "def step(loop, iterator, number, *rest):\n"
        "    if number == 6: os.kill(os.getpid(), 9)\n"
        "    return original(loop, iterator, number, *rest)\n"
        "TrainingLoop._steps = step\nimport json\nvalues = json.loads(sys.argv[1])\n"
        "values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}\n"
        "recipe.finetune(settings.FinetuneSettings(**values))"
    )
    changed = dataclasses.replace(settings, output_dir=str(tmp_path / "killed"))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(dataclasses.asdict(changed))],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == -9
    assert Run.open(changed.output_dir).checkpoints.steps() == [4]
    resumed = finetune(changed)
    for name, array in read(resumed.checkpoints.path(8)).items():
        np.testing.assert_array_equal(array, read(complete.checkpoints.path(8))[name], err_msg=name)
    assert metrics_of(resumed) == metrics_of(complete)


@pytest.mark.slow
def test_two_replicas_train_the_same_run(settings, huggingface_dir, tmp_path, mirrored):
    """Disable dropout and compare losses and dev metrics; 27 rows leave a partial last batch."""
    config = json.loads((huggingface_dir / "config.json").read_text())
    (huggingface_dir / "config.json").write_text(
        json.dumps({**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    )
    settings = dataclasses.replace(settings, learning_rate=1e-3)
    one = finetune(settings)
    two = finetune(
        dataclasses.replace(settings, output_dir=str(tmp_path / "two")), strategy=mirrored
    )
    for first, second in zip(metrics_of(one), metrics_of(two), strict=True):
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_a_finished_run_is_reported_and_a_changed_flag_is_rejected_by_name(settings):
    finetune(settings)
    said = []
    finetune(settings, said.append)
    assert len(said) == 1 and "finished at step 8, nothing to do" in said[0]
    finetune(dataclasses.replace(settings, log_every=5, save_every=3), said.append)
    with pytest.raises(
        UserError, match="--learning_rate: was 0.01 when .* was created, is now 0.02"
    ):
        finetune(dataclasses.replace(settings, learning_rate=0.02))
    with pytest.raises(UserError, match="--epochs: was 2"):
        finetune(dataclasses.replace(settings, epochs=3))
    moved = shutil.copy(settings.train, f"{settings.train}.moved.csv")
    dev = tuple(shutil.copy(path, f"{path}.moved.csv") for path in settings.dev)
    finetune(dataclasses.replace(settings, train=moved, dev=dev), said.append)
    assert "finished at step 8, nothing to do" in said[-1]
    small.write_rows(
        settings.train, [("the bill", "billing"), ("a screen", "hardware"), ("app", "software")]
    )
    with pytest.raises(UserError, match="--train, --dev: the files differ from those that"):
        finetune(settings)


def test_the_weights_that_a_run_may_have_been_started_from_are_not_checked(settings, tmp_path):
    gone = dataclasses.replace(settings, init_from=str(tmp_path / "gone"))
    dataclasses.replace(gone, output_dir="ram://started/run").check()
    with pytest.raises(UserError, match="gone: no such directory"):
        gone.check()


@pytest.mark.slow
def test_the_encoder_of_a_fine_tuned_run_initializes_the_next(settings, tmp_path):
    first = finetune(dataclasses.replace(settings, epochs=1))
    second = finetune(
        dataclasses.replace(
            settings, epochs=1, init_from=str(first.path), output_dir=str(tmp_path / "second")
        )
    )
    assert second.train["origin"].startswith("run ")


@pytest.mark.slow
def test_the_encoder_of_a_pretraining_run_is_used_without_its_heads(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of().to_dict()))
    pretrained = pretrain(
        PretrainSettings(
            shards=(str(write_shards(tmp_path / "data")),),
            config=str(tmp_path / "config.json"),
            output_dir=str(tmp_path / "pretrained"),
            num_train_steps=3,
            global_batch_size=8,
            warmup_steps=1,
        )
    )
    run = finetune(
        dataclasses.replace(
            settings,
            init_from=str(pretrained.path),
            global_batch_size=27,
            warmup_proportion=0.5,  # The first of two steps has rate 0, so the weights stay.
            save_every=1,
        )
    )
    source = pretrained.checkpoints.path(3)
    before, after = read(source), read(run.checkpoints.path(1))
    for name in name_map.weight_shapes(run.config):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert run.vocabulary.entries == tuple(ENTRIES)
    assert not [name for name in after if name.startswith(name_map.HEADS)]
    unused = "not used: masked_lm head, next_sentence head"
    assert run.train["origin"] == f"run {source} ({unused})"


@pytest.mark.slow
def test_pairs_binary_labels_and_runs_without_dev(settings, tmp_path):
    rows = [("the bill", "is too high", "same"), ("the screen", "my app", "other")] * 6
    path = small.write_rows(tmp_path / "pairs.csv", rows, ("first", "second", "relation"))
    run = finetune(
        dataclasses.replace(
            settings,
            train=str(path),
            dev=(),
            text_column="first",
            text_b_column="second",
            label_column="relation",
            labels=("other", "same"),
            output_dir=str(tmp_path / "pairs"),
        )
    )
    assert run.checkpoints.best_step() is None
    assert run.checkpoints.best_or_latest_step() == 4
    assert read(run.checkpoints.path(4))["classifier/kernel"].shape == (12, 1)


@pytest.mark.slow
def test_sst2_is_known_by_name(settings, tmp_path):
    """Use GLUE's file format: a header, sentence TAB label, and quotes as data."""
    (tmp_path / "train.tsv").write_text(
        "sentence\tlabel\n" + 'the bill is " high \t0\nmy app !\t1\n' * 4
    )
    changes = {
        "task": "sst2",
        "train": str(tmp_path / "train.tsv"),
        "dev": (str(small.same_rows(tmp_path / "train.tsv")),),
    }
    run = finetune(dataclasses.replace(settings, **changes))
    assert (run.task["labels"], run.task["file_format"]) == (["0", "1"], "sst2")
    assert {"dev_accuracy", "dev_f1", "dev_loss"} <= set(run.checkpoints.info(2)["metrics"])
    assert read(run.checkpoints.path(2))["classifier/kernel"].shape == (12, 1)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_saves_nothing(settings):
    changed = dataclasses.replace(settings, learning_rate=1e30, warmup_proportion=0.0)
    with pytest.raises(UserError, match="gradient is not finite; the update was not applied"):
        finetune(changed)
    assert Run.open(settings.output_dir).checkpoints.steps() == []
    finetune(settings)  # A run that has saved nothing does not block a retry.


@pytest.mark.slow
def test_a_user_error_found_late_leaves_no_run(settings, huggingface_dir, mirrored):
    with pytest.raises(
        UserError, match="--global_batch_size=3: expected a multiple of the 2 replicas"
    ):
        finetune(dataclasses.replace(settings, global_batch_size=3), strategy=mirrored)
    path = huggingface_dir / "vocab.txt"
    Vocabulary([*WORDS[:-1], "x" * 300]).save(path)
    with pytest.raises(UserError, match="vocabulary of 29 entries"):
        finetune(settings)
    Vocabulary(WORDS).save(path)
    assert not Run.exists(settings.output_dir)
    finetune(settings)


@pytest.mark.slow
def test_bfloat16_trains_and_keeps_float32_weights(settings):
    run = finetune(dataclasses.replace(settings, precision="bfloat16", epochs=1))
    assert {
        array.dtype.name
        for name, array in read(run.checkpoints.path(4)).items()
        if name.startswith("bert/")
    } == {"float32"}


@pytest.mark.slow
def test_the_commands_from_end_to_end(settings, run_command, complaints, tmp_path):
    """Run finetune, evaluate and predict as processes."""
    done = run_command("tasks.finetune", *flags(settings, epochs=12, seed=1))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (
        "Traceback" not in done.stderr and "0000 00:00" not in done.stderr
    )  # TensorFlow's startup lines are absent as well.

    done = run_command(
        "tasks.evaluate", f"--run={settings.output_dir}", f"--data={complaints['dev']}"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["accuracy"] == 1.0

    done = run_command(
        "tasks.predict",
        f"--run={settings.output_dir}",
        f"--input={complaints['dev']}",
        f"--output={tmp_path / 'answers.jsonl'}",
    )
    assert done.returncode == 0, done.stderr
    predictions = [
        json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    ]
    assert [prediction["label"] for prediction in predictions] == [
        label for label, texts in small.TEXTS.items() for _ in texts
    ]
    assert set(predictions[0]) == {"label", "score", "probabilities", "labels"}
    assert sum(predictions[0]["probabilities"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_an_impossible_output_dir_is_reported_in_one_line(settings, run_command, complaints):
    done = run_command("tasks.finetune", *flags(settings, output_dir=f"{complaints['dev']}/run"))
    assert done.returncode == 2 and "Not a directory" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_sigterm_makes_the_command_save_explain_resuming_and_exit_with_143(settings, tmp_path):
    """Send the signal once the first progress line is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.finetune", *flags(settings, epochs=2000)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait() == 143
    assert (
        "SIGTERM: stopped and saved at step" in rest
        and "rerun the same command to resume" in rest
        and "Traceback" not in rest
    )


@pytest.mark.parametrize(("compile", "steps"), [("kernels", 1), ("step", 20)])
def test_a_call_of_a_compiled_step_has_20_steps_and_auto_selects_a_precision(
    settings, monkeypatch, compile, steps
):
    said = []
    settings = dataclasses.replace(settings, precision="auto", compile=compile)
    loop = prepared(monkeypatch, lambda: finetune(settings, said.append))
    assert loop.steps_per_execution == steps
    compiled = "the step" if compile == "step" else "kernels"
    assert f"precision float32; XLA compiles {compiled}" in said
    assert loop.run.train["settings"]["precision"] == "float32"
