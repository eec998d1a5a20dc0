"""Answers from logits: literals, the released selection in plain Python, and brute force."""

import collections
import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer
from bert_tf.text.tokenizer import Tokens
from tasks.data.windows import pack_windows
from tasks.types.question_answering import (
    NO_SPAN,
    SPANS_PER_ANSWER,
    best_spans,
    select_answer,
)

WORDS = "The the THE Émile émile 😀a b cé x y z cat Cat ÀÉ àé bill".split()
Span = collections.namedtuple("Span", "text start end logit")


def ragged(*rows):
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def tokens_of(texts):
    """Tokenize at spaces; the ids are arbitrary."""
    ids, starts, ends = [], [], []
    for text in texts:
        positions, start = [], 0
        for word in text.split():
            start = text.index(word, start)
            positions.append((start, start + len(word)))
            start += len(word)
        ids.append([5 + position % 20 for position in range(len(positions))])
        starts.append([start for start, _ in positions])
        ends.append([end for _, end in positions])
    return Tokens(ragged(*ids), ragged(*starts), ragged(*ends))


def spans_of_example(start_WL, end_WL, windows, example, context, max_answer_length, n_best=None):
    """Return every span that may be an answer, the best first.

    With `n_best` starts and ends per window, these are the candidates of the released code, which
    first selects the highest of all
    logits of a window and then drops those that are no tokens of the text.
    """
    spans = []
    for w in np.flatnonzero(windows.example_W == example):
        starts, ends = windows.packed.starts[w].numpy(), windows.packed.ends[w].numpy()
        length, is_max_context = len(starts), windows.is_max_context[w].numpy()
        for start in np.argsort(-start_WL[w, :length], kind="stable")[:n_best]:
            for end in np.argsort(-end_WL[w, :length], kind="stable")[:n_best]:
                if end == length - 1 or not is_max_context[start]:
                    continue
                if start <= end < start + max_answer_length:
                    first, last = int(starts[start]), int(ends[end])
                    logit = start_WL[w, start] + end_WL[w, end]
                    spans.append(Span(context[first:last], first, last, logit))
    return sorted(spans, key=lambda span: -span.logit)


def merged(spans, n_best):
    seen, kept = set(), []
    for span in spans:
        if span.text.lower().strip() not in seen:
            seen.add(span.text.lower().strip())
            kept.append(span)
    return kept[:n_best]


def found(best, example):
    """Return the spans of an example in `best_spans`, after checking that the rest is padding."""
    columns = [best[name][example].numpy() for name in ("text", "start", "end", "logit")]
    spans = [Span(text.decode(), *rest) for text, *rest in zip(*columns, strict=True)]
    count = sum(span.start >= 0 for span in spans)
    assert spans[count:] == [Span("", -1, -1, np.float32(NO_SPAN))] * (len(spans) - count)
    return spans[:count]


def random_case(rng, most_words, max_seq_length, num_examples=6):
    contexts = [
        " ".join(rng.choice(WORDS, rng.integers(0, most_words))) for _ in range(num_examples)
    ]
    questions = [" ".join(rng.choice(WORDS, rng.integers(0, 6))) for _ in range(num_examples)]
    windows = pack_windows(
        tokens_of(questions),
        tokens_of(contexts),
        {"[CLS]": 2, "[SEP]": 3},
        max_seq_length,
        int(rng.integers(1, 12)),
        max_first=4,
    )
    lengths = windows.packed.input_ids.row_lengths().numpy()
    logits = rng.normal(0, 3, (2, len(lengths), lengths.max() + rng.integers(0, 4)))
    # The logits of padding are large and must have no effect.
    logits[:, np.arange(logits.shape[2]) >= lengths[:, np.newaxis]] = 1e6
    return contexts, windows, *logits.astype(np.float32)


def test_infinite_logits_give_no_span_beyond_the_text():
    context = "a b x"
    windows = pack_windows(
        tokens_of(["y"]), tokens_of([context]), {"[CLS]": 2, "[SEP]": 3}, 12, 3, max_first=4
    )
    shape = windows.packed.input_ids.bounding_shape()
    best = best_spans(
        tf.fill(shape, np.inf), tf.zeros(shape), windows, tf.constant([context]), 4, 3
    )
    spans = [(span.start, span.end) for span in found(best, 0)]
    assert spans and all(0 <= start < end <= len(context) for start, end in spans)


