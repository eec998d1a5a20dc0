"""What the tasks on a whole text or pair share: their columns, and how long texts are cut."""

import dataclasses

from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from tasks.examples import Example
from tasks.readers.glue import GLUE, read_glue
from tasks.readers.records import BadRow
from tasks.readers.tables import read_rows
from tasks.task import Task
from tasks.windows import one_window_each


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A label or value for a text, or for a pair of texts.

    `file_format` is "rows", with named columns, or the name of a GLUE data set, whose files have
    their own. A subclass gives `label_of(value)` of the label column, which raises ValueError
    saying what was wanted.
    """

    file_format: str = "rows"
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    unescape_html: bool = False
    truncation: str = "head"

    @property
    def input_names(self):
        """What the texts are called in a served request."""
        return _input_names(self._columns)

    @property
    def list_columns(self):
        """The columns that may hold lists in .jsonl."""
        return ()

    @property
    def _columns(self):
        return GLUE[self.file_format].keys if self.file_format in GLUE else self.text_columns

    def iter_examples(self, path, labelled):
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

    def encode(self, texts, tokenize, vocabulary):
        names = self.input_names
        room = token_budget(len(names), self.max_seq_length)
        segments = [tokenize_ends(tokenize, texts[name], room, self.truncation) for name in names]
        return one_window_each(pack(segments, vocabulary, self.max_seq_length, self.truncation))


def raw_rows(task, path, labelled):
    """The rows of a file in a task's form, labels as they stand there."""
    if task.file_format in GLUE:
        return read_glue(task.file_format, path, labelled)
    columns = (*task.text_columns, *([task.label_column] if labelled else []))
    return read_rows(path, columns, task.unescape_html, task.list_columns)


def _input_names(columns):
    return ("text",) if len(columns) == 1 else ("text_a", "text_b")
