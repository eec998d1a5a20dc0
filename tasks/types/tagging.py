"""Tagging: entities of a text, one BIO label per token (Devlin et al. 2019, 5.3; no CRF).

Labels come from the words of a column file or from character spans. A text that is too long is
split into windows; each of its tokens is trained, scored and predicted in the window with most
context.

The first wordpiece of each basic token carries a label. Basic tokens are the tokenizer's output
before WordPiece: a run of letters and digits, or one punctuation mark ("U.S." has four, "Anna's"
three). The same rule holds for training on both kinds of file and for serving:

    Every basic token has a label; an entity is a run of basic tokens joined by BIO; it covers the
    characters from the start of the first to the end of the last. Other wordpieces have no label.

The rule must not depend on spaces, because BERT does not see them: "(Berlin)" and "( Berlin )" have
the same ids. Devlin et al. 2019, 5.3 label the first wordpiece of each word, which is equal for
words of one basic token. In longer words ("U.S.", "@user"), the other basic tokens are labelled as
the continuation of the word's entity, because serving knows no words and must return "U.S." as one
entity. If the word is O, they are excluded from the loss: training on O for the name in "@ann" cost
five points of F1 on tweets. Metrics use the first wordpiece of each word only, as in the paper.

Metrics are of entities: type and both borders have to match. There are two readings of tags that
are not IOB2, both of seqeval; on IOB2 they agree. In the default reading an I- that continues no
entity begins one, as in CoNLL's conlleval; in the strict one it belongs to no entity.

Limits: in raw text, entities may be predicted inside a word that a column file labels O ("@ann");
an entity cannot end inside a basic token ("Berlin" in "Berliner"); and column files that split
basic tokens ("do n't", "can not") have other tokens than the raw text.
Shape suffixes: B or S texts (sentences), W windows of all texts, (L) tokens of a window (ragged), L
tokens of the longest window or more, N words, T tokens and K basic tokens of all texts, M entities
of all texts, E entities of the text that has most, V vocabulary entries, C labels, Y entity types.
"""

import dataclasses
import functools
import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import seqeval.metrics
import tensorflow as tf
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import softmax_cross_entropy, softmax_divergence
from tasks.base.plots import MAX_LABELS, Plot, draw_bars
from tasks.base.task import (
    OutputSpec,
    Task,
    Tokenize,
    check_choice,
    cut_lists,
    described,
    top2_gap,
)
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.labels import LabelSpace
from tasks.data.readers.memory import as_list, label_names, named, without_axis
from tasks.data.readers.rows import FileRows, RowError, Source, as_label, raise_bad_rows
from tasks.data.readers.tagged import (
    SCHEMES,
    Entity,
    JoinedWords,
    WordTags,
    entities_of,
    read_tags,
    split_tag,
    to_bio,
)
from tasks.data.windows import Windows, pack_windows
from tasks.graph.heads import HeadModel
from tasks.metrics.classification import accuracy
from tasks.model.task_model import TaskModel

NO_LABEL = -1
FEW_TYPES = 20  # With more entity types there are no metrics per type.


class TagLabels:
    """The labels of a task as tags of words: of entities, or with the scheme "plain" of any kind.

    Labels of entities are O and tags in one of the schemes of `tasks.data.readers.tagged`, in any
    order. With "plain", each label is a type of its own, which begins at each word.

    Attributes:
        labels: Names of the C labels.
        is_plain: Whether the scheme is "plain".
        types: Names of the Y types.
        ids: Id of the label that stands for each tag: of "O", "B-TYPE" and "I-TYPE", or of labels.
        type_C: int32, index of each label's type, -1 for O.
        is_begin_C: bool, whether the label begins an entity wherever it stands.
        is_end_C: bool, whether the label ends its entity.
        inside_C: int32, id of the label that continues each label's word; NO_LABEL if none does.
        begin_Y: int32, id of the label that begins an entity of each type.
    """

    def __init__(self, labels: Iterable[str], scheme: str = "bio", location: str = "labels"):
        """Check and index the labels; UserErrors are prefixed with `location`."""
        self.labels, self.is_plain = tuple(labels), scheme == "plain"
        try:
            tags = [("B", tag) if self.is_plain else split_tag(tag) for tag in self.labels]
        except RowError as error:
            raise UserError(f"{location}: {error}") from None
        self.types = tuple(dict.fromkeys(kind for _, kind in tags if kind))
        has_outside = self.is_plain or "O" in self.labels
        if not self.types or not has_outside or len(set(self.labels)) < len(self.labels):
            raise UserError(
                f"{location}: {', '.join(self.labels):.200}: expected O and tags of entity types, "
                "each once"
            )
        types = {"": -1} | {name: number for number, name in enumerate(self.types)}
        self.type_C = np.array([types[kind] for _, kind in tags], np.int32)
        self.is_begin_C = np.array([prefix in "BSU" for prefix, _ in tags])
        self.is_end_C = np.array([prefix in "ELSU" for prefix, _ in tags])
        if self.is_plain:
            self.ids = {label: number for number, label in enumerate(self.labels)}
            self.inside_C = np.full(len(tags), NO_LABEL, np.int32)
            self.begin_Y = np.arange(len(tags), dtype=np.int32)
            return
        ids = {tag: number for number, tag in reversed(list(enumerate(tags)))}
        self.ids = {"O": ids["O", ""]}
        for kind in self.types:
            # Of a scheme without B- or I-, the label that is most like it.
            for prefix, known in (("B", "BSUIEL"), ("I", "IELBSU")):
                self.ids[f"{prefix}-{kind}"] = next(ids[p, kind] for p in known if (p, kind) in ids)
        self.inside_C = np.array(
            [self.ids[f"I-{kind}"] if kind else NO_LABEL for _, kind in tags], np.int32
        )
        self.begin_Y = np.array([self.ids[f"B-{kind}"] for kind in self.types], np.int32)

    @classmethod
    def of_names(
        cls, names: Sequence[str], scheme: str = "bio", location: str = "labels"
    ) -> "TagLabels":
        """Create the labels of a new head.

        They are the names, if the scheme is "plain" or O is one of them; otherwise O, and B- and I-
        of each type that is named, as it is or with a prefix.
        """
        if scheme == "plain" or "O" in names:
            return cls(names, scheme, location)
        types = cls(["O", *names], location=location).types
        return cls(("O", *(f"{prefix}-{name}" for name in types for prefix in "BI")))

    def tags_of(self, labels: Sequence[str]) -> list[str]:
        """Return the predicted labels of a text's words as tags: those of other schemes as BIO."""
        has_bio = self.is_plain or all(label[:2] in ("O", "B-", "I-") for label in self.labels)
        return list(labels) if has_bio else to_bio(labels)


