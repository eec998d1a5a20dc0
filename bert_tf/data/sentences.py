"""Tokenize documents into one array of token ids with sentence and document boundaries."""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import nupunkt
import tensorflow as tf

from bert_tf.data import documents
from bert_tf.text.tokenizer import Tokenizer

BATCH_BYTES = 1 << 19  # Text per tokenizer call. Larger batches are slower due to cache misses.

# Sentence ends in Chinese, Japanese, Indic and Arabic scripts, which nupunkt does not know.
_FULL_STOP = re.compile("(?<=[\u3002\uff01\uff1f\u0964\u0965\u061f\u06d4])(?=.)")


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """The D documents and S sentences of a shard, without those that have no tokens.

    Attributes:
        ids: int32 `(T,)`, token ids.
        sentence_splits: int64 `(S + 1,)`, row splits of `ids`.
        document_splits: int64 `(D + 1,)`, row splits of the sentences.
    """

    ids: np.ndarray
    sentence_splits: np.ndarray
    document_splits: np.ndarray

    def __len__(self) -> int:
        return len(self.document_splits) - 1


def tokenize_documents(
    spans: Iterable[tuple[str, int, int]], input_format: str, text_field: str, tokenizer: Tokenizer
) -> TokenizedDocuments:
    """Read and tokenize documents.

    Args:
        spans: Path, offset and length in bytes of each document.
        input_format: See `documents.spans`.
        text_field: Key of the text in "jsonl".
        tokenizer: The tokenizer.

    Raises:
        UserError: If a file was changed after it was indexed.
    """
    sentences: list[str] = []  # Of the current batch.
    sentences_of_documents: list[int] = []
    # Token ids, and tokens per sentence, of each batch.
    ids, lengths, num_bytes = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], 0

    def flush():
        nonlocal num_bytes
        tokens = tokenizer.tokenize(tf.constant(sentences, tf.string)).ids
        ids.append(tokens.flat_values.numpy())
        lengths.append(tokens.row_lengths().numpy())
        sentences.clear()
        num_bytes = 0

    for path, offset, length in spans:
        lines = documents.read(path, offset, length, input_format, text_field)
        found = lines if input_format == "lines" else split_sentences(lines)
        found = [sentence for sentence in found if sentence]
        sentences_of_documents.append(len(found))
        for begin in range(0, len(found), 16):  # A document may be larger than a batch.
            sentences += found[begin : begin + 16]
            num_bytes += sum(map(len, found[begin : begin + 16]))
            if num_bytes >= BATCH_BYTES:
                flush()
    if sentences:
        flush()
    sizes = np.concatenate(lengths)
    num_documents = len(sentences_of_documents)
    owners = np.repeat(np.arange(num_documents), sentences_of_documents)[sizes > 0]
    counts = np.bincount(owners, minlength=num_documents)
    return TokenizedDocuments(
        np.concatenate(ids), _splits(sizes[sizes > 0]), _splits(counts[counts > 0])
    )


def split_sentences(lines: Iterable[str]) -> list[str]:
    """Split running text into sentences.

    Paragraphs are split with nupunkt, which knows English abbreviations, and after each full stop
    of other scripts.

    Args:
        lines: Stripped lines. Empty ones separate paragraphs; other line ends become spaces.
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
        for sentence in nupunkt.load("default").tokenize(paragraph)
        for part in _FULL_STOP.split(sentence)
    ]


def _splits(sizes):
    """Return row splits int64 `(n + 1,)` for n row lengths."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
