"""Distillation: terms of the loss, unlabelled rows, the file of the teacher's outputs, errors."""

import dataclasses
import pathlib
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

import export
import tasks
from bert_tf import UserError, Vocabulary
from bert_tf.runs import checkpoints
from bert_tf.runs.checkpoints import CheckpointManager
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.text.encoder_inputs import to_flat
from tasks import load_model
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.readers.rows import BadRow
from tasks.finetuning.recipe import finetune, read
from tasks.graph.published import TASK_OF_VERSION
from tasks.training.distillation import Distillation, read_teacher
from tests import small
from tests.conftest import WORDS
from tests.tasks.test_task_model import CASES, create

pytestmark = pytest.mark.medium

TEXTS = [text for texts in small.TEXTS.values() for text in texts]
TRAINED = ("TextClassifier", "TextRegressor", "TokenClassifier", "QuestionAnswerer")
SETTINGS = {"global_batch_size": 2, "epochs": 2, "learning_rate": 1e-3}


class Stopped(Exception):
    """Raised by a log function, in place of an interruption."""


def stop_at(start, lines):
    """Return a log function that keeps lines, and stops at one before the first step."""

    def log(line):
        lines.append(line)
        if line.startswith(start):
            raise Stopped

    return log


def tensors_of(run):
    return checkpoints.read(run.checkpoints.path(run.checkpoints.steps()[-1]))


def assert_same_bits(first, second):
    assert sorted(first) == sorted(second)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


@pytest.fixture(scope="module")
def place(tmp_path_factory, config, vocabulary):
    """Return a directory with weights, rows, unlabelled rows and a trained teacher."""
    place = tmp_path_factory.mktemp("distillation")
    small.write_huggingface(place / "huggingface", config, vocabulary)
    small.write_complaints(place)
    small.write_rows(place / "unlabelled.csv", [(text,) for text in TEXTS[::2]], ("text",))
    finetune(dataclasses.replace(settings_of(place, "teacher"), teacher=None, seed=5, epochs=12))
    return place


def settings_of(place, name, **changes):
    files = {part: place / f"{part}.csv" for part in ("train", "dev")}
    changes = {"teacher": str(place / "teacher"), **changes}
    return small.settings(place / "huggingface", files, place / name, **changes)


def unlabelled_of(place):
    return (str(place / "unlabelled.csv"),)


@pytest.fixture(scope="module")
def alone(place):
    """Return a run without a teacher, which tests must not change."""
    return finetune(settings_of(place, "alone", teacher=None))


@pytest.fixture(scope="module")
def complete(place):
    """Return a run with a teacher and unlabelled rows, which tests must not change.

    Place has a copy of it from when it saved its first checkpoint.
    """
    save = CheckpointManager.save

    def save_and_copy(self, step, *arguments, **options):
        save(self, step, *arguments, **options)
        if step == 4:
            shutil.copytree(place / "complete", place / "stopped")

    with pytest.MonkeyPatch.context() as context:
        context.setattr(CheckpointManager, "save", save_and_copy)
        return finetune(settings_of(place, "complete", unlabelled=unlabelled_of(place)))


@pytest.fixture
def stopped(place, complete, tmp_path):
    """Return the settings of a copy of `complete` that stopped after its first checkpoint."""
    shutil.copytree(place / "stopped", tmp_path / "stopped")
    return settings_of(place, tmp_path / "stopped", unlabelled=unlabelled_of(place))


def test_alpha_0_equals_training_without_a_teacher(place, alone, tmp_path):
    taught = finetune(settings_of(place, tmp_path / "taught", distill_alpha=0.0))
    assert_same_bits(tensors_of(alone), tensors_of(taught))
    # The teacher is recorded with its weights, and nothing of it without one.
    assert len(taught.train["teacher"]["sha256"]) == 64
    assert taught.train["teacher"]["source"].startswith(f"run {place}/teacher/checkpoints/step-")
    assert not {"teacher", "distill_alpha"} & {*alone.train, *alone.train["settings"]}


def test_skipped_rows_without_labels_are_counted(place):
    lines, bad = [], BadRow("train.tsv:7", "expected 6 fields", is_known=True)
    settings = settings_of(place, "none", unlabelled=unlabelled_of(place))
    log = stop_at("1 bad rows", lines)
    training = read(settings, settings.read_data(), log, tf.distribute.get_strategy())
    unlabelled = training.distillation.unlabelled
    unlabelled[0] = dataclasses.replace(unlabelled[0], skipped_rows=(bad,))
    with pytest.raises(Stopped):
        training.open_run()
    assert lines[-1] == "1 bad rows skipped, first: train.tsv:7: expected 6 fields"


