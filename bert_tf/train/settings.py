"""Flags of training that pretraining and fine-tuning share. Does not import TensorFlow."""

from typing import Any

from bert_tf.system.command import flag


def precision_flag() -> Any:
    """Return the flag of the precision of matrix products."""
    return flag(
        "precision of matrix products; tf32 is float32 with rounded factors on GPUs and TPUs; auto "
        "is float32 on CPUs, bfloat16 on TPUs and on GPUs since A100, float16 on older GPUs",
        "auto",
        choices=("auto", "float32", "tf32", "bfloat16", "float16"),
    )


def compile_flag() -> Any:
    """Return the flag of what XLA compiles."""
    return flag(
        "what XLA compiles: the step, on batches packed into rows of one length; chains of its "
        "elementwise operations; or nothing; auto is step on GPUs and TPUs, kernels on CPUs",
        "auto",
        choices=("auto", "step", "kernels", "none"),
    )


def deterministic_flag() -> Any:
    """Return the flag of deterministic operations."""
    return flag(
        "equal bits in equal runs on the same GPU, with slower kernels; on CPUs runs are equal "
        "without it",
        False,
    )
