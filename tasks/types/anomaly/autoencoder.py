"""Model of anomaly detection: a frozen encoder and an autoencoder on its features.

Shape suffixes: B texts, N training texts, H hidden size, K size of the code.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model.dense import dense
from bert_tf.weights.pretrained_encoder import Encoder
from tasks.graph.pooling import mean_of_tokens

INNER_SIZE = 256


class AutoencoderModel(keras.Model):
    """Autoencoder on the features of a frozen encoder.

    A feature is the mean of the last layer over all tokens, normalized to length 1, because the
    norm of the mean depends on the length of the text. The encoder is frozen; otherwise it would
    learn to map all texts to one feature.

    Encoder and decoder are each a linear map plus a correction by a hidden gelu layer. `adapt`
    initializes the maps with PCA and the corrections with 0, so training learns what PCA lacks.

    Args:
        config: Configuration of the encoder.
        latent_dim: Size of the code, less than hidden_size.
        **kwargs: Arguments of keras.Model.
    """

    def __init__(self, config: BertConfig, latent_dim: int, **kwargs):
        # With autocast, features would be cast to bfloat16 under a mixed-precision policy.
        super().__init__(autocast=False, **kwargs)
        self.config, self.latent_dim = config, latent_dim
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.encoder.trainable = False
        self.code = _Corrected(config, latent_dim, dtype="float32", name="code")
        self.reconstruction = _Corrected(
            config, config.hidden_size, dtype="float32", name="reconstruction"
        )
        self.build()

    def build(self, inputs_shape: object = None) -> None:
        """Create all weights; shapes follow from the configuration."""
        hidden_size = self.config.hidden_size
        self.encoder.build()
        self.code.build((None, hidden_size))
        self.reconstruction.build((None, self.latent_dim))

        def fixed(name, shape, initializer):
            return self.add_weight(
                shape=shape, name=name, initializer=initializer, trainable=False, dtype="float32"
            )

        self.mean_H = fixed("mean", (hidden_size,), "zeros")
        self.spread = fixed("spread", (), "ones")
        self.components_HK = fixed("components", (hidden_size, self.latent_dim), "zeros")

    def adapt(self, vectors_NH: np.ndarray | tf.Tensor) -> None:
        """Fit mean, spread and components to features `(N, H)`, and initialize with PCA."""
        vectors_NH = np.asarray(vectors_NH)
        # Sums over many texts lose precision in float32.
        mean_H = vectors_NH.mean(axis=0, dtype=np.float64).astype(np.float32)
        centered_NH = vectors_NH - mean_H
        self.mean_H.assign(mean_H)
        self.spread.assign(np.sqrt(np.mean(centered_NH**2, dtype=np.float64)) or 1.0)
        # eigh returns eigenvectors as columns, in ascending order of their eigenvalues.
        directions_HH = np.linalg.eigh(centered_NH.T @ centered_NH)[1]
        components_HK = directions_HH[:, : -self.latent_dim - 1 : -1]
        self.components_HK.assign(components_HK)
        self.code.start_with(components_HK)
        self.reconstruction.start_with(components_HK.T)

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Compute anomaly scores.

        The first three outputs are mean squares over H of standardized features, that is, after
        subtracting the training mean and dividing by the training spread.

        Args:
            inputs: Batch in either layout, or `{"vector": (B, H)}` with precomputed features.
            training: Ignored, as is the seed; there is no dropout.
            seed: Passed by the train step.

        Returns:
            Dict of float32: `score` `(B,)`, reconstruction error of the autoencoder; `pca` `(B,)`,
            reconstruction error with K principal components; `mean_distance` `(B,)`, squared
            distance to the training mean; `vector` `(B, H)`, the features.
        """
        vectors_BH = self._vectors(inputs)
        x_BH = (vectors_BH - self.mean_H) / self.spread
        projected_BH = tf.matmul(
            tf.matmul(x_BH, self.components_HK), self.components_HK, transpose_b=True
        )
        return {
            "score": _mean_square(x_BH - self.reconstruction(self.code(x_BH))),
            "pca": _mean_square(x_BH - projected_BH),
            "mean_distance": _mean_square(x_BH),
            "vector": vectors_BH,
        }

    def _vectors(self, inputs):
        if "vector" in inputs:
            return tf.cast(inputs["vector"], tf.float32)
        means_BH = mean_of_tokens(self.encoder(inputs)["sequence"], inputs)
        return tf.math.l2_normalize(means_BH, axis=-1)


class _Corrected(keras.layers.Layer):
    """Linear map plus a correction by a hidden gelu layer."""

    def __init__(self, config, units, **kwargs):
        super().__init__(**kwargs)
        self.linear, self.inner, self.correction = (
            dense(config, size, name, "float32", activation)
            for name, size, activation in (
                ("linear", units, None),
                ("inner", INNER_SIZE, "gelu"),
                ("correction", units, None),
            )
        )

    def build(self, input_shape):
        self.linear.build(input_shape)
        self.inner.build(input_shape)
        self.correction.build((None, INNER_SIZE))

    def start_with(self, kernel):
        self.linear.kernel.assign(kernel)
        self.correction.kernel.assign(tf.zeros(self.correction.kernel.shape))

    def call(self, x):
        return self.linear(x) + self.correction(self.inner(x))


def _mean_square(x_BH):
    return tf.reduce_mean(tf.square(x_BH), axis=-1)