def test_student_learns_the_teacher_from_unlabelled_rows_alone(place, tmp_path):
    """Give the student labels that are wrong: with alpha 1 they have no weight."""
    rows = [(text, "software") for text in TEXTS] + [(TEXTS[0], "billing"), (TEXTS[0], "hardware")]
    wrong = small.write_rows(tmp_path / "wrong.csv", rows)
    settings = settings_of(
        *(place, tmp_path / "run"),
        train=str(wrong),
        unlabelled=unlabelled_of(place),
        distill_alpha=1.0,
        epochs=60,
        dev=(),
    )
    lines = []
    run = finetune(settings, lines.append)
    assert "teacher: 16 samples, once; 5 of them without labels" in lines
    assert run.checkpoints.steps()[-1] == 60 * 2  # 11 and 5 rows in batches of 8.
    student, teacher = load_model(run.path), load_model(place / "teacher")
    expected = teacher.predict(TEXTS)["probabilities"]
    np.testing.assert_allclose(student.predict(TEXTS)["probabilities"], expected, atol=0.1)


def test_resumed_run_has_the_same_bits_and_asks_the_teacher_once(complete, stopped):
    assert Run.open(stopped.output_dir).checkpoints.steps() == [4]
    lines = []
    resumed = finetune(stopped, lines.append)
    assert not [line for line in lines if line.startswith("teacher:")]
    assert_same_bits(tensors_of(complete), tensors_of(resumed))
    # A finished run does not need the file.
    pathlib.Path(resumed.file("teacher.npz")).unlink()
    finetune(stopped, lines.append)
    assert "finished at step 8, nothing to do" in lines[-1]


def test_damaged_file_of_outputs_is_computed_again(stopped):
    path = pathlib.Path(Run.open(stopped.output_dir).file("teacher.npz"))
    before = path.read_bytes()
    path.write_bytes(before[:-30])
    lines = []
    with pytest.raises(Stopped):
        finetune(stopped, stop_at("precision ", lines))
    assert [line for line in lines if line.startswith("teacher:")]
    assert path.read_bytes() == before
    assert dict(np.load(path)).keys() == {"key", "label"}
    # 27 rows with labels and 5 without.
    np.testing.assert_array_equal(np.load(path)["label"].shape, (32, 3))


def test_resuming_with_another_teacher_is_an_error_that_names_it(place, alone, complete, tmp_path):
    settings = settings_of(place, complete.path, unlabelled=unlabelled_of(place))
    with pytest.raises(UserError, match=r"^--distill_alpha: was 0\.5 when"):
        finetune(dataclasses.replace(settings, distill_alpha=0.25))
    shutil.copytree(alone.path, tmp_path / "other")
    other = Run.open(tmp_path / "other")
    with pytest.raises(UserError, match=r"^--teacher: was '.*teacher' when"):
        finetune(dataclasses.replace(settings, teacher=other.path))
    # The same path with other weights.
    run = finetune(settings_of(place, tmp_path / "third", teacher=other.path))
    values = checkpoints.model_variables(load_model(place / "teacher").network)
    other.checkpoints.save(99, values)
    for step in other.checkpoints.steps()[:-1]:
        shutil.rmtree(other.checkpoints.path(step))
    with pytest.raises(UserError, match=r"^--teacher: has other weights than when .*third"):
        finetune(settings_of(place, run.path, teacher=other.path))


