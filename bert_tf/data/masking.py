"""Masks for masked language modeling, drawn in the graph with a stateless generator.

Follows google-research/bert, create_pretraining_data.py (Devlin et al. 2019, 3.1 and A.1). Each
example has its own key, from which all its random numbers are hashed. Masks therefore do not depend
on the batch, the number of processes or TensorFlow's random generators.

Shape suffixes: B batch size, L sequence length, P maximum predictions per sequence, W words, V
vocabulary size.
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.fused_kernels import GAMMA, mix
from bert_tf.text.vocabulary import SPECIALS, UNUSED, Vocabulary

_ACTIONS, _OTHERS = np.uint64(0x5851F42D4C957F2D), np.uint64(0x14057B7EF767814F)


class MaskGenerator:
    """Select tokens to predict; replace 80% by [MASK] and 10% by random tokens, keep 10%.

    The arguments are settings of write_shards, P is `max_predictions_per_seq`. With
    `replace_with_any`, random tokens may be special tokens and [unused] entries, as in
    google-research/bert.

    Raises:
        UserError: If the vocabulary has no entry for random replacements.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        masked_lm_prob: float,
        max_predictions_per_seq: int,
        whole_word_mask: bool = False,
        replace_with_any: bool = False,
    ) -> None:
        self.masked_lm_prob = masked_lm_prob
        self.max_predictions_per_seq = max_predictions_per_seq
        self.whole_word_mask = whole_word_mask
        self._mask_id = vocabulary["[MASK]"]
        self._apart_ids = [vocabulary["[CLS]"], vocabulary["[SEP]"]]
        entries = vocabulary.entries
        self._is_piece_V = np.array([entry.startswith("##") for entry in entries])
        self._replacements = np.array(
            [
                index
                for index, entry in enumerate(entries)
                if replace_with_any or not (entry in SPECIALS or UNUSED.fullmatch(entry))
            ],
            np.int32,
        )
        if not len(self._replacements):
            raise UserError(
                f"vocabulary of {len(entries)} entries: only special tokens and [unused]; expected "
                "words and pieces; check --vocab"
            )

    def __call__(
        self, examples: Mapping[str, tf.Tensor], keys_B: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Mask a batch of examples.

        Args:
            examples: Dict with int32 input_ids and input_mask `(B, L)`.
            keys_B: uint64 keys of the examples, from `keys`.

        Returns:
            The dict with masked input_ids, and with int32 masked_lm_positions and masked_lm_ids and
            float32 masked_lm_weights `(B, P)`, which are 0 for unused predictions.
        """
        ids_BL = examples["input_ids"]
        length = tf.shape(ids_BL)[1]
        is_candidate_BL = examples["input_mask"] > 0
        for apart in self._apart_ids:
            is_candidate_BL &= ids_BL != apart
        lengths_B = tf.cast(tf.reduce_sum(examples["input_mask"], axis=1), tf.float64)
        # tf.round rounds half to even, as Python's round does in google-research/bert.
        target_B = tf.cast(tf.round(lengths_B * self.masked_lm_prob), tf.int32)
        target_B = tf.clip_by_value(target_B, 1, self.max_predictions_per_seq)
        choose = self._whole_words if self.whole_word_mask else self._tokens
        positions_BP = choose(ids_BL, is_candidate_BL, target_B, random_int63(keys_B, length))

        # Positions are padded with L, which is no valid index.
        is_filled_BP = positions_BP < length
        positions_BP = tf.where(is_filled_BP, positions_BP, 0)
        labels_BP = tf.gather(ids_BL, positions_BP, batch_dims=1)
        input_ids = self._replaced(ids_BL, positions_BP, is_filled_BP, labels_BP, keys_B)
        return {
            **examples,
            "input_ids": input_ids,
            "masked_lm_positions": positions_BP,
            "masked_lm_ids": tf.where(is_filled_BP, labels_BP, 0),
            "masked_lm_weights": tf.cast(is_filled_BP, tf.float32),
        }

    def _tokens(self, ids_BL, is_candidate_BL, target_B, draws_BL):
        """Select single tokens. Return ascending positions `(B, P)`, padded with L."""
        # Candidates with the smallest random numbers are a uniform sample without replacement.
        draws_BL = tf.where(is_candidate_BL, draws_BL, tf.int64.max)
        count = tf.minimum(self.max_predictions_per_seq, tf.shape(ids_BL)[1])
        order_BP = tf.math.top_k(-draws_BL, count).indices
        count_B = tf.minimum(target_B, tf.math.count_nonzero(is_candidate_BL, 1, dtype=tf.int32))
        is_chosen = tf.range(count) < count_B[:, tf.newaxis]
        return self._filled(tf.sort(tf.where(is_chosen, order_BP, tf.shape(ids_BL)[1])), ids_BL)

    def _whole_words(self, ids_BL, is_candidate_BL, target_B, draws_BL):
        """Select words, as `_tokens`. A word that would exceed the target is skipped."""
        # A word starts at a candidate that is no "##" piece, or is the first of its sequence.
        # word_BL is the index of the word, or -1 for special tokens and padding.
        length = tf.shape(ids_BL)[1]
        is_first_BL = tf.cumsum(tf.cast(is_candidate_BL, tf.int32), axis=1) == 1
        is_head_BL = is_candidate_BL & (~tf.gather(self._is_piece_V, ids_BL) | is_first_BL)
        word_BL = tf.cumsum(tf.cast(is_head_BL, tf.int32), axis=1) - 1
        word_BL = tf.where(is_candidate_BL, word_BL, -1)
        # Pieces per word, then the words in random order.
        sizes_BW = tf.math.bincount(
            word_BL + 1, minlength=length + 1, maxlength=length + 1, axis=-1
        )[:, 1:]
        order_BW = tf.argsort(tf.where(sizes_BW > 0, draws_BL, tf.int64.max), axis=1)
        sizes_WB = tf.transpose(tf.gather(sizes_BW, order_BW, batch_dims=1))

        def take(carry, size_B):
            total_B = carry[0]
            is_taken_B = (size_B > 0) & (total_B + size_B <= target_B)
            return total_B + tf.where(is_taken_B, size_B, 0), is_taken_B

        # The sum depends on the words taken before, so words are taken one after the other, for all
        # sequences in parallel.
        start = (tf.zeros_like(target_B), tf.zeros_like(target_B, tf.bool))
        is_taken_BW = tf.transpose(tf.scan(take, sizes_WB, start)[1])
        # The argsort of a permutation is its inverse: from random order back to word order.
        is_taken_BW = tf.gather(is_taken_BW, tf.argsort(order_BW, axis=1), batch_dims=1)
        is_taken_BL = tf.gather(is_taken_BW, tf.maximum(word_BL, 0), batch_dims=1)
        positions = tf.where(is_candidate_BL & is_taken_BL, tf.range(length), length)
        return self._filled(tf.sort(positions)[:, : self.max_predictions_per_seq], ids_BL)

    def _filled(self, positions, ids_BL):
        """Pad positions to `(B, P)` with L, for sequences shorter than P."""
        missing = self.max_predictions_per_seq - tf.shape(positions)[1]
        positions = tf.pad(positions, [[0, 0], [0, missing]], constant_values=tf.shape(ids_BL)[1])
        return tf.ensure_shape(positions, [None, self.max_predictions_per_seq])

    def _replaced(self, ids_BL, positions_BP, is_filled_BP, labels_BP, keys_B):
        """Return input_ids `(B, L)` with 80% [MASK], 10% kept and 10% random tokens."""
        # Actions and replacements use streams of their own, independent of the positions.
        actions_BP = random_int63(mix(keys_B ^ _ACTIONS), self.max_predictions_per_seq)
        others_BP = random_int63(mix(keys_B ^ _OTHERS), self.max_predictions_per_seq)
        others_BP = tf.gather(self._replacements, others_BP % len(self._replacements))
        tenth = tf.int64.max // 10
        new_BP = tf.where(
            actions_BP < 8 * tenth,
            self._mask_id,
            tf.where(actions_BP < 9 * tenth, labels_BP, others_BP),
        )
        where = tf.where(is_filled_BP)
        rows = tf.stack([where[:, 0], tf.cast(tf.gather_nd(positions_BP, where), tf.int64)], axis=1)
        return tf.tensor_scatter_nd_update(ids_BL, rows, tf.gather_nd(new_BP, where))


def keys(
    seed: tf.Tensor | int, stream: tf.Tensor | int, numbers_B: tf.Tensor | np.ndarray
) -> tf.Tensor:
    """Return the keys of examples.

    Args:
        seed: Random seed.
        stream: Epoch (dynamic masking) or shard (static masking), a scalar or `(B,)`.
        numbers_B: Integer index of each example in the stream.

    Returns:
        uint64 `(B,)`.
    """
    key = mix(tf.cast(seed, tf.uint64) * GAMMA)
    key = mix(key ^ (tf.cast(stream, tf.uint64) + 1) * GAMMA)
    return mix(key ^ (tf.cast(numbers_B, tf.uint64) + 1) * GAMMA)


def random_int63(keys_B: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
    """Draw uniform integers in [0, 2**63), the output of SplitMix64 without its lowest bit.

    Args:
        keys_B: uint64 seed per row.
        count: Numbers per row.

    Returns:
        int64 `(B, count)`.
    """
    steps = tf.cast(tf.range(1, count + 1), tf.uint64) * GAMMA
    mixed = mix(keys_B[:, tf.newaxis] + steps)
    return tf.cast(tf.bitwise.right_shift(mixed, np.uint64(1)), tf.int64)
