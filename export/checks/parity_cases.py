"""Requests of the parity check (export/checks/parity.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.model.task_model import TaskModel

# Name of a signature, and strings or lists of strings per input.
Request = tuple[str, Mapping[str, Sequence]]

ADVERSARIAL_TEXTS = (
    b"",
    b" ",
    b" \t\r\n ",
    b"a",
    b"The quick brown fox jumps over the lazy dog.",
    b"UPPER lower MiXeD",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m".encode(),
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m".encode(),  # The same, decomposed (NFD).
    "\u6211\u7231\u5317\u4eac ok \u65e5\u672c\u8a9e".encode(),
    "\ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439".encode(),
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629".encode(),
    "\U0001f600 \U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea".encode(),
    "\u1e9e \u00df \u0130 \u03a3\u03a3".encode(),
    b"[MASK] [CLS] [SEP] [PAD] [UNK]",
    b"The [MASK] of France is [MASK].",
    b"don't stop-me: $100, 50% (ok?)",
    b"\xff\xfe\x00 bad \xc3\x28 bytes \xe2\x82",
    "zero\u200bwidth soft\u00adhyphen \ufeffbom \ufffd".encode(),
    b"x" * 250,
    b"word " * 600,
    "\u00e9".encode() * 300,
    b"a" * (1 << 20),
    b"one megabyte of words " * ((1 << 20) // 22),
)
# Each is sent alone: a single short text has a branch of its own in the graph.
SHORT_TEXTS = (b"The quick brown fox jumps over the lazy dog.", b"a")
# Long texts are split into many windows; with 20,000 bytes the check stays fast.
LONGEST_OF_WINDOWS = 20_000
ROWS_PER_BATCH = 8
WORDS_PER_BATCH = 4096


def requests(
    model: TaskModel, functions: Mapping[str, tf.types.experimental.GenericFunction]
) -> list[Request]:
    """Return the requests that a SavedModel has to answer as the trained model does.

    Those of `text_requests`, and batches of the words of the vocabulary for the tokenizer.
    """
    words = vocabulary_words(model.vocabulary)
    columns = _columns(model.task, model.task.input_names, (words, words))
    tokenized = _batches("tokenize", columns, WORDS_PER_BATCH)
    return text_requests(model, functions) + tokenized


def text_requests(
    model: TaskModel, functions: Mapping[str, tf.types.experimental.GenericFunction]
) -> list[Request]:
    """Return batches of `ADVERSARIAL_TEXTS`, and single `SHORT_TEXTS`, for each function."""
    cases: list[Request] = []
    specs = model.serving.pipeline.signature_specs()
    for signature, function in functions.items():
        inputs = [spec.name for spec in function.input_signature]
        limit = LONGEST_OF_WINDOWS if specs[signature].splits_texts else None
        texts = [text[:limit] for text in ADVERSARIAL_TEXTS]
        for values, size in ((texts, ROWS_PER_BATCH), (SHORT_TEXTS, 1)):
            # If there are two inputs, the second one receives the texts in reverse order.
            columns = _columns(model.task, inputs, (values, values[::-1]))
            cases += _batches(signature, columns, size)
    return cases


def _columns(task, names, orders):
    """Return {input: values}, with one of `orders` for each of the input `names`."""
    return {
        name: in_lists(values) if task.INPUT_RANKS.get(name) == 2 else values
        for name, values in zip(names, orders, strict=False)
    }


def _batches(signature, columns, size):
    return [
        (signature, {name: values[start : start + size] for name, values in columns.items()})
        for start in range(0, len(next(iter(columns.values()))), size)
    ]


def in_lists(values: Sequence[bytes]) -> list[list[bytes]]:
    """Return one list per value, of it and up to two following values, padded with "" to three."""
    lists = (values[first : first + 1 + first % 3] for first in range(len(values)))
    return [[*texts, *[b""] * (3 - len(texts))] for texts in lists]


def vocabulary_words(vocabulary: Vocabulary) -> list[bytes]:
    """Return words that contain every entry: "##" entries follow several first characters."""
    beginnings = [entry for entry in vocabulary.entries if not entry.startswith("##")]
    continuations = [entry[2:] for entry in vocabulary.entries if entry.startswith("##")]
    words = beginnings + [
        first + entry for first in ("a", "q", "7", "zx") for entry in continuations
    ]
    return [word.encode("utf-8") for word in words]