def test_the_best_spans_of_eight_words_by_hand():
    context = "le café, the cat saw The Cat"
    text = Tokens(
        ragged([5, 6, 7, 8, 9, 10, 11, 12]),
        ragged([0, 3, 7, 9, 13, 17, 21, 25]),
        ragged([2, 7, 8, 12, 16, 20, 24, 28]),
    )
    # Two windows: [CLS] le café , the cat saw [SEP] and [CLS] the cat saw The Cat [SEP]. The first
    # has most context for le, café, ",", the and cat; the second for saw, The and Cat.
    windows = pack_windows(None, text, {"[CLS]": 2, "[SEP]": 3}, 8, 3)
    start = tf.constant([[1, 0, 4, 0, 2, 0, 9, 9], [2, 9, 9, 0, 1, 0, 9, 9]], tf.float32)
    end = tf.constant([[1, 0, 3, 0, 0, 2, 0, 9], [0, 0, 0, 0, 0, 4, 9, 9]], tf.float32)
    best = best_spans(start, end, windows, tf.constant([context]), 4, max_answer_length=2)
    assert found(best, 0) == [
        Span("café", 3, 7, 7),
        Span("The Cat", 21, 28, 5),  # Equal to "the cat", whose logit is 4.
        Span("café,", 3, 8, 4),
        Span("Cat", 25, 28, 4),
    ]
    assert best["null_logit"].numpy() == [2]

    def softmax(*logits):
        return np.exp(logits) / np.exp(logits).sum()

    always = {name: value.numpy()[0] for name, value in select_answer(best).items()}
    assert (always["answer"].decode(), always["start"], always["end"]) == ("café", 3, 7)
    assert always["no_answer_score"] == -5
    np.testing.assert_allclose(always["nbest_score"], softmax(7, 5, 4, 4), rtol=1e-5)
    np.testing.assert_allclose(always["score"], softmax(7, 5, 4, 4)[0], rtol=1e-5)
    assert [text.decode() for text in always["nbest_answer"]] == ["café", "The Cat", "café,", "Cat"]
    assert always["nbest_start"].tolist() == [3, 21, 3, 25]
    assert always["nbest_end"].tolist() == [7, 28, 8, 28]

    for threshold, answer, scored in ((-5.0, ("café", 3, 7), 0), (-5.5, ("", -1, -1), 4)):
        sometimes = {
            name: value.numpy()[0] for name, value in select_answer(best, threshold).items()
        }
        found_answer = sometimes["answer"].decode(), sometimes["start"], sometimes["end"]
        assert found_answer == answer
        expected = softmax(7, 5, 4, 4, 2)
        np.testing.assert_allclose(sometimes["nbest_score"], expected[:4], rtol=1e-5)
        np.testing.assert_allclose(sometimes["score"], expected[scored], rtol=1e-5)
        assert sometimes["no_answer_score"] == -5


