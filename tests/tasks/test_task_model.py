"""Keras models of all task types: fit, predict, evaluate, save."""

import functools
import json
import random
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

import tasks
from bert_tf import UserError
from bert_tf.weights.pretrained_encoder import Encoder
from tasks.graph.pipeline import Pipeline
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.conftest import ROOT
from tests.small import TEXTS

LABELS = tuple(TEXTS)
ROWS = [text for texts in TEXTS.values() for text in texts]
NAMES = [label for label, texts in TEXTS.items() for _ in texts]
CONTEXTS = ["my bill is too high !", "the screen is broken", "the app does not open"]
# Options, rows and labels by class.
CASES = {
    "TextClassifier": ({"labels": LABELS}, ROWS, NAMES),
    "TextRegressor": ({"pairs": True}, (ROWS, ROWS[::-1]), [0.5 * row for row in range(9)]),
    "TokenClassifier": (
        {"labels": ["THING"]},
        CONTEXTS,
        [
            [{"start": 3, "end": 7, "type": "THING"}],
            [{"start": 4, "end": 10, "type": "THING"}],
            [],
        ],
    ),
    "QuestionAnswerer": (
        {"max_query_length": 4, "doc_stride": 2},
        {"question": ["is the bill"] * 3, "context": CONTEXTS},
        [[{"text": "bill", "start": 3}], [{"text": "screen", "start": 4}], [("app", 4)]],
    ),
    "MultipleChoice": (
        {},
        {"prompt": ["the bill", "my app"], "choices": [["is high", "open", "a"], ["b", "not"]]},
        [0, 1],
    ),
    "AnomalyDetector": ({"latent_dim": 3}, ROWS, None),
}


def create(name, huggingface_dir, **changes):
    options = {"max_seq_length": 12, **CASES[name][0], **changes}
    return getattr(tasks, name).from_pretrained(huggingface_dir, **options)


def compiled(name, huggingface_dir, learning_rate=1e-2, **changes):
    model = create(name, huggingface_dir, **changes)
    model.compile(learning_rate=learning_rate)
    return model


@pytest.mark.parametrize("name", small.fast(CASES, "TextClassifier"))
def test_fit_predict_and_save(name, huggingface_dir, tmp_path):
    _, x, y = CASES[name]
    model = compiled(name, huggingface_dir)
    history = model.fit(x, y, batch_size=2, epochs=2, validation_data=(x, y), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert f"val_{model.task.best_metric}" in history
    metrics, rows = model.evaluate(x, y), model.predict_rows(x)
    assert len(rows) == len(next(iter(model.predict(x).values())))

    model.save_run(tmp_path / "run")
    loaded = tasks.load_model(tmp_path / "run")
    assert type(loaded) is type(model) and loaded.task == model.task
    assert loaded.predict_rows(x) == rows
    # A run does not keep `compile`, whose metrics `evaluate` returns, too.
    measured = loaded.evaluate(x, y)
    assert loaded.task.best_metric in measured
    assert measured == pytest.approx({name: metrics[name] for name in measured})


@pytest.mark.slow
def test_predict_and_fit_build_their_graphs_once(huggingface_dir, monkeypatch):
    """Call predict with other lengths and numbers of rows, and after `fit` with new weights."""
    traced, predict = [], Pipeline.predict
    trained, call = [], Encoder.call

    def counted(pipeline, **texts):
        traced.append(texts)
        return predict(pipeline, **texts)

    @functools.wraps(call)  # Keras reads its signature.
    def counted_call(encoder, *inputs, **options):
        trained.extend(inputs if options.get("training") else [])
        return call(encoder, *inputs, **options)

    monkeypatch.setattr(Pipeline, "predict", counted)
    monkeypatch.setattr(Encoder, "call", counted_call)
    model = compiled("TextClassifier", huggingface_dir)
    before = model.predict(["the bill"])["probabilities"]
    once = len(traced)
    assert once
    for texts in (["the app does not open , my screen is broken"], ROWS, ROWS[:2], [""]):
        model.predict(texts)
    model.fit(ROWS, NAMES, epochs=1, verbose=0)
    model.fit(ROWS[:5], NAMES[:5], epochs=2, verbose=0)
    assert len(trained) == 1
    assert not np.array_equal(model.predict(["the bill"])["probabilities"], before)
    assert len(traced) == once


def test_the_seed_gives_the_head_and_leaves_the_callers_random_numbers(huggingface_dir):
    random.seed(7), np.random.seed(7)
    expected = random.random(), np.random.random()
    random.seed(7), np.random.seed(7)
    heads = [
        create("TextClassifier", huggingface_dir, seed=seed).network.get_weights()[-2]
        for seed in (1, 1, 2)
    ]
    assert (random.random(), np.random.random()) == expected
    assert np.array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])


