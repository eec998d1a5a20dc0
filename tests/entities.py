"""Helpers for entities: a small vocabulary, windows by hand, labels to logits and back."""

import numpy as np
import tensorflow as tf

from bert_tf import Vocabulary
from bert_tf.text.encoder_inputs import Packed
from tasks.data.windows import Windows
from tasks.types.tagging import (
    NO_LABEL,
    TagLabels,
    entities,
    first_pieces,
    in_windows,
    label_words,
)

ENTRIES = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] paris london berlin ##er ##s anna u s it don t new york city "
    "in the is cafe great i met / ( ) . , ' ! - 東 京"
).split()
VOCABULARY = Vocabulary(ENTRIES)
BIO = TagLabels(("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))


def firsts(tokens, vocabulary=VOCABULARY):
    return first_pieces(vocabulary)[tokens.ids.flat_values]


def windows_of(tokens, vocabulary=VOCABULARY, size=1000, stride=1000):
    """Return windows of `size` tokens every `stride`; the last one with a token is its best."""
    columns = {name: getattr(tokens, name).to_list() for name in ("ids", "starts", "ends")}
    rows, examples, begins, best = {name: [] for name in columns}, [], [], []
    for example, ids in enumerate(columns["ids"]):
        begin = 0
        while True:
            end = min(begin + size, len(ids))
            is_last = end == len(ids)
            around = {"ids": (vocabulary["[CLS]"], vocabulary["[SEP]"])}
            for name, of_texts in columns.items():
                first, last = around.get(name, (-1, -1))
                rows[name].append([first, *of_texts[example][begin:end], last])
            examples.append(example)
            begins.append(begin)
            best.append([False, *(is_last or n < begin + stride for n in range(begin, end)), False])
            if is_last:
                break
            begin += stride
    ragged = {
        name: tf.ragged.constant(values, tf.int32, ragged_rank=1) for name, values in rows.items()
    }
    return Windows(
        Packed(ragged["ids"], tf.zeros_like(ragged["ids"]), ragged["starts"], ragged["ends"]),
        tf.constant(examples, tf.int32),
        tf.constant(begins, tf.int32),
        tf.ones([len(examples)], tf.int32),
        tf.ragged.constant(best, tf.bool, ragged_rank=1),
        is_first=ragged["ids"].with_flat_values(
            tf.constant(first_pieces(vocabulary)[ragged["ids"].flat_values])
        ),
    )


def logits_of(windows, labels_T, num_labels, seed=0):
    """Return one-hot logits times 9 at labels, and random logits elsewhere and in other windows."""
    labels = in_windows(windows, tf.constant(labels_T)).to_tensor(NO_LABEL).numpy()
    anything = np.random.default_rng(seed).normal(0, 20, (*labels.shape, num_labels))
    one_hot = 9.0 * (labels[..., np.newaxis] == np.arange(num_labels))
    return np.where(labels[..., np.newaxis] >= 0, one_hot, anything).astype(np.float32)


def found(answer):
    """Return (start, end, type, text) of each entity for each text, after checking the padding."""
    answer = {name: values.numpy() for name, values in answer.items()}
    result = []
    for row, count in enumerate(answer["num_entities"]):
        fields = [answer[f"entity_{name}"][row] for name in ("start", "end", "type", "text")]
        assert all((field[count:] == -1).all() for field in fields[:2])
        assert all((field[count:] == b"").all() for field in fields[2:])
        assert (answer["entity_score"][row][count:] == -1).all()
        result.append(
            [
                (int(start), int(end), name.decode(), text.decode())
                for start, end, name, text in zip(*(field[:count] for field in fields), strict=True)
            ]
        )
    return result


def decoded(texts, tokens, labels_T, bio=BIO, vocabulary=VOCABULARY, **window_sizes):
    windows = windows_of(tokens, vocabulary, **window_sizes)
    logits = logits_of(windows, labels_T, len(bio.labels))
    return found(entities(tf.constant(texts, tf.string), windows, logits, bio))


def from_words(tokenizer, sentences, tags, bio=BIO):
    texts = [" ".join(words) for words in sentences]
    tokens = tokenizer.tokenize_with_offsets(texts)
    ids = np.array([bio.labels.index(tag) for of_text in tags for tag in of_text.split()], np.int32)
    is_first = firsts(tokens, tokenizer.vocabulary)
    return texts, tokens, label_words(bio, texts, tokens, sentences, ids, is_first)


def read_columns(path):
    sentences, tags = [[]], [[]]
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            word, tag = line.strip().split("\t")
            sentences[-1].append(word)
            tags[-1].append(tag)
        elif sentences[-1]:
            sentences.append([])
            tags.append([])
    return sentences, [" ".join(of_text) for of_text in tags]
