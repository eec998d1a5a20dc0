"""The encoder of the served graph against the trained encoder."""

import dataclasses
import functools
import inspect
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.text.encoder_inputs import one_sequence, to_flat
from bert_tf.weights.pretrained_encoder import Encoder
from export.graph import served_encoder
from export.graph.saved_model import portable_encoder
from export.graph.served_encoder import (
    SHORT_TOKENS,
    ServedEncoder,
    dense_weights,
    has_packed_products,
    product,
)
from tests import small
from tests.bert_tf.test_encoder import make_encoder
from tests.bert_tf.test_layout import random_texts

pytestmark = pytest.mark.optimized

LENGTHS = {
    "a single token": [1],
    "a short text": [7],
    "the longest short text": [SHORT_TOKENS],
    "a long text": [SHORT_TOKENS + 1],
    "texts": [5, 1, 16, 3, 9],
}


@pytest.fixture(scope="module", params=small.fast(["gelu", "gelu_new"], "gelu"))
def encoder(request, config):
    """Return a trained encoder whose feed-forward width gets additional columns."""
    wide = {"intermediate_size": served_encoder.SLOW_WIDTH, "max_position_embeddings": 96}
    config = dataclasses.replace(config, hidden_act=request.param, **wide)
    return make_encoder(config, small.random_weights(config, scale=0.1))


@pytest.fixture(scope="module")
def expected_outputs(encoder, vocabulary):
    """Return the function that returns the outputs of the trained encoder, computed once."""
    return functools.cache(lambda **options: outputs_of(encoder, vocabulary, **options))


@pytest.fixture(params=[False, True], ids=["packed", "portable"])
def is_portable(request):
    if not request.param and not has_packed_products("float32"):
        pytest.skip("this TensorFlow has no packed products")
    return request.param


def serve(encoder, precision, is_portable):
    return (portable_encoder if is_portable else ServedEncoder)(encoder, precision)


def outputs_of(encoder, vocabulary, **options):
    """Return the outputs for each of LENGTHS, in a graph like the served one, without padding."""

    def traced(num_splits):
        specs = dict.fromkeys(("input_ids", "segment_ids"), tf.TensorSpec([None], tf.int32))
        specs["row_splits"] = tf.TensorSpec([num_splits], tf.int32)
        return tf.function(lambda inputs: encoder(inputs, **options), input_signature=[specs])

    short, others = traced(2), traced(None)
    found = {}
    for of_case, lengths in LENGTHS.items():
        packed = random_texts(lengths, encoder.config)
        is_short = len(lengths) == 1 and lengths[0] <= getattr(encoder, "short_tokens", 0)
        inputs = one_sequence(packed) if is_short else to_flat(packed, vocabulary)
        outputs = (short if is_short else others)(inputs)
        outputs.pop("attentions", None)
        for name in outputs.keys() - {"pooled"}:
            for hidden_TH in tf.nest.flatten(outputs[name]):
                assert hidden_TH.shape[0] == inputs["input_ids"].shape[0]  # Padding stays.
        for number, tensor in enumerate(tf.nest.flatten(outputs)):
            rows = len(lengths) if tensor.shape[0] == len(lengths) else sum(lengths)
            found[of_case, number] = tensor.numpy()[:rows]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"pooled_only": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"output_hidden_states": True}, marks=pytest.mark.slow),
    ],
)
def test_outputs_equal_those_of_the_trained_encoder(
    encoder, expected_outputs, is_portable, options, vocabulary
):
    served = serve(encoder, "float32", is_portable)
    expected = expected_outputs(**options)
    actual = outputs_of(served, vocabulary, **options)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        tolerance = 1e-5 * max(1, np.abs(values).max())
        np.testing.assert_allclose(actual[key], values, rtol=0, atol=tolerance)


def test_it_has_the_call_arguments_of_the_trained_encoder():
    # Heads and pretraining models call either.
    served, trained = inspect.signature(ServedEncoder.__call__), inspect.signature(Encoder.call)
    assert list(served.parameters) == list(trained.parameters)


