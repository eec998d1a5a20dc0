"""Loss and accuracy curves of a pretraining run, as an image."""

from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.plotting import import_pyplot, plot_metrics, to_png

NAME = "loss.png"
LOSSES = ("loss", "eval_masked_lm_loss", "eval_next_sentence_loss")
ACCURACIES = (
    *("masked_lm_accuracy", "next_sentence_accuracy"),
    *("eval_masked_lm_accuracy", "eval_next_sentence_accuracy"),
)


def draw(run: Run) -> str:
    """Plot metrics.jsonl to RUN/loss.png.

    Args:
        run: Open run.

    Returns:
        Path of the image.

    Raises:
        UserError: If matplotlib is not installed.
    """
    figure, both = import_pyplot().subplots(2, 1, figsize=(8, 7), sharex=True)
    for axes, names in zip(both, (LOSSES, ACCURACIES), strict=True):
        plot_metrics(axes, run.metrics(), names, "eval")
    both[1].set_xlabel("step")
    path = run.file(NAME)
    files.atomic_write_bytes(path, to_png(figure))
    return path
