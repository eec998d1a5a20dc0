"""Attention by cuDNN, in steps that XLA compiles for an NVIDIA GPU.

TensorFlow has no operation for it. `XlaCallModule` puts a StableHLO module into a compiled program,
and XLA for GPUs builds a kernel of cuDNN for its custom calls `__cudnn$fmha...`. The configuration
of such a call is an internal interface of XLA. The first step of a process therefore compares the
calls with the formula, forward and backward, and uses the formula if they differ or fail.

The calls need a 16-bit dtype, static shapes, and no dropout of attention probabilities: XLA keeps
the state of cuDNN's dropout per device of its client, which TensorFlow does not tell it.

Shape suffixes: R rows, L tokens of a row, N heads, D head size.
"""

import functools
import json
import warnings
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from bert_tf.model.custom_gradient import custom_gradient

_FORWARD, _BACKWARD = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
_NAMES = {tf.bfloat16: "bf16", tf.float16: "f16", tf.float32: "f32"}
_SWAP = [0, 2, 1, 3]  # (R, N, L, D) to (R, L, N, D).
_MAX_HEAD_SIZE = 128
_MIN_CAPABILITY = (8, 0)  # Of the first GPUs with these kernels (A100).
_TOLERANCE = 2e-2  # Relative, of bfloat16; wrong kernels are off by 1.
# Contracted and batch dimensions of both factors of each product, of tensors (R, L, N, D) and
# scores (R, N, L, L).
_PRODUCTS = {
    _FORWARD: {"bmm1": ((3, (0, 2)), (3, (0, 2))), "bmm2": ((3, (0, 1)), (1, (0, 2)))},
    _BACKWARD: {
        "bmm1_grad_gemm1": ((2, (0, 1)), (1, (0, 2))),
        "bmm1_grad_gemm2": ((3, (0, 1)), (1, (0, 2))),
        "bmm2_grad_gemm1": ((2, (0, 1)), (1, (0, 2))),
        "bmm2_grad_gemm2": ((3, (0, 2)), (3, (0, 2))),
    },
}


def is_available(shape_RLND: tf.TensorShape, dtype: tf.DType) -> bool:
    """Return whether cuDNN computes attention of queries of this shape and dtype.

    The first call for a dtype on a GPU compiles a small test, which takes some seconds.
    """
    if not shape_RLND.is_fully_defined() or dtype not in (tf.bfloat16, tf.float16):
        return False
    _, length, _, size = shape_RLND
    if length % 2 or size % 8 or size > _MAX_HEAD_SIZE:
        return False
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus or not tf.test.is_built_with_cuda():
        return False
    # Without a strategy, only the first one computes.
    used = gpus if tf.distribute.has_strategy() else gpus[:1]
    details = map(tf.config.experimental.get_device_details, used)
    if min(of.get("compute_capability", (0, 0)) for of in details) < _MIN_CAPABILITY:
        return False
    return _is_right(dtype)


def attention(
    queries_RLND: tf.Tensor, keys_RLND: tf.Tensor, values_RLND: tf.Tensor, bias_R1LL: tf.Tensor
) -> tf.Tensor:
    """Return softmax(queries @ keys^T / sqrt(D) + bias) @ values, without dropout.

    Args:
        queries_RLND: `(R, L, N, D)`, float16 or bfloat16, of static shape.
        keys_RLND: As the queries.
        values_RLND: As the queries.
        bias_R1LL: `(R, 1, L, L)`, of the same dtype. It gets no gradient.

    Returns:
        `(R, L, N, D)`, of the same dtype.
    """

    @custom_gradient
    def attended(queries, keys, values):
        context_RLND, statistics_RNL = _forward(queries, keys, values, bias_R1LL)

        def gradient(upstream_RLND):
            return _backward(
                queries, keys, values, bias_R1LL, context_RLND, statistics_RNL, upstream_RLND
            )

        return context_RLND, gradient

    return attended(queries_RLND, keys_RLND, values_RLND)


