"""Base class of the tasks on a text or pair: their columns and truncation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from tasks.examples import Example
from tasks.readers.glue import GLUE, read_glue
from tasks.readers.rows import BadRow
from tasks.readers.tables import read_rows
from tasks.task import Task
from tasks.windows import one_window_each

if TYPE_CHECKING:
    import tensorflow as tf

    from bert_tf.text.tokenizer import Tokens
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.readers.tables import Row
    from tasks.windows import Windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Base class of tasks with a label or value per text or pair of texts.

    Subclasses define `label_of(value)`, which converts a string of the label column, or raises
    `ValueError` with what was expected.

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
    label_column: str = "label"
    unescape_html: bool = False
    truncation: str = "head"

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the texts in a served request."""
        return _input_names(self._columns)

    @property
    def list_columns(self) -> tuple[str, ...]:
        """Columns that may contain lists in .jsonl."""
        return ()

    @property
    def _columns(self):
        return GLUE[self.file_format].keys if self.file_format in GLUE else self.text_columns

    def iter_examples(self, path: str, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield the rows of a file."""
        for row in raw_rows(self, path, labelled):
            if isinstance(row, BadRow):
                yield row
                continue
            label = None
            if labelled:
                try:
                    label = self.label_of(row.values[self.label_column])
                except ValueError as error:
                    yield BadRow(row.location, str(error))
                    continue
            texts = [row.values[column] for column in self._columns]
            texts = dict(zip(self.input_names, texts, strict=True))
            yield Example(texts, label, row.location, row.values.get("index"))

    def encode(
        self,
        texts: Mapping[str, tf.Tensor],
        tokenize: Callable[[tf.Tensor], Tokens],
        vocabulary: Vocabulary,
    ) -> Windows:
        """Tokenize and truncate texts to one window each."""
        names = self.input_names
        budget = token_budget(len(names), self.max_seq_length)
        # Only the ends that truncation may keep are tokenized; `pack` truncates pairs together.
        segments = [tokenize_ends(tokenize, texts[name], budget, self.truncation) for name in names]
        return one_window_each(pack(segments, vocabulary, self.max_seq_length, self.truncation))


def raw_rows(task: TextTask, path: str, labelled: bool) -> Iterable[Row | BadRow]:
    """Return the rows of a file in a task's format, labels as they are written."""
    if task.file_format in GLUE:
        return read_glue(task.file_format, path, labelled)
    columns = (*task.text_columns, *([task.label_column] if labelled else []))
    return read_rows(path, columns, task.unescape_html, task.list_columns)


def _input_names(columns):
    return ("text",) if len(columns) == 1 else ("text_a", "text_b")
