"""Memory of a training step, by component, from the model's sizes alone.

The counts follow what the train step keeps, as TensorFlow's profiler lists the tensors of a step at
its peak: inputs of GELU, queries, keys and values, inputs of LayerNorm, and the gradient of the
logits. A step that XLA compiles as one program also keeps the outputs of GELU and of attention, and
what dropout leaves of the probabilities, as the peaks of benchmarks/gpu.py show.
benchmarks/scale.py compares the estimates with the memory of processes.

Shape suffixes in comments: T tokens, H hidden size, F feed-forward size, N heads, L sequence
length, R masked positions, V vocabulary size.
"""

import bisect
import dataclasses
from collections.abc import Callable

from bert_tf.config import BertConfig

_FLOAT32 = 4
# Memory of a process beside its tensors, measured with TensorFlow 2.21 on x86-64: imports and the
# runtime, and the graph and kernels of each layer.
PROCESS_BYTES, PROCESS_BYTES_PER_LAYER = 700_000_000, 30_000_000
# Bytes per weight of served models: matrices of the layers, and all others.
_HALF = ("bfloat16", "float16")
_WIDTHS = {"float32": (4, 4), "tf32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "int8": (1, 4)}


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of a training step on one replica."""

    config: BertConfig
    examples: int  # Examples per forward pass.
    length: float  # Tokens per example, on average if they differ.
    predictions: int  # Masked positions per example; 0 in fine-tuning.
    precision: str = "float32"  # "float32", "tf32", "bfloat16" or "float16".
    gradient_checkpointing: bool = False  # Whether each layer is recomputed in the backward pass.
    # Tokens of the longest example, to which attention pads the others; by default `length`.
    longest: int | None = None
    # Lowest layers that are not trained, nor are the embeddings; `None` if all weights are
    # trained.
    frozen_layers: int | None = None
    accumulates: bool = False  # Whether the gradients of several forward passes are summed.
    is_compiled: bool = False  # Whether XLA compiles the step as one program, as on GPUs.

    @property
    def attention_length(self) -> float:
        """Tokens per example in attention."""
        return self.longest or self.length

    @property
    def trained_layers(self) -> int:
        """Layers that have gradients."""
        return self.config.num_hidden_layers - (self.frozen_layers or 0)

    @property
    def trained_parameters(self) -> int:
        """Parameters that have gradients and moments."""
        count = count_parameters(self.config, bool(self.predictions))
        if self.frozen_layers is None:
            return count
        return count - _embeddings(self.config) - self.frozen_layers * _layer(self.config)


def count_parameters(config: BertConfig, has_pretraining_heads: bool = True) -> int:
    """Return the number of parameters of the encoder, with both pretraining heads by default."""
    hidden = config.hidden_size
    pooler = (hidden + 1) * hidden
    heads = (hidden + 3) * hidden + config.vocab_size + 2 * (hidden + 1)
    encoder = _embeddings(config) + config.num_hidden_layers * _layer(config) + pooler
    return encoder + heads * has_pretraining_heads


def _embeddings(config):
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    return (tables + 2) * config.hidden_size


def _layer(config):
    hidden, inner = config.hidden_size, config.intermediate_size
    return 4 * (hidden + 1) * hidden + (2 * hidden + 1) * inner + 5 * hidden


def step_memory(sizes: StepSizes) -> dict[str, int]:
    """Return the bytes of a training step by component.

    "peak" is the largest sum of those that exist at the same time: the gradients are complete when
    the activations are freed.
    """
    config, width = sizes.config, 2 if sizes.precision in _HALF else _FLOAT32
    hidden, inner = config.hidden_size, config.intermediate_size
    tokens = round(sizes.examples * sizes.length)
    positions = sizes.examples * sizes.predictions
    parameters = count_parameters(config, bool(sizes.predictions))
    trained = sizes.trained_parameters
    table = config.vocab_size * hidden * _FLOAT32
    scores = round(sizes.examples * sizes.attention_length**2) * config.num_attention_heads
    probabilities = scores * width
    # Q, K, V and the inputs of both LayerNorms: T x H each; input of GELU: T x F.
    layer = tokens * (5 * hidden + inner) * width
    if sizes.is_compiled:
        # Context and output of attention: T x H each; output of GELU: T x F.
        layer += tokens * (2 * hidden + inner) * width
        if config.attention_probs_dropout_prob:
            layer += probabilities + scores  # The mask has a byte per score.
        elif width < _FLOAT32:
            probabilities = 0  # Fused attention stores none.
        else:
            layer += probabilities
    if sizes.gradient_checkpointing:
        activations = sizes.trained_layers * tokens * hidden * width + layer
    else:
        activations = sizes.trained_layers * layer
    activations += tokens * hidden * (2 * _FLOAT32 + width)
    # Scores, probabilities and the gradients of both, or gradients of the feed-forward layer.
    temporary = max(4 * probabilities, 2 * tokens * inner * width)
    # Kernels are converted for products in bfloat16, and kept for the backward pass.
    copies = (parameters - table // _FLOAT32) * width if width < _FLOAT32 else 0
    logits = 2 * positions * config.vocab_size * _FLOAT32
    components = {
        "weights": parameters * _FLOAT32,
        "AdamW moments": 2 * trained * _FLOAT32,
        "bfloat16 copies of kernels": copies,
        "activations": activations,
        "logits over the vocabulary": logits,
        "temporary tensors of a layer": temporary,
        "gradients": trained * _FLOAT32,
        "accumulated gradients": trained * _FLOAT32 * sizes.accumulates,
    }
    state = (parameters + 2 * trained) * _FLOAT32 + copies + components["accumulated gradients"]
    of_table = table if sizes.frozen_layers is None else 0
    # The gradient of the table comes last. Pretraining keeps that of the logits for it, and adds
    # that of the lookup in place; else two more of its size exist while it is summed.
    begin_of_backward = activations + logits + temporary
    first_layer = components["gradients"] - of_table + layer + temporary + logits // 2
    end_of_backward = components["gradients"] + (logits // 2 if positions else 2 * of_table)
    components["peak"] = state + max(begin_of_backward, first_layer, end_of_backward)
    return components


def inference_memory(
    config: BertConfig, tokens: int, pairs: int, precision: str, is_packed: bool = False
) -> dict[str, int]:
    """Return the bytes of a model that only predicts, by component; "peak" is their sum.

    `tokens` are those of a request, or of its largest chunk, and `pairs` the sum over its sequences
    of the square of the longest length, for attention. If `is_packed`, products have a packed copy
    of the weights.
    """
    # A layer's input, its queries, keys, values and context, and the feed-forward activations.
    width = 2 if precision in _HALF else _FLOAT32
    activations = tokens * (6 * config.hidden_size + 2 * config.intermediate_size) * width
    activations += 2 * pairs * config.num_attention_heads * width
    components = {
        "weights": served_bytes(config, precision),
        "activations of a layer": activations,
    }
    if is_packed:
        components["packed weights"] = served_bytes(config, precision, layers_only=True)
    components["peak"] = sum(components.values())
    return components


def served_bytes(config: BertConfig, precision: str, layers_only: bool = False) -> int:
    """Return the bytes of a served encoder's weights, or of its layers, which a request reads."""
    matrices, others = _WIDTHS[precision]
    in_layers = config.num_hidden_layers * _layer(config)
    rest = count_parameters(config, has_pretraining_heads=False) - in_layers
    return in_layers * matrices + rest * others * (not layers_only)


def process_memory(config: BertConfig) -> int:
    """Return the bytes of a process on a CPU beside the tensors of `step_memory`."""
    return PROCESS_BYTES + PROCESS_BYTES_PER_LAYER * config.num_hidden_layers


def largest_batch(
    sizes: StepSizes,
    memory_bytes: float,
    memory_of: Callable[[StepSizes], dict[str, int]] = step_memory,
) -> int:
    """Return the most examples per forward pass whose "peak" of `memory_of` fits, or 0.

    `sizes` are those of a step with any number of examples.
    """

    def peak(examples):
        return memory_of(dataclasses.replace(sizes, examples=examples))["peak"]

    return bisect.bisect(range(1, 1 << 40), memory_bytes, key=peak)