def formula(
    queries_RLND: tf.Tensor,
    keys_RLND: tf.Tensor,
    values_RLND: tf.Tensor,
    bias_R1LL: tf.Tensor,
    upstream_RLND: tf.Tensor,
) -> tuple[tf.Tensor, ...]:
    """Return what `attention` does, and the gradients of queries, keys and values.

    Arguments as of `attention`, and the gradient of its result.
    """
    factor = queries_RLND.shape[-1] ** -0.5
    scores_RNLM = tf.einsum("rlnd,rmnd->rnlm", queries_RLND, keys_RLND) * factor
    probs_RNLM = tf.nn.softmax(scores_RNLM + bias_R1LL)
    grad_probs_RNLM = tf.einsum("rlnd,rmnd->rnlm", upstream_RLND, values_RLND)
    along_RNL1 = tf.reduce_sum(probs_RNLM * grad_probs_RNLM, -1, keepdims=True)
    grad_scores_RNLM = probs_RNLM * (grad_probs_RNLM - along_RNL1) * factor
    return (
        tf.einsum("rnlm,rmnd->rlnd", probs_RNLM, values_RLND),
        tf.einsum("rnlm,rmnd->rlnd", grad_scores_RNLM, keys_RLND),
        tf.einsum("rnlm,rlnd->rmnd", grad_scores_RNLM, queries_RLND),
        tf.einsum("rnlm,rlnd->rmnd", probs_RNLM, upstream_RLND),
    )


def _forward(queries, keys, values, bias):
    """Return the context `(R, L, N, D)` and the statistics of the softmax `(R, N, L)`."""
    rows, length, heads, _ = queries.shape
    statistics = ((rows, heads, length), "f32", (2, 1, 0))
    return _call(_FORWARD, [queries, keys, values, bias], [_grid(queries), statistics])


def _backward(queries, keys, values, bias, context, statistics, upstream):
    """Return the gradients of queries, keys and values, `(R, L, N, D)`."""
    inputs = [queries, keys, values, statistics, upstream, bias, context]
    return _call(_BACKWARD, inputs, [_grid(queries)] * 3)


def _grid(queries):
    """Return the result (R, N, L, D) of a call, which cuDNN writes as (R, L, N, D)."""
    rows, length, heads, size = queries.shape
    return (rows, heads, length, size), _NAMES[queries.dtype], (3, 1, 2, 0)


def _call(target, operands, results):
    """Return the results of a custom call, except for its last one, the workspace.

    `results` are (shape, dtype, order of the dimensions in memory, the fastest first).
    """
    module = _module(target, [(tuple(of.shape), _NAMES[of.dtype]) for of in operands], results)
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    return gen_xla_ops.xla_call_module(
        operands,
        version=9,
        module=module,
        Sout=[_transposed(shape) for shape, _, _ in results],
        Tout=[dtypes[dtype] for _, dtype, _ in results],
        platforms=["CUDA"],
    )


def _module(target, operands, results):
    """Return a StableHLO module with a custom call, whose results of rank 4 are transposed."""
    rows, length, heads, size = operands[0][0]
    config = _backend_config(target, (rows, heads, length, length), size, operands[0][1])
    all_results = [*results, ((0,), "ui8", (0,))]
    arguments = ", ".join(f"%a{i}: {_type(*of)}" for i, of in enumerate(operands))
    names = ", ".join(f"%a{i}" for i in range(len(operands)))
    layouts = ", ".join(_order(range(len(shape))[::-1]) for shape, _ in operands)
    result_layouts = ", ".join(_order(order) for _, _, order in all_results)
    types = ", ".join(_type(*of) for of in operands)
    result_types = ", ".join(_type(shape, dtype) for shape, dtype, _ in all_results)
    lines, returned = [], []
    for number, (shape, dtype, _) in enumerate(results):
        name = f"%r#{number}"
        if len(shape) == 4:
            signature = f"({_type(shape, dtype)}) -> {_type(_transposed(shape), dtype)}"
            lines.append(f"%t{number} = stablehlo.transpose {name}, dims = {_SWAP} : {signature}")
            name = f"%t{number}"
        returned.append((name, _type(_transposed(shape), dtype)))
    values, value_types = (", ".join(of) for of in zip(*returned, strict=True))
    return f"""module @attention {{
  func.func public @main({arguments}) -> ({value_types}) {{
    %r:{len(all_results)} = stablehlo.custom_call @"{target}"({names}) {{api_version = 2 : i32,
        backend_config = {json.dumps(config)}, operand_layouts = [{layouts}],
        result_layouts = [{result_layouts}]}} : ({types}) -> ({result_types})
    {chr(10).join(lines)}
    return {values} : {value_types}
  }}
}}
"""