class TokenLabels(NamedTuple):
    """Labels of tokens, and the words that metrics are computed on.

    Attributes:
        labels: int32 `(T,)`, label ids, NO_LABEL for unlabelled tokens.
        firsts: int64 `(N,)`, index of the first token of each word, -1 if the word has no token
            (for example a control character).
        splits: int64 `(S + 1,)`, row splits of the words by text.
    """

    labels: np.ndarray
    firsts: np.ndarray
    splits: np.ndarray


def first_pieces(vocabulary: Vocabulary) -> np.ndarray:
    """Return bool `(V,)`, whether an entry begins a basic token, that is, has no "##"."""
    return np.array([not entry.startswith("##") for entry in vocabulary.entries])


def label_words(
    bio: TagLabels,
    texts: Sequence[str],
    tokens: Tokens,
    words: Sequence[Sequence[str]],
    label_ids_N: np.ndarray,
    is_first_T: np.ndarray,
) -> TokenLabels:
    """Label the tokens of texts by their words, of a column file, which one space joins.

    "U.S." with B-LOC becomes U B-LOC, "." I-LOC, S I-LOC, "." I-LOC; with O, it becomes U O and no
    label for the rest. `is_first_T` marks the first wordpieces of basic tokens.
    """
    basic = np.flatnonzero(is_first_T)
    starts_T, _ = _end_to_end(texts, tokens)
    splits = _splits(list(map(len, words)))
    sizes_N = np.array([len(word) + 1 for of_text in words for word in of_text], np.int64)
    # The last word of a text has no space after it.
    has_words_S = np.diff(splits) > 0
    missing_S = np.cumsum(has_words_S) - has_words_S
    word_starts_N = np.cumsum(sizes_N) - sizes_N - np.repeat(missing_S, np.diff(splits))
    word_of_basic = np.searchsorted(word_starts_N, starts_T[basic], "right") - 1
    labelled_words, first = np.unique(word_of_basic, return_index=True)

    labels_T = np.full(len(is_first_T), NO_LABEL, np.int32)
    # In "@ann", labelled O, "ann" looks like a name; training on O would teach that it is none.
    labels_T[basic] = bio.inside_C[label_ids_N[word_of_basic]]
    labels_T[basic[first]] = label_ids_N[labelled_words]
    firsts_N = np.full(len(label_ids_N), -1, np.int64)
    firsts_N[labelled_words] = basic[first]
    return TokenLabels(labels_T, firsts_N, splits)


