"""Network of embedders: encoder, pooling, dense layers and normalization.

Shape suffixes: B sequences of a batch, N rows of C texts, D size of a vector.
"""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model.dense import dense
from bert_tf.weights.pretrained_encoder import Encoder
from bert_tf.weights.sentence_transformers import pooled_size
from tasks.graph.heads import POOLING, EncoderModel, on_grid

# By name: number of last layers, and their combination. Embeddings are not a layer.
LAYERS = {
    "last": (1, lambda outputs: outputs[0]),
    "second_to_last": (2, lambda outputs: outputs[0]),
    # In float32: half precision rounds each sum.
    "sum_last_4": (4, lambda outputs: tf.add_n([tf.cast(x, tf.float32) for x in outputs])),
    "concat_last_4": (4, lambda outputs: tf.concat(outputs, axis=-1)),
}
ACTIVATIONS = {"tanh": "tanh", "identity": None}  # Of dense layers: name in Keras.
MIN_NORM = 1e-12  # Of a vector that is divided by its norm, as in PyTorch.


def cosine(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return the cosines of vectors `(..., D)`, `(...)`; 0 for a vector of zeros."""
    return tf.reduce_sum(normalized(a) * normalized(b), axis=-1)


# By name, from two tensors `(..., D)` of vectors to scores `(...)`; a distance is negated, so that
# more similar vectors have a larger score.
SIMILARITIES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "cosine": cosine,
    "dot": lambda a, b: tf.reduce_sum(a * b, axis=-1),
    "euclidean": lambda a, b: -tf.norm(a - b, axis=-1),
    "manhattan": lambda a, b: -tf.norm(a - b, ord=1, axis=-1),
}


def normalized(vectors: tf.Tensor) -> tf.Tensor:
    """Return vectors `(..., D)` divided by their norms."""
    return tf.math.l2_normalize(vectors, axis=-1, epsilon=MIN_NORM**2)


class EmbeddingModel(EncoderModel):
    """Encoder, pooling, dense layers and normalization, built on construction.

    Args:
        config: Configuration of the encoder.
        layers: A key of LAYERS.
        pooling: A key of POOLING, or several joined by "+".
        dense_units: Outputs of each dense layer.
        dense_activations: A key of ACTIVATIONS per dense layer.
        normalize: Whether vectors have the norm 1.
        dtype: Keras dtype policy of the encoder.
        name: Name of the model.

    Attributes:
        vector_size: D.
    """

    uses_pooler = False
    missing = 0.0

    def __init__(
        self,
        config: BertConfig,
        layers: str = "last",
        pooling: str = "mean",
        dense_units: Sequence[int] = (),
        dense_activations: Sequence[str] = (),
        normalize: bool = False,
        dtype: str = "float32",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, autocast=False)  # Token ids may be floats.
        self.layer_name, self.normalize = layers, normalize
        self.pools = tuple(POOLING[part] for part in pooling.split("+"))
        self.encoder = Encoder(config, dtype=dtype)
        self.encoder.build()
        size = pooled_size(config, layers, pooling)
        self.dense_layers = []
        for number, (units, activation) in enumerate(
            zip(dense_units, dense_activations, strict=True)
        ):
            layer = dense(config, units, f"dense_{number}", "float32", ACTIVATIONS[activation])
            layer.build((None, size))
            self.dense_layers.append(layer)
            size = units
        self.vector_size = size
        self.built = True

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Compute vectors.

        Args:
            inputs: Batch in either layout of the encoder; in training also `windows`, int32
                `(N, C)`, the indices of the texts of each row, -1 for a missing text.
            training: Turns dropout on.
            seed: Dropout seed.

        Returns:
            Dict of "embedding", float32 `(B, D)`; or `(N, C, D)`, 0 for a missing text.
        """
        inputs = dict(inputs)
        windows_NC = inputs.pop("windows", None)
        tokens = self.token_vectors(inputs, training, seed)
        vectors_BD = tf.concat([pool(tokens, inputs) for pool in self.pools], axis=-1)
        for layer in self.dense_layers:
            vectors_BD = layer(vectors_BD)
        if self.normalize:
            vectors_BD = normalized(vectors_BD)
        if windows_NC is None:
            return {"embedding": vectors_BD}
        return {"embedding": on_grid(vectors_BD, windows_NC, self.missing)}

    def token_vectors(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Compute a vector per token, before pooling; arguments as in `call`.

        Returns:
            `(R, L, H)`, or `(T, H)` in the flat layout; four times as large for "concat_last_4".
        """
        if self.layer_name == "last":
            return self.encoder(inputs, training=training, seed=seed)["sequence"]
        outputs = self.encoder(inputs, training=training, seed=seed, output_hidden_states=True)
        count, combine = LAYERS[self.layer_name]
        return combine(outputs["hidden_states"][-count:])
