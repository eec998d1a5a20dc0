"""Answers: from the logits of where a span starts and ends to text, inside the graph.

What may be an answer, and when there is none, is as in google-research/bert's run_squad.py (Devlin
et al. 2019, 4.2 and 4.3). Better than there: no span is lost because its start or end alone is not
among the best; "The cat" and "the cat" are one answer; an example may be without any span.

Legend: B examples, W windows of all of them, L tokens, A tokens of the longest answer, K spans
that are compared, N spans that are returned.
"""

import tensorflow as tf

NO_SPAN = -1e30  # The logit where there is no span: less than any, and a number JSON can write.
WIDER_FROM = (0x80, 0x800, 0x10000)  # From each of these on a character takes a byte more.
SPANS_PER_ANSWER = 5  # How many spans are compared for each that is returned, since some are equal.


def best_spans(start_logits, end_logits, windows, contexts, n_best=20, max_answer_length=30):
    """Logits float32 [W, L] of Windows, their contexts string [B] -> the best answers.

    A span starts where `windows.is_max_context`, ends in the same window and has at most
    `max_answer_length` tokens; its logit is the sum of both. Of an example's SPANS_PER_ANSWER *
    n_best best spans, those whose text differs in nothing but case and space around it count as one
    with the logit of the best. Logits behind a window's end are not looked at. The windows must
    have offsets.

    Returns, the best first: text string, start, end int32, logit float32, all [B, n_best] and
    padded with "", -1, -1, NO_SPAN, so that context[start:end] == text; bytes that are no UTF-8 are
    one character each time bytes.decode("utf-8", "replace") makes one of them. And null_logit [B],
    the least of both logits of a window's [CLS].
    """
    num_spans = SPANS_PER_ANSWER * n_best
    example_W, num_examples = windows.example_W, tf.size(contexts)
    logit_WK, first_WK, last_WK = _spans_of_windows(
        start_logits, end_logits, windows, num_spans, max_answer_length
    )

    def of_examples(values_WK, default):
        values = tf.RaggedTensor.from_value_rowids(
            values_WK, tf.cast(example_W, tf.int64), tf.cast(num_examples, tf.int64), validate=False
        ).to_tensor(default)
        size = tf.reduce_prod(tf.shape(values)[1:])
        values = tf.reshape(values, [num_examples, size])
        return tf.pad(values, [[0, 0], [0, num_spans]], constant_values=default)

    logit_BK, chosen_BK = tf.math.top_k(of_examples(logit_WK, NO_SPAN), num_spans)

    def offset(offsets, token_WK):
        token_BK = tf.gather(of_examples(token_WK, 0), chosen_BK, batch_dims=1)
        return tf.where(logit_BK > NO_SPAN, tf.gather(offsets.flat_values, token_BK), -1)

    start_BK = offset(windows.packed.starts, first_WK)
    end_BK = offset(windows.packed.ends, last_WK)
    text_BK = _cut(contexts, start_BK, end_BK)
    logit_BK = tf.where(_is_new(text_BK), logit_BK, NO_SPAN)
    logit_BN, chosen_BN = tf.math.top_k(logit_BK, n_best)

    def of_best(values_BK, default):
        return tf.where(logit_BN > NO_SPAN, tf.gather(values_BK, chosen_BN, batch_dims=1), default)

    null_W = tf.reduce_sum(start_logits[:, :1] + end_logits[:, :1], axis=1)
    return {
        "text": of_best(text_BK, ""),
        "start": of_best(start_BK, -1),
        "end": of_best(end_BK, -1),
        "logit": logit_BN,
        "null_logit": tf.math.unsorted_segment_min(null_W, example_W, num_examples),
    }