def label_spans(
    bio: TagLabels,
    texts: Sequence[str],
    tokens: Tokens,
    spans: Sequence[Sequence[tuple[int, int, str]]],
    is_first_T: np.ndarray,
) -> tuple[TokenLabels, int, int]:
    """Label tokens by character spans; each basic token counts as a word.

    An entity is assigned every basic token that it overlaps.

    Args:
        bio: The task's labels.
        texts: S strings.
        tokens: Tokens of the texts, with offsets.
        spans: Per text, non-overlapping (start, end, type) in characters, sorted by start.
        is_first_T: bool, whether a token is the first wordpiece of a basic token.

    Returns:
        The labels; the number of entities that started or ended inside a basic token and were
        extended to it; and the number of those without a basic token of their own: only spaces, or
        part of a basic token of another entity.
    """
    starts_T, ends_T = _end_to_end(texts, tokens)
    basic = np.flatnonzero(is_first_T)
    starts = starts_T[basic]
    ends = np.maximum.reduceat(ends_T, basic) if len(basic) else ends_T

    entities = _entities(bio, texts, spans)
    first, after = _overlapped(entities, starts, ends)
    kept = first < after
    entities, first, after = entities[kept], first[kept], after[kept]
    is_widened = (starts[first] < entities[:, 0]) | (ends[after - 1] > entities[:, 1])

    labels_T = np.full(len(is_first_T), NO_LABEL, np.int32)
    labels_T[basic] = _bio_labels(bio, entities[:, 2], first, after, len(basic))
    splits = np.searchsorted(basic, tokens.ids.row_splits.numpy())
    labels = TokenLabels(labels_T, basic, splits)
    return labels, int(is_widened.sum()), int(np.sum(~kept))


def _entities(bio, texts, spans):
    """Return (start, end, type) of all entities, int64 `(M, 3)`, in the concatenated texts."""
    types = {name: number for number, name in enumerate(bio.types)}
    rows = [
        (begin + start, begin + end, types[name])
        for begin, of_text in zip(_begins(texts).tolist(), spans, strict=True)
        for start, end, name in of_text
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def _overlapped(entities, starts, ends):
    """Return each entity's first basic token and the one after its last; equal if it has none."""
    first = np.searchsorted(ends, entities[:, 0], "right")
    after = np.searchsorted(starts, entities[:, 1], "left")
    first[1:] = np.maximum(first[1:], after[:-1])  # The earlier entity gets a shared basic token.
    return first, np.maximum(first, after)


def _bio_labels(bio, types, first, after, num_basic):
    """Return the label id of each basic token."""
    labels = np.full(num_basic, bio.ids["O"], np.int32)
    begin_ids, sizes = bio.begin_Y[types], after - first
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    labels[np.repeat(first, sizes) + offsets] = np.repeat(bio.inside_C[begin_ids], sizes)
    labels[first] = begin_ids
    return labels


def word_predictions(
    bio: TagLabels, predictions_T: np.ndarray, labelled: TokenLabels
) -> list[list[str]]:
    """Return one list of tags per text, one tag per word of `labelled`; "O" without a token."""
    outside = np.append(predictions_T, len(bio.labels))  # Index -1 of `firsts` then selects O.
    tags_N = np.array([*bio.labels, "O"], object)[outside[labelled.firsts]].tolist()
    splits = labelled.splits.tolist()
    return [bio.tags_of(tags_N[start:end]) for start, end in itertools.pairwise(splits)]


def _end_to_end(texts, tokens):
    """Return token offsets (starts, ends) within the concatenated texts."""
    begins_T = np.repeat(_begins(texts), tokens.ids.row_lengths().numpy())
    starts_T, ends_T = (
        begins_T + ragged.flat_values.numpy() for ragged in (tokens.starts, tokens.ends)
    )
    return starts_T, ends_T


def _begins(texts):
    """Return the offset of each text within the concatenated texts, int64 `(S,)`."""
    return _splits([len(text) for text in texts])[:-1]


def _splits(lengths):
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])


def entities(
    texts: tf.Tensor, windows: Windows, logits: tf.Tensor, bio: TagLabels
) -> dict[str, tf.Tensor]:
    """Return the entities of each text, in order, from logits `(W, L, C)`.

    Basic tokens get their most probable label. An I- label that continues no entity of its type
    starts an entity, as in conlleval and seqeval. With the scheme "plain", each word is an entity:
    what white space separates, with the label of its first basic token.

    Returns:
        Dict of `entity_text` and `entity_type`, string `(B, E)`, padded with ""; `entity_start` and
        `entity_end`, int32 `(B, E)`, character offsets such that text[start:end] == entity_text in
        Python, padded with -1; `entity_score`, float32 `(B, E)`, mean probability of the labels of
        the entity's basic tokens, padded with -1; `num_entities`, int32 `(B,)`.
    """
    positions_T, example_T = _best_positions(windows)
    position_K, example_K = _basic_tokens(windows, positions_T, example_T)
    basic_of_T = tf.cumsum(tf.cast(_of_tokens(windows.is_first, positions_T), tf.int32)) - 1
    start_K = _of_tokens(windows.packed.starts, position_K)
    end_K = tf.math.unsorted_segment_max(
        _of_tokens(windows.packed.ends, positions_T), basic_of_T, tf.size(position_K)
    )
    logits_KC = tf.cast(_at_positions(windows, logits, position_K), tf.float32)
    probability_K = tf.reduce_max(tf.nn.softmax(logits_KC), axis=-1)
    # Argmax of logits, as in the metrics: two logits may round to the same float32 probability.
    label_K = tf.argmax(logits_KC, axis=-1)
    # NaN would be the first label, which is often O: entities with a score of NaN show it.
    label_K = tf.where(probability_K >= 0, label_K, np.argmax(bio.type_C >= 0))
    type_K = tf.gather(bio.type_C, label_K)

    def before(values_K):
        return tf.concat([values_K[:1], values_K[:-1]], axis=0)

    is_inside_K = type_K >= 0
    begins_K = (tf.range(tf.size(type_K)) == 0) | (example_K != before(example_K))
    if bio.is_plain:
        begins_K |= start_K > before(end_K)
    else:
        ends_K = tf.gather(bio.is_end_C, before(label_K))
        begins_K |= tf.gather(bio.is_begin_C, label_K) | ends_K | (type_K != before(type_K))
    begins_K &= is_inside_K
    begin = tf.where(begins_K)[:, 0]
    entity_K = tf.where(is_inside_K, tf.cumsum(tf.cast(begins_K, tf.int32)) - 1, -1)  # -1: none.
    start_M, example_M = tf.gather(start_K, begin), tf.gather(example_K, begin)
    end_M = tf.math.unsorted_segment_max(end_K, entity_K, tf.size(begin))
    if bio.is_plain:
        score_M = tf.gather(probability_K, begin)
    else:
        score_M = tf.math.unsorted_segment_mean(probability_K, entity_K, tf.size(begin))
    num_texts = tf.size(texts, tf.int64)

    def of_texts(values_M, padding):
        ragged = tf.RaggedTensor.from_value_rowids(values_M, example_M, num_texts, validate=False)
        return ragged.to_tensor(padding)

    return {
        "entity_text": of_texts(cut_disjoint(texts, example_M, start_M, end_M), ""),
        "entity_type": of_texts(tf.gather(bio.types, tf.gather(type_K, begin)), ""),
        "entity_start": of_texts(start_M, -1),
        "entity_end": of_texts(end_M, -1),
        "entity_score": of_texts(score_M, -1.0),
        "num_entities": tf.math.unsorted_segment_sum(
            tf.ones_like(example_M, tf.int32), example_M, num_texts
        ),
    }


