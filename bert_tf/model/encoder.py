"""The encoder: token ids in, a vector a token and one a text out.

Legend: B texts, L tokens, T rows, H hidden size, N heads.
"""

import functools

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model import layers
from bert_tf.model.layout import infer_layout


@keras.saving.register_keras_serializable("bert_tf")
class Encoder(keras.layers.Layer):
    """BERT (Devlin et al. 2019): embeddings, post-norm Transformer layers, pooler.

    Takes a batch in either layout, ints; without dropout the two give the same numbers:

        padded  {input_ids, input_mask, segment_ids} [B, L]; mask 1 = token, 0 = padding, whose
                content reaches no token
        flat    {input_ids, segment_ids} [T] and row_splits [B + 1]: text b is the tokens
                row_splits[b] up to row_splits[b + 1], at least one; those from row_splits[-1]
                on are nobody's. Not for XLA, nor for `fit`, to which axis 0 is the batch.

    Returns a dict: "sequence" [B, L, H], or [T, H] if flat, and "pooled" [B, H] (tanh of a dense
    layer over [CLS]); with output_hidden_states=True also "hidden_states", the embeddings' and
    every layer's output, as "sequence", and "attentions", every layer's probabilities float32 [B,
    N, L, L] (if flat, L is rounded up). With pooled_only=True there is "pooled" alone, and the last
    layer computes no other token.

    With training=True dropout is on. Its noise comes from `seed`, an int64 pair, the same seed the
    same noise; without one, as under Keras `fit`, from the layer's own SeedGenerator and the
    replica's number. `dtype` is a Keras policy: "float32", or "mixed_bfloat16" for products in
    bfloat16. With `recompute` the backward pass of training computes each layer again, instead of
    keeping all that is inside of it (gradient checkpointing; Chen et al. 2016): less memory, more
    time. (With output_hidden_states=True all is kept.)
    """

    def __init__(self, config, name="bert", recompute=False, **kwargs):
        super().__init__(name=name, **kwargs)
        self.recompute = recompute
        self.config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.embeddings = layers.Embeddings(self.config, dtype=self.dtype_policy, name="embeddings")
        self.transformer = [
            layers.TransformerLayer(
                self.config, index, dtype=self.dtype_policy, name=f"layer_{index}"
            )
            for index in range(self.config.num_hidden_layers)
        ]
        self.pooler = layers.dense(
            self.config, self.config.hidden_size, "pooler", self.dtype_policy, activation="tanh"
        )
        self.seed_generator = keras.random.SeedGenerator(name="dropout_seed")
        self.frozen_layers = None

    def build(self, inputs_shape=None):
        for layer in (self.embeddings, *self.transformer, self.pooler):
            layer.build((None, self.config.hidden_size))

    def freeze(self, num_layers):
        """From now on training changes neither the embeddings nor the lowest `num_layers` layers.

        No gradient is taken through them; their dropout stays as in training. Called before the
        optimizer and the first step are built; what is saved by Keras does not remember it. Raises
        ValueError if there are not so many.
        """
        if not 0 <= num_layers <= len(self.transformer):
            raise ValueError(
                f"{num_layers} layers to freeze: wanted 0 to {len(self.transformer)}, as many as "
                "the encoder has"
            )
        for layer in (self.embeddings, *self.transformer[:num_layers]):
            layer.trainable = False
        self.frozen_layers = num_layers

    def dropout_seed(self, training, seed=None):
        """The noise of one call, for the encoder and a head on it: None where dropout is off."""
        if not training:
            return None
        if seed is not None:
            return tf.cast(seed, tf.int64)
        # The generator counts calls by one; a call's dropout_ids, at most 2**16, are counted
        # within. Its first number is below 2**32 and the same on all replicas. Where Keras builds a
        # model under a strategy there is no replica.
        replica = tf.distribute.get_replica_context()
        replica_id = 0 if replica is None else replica.replica_id_in_sync_group
        own = tf.stack([tf.cast(replica_id, tf.int64) * 2**32, 0])
        return tf.cast(self.seed_generator.next(), tf.int64) * [1, 2**16] + own

    def call(
        self, inputs, training=False, seed=None, output_hidden_states=False, pooled_only=False
    ):
        if pooled_only and output_hidden_states:
            raise ValueError(
                "output_hidden_states=True: with pooled_only=True the last layer is not there"
            )
        seed = self.dropout_seed(training, seed)
        layout = infer_layout(inputs)
        # Cast, since Keras' symbolic build under a strategy hands over floats.
        hidden_TH = self.embeddings(
            layout.flatten(tf.cast(inputs["input_ids"], tf.int32)),
            layout.flatten(tf.cast(inputs["segment_ids"], tf.int32)),
            layout=layout,
            seed=seed,
        )
        hidden_TH = self._without_gradient_if_frozen(hidden_TH, 0)
        outputs, attentions = [hidden_TH], []
        for number, layer in enumerate(self.transformer, start=1):
            cls_only = pooled_only and layer is self.transformer[-1]
            apply = functools.partial(layer, layout=layout, seed=seed, cls_only=cls_only)
            if self.recompute and seed is not None and not output_hidden_states:
                # Its rows alone: else a gradient of the probabilities would be computed, too.
                hidden_TH = tf.recompute_grad(functools.partial(_hidden_of, apply))(hidden_TH)
            else:
                hidden_TH, probs_BNLL = apply(hidden_TH)
                attentions.append(probs_BNLL)
            hidden_TH = self._without_gradient_if_frozen(hidden_TH, number)
            outputs.append(hidden_TH)

        if pooled_only:
            return {"pooled": self._pooled(hidden_TH, seed)}
        result = {
            "sequence": layout.unflatten(hidden_TH),
            "pooled": self._pooled(layout.cls_vectors(hidden_TH), seed),
        }
        if output_hidden_states:
            result["hidden_states"] = [layout.unflatten(output_TH) for output_TH in outputs]
            result["attentions"] = attentions
        return result

    def _pooled(self, first_BH, seed):
        """The pooler's, by `linear`: under bfloat16 the layer's own gradients lose rows."""
        return self.pooler.activation(layers.linear(first_BH, self.pooler, seed))

    def _without_gradient_if_frozen(self, hidden_TH, num_layers):
        """The output of the lowest layers; where those are the frozen ones, as a constant."""
        return tf.stop_gradient(hidden_TH) if num_layers == self.frozen_layers else hidden_TH

    def get_config(self):
        own = {"config": self.config.to_dict(), "recompute": self.recompute}
        return {**super().get_config(), **own}


def _hidden_of(layer, hidden_TH):
    return layer(hidden_TH)[0]
