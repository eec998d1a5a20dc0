"""Map token ids to one vector per token and one per sequence.

Shape suffixes: B sequences, L tokens per padded sequence, T flattened tokens, H hidden size, N
attention heads.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model import layers
from bert_tf.model.custom_gradient import recompute_grad
from bert_tf.model.dense import dense, linear
from bert_tf.model.layout import infer_layout, with_defaults
from bert_tf.system.scalars import to_python


class Encoder(keras.layers.Layer):
    """BERT encoder: embeddings, post-norm Transformer layers and pooler (Devlin et al. 2019).

        encoder = Encoder.from_pretrained(PATH)
        encoder(tf.constant([[2, 5, 6, 3]]))["sequence"]  # float32 (1, 4, H)

    Args:
        config: `BertConfig`, or its dict form as stored in a Keras config.
        name: Layer name. Defaults to "bert".
        recompute: Recomputes each layer in the backward pass instead of storing its activations
            (gradient checkpointing, Chen et al. 2016): less memory, more time. Has no effect with
            `output_hidden_states`.
        **kwargs: `keras.layers.Layer` arguments. `dtype` is a Keras policy: "float32", or
            "mixed_bfloat16" for matrix products in bfloat16.

    Call arguments:
        inputs: Dict of int tensors in one of two layouts. Without dropout both produce the same
            outputs.

            - Padded: `input_ids`, `input_mask` and `segment_ids`, each `(B, L)`. A mask of 1 marks
              a token, 0 padding. Padding affects no token. Without `input_mask` all are tokens.
            - Flat: `input_ids` and `segment_ids` `(T,)`, and `row_splits` `(B + 1,)`. Sequence b is
              `row_splits[b]:row_splits[b + 1]` and has at least one token. Tokens after
              `row_splits[-1]` are padding and are ignored. This layout supports neither XLA nor
              `fit`, which takes axis 0 for the batch.

            `segment_ids` default to 0. A tensor `(B, L)` instead of a dict is taken as `input_ids`.
        training: Turns dropout on. Defaults to `False`.
        seed: int64 `(2,)`, the dropout seed; equal seeds draw equal masks. Defaults to the layer's
            own `SeedGenerator` combined with the replica id, as under Keras `fit`.
        output_hidden_states: Returns hidden states and attention probabilities as well.
        pooled_only: Returns `pooled` alone. The last layer then computes the [CLS] tokens only.
        look_up: Maps token ids, int32 `(T,)`, to their embeddings, float32 `(T, H)`. Defaults to
            the lookup in the word embeddings of this layer.

    Returns:
        Dict with `sequence`, `(B, L, H)`, or `(T, H)` if flat, and `pooled`, `(B, H)`: tanh of a
        dense layer applied to [CLS]. With `output_hidden_states`, also `hidden_states` and
        `attentions`. The first is a list of the embedding output and each layer's output, shaped
        like `sequence`. The second is a list of float32 `(B, N, L, L)` per layer; L is rounded up
        to a bucket if flat.
    """

    input_dtype = "float32"  # To which Keras casts floats: less would round token ids.

    def __init__(
        self,
        config: BertConfig | Mapping[str, Any],
        name: str = "bert",
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
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
        self.pooler = dense(
            self.config, self.config.hidden_size, "pooler", self.dtype_policy, activation="tanh"
        )
        self.seed_generator = keras.random.SeedGenerator(name="dropout_seed")

    def build(self, inputs_shape: Any = None) -> None:
        """Create all weights; their shapes depend on the config only."""
        for layer in (self.embeddings, *self.transformer, self.pooler):
            layer.build((None, self.config.hidden_size))
            layer.trainable &= self.trainable  # A model around this layer asks its weights.

    def freeze(self, num_layers: int | None) -> None:
        """Exclude the embeddings and the lowest `num_layers` layers from training.

        The layers above are trained, also those that were frozen before, unless the encoder is not
        trainable as a whole. No gradient is computed for frozen layers; their dropout stays on in
        training. Call this before the optimizer and the train step are built.

        Args:
            num_layers: Number of Transformer layers to freeze, counted from the embeddings; `None`
                to train all again, with the embeddings.

        Raises:
            UserError: The encoder has fewer than `num_layers` layers.
        """
        num_layers = to_python(num_layers)
        if num_layers is not None and not 0 <= num_layers <= len(self.transformer):
            raise UserError(
                f"num_layers={num_layers}: expected 0 to {len(self.transformer)}, the number of "
                "encoder layers"
            )
        first = -1 if num_layers is None else num_layers  # The embeddings are below layer 0.
        self.embeddings.trainable = self.trainable and first < 0
        for number, layer in enumerate(self.transformer):
            layer.trainable = self.trainable and number >= first

    @property
    def frozen_layers(self) -> int | None:
        """Number of lowest layers that are not trained, nor the embeddings; `None` if these are."""
        parts: list[keras.layers.Layer] = [self.embeddings, *self.transformer]
        trained = (
            number
            for number, part in enumerate(parts)
            if part.trainable and (part.trainable_variables or not part.built)
        )
        lowest = next(trained, len(parts))
        return lowest - 1 if lowest else None

    def dropout_seed(self, training: bool, seed: tf.Tensor | None = None) -> tf.Tensor | None:
        """Return the dropout seed of one forward pass, shared by the encoder and a head.

        Args:
            training: Whether dropout is on.
            seed: int64 `(2,)` to use as is. Defaults to the next state of the layer's generator.

        Returns:
            int64 `(2,)`, or `None` if dropout is off.
        """
        if not training:
            return None
        if seed is not None:
            return tf.cast(seed, tf.int64)
        # The generator's second number increases by one per call. Scaling it by 2**16 leaves room
        # for the dropout_ids of the call. Its first number is below 2**32 and equal on all
        # replicas, so the replica id is added above it. While Keras builds a model under a strategy
        # there is no replica context.
        replica = tf.distribute.get_replica_context()
        replica_id = 0 if replica is None else replica.replica_id_in_sync_group
        own = tf.stack([tf.cast(replica_id, tf.int64) * 2**32, 0])
        return tf.cast(self.seed_generator.next(), tf.int64) * [1, 2**16] + own

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse lists by name, which Keras takes for arguments of other types."""
        given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        for name, values in given.items():
            if values is None or isinstance(values, list | tuple):
                kind = type(values).__name__
                raise UserError(f"{name}: expected a tensor, received a {kind}; pass tf.constant")
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self,
        inputs: Mapping[str, tf.Tensor] | tf.Tensor,
        training: bool = False,
        seed: tf.Tensor | None = None,
        output_hidden_states: bool = False,
        pooled_only: bool = False,
        look_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> dict[str, tf.Tensor | list[tf.Tensor]]:
        """Run the encoder; see the class docstring for arguments and outputs."""
        if pooled_only and output_hidden_states:
            raise ValueError(
                "output_hidden_states=True: not available with pooled_only=True, which computes "
                "only [CLS] in the last layer; set one of them"
            )
        seed = self.dropout_seed(training, seed)
        inputs = with_defaults(inputs)
        # From here on everything is computed on flattened tokens.
        layout = infer_layout(inputs)
        # Keras' symbolic build under a strategy passes floats, hence the casts. They come last:
        # a GPU reshapes floats, but copies integers to the CPU for it.
        hidden_TH = self.embeddings(
            tf.cast(layout.flatten(inputs["input_ids"]), tf.int32),
            tf.cast(layout.flatten(inputs["segment_ids"]), tf.int32),
            layout=layout,
            seed=seed,
            look_up=look_up,
        )
        hidden_TH = self._without_gradient_if_frozen(hidden_TH, 0)
        outputs, attentions, recompute_hidden = [hidden_TH], [], None
        for number, layer in enumerate(self.transformer, start=1):
            # The pooler reads [CLS] only, so the last layer need not compute other tokens.
            cls_only = pooled_only and layer is self.transformer[-1]
            options = {"layout": layout, "seed": seed, "cls_only": cls_only}
            if self.recompute and seed is not None and not output_hidden_states:
                # Only hidden states are returned; returning the probabilities as well would make
                # recompute_grad differentiate them too.
                hidden_of = recompute_grad(functools.partial(_hidden_of, layer, options))
                weights = [tf.convert_to_tensor(weight) for weight in layer.weights]
                hidden_TH = hidden_of(hidden_TH, *weights)
            else:
                hidden_TH, probs_BNLL, recompute_hidden = layer(
                    hidden_TH, recompute_hidden=recompute_hidden, **options
                )
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
        """Apply the pooler to [CLS] vectors `(B, H)`.

        Uses `linear` because the dense layer's own bias gradient loses precision in bfloat16.
        """
        return self.pooler.activation(linear(first_BH, self.pooler, seed))

    def _without_gradient_if_frozen(self, hidden_TH, num_layers):
        """Stop the gradient of `hidden_TH` at the output of the highest frozen layer."""
        return tf.stop_gradient(hidden_TH) if num_layers == self.frozen_layers else hidden_TH

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config with the `BertConfig` as a dict and what is not trained."""
        return {
            **super().get_config(),
            "config": self.config.to_dict(),
            "recompute": self.recompute,
            "untrained": untrained(self),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create a layer, of which the same weights are trained."""
        config = dict(config)
        names = config.pop("untrained", None)
        encoder = super().from_config(config)
        encoder.build()
        if names is not None:
            set_untrained(encoder, names)
        return encoder


def untrained(layer: keras.Layer) -> list[str]:
    """Return the names below a layer of its weights that are not trained."""
    return [name for name, weight in _weights(layer).items() if not weight.trainable]


def set_untrained(layer: keras.Layer, names: Collection[str]) -> None:
    """Train all weights of an encoder, or of a network, but those that `untrained` has named."""
    for name, weight in _weights(layer).items():
        weight.trainable = name not in names
    encoder = getattr(layer, "encoder", layer)
    for part in (encoder, encoder.embeddings, *encoder.transformer, encoder.pooler):
        if not any(weight.trainable for weight in part.weights):
            part.trainable = False


def _weights(layer):
    """Return the weights of a layer by name, which is the same inside of any model."""
    paths = [(f"/{weight.path}".partition(f"/{layer.name}/"), weight) for weight in layer.weights]
    return {below or above[1:]: weight for (above, _, below), weight in paths}


def _hidden_of(layer, options, hidden_TH, *weights):
    """Return the hidden states of a layer as a function of the values of its weights.

    tf.recompute_grad differentiates arguments, but not tensors that a function only reads.
    """
    with keras.StatelessScope(list(zip(layer.weights, weights, strict=True))):
        return layer(hidden_TH, **options)[0]