def cut_disjoint(
    texts: tf.Tensor, text_M: tf.Tensor, start_M: tf.Tensor, end_M: tf.Tensor
) -> tf.Tensor:
    """Return substrings that overlap little, between character offsets.

    Characters are counted as in the tokenizer: invalid UTF-8 counts as in bytes.decode("utf-8",
    "replace"). Memory grows with the characters of the texts and of the substrings.

    Args:
        texts: string `(B,)`.
        text_M: int `(M,)`, index of each substring's text.
        start_M: int `(M,)`, first character.
        end_M: int `(M,)`, character after the last.

    Returns:
        string `(M,)`.
    """
    codes = tf.strings.unicode_decode(texts, "UTF-8", errors="replace")
    begin_M = tf.gather(codes.row_starts(), text_M)
    positions = tf.ragged.range(
        begin_M + tf.cast(start_M, tf.int64), begin_M + tf.cast(end_M, tf.int64)
    )
    return tf.strings.unicode_encode(tf.gather(codes.flat_values, positions), "UTF-8")


def min_top2_gap(windows: Windows, logits: tf.Tensor, num_texts: int | tf.Tensor) -> tf.Tensor:
    """Return the smallest gap of probability between a basic token's two best labels, per text.

    Logits are `(W, L, C)`; the result is `(num_texts,)`, inf for texts without tokens.
    """
    position_K, example_K = _basic_tokens(windows, *_best_positions(windows))
    gap_K = top2_gap(tf.nn.softmax(_at_positions(windows, logits, position_K)))
    min_gap = tf.math.unsorted_segment_min(gap_K, example_K, num_texts)
    return tf.where(min_gap > 1, float("inf"), min_gap)


def in_windows(windows: Windows, labels_T: np.ndarray | tf.Tensor) -> tf.RaggedTensor:
    """Scatter the labels of the texts' tokens, int32 `(T,)`, to windows, ragged `(W, (L))`.

    Positions without is_max_context get NO_LABEL, so that a token of two windows counts once.
    """
    positions_T, _ = _best_positions(windows)
    ids = windows.packed.input_ids
    labels = tf.fill([tf.size(ids.flat_values)], NO_LABEL)
    return ids.with_flat_values(
        tf.tensor_scatter_nd_update(labels, positions_T[:, tf.newaxis], labels_T)
    )


def in_text_order(windows: Windows, values: np.ndarray | tf.Tensor) -> tf.Tensor:
    """Gather values `(W, L, ...)` of the texts' tokens, `(T, ...)`, from their best windows."""
    return _at_positions(windows, values, _best_positions(windows)[0])


def texts_tokens(windows: Windows, num_texts: int) -> tuple[Tokens, tf.Tensor]:
    """Return the tokens of the texts, with offsets, from their windows; and is_first, `(T,)`."""
    positions_T, example_T = _best_positions(windows)
    packed = windows.packed

    def uncut(ragged):
        return tf.RaggedTensor.from_value_rowids(
            _of_tokens(ragged, positions_T), example_T, num_texts
        )

    tokens = Tokens(*map(uncut, (packed.input_ids, packed.starts, packed.ends)))
    return tokens, _of_tokens(windows.is_first, positions_T)


