"""Attention by cuDNN: the custom calls that XLA receives, and when they are used.

A CPU cannot run them; tests/gpu does.
"""

import json
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model import fused_attention, fused_ops

SHAPE = (2, 16, 3, 8)


@pytest.fixture
def calls(monkeypatch):
    """Let XLA for CPUs accept the calls as text; return their functions of a step in HLO."""
    call = fused_attention.gen_xla_ops.xla_call_module
    monkeypatch.setattr(
        fused_attention.gen_xla_ops,
        "xla_call_module",
        lambda *args, **options: call(*args, **{**options, "platforms": ["CPU"]}),
    )

    def of(function, *tensors):
        @tf.function(jit_compile=True, autograph=False)
        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                context = function(*tensors)
            return context, tape.gradient(context, tensors[:3])

        hlo = run.experimental_get_compiler_ir(*tensors)(stage="hlo")
        return [line.strip() for line in hlo.splitlines() if " custom-call(" in line]

    return of


def inputs_of(dtype=tf.bfloat16):
    rng = np.random.default_rng(0)
    queries, keys, values = (tf.constant(rng.normal(size=SHAPE), dtype) for _ in range(3))
    rows, length = SHAPE[:2]
    return queries, keys, values, tf.zeros([rows, 1, length, length], dtype)


def test_xla_receives_a_call_forward_and_one_backward(calls):
    forward, backward = calls(fused_attention.attention, *inputs_of())
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmax"' in forward
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"' in backward
    # Contexts and gradients are (R, L, N, D) in memory, and described as (R, N, L, D).
    grid = "bf16[2,3,16,8]{3,1,2,0}"
    assert re.search(r"= \((.*?)\) custom-call", forward).group(1) == (
        f"{grid}, f32[2,3,16]{{2,1,0}}, u8[0]{{0}}"
    )
    assert re.search(r"= \((.*?)\) custom-call", backward).group(1) == (
        f"{grid}, {grid}, {grid}, u8[0]{{0}}"
    )
    assert forward.count("bf16[2,16,3,8]{3,2,1,0} %") == 3  # Queries, keys, values.
    assert backward.count("bf16[2,16,3,8]{3,2,1,0} %") == 5  # And the context and its gradient.
    assert "api_version=API_VERSION_STATUS_RETURNING" in forward


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_the_configuration_describes_the_products(calls, dtype):
    for call, products in zip(
        calls(fused_attention.attention, *inputs_of(dtype)),
        ({"bmm1", "bmm2"}, {f"bmm{a}_grad_gemm{b}" for a in (1, 2) for b in (1, 2)}),
        strict=True,
    ):
        config = json.loads(re.search(r"backend_config=(\{.*\})", call).group(1))
        attention = config["cudnn_fmha_backend_config"]
        assert attention["fmha_scale"] == pytest.approx(8**-0.5)
        assert attention["dropout_rate"] == 0
        scores = attention["intermediate_tensor_shape"]
        assert scores["dimensions"] == ["2", "3", "16", "16"]
        assert scores["element_type"] == {tf.bfloat16: "BF16", tf.float16: "F16"}[dtype]
        suffix = "_dot_dimension_numbers"
        assert {name[: -len(suffix)] for name in attention if name.endswith(suffix)} == products


def test_the_formula_is_attention_and_its_gradient():
    tensors = inputs_of(tf.float32)
    upstream = tf.constant(np.random.default_rng(1).normal(size=SHAPE), tf.float32)
    context, *gradients = fused_attention.formula(*tensors, upstream)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        expected = plain(*tensors)
    np.testing.assert_allclose(context, expected, atol=1e-6)
    for found, other in zip(gradients, tape.gradient(expected, tensors[:3], upstream), strict=True):
        np.testing.assert_allclose(found, other, atol=1e-5)


def plain(queries, keys, values, bias):
    scores = tf.einsum("rlnd,rmnd->rnlm", queries, keys) / np.sqrt(8)
    return tf.einsum("rnlm,rmnd->rlnd", tf.nn.softmax(scores + bias), values)


