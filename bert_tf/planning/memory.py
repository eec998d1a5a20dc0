"""Memory of a training step, by component, from the model's sizes alone.

The counts follow what the train step keeps: see benchmarks/training_memory.py, which measures the
same components, and benchmarks/planner.py, which compares both.

Shape suffixes in comments: T tokens, H hidden size, F feed-forward size, N heads, L sequence
length, R masked positions, V vocabulary size.
"""

import dataclasses

from bert_tf.config import BertConfig

_FLOAT32 = 4
# Memory of a process beside its tensors, measured with TensorFlow 2.21 on x86-64: imports and the
# runtime, and the graph and kernels of each layer.
PROCESS_BYTES, PROCESS_BYTES_PER_LAYER = 900_000_000, 30_000_000


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of a training step on one replica.

    Attributes:
        config: Model.
        examples: Examples per forward pass.
        length: Tokens per example.
        predictions: Masked positions per example; 0 in fine-tuning.
        precision: "float32", "tf32" or "bfloat16".
        gradient_checkpointing: Whether each layer is recomputed in the backward pass.
    """

    config: BertConfig
    examples: int
    length: int
    predictions: int
    precision: str = "float32"
    gradient_checkpointing: bool = False


def count_parameters(config: BertConfig, has_pretraining_heads: bool = True) -> int:
    """Return the number of parameters of the encoder, with both pretraining heads by default."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    embeddings = (tables + 2) * hidden
    layer = 4 * (hidden + 1) * hidden + (2 * hidden + 1) * inner + 5 * hidden
    pooler = (hidden + 1) * hidden
    heads = (hidden + 3) * hidden + config.vocab_size + 2 * (hidden + 1)
    encoder = embeddings + config.num_hidden_layers * layer + pooler
    return encoder + heads * has_pretraining_heads


def step_memory(sizes: StepSizes) -> dict[str, int]:
    """Return the memory of a training step by component.

    Args:
        sizes: Sizes of the step.

    Returns:
        Bytes by component. "peak" is the largest sum of those that exist at the same time: the
        gradients are complete when the activations are freed.
    """
    config, width = sizes.config, 2 if sizes.precision == "bfloat16" else _FLOAT32
    hidden, inner = config.hidden_size, config.intermediate_size
    tokens, positions = sizes.examples * sizes.length, sizes.examples * sizes.predictions
    parameters = count_parameters(config, bool(sizes.predictions))
    table = config.vocab_size * hidden * _FLOAT32
    probabilities = tokens * sizes.length * config.num_attention_heads * width
    # Q, K, V, context, and input and output of both LayerNorms: T x H each; input of GELU: T x F.
    layer = tokens * (8 * hidden + inner) * width
    if sizes.gradient_checkpointing:
        activations = config.num_hidden_layers * tokens * hidden * width + layer
    else:
        activations = config.num_hidden_layers * layer
    activations += tokens * hidden * (2 * _FLOAT32 + width)
    # Scores, probabilities and the gradients of both, or gradients of the feed-forward layer.
    temporary = max(4 * probabilities, 3 * tokens * inner * width)
    # Kernels are converted for products in bfloat16, and kept for the backward pass.
    copies = (parameters - table // _FLOAT32) * width if width < _FLOAT32 else 0
    logits = 2 * positions * config.vocab_size * _FLOAT32
    # The tied output projection gives the whole table a gradient at the start of the backward pass.
    tied = table if positions else 0
    components = {
        "weights": parameters * _FLOAT32,
        "AdamW moments": 2 * parameters * _FLOAT32,
        "bfloat16 copies of kernels": copies,
        "activations": activations,
        "logits over the vocabulary": logits,
        "temporary tensors of a layer": temporary,
        "gradients": parameters * _FLOAT32 + 2 * table,
    }
    state = 3 * parameters * _FLOAT32 + copies
    begin_of_backward = activations + logits + temporary + tied
    components["peak"] = state + max(begin_of_backward, components["gradients"])
    return components


def process_memory(config: BertConfig) -> int:
    """Return the bytes of a process on a CPU beside the tensors of `step_memory`."""
    return PROCESS_BYTES + PROCESS_BYTES_PER_LAYER * config.num_hidden_layers


def largest_batch(sizes: StepSizes, memory_bytes: float) -> int:
    """Return the most examples per forward pass whose peak fits into the memory, or 0."""
    few, many = 0, 1
    while _peak(sizes, many) <= memory_bytes:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if _peak(sizes, middle) <= memory_bytes else (few, middle)
    return few


def _peak(sizes, examples):
    return step_memory(dataclasses.replace(sizes, examples=examples))["peak"]
