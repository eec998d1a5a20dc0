"""Drawing with matplotlib, an optional dependency that is imported at the first figure."""

import importlib.util
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bert_tf.errors import UserError

# Fonts with the scripts that DejaVu Sans lacks, of which those that are installed are used.
FONTS = (
    *("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC"),
    *("Noto Sans Arabic", "Noto Sans Devanagari", "Noto Emoji", "Symbola", "Arial Unicode MS"),
)


def is_installed() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def to_png(draw: Callable[[Any], None], dpi: int = 120, **options: Any) -> bytes:
    """Return a figure as a PNG image. Characters without a font are drawn as boxes.

    The user's own figures keep their backend and fonts.

    Args:
        draw: Draws into a matplotlib figure.
        dpi: Dots per inch of the image.
        **options: Arguments of the figure.

    Raises:
        UserError: matplotlib is not installed.
    """
    if not is_installed():
        raise UserError("matplotlib is not installed: pip install 'bert_tf[plots]'")
    from matplotlib import font_manager, rc_context
    from matplotlib.figure import Figure

    installed, image = set(font_manager.get_font_names()), io.BytesIO()
    with rc_context({"font.family": [name for name in FONTS if name in installed]}):
        figure = Figure(**options)
        draw(figure)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(image, dpi=dpi, bbox_inches="tight", metadata={"Software": None})
    return image.getvalue()


def plot_metrics(
    axes: Any, lines: Iterable[Mapping[str, float]], names: Sequence[str], dotted: str
) -> None:
    """Draw those metrics of metrics.jsonl that occur over the step.

    Metrics whose names begin with `dotted` have a dot per value.
    """
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            marker = "o" if name.startswith(dotted) else ""
            axes.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=1)
    if axes.has_data():
        draw_legend_above(axes)
    axes.grid(alpha=0.3)


def draw_legend_above(axes: Any) -> None:
    """Draw the legend above the axes, where it hides no value."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    axes.legend(fontsize=8, frameon=False, **place)