@pytest.mark.parametrize(
    ("factors", "is_right"),
    [((1.0, 1.0), True), ((1.1, 1.0), False), ((1.0, 1.1), False), ((1.0, float("nan")), False)],
    ids=["right", "forward", "backward", "nan"],
)
def test_a_wrong_result_is_not_used(monkeypatch, factors, is_right):
    forward, backward = factors

    def contexts(*tensors):
        found = fused_attention.formula(*tensors, tensors[0])
        return found[0] * forward, tf.zeros([])

    def gradients(*tensors):
        found = fused_attention.formula(*tensors[:4], tensors[-1])
        return [of * backward for of in found[1:]]

    monkeypatch.setattr(fused_attention, "_forward", contexts)
    monkeypatch.setattr(fused_attention, "_backward", gradients)
    found = []

    @tf.function(jit_compile=True, autograph=False)
    def traced(x):
        found.append(fused_attention._is_right.__wrapped__(tf.bfloat16))
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced(tf.zeros([]))
    assert found == [is_right]
    assert is_right or "cuDNN attention is not used: it differs" in str(caught[-1].message)


def test_a_failure_falls_back():
    with pytest.warns(UserWarning, match="cuDNN attention is not used: "):
        # A CPU has no such call.
        assert not fused_attention._is_right.__wrapped__(tf.bfloat16)


def test_it_needs_gpus_static_shapes_and_16_bits(monkeypatch, mirrored):
    shape = tf.TensorShape(SHAPE)
    assert not fused_attention.is_available(shape, tf.bfloat16)  # No GPU.
    details = {"compute_capability": (9, 0)}
    gpus = [details]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: gpu)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(fused_attention, "_is_right", lambda dtype: True)
    assert fused_attention.is_available(shape, tf.bfloat16)
    assert fused_attention.is_available(shape, tf.float16)
    assert not fused_attention.is_available(shape, tf.float32)
    assert not fused_attention.is_available(tf.TensorShape([None, 16, 3, 8]), tf.bfloat16)
    assert not fused_attention.is_available(tf.TensorShape([2, 15, 3, 8]), tf.bfloat16)
    assert not fused_attention.is_available(tf.TensorShape([2, 16, 3, 12]), tf.bfloat16)
    gpus.append({"compute_capability": (7, 5)})
    assert fused_attention.is_available(shape, tf.bfloat16)  # Only the first one computes.
    with mirrored.scope():
        assert not fused_attention.is_available(shape, tf.bfloat16)
    details["compute_capability"] = (7, 5)
    assert not fused_attention.is_available(shape, tf.bfloat16)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_without_dropout_uses_it(monkeypatch, rate):
    used = []

    def attention(*tensors):
        used.append([tensor.shape.as_list() for tensor in tensors])
        return fused_attention.formula(*tensors, tensors[0])[0]

    monkeypatch.setattr(fused_attention, "is_available", lambda shape, dtype: True)
    monkeypatch.setattr(fused_attention, "attention", attention)
    rng = np.random.default_rng(0)
    grids = [tf.constant(rng.normal(size=(2, 3, 16, 8)), tf.float32) for _ in range(3)]
    kernel, bias = tf.constant(rng.normal(size=(24, 5)), tf.float32), tf.zeros([5])
    key_bias = tf.constant(np.where(rng.random((2, 1, 1, 16)) < 0.8, 0, -1e9), tf.float32)

    def merge(context):
        return tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [-1, 24])

    def split(upstream):
        return tf.transpose(tf.reshape(upstream, [2, 16, 3, 8]), [0, 2, 1, 3])

    def run(*grids):
        with tf.GradientTape() as tape:
            tape.watch(grids)
            output = fused_ops.attention_linear(
                *grids, kernel, bias, key_bias, merge, split, rate, tf.constant([1, 2], tf.int64), 3
            )
        return output, tape.gradient(output, grids)

    compiled = tf.function(run, jit_compile=True, autograph=False)(*grids)
    assert used == ([] if rate else [[[2, 16, 3, 8]] * 3 + [[2, 1, 16, 16]]])
    for found, expected in zip(
        tf.nest.flatten(compiled), tf.nest.flatten(run(*grids)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
