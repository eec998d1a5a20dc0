"""Attention probabilities of a text, as an image or an interactive page.

Shape suffixes: N layers, A heads, T tokens.
"""

import base64
import dataclasses
import functools
import html
import importlib.resources
import json
import math
import re

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.system.plotting import to_png
from bert_tf.text.encoder_inputs import pack, to_padded
from bert_tf.text.tokenizer import Tokenizer, tokenize_masked
from bert_tf.weights.pretrained_encoder import Encoder
from bert_tf.weights.sources import PretrainedWeights

SEGMENT_COLORS = ("#1a5276", "#935116")
LARGEST = 2**16 - 1  # A weight of 1 in the page.


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of one sequence.

    Attributes:
        tokens: T tokens with [CLS] and [SEP].
        segments: Segment of each token, 0 or 1.
        weights_NATT: float32 `(N, A, T, T)`; [n, a, i, j] is how much token i attends to token j.
    """

    tokens: list[str]
    segments: list[int]
    weights_NATT: np.ndarray


def attention_of(
    pretrained: PretrainedWeights, text: str, text_b: str | None = None, max_seq_length: int = 128
) -> Attention:
    """Compute the attention of a text or pair of at most `max_seq_length` tokens.

    Raises:
        UserError: If the encoder has fewer positions or segments.
    """
    config, vocabulary = pretrained.config, pretrained.vocabulary
    if max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"--max_seq_length={max_seq_length}: expected at most "
            f"{config.max_position_embeddings}, the number of positions of {pretrained.origin}"
        )
    if text_b is not None and config.type_vocab_size < 2:
        raise UserError(f"--text_b: {pretrained.origin} has no second segment")
    encoder = Encoder(config)
    encoder.build()
    pretrained.assign_to(encoder)
    tokenizer = Tokenizer.from_config(config, vocabulary)
    texts = [text] if text_b is None else [text, text_b]
    tokenize = tokenizer.tokenize
    if not pretrained.run_task:  # As `tasks.MaskedLanguageModel` reads texts.
        tokenize = functools.partial(tokenize_masked, tokenize=tokenize, vocabulary=vocabulary)
    segments = [tokenize(tf.constant([one])) for one in texts]
    inputs = to_padded(pack(segments, vocabulary, max_seq_length), vocabulary)
    weights_NATT = np.stack(
        [layer[0] for layer in encoder(inputs, output_hidden_states=True)["attentions"]]
    )
    ids = inputs["input_ids"][0].numpy()
    return Attention(
        [vocabulary.entries[number] for number in ids],
        inputs["segment_ids"][0].numpy().tolist(),
        weights_NATT,
    )


def head_image(attention: Attention, layer: int, head: int) -> bytes:
    """Draw one head as a matrix with tokens on both axes; returns a PNG image."""

    def draw(figure):
        axes = figure.subplots()
        image = axes.imshow(attention.weights_NATT[layer, head], cmap="viridis", vmin=0, vmax=1)
        _label(axes, attention, font_size=8)
        axes.set(title=f"layer {layer}, head {head}", xlabel="attended token", ylabel="token")
        figure.colorbar(image, ax=axes, shrink=0.8, label="attention")

    size = max(4.0, 0.18 * len(attention.tokens))
    return to_png(draw, figsize=(size + 1, size))


def layer_image(attention: Attention, layer: int) -> bytes:
    """Draw all heads of a layer as a grid of matrices; returns a PNG image."""
    heads = attention.weights_NATT[layer]
    columns = min(4, len(heads))
    rows = math.ceil(len(heads) / columns)

    def draw(figure):
        for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
            if number >= len(heads):
                axes.set_axis_off()
                continue
            axes.imshow(heads[number], cmap="viridis", vmin=0, vmax=1)
            axes.set_title(f"head {number}", fontsize=8)
            _label(axes, attention, font_size=4)
        figure.suptitle(f"layer {layer}: rows attend to columns", fontsize=9)

    size = max(2.5, 0.07 * len(attention.tokens))
    figsize = (size * columns, size * rows)
    return to_png(draw, dpi=160, figsize=figsize, layout="constrained")


def page(attention: Attention) -> str:
    """Return a standalone HTML page with pickers of layer and head and values on hover."""
    template = importlib.resources.files("bert_tf.attention_maps").joinpath("attention.html")
    weights = np.round(attention.weights_NATT * LARGEST).astype("<u2")
    data = {
        "tokens": attention.tokens,
        "segments": attention.segments,
        "colors": SEGMENT_COLORS,
        "shape": weights.shape,
        "largest": LARGEST,
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }
    # "<" could end the script.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    values = {"TITLE": html.escape(" ".join(attention.tokens)[:80]), "DATA": text}
    # In one pass, since the tokens may be these words.
    return re.sub("TITLE|DATA", lambda match: values[match[0]], template.read_text("utf-8"))


def _label(axes, attention, font_size):
    places = range(len(attention.tokens))
    axes.set_xticks(places, attention.tokens, rotation=90, fontsize=font_size)
    axes.set_yticks(places, attention.tokens, fontsize=font_size)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, segment in zip(labels, attention.segments, strict=True):
            label.set_color(SEGMENT_COLORS[segment])
            label.set_parse_math(False)  # "$" is a token.
