"""Question answering by a span of a context: SQuAD 1.1 and 2.0 (Devlin et al. 2019, 4.2 and 4.3).

A context of any length is split into overlapping windows; [CLS] represents "no answer". Training
follows google-research/bert's run_squad.py: a window that does not contain the complete answer is
trained as unanswerable. Unlike there, an answer's tokens are found by their character offsets, and
the answer's text is cut from the context as it was sent.

Shape suffixes: N questions, W windows of all of them, T tokens of all windows, L tokens of a
window.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import half_softmax_cross_entropy, half_softmax_divergence
from tasks.base.decisions import top2_gap
from tasks.base.plots import Plot, draw_bars
from tasks.base.task import OutputSpec, Task, Tokenize, cut_lists, described
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import as_list
from tasks.data.readers.rows import FileRows, Source, raise_bad_rows
from tasks.data.readers.squad import listed_answers
from tasks.data.windows import Windows, pack_windows
from tasks.graph.heads import SpanModel
from tasks.metrics.squad import best_null_threshold, scores_by_length, squad_scores
from tasks.model.task_model import TaskModel
from tasks.types.question_answering.answer_spans import best_spans, select_answer

RELEASED_THRESHOLD = 0.0
N_BEST = 20  # Candidate answers in a served prediction, as in google-research/bert.
QUESTIONS_PER_BATCH = 256  # Bounds the memory of the spans in an evaluation.


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnsweringTask(Task):
    """Extractive question answering; a label is a tuple of answers (text, start), () for none."""

    doc_stride: int = described("tokens between the starts of the windows of a longer text", 128)
    max_query_length: int = described("maximum tokens of a question; the rest is removed", 64)
    max_answer_length: int = described("maximum tokens of an answer", 30)
    may_be_impossible: bool = described("whether a question may have no answer", False)
    # Until it is tuned, the threshold is 0, as in google-research/bert.
    null_threshold: float | None = described("no-answer score above which there is no answer", None)

    kind = "span_qa"
    description = "Extracts the answer to a question from a context that may contain it."
    outputs = {
        "answer": OutputSpec('answer; "" if there is none'),
        "start": OutputSpec(
            "start of the answer in the context, in characters; -1 if there is none"
        ),
        "end": OutputSpec("end of the answer (exclusive), in characters; -1 if there is none"),
        "score": OutputSpec("probability among the best answers and, if allowed, no answer"),
        "no_answer_score": OutputSpec(
            "score of no answer; higher is more likely", is_log_odds=True
        ),
        "nbest_answer": OutputSpec("best answers, best first", compared="none"),
        "nbest_start": OutputSpec(
            "starts of the best answers, in characters; -1 for padding", compared="none"
        ),
        "nbest_end": OutputSpec(
            "ends of the best answers (exclusive), in characters; -1 for padding", compared="none"
        ),
        "nbest_score": OutputSpec("scores of the best answers"),
    }
    best_metric = "f1"
    input_descriptions = {
        "question": "question",
        "context": "text that may contain the answer, of any length",
    }
    input_names = ("question", "context")
    losses = {"start": half_softmax_cross_entropy, "end": half_softmax_cross_entropy}
    soft_losses = {"start": half_softmax_divergence, "end": half_softmax_divergence}
    has_lists_of_labels = True
    has_windows = True
    accuracies = ("start", "end")
    needs_offsets = True
    tunes_without_request = True  # 0 is the published threshold.
    unused = "whose answer is not in the context, not used for training"

    @classmethod
    def from_data(
        cls, data: Source | FileRows, *, may_be_impossible: bool | None = None, **options: Any
    ) -> Self:
        """Create the task; whether questions may have no answer is read off the file if `None`."""
        task = cls(may_be_impossible=bool(may_be_impossible), **options)
        if may_be_impossible is None:
            questions = raise_bad_rows(task.iter_rows(data, labelled=True))
            task = dataclasses.replace(
                task, may_be_impossible=any(not question.label for question in questions)
            )
        return task

    def __post_init__(self) -> None:
        num_others = self.max_query_length + 3
        if self.max_seq_length <= num_others:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at least {num_others + 1}, for "
                f"--max_query_length={self.max_query_length}, 3 special tokens and 1 token of a "
                "context"
            )

    @property
    def tunable_fields(self) -> tuple[str, ...]:
        """The no-answer threshold, if questions may have no answer."""
        return ("null_threshold",) if self.may_be_impossible else ()

    def summary(self) -> str:
        """Return whether questions may have no answer, for the log."""
        return "; a question may have no answer" if self.may_be_impossible else ""

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """Return answers, given as dicts or pairs of text and start; [] is no answer.

        They may also be one dict of lists, as in Hugging Face datasets.
        """
        answers = []
        value = listed_answers(value) if isinstance(value, Mapping) else as_list(value, "answers")
        for answer in value:
            if isinstance(answer, Mapping):
                answer = (answer.get("text"), answer.get("start", answer.get("answer_start")))
            is_pair = isinstance(answer, list | tuple) and len(answer) == 2
            text, start = answer if is_pair else (None, None)
            if not isinstance(text, str) or not text or type(start) is not int:
                raise ValueError(
                    f'answer {answer!r:.80}: expected {{"text": string, "start": integer}}'
                )
            answers.append((text, start))
        if not answers and not self.may_be_impossible:
            raise ValueError("expected an answer, received none; set may_be_impossible=True")
        return tuple(answers)

    def label_of(self, label: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """Return the answers; raises ValueError if there is none and the task does not allow it."""
        if not label and not self.may_be_impossible:
            raise ValueError(
                "expected an answer, since this task has one per question; for questions without "
                "an answer train with --task=squad2"
            )
        return label

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the questions without an answer, or whose first answer is at its offset.

        Raises:
            UserError: If none is left.
        """
        spans = _spans(examples)
        kept = examples.filter(lambda number: spans[number] or not examples.labels[number])
        if not kept:
            raise UserError(
                "training answers: expected text in its context at answer_start, received none"
            )
        return kept

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize questions and contexts into overlapping windows."""
        return pack_windows(
            tokenize_ends(tokenize, texts["question"], self.max_query_length),
            tokenize(texts["context"]),
            vocabulary,
            self.max_seq_length,
            self.doc_stride,
            self.max_query_length,
        )

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return the position per window of the first answer's first and last token, int32 `(W,)`.

        The tokens of an answer are those that contain at least one character of it. A window
        without the complete answer has position 0, [CLS]. Weights are ones.
        """
        # A question without a usable answer gets the span (0, 0), which contains no character.
        start_N, end_N = np.array([span or (0, 0) for span in _spans(examples)], np.int32).T
        example_W, packed = windows.example_W.numpy(), windows.packed
        assert packed.starts is not None and packed.ends is not None  # Since `needs_offsets`.
        assert windows.is_max_context is not None  # Since texts are split.
        example_T = example_W[packed.input_ids.value_rowids().numpy()]
        is_answer_T = packed.segment_ids.flat_values.numpy() == 1
        is_answer_T &= packed.starts.flat_values.numpy() < end_N[example_T]
        is_answer_T &= packed.ends.flat_values.numpy() > start_N[example_T]

        # Tokens per answer. Windows overlap, so each token is counted only in its window of most
        # context. A window has the complete answer if it has as many of its tokens.
        is_counted_T = is_answer_T & windows.is_max_context.flat_values.numpy()
        size_N = np.bincount(example_T[is_counted_T], minlength=len(examples))
        splits = packed.input_ids.row_splits.numpy()
        answered_W = np.diff(np.concatenate([[0], np.cumsum(is_answer_T)])[splits])
        is_complete_W = (answered_W == size_N[example_W]) & (answered_W > 0)
        # Positions in the packed sequence: flat positions minus the start of the window.
        first_W = np.zeros(len(example_W), np.int32)
        positions_A = np.flatnonzero(is_answer_T)
        first_W[is_complete_W] = (
            positions_A[np.searchsorted(positions_A, splits[:-1][is_complete_W])]
            - splits[:-1][is_complete_W]
        )
        last_W = np.where(is_complete_W, first_W + answered_W - 1, 0).astype(np.int32)
        ones_W = np.ones(len(example_W), np.float32)
        return {"start": first_W, "end": last_W}, {"start": ones_W, "end": ones_W}

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Count first answers that are in no window, and those longer than `max_answer_length`."""
        first_W, last_W = data.labels["start"], data.labels["end"]
        holders = data.windows.example_W.numpy()[first_W > 0]
        size_N = np.zeros(len(data.examples), np.int32)
        size_N[holders] = (last_W - first_W + 1)[first_W > 0]
        # Questions without an answer are not counted.
        size_N = size_N[[bool(answers) for answers in data.examples.labels]]
        counts = {
            "answers are not complete in any window, or not at their offset": size_N == 0,
            f"answers have over {self.max_answer_length} tokens": size_N > self.max_answer_length,
        }
        return [
            f"{is_so_N.sum()} of {len(size_N)} {what}"
            for what, is_so_N in counts.items()
            if is_so_N.any()
        ]

    def build_model(self, config: BertConfig, dtype: str = "float32") -> SpanModel:
        """Return the encoder with a span head."""
        return SpanModel(config, name=self.kind, dtype=dtype)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Select the answer and the N_BEST candidates per question (`select_answer`)."""
        best = self._best_spans(outputs, windows, texts["context"], N_BEST)
        return select_answer(best, self._threshold)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the probability by which the answer leads the second best one, float32 `(N,)`."""
        # The zero column lets a single candidate have a margin.
        margin_N = top2_gap(tf.pad(predictions["nbest_score"], [[0, 0], [0, 1]]))
        if not self.may_be_impossible:
            return margin_N
        # The margin between no answer and the best span: sigmoid(x) - sigmoid(-x) = tanh(x / 2) of
        # the score's distance to the threshold.
        is_none_N = tf.tanh((predictions["no_answer_score"] - self._threshold) / 2)
        return tf.where(is_none_N > 0, is_none_N, tf.minimum(margin_N, -is_none_N))

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove the candidates that are padding, whose start is -1."""
        return cut_lists(row, sum(start >= 0 for start in row["nbest_start"]))

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return exact match and F1, from 0 to 1, of evaluate-v1.1 or evaluate-v2.0.

        Version 2.0 is used if questions may have no answer. It adds the metrics of questions with
        and without an answer, `best_f1` with the best threshold for this data
        (`best_null_threshold`) and, if a threshold is tuned, the metrics with the threshold 0
        (`exact_match_at_0`, `f1_at_0`).
        """
        golds, best = _golds(data.examples), self._best(data, outputs)
        if not self.may_be_impossible:
            return squad_scores(_texts(select_answer(best)["answer"]), golds, version=1)

        def scores(threshold):
            return squad_scores(_texts(select_answer(best, threshold)["answer"]), golds, version=2)

        result = scores(self._threshold)
        threshold, of_best = _tuned_threshold(best, golds)
        result |= {"best_f1": of_best["f1"], "best_null_threshold": threshold}
        if self.null_threshold is not None:
            released = scores(RELEASED_THRESHOLD)
            result |= {f"{name}_at_0": released[name] for name in ("exact_match", "f1")}
        return result

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return exact match and F1 by the length of the answer."""
        answers = _texts(select_answer(self._best(data, outputs), self._threshold)["answer"])
        scores = scores_by_length(answers, _golds(data.examples))
        names = ("exact_match", "f1")
        values = {name: [of_group[name] for of_group in scores.values()] for name in names}
        return {"answers": lambda axes: draw_bars(axes, [*scores], values)}

    def tune(self, data: EncodedExamples, outputs: Arrays) -> "QuestionAnsweringTask":
        """Return the task with the no-answer threshold of the best F1 on this data."""
        if not self.may_be_impossible:
            return self
        threshold, _ = _tuned_threshold(self._best(data, outputs), _golds(data.examples))
        return dataclasses.replace(self, null_threshold=threshold)

    @property
    def _threshold(self):
        if self.may_be_impossible and self.null_threshold is None:
            return RELEASED_THRESHOLD
        return self.null_threshold

    def _best_spans(self, outputs, windows, contexts, n_best):
        return best_spans(
            outputs["start"], outputs["end"], windows, contexts, n_best, self.max_answer_length
        )

    def _best(self, data, outputs):
        """Return the best span per question of a dataset, as `best_spans` with n_best=1."""
        parts, first = [], 0
        # Windows are ordered by example, so a slice of examples is a slice of windows.
        for texts in data.examples.slices(QUESTIONS_PER_BATCH):
            last = first + len(texts["context"])
            windows, rows = data.windows.of_examples(first, last)
            of_slice = {name: tf.constant(values[rows]) for name, values in outputs.items()}
            parts.append(self._best_spans(of_slice, windows, texts["context"], n_best=1))
            first = last
        return {name: tf.concat([part[name] for part in parts], axis=0) for name in parts[0]}