def test_a_compiled_step_learns_the_same(place, config, vocabulary, tmp_path):
    """Compare the first epoch; without dropout, whose noise depends on the layout."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    weights = tmp_path / "huggingface"
    small.write_huggingface(weights, dataclasses.replace(config, **still), vocabulary)
    changes = {"init_from": str(weights), "unlabelled": unlabelled_of(place), "epochs": 1}
    changes |= {"learning_rate": 1e-4, "log_every": 1}
    runs = [
        finetune(settings_of(place, tmp_path / compile, compile=compile, **changes))
        for compile in ("none", "step")
    ]
    expected, actual = (run.metrics() for run in runs)
    for mine, theirs in zip(actual, expected, strict=True):
        for name in theirs.keys() - {"examples_per_second"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    expected, actual = map(tensors_of, runs)
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        if name.endswith("/adam_m"):
            np.testing.assert_allclose(actual[name], value, atol=1e-5, err_msg=name)


def test_weights_of_classes_apply_to_labels_only(place, tmp_path):
    """Check a batch: the teacher's weight is 1, that of the label its class weight."""
    model = tasks.TextClassifier.from_pretrained(
        place / "huggingface", labels=list(small.TEXTS), max_seq_length=12, class_weights=[2, 3, 4]
    )
    labelled, others = Examples({"text": TEXTS[:2]}, [0, 2]), Examples({"text": TEXTS[2:4]}, [])
    teacher = read_teacher(str(place / "teacher"), "classification", model.distribute_strategy)
    distillation = Distillation(teacher, 2.0, 0.5, [others])
    pipeline = model.serving.pipeline
    encoded = EncodedExamples.encode(labelled, pipeline, to_flat)
    unlabelled = [EncodedExamples.encode(others, pipeline, to_flat)]
    distilled = distillation.distilled(encoded, unlabelled, None, lambda line: None)
    _, labels, weights = next(iter(small.in_order(distilled, 4)))
    np.testing.assert_array_equal(weights["label"], [2, 4, 0, 0])
    np.testing.assert_array_equal(weights["teacher_label"], [1, 1, 1, 1])
    np.testing.assert_array_equal(labels["label"], [0, 2, 0, 0])
    network = load_model(place / "teacher")
    expected = network.predict(network.preprocessor(TEXTS[:4]), verbose=0)["label"]
    np.testing.assert_allclose(labels["teacher_label"], expected, atol=1e-5)


@pytest.mark.parametrize("name", small.fast([*TRAINED, "MultipleChoice"], "TokenClassifier"))
def test_every_task_learns_its_teacher(name, huggingface_dir, tmp_path):
    """Train a teacher, and a student of its outputs alone, with and without labels."""
    _, x, y = CASES[name]
    teacher = create(name, huggingface_dir, seed=3).train(
        *(x, y),
        output_dir=tmp_path / "teacher",
        **{**SETTINGS, "epochs": 20, "learning_rate": 3e-3},
    )
    taught = create(name, huggingface_dir)
    taught.train(
        *(x, y),
        output_dir=tmp_path / "student",
        teacher=tmp_path / "teacher",
        unlabelled=x,
        distill_alpha=1.0,
        **{**SETTINGS, "epochs": 20, "learning_rate": 1e-2},
    )

    def distance(student):
        encoded = student._evaluation_rows(x, y)
        own, expected = (
            one.evaluator().outputs(encoded, reduced=False) for one in (student, teacher)
        )
        losses = student.task.soft_losses.items()
        return sum(np.mean(loss(expected[name], own[name], 1.0)) for name, loss in losses)

    assert distance(taught) < 0.5 * distance(create(name, huggingface_dir))


