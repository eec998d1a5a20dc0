"""Files published with the graph: warm-up records, server configuration, documentation."""

import dataclasses
import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jinja2
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.
from google.protobuf import text_format
from tensorflow.core.protobuf import fingerprint_pb2

from bert_tf import Vocabulary, read_pretrained
from export.checks import isolated_runner, parity
from export.clients.signature_defs import read_signatures
from export.clients.signatures import Signature, Tensor
from export.graph.saved_model import write_saved_model
from export.package import documents, version_files, warmup
from export.package.documents import without_paths
from tasks.base.task_types import TASK_TYPES, UNLABELLED_TASK_TYPES
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.tagging import TaggingTask
from tests import small
from tests.conftest import ROOT, WORDS
from tests.export import c_engine, rest_json

NAME = 'a "name"\\ of\n ünusual kind: #1'


def trained_as(directory, task, config, vocabulary):
    """Return a run of a task with new weights, in directories whose names no file may contain."""
    config = dataclasses.replace(config, num_hidden_layers=1)
    weights = small.write_huggingface(directory / "builders-weights" / "tiny", config, vocabulary)
    source = read_pretrained(str(weights))
    return small.trained(directory / "builders-run" / "run", source, task, task.build_model(config))


def packaged(trained, directory, name=NAME):
    """Return a version as published, but without the parity check."""
    write_saved_model(trained, directory)
    signatures = version_files.prepare(directory, trained)
    served = tf.saved_model.load(str(directory)).signatures
    predictions = {
        signature.name: asked(served, signature.name, signature.example())
        for signature in signatures
    }
    version_files.write_documents(directory, name, trained, "float32", signatures, predictions)
    return served, predictions


def asked(served, signature, inputs):
    inputs = {name: tf.constant(values, tf.string) for name, values in inputs.items()}
    return {name: value.numpy() for name, value in served[signature](**inputs).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config, vocabulary):
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    return trained_as(tmp_path_factory.mktemp("builders-folder"), task, config, vocabulary)


