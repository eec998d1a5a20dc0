"""Predicted tokens at the masks of a text.

Shape suffixes: M masks, V vocabulary size, K candidates.
"""

from typing import TypedDict

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.text.encoder_inputs import pack, to_padded
from bert_tf.text.tokenizer import MASK, Tokenizer, tokenize_masked
from bert_tf.weights.sources import PretrainedWeights


class Candidates(TypedDict):
    """Most probable tokens at a mask, best first."""

    token: list[str]  # Entries of the vocabulary.
    score: list[float]  # Their probabilities.


def check_head(pretrained: PretrainedWeights) -> None:
    """Raise UserError unless pretrained weights have a masked language model head."""
    if "masked_lm" not in pretrained.heads:
        raise UserError(
            f"{pretrained.origin}: expected weights with a masked language model head, received "
            f"{', '.join(pretrained.heads) or 'no head'}; use a pretraining checkpoint, such as "
            "BertForPreTraining or BertForMaskedLM"
        )


def fill_masks(
    model: PretrainingModel, tokenizer: Tokenizer, text: str, top_k: int = 5
) -> list[Candidates]:
    """Predict the `top_k` tokens at each "[MASK]" of a text, each one independently of the others.

    Raises:
        UserError: If the text has no mask or too many tokens, or K is not in [1, V].
    """
    vocabulary, num_positions = tokenizer.vocabulary, model.config.max_position_embeddings
    if not 1 <= top_k <= len(vocabulary):
        raise UserError(f"top_k={top_k}: expected an integer in [1, {len(vocabulary)}]")
    if MASK not in text:
        raise UserError(f"{text!r:.80}: expected a text with {MASK}")
    tokens = tokenize_masked(tf.constant([text]), tokenizer.tokenize, vocabulary)
    length = int(tokens.ids.row_lengths()[0]) + 2  # [CLS] and [SEP].
    if length > num_positions:
        raise UserError(
            f"{text!r:.80}: expected at most {num_positions} tokens with [CLS] and [SEP], received "
            f"{length}"
        )
    inputs = to_padded(pack([tokens], vocabulary, num_positions), vocabulary)
    mask_M = np.flatnonzero(inputs["input_ids"][0] == vocabulary[MASK])
    logits_MV = model({**inputs, "masked_lm_positions": mask_M[np.newaxis]})["masked_lm"][0]
    score_MK, id_MK = (array.numpy() for array in tf.math.top_k(tf.nn.softmax(logits_MV), top_k))
    return [
        Candidates(token=[vocabulary.entries[number] for number in ids], score=scores)
        for ids, scores in zip(id_MK.tolist(), score_MK.tolist(), strict=True)
    ]