def test_tokens_are_embedded_by_the_given_lookup(encoder, is_portable, vocabulary):
    # Otherwise a pretraining model would look up its tied embeddings elsewhere.
    inputs = to_flat(random_texts([3, 2], encoder.config), vocabulary)
    other_VH = np.random.default_rng(1).normal(size=encoder.embeddings.word_embeddings_VH.shape)

    def look_up(ids_T):
        return tf.gather(tf.constant(other_VH, tf.float32), ids_T)

    served = serve(encoder, "float32", is_portable)
    actual = tf.function(lambda: served(inputs, look_up=look_up)["pooled"])()
    expected = encoder(inputs, look_up=look_up)["pooled"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert not np.allclose(expected, encoder(inputs)["pooled"], atol=1e-2)


@pytest.mark.slow
def test_bfloat16_is_near(encoder, is_portable, vocabulary):
    if not is_portable and not has_packed_products("bfloat16"):
        pytest.skip("this processor has no AVX-512")
    served = serve(encoder, "bfloat16", is_portable)
    expected = outputs_of(encoder, vocabulary, pooled_only=True)
    for key, values in outputs_of(served, vocabulary, pooled_only=True).items():
        assert 0 < np.abs(values - expected[key]).max() < 0.1


@pytest.mark.slow
def test_another_branch_computes_short_texts(encoder, vocabulary, monkeypatch):
    """Break the short branch: only requests of one short text may change."""
    if not has_packed_products("float32"):
        pytest.skip("this TensorFlow has no packed products")
    expected = outputs_of(encoder, vocabulary, pooled_only=True)
    monkeypatch.setattr(
        served_encoder._OneTextLayout, "positions", lambda self, table: 0 * table[: self.length]
    )
    served = ServedEncoder(encoder, "float32")
    actual = outputs_of(served, vocabulary, pooled_only=True)
    changed = {key[0]: not np.allclose(actual[key], expected[key], atol=1e-3) for key in expected}
    assert changed == {
        name: len(lengths) == 1 and lengths[0] <= SHORT_TOKENS for name, lengths in LENGTHS.items()
    }


@pytest.mark.parametrize(
    ("activation", "has_residual"),
    [(None, False), (None, True), ("GeluExact", False), ("GeluApproximate", False)],
)
def test_int8_products_equal_rounding_in_numpy(activation, has_residual):
    """Call one kernel with inputs of several ranges, since it keeps packed weights and biases."""
    if not has_packed_products("int8"):
        pytest.skip("this TensorFlow has no products of 8-bit integers")
    rng = np.random.default_rng(0)
    layer = keras.layers.Dense(7)
    layer.build((None, 24))
    layer.kernel.assign(rng.normal(0, [0.1, 1, 10, 0.01, 3, 2, 1], (24, 7)))
    layer.bias.assign(rng.normal(0, 2, 7))
    dense = dense_weights((layer,), tf.qint8)

    @tf.function(autograph=False)
    def multiplied(x, residual):
        return product(x, dense, True, activation, residual if has_residual else None)

    kernel = np.array(layer.kernel)
    largest = np.abs(kernel).max(0)
    rounded_kernel = np.round(kernel / largest * 64) * largest / 64
    for scale in (1, 30, 0.1, 1):
        x, residual = rng.normal(0, scale, (5, 24)), rng.normal(0, 1, (5, 7)).astype(np.float32)
        unit = np.abs(x).max() / 127
        expected = np.round(x / unit) * unit @ rounded_kernel + np.array(layer.bias)
        if activation:
            expected = tf.nn.gelu(expected, approximate=activation == "GeluApproximate").numpy()
        if has_residual:
            expected = expected + residual
        actual = multiplied(x.astype(np.float32), residual).numpy()
        # oneDNN's gelu is an approximation; rounding of x / unit may differ in the last bit.
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-3 * np.abs(expected).max())
    # A request without texts has no rows.
    no_rows = [np.zeros((0, size), np.float32) for size in (24, 7)]
    assert multiplied(*no_rows).shape == (0, 7)


def test_portable_weights_of_products_are_stored_in_bfloat16(encoder):
    served = portable_encoder(encoder, "bfloat16")
    assert {weight.dtype for weight in encoder.weights} == {"float32"}
    for weight in served.weights:
        is_product = weight.path.rpartition("/")[2] in ("kernel", "bias")
        assert weight.dtype == ("bfloat16" if is_product else "float32"), weight.path
    # A model that was trained in bfloat16 is served in float32.
    trained = Encoder(encoder.config, dtype="mixed_bfloat16")
    trained.build()
    assert portable_encoder(trained, "float32").compute_dtype == "float32"