@pytest.fixture(scope="module")
def version(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("builders-models") / "version"
    served, predictions = packaged(trained, directory)
    return types.SimpleNamespace(directory=directory, served=served, answers=predictions)


def text_of(version, name):
    return (version.directory / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_signature_is_warmed_up_with_few_and_many_rows(version):
    records = warmup.read(version.directory)
    assert len(records) <= 100
    assert {signature for signature, _ in records} == set(version.served)
    for name in version.served:
        batches = [inputs["text"] for signature, inputs in records if signature == name]
        assert {1, 4, 16} <= {len(texts) for texts in batches}
        assert len({len(texts[0].split()) for texts in batches}) > 1
    for signature, inputs in records:
        assert asked(version.served, signature, inputs)


@pytest.mark.slow
def test_the_parity_check_runs_every_record(version, trained, monkeypatch):
    """Check every record because one that fails prevents a server from loading the version."""
    seen = []

    def run_probe(moved, scratch, device):
        seen.extend(json.loads((scratch / "cases.json").read_text()))
        raise RuntimeError("asked")

    monkeypatch.setattr(parity, "_run_isolated", run_probe)
    with pytest.raises(RuntimeError, match="asked"):
        parity.check(version.directory, trained)
    records = [
        {"signature": signature, "inputs": isolated_runner.encoded(inputs)}
        for signature, inputs in warmup.read(version.directory)
    ]
    assert len(records) > 10 and seen[-len(records) :] == records


@pytest.mark.slow
def test_without_the_serving_extra_a_message_is_logged_and_no_record_written(
    version, trained, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    (tmp_path / "assets.extra").mkdir()
    said = []
    warmup.write(tmp_path, read_signatures(version.directory), trained, said.append)
    assert said == [
        "no warm-up records written: tensorflow-serving-api is missing; "
        "run pip install 'bert_tf[serving]'"
    ]
    assert not list((tmp_path / "assets.extra").iterdir()) and warmup.read(tmp_path) == []


@pytest.mark.parametrize(("layers", "hidden"), [(2, 128), (12, 768), (24, 1024)])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_records_are_limited_by_the_cost_of_the_model(layers, hidden, rank):
    config = types.SimpleNamespace(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden
    )
    trained = types.SimpleNamespace(
        config=config,
        vocabulary=Vocabulary(WORDS),
        task=types.SimpleNamespace(max_seq_length=512),
    )
    inputs = {
        "prompt": Tensor("prompt", "string", (None,)),
        "choices": Tensor("choices", "string", (None,) * rank),
    }
    signatures = [Signature(name, inputs, {}) for name in ("serving_default", "tokenize", "embed")]
    found = warmup.requests(signatures, trained)
    texts = [
        np.ravel(values)
        for _, given in found
        for values in (given["prompt"] if rank == 1 else [], given["choices"])
    ]
    tokens = sum(len(text.split()) for values in texts for text in values)
    assert len(found) <= 100
    assert tokens * layers * 12 * hidden**2 <= warmup.BUDGET * 1.05
    longest = max(len(given["prompt"][0].split()) for _, given in found)
    assert longest >= (128 if rank == 2 and layers == 24 else 250)  # A choice may be as long.


@pytest.mark.parametrize("name", ["complaints", NAME, "'", "a\\x", "日本"])
def test_models_config_is_a_server_configuration_for_any_name(name):
    config_pb2 = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    text = version_files.models_config(name)
    models = text_format.Parse(text, config_pb2.ModelServerConfig()).model_config_list.config
    assert [(model.name, model.base_path, model.model_platform) for model in models] == [
        (name, f"/models/{name}", "tensorflow")
    ]


@pytest.mark.slow
def test_batching_parameters_are_valid_for_servers(version):
    def settings(text):
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return [
            re.fullmatch(r"(\w+)(?::? \{ value)?: (\d+)(?: \})?", line).groups() for line in lines
        ]

    # The name is that of TF Serving. Batches are not padded, and large requests are not split.
    found = settings(text_of(version, "batching_params.pbtxt"))
    assert found == [
        ("max_batch_size", "32"),
        ("batch_timeout_micros", "0"),
        ("max_enqueued_batches", "100"),
    ]
    choices = Tensor("choices", "string", (None, None))
    lists = Signature("serving_default", {"choices": choices}, {})
    assert version_files.batching_parameters([lists]) is None


def blocks(text, language):
    found = re.findall(r"```(\w*)\n(.*?)\n```\n", text, re.DOTALL)
    return [content for name, content in found if name == language]


@pytest.mark.parametrize("kind", [*TASK_TYPES, *UNLABELLED_TASK_TYPES])
def test_every_task_type_is_described(kind):
    module, name = {**TASK_TYPES, **UNLABELLED_TASK_TYPES}[kind].class_path.split(":")
    task_class = getattr(importlib.import_module(module), name)
    assert task_class.description.endswith(".")
    outputs = task_class.outputs
    if isinstance(outputs, property):  # They depend on the task.
        outputs = task_class(max_seq_length=16).outputs
    texts = [spec.description for spec in outputs.values()]
    texts += task_class.input_descriptions.values()
    assert texts and all(texts)


def test_a_template_rejects_a_missing_value():
    with pytest.raises(jinja2.UndefinedError, match="'escaped_name' is undefined"):
        documents.render("models.config", name="a")


def test_an_installation_has_the_templates(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    installed, expected = (
        {path.name for path in (root / "export" / "package" / "templates").iterdir()}
        for root in (tmp_path, ROOT)
    )
    assert installed == expected
    assert "MODEL_CARD.md.j2" in installed


@pytest.mark.slow
def test_the_signature_page_shows_predictions_of_this_model(version):
    page = text_of(version, "SIGNATURES.md")
    curls = [shlex.split(block) for block in blocks(page, "")]
    predictions = [json.loads(block) for block in blocks(page, "json")]
    assert len(curls) == len(predictions) == 2 * len(version.served)
    for curl, prediction in zip(curls, predictions, strict=True):
        assert curl[1].endswith(
            "/v1/models/a%20%22name%22%5C%20of%0A%20%C3%BCnusual%20kind%3A%20%231:predict"
        )
        request = json.loads(curl[3])
        expected = version.answers[request.get("signature_name", "serving_default")]
        texts = request["instances"] if "instances" in request else request["inputs"]["text"]
        assert texts == ["My invoice is wrong.", "The screen stays black."]
        if "predictions" in prediction:
            columns = {name: [row[name] for row in prediction["predictions"]] for name in expected}
        else:
            columns = prediction["outputs"]
        assert set(columns) == set(expected)
        for name, rows in columns.items():
            for shown, right in zip(rows, expected[name].tolist(), strict=True):
                if isinstance(shown, list) and str(shown[-1]).startswith("..."):
                    assert shown[-1] == f"... {len(right) - 4} more"
                    shown, right = shown[:4], right[:4]
                if expected[name].dtype == object:
                    assert shown == np.array(right).astype(str).tolist()
                else:
                    np.testing.assert_allclose(shown, right, rtol=1e-3)
    assert "| `probabilities` | float32 | [B, 3] | probability of each label" in page


@pytest.mark.slow
def test_the_python_code_of_the_signature_page_runs(version, monkeypatch):
    grpc = pytest.importorskip("grpc")
    prediction_service_pb2_grpc = pytest.importorskip(
        "tensorflow_serving.apis.prediction_service_pb2_grpc"
    )
    from tensorflow_serving.apis import predict_pb2

    class Stub:
        def __init__(self, channel):
            assert channel == "localhost:8500"

        def Predict(self, request, timeout):
            assert request.model_spec.name == NAME
            inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
            response = predict_pb2.PredictResponse()
            prediction = asked(version.served, request.model_spec.signature_name, inputs)
            for name, value in prediction.items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
            return response

    def insecure_channel(address, options):
        # Without these options gRPC rejects responses of over 4 MB.
        lengths = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        assert dict(options) == dict.fromkeys(lengths, -1)
        return address

    monkeypatch.setattr(grpc, "insecure_channel", insecure_channel)
    monkeypatch.setattr(prediction_service_pb2_grpc, "PredictionServiceStub", Stub)
    client, *requests = blocks(text_of(version, "SIGNATURES.md"), "python")
    assert len(requests) == len(version.served)
    for request in requests:
        names = {}
        exec(f"{client}\n{request}", names)
        expected = version.answers[names["request"].model_spec.signature_name]
        assert set(names["outputs"]) == set(expected)
        for name, values in names["outputs"].items():
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.slow
def test_the_model_card_has_the_records_of_the_run(version, trained):
    card = text_of(version, "MODEL_CARD.md")
    for line in (
        "3 labels, in order: a, b, c.",
        f"{len(WORDS)} entries, uncased, sha256 {trained.vocabulary.sha256}",
        "- origin: Hugging Face directory tiny\n",
        "- max_seq_length: 12 (",
        "The exported checkpoint was not evaluated in its run.",
        f"| tensorflow | {tf.__version__} | {tf.__version__} |",
        "licence of the origin's weights: not recorded",
        "- checkpoint: step-00000000\n",
    ):
        assert line in card
    assert card.splitlines()[0] == '# a "name"\\ of? ünusual kind: #1'


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ("run /home/Ann B/x y/checkpoints/step-00000012", "run x y, step-00000012"),
        (
            "run RUN/checkpoints/step-00000012 (not used: a/b)",
            "run RUN, step-00000012 (not used: b)",
        ),
        ("run gs://bucket/RUN/checkpoints/step-00000012", "run RUN, step-00000012"),
        ("run /home/Ann B/first, unfinished", "run first, unfinished"),
        ("run runs/a/, unfinished, trained with fit", "run a, unfinished, trained with fit"),
        ("keras-hub preset /home/me/bert_tiny", "keras-hub preset bert_tiny"),
        ("Hugging Face directory model", "Hugging Face directory model"),
        (
            "Hugging Face model microsoft/bert, revision 0a1b (not used: a/b)",
            "Hugging Face model microsoft/bert, revision 0a1b (not used: b)",
        ),
    ],
)
def test_origins_are_recorded_without_paths(origin, shown):
    assert without_paths(origin) == shown


@pytest.mark.slow
def test_no_file_contains_paths_of_the_building_machine(version):
    secrets = ("builders-", str(pathlib.Path.home()), "site-packages", str(pathlib.Path.cwd()))
    paths = [path for path in version.directory.rglob("*") if path.is_file()]
    assert len(paths) >= 12
    for path in paths:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], path


@pytest.mark.slow
def test_a_fingerprint_depends_on_the_content_of_a_model(version, tmp_path):
    path = tmp_path / "fingerprint.pb"
    given = (version.directory / "fingerprint.pb").read_bytes()
    path.write_bytes(given)
    version_files.settle_fingerprint(tmp_path)
    assert path.read_bytes() == given
    other = fingerprint_pb2.FingerprintDef.FromString(given)
    was = other.uuid
    other.checkpoint_hash += 1
    path.write_bytes(other.SerializeToString())
    version_files.settle_fingerprint(tmp_path)
    assert fingerprint_pb2.FingerprintDef.FromString(path.read_bytes()).uuid not in ("", was)


OTHER_TASKS = {
    "several labels": ClassificationTask(labels=("a", "b"), multi_label=True, max_seq_length=12),
    "tagging": TaggingTask(labels=("O", "B-x", "I-x"), doc_stride=4, max_seq_length=12),
    "span_qa": QuestionAnsweringTask(doc_stride=4, max_query_length=4, max_seq_length=16),
    "multiple_choice": MultipleChoiceTask(max_seq_length=12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_TASKS)
def test_every_task_type_is_packaged(name, tmp_path, config, vocabulary):
    trained = trained_as(tmp_path, OTHER_TASKS[name], config, vocabulary)
    served, _ = packaged(trained, tmp_path / "version", "model")
    for signature, inputs in warmup.read(tmp_path / "version"):
        assert asked(served, signature, inputs)
    page = (tmp_path / "version" / "SIGNATURES.md").read_text()
    assert not re.findall(r"\|  \|$", page, re.MULTILINE)  # Every field is documented.
    # The request follows the grammar of TF Serving's REST interface.
    engine = c_engine.Engine(tmp_path / "version")
    requests = [shlex.split(block)[3] for block in blocks(page, "")]
    for request, shown in zip(requests, blocks(page, "json"), strict=True):
        prediction = json.loads(rest_json.predicted(engine, request.encode()))
        ((form, shown),) = json.loads(shown).items()
        assert_shows(shown, prediction[form])


def assert_shows(shown, right):
    if isinstance(right, dict):
        assert set(shown) == set(right)
        for name, value in shown.items():
            assert_shows(value, right[name])
    elif isinstance(right, list):
        if len(right) > 8 and isinstance(shown[-1], str) and len(shown) == 5:
            assert shown.pop() == f"... {len(right) - 4} more"
            right = right[:4]
        for value, expected in zip(shown, right, strict=True):
            assert_shows(value, expected)
    else:
        assert shown == (pytest.approx(right, rel=1e-3) if isinstance(right, float) else right)
