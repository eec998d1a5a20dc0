"""Write a model's predictions for the rows of a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from bert_tf.errors import UserError
from bert_tf.files import atomic_writer
from bert_tf.progress import Progress
from tasks.readers.glue import GLUE, check_submission, submission_lines
from tasks.readers.rows import BadRow, check_any_good

if TYPE_CHECKING:
    from tasks.serving import Serving
    from tasks.task_model import TaskModel

_Row = TypeVar("_Row")


def predict(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> tuple[int, int]:
    """Write one JSON object per row of a file, in order.

    A row's id, if it has one, is the first field; a bad row becomes {"error": ...}. Only one batch
    of rows is in memory. The output file is written atomically.

    Args:
        model: The model.
        input_path: Input file, in a format of the task.
        output_path: .jsonl file.
        batch_size: Rows per batch.
        log: Called with progress lines.

    Returns:
        (number of rows, number of bad rows).
    """
    count = bad = 0
    with atomic_writer(output_path) as lines:
        for row, prediction in _predictions_of(model, input_path, batch_size, log):
            lines.write(json.dumps(prediction or {"error": str(row)}, ensure_ascii=False) + "\n")
            count += 1
            bad += prediction is None
    return count, bad


def submit(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> int:
    """Write the predictions for a GLUE test file as a submission, .tsv.

    Arguments as in `predict`; the model is loaded from a run.

    Returns:
        The number of rows.

    Raises:
        UserError: At a bad row, or if the file is not a test file or the task is not of GLUE.
    """
    file_format = getattr(model.task, "file_format", None) or ""
    assert model.source is not None  # The rows of GLUE are those of a run.
    check_submission(output_path, file_format, model.source.run.path)

    def labels_by_id():
        for row, prediction in _predictions_of(model, input_path, batch_size, log):
            if prediction is None:
                raise UserError(f"{row}; a submission requires a prediction for every row")
            if row.id is None:
                raise UserError(
                    f"{row.location}: expected a test file with the column index for a submission"
                )
            yield row.id, prediction["label" if GLUE[file_format].labels else "value"]

    count = -1  # The header is not a row.
    with atomic_writer(output_path) as lines:
        for line in submission_lines(file_format, labels_by_id()):
            lines.write(line + "\n")
            count += 1
    return count


def _predictions_of(model, path, batch_size, log):
    """Yield (row, its prediction as a dict of JSON types; None for a bad row)."""

    def rows():
        return model.task.reader.iter_examples(path, labelled=False)

    check_any_good(rows())  # Again, since a remote run was not read before.
    with Progress(log, "rows", sum(1 for _ in rows())) as progress:
        for batch in in_batches(rows(), batch_size):
            # Bad rows are not in the batch of the model; the iterator skips them.
            predictions = iter(predict_batch(model.serving, batch))
            for row in batch:
                yield row, None if isinstance(row, BadRow) else next(predictions)
            progress.update(progress.done + len(batch))


def in_batches(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def predict_batch(serving: Serving, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the prediction per good row as a dict of JSON types, without padding."""
    good = [row for row in rows if not isinstance(row, BadRow)]
    if not good:
        return []
    # The served signature, so that predictions are those of the exported model.
    columns = {name: [row.texts[name] for row in good] for name in serving.task.input_names}
    return [
        prediction if row.id is None else {"id": row.id, **prediction}
        for row, prediction in zip(good, serving.predict_rows(columns, len(good)), strict=True)
    ]


def jsonable(tensor: ArrayLike) -> Any:
    """Convert a tensor or array to nested lists of JSON types.

    Strings become text, invalid UTF-8 U+FFFD.
    """

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return text(np.asarray(tensor).tolist())
