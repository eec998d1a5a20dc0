"""Documents as token ids: sentence after sentence in one array, and where each ends."""

import dataclasses
import re

import numpy as np
import nupunkt
import tensorflow as tf

from bert_tf.data import documents

BATCH_BYTES = 1 << 19  # Of text, to tokenize at a time: more is slower, since caches are small.

_FULL_STOP = re.compile("(?<=[\u3002\uff01\uff1f\u0964\u0965\u061f\u06d4])(?=.)")


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """The documents of a shard that have tokens, those of their sentences that have.

    ids int32 [T]; sentence_splits int64 [S + 1] into ids; document_splits int64 [D + 1] into
    sentences.
    """

    ids: np.ndarray
    sentence_splits: np.ndarray
    document_splits: np.ndarray

    def __len__(self):
        return len(self.document_splits) - 1


def tokenize_documents(spans, input_format, text_field, tokenizer):
    """Reads documents (path, offset, length) and tokenizes them -> TokenizedDocuments."""
    sentences, sizes, counts = [], [], []  # Of a batch: strings; of all: tokens, sentences.
    ids, num_bytes = [np.zeros(0, np.int32)], 0

    def flush():
        nonlocal num_bytes
        tokens = tokenizer.tokenize(tf.constant(sentences, tf.string)).ids
        ids.append(tokens.flat_values.numpy())
        sizes.append(tokens.row_lengths().numpy())
        sentences.clear()
        num_bytes = 0

    for path, offset, length in spans:
        count = 0
        lines = documents.read(path, offset, length, input_format, text_field)
        for sentence in lines if input_format == "lines" else split_sentences(lines):
            if not sentence:
                continue
            sentences.append(sentence)
            count += 1
            num_bytes += len(sentence)
            if num_bytes >= BATCH_BYTES:
                flush()
        counts.append(count)
    if sentences:
        flush()
    sizes = np.concatenate([np.zeros(0, np.int64), *sizes])
    owners = np.repeat(np.arange(len(counts)), counts)[sizes > 0]
    counts = np.bincount(owners, minlength=len(counts))
    return TokenizedDocuments(
        np.concatenate(ids), _splits(sizes[sizes > 0]), _splits(counts[counts > 0])
    )


def split_sentences(lines):
    """The sentences of running text, whose paragraphs are separated by blank lines.

    A line end inside a paragraph is a space, as wrapped text wants it. By nupunkt, which knows
    English abbreviations; where a script has full stops of its own, every one ends a sentence.
    """
    paragraphs, current = [], []
    for line in [*lines, ""]:
        if line:
            current.append(line)
        elif current:
            paragraphs.append(" ".join(current))
            current = []
    return [
        part
        for paragraph in paragraphs
        for sentence in nupunkt.sent_tokenize(paragraph)
        for part in _FULL_STOP.split(sentence)
    ]


def _splits(sizes):
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
