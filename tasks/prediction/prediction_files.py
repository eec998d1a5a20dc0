"""Write a model's predictions for the rows of a file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from bert_tf.errors import UserError
from bert_tf.storage import strict_json
from bert_tf.storage.files import atomic_writer
from bert_tf.system.progress import Progress
from tasks.data.readers.glue import GLUE, check_submission, submission_lines
from tasks.data.readers.rows import BadRow, check_any_good

if TYPE_CHECKING:
    from tasks.graph.pipeline import Serving
    from tasks.model.task_model import TaskModel

_Row = TypeVar("_Row")
# Returns the output of each row of a batch, as JSON types by name.
Outputs = Callable[[list], Iterable[dict[str, Any]]]


def predict(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> tuple[int, int]:
    """Write one JSON object per row of a file, in order, as `write_lines` does.

    A row's id, if it has one, is the first field. `input_path` is in a format of the task, and
    `output_path` a .jsonl file. Return the numbers of rows and of bad rows.
    """
    return write_lines(output_path, _outputs_of_file(model, input_path, batch_size, log))


def write_lines(path: str | os.PathLike, outputs: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Write the outputs of `outputs_with_progress` as JSON lines, atomically.

    That of a bad row is {"error": ...}. Return the numbers of rows and of bad rows.
    """
    count = bad = 0
    with atomic_writer(path) as lines:
        for _, output in outputs:
            is_bad = isinstance(output, BadRow)
            line = {"error": str(output)} if is_bad else output
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
            bad += is_bad
    return count, bad


def write_array(stream: BinaryIO, outputs: Iterable[tuple[Any, Any]], count: int) -> int:
    """Write the outputs of `outputs_with_progress`, a vector each, as the array of a .npy file.

    Args:
        stream: Binary stream that receives the file.
        outputs: Pairs of a row and {name: vector}.
        count: Number of rows in the header.

    Returns:
        Number of rows that were written.

    Raises:
        UserError: At a bad row.
    """
    written = 0
    for _, output in outputs:
        if isinstance(output, BadRow):
            raise UserError(str(output))
        vector = np.array(*output.values(), np.float32)
        if not written:
            header = {
                "descr": np.lib.format.dtype_to_descr(vector.dtype),
                "fortran_order": False,
                "shape": (count, len(vector)),
            }
            np.lib.format.write_array_header_1_0(stream, header)
        stream.write(vector.tobytes())
        written += 1
    return written


def submit(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> int:
    """Write the predictions for a GLUE test file as a submission, .tsv; return the number of rows.

    Arguments as of `predict`; the model is loaded from a run.

    Raises:
        UserError: At a bad row, or if the file is not a test file or the task is not of GLUE.
    """
    file_format = getattr(model.task, "file_format", None) or ""
    assert model.source is not None  # The rows of GLUE are those of a run.
    check_submission(output_path, file_format, model.source.run.path)

    def labels_by_id():
        for row, prediction in _outputs_of_file(model, input_path, batch_size, log):
            if isinstance(prediction, BadRow):
                raise UserError(f"{prediction}; a submission requires a prediction for every row")
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


def _outputs_of_file(model, path, batch_size, log):
    """Yield the pairs of `outputs_of_rows` for the predictions of a file."""

    def rows():
        return model.task.iter_examples(path, labelled=False)

    check_any_good(rows())  # Again, since a remote run was not read before.
    count = sum(1 for _ in rows())
    yield from outputs_with_progress(
        rows(), count, lambda batch: predict_batch(model.serving, batch), batch_size, log
    )


def outputs_with_progress(
    rows: Iterable[Any], count: int, outputs: Outputs, batch_size: int, log: Callable[[str], None]
) -> Iterator[tuple[Any, dict[str, Any] | BadRow]]:
    """Yield the pairs of `outputs_of_rows` for `count` rows."""
    with Progress(log, "rows", count) as progress:
        for batch in outputs_of_rows(rows, outputs, batch_size):
            yield from batch
            progress.update(progress.done + len(batch))


def outputs_of_rows(
    rows: Iterable[Any], outputs: Outputs, batch_size: int
) -> Iterator[list[tuple[Any, dict[str, Any] | BadRow]]]:
    """Yield the rows of each batch with their outputs. Only one batch is in memory.

    Args:
        rows: Rows of a reader, with their `location`, some of them `BadRow`s.
        outputs: Function that returns the output of each good row of a batch.
        batch_size: Rows per batch.

    Yields:
        Pairs of a row and its output. Instead of an output, the `BadRow` itself, or a new one if a
        number of the output is not finite.
    """
    for batch in in_batches(rows, batch_size):
        good = [row for row in batch if not isinstance(row, BadRow)]
        found = iter(outputs(good) if good else ())
        yield [
            (row, row if isinstance(row, BadRow) else _if_finite(row, next(found))) for row in batch
        ]


def _if_finite(row, output):
    """Return the output of a row, or a `BadRow`."""
    is_finite = strict_json.is_finite(output)
    return output if is_finite else BadRow(row.location, strict_json.NOT_FINITE)


def in_batches(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def predict_batch(serving: Serving, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the prediction per row as a dict of JSON types, without padding."""
    # The served signature, so that predictions are those of the exported model.
    columns = {name: [row.texts[name] for row in rows] for name in serving.task.input_names}
    return [
        prediction if row.id is None else {"id": row.id, **prediction}
        for row, prediction in zip(rows, serving.predict_rows(columns, len(rows)), strict=True)
    ]
