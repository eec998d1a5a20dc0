"""Attention as an image or as an interactive page.

Shape suffixes: N layers, A heads, T tokens.
"""

import base64
import html
import importlib.resources
import json
import math

import numpy as np

from bert_tf.attention_maps.attention import Attention
from bert_tf.system.plotting import import_pyplot, to_png

SEGMENT_COLORS = ("#1a5276", "#935116")
LARGEST = 2**16 - 1  # A weight of 1 in the page.


def head_image(attention: Attention, layer: int, head: int) -> bytes:
    """Draw one head as a matrix with tokens on both axes; returns a PNG image.

    Args:
        attention: The attention.
        layer: Index of the layer, from 0.
        head: Index of the head, from 0.
    """
    size = max(4.0, 0.18 * len(attention.tokens))
    figure, axes = import_pyplot().subplots(figsize=(size + 1, size))
    image = axes.imshow(attention.weights_NATT[layer, head], cmap="viridis", vmin=0, vmax=1)
    _label(axes, attention, font_size=8)
    axes.set(title=f"layer {layer}, head {head}", xlabel="attended token", ylabel="token")
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention")
    return to_png(figure)


def layer_image(attention: Attention, layer: int) -> bytes:
    """Draw all heads of a layer as a grid of matrices; returns a PNG image.

    Args:
        attention: The attention.
        layer: Index of the layer, from 0.
    """
    heads = attention.weights_NATT[layer]
    columns = min(4, len(heads))
    rows = math.ceil(len(heads) / columns)
    size = max(2.5, 0.07 * len(attention.tokens))
    figure, grid = import_pyplot().subplots(
        rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout="constrained"
    )
    for number, axes in enumerate(grid.flat):
        if number >= len(heads):
            axes.set_axis_off()
            continue
        axes.imshow(heads[number], cmap="viridis", vmin=0, vmax=1)
        axes.set_title(f"head {number}", fontsize=8)
        _label(axes, attention, font_size=4)
    figure.suptitle(f"layer {layer}: rows attend to columns", fontsize=9)
    return to_png(figure, dpi=160)


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
    title = html.escape(" ".join(attention.tokens)[:80])
    return template.read_text(encoding="utf-8").replace("TITLE", title).replace("DATA", text)


def _label(axes, attention, font_size):
    places = range(len(attention.tokens))
    axes.set_xticks(places, attention.tokens, rotation=90, fontsize=font_size)
    axes.set_yticks(places, attention.tokens, fontsize=font_size)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, segment in zip(labels, attention.segments, strict=True):
            label.set_color(SEGMENT_COLORS[segment])
            label.set_parse_math(False)  # "$" is a token.
