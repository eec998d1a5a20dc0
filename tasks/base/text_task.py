"""Base classes of the tasks on a text or pair, and of their readers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bert_tf.errors import UserError
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from tasks.base.task import Reader, Task, described
from tasks.data.examples import Example
from tasks.data.readers.glue import GLUE, read_glue
from tasks.data.readers.rows import BadRow
from tasks.data.readers.tables import read_rows
from tasks.data.windows import one_window_each

if TYPE_CHECKING:
    import tensorflow as tf

    from bert_tf.text.tokenizer import Tokens
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.data.examples import Tensors
    from tasks.data.readers.tables import Row
    from tasks.data.windows import Windows

TRUNCATIONS = ("head", "tail", "head_tail")


TextTaskT = TypeVar("TextTaskT", bound="TextTask")
LabelledTaskT = TypeVar("LabelledTaskT", bound="LabelledTextTask")


class TextReader(Reader[TextTaskT]):
    """Base class of the readers of rows with a text or pair of texts."""

    def example(self, row: Row, label: object) -> Example:
        """Return the example of a row."""
        texts = [row.values[column] for column in self.task.file_columns]
        index = row.values.get("index")
        return Example(
            dict(zip(self.task.input_names, texts, strict=True)),
            label,
            row.location,
            index if isinstance(index, str) else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Base class of tasks on a text or pair of texts that fits one window.

    Attributes:
        file_format: "rows", with named columns, or the name of a GLUE dataset, whose files have
            fixed columns.
        text_columns: One or two columns of text.
        label_column: Column of the label.
        unescape_html: Whether to convert HTML entities in texts.
        truncation: "head", "tail" or "head_tail" (`bert_tf.text.packing.pack`).
    """

    file_format: str = "rows"
    text_columns: tuple[str, ...] = ("text",)
    label_column: str | None = None
    unescape_html: bool = False
    truncation: str = described("part of a longer text that is kept", "head")

    @classmethod
    def from_options(cls, *, max_seq_length: int, pairs: bool = False, **options: Any) -> Self:
        """Create the task from the options of `TaskModel.from_pretrained`.

        `pairs` stands for the columns text_a and text_b.
        """
        truncation = options.get("truncation", "head")
        if truncation not in TRUNCATIONS:
            raise UserError(
                f"truncation={truncation!r:.80}: expected one of {', '.join(TRUNCATIONS)}"
            )
        columns = ("text_a", "text_b") if pairs else ("text",)
        return cls(max_seq_length=max_seq_length, text_columns=columns, **options)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the texts in a served request."""
        return ("text",) if len(self.file_columns) == 1 else ("text_a", "text_b")

    @property
    def file_columns(self) -> tuple[str, ...]:
        """Columns of the texts in files."""
        return GLUE[self.file_format].keys if self.file_format in GLUE else self.text_columns

    def encode(
        self, texts: Tensors, tokenize: Callable[[tf.Tensor], Tokens], vocabulary: Vocabulary
    ) -> Windows:
        """Tokenize and truncate texts to one window each."""
        names = self.input_names
        budget = token_budget(len(names), self.max_seq_length)
        # Only the ends that truncation may keep are tokenized; `pack` truncates pairs together.
        segments = [tokenize_ends(tokenize, texts[name], budget, self.truncation) for name in names]
        return one_window_each(pack(segments, vocabulary, self.max_seq_length, self.truncation))


class LabelledTextReader(TextReader[LabelledTaskT]):
    """Base class of the readers of rows with a label or value."""

    @property
    def list_columns(self) -> tuple[str, ...]:
        """Columns that may contain lists in .jsonl."""
        return ()

    @abc.abstractmethod
    def label_of(self, value: Any) -> object:
        """Convert a string of the label column, or a list of strings in `list_columns`.

        Raises:
            ValueError: If it is no label, with what was expected.
        """

    def rows(self, path: str, labelled: bool) -> Iterable[Row | BadRow]:
        """Return the rows of a file, labels as they are written."""
        if self.task.file_format in GLUE:
            return read_glue(self.task.file_format, path, labelled)
        columns = (*self.task.text_columns, *([self.task.label_column] if labelled else []))
        return read_rows(path, columns, self.task.unescape_html, self.list_columns)

    def iter_examples(self, path: str, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield the rows of a file."""
        for row in self.rows(path, labelled):
            if isinstance(row, BadRow):
                yield row
                continue
            try:
                label = self.label_of(row.values[self.task.label_column]) if labelled else None
            except ValueError as error:
                yield BadRow(row.location, str(error))
            else:
                yield self.example(row, label)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledTextTask(TextTask):
    """Base class of tasks with a label or value per text or pair of texts."""

    label_column: str = "label"


def warnings_of_equal_labels(labels: Sequence[Any]) -> list[str]:
    """Return a warning if all rows have the same label: most metrics then say nothing."""
    if len(labels) < 2 or any(label != labels[0] for label in labels):
        return []
    return [
        f"all {len(labels)} rows have the same label; macro F1, ROC-AUC and correlations of such "
        "rows do not measure the model"
    ]