def _backend_config(target, scores_shape, size, dtype):
    """Return XLA's GpuBackendConfig of a call as JSON."""
    attention: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": size**-0.5,
        "intermediate_tensor_shape": {
            "element_type": dtype.upper(),
            "dimensions": [str(dimension) for dimension in scores_shape],
            "tuple_shapes": [],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 0,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, ((left, left_batch), (right, right_batch)) in _PRODUCTS[target].items():
        attention[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(dimension) for dimension in left_batch],
            "rhs_batch_dimensions": [str(dimension) for dimension in right_batch],
        }
    return json.dumps(
        {
            "operation_queue_id": "0",
            "wait_on_operation_queues": [],
            "cudnn_fmha_backend_config": attention,
        }
    )


def _transposed(shape):
    """Return (R, L, N, D) for (R, N, L, D); other shapes as they are."""
    return tuple(shape[of] for of in _SWAP) if len(shape) == 4 else shape


def _type(shape, dtype):
    return f"tensor<{'x'.join([*map(str, shape), dtype])}>"


def _order(dimensions):
    dimensions = list(dimensions)
    return f"dense<{dimensions}> : tensor<{len(dimensions)}xindex>"


@functools.cache
def _is_right(dtype):
    """Return whether outputs and gradients of cuDNN are those of the formula, on packed rows."""
    with tf.init_scope():  # Eagerly, also while a step is traced.
        try:
            error = _largest_error(dtype)
        except (tf.errors.OpError, ValueError) as failure:
            _warn(str(failure).splitlines()[0])
            return False
    if not error < _TOLERANCE:  # NaN, too.
        _warn(f"it differs from the formula by {error:.2g}")
        return False
    return True


def _warn(reason):
    warnings.warn(f"cuDNN attention is not used: {reason}", stacklevel=2)


def _largest_error(dtype):
    """Return the largest relative error of outputs and gradients of a small example."""
    rng = np.random.default_rng(0)
    rows, length, heads, size = 2, 128, 2, 64
    *inputs, upstream = (
        tf.constant(rng.normal(size=(rows, length, heads, size)), dtype) for _ in range(4)
    )
    sequence_RL = np.sort(rng.integers(0, 3, (rows, length)), axis=1)
    is_same_RLL = sequence_RL[:, :, np.newaxis] == sequence_RL[:, np.newaxis, :]
    bias = tf.constant(np.where(is_same_RLL, 0.0, -1e4)[:, np.newaxis], dtype)

    @tf.function(jit_compile=True, autograph=False)
    def run(queries, keys, values, bias, upstream):
        tensors = queries, keys, values, bias
        context, statistics = _forward(*tensors)
        return context, *_backward(*tensors, context, statistics, upstream)

    found = run(*inputs, bias, upstream)
    expected = formula(*(tf.cast(of, tf.float32) for of in (*inputs, bias, upstream)))
    errors = [
        float(tf.norm(tf.cast(one, tf.float32) - other) / tf.norm(other))
        for one, other in zip(found, expected, strict=True)
    ]
    return np.max(errors)  # NaN if one of them is.
