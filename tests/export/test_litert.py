"""LiteRT files: conversion of every task type, parity check, archive and requests."""

import contextlib
import dataclasses
import errno
import functools
import json
import re
import threading
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

from bert_tf import UserError
from bert_tf.text.encoder_inputs import flat_to_padded, pack, to_flat, to_padded
from export import LiteRTClient, LocalClient, publish, request, write_litert
from export.export_litert import ExportLiteRTSettings
from export.litert import writer
from export.litert.archive import INPUTS, Contents, append
from export.litert.client import _token_function
from export.litert.writer import QUANTIZATIONS, convert
from tasks.types.classification.text_classifier import ClassificationTask, TextClassifier
from tasks.types.masked_lm import NUM_PREDICTIONS
from tests import small
from tests.export.test_every_kind import TASKS, TEXTS, inputs_of, of_pretraining, of_task

LABELS = ("billing", "hardware", "software")


@pytest.fixture(scope="module")
def classifier(config, vocabulary):
    """Return a model that is large enough for the converter to quantize its weights."""
    larger = dataclasses.replace(config, hidden_size=48, intermediate_size=96)
    task = ClassificationTask(labels=LABELS, max_seq_length=12)
    model = TextClassifier(task, larger, vocabulary)
    rng = np.random.default_rng(0)
    for variable in model.network.variables:
        if variable.path.endswith(("kernel", "embeddings")):
            variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


@pytest.fixture(scope="module")
def converted(classifier):
    """Return a function that converts to a quantization, once."""
    return functools.cache(functools.partial(convert, classifier))


def called(content, inputs, signature="serving_default"):
    """Return the outputs of a LiteRT model by name."""
    return Interpreter(model_content=content).get_signature_runner(signature)(**inputs)


