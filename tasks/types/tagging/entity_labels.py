"""Token labels for tagging, from the words of a column file or from character spans.

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

Limits: in raw text, entities may be predicted inside a word that a column file labels O ("@ann");
an entity cannot end inside a basic token ("Berlin" in "Berliner"); and column files that split
basic tokens ("do n't", "can not") have other tokens than the raw text.

Shape suffixes: S texts (sentences), N words of all texts, T tokens of all texts, V vocabulary
entries, C labels, Y entity types.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert_tf.errors import UserError

if TYPE_CHECKING:
    from bert_tf.text.tokenizer import Tokens
    from bert_tf.text.vocabulary import Vocabulary

NO_LABEL = -1


def entity_type(tag: str, location: str) -> str | None:
    """Return the type of a BIO tag, "PER" of "B-PER", or None for "O".

    Raises UserError, prefixed with `location`, if the tag is malformed.
    """
    prefix, _, name = tag.partition("-")
    if tag != "O" and (prefix not in ("B", "I") or not name):
        raise UserError(f"{location}: tag {tag!r}: expected O, B-TYPE or I-TYPE")
    return name or None


class BioLabels:
    """BIO labels of a task: "O" first, then B- and I- of each type.

    Attributes:
        labels: Names of the C labels.
        types: Names of the Y entity types.
        type_C: int32, index of each label's type, -1 for O.
        is_begin_C: bool, whether the label is a B- label.
        inside_C: int32, id of the label that continues each label's entity.
        begin_Y: int32, id of the B- label of each type.
    """

    def __init__(self, labels: Iterable[str], location: str = "labels"):
        """Check and index the labels; UserErrors are prefixed with `location`."""
        self.labels = tuple(labels)
        names = [entity_type(label, location) for label in self.labels]
        self.types = tuple(dict.fromkeys(name for name in names if name))
        expected = [f"{prefix}-{name}" for name in self.types for prefix in "BI"]
        if not expected or self.labels[0] != "O" or sorted(self.labels[1:]) != sorted(expected):
            raise UserError(
                f"{location}: {', '.join(self.labels)}: expected O first, then B- and I- of each "
                "type, without duplicates"
            )
        ids = {label: number for number, label in enumerate(self.labels)}
        types = {None: -1} | {name: number for number, name in enumerate(self.types)}
        self.type_C = np.array([types[name] for name in names], np.int32)
        self.is_begin_C = np.array([label.startswith("B-") for label in self.labels])
        self.inside_C = np.array([ids[f"I-{name}" if name else "O"] for name in names], np.int32)
        self.begin_Y = np.array([ids[f"B-{name}"] for name in self.types], np.int32)

    @classmethod
    def of_names(cls, names: Sequence[str], location: str = "labels") -> "BioLabels":
        """Create the labels of entity types in their order; with O they are complete BIO labels."""
        if "O" in names:
            return cls(names, location)
        return cls(("O", *(f"{prefix}-{name}" for name in names for prefix in "BI")))


class JoinedWords(NamedTuple):
    """Texts made of words joined by one space.

    Attributes:
        texts: S strings.
        starts: int64 `(N,)`, offset of each word in its text, in characters.
        splits: int64 `(S + 1,)`, row splits of the words by text.
    """

    texts: list[str]
    starts: np.ndarray
    splits: np.ndarray


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


def first_pieces(vocabulary: "Vocabulary") -> np.ndarray:
    """Return bool `(V,)`, whether an entry begins a basic token, that is, has no "##"."""
    return np.array([not entry.startswith("##") for entry in vocabulary.entries])


def join_words(sentences: Sequence[Sequence[str]]) -> JoinedWords:
    """Join the words of each sentence: [["U.S.", "wins"]] becomes "U.S. wins", starts [0, 5]."""
    splits = _splits([len(words) for words in sentences])
    sizes_N = np.array([len(word) + 1 for words in sentences for word in words], np.int64)
    ends_N = np.cumsum(sizes_N)
    begins_S = np.concatenate([[0], ends_N])[splits[:-1]]
    starts_N = ends_N - sizes_N - np.repeat(begins_S, np.diff(splits))
    return JoinedWords([" ".join(words) for words in sentences], starts_N, splits)


def label_words(
    bio: BioLabels,
    words: JoinedWords,
    tokens: "Tokens",
    label_ids_N: np.ndarray,
    is_first_T: np.ndarray,
) -> TokenLabels:
    """Label the tokens of `words.texts` by the words of a column file.

    "U.S." with B-LOC becomes U B-LOC, "." I-LOC, S I-LOC, "." I-LOC; with O, it becomes U O and no
    label for the rest. `is_first_T` marks the first wordpieces of basic tokens.
    """
    basic = np.flatnonzero(is_first_T)
    word_of_basic = _words_of_basic_tokens(words, tokens, basic)
    labelled_words, first = np.unique(word_of_basic, return_index=True)

    labels_T = np.full(len(is_first_T), NO_LABEL, np.int32)
    inside = bio.inside_C[label_ids_N[word_of_basic]]
    # In "@ann", labelled O, "ann" looks like a name; training on O would teach that it is none.
    labels_T[basic] = np.where(inside == 0, NO_LABEL, inside)
    labels_T[basic[first]] = label_ids_N[labelled_words]
    firsts_N = np.full(len(label_ids_N), -1, np.int64)
    firsts_N[labelled_words] = basic[first]
    return TokenLabels(labels_T, firsts_N, words.splits)


def label_spans(
    bio: BioLabels,
    texts: Sequence[str],
    tokens: "Tokens",
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
    labels = np.zeros(num_basic, np.int32)
    begin_ids, sizes = bio.begin_Y[types], after - first
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    labels[np.repeat(first, sizes) + offsets] = np.repeat(bio.inside_C[begin_ids], sizes)
    labels[first] = begin_ids
    return labels


def word_predictions(
    bio: BioLabels, predictions_T: np.ndarray, labelled: TokenLabels
) -> list[list[str]]:
    """Return one list of tags per text, one tag per word of `labelled`; "O" without a token."""
    outside = np.append(predictions_T, 0)  # Index -1 of `firsts` then selects O.
    tags_N = np.array(bio.labels, object)[outside[labelled.firsts]].tolist()
    splits = labelled.splits.tolist()
    return [tags_N[start:end] for start, end in itertools.pairwise(splits)]


def _words_of_basic_tokens(words, tokens, basic):
    """Return the index of the word that each basic token is in."""
    starts_T, _ = _end_to_end(words.texts, tokens)
    word_starts_N = words.starts + np.repeat(_begins(words.texts), np.diff(words.splits))
    return np.searchsorted(word_starts_N, starts_T[basic], "right") - 1


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
