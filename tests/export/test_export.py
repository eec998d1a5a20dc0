"""The export: contents of the graph, its predictions, and rejection of wrong models."""

import base64
import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary
from bert_tf.model import fused_kernels
from bert_tf.text.encoder_inputs import to_flat
from export.checks import parity
from export.clients.local_client import LocalClient
from export.export_saved_model import ExportSettings, main
from export.graph import served_encoder
from export.graph.saved_model import served_pipeline, write_saved_model
from export.graph.served_encoder import ServedEncoder
from export.request import RequestSettings
from tasks.data.readers.memory import jsonable
from tasks.finetuning.recipe import finetune
from tasks.graph.pipeline import Pipeline
from tasks.graph.published import version_directories
from tasks.model.loading import load_model
from tests import small
from tests.conftest import ROOT
from tests.export import engines, serving_operations
from tests.export.test_publishing import publish

pytestmark = [pytest.mark.medium, pytest.mark.optimized]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, config, vocabulary):
    """Return a run fine-tuned for seconds, which tests share and must not change."""
    directory = tmp_path_factory.mktemp("export")
    weights = small.write_huggingface(directory / "huggingface", config, vocabulary)
    return finetune(
        small.settings(
            weights, small.write_complaints(directory), directory / "run", epochs=12, seed=2
        )
    ).path


@pytest.fixture
def trained(run_dir):
    return load_model(run_dir)


@pytest.fixture(scope="module")
def models(run_dir, tmp_path_factory):
    """Return MODELS/name with one version, published by the command's function."""
    directory = tmp_path_factory.mktemp("models") / "complaints"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(ExportSettings(str(run_dir), str(directory)))
    assert printed.getvalue() == f"{directory / '1'}\n"
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_training_kernels_are_in_no_served_graph(trained, config, vocabulary, training):
    """Use a model wide enough for them; its training graph is the negative control."""
    config = dataclasses.replace(config, hidden_size=fused_kernels.MIN_WIDTH, num_attention_heads=2)
    model = trained.task.build_model(config)
    pipeline = Pipeline(trained.task, Tokenizer(vocabulary, True), model)
    texts = tf.constant(["the bill"])
    if training:
        inputs = to_flat(pipeline.encode(text=texts).packed, vocabulary)
        functions = [tf.function(lambda: model(inputs, training=True))]
        graphs = [function.get_concrete_function().graph for function in functions]
    else:
        graphs = [
            function.get_concrete_function().graph for function in pipeline.signatures.values()
        ]
    compiled = {
        name
        for graph in graphs
        for name, function in graph._functions.items()
        if function.cached_definition.attr["_XlaMustCompile"].b
    }
    assert bool(compiled) == training


def test_the_signatures_have_fixed_names_types_and_shapes(models):
    signatures = tf.saved_model.load(str(models / "1")).signatures

    def outputs(name):
        return {
            key: (spec.dtype.name, spec.shape.as_list())
            for key, spec in signatures[name].structured_outputs.items()
        }

    assert set(signatures) == {"serving_default", "tokenize", "embed"}
    assert outputs("serving_default") == {
        "label": ("string", [None]),
        "score": ("float32", [None]),
        "probabilities": ("float32", [None, 3]),
        "labels": ("string", [None, 3]),
    }
    assert outputs("embed") == {"pooled": ("float32", [None, 12]), "mean": ("float32", [None, 12])}
    assert outputs("tokenize") == {
        name: ("int32", [None, None])
        for name in ("input_ids", "input_mask", "segment_ids", "start", "end")
    }
    for name in signatures:
        assert {
            key: spec.dtype.name
            for key, spec in signatures[name].structured_input_signature[1].items()
        } == {"text": "string"}


def test_the_graph_has_only_operations_of_servers_and_no_local_path(models):
    assert serving_operations.problems(models / "1") == []
    data = (models / "1" / "saved_model.pb").read_bytes()
    for path in (str(ROOT), str(pathlib.Path.home()), "site-packages"):
        assert path.encode() not in data


def test_served_predictions_equal_those_of_the_run_in_any_batch(models, trained):
    served = LocalClient(models)
    texts = [text for texts in small.TEXTS.values() for text in texts]
    complete = served.predict({"text": texts})
    expected = trained.serving.pipeline.predict(text=tf.constant(texts))
    assert (
        complete["label"]
        == [label.decode() for label in expected["label"].numpy()]
        == [label for label in small.TEXTS for _ in range(3)]
    )
    np.testing.assert_allclose(complete["probabilities"], expected["probabilities"], atol=1e-5)
    for size in (1, 4):
        parts = [
            served.predict({"text": texts[start : start + size]}) for start in range(0, 9, size)
        ]
        np.testing.assert_allclose(
            [row for part in parts for row in part["probabilities"]],
            complete["probabilities"],
            atol=1e-5,
        )
    assert served.predict({"text": []}) == {
        "label": [],
        "labels": [],
        "probabilities": [],
        "score": [],
    }


