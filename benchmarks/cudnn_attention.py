"""Try cuDNN's fused attention in TensorFlow, through custom calls of XLA.

    python benchmarks/cudnn_attention.py [--rows=32 --length=512 --heads=16] [--hlo]

TensorFlow has no operation for fused attention on GPUs, but `XlaCustomCallV2` puts a custom call of
any name into a program that XLA compiles, and XLA for GPUs replaces those named __cudnn$fmha* by
graphs of cuDNN. This compares outputs and gradients of such calls, with the bias of packed rows,
with the formula in float32, and times both in bfloat16. Prints a JSON object.

--hlo only prints the calls as XLA receives them, on any machine; the processor cannot run them.

Shape suffixes: R rows, N heads, L tokens per row, D head size.
"""

import argparse
import json
import math
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

DTYPE = tf.bfloat16
FORWARD, BACKWARD = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
# Contracted and batch dimensions of the products, of (R, N, L, D) and scores (R, N, L, L).
PRODUCTS = {
    FORWARD: {"bmm1": (3, 3), "bmm2": (3, 2)},
    BACKWARD: {
        "bmm1_grad_gemm1": (2, 2),
        "bmm1_grad_gemm2": (3, 2),
        "bmm2_grad_gemm1": (2, 2),
        "bmm2_grad_gemm2": (3, 3),
    },
}
MASKED = -1e9  # As bert_tf.model.layout.MASKED_SCORE; of bfloat16, too.


def backend_config(target, shape_RNLD):
    """Return the JSON of XLA's GpuBackendConfig for a custom call of cuDNN attention."""
    rows, heads, length, size = shape_RNLD
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1 / math.sqrt(size),
        "dropout_rate": 0.0,
        "intermediate_tensor_shape": {
            "element_type": "BF16",
            "dimensions": [str(number) for number in (rows, heads, length, length)],
            "tuple_shapes": [],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "seed": 0,
        "is_flash_attention": True,
        "mask_type": "NO_MASK",
        "sliding_window_length": 0,
    }
    for name, (left, right) in PRODUCTS[target].items():
        attention[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", "1"],
            "rhs_batch_dimensions": ["0", "1"],
        }
    return json.dumps(
        {
            "operation_queue_id": "0",
            "wait_on_operation_queues": [],
            "cudnn_fmha_backend_config": attention,
        }
    )


def custom_call(target, operands, results):
    """Return the results of a custom call; `results` are their (dtype, shape)."""
    results = [*results, (tf.uint8, [0])]  # The last one is the workspace.
    return gen_xla_ops.xla_custom_call_v2(
        operands,
        call_target_name=target,
        backend_config=backend_config(target, operands[0].shape),
        has_side_effect=False,
        result_dtypes=[dtype for dtype, _ in results],
        result_shapes=[shape for _, shape in results],
    )[:-1]


@tf.custom_gradient
def fused(query_RNLD, key_RNLD, value_RNLD, bias_R1LL):
    """Return attention by cuDNN, bfloat16 `(R, N, L, D)`."""
    shape = query_RNLD.shape
    operands = [query_RNLD, key_RNLD, value_RNLD, bias_R1LL]
    context_RNLD, statistics_RNL = custom_call(
        FORWARD, operands, [(DTYPE, shape), (tf.float32, shape[:3])]
    )

    def gradient(upstream_RNLD):
        operands = [query_RNLD, key_RNLD, value_RNLD, statistics_RNL, upstream_RNLD, bias_R1LL]
        return *custom_call(BACKWARD, [*operands, context_RNLD], [(DTYPE, shape)] * 3), None

    return context_RNLD, gradient


def formula(query_RNLD, key_RNLD, value_RNLD, bias_R1LL):
    """Return attention by its formula, with the softmax in float32."""
    scores = tf.cast(tf.matmul(query_RNLD, key_RNLD, transpose_b=True), tf.float32)
    scores = scores / math.sqrt(query_RNLD.shape[-1]) + tf.cast(bias_R1LL, tf.float32)
    return tf.matmul(tf.cast(tf.nn.softmax(scores), value_RNLD.dtype), value_RNLD)


def compiled(attention):
    """Return the compiled function to outputs and gradients, for an upstream gradient."""

    @tf.function(jit_compile=True, autograph=False)
    def run(query, key, value, bias, upstream):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            context = attention(query, key, value, bias)
        return context, *tape.gradient(context, [query, key, value], upstream)

    return run


def inputs_of(rows, heads, length, size=64, sequences=3):
    """Return query, key, value, the bias of packed rows, and an upstream gradient."""
    rng = np.random.default_rng(0)
    tensors = [tf.constant(rng.normal(size=(rows, heads, length, size)), DTYPE) for _ in range(4)]
    sequence_RL = np.sort(rng.integers(0, sequences, (rows, length)), axis=1)
    is_same_RLL = sequence_RL[:, :, np.newaxis] == sequence_RL[:, np.newaxis, :]
    bias = tf.constant(np.where(is_same_RLL, 0.0, MASKED)[:, np.newaxis], DTYPE)
    return *tensors[:3], bias, tensors[3]


def milliseconds(function, arguments, count=20):
    """Return the mean time of a call, with one wait for the device."""
    float(tf.reduce_sum(tf.cast(function(*arguments)[0][:1], tf.float32)))
    start = time.perf_counter()
    for _ in range(count):
        results = function(*arguments)
    float(tf.reduce_sum(tf.cast(results[0][:1], tf.float32)))
    return round(1000 * (time.perf_counter() - start) / count, 2)


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--hlo", action="store_true")
    options = parser.parse_args()
    arguments = inputs_of(options.rows, options.heads, options.length)
    ours, theirs = compiled(formula), compiled(fused)
    if options.hlo:
        print(theirs.experimental_get_compiler_ir(*arguments)(stage="hlo"))
        return
    expected = ours(*(tf.cast(values, tf.float32) for values in arguments))
    record = {}
    for name, function in (("formula", ours), ("cudnn", theirs)):
        found = function(*arguments)
        record[name] = {
            "milliseconds": milliseconds(function, arguments),
            "largest_differences": [
                float(tf.reduce_max(tf.abs(tf.cast(a, tf.float32) - b)) / tf.reduce_max(tf.abs(b)))
                for a, b in zip(found, expected, strict=True)
            ],
        }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
