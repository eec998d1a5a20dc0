"""Base classes of the tasks on a text or pair."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from bert_tf.errors import UserError
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from bert_tf.text.vocabulary import Vocabulary
from tasks.base.task import Task, Tokenize, described
from tasks.data.examples import EncodedExamples, Tensors
from tasks.data.readers.glue import GLUE
from tasks.data.readers.rows import text_names
from tasks.data.windows import Windows, one_window_each

TRUNCATIONS = ("head", "tail", "head_tail")


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
        of_glue = GLUE.get(self.file_format)
        return text_names(len(of_glue.columns if of_glue else self.text_columns))

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize and truncate texts to one window each."""
        names = self.input_names
        budget = token_budget(len(names), self.max_seq_length)
        # Only the ends that truncation may keep are tokenized; `pack` truncates pairs together.
        segments = [tokenize_ends(tokenize, texts[name], budget, self.truncation) for name in names]
        return one_window_each(pack(segments, vocabulary, self.max_seq_length, self.truncation))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledTextTask(TextTask):
    """Base class of tasks with a label or value per text or pair of texts."""

    label_column: str = "label"

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning if all rows have the same label: most metrics then say nothing."""
        labels = data.examples.labels
        if len(labels) < 2 or any(label != labels[0] for label in labels):
            return []
        return [
            f"all {len(labels)} rows have the same label; macro F1, ROC-AUC and correlations of "
            "such rows do not measure the model"
        ]