def _spans(examples):
    """Return the first answer's (start, end) per question, None if it is not at its offset."""
    spans = []
    for context, answers in zip(examples.texts["context"], examples.labels, strict=True):
        text, start = answers[0] if answers else ("", 0)
        # Some published answers have a wrong offset; training on them would teach wrong spans.
        is_there = text and start >= 0 and context[start : start + len(text)] == text
        spans.append((start, start + len(text)) if is_there else None)
    return spans


def _golds(examples):
    return {number: [text for text, _ in answers] for number, answers in enumerate(examples.labels)}


def _texts(strings_N):
    return {number: text.decode() for number, text in enumerate(strings_N.numpy())}


def _tuned_threshold(best, golds):
    """Return (threshold, its metrics) for the output of `best_spans`."""
    # The no-answer score does not depend on the threshold that is passed here.
    scores_N = select_answer(best, RELEASED_THRESHOLD)["no_answer_score"].numpy()
    return best_null_threshold(dict(enumerate(scores_N)), _texts(best["text"][:, 0]), golds)


@keras.saving.register_keras_serializable("bert_tf")
class QuestionAnswerer(TaskModel):
    """Extractive question answering over contexts of any length.

    Options of `from_pretrained`:
        doc_stride: Tokens between the starts of two windows.
        max_query_length: Maximum tokens per question.
        max_answer_length: Maximum tokens per answer.
        may_be_impossible: Whether questions may have no answer.

    Rows have the columns question and context. Labels of `fit` are, per question, a list of
    {"text", "start"}, of which the first is trained; [] means no answer.
    """

    task_class = QuestionAnsweringTask
    options = ("doc_stride", "max_query_length", "max_answer_length", "may_be_impossible")
