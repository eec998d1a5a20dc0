"""The model of what is normal: a frozen encoder, and an autoencoder on its vectors.

Legend: B texts, N texts of training, H hidden size, K size of the code.
"""

import keras
import numpy as np
import tensorflow as tf

import bert_tf.train.optimizer  # noqa: F401  Where a saved, compiled model finds its AdamW.
from bert_tf.config import BertConfig
from bert_tf.model.encoder import Encoder
from bert_tf.model.layers import dense
from tasks.pooling import mean_of_tokens

INNER_SIZE = 256


@keras.saving.register_keras_serializable("bert_tf")
class AutoencoderModel(keras.Model):
    """How badly a text's vector is told by K numbers, when what is normal is told well.

    The vector is the mean of the last layer over all tokens, scaled to length 1, since the mean's
    length tells how long a text is. The encoder is frozen, else it would learn to give the same
    vector always. Takes a batch in either layout, or {"vector": [B, H]} as it gave them before;
    returns a dict of float32, the first three mean squares over H of what is left of the vector,
    less the training texts' mean and in units of their spread:

        "score" [B]          after the autoencoder
        "pca" [B]            after the K principal components of training
        "mean_distance" [B]  after nothing
        "vector" [B, H]

    Code and reconstruction are each a linear map plus the correction of an inner gelu layer.
    `adapt` sets the maps to those of PCA and the corrections to 0: what is learned is what PCA
    lacks.
    """

    def __init__(self, config, code_size, name=None, **kwargs):
        # Without autocast, under which vectors would come in bfloat16.
        super().__init__(name=name, autocast=False, **kwargs)
        self.config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.latent_dim = code_size  # The name in get_config.
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.encoder.trainable = False
        self.code = _Corrected(self.config, code_size, dtype="float32", name="code")
        self.reconstruction = _Corrected(
            self.config, self.config.hidden_size, dtype="float32", name="reconstruction"
        )

    def build(self, inputs_shape=None):
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

    def adapt(self, vectors_NH):
        """Sets mean, spread and components of training, and begins as PCA."""
        vectors_NH = np.asarray(vectors_NH)
        mean_H = vectors_NH.mean(axis=0, dtype=np.float64).astype(np.float32)
        centered_NH = vectors_NH - mean_H
        self.mean_H.assign(mean_H)
        self.spread.assign(np.sqrt(np.mean(centered_NH**2, dtype=np.float64)) or 1.0)
        # Columns are directions, those of the smallest variance first.
        directions_HH = np.linalg.eigh(centered_NH.T @ centered_NH)[1]
        components_HK = directions_HH[:, : -self.latent_dim - 1 : -1]
        self.components_HK.assign(components_HK)
        self.code.start_with(components_HK)
        self.reconstruction.start_with(components_HK.T)

    def call(self, inputs, training=False, seed=None):
        """Draws no noise; `seed` is there because the train step gives one."""
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

    def get_config(self):
        own = {"config": self.config.to_dict(), "code_size": self.latent_dim}
        return {**super().get_config(), **own}


class _Corrected(keras.layers.Layer):
    """A linear map, and what an inner gelu layer adds to it."""

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
