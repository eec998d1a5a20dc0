"""Loss and accuracy curves of a run, as an image."""

import io

from bert_tf import files
from bert_tf.run import Run

NAME = "loss.png"


def draw(run: Run) -> str:
    """Plot metrics.jsonl to RUN/loss.png.

    Args:
        run: Open run.

    Returns:
        Path of the image.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # An optional dependency, which takes long to import.
    import matplotlib

    # This backend needs no display.
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, accuracies) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True)
    lines = run.metrics()
    for axes, names in (
        (losses, ("loss", "eval_masked_lm_loss", "eval_next_sentence_loss")),
        (
            accuracies,
            (
                "masked_lm_accuracy",
                "next_sentence_accuracy",
                "eval_masked_lm_accuracy",
                "eval_next_sentence_accuracy",
            ),
        ),
    ):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                marker = "o" if name.startswith("eval") else ""
                axes.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=1)
        axes.legend()
        axes.grid(alpha=0.3)
    accuracies.set_xlabel("step")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    path = run.file(NAME)
    files.atomic_write_bytes(path, picture.getvalue())
    return path
