"""Answer spans: from start and end logits to the text of answers, in the graph.

Valid spans and the no-answer rule follow google-research/bert's run_squad.py (Devlin et al. 2019,
4.2 and 4.3), with three differences: all pairs of start and end are ranked, not only pairs of
n-best positions; answers that differ only in case are merged; an example may have no valid span.

Shape suffixes: B examples, W windows of all examples, L tokens, A tokens of the longest answer, X =
L + A - 1, K candidate spans, N returned spans.
"""

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from tasks.data.substrings import cut_overlapping
from tasks.data.windows import Windows

NO_SPAN = -1e30  # Logit of a missing span: below any real logit, and finite, as JSON requires.
SPANS_PER_ANSWER = 5  # Candidates per returned span, because some have equal texts.


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
    return tf.maximum(start_WK[..., tf.newaxis] + end_WKA, NO_SPAN)


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
