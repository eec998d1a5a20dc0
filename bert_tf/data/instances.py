"""Tokenize documents and build instances: pairs of segments for next sentence prediction, or texts.

Follows google-research/bert, create_pretraining_data.py (Devlin et al. 2019, A.2). A segment is
always a range of consecutive tokens of one document, so an instance is four integers and a label.
"""

import bisect
import dataclasses
import itertools
import random
import re
from array import array
from collections.abc import Iterable

import numpy as np
import nupunkt
import tensorflow as tf

from bert_tf.data.documents import read as read_document
from bert_tf.data.sharded_output import Span
from bert_tf.errors import UserError
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.text.vocabulary import Vocabulary

NUM_SPECIALS = 3  # [CLS] A [SEP] B [SEP]
BATCH_BYTES = 1 << 19  # Text per tokenizer call. Larger batches are slower due to cache misses.

# Marks that end a sentence, which nupunkt does not know: Chinese and Japanese, Devanagari, Arabic,
# Armenian, Ethiopic, Burmese and Khmer ones. U+FF0E is also a decimal point.
_STOP = (
    "(?:[\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u0589\u1362\u1367\u104b\u17d4\u17d5]"
    r"|(?<!\d)\uff0e)"
)
# Marks after it that belong to the sentence. Only a blank tells that a straight quote closes.
_CLOSING = (
    "[!?)\\]\u2026\u00bb\u2019\u201d\u3009\u300b\u300d\u300f\u3011\u3015\u3017\uff09\uff3d\uff5d\uff63]"
    r"|['\"](?=\s|$)"
)
_SENTENCE = re.compile(f".*?{_STOP}(?:{_STOP}|{_CLOSING})*|.+")


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """The D documents and S sentences of a shard, without those that have no tokens."""

    ids: np.ndarray  # int32 `(T,)`, token ids.
    sentence_splits: np.ndarray  # int64 `(S + 1,)`, row splits of `ids`.
    document_splits: np.ndarray  # int64 `(D + 1,)`, row splits of the sentences.
    # Also of documents without tokens.
    token_counts: TokenCounts = dataclasses.field(default_factory=TokenCounts)

    def __len__(self) -> int:
        return len(self.document_splits) - 1


def tokenize_documents(
    spans: Iterable[Span],
    input_format: str,
    text_field: str,
    tokenizer: Tokenizer,
    splits_sentences: bool = True,
) -> TokenizedDocuments:
    """Read and tokenize documents.

    `spans` are path, offset and length in bytes of each document. The format is as in
    `documents.spans`. Unless it splits sentences, a line is one, as in "lines".

    Raises:
        UserError: If a file was changed after it was indexed.
    """
    sentences: list[str] = []  # Of the current batch.
    sentences_of_documents = array("q")
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
        lines = read_document(path, offset, length, input_format, text_field)
        is_split = input_format == "lines" or not splits_sentences
        found = lines if is_split else split_sentences(lines)
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
    all_ids = np.concatenate(ids)
    token_counts = TokenCounts(
        texts=num_documents,
        empty=int(np.sum(counts == 0)),
        tokens=len(all_ids),
        unknown=int(np.sum(all_ids == tokenizer.vocabulary["[UNK]"])),
    )
    return TokenizedDocuments(
        all_ids, _splits(sizes[sizes > 0]), _splits(counts[counts > 0]), token_counts
    )


def split_sentences(lines: Iterable[str]) -> list[str]:
    """Split running text into sentences.

    Paragraphs are split with nupunkt, which knows English abbreviations, and after the full stops
    of other scripts, with the closing marks that follow. Empty lines separate paragraphs; other
    line ends become spaces.
    """
    return [
        part
        for has_text, paragraph in itertools.groupby(lines, bool)
        if has_text
        for sentence in nupunkt.load("default").tokenize(" ".join(paragraph))
        for part in _SENTENCE.findall(sentence)
    ]


