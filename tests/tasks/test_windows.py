"""Windows of long texts: literals, and token by token against the released loops."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.text.tokenizer import Tokens
from tasks.base.task_types import default_settings
from tasks.data.windows import MAX_WINDOW_TOKENS, pack_windows
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.tagging import TaggingTask
from tests.conftest import ROOT


def ragged(*rows):
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def with_offsets(*rows):
    """Return tokens of which the n-th of a text covers the characters from 3n to 3n + 2."""
    starts = [[3 * position for position in range(len(row))] for row in rows]
    return Tokens(
        ragged(*rows), ragged(*starts), ragged(*[[start + 2 for start in row] for row in starts])
    )


def looped_spans(length, room, doc_stride):
    """Return (start, length) of each window, computed by a loop; an empty text has one."""
    spans, start = [(0, min(length, room))], 0
    while sum(spans[-1]) < length:
        start += min(spans[-1][1], doc_stride)
        spans.append((start, min(length - start, room)))
    return spans


def looped_best(spans, token):
    """Return the number of the window in which a token has the most context."""
    best_score, best = None, None
    for number, (start, length) in enumerate(spans):
        if start <= token < start + length:
            right = start + length - 1 - token
            score = min(token - start, right) + 0.01 * length
            if best_score is None or score > best_score:
                best_score, best = score, number
    return best


def test_windows_of_a_single_text(vocabulary):
    windows = pack_windows(None, Tokens(ragged([5, 6, 7, 8, 9, 10], [], [5])), vocabulary, 6, 2)
    assert windows.packed.input_ids.to_list() == [
        [2, 5, 6, 7, 8, 3],
        [2, 7, 8, 9, 10, 3],
        [2, 3],
        [2, 5, 3],
    ]
    assert windows.packed.segment_ids.to_list() == [[0] * 6, [0] * 6, [0, 0], [0, 0, 0]]
    assert windows.packed.starts is None and windows.packed.ends is None
    assert windows.example_W.numpy().tolist() == [0, 0, 1, 2]
    assert windows.begin_W.numpy().tolist() == [0, 2, 0, 0]
    assert windows.offset_W.numpy().tolist() == [1, 1, 1, 1]
    # 7 has one token left and two right of it in the first window, none left in the second; 8 has
    # one on its shorter side in the second, none in the first.
    assert windows.is_max_context.to_list() == [
        [False, True, True, True, False, False],
        [False, False, True, True, True, False],
        [False, False],
        [False, True, False],
    ]


def test_windows_after_a_question_that_is_truncated(vocabulary):
    questions, texts = with_offsets([20, 21, 22], []), with_offsets([5, 6, 7, 8, 9], [10])
    windows = pack_windows(questions, texts, vocabulary, 8, 128, max_first=2)
    assert windows.packed.input_ids.to_list() == [
        [2, 20, 21, 3, 5, 6, 7, 3],
        [2, 20, 21, 3, 8, 9, 3],
        [2, 3, 10, 3],
    ]
    assert windows.packed.segment_ids.to_list() == [
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1],
    ]
    assert windows.packed.starts.to_list() == [
        [-1, 0, 3, -1, 0, 3, 6, -1],
        [-1, 0, 3, -1, 9, 12, -1],
        [-1, -1, 0, -1],
    ]
    assert windows.packed.ends.to_list() == [
        [-1, 2, 5, -1, 2, 5, 8, -1],
        [-1, 2, 5, -1, 11, 14, -1],
        [-1, -1, 2, -1],
    ]
    assert windows.example_W.numpy().tolist() == [0, 0, 1]
    assert windows.begin_W.numpy().tolist() == [0, 3, 0]
    assert windows.offset_W.numpy().tolist() == [4, 4, 2]
    assert windows.is_max_context.to_list() == [
        [False] * 4 + [True] * 3 + [False],
        [False] * 4 + [True] * 2 + [False],
        [False, False, True, False],
    ]
    uncut = pack_windows(questions, texts, vocabulary, 8, 128)
    assert uncut.packed.input_ids[0].numpy().tolist() == [2, 20, 21, 22, 3, 5, 6, 3]


def check(windows, questions, texts, max_seq_length, doc_stride, max_first):
    """Compare every token of every window with the loops."""
    expected = []
    for example, text in enumerate(texts):
        head = [] if questions is None else [*questions[example][:max_first], 3]
        spans = looped_spans(len(text), max_seq_length - len(head) - 2, doc_stride)
        best = [looped_best(spans, token) for token in range(len(text))]
        for number, (start, length) in enumerate(spans):
            inside = range(start, start + length)
            expected.append(
                (
                    [2, *head, *(text[token] for token in inside), 3],
                    [0] * (len(head) + 1) + [int(questions is not None)] * (length + 1),
                    [False] * (len(head) + 1)
                    + [best[token] == number for token in inside]
                    + [False],
                    [-1] * (len(head) + 1) + [3 * token for token in inside] + [-1],
                    example,
                    start,
                    len(head) + 1,
                )
            )
    starts = windows.packed.starts.to_list()
    for row, offset in enumerate(windows.offset_W.numpy()):
        # Tokens of the question have offsets into the question.
        starts[row][:offset] = [-1] * offset
    found = zip(
        windows.packed.input_ids.to_list(),
        windows.packed.segment_ids.to_list(),
        windows.is_max_context.to_list(),
        starts,
        windows.example_W.numpy(),
        windows.begin_W.numpy(),
        windows.offset_W.numpy(),
        strict=True,
    )
    assert list(found) == expected


@pytest.mark.slow
def test_thousands_of_random_texts_equal_the_released_loops(vocabulary):
    rng = np.random.default_rng(0)
    for case in range(25):
        max_seq_length, doc_stride = int(rng.integers(8, 40)), int(rng.integers(1, 30))
        max_first = int(rng.integers(0, max_seq_length - 3))
        rows = [
            [rng.integers(5, 30, size).tolist() for size in rng.integers(0, most, 80)]
            for most in (2 * max_first + 1, 70)
        ]
        questions, texts = (None, rows[1]) if case % 3 == 0 else rows
        windows = pack_windows(
            None if questions is None else with_offsets(*questions),
            with_offsets(*texts),
            vocabulary,
            max_seq_length,
            doc_stride,
            max_first,
        )
        check(windows, questions, texts, max_seq_length, doc_stride, max_first)


def test_long_texts_other_batches_and_none_share_one_graph(vocabulary):
    ragged_2d = tf.RaggedTensorSpec([None, None], tf.int32)
    function = tf.function(
        lambda *rows: pack_windows(Tokens(*rows[:3]), Tokens(*rows[3:]), vocabulary, 384, 128, 63),
        input_signature=[ragged_2d] * 6,
        autograph=False,
    )
    rng = np.random.default_rng(1)
    # Of 840 tokens the last window has 200, each other one 318. Token 735 has 95 tokens before it
    # in the last one and 94 after it in the previous one, which is chosen as it is longer.
    for lengths in ([20_000], [0, 3, 840], []):
        texts = [rng.integers(5, 30, length).tolist() for length in lengths]
        questions = [[7] * 100 for _ in texts]
        windows = function(*with_offsets(*questions)[:3], *with_offsets(*texts)[:3])
        check(windows, questions, texts, 384, 128, 63)
    assert function.experimental_get_tracing_count() == 1


def test_the_documented_part_of_a_longer_text_is_read(vocabulary):
    page = (ROOT / "docs/request-limits.md").read_text(encoding="utf-8")
    qa, tagging = (default_settings(kind)["max_seq_length"] for kind in ("span_qa", "tagging"))
    text = Tokens(tf.RaggedTensor.from_row_lengths(tf.fill([600_000], 5), [600_000]))
    for task, question in (
        (QuestionAnsweringTask(max_seq_length=qa), Tokens(ragged([7] * 64))),
        (TaggingTask.from_options(max_seq_length=tagging, labels=["name"]), None),
    ):
        size = task.max_seq_length
        windows = pack_windows(question, text, vocabulary, size, task.doc_stride)
        count = MAX_WINDOW_TOKENS // size
        assert windows.packed.input_ids.row_lengths().numpy().tolist() == [size] * count
        read = int(tf.math.count_nonzero(windows.is_max_context.flat_values))
        assert f"reads the first {read:,} tokens" in page and f"{count:,} windows of {size}" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((20, 8, 17), "max_seq_length 20: expected at least 21, for 17 question tokens, 3 special"),
        ((3, 8), "max_seq_length 3: expected at least 4, for 3 special tokens"),
        ((20, 0), "doc_stride 0: expected an integer >= 1"),
    ],
)
def test_windows_without_space_or_stride_are_rejected(vocabulary, arguments, message):
    with pytest.raises(UserError, match=message):
        pack_windows(Tokens(ragged([5])), Tokens(ragged([5])), vocabulary, *arguments)
    with pytest.raises(UserError, match="max_seq_length 2"):
        pack_windows(None, Tokens(ragged([5])), vocabulary, 2, 1)
