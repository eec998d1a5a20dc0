"""Labels of tokens for tagging: from the words of a column file, or from character spans.

What carries a label is the first piece of a basic token, that is of what the tokenizer makes
before WordPiece: a run of letters and digits, or one punctuation mark ("U.S." has four, "Anna's"
three). One rule, in training on either kind of file and in serving:

    Every basic token may have a label; an entity is a run of them that BIO joins; it covers the
    characters from the first one's start to the last one's end. Other pieces have none.

It has to hold without looking at spaces, since BERT does not see them: "(Berlin)" and "( Berlin )"
are the same ids. Devlin et al. 2019, 5.3 label the first piece of each word. The same comes of this
where a word of a column file is one basic token; where it is more ("U.S.", "@user"), the others
are labelled as its continuation if it is (part of) an entity, since a served model, which is told
of no words, has to give "U.S." whole. The others of a word that is O are left out of the loss:
learning that the name in "@ann" is O cost five points of F1 on tweets. Words are measured by their
first piece alone, as in the paper.

Limits: served, text as written may have entities inside of what a column file holds to be one word
that is O ("@ann"); a border inside a basic token ("Berlin" in "Berliner") cannot be told; and where
a column file cuts words inside one ("do n't", "can not"), its tokens are not those of the text as
written.

Legend: S texts (sentences), N their words, T their tokens, laid end to end; V vocabulary entries,
C labels, Y entity types.
"""

import itertools
from typing import NamedTuple

import numpy as np

from bert_tf.errors import UserError

NO_LABEL = -1


def entity_type(tag, location):
    """The type that a BIO tag names: "B-PER" -> "PER", "O" -> None.

    Else UserError at `location`.
    """
    prefix, _, name = tag.partition("-")
    if tag != "O" and (prefix not in ("B", "I") or not name):
        raise UserError(f"{location}: tag {tag!r}, wanted O, B-TYPE or I-TYPE")
    return name or None


class BioLabels:
    """A task's labels, "O" first, and what each means; of every type both B- and I-.

    types: the types' names [Y]. As arrays by label id: type_C int32, the number of its type, -1
    for O; is_begin_C bool; inside_C int32, the label that continues it. begin_Y int32: the B- label
    of each type.
    """

    def __init__(self, labels, location="labels"):
        self.labels = tuple(labels)
        names = [entity_type(label, location) for label in self.labels]
        self.types = tuple(dict.fromkeys(name for name in names if name))
        expected = [f"{prefix}-{name}" for name in self.types for prefix in "BI"]
        if not expected or self.labels[0] != "O" or sorted(self.labels[1:]) != sorted(expected):
            raise UserError(
                f"{location}: {', '.join(self.labels)}; wanted O first, then B- and I- of one "
                "type or more, each label once"
            )
        ids = {label: number for number, label in enumerate(self.labels)}
        types = {name: number for number, name in enumerate(self.types)}
        self.type_C = np.array([types.get(name, -1) for name in names], np.int32)
        self.is_begin_C = np.array([label.startswith("B-") for label in self.labels])
        self.inside_C = np.array([ids[f"I-{name}" if name else "O"] for name in names], np.int32)
        self.begin_Y = np.array([ids[f"B-{name}"] for name in self.types], np.int32)

    @classmethod
    def of_types(cls, types):
        """O, then B- and I- of each type in the order given."""
        return cls(("O", *(f"{prefix}-{name}" for name in types for prefix in "BI")))


class JoinedWords(NamedTuple):
    """Sentences as texts: words joined by one space.

    texts: S strings; starts int64 [N], each word's first character in its text; splits int64
    [S + 1], the words of each text.
    """

    texts: list[str]
    starts: np.ndarray
    splits: np.ndarray


class TokenLabels(NamedTuple):
    """labels int32 [T], NO_LABEL where none stands; and the words that are measured.

    firsts int64 [N]: the token that speaks for a word, -1 if the word left no token (a lone control
    character); splits int64 [S + 1]: the words of each text.
    """

    labels: np.ndarray
    firsts: np.ndarray
    splits: np.ndarray

    @property
    def num_without_token(self):
        return int(np.sum(self.firsts < 0))


class SpanLabels(NamedTuple):
    """Labels of character spans, and what they could not say.

    num_widened: entities with a border inside a basic token, which now take all of it. num_lost:
    those that hold no basic token of their own, but only spaces or part of another entity's.
    """

    tokens: TokenLabels
    num_widened: int
    num_lost: int


def first_pieces(vocabulary):
    """bool [V]: whether an entry begins a basic token; only "##" entries continue one."""
    return np.array([not entry.startswith("##") for entry in vocabulary.entries])