@pytest.mark.slow
def test_a_feed_forward_layer_of_a_slow_width_is_widened_without_effect(
    trained, tmp_path, monkeypatch
):
    width = trained.config.intermediate_size
    monkeypatch.setattr(served_encoder, "SLOW_WIDTH", width)
    write_saved_model(trained, tmp_path / "1")
    variables = tf.train.list_variables(str(tmp_path / "1" / "variables" / "variables"))
    assert [12, width + served_encoder.FILLER] in [shape for _, shape in variables]
    assert [12, width] not in [shape for _, shape in variables]
    texts = small.TEXTS["billing"]
    expected = trained.serving.pipeline.predict(text=tf.constant(texts))
    served = LocalClient(tmp_path).predict({"text": texts})
    np.testing.assert_allclose(served["probabilities"], expected["probabilities"], atol=1e-6)


def test_tokenize_returns_offsets_into_the_text_as_sent(models):
    text = "The Cafe\u0301, 中 unaffable"
    prediction = LocalClient(models).predict({"text": [text, "a"]}, "tokenize")
    covered = [
        text[start:end]
        for start, end in zip(prediction["start"][0], prediction["end"][0], strict=True)
        if start >= 0
    ]
    assert covered == ["The", "Cafe\u0301", ",", "中", "un", "aff", "able"]
    assert prediction["start"][1][3:] == [-1] * (len(prediction["start"][1]) - 3)
    assert prediction["input_mask"][1][:4] == [1, 1, 1, 0]


def test_embeddings_equal_those_of_the_encoder(models, trained):
    prediction = LocalClient(models).predict(
        {"text": ["the bill", "my screen is broken !"]}, "embed"
    )
    expected = trained.serving.pipeline.embed(tf.constant(["the bill", "my screen is broken !"]))
    for name in ("pooled", "mean"):
        np.testing.assert_allclose(prediction[name], expected[name], atol=1e-5)


@pytest.mark.slow
def test_a_pair_task_takes_two_texts(trained, tmp_path):
    task = dataclasses.replace(trained.task, text_columns=("a", "b"))
    pair = type(trained)(task, trained.config, trained.vocabulary, network=trained.network)
    publish(pair, tmp_path / "pair")
    prediction = LocalClient(tmp_path / "pair").predict(
        {"text_a": ["the bill"], "text_b": ["is high"]}, "tokenize"
    )
    assert prediction["segment_ids"] == [[0, 0, 0, 0, 1, 1, 1]]


def altered(trained, *, weight=False, vocabulary=None, cased=False, labels=None):
    """Return a copy of a trained model in which one thing is wrong."""
    config = dataclasses.replace(trained.config, do_lower_case=not cased)
    task = dataclasses.replace(trained.task, labels=labels) if labels else trained.task
    model = task.build_model(config)
    for variable, value in zip(model.variables, trained.network.variables, strict=True):
        variable.assign(value)
    if weight:
        kernel = model.encoder.transformer[-1].intermediate.kernel
        kernel.assign(kernel + np.eye(*kernel.shape) * 1e-2)
    return type(trained)(task, config, vocabulary or trained.vocabulary, network=model)


def swapped(vocabulary, first, second):
    lines = list(vocabulary.lines)
    lines[first], lines[second] = lines[second], lines[first]
    return Vocabulary(lines)