@pytest.mark.slow
def test_int8_is_near(encoder, vocabulary):
    if not has_packed_products("int8"):
        pytest.skip("this TensorFlow has no products of 8-bit integers")
    expected = outputs_of(encoder, vocabulary, pooled_only=True)
    served = ServedEncoder(encoder, "int8")
    for key, values in outputs_of(served, vocabulary, pooled_only=True).items():
        assert 0 < np.abs(values - expected[key]).max() < 0.2


def test_packed_products_need_a_kernel(monkeypatch):
    class Registered:
        kernel = ()

    monkeypatch.setattr(
        served_encoder.kernels, "get_registered_kernels_for_op", lambda name: Registered
    )
    assert not has_packed_products("float32")
    monkeypatch.undo()
    monkeypatch.setattr(served_encoder, "has_bfloat16", lambda: False)
    assert not has_packed_products("bfloat16")


BFLOAT16_REQUEST = """
import tensorflow as tf
from bert_tf import BertConfig
from export.graph.served_encoder import ServedEncoder, has_bfloat16
from tests import small
from tests.bert_tf.test_encoder import make_encoder

print("has bfloat16:", has_bfloat16(), flush=True)
sizes = {"vocab_size": 30, "hidden_size": 128, "num_attention_heads": 2}
config = BertConfig(num_hidden_layers=1, **sizes)
encoder = make_encoder(config, small.random_weights(config, scale=0.1))
served = tf.function(ServedEncoder(encoder, "bfloat16"))
ids = tf.ones([3], tf.int32)
try:
    served({"input_ids": ids, "segment_ids": 0 * ids, "row_splits": tf.constant([0, 3])})
except tf.errors.OpError as error:
    print(error.message, flush=True)
"""


@pytest.mark.medium
def test_a_processor_without_avx512_gets_an_error_in_bfloat16():
    if not has_packed_products("float32"):
        pytest.skip("this TensorFlow has no packed products")
    done = subprocess.run(
        [sys.executable, "-c", BFLOAT16_REQUEST],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr  # It was not aborted.
    has, error = done.stdout.split("\n", 1)
    assert has == "has bfloat16: False"
    assert "bfloat16_needs_AVX512_or_an_export_with_portable" in error


def test_portable_graphs_have_standard_operations(encoder, vocabulary):
    served = portable_encoder(encoder, "float32")
    inputs = to_flat(random_texts([3], encoder.config), vocabulary)
    graph = tf.function(lambda inputs: served(inputs)).get_concrete_function(inputs).graph
    operations = {node.op for node in graph.as_graph_def().node}
    assert "MatMul" in operations
    assert not any(operation.startswith("_") for operation in operations)


REQUESTS = """
import sys
import numpy as np, tensorflow as tf
from bert_tf import BertConfig
from export.graph.served_encoder import ServedEncoder
from tests import small
from tests.bert_tf.test_encoder import make_encoder

sizes = {"vocab_size": 30, "hidden_size": 768, "num_attention_heads": 12}
config = BertConfig(num_hidden_layers=1, **sizes)
encoder = make_encoder(config, small.random_weights(config, scale=0.1))
served = ServedEncoder(encoder, "float32")
specs = dict.fromkeys(("input_ids", "segment_ids"), tf.TensorSpec([None], tf.int32))
specs["row_splits"] = tf.TensorSpec([2], tf.int32)
encode = tf.function(lambda inputs: served(inputs), input_signature=[specs])
for count in map(int, sys.argv[1:]):
    print("tokens", count, flush=True)
    ids = np.ones(count, np.int32)
    encode({"input_ids": ids, "segment_ids": 0 * ids, "row_splits": np.array([0, count], np.int32)})
"""


@pytest.mark.slow
def test_a_short_first_text_does_not_make_later_ones_pack_weights_again():
    if not has_packed_products("float32"):
        pytest.skip("this TensorFlow has no packed products")
    if not has_packed_products("bfloat16"):  # Also if ONEDNN_MAX_CPU_ISA says so.
        pytest.skip("the packed forms of processors without AVX-512 are not known")
    counts = ["1", "20", "1", "20", str(SHORT_TOKENS)]
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS, *counts],
        env={**os.environ, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    _, *calls = done.stdout.split("tokens ")
    assert [call.split()[0] for call in calls] == counts
    assert all(",inner_product," in call for call in calls)
    # The first call packs the weights.
    assert [",reorder," in call for call in calls] == [True, False, False, False, False]
