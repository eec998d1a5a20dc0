"""Attention probabilities of a text, for every layer and head.

Shape suffixes: N layers, A heads, T tokens.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.packing import pack
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.weights.pretrained_encoder import Encoder
from bert_tf.weights.sources import PretrainedWeights


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of one sequence.

    Attributes:
        tokens: T tokens with [CLS] and [SEP].
        segments: Segment of each token, 0 or 1.
        weights_NATT: float32 `(N, A, T, T)`; [n, a, i, j] is how much token i attends to token j.
    """

    tokens: list[str]
    segments: list[int]
    weights_NATT: np.ndarray


def attention_of(
    pretrained: PretrainedWeights, text: str, text_b: str | None = None, max_seq_length: int = 128
) -> Attention:
    """Compute the attention of a text or pair.

    Args:
        pretrained: Configuration, vocabulary and weights.
        text: The text.
        text_b: Second text of a pair.
        max_seq_length: Maximum tokens, with [CLS] and [SEP]; longer texts are truncated.

    Raises:
        UserError: If the encoder has fewer positions or segments.
    """
    config, vocabulary = pretrained.config, pretrained.vocabulary
    if max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"--max_seq_length={max_seq_length}: expected at most "
            f"{config.max_position_embeddings}, the number of positions of {pretrained.origin}"
        )
    if text_b is not None and config.type_vocab_size < 2:
        raise UserError(f"--text_b: {pretrained.origin} has no second segment")
    encoder = Encoder(config)
    encoder.build()
    pretrained.assign_to(encoder)
    tokenizer = Tokenizer.from_config(config, vocabulary)
    texts = [text] if text_b is None else [text, text_b]
    segments = [tokenizer.tokenize(tf.constant([one])) for one in texts]
    inputs = to_padded(pack(segments, vocabulary, max_seq_length), vocabulary)
    weights_NATT = np.stack(
        [layer[0] for layer in encoder(inputs, output_hidden_states=True)["attentions"]]
    )
    ids = inputs["input_ids"][0].numpy()
    return Attention(
        [vocabulary.entries[number] for number in ids],
        inputs["segment_ids"][0].numpy().tolist(),
        weights_NATT,
    )
