"""Base class of the readers: from rows, of files or given as Python objects, to examples."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bert_tf.errors import UserError
from tasks.data.examples import Examples
from tasks.data.readers.memory import columns_of
from tasks.data.readers.rows import BadRow, RowError, raise_bad_rows

if TYPE_CHECKING:
    from tasks.base.task import Task
    from tasks.data.examples import Example

TaskT = TypeVar("TaskT", bound="Task")


class Reader(abc.ABC, Generic[TaskT]):
    """Base class of the readers of the task types.

    Args:
        task: The task, which names columns and labels.
    """

    def __init__(self, task: TaskT) -> None:
        self.task = task

    @abc.abstractmethod
    def iter_examples(self, path: str, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield an `Example` or a `BadRow` per row of a file, without reading all of it first."""

    def load_examples(self, path: str, labelled: bool = True) -> Examples:
        """Read a complete file into memory.

        Args:
            path: A file in a format of the task.
            labelled: Whether the rows have labels.

        Returns:
            The good rows; known bad rows of a published dataset are in `skipped_rows`.

        Raises:
            UserError: At the first bad row that is not known, or if no row is left.
        """
        everything = list(self.iter_examples(path, labelled))
        # Known bad rows are kept apart to be reported; any other bad row raises here.
        rows = list(raise_bad_rows(everything))
        skipped_rows = tuple(row for row in everything if isinstance(row, BadRow))
        if not rows:
            raise UserError(
                f"{path}: expected at least one good row. First bad row: {skipped_rows[0]}"
            )
        texts = {name: [row.texts[name] for row in rows] for name in self.task.input_names}
        return Examples(texts, [row.label for row in rows] if labelled else [], skipped_rows)

    def columns(self, x: Any) -> dict[str, list]:
        """Return rows given as Python objects as texts by input name; raises UserError."""
        names = self.task.input_names
        lists = [name for name in names if self.task.INPUT_RANKS.get(name) == 2]
        return columns_of(x, names, lists)

    def row_of(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of one row, given as strings in their order, by name.

        An input that is a list, such as the choices of a prompt, takes all strings from its own on.

        Raises:
            UserError: If there are too few or too many strings.
        """
        names = self.task.input_names
        *single, last = names
        has_list = self.task.INPUT_RANKS.get(last) == 2
        if len(texts) < len(names) or (len(texts) > len(names) and not has_list):
            expected = f"{', '.join(names)}{', ...' if has_list else ''}"
            raise UserError(f"expected one text each for {expected}, received {len(texts)}")
        values = [*texts[: len(single)], list(texts[len(single) :]) if has_list else texts[-1]]
        return dict(zip(names, values, strict=True))

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> Any:
        """Convert a label given as a Python object to the representation of the task.

        Args:
            value: The label.
            texts: The texts of its row by input name.

        Raises:
            ValueError: If it does not fit the task; the message says what is expected.
        """
        raise ValueError(f"{self.task.kind} has no labels")

    def encode_labels(
        self,
        values: Sequence[Any],
        texts: Mapping[str, Sequence[Any]],
        what: str = "y[{}]",
        is_batch: bool = False,
    ) -> list:
        """Convert the labels of rows, which have one meaning; see `encode_label`.

        Args:
            values: N labels.
            texts: N texts by input name.
            what: Name of a label for messages; "{}" is the number of its row.
            is_batch: Whether other batches have further labels of the same kind.

        Raises:
            UserError: If a label does not fit the task, or could be read in two ways.
        """
        labels = []
        for row, value in enumerate(values):
            try:
                text = {name: column[row] for name, column in texts.items()}
                labels.append(self.encode_label(value, text))
            except (ValueError, TypeError, RowError) as error:
                raise UserError(f"{what.format(row)}: {error}") from None
        return labels

    @property
    def has_lists_of_labels(self) -> bool:
        """Whether the label of a row is a list."""
        return False

    def decode_label(self, label: Any) -> Any:
        """Convert a label to the Python object that `encode_label` accepts."""
        return label

    def default_labels(self, count: int) -> list:
        """Return labels for rows without any; raises UserError if the task requires labels."""
        raise UserError("y: expected one label per row, received none")
