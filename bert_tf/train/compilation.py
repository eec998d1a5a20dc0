"""Compilation by XLA: of the step as a whole, of chains of its operations, or none.

On a GPU or TPU the step is one program on batches of static shapes. On a CPU, XLA's matrix products
are slow, so that only the operations in between are compiled, on batches without padding.
"""

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from bert_tf.errors import UserError
from bert_tf.model import fused_kernels
from bert_tf.model.custom_gradient import own_gradients
from bert_tf.text.encoder_inputs import PackedShape, to_flat, to_packed, to_padded

GPU = "/GPU:0"  # That of a process with one GPU, or without a distribution strategy.
STEPS_PER_EXECUTION = 20  # Of a compiled step, which waits for Python otherwise.
# Sums in a fixed order, and kernels selected by rule instead of by their time.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def resolve(compile: str, strategy: tf.distribute.Strategy) -> bool:
    """Set what XLA compiles in this process; return whether the step is compiled as a whole.

    Args:
        compile: "step"; "kernels", chains of elementwise operations; "none"; or "auto", "step" on
            GPUs and TPUs and "kernels" on CPUs.
        strategy: Distribution strategy.
    """
    if compile == "auto":
        compile = "step" if is_accelerated(strategy) else "kernels"
    fused_kernels.compile_kernels(compile != "none")
    return compile == "step"


def make_deterministic() -> None:
    """Let equal runs of this process's GPU compute equal bits, at the cost of speed.

    TensorFlow's switch is global; operations that have no such kernel raise UnimplementedError. XLA
    reads its flags when it first compiles, so this has to be called before.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _DETERMINISTIC not in flags:
        os.environ["XLA_FLAGS"] = f"{_DETERMINISTIC} {flags}".strip()  # The last value counts.
    tf.config.experimental.enable_op_determinism()


def is_accelerated(strategy: tf.distribute.Strategy) -> bool:
    """Return whether the replicas of a strategy are GPUs or TPUs."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return True
    if is_default(strategy):  # It names no device.
        return bool(tf.config.get_visible_devices("GPU"))
    return all("GPU" in device for device in strategy.extended.worker_devices)


def describe(precision: str, is_compiled: bool) -> str:
    """Return a log line with the precision and what XLA compiles."""
    compiled = "kernels" if fused_kernels.are_compiled() else "nothing"
    return f"precision {precision}; XLA compiles {'the step' if is_compiled else compiled}"


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy is TensorFlow's own, of one device, without `tf.distribute`."""
    return isinstance(strategy, distribute_lib._DefaultDistributionStrategy)


def layout(is_compiled: bool, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """Return the function from packed sequences to batches, of `bert_tf.text.encoder_inputs`."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return to_padded  # One shape, known before the first batch.
    return to_packed if is_compiled else to_flat


def packed_shape(
    lengths: np.ndarray, batch_size: int, max_seq_length: int, strategy: tf.distribute.Strategy
) -> PackedShape:
    """Return the shapes of packed batches; on TPUs a single one, known before the first batch.

    Arguments as of `PackedShape.of_lengths`, with one sequence per example, and the distribution
    strategy.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return PackedShape(max_seq_length, (batch_size,))
    return PackedShape.of_lengths(lengths, batch_size, max_seq_length)


def compile_with_weights(
    model: keras.Model, function: Callable[..., Any], strategy: tf.distribute.Strategy
) -> Callable[..., Any]:
    """Compile a function that calls a model.

    The variables become arguments of the program, and those that the call changes, such as moving
    statistics, results of it: XLA cannot compile a function that reads or assigns variables of one
    of several replicas.

    Args:
        model: The model.
        function: Function of tensors that uses the variables of the model and no others.
        strategy: Distribution strategy. A TPUStrategy compiles all functions by itself.

    Returns:
        A function with the arguments of `function`.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return function

    @tf.function(jit_compile=True, autograph=False)
    def compiled(values, *args):
        state = list(zip(model.variables, values, strict=True))
        scope = keras.StatelessScope(state, collect_losses=True)  # Those of `add_loss`.
        before = dict(scope.state_mapping)
        with scope:
            results = function(*args)
        own_gradients()
        changed = {
            number: scope.get_current_value(variable)
            for number, variable in enumerate(model.variables)
            if scope.get_current_value(variable) is not before[id(variable)]
        }
        for number, value in changed.items():
            if value.graph is not tf.compat.v1.get_default_graph():  # In a loop over batches.
                raise UserError(
                    f"{model.variables[number].path}: XLA cannot change it in each of several "
                    "batches of a step on several replicas; omit gradient_accumulation_steps, or "
                    "pass jit_compile=False (compile), or compile='kernels' (train)"
                )
        return results, changed

    def with_variables(*args):
        variables = model.variables
        values = [tf.convert_to_tensor(variable.value) for variable in variables]
        results, changed = compiled(values, *args)
        for number, value in changed.items():
            variables[number].assign(value)
        return results

    return with_variables