@pytest.mark.slow
def test_random_spans_equal_the_released_selection():
    """Use windows of at most n_best tokens, in which the released code misses no span."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        contexts, windows, start, end = random_case(rng, 50, max_seq_length=20)
        longest = int(rng.integers(1, 8))
        best = best_spans(start, end, windows, tf.constant(contexts), 20, longest)
        answers = {name: value.numpy() for name, value in select_answer(best, 0.5).items()}
        for example, context in enumerate(contexts):
            expected = merged(
                spans_of_example(start, end, windows, example, context, longest, n_best=20), 20
            )
            assert found(best, example) == expected

            null = (start + end)[windows.example_W == example, 0].min()
            logits = np.array([*(span.logit for span in expected), null], np.float64)
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            difference = null - expected[0].logit if expected else np.inf
            is_null = difference > 0.5
            assert answers["answer"][example].decode() == ("" if is_null else expected[0].text)
            assert (answers["start"][example] == -1) == is_null == (answers["end"][example] == -1)
            np.testing.assert_allclose(
                [answers["score"][example], *answers["nbest_score"][example]],
                [scores[-1 if is_null else 0], *scores[:-1], *[0] * (20 - len(expected))],
                rtol=1e-4,
            )
            assert np.isfinite(answers["no_answer_score"][example])
            if expected:
                assert answers["no_answer_score"][example] == difference


@pytest.mark.slow
def test_no_span_of_long_windows_is_missed():
    rng = np.random.default_rng(1)
    num_better = 0
    for _ in range(15):
        contexts, windows, start, end = random_case(rng, 120, max_seq_length=60, num_examples=3)
        best = best_spans(start, end, windows, tf.constant(contexts), 4, 5)
        for example, context in enumerate(contexts):
            case = start, end, windows, example, context, 5
            spans = found(best, example)
            assert spans == merged(spans_of_example(*case)[: SPANS_PER_ANSWER * 4], 4)
            released = merged(spans_of_example(*case, n_best=4), 4)
            assert len(spans) >= len(released)
            for ours, theirs in zip(spans, released, strict=False):
                assert ours.logit >= theirs.logit
                num_better += ours.logit > theirs.logit
    assert num_better


def test_answers_are_substrings_of_the_text_as_sent(vocabulary):
    contexts = [
        "😀 E\u0301mile\u00a0à la THE  bill".encode(),
        b"\xff\xfe caf\xe9 \xf0\x9f the \xe4\xb8\xad bill",
        "\ufeff\x00the bill\u200b, cafe\u0301!".encode(),
    ]
    long = Tokenizer(vocabulary, True).tokenize_with_offsets(tf.constant(contexts))
    windows = pack_windows(None, long, vocabulary, 6, 2)
    shape = windows.packed.input_ids.to_tensor().shape
    start, end = np.random.default_rng(2).normal(size=(2, *shape)).astype(np.float32)
    best = best_spans(start, end, windows, tf.constant(contexts))
    for example, context in enumerate(contexts):
        context = context.decode("utf-8", "replace")
        texts = [span.text for span in found(best, example)]
        assert texts == [context[span.start : span.end] for span in found(best, example)]
        assert len(texts) > 5 and len({text.lower() for text in texts}) == len(texts)


def test_answers_that_differ_in_space_and_case_are_equal():
    """Use offsets that include spaces, which those of this tokenizer never do."""
    context = "Ünal  ÜNAL x"
    long = Tokens(ragged([5, 6, 7]), ragged([0, 5, 11]), ragged([5, 10, 12]))
    windows = pack_windows(None, long, {"[CLS]": 2, "[SEP]": 3}, 8, 8)
    logits = np.array([[0, 1, 3, 2, 0]], np.float32)
    best = best_spans(logits, logits, windows, tf.constant([context]), max_answer_length=1)
    assert found(best, 0) == [Span(" ÜNAL", 5, 10, 6), Span("x", 11, 12, 4)]


@pytest.mark.parametrize("null_threshold", [None, 0.0])
def test_examples_without_any_span_have_no_answer(null_threshold):
    contexts = ["", "bill", " "]
    windows = pack_windows(
        tokens_of(["x y", "", ""]), tokens_of(contexts), {"[CLS]": 2, "[SEP]": 3}, 9, 3, 3
    )
    logits = np.ones(windows.packed.input_ids.to_tensor().shape, np.float32)
    best = best_spans(logits, logits, windows, tf.constant(contexts), n_best=2)
    assert [len(found(best, example)) for example in range(3)] == [0, 1, 0]
    answers = {
        name: value.numpy().tolist() for name, value in select_answer(best, null_threshold).items()
    }
    assert answers["answer"] == [b"", b"bill", b""]
    assert (answers["start"], answers["end"]) == ([-1, 0, -1], [-1, 4, -1])
    no_span, one_span = (0, 1) if null_threshold is None else (1, 0.5)
    np.testing.assert_allclose(answers["score"], [no_span, one_span, no_span])
    np.testing.assert_allclose(answers["nbest_score"], [[0, 0], [one_span, 0], [0, 0]])
    assert answers["no_answer_score"][1] == 0 and answers["no_answer_score"][0] > 1e29
    assert json.dumps(answers["no_answer_score"], allow_nan=False)


@pytest.mark.slow
def test_one_graph_for_any_number_of_texts_is_exported(tmp_path, vocabulary):
    tokenizer = Tokenizer(vocabulary, True)
    texts = tf.TensorSpec([None], tf.string)

    def answer(question, context):
        windows = pack_windows(
            tokenizer.tokenize_with_offsets(question),
            tokenizer.tokenize_with_offsets(context),
            vocabulary,
            max_seq_length=10,
            doc_stride=3,
            max_first=4,
        )
        ids_WL = windows.packed.input_ids.to_tensor(0)
        start_WL, end_WL = (tf.cast(ids_WL * by % 31, tf.float32) / 8 for by in (11, 17))
        return select_answer(best_spans(start_WL, end_WL, windows, context, n_best=3), 0.0)

    module = tf.Module()
    module.answer = tf.function(answer, input_signature=[texts] * 2, autograph=False)
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.answer})
    served = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    context = "é😀 The screen is broken, the app does not open! My bill is too high"
    for questions, contexts in (
        (["what is broken?", "", "the"], [context, "", "中"]),
        (["the bill"], [context]),
        ([], []),
    ):
        questions, contexts = tf.constant(questions, tf.string), tf.constant(contexts, tf.string)
        answers = served(question=questions, context=contexts)
        for name, value in answer(questions, contexts).items():
            np.testing.assert_array_equal(answers[name], value, err_msg=name)
            assert answers[name].shape[0] == len(contexts)
            assert name[:6] != "nbest_" or answers[name].shape[1] == 3
    assert module.answer.experimental_get_tracing_count() == 1
