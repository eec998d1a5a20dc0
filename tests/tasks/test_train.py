"""Training of models in run directories: equal to tasks.finetune, resumed bit for bit."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import export
from bert_tf import UserError
from bert_tf.runs import checkpoints
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from bert_tf.text.encoder_inputs import to_flat
from tasks import TextClassifier, load_model, read_examples
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.graph.run_checkpoint import RunCheckpoint
from tasks.model import run_training
from tasks.model.labelled_rows import examples_of
from tasks.training.settings import parse_best_metric
from tests import small

SETTINGS = {"global_batch_size": 8, "epochs": 2, "learning_rate": 1e-2, "log_every": 2}
TEXTS = [text for texts in small.TEXTS.values() for text in texts]
LABELS = [label for label, texts in small.TEXTS.items() for _ in texts]
DEV = (TEXTS[::2], LABELS[::2])


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("train")
    return small.write_huggingface(directory / "huggingface", config, vocabulary)


@pytest.fixture(scope="module")
def place(weights):
    """Return the directory of the weights, with a run of tasks.finetune on train.csv."""
    directory = weights.parent
    finetune(small.settings(weights, small.write_complaints(directory), directory / "run"))
    return directory


@pytest.fixture
def create(weights):
    """Return a function that creates a new model."""

    def create(**options):
        options = {"labels": list(small.TEXTS), "max_seq_length": 12, **options}
        return TextClassifier.from_pretrained(weights, **options)

    return create


def tensors_of(run_dir, step=8):
    """Return the tensors of a checkpoint, optimizer state included."""
    return checkpoints.read(pathlib.Path(run_dir) / "checkpoints" / f"step-{step:08d}")


def assert_same_bits(first, second):
    assert sorted(first) == sorted(second)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def metrics_of(run_dir):
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    return [{**line, "examples_per_second": None} for line in metrics]


def enable_lora(model):
    model.encoder.transformer[0].attention.query.enable_lora(2)


def quantize(model):
    model.network.head.quantize("int8")


def add_layer(model):
    model.network.head = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])


@pytest.mark.filterwarnings("ignore:.*untrained head")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (enable_lora, "bert/layer_0/attention/query/lora_kernel_a"),
        (quantize, "classifier/kernel"),
        (add_layer, "sequential.*/bias"),
    ],
)
def test_variables_that_no_file_can_have_are_refused_before_training(
    create, tmp_path, change, named
):
    model = create()
    saved = load_model(create().save_run(tmp_path / "run").path)
    for one in (model, saved):
        one.network._tracker.unlock()
        change(one)
    writers = [
        lambda: model.train(TEXTS, LABELS, output_dir=tmp_path / "out", **SETTINGS),
        lambda: model.save_run(tmp_path / "out"),
        lambda: export.publish(model, tmp_path / "out"),
        lambda: export.publish(saved, tmp_path / "out"),
    ]
    for write in writers:
        with pytest.raises(UserError, match=f"^{named}: files of TextClassifier have no variable"):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_of_keras_has_lora_merged(create, tmp_path):
    model = create()
    enable_lora(model)
    query = model.encoder.transformer[0].attention.query
    query.lora_kernel_b.assign(tf.ones_like(query.lora_kernel_b))
    assert np.abs(query.kernel - query._kernel).max() > 1e-3
    model.save(tmp_path / "model.keras")
    copy = load_model(tmp_path / "model.keras").encoder.transformer[0].attention.query
    np.testing.assert_allclose(copy.kernel, query.kernel, rtol=1e-6)


def trained(model):
    return [weight.path for weight in model.trainable_weights]


def test_a_run_keeps_which_layers_are_trained(create, tmp_path):
    model = create()
    model.freeze(1)
    model.encoder.pooler.trainable = False
    loaded = load_model(model.save_run(tmp_path / "saved").path)
    assert trained(loaded) == trained(model) and loaded.frozen_layers == 1
    assert len(trained(model)) < len(trained(create())) - 2
    assert not loaded.encoder.pooler.trainable
    model = create(frozen_layers=1)
    model.train(TEXTS, LABELS, dev=None, output_dir=tmp_path / "run", **{**SETTINGS, "epochs": 1})
    loaded = load_model(tmp_path / "run")
    assert trained(loaded) == trained(model) and loaded.frozen_layers == 1


@pytest.mark.slow
def test_train_equals_finetune_bit_for_bit_also_after_an_interruption(place, create, tmp_path):
    train, dev = (read_examples(place / name) for name in ("train.csv", "dev.csv"))
    steps = []

    def interrupt(line):
        steps.append(line)
        if line.startswith("step 6/8"):  # The latest checkpoint is that of step 4.
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        create().train(train, dev=dev, output_dir=tmp_path / "run", log=interrupt, **SETTINGS)
    lines = []
    model = create()
    trained = model.train(train, dev=dev, output_dir=tmp_path / "run", log=lines.append, **SETTINGS)
    assert trained is model and "resuming at step 4 of 8" in lines
    assert_same_bits(tensors_of(place / "run"), tensors_of(tmp_path / "run"))
    assert metrics_of(place / "run") == metrics_of(tmp_path / "run")
    for name in ("task.json", "config.json", "vocab.txt"):
        assert (tmp_path / "run" / name).read_bytes() == (place / "run" / name).read_bytes()

    # A finished run is only read.
    again = create().train(train, dev=dev, output_dir=tmp_path / "run", **SETTINGS)
    loaded = load_model(tmp_path / "run")
    best = loaded.source.run.checkpoints.best_step()
    for one in (model, again):
        assert one.source.path == loaded.source.path == loaded.source.run.checkpoints.path(best)
        assert one.source.is_that_of(one.task, one.network)


@pytest.mark.slow
def test_the_same_call_resumes_only_the_same_rows_settings_and_model(create, tmp_path, place):
    settings = {**SETTINGS, "epochs": 1, "output_dir": tmp_path / "run"}
    model = create().train(TEXTS, LABELS, DEV, **settings)
    data = json.loads((tmp_path / "run" / "train.json").read_text())["data"]
    assert sorted(data) == ["dev", "train"] and data["dev"] != data["train"]

    def refuses(message, model, x=TEXTS, y=LABELS, dev=DEV, **changes):
        with pytest.raises(UserError, match=message) as raised:
            model.train(x, y, dev, **{**settings, **changes})
        assert "--" not in str(raised.value) and "\n" not in str(raised.value)

    differ = r"^x, dev: the rows differ from those that .*run was started with; choose a new output"
    refuses(differ, create(), x=[*TEXTS[:-1], "another"])
    refuses(differ, create(), y=[*LABELS[:-1], "billing"])
    refuses(differ, create(), dev=(TEXTS[:2], LABELS[:2]))
    refuses(r"^learning_rate: was 0.01 .* is now 0.1; pass the old", create(), learning_rate=0.1)
    refuses("^dev: was .* when", create(), dev=None)
    refuses("task.json does not match", create(truncation="tail"))
    model.save_run(tmp_path / "other")
    other = TextClassifier.from_pretrained(
        tmp_path / "other", labels=list(small.TEXTS), max_seq_length=12
    )
    refuses("run: was started with another model; choose a new output_dir", other)
    refuses("contains weights|contains converted weights", create(), output_dir=tmp_path / "other")
    loaded = load_model(tmp_path / "run")
    start = loaded.source.path
    loaded.train(TEXTS, LABELS, DEV, **{**settings, "output_dir": tmp_path / "second"})
    assert Run.open(tmp_path / "second").train["origin"] == f"run {start}"
    refuses("second: was started with another", create(), output_dir=tmp_path / "second")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs=0: expected an integer >= 1"),
        ({"epochs": "3"}, "epochs='3': expected an integer"),
        ({"epochs": True}, "epochs=True: expected an integer"),
        ({"save_every": None}, "save_every=None: expected an integer"),
        ({"learning_rate": [1]}, r"learning_rate=\[1\]: expected a number"),
        ({"schedule": "cosine"}, "schedule='cosine': expected one of released, continuous"),
        ({"batch_size": 8}, "batch_size: unknown setting; expected one of global_batch_size, "),
        ({"strategy": "mirrored"}, "strategy: unknown setting; expected one of"),
        ({"precision": "bfloat16"}, "precision='bfloat16': does not fit a model with dtype='float"),
        ({"frozen_layers": 3}, "frozen_layers=3: expected at most 1, the number of layers of Hugg"),
        ({"seed": 2**32}, f"seed={2**32}: expected an integer < "),
        ({"patience": 1}, "patience: requires dev"),
        ({"eval_every": 1}, "eval_every: requires dev"),
        ({"best_metric": "loss"}, "best_metric: requires dev"),
        ({"best_metric": "recall", "dev": DEV}, "best_metric=recall: expected a name, or .* accur"),
        ({"best_metric": "loss:low", "dev": DEV}, "best_metric=loss:low: expected a name, or NAME"),
        ({"epochs": 1, "num_train_steps": 1}, "epochs, num_train_steps: expected one of them"),
        ({"epochs": None}, "epochs=None: expected an integer, or num_train_steps"),
        ({"dev": (TEXTS, LABELS)}, "dev: same rows as x; expected rows that training does not use"),
        ({"dev": (TEXTS[:1], ["other"])}, r"dev: y\[0\]: label 'other': expected one of billing"),
    ],
)
def test_a_wrong_setting_is_one_line_and_leaves_no_directory(create, tmp_path, settings, message):
    with pytest.raises(UserError, match=f"^{message}") as raised:
        create().train(TEXTS, LABELS, output_dir=tmp_path / "run", **settings)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_training_by_steps_is_evaluated_between_epochs_and_resumed_with_more_steps(
    create, tmp_path
):
    settings = {name: value for name, value in SETTINGS.items() if name != "epochs"}
    settings |= {"eval_every": 3, "best_metric": "loss", "output_dir": tmp_path}
    model = create().train(TEXTS, LABELS, DEV, **settings, num_train_steps=6)
    evaluated = {line["step"]: line for line in metrics_of(tmp_path) if "dev_loss" in line}
    assert list(evaluated) == [3, 6]  # An epoch has 4 steps.
    assert all(line["score"] == -line["dev_loss"] for line in evaluated.values())
    best = min(evaluated, key=lambda step: evaluated[step]["dev_loss"])
    assert model.source.path.endswith(f"step-{best:08d}")
    lines = []
    create().train(TEXTS, LABELS, DEV, **settings, num_train_steps=7, log=lines.append)
    run = Run.open(tmp_path)
    assert run.checkpoints.steps()[-1] == 7 and run.train["settings"]["epochs"] is None
    assert run.train["changes"][0]["num_train_steps"] == [6, 7]
    assert any("num_train_steps: changed from 6 to 7; the" in line for line in lines)


@pytest.mark.parametrize(
    ("best_metric", "metric", "factor"),
    [
        ("accuracy", "accuracy", 1),
        ("accuracy:min", "accuracy", -1),
        ("loss", "loss", -1),
        ("loss:max", "loss", 1),
        ("mean_squared_error", "mean_squared_error", -1),
    ],
)
def test_the_best_score_is_the_largest_value_but_of_losses_and_errors(best_metric, metric, factor):
    known = ("accuracy", "loss", "mean_squared_error")
    assert parse_best_metric(best_metric, known) == (metric, factor)


def test_the_precision_is_that_of_the_model(create):
    assert run_training._settings(create(), {"precision": "auto"}).precision == "float32"


def test_only_strings_are_accepted(create, tmp_path):
    ids = {"input_ids": np.zeros((1, 3), np.int32)}
    with pytest.raises(UserError, match="^x: expected strings, received token ids; use fit"):
        create().train(ids, output_dir=tmp_path / "run")


@pytest.mark.slow
def test_thresholds_are_tuned_on_the_first_dev_rows(create, tmp_path):
    labels = ["billing" if label == "billing" else "hardware" for label in LABELS]
    model = create(labels=["hardware", "billing"], rare_label="billing").train(
        TEXTS,
        labels,
        [(TEXTS[:6], labels[:6]), (TEXTS[:4], labels[:4])],
        output_dir=tmp_path / "run",
        **{**SETTINGS, "epochs": 1},
    )
    loaded = load_model(tmp_path / "run")
    assert model.task.thresholds and model.task == loaded.task
    assert loaded.source.untuned is None and loaded.source.tuned["file"] == "dev"
    assert "dev2_f1" in loaded.source.tuned["metrics"]


def test_training_batches_have_the_weights_of_rows(create):
    weights = np.arange(len(TEXTS), dtype=np.float32)
    data = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS, weights)).batch(4)
    model = create()
    examples = examples_of(model.task, data)
    encoded = EncodedExamples.encode(examples, model.serving.pipeline, to_flat)
    batches = encoded.training_batches(global_batch_size=4, num_epochs=1, seed=0)
    found = np.concatenate([of_batch["label"].numpy() for _, _, of_batch in batches])
    assert sorted(found) == weights.tolist()


@pytest.mark.slow
def test_other_weights_or_values_are_not_those_of_the_checkpoint(create, tmp_path):
    model = create(labels=["billing", "hardware"], rare_label="hardware")
    texts, labels = TEXTS[:6], LABELS[:6]
    model.tune(texts, labels)
    model.save_run(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert loaded.source.is_that_of(loaded.task, loaded.network)
    loaded.tune(texts, labels[::-1])
    assert loaded.task != model.task
    assert not loaded.source.is_that_of(loaded.task, loaded.network)
    for variable in model_variables(loaded.network).values():
        before = variable.numpy()
        if "dropout_seed" not in variable.path:
            variable.assign(before + 1)
            assert not loaded.source.is_that_of(model.task, loaded.network), variable.path
            variable.assign(before)
    assert loaded.source.is_that_of(model.task, loaded.network)


def interrupt(line):
    if line.startswith("step 4/4"):  # The latest checkpoint is that of step 2.
        raise ZeroDivisionError


@pytest.mark.medium
def test_a_model_of_an_unfinished_train_only_resumes_it(create, tmp_path):
    model, first, second = create(), tmp_path / "first", tmp_path / "second"
    with pytest.raises(ZeroDivisionError):
        model.train(TEXTS, LABELS, output_dir=first, log=interrupt, **SETTINGS)
    assert not model.has_new_head
    model.save(tmp_path / "model.keras")
    for one in (model, load_model(tmp_path / "model.keras")):
        with pytest.raises(UserError, match="holds weights of an unfinished train in .*first; cre"):
            one.train(TEXTS, LABELS, output_dir=second, **SETTINGS)
    with pytest.raises(UserError, match="holds weights of an unfinished train in .*first; cre"):
        one.fit(TEXTS, LABELS, verbose=0)
        one.train(TEXTS, LABELS, output_dir=second, **SETTINGS)
    assert not second.exists()
    assert Run.open(model.save_run(second).path).train["origin"] == f"run {first}, unfinished"
    model.train(TEXTS, LABELS, output_dir=first, **SETTINGS)
    model.train(TEXTS, LABELS, output_dir=tmp_path / "third", **SETTINGS)
    assert Run.open(tmp_path / "third").train["origin"] == f"run {RunCheckpoint.open(first).path}"


@pytest.mark.medium
def test_the_same_call_resumes_a_model_of_another_run(create, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    create(calibrate=True).save_run(first)
    model = load_model(first).tune(TEXTS, LABELS)
    with pytest.raises(ZeroDivisionError):
        model.train(TEXTS, LABELS, output_dir=second, log=interrupt, **SETTINGS)
    lines = []
    for _ in range(2):
        model.train(TEXTS, LABELS, output_dir=second, log=lines.append, **SETTINGS)
    assert "resuming at step 2 of 4" in lines
    assert any("finished at step 4, nothing to do" in line for line in lines)
    assert Run.open(second).train["origin"] == f"run {RunCheckpoint.open(first).path}"
    model.tune(TEXTS, LABELS)
    copy = model.save_run(tmp_path / "copy").path
    assert Run.open(copy).train["origin"] == f"run {RunCheckpoint.open(second).path}"


def test_an_error_before_the_first_step_leaves_the_model_as_it_was(create, tmp_path):
    def fail(line):
        if "parameters from" in line:
            raise ZeroDivisionError

    model = create(calibrate=True, frozen_layers=1)
    tuned = model.task.with_tuned({"temperature": 2.0})
    model._set_tuned(tuned)
    before = json.dumps(model.get_config())
    with pytest.raises(ZeroDivisionError):
        model.train(TEXTS, LABELS, output_dir=tmp_path, frozen_layers=0, log=fail, **SETTINGS)
    assert model.task == tuned and json.dumps(model.get_config()) == before


@pytest.mark.medium
def test_frozen_layers_are_trained_again_on_request(create, tmp_path):
    model = create(frozen_layers=1)
    before = model_variables(model.network)["bert/embeddings/word_embeddings"].numpy()
    model.train(TEXTS, LABELS, output_dir=tmp_path, frozen_layers=None, **SETTINGS)
    after = model_variables(model.network)["bert/embeddings/word_embeddings"].numpy()
    assert not np.array_equal(before, after)