def join_words(sentences):
    """Lists of words -> JoinedWords. [["U.S.", "wins"]] -> ["U.S. wins"], starts [0, 5]."""
    splits = _splits([len(words) for words in sentences])
    sizes_N = np.array([len(word) + 1 for words in sentences for word in words], np.int64)
    ends_N = np.cumsum(sizes_N)
    begins_S = np.concatenate([[0], ends_N])[splits[:-1]]
    starts_N = ends_N - sizes_N - np.repeat(begins_S, np.diff(splits))
    return JoinedWords([" ".join(words) for words in sentences], starts_N, splits)


def label_words(bio, words, tokens, label_ids_N, is_first_T):
    """Labels from the words of a column file -> TokenLabels.

    `words` is a JoinedWords, `tokens` its texts' Tokens with offsets, label_ids_N int [N] the
    words' labels; is_first_T bool [T], the tokens that are first pieces. "U.S." of B-LOC ->
    U B-LOC, "." I-LOC, S I-LOC, "." I-LOC; of O -> U O, and no label for the rest.
    """
    starts_T, _, begins_S = _end_to_end(words.texts, tokens)
    word_starts_N = words.starts + np.repeat(begins_S, np.diff(words.splits))
    basic = np.flatnonzero(is_first_T)
    word_of_basic = np.searchsorted(word_starts_N, starts_T[basic], "right") - 1
    spoken_for, first = np.unique(word_of_basic, return_index=True)

    labels_T = np.full(len(is_first_T), NO_LABEL, np.int32)
    inside = bio.inside_C[label_ids_N[word_of_basic]]
    # Of "@ann", which is O, "ann" looks like a name, and says nothing of names.
    labels_T[basic] = np.where(inside == 0, NO_LABEL, inside)
    firsts_N = np.full(len(word_starts_N), -1, np.int64)
    firsts_N[spoken_for] = basic[first]
    labels_T[basic[first]] = label_ids_N[spoken_for]
    return TokenLabels(labels_T, firsts_N, words.splits)


def label_spans(bio, texts, tokens, spans, is_first_T):
    """Labels from character spans -> SpanLabels, where every basic token is a word.

    `tokens` are the texts' with offsets; `spans` a list a text of (start, end, type), by their
    start, no two of which overlap; is_first_T as for words. An entity takes each basic token that
    it shares a character with.
    """
    starts_T, ends_T, begins_S = _end_to_end(texts, tokens)
    basic = np.flatnonzero(is_first_T)
    starts = starts_T[basic]
    ends = np.maximum.reduceat(ends_T, basic) if len(basic) else ends_T

    types = {name: number for number, name in enumerate(bio.types)}
    entities = np.array(
        [
            (begin + start, begin + end, types[name])
            for begin, of_text in zip(begins_S.tolist(), spans, strict=True)
            for start, end, name in of_text
        ],
        np.int64,
    ).reshape(-1, 3)
    first = np.searchsorted(ends, entities[:, 0], "right")
    after = np.searchsorted(starts, entities[:, 1], "left")
    first[1:] = np.maximum(first[1:], after[:-1])  # A shared basic token is the former's.
    kept = first < after
    num_lost = int(np.sum(~kept))
    entities, first, after = entities[kept], first[kept], after[kept]
    is_widened = (starts[first] < entities[:, 0]) | (ends[after - 1] > entities[:, 1])

    labels_T = np.full(len(is_first_T), NO_LABEL, np.int32)
    labels_T[basic] = 0
    begin_ids, sizes = bio.begin_Y[entities[:, 2]], after - first
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    inside = np.repeat(first, sizes) + offsets
    labels_T[basic[inside]] = np.repeat(bio.inside_C[begin_ids], sizes)
    labels_T[basic[first]] = begin_ids
    splits = np.searchsorted(basic, tokens.ids.row_splits.numpy())
    return SpanLabels(TokenLabels(labels_T, basic, splits), int(is_widened.sum()), num_lost)


def word_predictions(bio, predictions_T, labelled):
    """Predicted label ids [T] -> a list of tags a text, one for each of its words.

    `labelled` is the texts' TokenLabels. A word that left no token is "O", so that the lists stay
    as long as the words.
    """
    outside = np.append(predictions_T, 0)  # Where firsts is -1.
    tags_N = np.array(bio.labels, object)[outside[labelled.firsts]].tolist()
    splits = labelled.splits.tolist()
    return [tags_N[start:end] for start, end in itertools.pairwise(splits)]


def _end_to_end(texts, tokens):
    """starts, ends [T], counted as if all texts stood end to end; where each text begins."""
    begins_S = _splits([len(text) for text in texts])[:-1]
    begins_T = np.repeat(begins_S, tokens.ids.row_lengths().numpy())
    starts_T, ends_T = (
        begins_T + ragged.flat_values.numpy() for ragged in (tokens.starts, tokens.ends)
    )
    return starts_T, ends_T, begins_S


def _splits(lengths):
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