def random_inputs(config, rows, length):
    rng = np.random.default_rng(rows)
    lengths = rng.integers(2, length + 1, (rows, 1))
    return {
        "input_ids": rng.integers(1, config.vocab_size, (rows, length)).astype(np.int32),
        "input_mask": (np.arange(length) < lengths).astype(np.int32),
        "segment_ids": (np.arange(length) >= lengths // 2).astype(np.int32),
    }


# The largest difference of a probability: float16 and int8 round the weights.
LARGEST = {"none": 1e-5, "float16": 0.01, "dynamic": 0.5}
# Smallest and largest number of bytes per weight.
WIDTHS = {"none": (4, 4), "float16": (2, 2), "dynamic": (1, 2)}
QUANTIZED = pytest.mark.parametrize("quantize", small.fast(QUANTIZATIONS, "none", "dynamic"))


@pytest.mark.medium
@QUANTIZED
@pytest.mark.parametrize(("rows", "length"), [(1, 5), (1, 16), (3, 7), (5, 2)])
def test_any_number_of_rows_and_tokens_gives_the_outputs_of_the_network(
    classifier, converted, rows, length, quantize
):
    inputs = random_inputs(classifier.config, rows, length)
    outputs = called(converted(quantize), inputs)["label"]
    difference = np.max(np.abs(outputs - classifier.network(inputs)["label"]))
    assert difference < LARGEST[quantize]
    assert quantize == "none" or difference > LARGEST["none"]


@pytest.mark.parametrize(
    "quantize",
    [
        "none",
        pytest.param("float16", marks=pytest.mark.slow),
        pytest.param("dynamic", marks=pytest.mark.medium),
    ],
)
def test_weights_are_stored_once_and_as_small_as_asked_for(classifier, converted, quantize):
    count = sum(variable.shape.num_elements() for variable in classifier.network.variables)
    overhead = 60_000  # Of two graphs.
    smallest, largest = WIDTHS[quantize]
    assert smallest * count < len(converted(quantize)) < largest * count + overhead


def test_signatures_and_operations(converted):
    interpreter = Interpreter(model_content=converted("none"))
    assert interpreter.get_signature_list() == {
        "serving_default": {"inputs": sorted(INPUTS), "outputs": ["label"]},
        "embed": {"inputs": sorted(INPUTS), "outputs": ["mean", "pooled"]},
    }
    operations = {details["op_name"] for details in interpreter._get_ops_details()}
    assert not [name for name in operations if name.startswith("Flex")]
    assert not operations & {"IF", "WHILE", "CUSTOM", "READ_VARIABLE"}
    assert {"GELU", "FULLY_CONNECTED", "SOFTMAX"} <= operations


def test_calls_of_several_threads_wait_for_each_other():
    """An interpreter has the tensors of one call, also for calls of other signatures."""
    lock, was_locked = threading.Lock(), []

    class Runner:
        def get_output_details(self):
            return {"label": {"dtype": np.float32, "shape_signature": [-1, 2]}}

        def __call__(self, **inputs):
            was_locked.append(lock.locked())
            return {"label": np.zeros([len(inputs["input_ids"]), 2], np.float32)}

    ids = tf.constant([2, 5, 3])
    tf.function(_token_function(Runner(), lock))(
        {"input_ids": ids, "segment_ids": tf.zeros_like(ids), "row_splits": tf.constant([0, 3])}
    )
    assert was_locked == [True] and not lock.locked()


@pytest.mark.slow
def test_both_forms_of_gelu(config, vocabulary):
    task = ClassificationTask(labels=LABELS, max_seq_length=12)
    config = dataclasses.replace(config, hidden_act="gelu_new")
    model = TextClassifier(task, config, vocabulary)
    inputs = random_inputs(config, 2, 6)
    outputs = called(convert(model), inputs)["label"]
    np.testing.assert_allclose(outputs, model.network(inputs)["label"], atol=1e-5)


def test_flat_to_padded_inverts_the_flat_layout(vocabulary):
    ids = tf.ragged.constant([[5, 6, 7], [8], [9, 10]], dtype=tf.int32)
    packed = pack([tokens_of(ids), tokens_of(ids)], vocabulary, 12)
    padded = flat_to_padded(to_flat(packed, vocabulary))
    expected = to_padded(packed, vocabulary)  # The id of [PAD] is 0.
    assert padded.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(padded[name], values)


def tokens_of(ids):
    from bert_tf.text.tokenizer import Tokens

    return Tokens(ids, None, None)


@pytest.mark.slow
def test_masks_are_found_in_both_layouts(tmp_path, config, vocabulary):
    pipeline = of_pretraining(tmp_path, config, vocabulary).serving.pipeline
    texts = tf.constant(["the [MASK] is high", "no mask", "[MASK] [MASK]", "a b [MASK]"])
    packed = pipeline.encode(text=texts).packed
    for name in pipeline.token_functions:
        function = pipeline.token_functions[name]
        flat, padded = (
            function(to_flat(packed, vocabulary)),
            function(to_padded(packed, vocabulary)),
        )
        assert flat.keys() == padded.keys()
        for output in flat:
            if output == "id":  # Those of a text without a mask have no meaning.
                has_mask = flat["score"][:, 0] > 0
                assert has_mask.numpy().tolist() == [True, False, True, True]
                assert flat["id"].shape == (4, NUM_PREDICTIONS)
                np.testing.assert_array_equal(flat["id"][has_mask], padded["id"][has_mask])
            else:
                np.testing.assert_allclose(flat[output], padded[output], atol=1e-5)


# Every task type.


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TASKS, "pretrained"])
def test_every_task_type_predicts_as_trained(name, tmp_path, config, vocabulary):
    if name == "pretrained":
        run = of_pretraining(tmp_path, config, vocabulary)
    else:
        run = of_task(name, tmp_path, config, vocabulary)
    agreement = write_litert(run, tmp_path / "model.tflite")
    assert agreement.equal == agreement.rows >= 50
    client = LiteRTClient(tmp_path / "model.tflite")
    pipeline = run.serving.pipeline
    assert set(client.signatures) == set(pipeline.signatures)
    for signature, function in pipeline.signatures.items():
        names = [spec.name for spec in function.input_signature]
        columns = {
            **inputs_of(run.task, TEXTS),
            "text": TEXTS,
            "text_a": TEXTS,
            "text_b": TEXTS[::-1],
            "prompt": ["the bill ", ""] * (len(TEXTS) // 2) + ["a"] * (len(TEXTS) % 2),
        }
        columns = {name: columns[name] for name in names}
        outputs = client.predict(columns, signature)
        for output, expected in function(*columns.values()).items():
            if expected.dtype.is_floating:
                np.testing.assert_allclose(outputs[output], expected, rtol=1e-4, atol=1e-4)
            else:
                received = tf.constant(outputs[output], expected.dtype)
                np.testing.assert_array_equal(received, expected)
        empty = client.predict({name: [] for name in names}, signature)
        assert empty == {name: [] for name in outputs}


# The file.


def test_the_archive_is_read_as_written(classifier, converted, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(converted("none"))
    contents = Contents(classifier.config, classifier.task.to_dict(), classifier.vocabulary)
    contents.append_to(path)
    append(path, {"export.json": b"{}"})
    assert path.read_bytes().startswith(converted("none"))
    read = Contents.read(path)
    assert read.config == classifier.config
    assert read.task == json.loads(json.dumps(classifier.task.to_dict()))
    assert read.vocabulary.lines == classifier.vocabulary.lines
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.read("export.json") == b"{}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"text" * 9,
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"TFL3", b"TFL0", 1),
        lambda content: content.replace(b"config.json", b"config.nosj"),
        lambda content: content.replace(b'{\n  "vocab_size"', b'[\n  "vocab_size"'),
    ],
)
def test_another_or_a_damaged_file_is_a_user_error(damage, classifier, converted, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(converted("none"))
    contents = Contents(classifier.config, classifier.task.to_dict(), classifier.vocabulary)
    contents.append_to(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"model.tflite: not a file of bert-tf export_litert: \S"):
        Contents.read(path)


def test_an_existing_file_is_kept(tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"of somebody")
    with pytest.raises(UserError, match="already exists"):
        write_litert(tmp_path / "run", path)
    with pytest.raises(UserError, match="already exists"):
        ExportLiteRTSettings(run=str(tmp_path / "run"), output=str(path))
    with pytest.raises(UserError, match="is part of the input"):
        ExportLiteRTSettings(run=str(tmp_path), output=str(path), overwrite=True)
    assert path.read_bytes() == b"of somebody"


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(
            None, None, "{{function_node __wrapped__SaveV2}} a; No space left on device [Op:SaveV2]"
        ),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_is_an_error_of_the_file(error, classifier, monkeypatch, tmp_path):
    def write(*arguments):
        raise error

    monkeypatch.setattr(writer, "loaded", lambda *arguments: contextlib.nullcontext(classifier))
    monkeypatch.setattr(writer, "_write", write)
    path = tmp_path / "model.tflite"
    with pytest.raises(OSError) as raised:
        write_litert(classifier, path)
    assert re.fullmatch(r"(a; )?No space left on device; nothing is written", raised.value.strerror)
    assert raised.value.filename == str(path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", None])
def test_a_file_has_a_name(path, tmp_path):
    with pytest.raises(UserError, match=f"^output: expected a file, received {path!r}$"):
        write_litert(tmp_path / "run", path)


def test_an_unknown_quantization_is_rejected(tmp_path):
    with pytest.raises(UserError, match="quantize='int4': expected one of none, float16, dynamic"):
        write_litert(tmp_path / "run", tmp_path / "model.tflite", quantize="int4")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_a_wrong_conversion_is_not_written(quantize, monkeypatch, tmp_path, config, vocabulary):
    """Flip the sign of the logits in the file."""
    run = of_task("classification", tmp_path / "source", config, vocabulary)

    def convert_wrong_model(model, quantize):
        model.network.head.kernel.assign(-model.network.head.kernel)
        try:
            return convert(model, quantize)
        finally:
            model.network.head.kernel.assign(-model.network.head.kernel)

    monkeypatch.setattr(writer, "convert", convert_wrong_model)
    with pytest.raises(UserError, match=r"not written: serving_default: text=.* rows are equal"):
        write_litert(run, tmp_path / "model.tflite", quantize=quantize)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_requests_print_what_those_to_the_saved_model_print(tmp_path, config, vocabulary, capsys):
    run = of_task("span_qa with no answer", tmp_path, config, vocabulary)
    publish(run, tmp_path / "models")
    write_litert(run, tmp_path / "model.tflite")
    printed = []
    for target in ({"model_dir": tmp_path / "models"}, {"litert": tmp_path / "model.tflite"}):
        inputs = ("question=is the bill", "context=my app is too high , the bill is high !")
        request.main(request.RequestSettings(inputs, **{k: str(v) for k, v in target.items()}))
        printed.append(json.loads(capsys.readouterr().out))
    of_saved_model, of_litert = printed
    assert list(of_litert) == list(of_saved_model)
    for name, values in of_saved_model.items():
        if np.asarray(values).dtype.kind == "f":
            np.testing.assert_allclose(of_litert[name], values, rtol=1e-4, atol=1e-4)
        else:
            assert of_litert[name] == values
    both = LiteRTClient(tmp_path / "model.tflite").signatures["serving_default"]
    assert both == LocalClient(tmp_path / "models").signatures["serving_default"]