SABOTAGES = {
    "a weight": (
        lambda trained: {"weight": True},
        r"serving_default: text=.*: (score|probabilities) differs",
    ),
    "a vocabulary line": (
        lambda trained: {"vocabulary": swapped(trained.vocabulary, 17, 18)},
        "input_ids differs",
    ),
    "the case": (lambda trained: {"cased": True}, ": text='.*'"),
    "a label": (
        lambda trained: {"labels": ("billing", "software", "hardware")},
        "label differs|labels differs",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotaged_export_is_not_published_and_the_string_is_reported(trained, tmp_path, name):
    change, message = SABOTAGES[name]
    wrong = altered(trained, **change(trained))
    with pytest.raises(UserError, match=message) as raised:
        publish(
            trained,
            tmp_path / "models",
            write=lambda right, *rest: write_saved_model(wrong, *rest),
        )
    assert str(raised.value).startswith("not published: ") and "text=" in str(raised.value)
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_an_export_that_fails_to_run_is_not_published(trained, tmp_path):
    def write(right, directory, *rest):
        write_saved_model(right, directory)
        (directory / "saved_model.pb").write_bytes(b"damaged")

    with pytest.raises(UserError, match="not published: saved_model.pb is damaged"):
        publish(trained, tmp_path / "models", write=write)
    assert not (tmp_path / "models").exists()


def test_the_parity_check_covers_every_entry_of_the_vocabulary(trained):
    words = parity.vocabulary_words(trained.vocabulary)
    ids = trained.serving.pipeline.tokenizer.tokenize(tf.constant(words)).ids.flat_values.numpy()
    special_tokens = {trained.vocabulary[entry] for entry in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")}
    assert set(ids.tolist()) | special_tokens == set(range(len(trained.vocabulary)))


def test_the_parity_check_covers_the_branch_of_a_single_short_text(trained, monkeypatch):
    short_text = ServedEncoder._short_text

    def wrong(*arguments):
        return tf.nest.map_structure(lambda values: values + 1, short_text(*arguments))

    monkeypatch.setattr(ServedEncoder, "_short_text", wrong)
    functions = served_pipeline(trained, "float32").signatures
    cases = [case for case in parity.text_requests(trained, functions) if is_alone(case)]
    outputs = [parity.called(functions[signature], inputs) for signature, inputs in cases]
    differences = parity.differences(
        trained.serving.pipeline, cases, outputs, parity.TOLERANCES["float32"]
    )
    differ = {case[0] for case, found in zip(cases, differences, strict=True) if found}
    assert differ == {"serving_default", "embed"}


def is_alone(case):
    return len(case[1]["text"]) == 1


@pytest.mark.slow
def test_an_unaltered_copy_is_published_as_the_next_version(trained, tmp_path):
    """Export without sabotage, as a control of the test above."""
    for name in ("7", "12", "notes", ".writing-1"):
        (tmp_path / name).mkdir()
    same = altered(trained)
    path = publish(trained, tmp_path, write=lambda right, *rest: write_saved_model(same, *rest))
    assert path == tmp_path / "13"
    assert list(version_directories(tmp_path)) == [7, 12, 13]


@pytest.mark.slow
def test_the_published_version_runs_elsewhere_without_our_code(models, tmp_path):
    shutil.copytree(models / "1", tmp_path / "moved")
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            str(ROOT / "examples" / "ask.py"),
            str(tmp_path / "moved"),
            "the bill is too high",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "billing"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["session", "C API"])
def test_the_published_version_runs_in_other_engines(models, tmp_path, engine):
    """Load and run it with the interfaces that TF Serving uses."""
    texts = [text for texts in small.TEXTS.values() for text in texts]
    inputs = {"text": [base64.b64encode(text.encode()).decode() for text in texts]}
    cases = [{"signature": "serving_default", "inputs": inputs}]
    results = engines.run_cases(engines.commands()[engine], models / "1", cases, tmp_path)
    expected = LocalClient(models).predict({"text": texts})
    assert sorted(results) == [f"0/{name}" for name in sorted(expected)]
    for name in ("label", "labels"):
        assert jsonable(tf.constant(results[f"0/{name}"])) == expected[name]
    for name in ("score", "probabilities"):
        np.testing.assert_allclose(results[f"0/{name}"], expected[name], atol=1e-6)


@pytest.mark.slow
def test_the_command_predicts(models, run_command):
    texts = ("the bill is too high", "broken screen !")
    inputs = [f"--input=text={text}" for text in texts]
    done = run_command("export.request", f"--model_dir={models}", *inputs)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == ["billing", "hardware"]


@pytest.mark.slow
def test_a_version_can_be_given_as_its_own_directory(models):
    texts = {"text": ["the bill is too high"]}
    assert LocalClient(models / "1").predict(texts) == LocalClient(models).predict(texts)


def test_a_wrong_request_is_reported_in_one_line(models, tmp_path):
    with pytest.raises(UserError, match="no published version"):
        LocalClient(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        LocalClient(tmp_path / "absent")
    (tmp_path / "3").mkdir()
    with pytest.raises(UserError, match="3: not a loadable SavedModel"):
        LocalClient(tmp_path)
    served = LocalClient(models)
    with pytest.raises(
        UserError, match="^signature=sing: expected one of embed, serving_default, tokenize"
    ):
        served.predict({"text": ["a"]}, "sing")
    with pytest.raises(UserError, match="serving_default: expected text; received more, text"):
        served.predict({"text": ["a"], "more": ["b"]})
    with pytest.raises(UserError, match="--input=text: expected NAME=VALUE"):
        RequestSettings(("text",), "m")
    assert RequestSettings(("a=1", "b=2=3", "a="), "m").inputs() == {
        "a": [b"1", b""],
        "b": [b"2=3"],
    }


def test_a_run_without_a_task_cannot_be_exported(huggingface_dir, tmp_path):
    from bert_tf import read_pretrained

    read_pretrained(huggingface_dir).save(tmp_path / "pretrained")
    with pytest.raises(UserError, match="expected a fine-tuned run or one with pretraining heads"):
        load_model(tmp_path / "pretrained")
