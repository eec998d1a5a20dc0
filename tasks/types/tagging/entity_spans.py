"""Entities of a text from token logits, in the graph.

entity_labels.py defines which tokens have labels and what an entity covers. Only TensorFlow
operations are used, because TF Serving has no others.

`windows` come from tasks.data.windows.pack_windows, with is_first set. Each token of a text is read
from the one window where is_max_context is true for it.

Shape suffixes: B texts, W windows of all texts, (L) tokens of a window (ragged), L tokens of the
longest window or more, C labels, T tokens of all texts, K basic tokens of all texts, M entities of
all texts, E entities of the text that has most.
"""

import numpy as np
import tensorflow as tf

from bert_tf.text.tokenizer import Tokens
from tasks.base.decisions import top2_gap
from tasks.data.substrings import cut_disjoint
from tasks.data.windows import Windows
from tasks.types.tagging.entity_labels import NO_LABEL, BioLabels


def entities(
    texts: tf.Tensor, windows: Windows, logits: tf.Tensor, bio: BioLabels
) -> dict[str, tf.Tensor]:
    """Return the entities of each text, in order, from logits `(W, L, C)`.

    Basic tokens get their most probable label. An I- label that continues no entity of its type
    starts an entity, as in conlleval and seqeval.

    Returns:
        Dict of `entity_text` and `entity_type`, string `(B, E)`, padded with ""; `entity_start` and
        `entity_end`, int32 `(B, E)`, character offsets such that text[start:end] == entity_text in
        Python, padded with -1; `entity_score`, float32 `(B, E)`, mean probability of the labels of
        the entity's basic tokens, padded with -1; `num_entities`, int32 `(B,)`.
    """
    positions_T, example_T = _best_positions(windows)
    is_first_T = _of_tokens(windows.is_first, positions_T)
    basic = tf.where(is_first_T)[:, 0]
    basic_of_T = tf.cumsum(tf.cast(is_first_T, tf.int32)) - 1
    example_K, position_K = tf.gather(example_T, basic), tf.gather(positions_T, basic)
    start_K = _of_tokens(windows.packed.starts, position_K)
    end_K = tf.math.unsorted_segment_max(
        _of_tokens(windows.packed.ends, positions_T), basic_of_T, tf.size(basic)
    )
    logits_KC = tf.cast(_at_positions(windows, logits, position_K), tf.float32)
    probability_K = tf.reduce_max(tf.nn.softmax(logits_KC), axis=-1)
    # Argmax of logits, as in the metrics: two logits may round to the same float32 probability.
    label_K = tf.argmax(logits_KC, axis=-1)
    # NaN would be the first label, which is often O: entities with a score of NaN show it.
    label_K = tf.where(probability_K >= 0, label_K, np.argmax(bio.type_C >= 0))
    type_K = tf.gather(bio.type_C, label_K)

    continues = (type_K[1:] == type_K[:-1]) & (example_K[1:] == example_K[:-1])
    continues = tf.concat([tf.zeros_like(type_K[:1], tf.bool), continues], axis=0)
    is_inside_K = type_K >= 0
    begins_K = is_inside_K & (tf.gather(bio.is_begin_C, label_K) | ~continues)
    begin = tf.where(begins_K)[:, 0]
    entity_K = tf.where(is_inside_K, tf.cumsum(tf.cast(begins_K, tf.int32)) - 1, -1)  # -1: none.
    start_M, example_M = tf.gather(start_K, begin), tf.gather(example_K, begin)
    end_M = tf.math.unsorted_segment_max(end_K, entity_K, tf.size(begin))
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


def min_top2_gap(windows: Windows, logits: tf.Tensor, num_texts: int | tf.Tensor) -> tf.Tensor:
    """Return the smallest gap of probability between a token's two best labels, per text.

    Logits are `(W, L, C)`; the result is `(num_texts,)`, inf for texts without tokens.
    """
    positions_T, example_T = _best_positions(windows)
    gap_T = top2_gap(tf.nn.softmax(_at_positions(windows, logits, positions_T)))
    min_gap = tf.math.unsorted_segment_min(gap_T, example_T, num_texts)
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


def _of_tokens(ragged, position):
    """Gather values of windows, ragged `(W, (L))`, at indices into their flat tokens."""
    return tf.gather(ragged.flat_values, position)


def _coordinates(windows, position):
    """Convert indices into the windows' flat tokens to (window, position in it), int64."""
    window = tf.gather(windows.is_max_context.value_rowids(), position)
    return window, position - tf.gather(windows.is_max_context.row_starts(), window)


def _at_positions(windows, values, position):
    return tf.gather_nd(values, tf.stack(_coordinates(windows, position), axis=-1))
