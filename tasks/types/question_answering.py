"""Question answering by a span of a context: SQuAD 1.1 and 2.0 (Devlin et al. 2019, 4.2 and 4.3).

A context of any length is split into overlapping windows; [CLS] represents "no answer". Training
follows google-research/bert's run_squad.py: a window that does not contain the complete answer is
trained as unanswerable. Unlike there, an answer's tokens are found by their character offsets, and
the answer's text is cut from the context as it was sent.

Valid spans and the no-answer rule are those of run_squad.py, with three differences: all pairs of
start and end are ranked, not only pairs of n-best positions; answers that differ only in case are
merged; an example may have no valid span.

Shape suffixes: B or N questions, W windows of all of them, T tokens of all windows, L tokens of a
window, A tokens of the longest answer, X = L + A - 1, K candidate spans, N returned spans.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.tokenizer import tokenize_ends
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import half_softmax_cross_entropy, half_softmax_divergence
from tasks.base.plots import Plot, draw_bars
from tasks.base.task import (
    OutputSpec,
    Task,
    Tokenize,
    check_positive,
    cut_lists,
    described,
    top2_gap,
)
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import as_list
from tasks.data.readers.rows import FileRows, Source, raise_bad_rows
from tasks.data.readers.squad import listed_answers
from tasks.data.windows import Windows, pack_windows
from tasks.graph.heads import HeadModel
from tasks.metrics.squad import best_null_threshold, scores_by_length, squad_scores
from tasks.model.task_model import TaskModel

NO_SPAN = -1e30  # Logit of a missing span: below any real logit, and finite, as JSON requires.
WIDER_FROM = (0x80, 0x800, 0x10000)  # From each code point on, UTF-8 takes one more byte.
SPANS_PER_ANSWER = 5  # Candidates per returned span, because some have equal texts.
RELEASED_THRESHOLD = 0.0
N_BEST = 20  # Candidate answers in a served prediction, as in google-research/bert.
QUESTIONS_PER_BATCH = 256  # Bounds the memory of the spans in an evaluation.


def best_spans(
    start_logits: tf.Tensor,
    end_logits: tf.Tensor,
    windows: Windows,
    contexts: tf.Tensor,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> dict[str, tf.Tensor]:
    """Return the n-best answer spans of each example.

    The logit of a span is the sum of its start and end logits, float32 `(W, L)`, of which values
    after the end of a window are ignored. A valid span starts where `windows.is_max_context` is
    true, ends in the same window and has at most `max_answer_length` tokens. Spans whose texts
    differ only in case and surrounding whitespace are merged; the best logit is kept.

    Returns:
        Dict of `text` string, `start` and `end` int32, `logit` float32, each `(B, n_best)`, best
        first, padded with "", -1, -1 and NO_SPAN, such that context[start:end] == text, where
        invalid UTF-8 counts as in bytes.decode("utf-8", "replace"); and of `null_logit` float32
        `(B,)`, the smallest [CLS] logit (start plus end) of the example's windows.
    """
    num_spans, num_examples = SPANS_PER_ANSWER * n_best, tf.size(contexts)
    of_windows = _spans_of_windows(start_logits, end_logits, windows, num_spans, max_answer_length)
    spans = _spans_of_examples(of_windows, windows, num_examples, num_spans)
    start_BK = _offsets(windows.packed.starts, spans.first, spans.logit)
    end_BK = _offsets(windows.packed.ends, spans.last, spans.logit)
    text_BK = cut_overlapping(contexts, start_BK, end_BK)
    # Of equal texts only the best, which is the first, keeps its logit.
    logit_BN, chosen_BN = tf.math.top_k(tf.where(_is_new(text_BK), spans.logit, NO_SPAN), n_best)

    def of_best(values_BK, default):
        return tf.where(logit_BN > NO_SPAN, tf.gather(values_BK, chosen_BN, batch_dims=1), default)

    null_W = tf.reduce_sum(start_logits[:, :1] + end_logits[:, :1], axis=1)
    return {
        "text": of_best(text_BK, ""),
        "start": of_best(start_BK, -1),
        "end": of_best(end_BK, -1),
        "logit": logit_BN,
        "null_logit": tf.math.unsorted_segment_min(null_W, windows.example_W, num_examples),
    }


def select_answer(
    best: Mapping[str, tf.Tensor], null_threshold: float | None = None
) -> dict[str, tf.Tensor]:
    """Select the best span of `best_spans` or no answer.

    The best span is returned with a no_answer_score up to `null_threshold`; always, if that is None
    (SQuAD 1.1).

    Returns:
        Dict of `answer` string, `start` and `end` int32, `score` and `no_answer_score` float32,
        each `(B,)`; no answer is "", -1, -1. `no_answer_score` is the null logit minus the logit of
        the best span. Scores are a softmax over the span logits and, unless the model always
        answers, the null logit; `score` is that of the selected span or of no answer.
        `nbest_answer`, `nbest_start`, `nbest_end` and `nbest_score` are `(B, N)`, padded with "",
        -1, -1 and 0.
    """
    has_span_BN = best["start"] >= 0
    null_B = best["null_logit"]
    no_answer_score_B = null_B - best["logit"][:, 0]
    is_answered_B = has_span_BN[:, 0]
    # With NO_SPAN as its logit, the null column gets no probability if there is any span.
    null_column_B = tf.fill(tf.shape(null_B), NO_SPAN)
    if null_threshold is not None:
        is_answered_B &= no_answer_score_B <= null_threshold
        null_column_B = null_B
    scores = tf.nn.softmax(tf.concat([null_column_B[:, tf.newaxis], best["logit"]], axis=1))
    score_BN = tf.where(has_span_BN, scores[:, 1:], 0.0)
    null_score_B = tf.zeros_like(null_B) if null_threshold is None else scores[:, 0]
    return {
        "answer": tf.where(is_answered_B, best["text"][:, 0], ""),
        "start": tf.where(is_answered_B, best["start"][:, 0], -1),
        "end": tf.where(is_answered_B, best["end"][:, 0], -1),
        "score": tf.where(is_answered_B, score_BN[:, 0], null_score_B),
        "no_answer_score": no_answer_score_B,
        "nbest_answer": best["text"],
        "nbest_start": best["start"],
        "nbest_end": best["end"],
        "nbest_score": score_BN,
    }


def cut_overlapping(texts: tf.Tensor, start_BK: tf.Tensor, end_BK: tf.Tensor) -> tf.Tensor:
    """Return K substrings of each text between character offsets, which may overlap.

    Characters are counted as in the tokenizer: invalid UTF-8 counts as in bytes.decode("utf-8",
    "replace"). Cutting bytes instead of code points takes a twelfth of the memory if a long word
    has many substrings. Each text is repeated K times.

    Args:
        texts: string `(B,)`.
        start_BK: int `(B, K)`, first character; -1 counts as 0.
        end_BK: int `(B, K)`, character after the last; -1 counts as 0.

    Returns:
        string `(B, K)`.
    """
    codes = tf.strings.unicode_decode(texts, "UTF-8", errors="replace")
    sizes = 1 + tf.add_n([tf.cast(codes.flat_values >= code, tf.int32) for code in WIDER_FROM])
    ends = tf.concat([[0], tf.cumsum(sizes)], axis=0)
    begin_B1 = codes.row_starts()[:, tf.newaxis]
    start_BK, end_BK = (
        tf.gather(ends, begin_B1 + tf.cast(tf.maximum(positions, 0), tf.int64))
        - tf.gather(ends, begin_B1)
        for positions in (start_BK, end_BK)
    )
    texts_B1 = tf.strings.unicode_encode(codes, "UTF-8")[:, tf.newaxis]
    texts_BK = tf.repeat(texts_B1, tf.shape(start_BK)[1], axis=1)
    return tf.strings.substr(texts_BK, start_BK, end_BK - start_BK)


class _Spans(NamedTuple):
    """Candidate spans, best first, `(W, K)` or `(B, K)`; tokens are indices into all windows."""

    logit: tf.Tensor  # float32, NO_SPAN for a missing span.
    first: tf.Tensor  # int32, the first token; 0 for a missing span.
    last: tf.Tensor  # int32, the last token, likewise.


def _spans_of_windows(start_WL, end_WL, windows, num_spans, max_answer_length):
    """Return the best spans of each window, at most `num_spans`."""
    num_windows, length = tf.unstack(tf.shape(start_WL))
    row_splits = tf.cast(windows.packed.input_ids.row_splits, tf.int32)
    size_W = row_splits[1:] - row_splits[:-1] - 1  # Without the last [SEP].
    is_start_WL = windows.is_max_context.to_tensor(False, shape=tf.shape(start_WL, tf.int64))
    start_WL = tf.where(is_start_WL, start_WL, NO_SPAN)
    end_WL = tf.where(tf.range(length) < size_W[:, tf.newaxis], end_WL, NO_SPAN)
    # Each start is followed by A ends.
    end_WX = tf.pad(end_WL, [[0, 0], [0, max_answer_length - 1]], constant_values=NO_SPAN)

    first_WK = _best_starts(start_WL, end_WX, tf.minimum(num_spans, length), max_answer_length)
    logit_WKA = _logits_of_starts(start_WL, end_WX, first_WK, max_answer_length)
    num_compared = tf.reduce_prod(tf.shape(logit_WKA)[1:])
    logit_WK, chosen_WK = tf.math.top_k(
        tf.reshape(logit_WKA, [num_windows, num_compared]), tf.minimum(num_spans, num_compared)
    )
    first_WK = tf.gather(first_WK, chosen_WK // max_answer_length, batch_dims=1)
    first_WK += row_splits[:-1, tf.newaxis]
    last_WK = first_WK + chosen_WK % max_answer_length
    is_span_WK = logit_WK > NO_SPAN
    return _Spans(logit_WK, tf.where(is_span_WK, first_WK, 0), tf.where(is_span_WK, last_WK, 0))


def _best_starts(start_WL, end_WX, num_starts, max_answer_length):
    """Return the positions `(W, K)` of the K starts that have the best spans.

    A span can be among the K best only if its start is one of these. Preselecting them avoids the
    (W, L, A) tensor of all spans.
    """
    best_end_WL = tf.nn.max_pool1d(end_WX[..., tf.newaxis], max_answer_length, 1, "VALID")[..., 0]
    return tf.math.top_k(start_WL + best_end_WL, num_starts).indices


def _logits_of_starts(start_WL, end_WX, first_WK, max_answer_length):
    """Return the logits of all spans with the given starts, `(W, K, A)`."""
    last_WKA = first_WK[..., tf.newaxis] + tf.range(max_answer_length)
    start_WK = tf.gather(start_WL, first_WK, batch_dims=1)
    end_WKA = tf.gather(end_WX, last_WKA, batch_dims=1)
    logit_WKA = tf.maximum(start_WK[..., tf.newaxis] + end_WKA, NO_SPAN)
    # An infinite start makes no end beyond the window a span.
    return tf.where(end_WKA == NO_SPAN, NO_SPAN, logit_WKA)


def _spans_of_examples(spans, windows, num_examples, num_spans):
    """Return the `num_spans` best spans of each example, from those of its windows."""

    def of_examples(values_WK, default):
        values = windows.by_example(values_WK, num_examples).to_tensor(default)
        values = tf.reshape(values, [num_examples, tf.reduce_prod(tf.shape(values)[1:])])
        return tf.pad(values, [[0, 0], [0, num_spans]], constant_values=default)

    logit_BK, chosen_BK = tf.math.top_k(of_examples(spans.logit, NO_SPAN), num_spans)
    first_BK, last_BK = (
        tf.gather(of_examples(token_WK, 0), chosen_BK, batch_dims=1)
        for token_WK in (spans.first, spans.last)
    )
    return _Spans(logit_BK, first_BK, last_BK)


def _offsets(offsets, token_BK, logit_BK):
    """Return the character offsets of tokens, -1 for a missing span."""
    return tf.where(logit_BK > NO_SPAN, tf.gather(offsets.flat_values, token_BK), -1)


def _is_new(text_BK):
    """Mark texts that differ from all earlier texts of their row, ignoring case and whitespace."""
    text_BK = tf.strings.strip(tf.strings.lower(text_BK, encoding="utf-8"))
    row_B1 = tf.strings.as_string(tf.range(tf.shape(text_BK)[0]))[:, tf.newaxis]
    texts = tf.reshape(row_B1 + " " + text_BK, [-1])
    unique = tf.unique(texts)
    positions = tf.range(tf.size(texts))
    first = tf.math.unsorted_segment_min(positions, unique.idx, tf.size(unique.y))
    return tf.reshape(tf.gather(first, unique.idx) == positions, tf.shape(text_BK))


class SpanModel(HeadModel):
    """Span prediction for question answering (Devlin et al. 2019, 4.2)."""

    has_head_dropout = False  # As in the released run_squad.py and in transformers.
    uses_pooler = False

    def __init__(self, config: BertConfig, **kwargs):
        super().__init__(config, 2, **kwargs)

    def call(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Return logits `start` and `end`, `(B, L)`, MASKED_SCORE at padding."""
        scores_BL2, is_token_BL = self.token_scores(inputs, training, seed)
        return {
            name: tf.where(is_token_BL, scores_BL2[:, :, number], MASKED_SCORE)
            for number, name in enumerate(("start", "end"))
        }


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
    fault_of_unused = "whose answer is not in the context"

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
        for name in ("doc_stride", "max_query_length", "max_answer_length"):
            check_positive(name, getattr(self, name))
        num_others = self.max_query_length + 3
        if self.max_seq_length <= num_others:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at least {num_others + 1}, for "
                f"--max_query_length={self.max_query_length}, 3 special tokens and 1 token of a "
                "context"
            )

    @property
    def tunable_fields(self) -> dict[str, tuple[int, ...]]:
        """The no-answer threshold, if questions may have no answer."""
        return {"null_threshold": ()} if self.may_be_impossible else {}

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

    def check_dev(self, examples: Examples, name: str = "--dev: the first file") -> list[str]:
        """Return a warning if the questions cannot tune the no-answer threshold."""
        found = {bool(answers) for answers in examples.labels}
        if not self.may_be_impossible or len(found) != 1:
            return []
        which = "all questions have" if found == {True} else "no question has"
        return [f"{which} an answer: the no-answer threshold cannot be tuned and is 0"]

    def tune(self, data: EncodedExamples, outputs: Arrays) -> "QuestionAnsweringTask":
        """Return the task with the no-answer threshold of the best F1 on this data.

        It is 0, the released one, if all or none of the questions have an answer: that with the
        best F1 would then be beyond all scores.
        """
        if not self.may_be_impossible:
            return self
        if self.check_dev(data.examples):
            return dataclasses.replace(self, null_threshold=RELEASED_THRESHOLD)
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

        rows = {"question": ["Who left?"], "context": ["Anna left Rome."]}
        model = QuestionAnswerer.from_pretrained(PATH)
        model.fit(rows, [[{"text": "Anna", "start": 0}]], epochs=1)
        model.predict_rows(rows)[0]["answer"]

    Options of `from_pretrained`:
        doc_stride: Tokens between the starts of two windows.
        max_query_length: Maximum tokens per question.
        max_answer_length: Maximum tokens per answer.
        may_be_impossible: Whether questions may have no answer.

    Rows have the columns question and context. Labels of `fit` are, per question, a list of
    {"text", "start"}, of which the first is trained; with `may_be_impossible`, [] means no answer.
    """

    task_class = QuestionAnsweringTask
    options = ("doc_stride", "max_query_length", "max_answer_length", "may_be_impossible")