@pytest.mark.medium
def test_a_file_is_loaded_from_a_remote_path(huggingface_dir):
    model, path = create("TextClassifier", huggingface_dir), "ram://task_model/model.keras"
    model.has_new_head = False
    model.save(path)
    assert tasks.load_model(path).predict_rows(ROWS) == model.predict_rows(ROWS)
    with pytest.raises(UserError, match="ram://task_model/none.keras: not a .keras file"):
        tasks.load_model("ram://task_model/none.keras")


def own_loss(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


@pytest.fixture(scope="module")
def keras_file(tmp_path_factory, config, vocabulary):
    """Return a .keras file of a model that was compiled with a function of the user."""
    task = ClassificationTask(labels=LABELS, max_seq_length=12)
    model = tasks.TextClassifier(task, config, vocabulary)
    model.compile(keras.optimizers.SGD(0.1), own_loss)
    path = tmp_path_factory.mktemp("files") / "model.keras"
    model.save(path)
    return path


def test_a_model_is_loaded_with_functions_of_the_user_or_without_them(keras_file):
    expected = "Could not locate function 'own_loss'; pass it in custom_objects of load_model, or"
    with pytest.raises(UserError, match=rf"model.keras: {expected} compile=False if it .*\Z"):
        tasks.load_model(keras_file)
    assert tasks.load_model(keras_file, custom_objects={"own_loss": own_loss}).compiled
    assert not tasks.load_model(keras_file, compile=False).compiled


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.weights.h5", None, "cannot be loaded, may be damaged: Expected a model.weights"),
        ("model.weights.h5", lambda content: content[:3000], "cannot be loaded, may be damaged: "),
        ("assets/preprocessor/vocab.txt", None, "has no vocabulary"),
        ("assets/preprocessor/vocab.txt", lambda content: content[:30], "vocab.txt: "),
        ("config.json", None, "not a .keras file: "),
        ("config.json", lambda content: b"[]", "not a .keras file: config.json is no object"),
        (
            "config.json",
            lambda content: content.replace(b'"hidden_size": 12', b'"hidden_size": 24'),
            "cannot be loaded, may be damaged: A total of",
        ),
    ],
)
def test_a_damaged_file_is_a_user_error(keras_file, tmp_path, name, change, message):
    with (
        zipfile.ZipFile(keras_file) as archive,
        zipfile.ZipFile(tmp_path / "m.keras", "w") as damaged,
    ):
        for entry in archive.namelist():
            content = archive.read(entry)
            if entry == name:
                content = change and change(content)
            if content is not None:
                damaged.writestr(entry, content)
    with pytest.raises(UserError, match=rf"m.keras: .*{message}.*\Z"):
        tasks.load_model(tmp_path / "m.keras", compile=False)


@pytest.mark.slow
def test_saved_models_load_in_a_fresh_process(huggingface_dir, tmp_path):
    expected = {}
    for name, (_, x, y) in CASES.items():
        model = compiled(name, huggingface_dir)
        if name == "AnomalyDetector":
            model.fit(x, y, validation_data=(x, y), verbose=0)  # Which tunes its threshold.
        model.save(tmp_path / f"{name}.keras")
        expected[name] = model.predict_rows(x)
    (tmp_path / "rows.json").write_text(json.dumps({name: x for name, (_, x, _) in CASES.items()}))
    code = (
        "import json, pathlib, sys, tasks\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "rows = json.loads((directory / 'rows.json').read_text())\n"
        "result = {}\n"
        "for name, x in rows.items():\n"
        "    model = tasks.load_model(directory / f'{name}.keras')\n"
        "    assert model.compiled, name\n"
        "    result[name] = model.predict_rows(tuple(x) if name == 'TextRegressor' else x)\n"
        "print(json.dumps(result))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))