def select_answer(best, null_threshold=None):
    """What `best_spans` found -> the answer that is given, and how sure it is.

    `null_threshold` None: a model that always answers. Otherwise there is no answer where
    no_answer_score, the null logit less that of the best span, is above it. Without an answer, so
    also where there is no span at all, answer is "", start and end -1.

    Returns answer string, start, end int32, score, no_answer_score float32 [B]; nbest_answer,
    nbest_start, nbest_end, nbest_score [B, N], padded with "", -1, -1, 0. Scores are the softmax of
    the spans' logits and, unless the model always answers, of the null logit: what the nbest_score
    of an example lack to 1 is then the score of no answer. `score` is that of what is answered; 0
    where a model that always answers has no span.
    """
    has_span_BN = best["start"] >= 0
    null_B = best["null_logit"]
    no_answer_score_B = null_B - best["logit"][:, 0]
    is_answered_B = has_span_BN[:, 0]
    # Without a null logit this column, like the padding, is as good as none beside a span.
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


def _spans_of_windows(start_WL, end_WL, windows, num_spans, max_answer_length):
    """The best spans of each window, [W, K] each: logits, first tokens, last tokens.

    Tokens are numbered through all windows, 0 if there is no span; K is at most num_spans.
    """
    num_windows, length = tf.unstack(tf.shape(start_WL))
    row_splits = tf.cast(windows.packed.input_ids.row_splits, tf.int32)
    size_W = row_splits[1:] - row_splits[:-1] - 1  # Without the last [SEP].
    is_start_WL = windows.is_max_context.to_tensor(False, shape=tf.shape(start_WL, tf.int64))

    # A span is among the K best only if its start is among the K whose best spans are the best.
    end_WL = tf.where(tf.range(length) < size_W[:, tf.newaxis], end_WL, NO_SPAN)
    end_WL = tf.pad(end_WL, [[0, 0], [0, max_answer_length - 1]], constant_values=NO_SPAN)
    best_end_WL = tf.nn.max_pool1d(end_WL[..., tf.newaxis], max_answer_length, 1, "VALID")[..., 0]
    start_WL = tf.where(is_start_WL, start_WL, NO_SPAN)
    first_WK = tf.math.top_k(start_WL + best_end_WL, tf.minimum(num_spans, length)).indices
    last_WKA = first_WK[..., tf.newaxis] + tf.range(max_answer_length)
    logit_WKA = tf.gather(start_WL, first_WK, batch_dims=1)[..., tf.newaxis] + tf.gather(
        end_WL, last_WKA, batch_dims=1
    )
    logit_WKA = tf.maximum(logit_WKA, NO_SPAN)

    num_compared = tf.reduce_prod(tf.shape(logit_WKA)[1:])
    logit_WK, chosen_WK = tf.math.top_k(
        tf.reshape(logit_WKA, [num_windows, num_compared]), tf.minimum(num_spans, num_compared)
    )
    first_WK = tf.gather(first_WK, chosen_WK // max_answer_length, batch_dims=1)
    first_WK += row_splits[:-1, tf.newaxis]
    last_WK = first_WK + chosen_WK % max_answer_length
    is_span_WK = logit_WK > NO_SPAN
    return logit_WK, tf.where(is_span_WK, first_WK, 0), tf.where(is_span_WK, last_WK, 0)


def _cut(texts, start_BK, end_BK):
    """The characters of texts [B] from start to end -> string [B, K].

    Characters are counted as the tokenizer counts them. The cut is made in bytes: with many spans
    of one long word, code points would take twelve times the memory.
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


def _is_new(text_BK):
    """Is none of the texts before it in its row the same but for case and space around it?"""
    text_BK = tf.strings.strip(tf.strings.lower(text_BK, encoding="utf-8"))
    row_B1 = tf.strings.as_string(tf.range(tf.shape(text_BK)[0]))[:, tf.newaxis]
    texts = tf.reshape(row_B1 + " " + text_BK, [-1])
    unique = tf.unique(texts)
    positions = tf.range(tf.size(texts))
    first = tf.math.unsorted_segment_min(positions, unique.idx, tf.size(unique.y))
    return tf.reshape(tf.gather(first, unique.idx) == positions, tf.shape(text_BK))