def _splits(sizes):
    """Return row splits int64 `(n + 1,)` for n row lengths."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Instances:
    """N instances: segments A and B as ranges of token indices; B is empty if A is alone."""

    a_begin: np.ndarray  # int64 `(N,)`, index of the first token of A.
    a_end: np.ndarray  # int64 `(N,)`, index after the last token of A.
    b_begin: np.ndarray  # int64 `(N,)`, index of the first token of B.
    b_end: np.ndarray  # int64 `(N,)`, index after the last token of B.
    is_random_next: np.ndarray  # bool `(N,)`, False if B follows A in the text.

    def __len__(self) -> int:
        return len(self.a_begin)

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens per example with [CLS] and a [SEP] per segment, int64 `(N,)`."""
        b_length = self.b_end - self.b_begin
        return self.a_end - self.a_begin + b_length + NUM_SPECIALS - (b_length == 0)

    def rows(self, which: slice | np.ndarray) -> "Instances":
        """Select instances by a slice or an index array."""
        return Instances(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))


def make_texts(
    documents: TokenizedDocuments, *, max_seq_length: int, dupe_factor: int, seed: int
) -> Instances:
    """Build the instances without next sentences of the documents of a shard, in random order.

    Each document is divided into examples that are full but for its last one.
    """
    budget = max_seq_length - NUM_SPECIALS + 1
    splits = documents.sentence_splits[documents.document_splits]
    counts = -(-np.diff(splits) // budget)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.repeat(splits[:-1], counts) + budget * numbers
    end = np.minimum(begin + budget, np.repeat(splits[1:], counts))
    instances = Instances(begin, end, end, end, np.zeros(len(begin), bool))
    order = np.random.default_rng(seed).permutation(dupe_factor * len(begin))
    return instances.rows(order % max(1, len(begin)))


def make_instances(
    documents: TokenizedDocuments,
    *,
    max_seq_length: int,
    short_seq_prob: float,
    dupe_factor: int,
    seed: int,
    same_document_next: bool = False,
) -> Instances:
    """Build the instances of the documents of a shard, in random order.

    The settings are those of write_shards. With `same_document_next`, a random next segment may
    come from the same document if ten draws found no other, as in google-research/bert. By default
    it never does.

    Raises:
        UserError: If there are too few documents.
    """
    if len(documents) < (1 if same_document_next else 2):
        raise UserError(
            f"{len(documents)} documents with tokens, expected at least 2, since a random next "
            "segment comes from another document; separate documents by blank lines, or write "
            "fewer shards to a new --output_dir"
        )
    draws = random.Random(seed)
    budget = max_seq_length - NUM_SPECIALS
    found = array("q")
    sentence_splits = documents.sentence_splits.tolist()
    document_splits = documents.document_splits.tolist()
    for _ in range(dupe_factor):
        for document in range(len(documents)):
            _add_instances(
                found,
                document,
                sentence_splits,
                document_splits,
                _target(budget, short_seq_prob, draws.random),
                draws.random,
                same_document_next,
            )
    a_begin, a_end, b_begin, b_end, is_random = np.frombuffer(found, np.int64).reshape(-1, 5).T
    instances = Instances(a_begin, a_end, b_begin, b_end, is_random.astype(bool))
    generator = np.random.Generator(np.random.PCG64(draws.getrandbits(64)))
    instances = _truncate(instances, budget, generator)
    return instances.rows(generator.permutation(len(instances)))


def _target(budget, short_seq_prob, uniform):
    """Return the number of tokens per instance of a document: `budget`, or a random lower one."""
    return 2 + int(uniform() * (budget - 1)) if uniform() < short_seq_prob else budget


def _add_instances(found, document, begins, document_splits, target, uniform, same_document_next):
    """Append the five integers of each instance of a document to `found`.

    Sentence i is the tokens begins[i] to begins[i + 1]. int(uniform() * n) draws from range(n).
    """
    num_documents = len(document_splits) - 1
    first, last = document_splits[document], document_splits[document + 1]
    while first < last:
        # The chunk: sentences up to `target` tokens or the end of the document.
        end = bisect.bisect_left(begins, begins[first] + target, first + 1, last)
        # A gets a random number of sentences of the chunk, but at least one, and B the others.
        a_end = first + 1 if end - first < 2 else first + 1 + int(uniform() * (end - first - 1))
        if end - first == 1 or uniform() < 0.5:
            # B starts at a random sentence of another document and fills the rest of `target`.
            other = _other_document(document, num_documents, uniform, same_document_next)
            others_first, others_last = document_splits[other], document_splits[other + 1]
            start = others_first + int(uniform() * (others_last - others_first))
            remaining = target - (begins[a_end] - begins[first])
            stop = bisect.bisect_left(begins, begins[start] + remaining, start + 1, others_last)
            found.extend((begins[first], begins[a_end], begins[start], begins[stop], 1))
            first = a_end  # The rest of the chunk is used again.
        else:
            found.extend((begins[first], begins[a_end], begins[a_end], begins[end], 0))
            first = end


def _other_document(document, num_documents, uniform, same_document_next):
    if not same_document_next:
        other = int(uniform() * (num_documents - 1))
        return other + (other >= document)
    for _ in range(10):
        other = int(uniform() * num_documents)
        if other != document:
            break
    return other


def _truncate(instances, budget, generator):
    """Truncate pairs to `budget` tokens, always the longer segment, or B if equal.

    google-research/bert removes one token after the other, at random from the front or the back.
    The number removed from the front is therefore binomial, and can be drawn at once.
    """
    a_length = instances.a_end - instances.a_begin
    b_length = instances.b_end - instances.b_begin
    # Each segment keeps at least half of the budget if it is that long.
    keep_a = np.minimum(a_length, np.maximum(budget - b_length, (budget + 1) // 2))
    keep_b = np.minimum(b_length, budget - keep_a)
    a_begin = instances.a_begin + generator.binomial(a_length - keep_a, 0.5)
    b_begin = instances.b_begin + generator.binomial(b_length - keep_b, 0.5)
    return dataclasses.replace(
        instances, a_begin=a_begin, a_end=a_begin + keep_a, b_begin=b_begin, b_end=b_begin + keep_b
    )


def to_examples(
    instances: Instances, ids: np.ndarray, vocabulary: Vocabulary, max_seq_length: int
) -> dict[str, np.ndarray]:
    """Build padded examples from N instances of documents with the token ids `ids`, int32.

    Returns:
        Dict with int32 input_ids, input_mask and segment_ids `(N, L)`, and next_sentence_labels
        `(N, 1)`.
    """
    column_L = np.arange(max_seq_length)
    a_length = (instances.a_end - instances.a_begin)[:, np.newaxis]
    length = instances.num_tokens[:, np.newaxis]
    # Column 0 is [CLS], columns 1 to a_length are A, then come [SEP], B and [SEP].
    is_b = (column_L > a_length + 1) & (column_L < length)
    begin = np.where(
        is_b,
        instances.b_begin[:, np.newaxis] - a_length - 2,
        instances.a_begin[:, np.newaxis] - 1,
    )
    # Columns outside of A and B index arbitrary tokens, which are overwritten below.
    input_ids = ids[np.clip(begin + column_L, 0, len(ids) - 1)]
    input_ids[:, 0] = vocabulary["[CLS]"]
    is_separator = (column_L == a_length + 1) | (column_L == length - 1)
    input_ids[is_separator] = vocabulary["[SEP]"]
    input_ids[column_L >= length] = vocabulary["[PAD]"]
    return {
        "input_ids": input_ids,
        "input_mask": (column_L < length).astype(np.int32),
        "segment_ids": is_b.astype(np.int32),
        "next_sentence_labels": instances.is_random_next.astype(np.int32)[:, np.newaxis],
    }