def _best_positions(windows):
    """Return each text token's index into the windows' flat tokens, and its text, int64 (T,)."""
    position = tf.where(windows.is_max_context.flat_values)[:, 0]
    window, in_window = _coordinates(windows, position)
    example_W, begin_W, offset_W = (
        tf.cast(values, tf.int64)
        for values in (windows.example_W, windows.begin_W, windows.offset_W)
    )
    example = tf.gather(example_W, window)
    num_examples = tf.reduce_max(tf.concat([[-1], example], axis=0)) + 1
    counts = tf.math.unsorted_segment_sum(tf.ones_like(example), example, num_examples)
    number = (
        tf.gather(tf.cumsum(counts, exclusive=True), example)
        + tf.gather(begin_W - offset_W, window)
        + in_window
    )
    order = tf.math.invert_permutation(number)
    return tf.gather(position, order), tf.gather(example, order)


def _basic_tokens(windows, positions_T, example_T):
    """Return the position of the first wordpiece of each basic token, and its text, int64 (K,)."""
    basic = tf.where(_of_tokens(windows.is_first, positions_T))[:, 0]
    return tf.gather(positions_T, basic), tf.gather(example_T, basic)


def _of_tokens(ragged, position):
    """Gather values of windows, ragged `(W, (L))`, at indices into their flat tokens."""
    return tf.gather(ragged.flat_values, position)


def _coordinates(windows, position):
    """Convert indices into the windows' flat tokens to (window, position in it), int64."""
    window = tf.gather(windows.is_max_context.value_rowids(), position)
    return window, position - tf.gather(windows.is_max_context.row_starts(), window)


def _at_positions(windows, values, position):
    return tf.gather_nd(values, tf.stack(_coordinates(windows, position), axis=-1))


