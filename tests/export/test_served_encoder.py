"""The encoder of the served graph against the trained encoder."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.layout import to_flat
from export import served_encoder
from export.served_encoder import SINGLE_TEXT_TOKENS, ServedEncoder, has_packed_products
from tests import small
from tests.bert_tf.test_encoder import make_encoder
from tests.bert_tf.test_layout import random_texts

LENGTHS = {
    "a single token": [1],
    "a short text": [7],
    "the longest text of the short branch": [SINGLE_TEXT_TOKENS],
    "a long text": [SINGLE_TEXT_TOKENS + 1],
    "texts": [5, 1, 16, 3, 9],
}


@pytest.fixture(scope="module", params=small.fast(["gelu", "gelu_new"], "gelu"))
def encoder(request, config):
    """Return a trained encoder whose feed-forward width gets additional columns."""
    wide = {"intermediate_size": served_encoder.SLOW_WIDTH, "max_position_embeddings": 64}
    config = dataclasses.replace(config, hidden_act=request.param, **wide)
    return make_encoder(config, small.random_weights(config, scale=0.1))


@pytest.fixture(params=[True, False], ids=["packed", "portable"])
def is_packed(request):
    if request.param and not has_packed_products():
        pytest.skip("this TensorFlow has no packed products")
    return request.param


def outputs_of(encoder, vocabulary, **options):
    """Return the outputs for each of LENGTHS, in a graph like the served one, without padding."""

    specs = dict.fromkeys(
        ("input_ids", "segment_ids", "row_splits"), tf.TensorSpec([None], tf.int32)
    )
    traced = tf.function(lambda inputs: encoder(inputs, **options), input_signature=[specs])
    found = {}
    for of_case, lengths in LENGTHS.items():
        inputs = to_flat(random_texts(lengths, encoder.config), vocabulary)
        outputs = traced(inputs)
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
def test_outputs_equal_those_of_the_trained_encoder(encoder, is_packed, options, vocabulary):
    served = ServedEncoder(encoder, "float32", is_packed)
    expected = outputs_of(encoder, vocabulary, **options)
    actual = outputs_of(served, vocabulary, **options)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        tolerance = 1e-5 * max(1, np.abs(values).max())
        np.testing.assert_allclose(actual[key], values, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_bfloat16_is_near(encoder, is_packed, vocabulary):
    served = ServedEncoder(encoder, "bfloat16", is_packed)
    expected = outputs_of(encoder, vocabulary, pooled_only=True)
    for key, values in outputs_of(served, vocabulary, pooled_only=True).items():
        assert values.dtype == tf.bfloat16.as_numpy_dtype
        assert 0 < np.abs(values.astype(np.float32) - expected[key]).max() < 0.1


@pytest.mark.slow
def test_another_branch_computes_short_texts(encoder, vocabulary, monkeypatch):
    """Break the short branch: only requests of one short text may change."""
    if not has_packed_products():
        pytest.skip("this TensorFlow has no packed products")
    expected = outputs_of(encoder, vocabulary, pooled_only=True)
    monkeypatch.setattr(served_encoder, "norm_by_moments", lambda x, *rest: x * 0)
    served = ServedEncoder(encoder, "float32", True)
    actual = outputs_of(served, vocabulary, pooled_only=True)
    changed = {key[0]: not np.allclose(actual[key], expected[key], atol=1e-3) for key in expected}
    assert changed == {
        name: len(lengths) == 1 and lengths[0] <= SINGLE_TEXT_TOKENS
        for name, lengths in LENGTHS.items()
    }


def test_packed_products_need_a_kernel_and_no_gpu(monkeypatch):
    class Registered:
        kernel = ()

    monkeypatch.setattr(
        served_encoder.kernels, "get_registered_kernels_for_op", lambda name: Registered
    )
    assert not has_packed_products()
    monkeypatch.undo()
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["/GPU:0"])
    assert not has_packed_products()


def test_portable_graphs_have_standard_operations(encoder, vocabulary):
    served = ServedEncoder(encoder, "float32", False)
    inputs = to_flat(random_texts([3], encoder.config), vocabulary)
    graph = tf.function(lambda inputs: served(inputs)).get_concrete_function(inputs).graph
    operations = {node.op for node in graph.as_graph_def().node}
    assert "MatMul" in operations
    assert not any(operation.startswith("_") for operation in operations)