def test_model_as_teacher_in_python_equals_its_run(place, tmp_path):
    model = load_model(place / "teacher")
    x, y = TEXTS, [label for label, texts in small.TEXTS.items() for _ in texts]
    runs = []
    for name, teacher in (("of_run", place / "teacher"), ("of_model", model)):
        student = create("TextClassifier", place / "huggingface")
        student.train(x, y, output_dir=tmp_path / name, teacher=teacher, **SETTINGS)
        runs.append(Run.open(tmp_path / name))
    assert_same_bits(*map(tensors_of, runs))
    assert runs[0].train["teacher"]["sha256"] == runs[1].train["teacher"]["sha256"]
    with pytest.raises(UserError, match=r"^unlabelled: requires teacher"):
        student.train(x, y, output_dir=tmp_path / "none", unlabelled=x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TextClassifier", "TextRegressor", "MultipleChoice"])
def test_saved_model_teaches_what_its_run_does(name, huggingface_dir, tmp_path):
    """Compare losses of the first epochs: the served outputs are the run's, up to rounding."""
    _, x, y = CASES[name]
    create(name, huggingface_dir, seed=3).train(
        *(x, y), output_dir=tmp_path / "teacher", **{**SETTINGS, "learning_rate": 1e-2}
    )
    published = export.publish(tmp_path / "teacher", tmp_path / "served")
    weights = []
    for number, teacher in enumerate((tmp_path / "teacher", published)):
        student = create(name, huggingface_dir)
        student.train(x, y, output_dir=tmp_path / f"run{number}", teacher=teacher, **SETTINGS)
        weights.append(tensors_of(Run.open(tmp_path / f"run{number}")))
    for key, value in weights[0].items():
        if not key.endswith(("adam_m", "adam_v")):
            np.testing.assert_allclose(weights[1][key], value, atol=2e-3, err_msg=key)


def test_a_saved_model_at_a_remote_path_is_a_teacher(place):
    """Write one that returns equal probabilities for all texts, and read it in two calls."""

    class Served(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
        def serve(self, text):
            return {"probabilities": tf.tile([[0.5, 0.25, 0.25]], [tf.size(text), 1])}

    path, served = "ram://distillation/1", Served()
    tf.saved_model.save(served, path, signatures={"serving_default": served.serve})
    task = load_model(place / "teacher").task
    files.atomic_write_json(f"{path}/{TASK_OF_VERSION}", task.to_dict())
    teacher = read_teacher(path, "classification", tf.distribute.get_strategy())
    student = types.SimpleNamespace(examples=Examples({"text": TEXTS * 29}, []))
    found = teacher.outputs(student, lambda line: None)["label"]
    np.testing.assert_allclose(found, np.log([[0.5, 0.25, 0.25]] * len(TEXTS) * 29), rtol=1e-6)
    with pytest.raises(UserError, match="/1: expected a model of task regression, received c"):
        read_teacher(path, "regression", tf.distribute.get_strategy())


@pytest.mark.slow
def test_two_replicas_learn_the_same(place, tmp_path, mirrored, config, vocabulary):
    """Compare losses without dropout, whose masks differ on the second replica."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    weights = small.write_huggingface(tmp_path / "weights", config, vocabulary, **rates)
    changes = {"unlabelled": unlabelled_of(place), "init_from": str(weights)}
    one = finetune(settings_of(place, tmp_path / "one", **changes))
    two = finetune(settings_of(place, tmp_path / "two", **changes), strategy=mirrored)
    losses = [
        [line["loss"] for line in run.metrics() if "loss" in line and "score" not in line]
        for run in (one, two)
    ]
    assert len(losses[0]) > 3 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    outputs = [np.load(run.file("teacher.npz"))["label"] for run in (one, two)]
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_errors(place, tmp_path, huggingface_dir):
    def error(**changes):
        with pytest.raises(UserError) as raised:
            settings = settings_of(place, tmp_path / "run", **changes)
            settings.check()
            finetune(settings)
        message = str(raised.value)
        assert "\n" not in message and not (tmp_path / "run").exists()
        return message

    unlabelled = unlabelled_of(place)
    assert error(teacher=None, unlabelled=unlabelled) == "--unlabelled: requires --teacher"
    assert error(teacher=None, distill_alpha=0.1) == "--distill_alpha: requires --teacher"
    assert error(teacher=None, distill_temperature=4.0).startswith("--distill_temperature: req")
    assert error(distill_alpha=1.5) == "--distill_alpha=1.5: expected a number >= 0 and <= 1"
    assert error(distill_temperature=0.0) == "--distill_temperature=0.0: expected a number > 0"
    assert error(unlabelled=unlabelled, balanced_sampling=True).startswith(
        "--balanced_sampling: ca"
    )
    assert error(teacher=str(place / "none")).startswith(f"{place}/none: no such directory")
    assert error(task="anomaly").startswith("--teacher: not supported by task anomaly")
    assert error(task="regression", distill_temperature=3.0) == (
        "--distill_temperature: not supported by task regression"
    )
    assert error(labels=("software", "hardware", "billing")) == (
        f"--teacher={place}/teacher: labels differs. Expected that of the student, "
        "software, hardware, billing. Received: billing, hardware, software"
    )
    dev = small.write_rows(tmp_path / "dev.csv", [("a b", "billing"), ("b", "software")])
    assert error(dev=(str(dev),), unlabelled=(str(dev),)).startswith(f"--dev={dev}: same content")
    numbers = small.write_rows(tmp_path / "numbers.csv", [("a", 1), ("b", 2)])
    assert error(task="regression", train=str(numbers), dev=()) == (
        f"--teacher={place}/teacher: expected a model of task regression, received classification"
    )


def test_teacher_of_long_texts_needs_the_same_windows(huggingface_dir, tmp_path, config):
    _, x, y = CASES["TokenClassifier"]
    teacher = create("TokenClassifier", huggingface_dir, max_seq_length=10)
    student = create("TokenClassifier", huggingface_dir)
    with pytest.raises(UserError, match=r"^teacher: max_seq_length differs. Expected that of the"):
        student.train(x, y, output_dir=tmp_path / "run", teacher=teacher, **SETTINGS)
    # Another vocabulary splits the texts into other tokens.
    words = [*WORDS[:5], *WORDS[6:], "the"]
    other = small.write_huggingface(tmp_path / "other", config, Vocabulary(words))
    with pytest.raises(UserError, match=r"^teacher: splits texts into other tokens; expected the"):
        student.train(
            *(x, y),
            output_dir=tmp_path / "run",
            teacher=create("TokenClassifier", other),
            **SETTINGS,
        )
    student.train(x, y, output_dir=tmp_path / "run", **SETTINGS)  # Its weights are as before.