def entity_scores(
    gold_sentences: Sequence[Sequence[str]], predicted_sentences: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return micro-averaged precision, recall and F1 of entities, and those per type.

    Args:
        gold_sentences: Tags per sentence; a bare "B" or "I" has the type "_".
        predicted_sentences: Tags per sentence, as many and as long, otherwise ValueError.

    Returns:
        {"precision", "recall", "f1", "types": {type: {"precision", "recall", "f1", "support"}}},
        with the types that occur in either. Undefined ratios are 0.

    Raises:
        UserError: At an invalid tag.
    """
    gold, predicted = _as_lists(gold_sentences), _as_lists(predicted_sentences)
    precision, recall, f1, _ = precision_recall_fscore_support(
        gold, predicted, average="micro", zero_division=0
    )
    of_types = precision_recall_fscore_support(gold, predicted, average=None, zero_division=0)
    # The types in seqeval's order: in this reading, every tag but O belongs to an entity.
    tags = {tag for sentence in gold + predicted for tag in sentence} - {"O"}
    types = sorted({tag[2:] or "_" for tag in tags})
    names = ("precision", "recall", "f1", "support")
    rows = np.transpose(np.array(of_types, object))
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "types": {
            kind: dict(zip(names, row, strict=True))
            for kind, row in zip(types, rows.tolist(), strict=True)
        },
    }


def strict_f1(
    gold_sentences: Sequence[Sequence[str]], predicted_sentences: Sequence[Sequence[str]]
) -> float:
    """Return the micro-averaged F1 of the strict reading; arguments as in `entity_scores`."""
    gold, predicted = _as_lists(gold_sentences), _as_lists(predicted_sentences)
    return float(
        seqeval.metrics.f1_score(gold, predicted, mode="strict", scheme=IOB2, zero_division=0)
    )


def _as_lists(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    for tag in dict.fromkeys(tag for sentence in sentences for tag in sentence):
        if tag != "O" and tag.partition("-")[0] not in ("B", "I"):
            raise UserError(f"tag {tag!r}: expected O, or B- or I- and a type")
    # seqeval rejects data without a sentence; one without a word changes no count.
    return [*map(list, sentences), []]


class TokenModel(HeadModel):
    """Token classification, such as named entities (Devlin et al. 2019, 5.3)."""

    uses_pooler = False

    def call(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Return logits `tag`, `(B, L, C)`; values at padding are undefined."""
        return {"tag": self.token_scores(inputs, training, seed)[0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggingTask(Task):
    """Entity tagging; an example's label is `WordTags` or a list of entities."""

    labels: tuple[str, ...]  # Tags, in the order of the head.
    doc_stride: int = described("tokens between the starts of the windows of a longer text")
    text_column: str = "text"  # In tables.
    scheme: str = described("whether labels are tags of entities (bio) or of words (plain)", "bio")

    kind = "tagging"
    description = "Extracts the entities of a text: their text, type and position."
    outputs = {
        "entity_text": OutputSpec("text of each entity, as in the input"),
        "entity_type": OutputSpec("type of each entity"),
        "entity_start": OutputSpec("start of each entity, in characters; -1 for padding"),
        "entity_end": OutputSpec("end of each entity (exclusive), in characters; -1 for padding"),
        "entity_score": OutputSpec("confidence of each entity, from 0 to 1; -1 for padding"),
        "num_entities": OutputSpec("number of entities; entries after it are padding"),
    }
    input_names = ("text",)
    word_output_types = {"tags": ("string", 1)}
    has_lists_of_labels = True
    has_windows = True
    needs_offsets = True
    accuracies = ("tag",)
    losses = {"tag": softmax_cross_entropy}
    soft_losses = {"tag": softmax_divergence}

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, SCHEMES)
        if self.labels:
            self.bio  # noqa: B018  Checks them.

    @property
    def best_metric(self) -> str:
        """The metric that selects the best checkpoint."""
        return "accuracy" if self.bio.is_plain else "f1"

    @classmethod
    def from_data(cls, data: Source | FileRows, **options: Any) -> Self:
        """Create the task as `for_reading` does; raises UserError if the file has no entity."""
        task = cls.for_reading(data, **options)
        rows = raise_bad_rows(task.iter_rows(data, labelled=True))
        if not any(task._types(row.label) for row in rows):
            raise UserError(f"{data}: expected at least one entity to train on, received none")
        return task

    @classmethod
    def for_reading(
        cls,
        data: Source | FileRows,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        doc_stride: int | None = None,
        text_columns: Sequence[str] = ("text",),
        text_column: str | None = None,
        **options: Any,
    ) -> Self:
        """Create the task from a labelled file, by default with its entity types, sorted.

        `labels` as of `TagLabels.of_names`; `doc_stride` is half a window by default. The column
        has either name, as in `read_tagged`.
        """
        if text_column is None:
            (text_column,) = text_columns
        task = cls(
            max_seq_length=max_seq_length,
            labels=(),
            doc_stride=doc_stride or max((max_seq_length - 2) // 2, 1),
            text_column=text_column,
            **options,
        )
        found = set()
        for row in raise_bad_rows(task.iter_rows(data, labelled=True)):
            found |= task._types(row.label)
        names = tuple(map(as_label, labels)) or sorted(found)
        if not names:  # Such as a dev file.
            return task
        labels = TagLabels.of_names(names, task.scheme, "--labels").labels
        return dataclasses.replace(task, labels=labels)

    @classmethod
    def from_options(
        cls,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        doc_stride: int | None = None,
        **options: Any,
    ) -> Self:
        """Create the task from labels as of `TagLabels.of_names`."""
        names = label_names(labels)
        if not names:
            raise UserError("labels: expected entity types, in a list, received none")
        scheme = options.get("scheme", "bio")
        return cls(
            max_seq_length=max_seq_length,
            labels=TagLabels.of_names(names, scheme).labels,
            doc_stride=doc_stride or max((max_seq_length - 2) // 2, 1),
            **options,
        )

    @functools.cached_property
    def bio(self) -> TagLabels:
        """The labels as `TagLabels`."""
        return TagLabels(self.labels, self.scheme)

    def summary(self) -> str:
        """Return the entity types, for the log."""
        return f"; {'tags' if self.bio.is_plain else 'entities'} {', '.join(self.bio.types)}"

    def columns(self, x: Any) -> dict[str, list]:
        """Return texts by input name; lists of words are joined by spaces."""
        columns = named(x, self.input_names)
        rows = as_list(without_axis(columns["text"]), "text")
        return super().columns(
            {"text": [_joined(row, f"x: text[{n}]") for n, row in enumerate(rows)]}
        )

    def encode_labels(
        self,
        values: Sequence[Any],
        texts: Mapping[str, Sequence[Any]],
        what: str = "y[{}]",
    ) -> list:
        """Convert the labels of rows; see `Task.encode_labels`.

        All rows have entities, or all have a tag per word; [] may be either.
        """
        labels = super().encode_labels(values, texts, what)
        if not any(isinstance(label, WordTags) for label in labels):
            return labels
        for row, label in enumerate(labels):
            if not isinstance(label, WordTags):
                if label or texts["text"][row]:
                    raise UserError(
                        f"{what.format(row)}: expected a tag per word, as in other rows, received "
                        f"{values[row]!r:.80}"
                    )
                labels[row] = WordTags([])
        return labels

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> WordTags | list[Entity]:
        """Return entities, given as dicts with start, end and type, or one name or id per word."""
        if isinstance(value, WordTags):
            return self.label_of(value)
        if not (value := as_list(value, "label")) or all(map(_may_be_entity, value)):
            return self.label_of(entities_of({"entities": value}, len(texts["text"])))
        words = JoinedWords(texts["text"]).words
        if len(words) != len(value):
            raise ValueError(f"expected {len(words)} tags, one per word, received {len(value)}")
        space = LabelSpace(self.labels)
        names = [tag if isinstance(tag, str) else space.labels[space.id_of(tag)] for tag in value]
        return self.label_of(WordTags(read_tags(names, self.scheme)))

    def label_of(self, label: WordTags | list[Entity]) -> WordTags | list[Entity]:
        """Return the label; raises ValueError at a type that the task does not have."""
        if self.scheme == "plain" and not isinstance(label, WordTags):
            raise ValueError("scheme='plain': expected a tag per word, received entities")
        types = self._types(label)
        if types and (unknown := sorted(types.difference(self.bio.types))):
            known, what = ", ".join(self.bio.types), "entity type"
            if self.scheme == "plain":
                what = "tag"
            raise ValueError(f"{what} {unknown[0]!r:.80}: expected one of {known:.200}")
        return label

    def _types(self, label):
        """Return the types in a label."""
        if not isinstance(label, WordTags):
            return {name for _, _, name in label}
        if self.scheme == "plain":
            return set(label.tags)
        return {tag.partition("-")[2] for tag in label.tags} - {""}

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize texts into overlapping windows; `is_first` marks tokens that have labels."""
        tokens = tokenize(texts["text"])
        windows = pack_windows(None, tokens, vocabulary, self.max_seq_length, self.doc_stride)
        ids = windows.packed.input_ids
        is_first = tf.gather(tf.constant(first_pieces(vocabulary)), ids.flat_values)
        return windows._replace(is_first=ids.with_flat_values(is_first))

    def targets(
        self, examples: Examples, windows: Windows
    ) -> tuple[dict[str, tf.RaggedTensor], dict[str, tf.RaggedTensor]]:
        """Return label ids and weights per token, ragged `(W, (L))`.

        The weight is 1 at labelled tokens in their window of most context, otherwise 0.
        """
        # Labels are negative at tokens without a label and outside the window of most context.
        labels = in_windows(windows, self.token_labels(examples, windows)[0].labels)
        return (
            {"tag": tf.maximum(labels, 0)},
            {"tag": labels.with_flat_values(tf.cast(labels.flat_values >= 0, tf.float32))},
        )

    def soft_weights(self, windows: Windows, num_samples: int) -> dict[str, tf.RaggedTensor]:
        """Return 1 at the first token of each word, in its window of most context, otherwise 0."""
        assert windows.is_first is not None and windows.is_max_context is not None
        is_counted = windows.is_first.flat_values & windows.is_max_context.flat_values
        return {"tag": windows.is_first.with_flat_values(tf.cast(is_counted, tf.float32))}

    def build_model(self, config: BertConfig, dtype: str = "float32") -> TokenModel:
        """Return the encoder with one logit per token and label."""
        return TokenModel(config, len(self.labels), name=self.kind, dtype=dtype)

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Count words and entities that tokens cannot represent; warn if there is no entity."""
        _, warnings = self.token_labels(data.examples, data.windows)
        if not any(self._types(item) for item in data.examples.labels):
            warnings.append("no row has an entity: precision, recall and F1 cannot be measured")
        return warnings

    def token_labels(self, examples: Examples, windows: Windows) -> tuple[TokenLabels, list[str]]:
        """Return labels per token, and warnings about labels that tokens cannot represent."""
        bio, texts, items = self.bio, examples.texts["text"], examples.labels
        tokens, is_first_T = texts_tokens(windows, len(texts))
        is_first_T = is_first_T.numpy()
        if isinstance(items[0], WordTags):
            words = [JoinedWords(text).words for text in texts]
            ids_N = np.array([bio.ids[tag] for item in items for tag in item.tags], np.int32)
            labelled = label_words(bio, texts, tokens, words, ids_N, is_first_T)
            missing = int(np.sum(labelled.firsts < 0))
            counts = {"words have no token; they are predicted as O": missing}
            count = len(ids_N)
        else:
            labelled, num_widened, num_lost = label_spans(bio, texts, tokens, items, is_first_T)
            counts = {
                "entities begin or end inside a token; they are extended to all of it": (
                    num_widened
                ),
                "entities have no token of their own; they are skipped": num_lost,
            }
            count = sum(map(len, items))
        return labelled, [f"{n} of {count} {what}" for what, n in counts.items() if n]

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return the entities per text (`tasks.types.tagging.entities`)."""
        return entities(texts["text"], windows, outputs["tag"], self.bio)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the smallest margin of any basic token of a text, `(B,)`."""
        return min_top2_gap(windows, outputs["tag"], tf.size(predictions["num_entities"]))

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep the first `num_entities` entries of each list, and the tags of words."""
        tags = {"tags": [tag for tag in row["tags"] if tag]} if "tags" in row else {}
        return {**cut_lists(row, row["num_entities"]), **tags}

    def with_word_outputs(self, predictions: Arrays, texts: Mapping[str, list]) -> Arrays:
        """Return predictions with `tags`, `(N, K)` padded with "", if texts are lists of words."""
        names = ("entity_start", "entity_end", "entity_type")
        rows = zip(texts["text"], *(predictions[name].tolist() for name in names), strict=True)
        tags = [
            tags_of_words(text, list(zip(*spans, strict=True)), self.bio.is_plain)
            if isinstance(text, JoinedWords)
            else []
            for text, *spans in rows
        ]
        if not any(isinstance(text, JoinedWords) for text in texts["text"]):
            return predictions
        width = max(map(len, tags))
        padded = [[*row, *[""] * (width - len(row))] for row in tags]
        return {**predictions, "tags": np.array(padded, object).reshape(len(tags), width)}

    def metric_inputs(self, outputs: Arrays) -> Arrays:
        """Return the most likely labels `(W, L)`, int16 if possible.

        The logits of a million windows would take gigabytes.
        """
        is_few = len(self.labels) < 2**15
        return {"tag": np.argmax(outputs["tag"], axis=-1).astype(np.int16 if is_few else np.int32)}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return entity-level F1, precision and recall, and the accuracy of tags.

        With the scheme "plain", the accuracy, and the mean of the F1 of the tags, 0 for one that
        does not occur.

        Also "strict_f1", for the strict reading of tags, and "f1_TYPE" with at most FEW_TYPES
        types, 0 for a type that does not occur.
        """
        gold, predicted = self._tags(data, outputs)
        flat = [list(itertools.chain(*tags)) for tags in (gold, predicted)]
        if self.bio.is_plain:
            f1 = f1_score(*flat, labels=list(self.labels), average="macro", zero_division=0)
            return {"accuracy": accuracy(*flat), "macro_f1": float(f1)}
        scores = entity_scores(gold, predicted)
        types = self.bio.types if len(self.bio.types) <= FEW_TYPES else ()
        return {
            **{name: scores[name] for name in ("f1", "precision", "recall")},
            "strict_f1": strict_f1(gold, predicted),
            "accuracy": accuracy(*flat),
            **{f"f1_{name}": scores["types"].get(name, {"f1": 0.0})["f1"] for name in types},
        }

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return precision, recall and F1 of entities per type."""
        if self.bio.is_plain:
            return {}
        types = entity_scores(*self._tags(data, outputs))["types"]
        if not 0 < len(types) <= MAX_LABELS:
            return {}
        names = ("precision", "recall", "f1")
        values = {name: [of_type[name] for of_type in types.values()] for name in names}
        return {"entities": lambda axes: draw_bars(axes, list(types), values)}

    def _tags(self, data, outputs):
        """Return gold and predicted tags per sentence."""
        bio, sentences = self.bio, data.examples.labels
        labelled, _ = self.token_labels(data.examples, data.windows)
        predictions_T = in_text_order(data.windows, outputs["tag"]).numpy()
        predicted = word_predictions(bio, predictions_T, labelled)
        if isinstance(sentences[0], WordTags):
            # The file's own tags, so that entities of words without a token count as missed.
            return [sentence.tags for sentence in sentences], predicted
        # Spans are compared at token borders, since the model cannot predict others.
        return word_predictions(bio, labelled.labels, labelled), predicted


def tags_of_words(
    text: JoinedWords, entities: Sequence[tuple[int, int, str]], is_plain: bool
) -> list[str]:
    """Return the tag of each word: that of its first token, "O" if it is in no entity.

    Args:
        text: The words.
        entities: (start, end, type) of the predicted entities, and perhaps their padding.
        is_plain: Whether entities are words, with tags as types; otherwise tags are BIO.
    """
    tags, begin = [], 0
    for word in text.words:
        # Marks without a letter before them are no token either, if accents are stripped.
        letters = (n for n, c in enumerate(word) if unicodedata.category(c)[0] not in "CZM")
        first = begin + next(letters, len(word))
        start, _, kind = next((of for of in entities if of[0] <= first < of[1]), (-1, -1, ""))
        prefix = "" if is_plain else "B-" if start >= begin else "I-"
        tags.append(f"{prefix}{kind}" if kind else "O")
        begin += len(word) + 1
    return tags


def _joined(row, what):
    """Return a text, or the words of a list as a text."""
    if isinstance(row, str) or not hasattr(row, "__len__"):
        return row
    try:
        return JoinedWords.of(as_list(row, what), f"{what}: word")
    except RowError as error:
        raise UserError(str(error)) from None


def _may_be_entity(value):
    return isinstance(value, dict | list | tuple)


@keras.saving.register_keras_serializable("bert_tf")
class TokenClassifier(TaskModel):
    """Tagger of entities in texts of any length.

        model = TokenClassifier.from_pretrained(PATH, labels=["PERSON"])
        model.fit(["Anna left Rome."], [[{"start": 0, "end": 4, "type": "PERSON"}]], epochs=1)
        model.predict_rows(["Anna left."])[0]["entity_text"]

    Options of `from_pretrained`:
        labels: Entity types, or all tags with O, of which a label for the tag "I-PER" may be
            "I-PER" or "PER"; tags of words with the scheme "plain".
        scheme: "bio" for tags of entities, "plain" for a tag per word, such as parts of speech; by
            default that of a head that is kept, else "bio".
        doc_stride: Tokens between the starts of two windows; by default half a window.

    Labels of `fit` are, per text, a list of {"start", "end", "type"} in characters, the end
    exclusive; or, per list of words, a list of tags, by name or id. Predictions of lists of words
    have `tags`, one per word.
    """

    task_class = TaggingTask
    options = ("labels", "scheme", "doc_stride")
