"""AdamW as released, LAMB as published, and the learning rate over the steps."""

import re

import keras
import tensorflow as tf

from bert_tf.model import fused_ops

NO_DECAY = ("gamma", "beta", "bias", "output_bias")  # By the last part of a variable's path.
_BELOW_HEADS = re.compile(r"(?:^|/)(?:embeddings|layer_(\d+))/")


@keras.saving.register_keras_serializable("bert_tf")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate: a linear rise to the peak, then linear to 0 at num_train_steps.

    Step 0 has rate 0. As released (google-research/bert, optimization.py) the decay is counted from
    step 0, so that at step W the rate falls from nearly the peak to (1 - W / N) of it;
    continuous=True counts it from the peak at step W (as in transformers).
    """

    def __init__(self, peak, num_train_steps, warmup_steps=0, continuous=False):
        self.peak, self.num_train_steps, self.warmup_steps = peak, num_train_steps, warmup_steps
        self.continuous = continuous

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        warming = step / max(self.warmup_steps, 1)
        decay_steps = self.num_train_steps - self.warmup_steps * self.continuous
        decaying = tf.maximum(0.0, (self.num_train_steps - step) / max(decay_steps, 1))
        return self.peak * tf.where(step < self.warmup_steps, warming, decaying)

    def get_config(self):
        return {
            "peak": self.peak,
            "num_train_steps": self.num_train_steps,
            "warmup_steps": self.warmup_steps,
            "continuous": self.continuous,
        }


class AdamBase(keras.optimizers.Optimizer):
    """What AdamW and LAMB share: two moments, who decays, and all that happens before an update.

    Decay is taken from every trainable variable whose path does not end in one of NO_DECAY.
    `apply` takes the gradients of this replica's share of the loss, sums them over all replicas,
    clips the sum by its global norm, then updates. (Keras' own optimizers clip each replica's share
    before the sum.)

    With `layer_decay` below 1 what lies deeper learns slower (Sun et al. 2019, 5.3.4): of N
    Transformer layers, the highest among the variables being N - 1, the rate of layer i is
    multiplied by layer_decay^(N - i), that of the embeddings by layer_decay^(N + 1), that of pooler
    and heads by 1. (ELECTRA's release takes one factor more for all below the heads.) Weight decay
    goes by the same rate. A variable's place is read from its path, ".../layer_3/...".
    """

    def __init__(
        self,
        learning_rate,
        weight_decay_rate=0.01,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        clip_norm=1.0,
        bias_correction=True,
        layer_decay=1.0,
        name=None,
    ):
        super().__init__(learning_rate=learning_rate, name=name or type(self).__name__.lower())
        self.weight_decay_rate, self.clip_norm = weight_decay_rate, clip_norm
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.bias_correction, self.layer_decay = bias_correction, layer_decay

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._adam_m, self._adam_v = self.add_optimizer_variables(
                variables, ["adam_m", "adam_v"]
            )
            slots = zip(self._adam_m, self._adam_v, strict=True)
            self._slots = {
                id(variable): pair for variable, pair in zip(variables, slots, strict=True)
            }
            self._exponents = _exponents(variables)

    def decays(self, variable):
        return variable.path.split("/")[-1] not in NO_DECAY

    def state(self, names):
        """{name: variable} of what a checkpoint needs; `names` is {path: name} of the weights."""
        slots = {
            f"{names[variable.path]}/{kind}": slot
            for kind, of_kind in (("adam_m", self._adam_m), ("adam_v", self._adam_v))
            for variable, slot in zip(self._trainable_variables, of_kind, strict=True)
        }
        return {**slots, "step": self.iterations}

    def apply(self, grads, trainable_variables=None):
        """One update, called on every replica; returns the gradient's norm before clipping.

        Where the norm is not finite nothing is changed, and InvalidArgumentError is raised (but in
        a function compiled with jit_compile=True or for a TPU: XLA leaves such checks out). A
        variable without gradient stays as it is.
        """
        if trainable_variables is not None:
            self.build(trainable_variables)
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        unknown = [variable.path for variable in variables if id(variable) not in self._slots]
        if unknown:
            raise ValueError(f"not among the variables of this optimizer: {', '.join(unknown)}")
        variables, grads = zip(
            *(pair for pair in zip(variables, grads, strict=True) if pair[1] is not None),
            strict=True,
        )
        # Sparse gradients may name a row twice: only added up they have the gradient's norm.
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)
        norm = tf.debugging.check_numerics(
            tf.linalg.global_norm(grads), "the loss or its gradient is not finite"
        )
        factor = (
            1.0 if self.clip_norm is None else self.clip_norm / tf.maximum(norm, self.clip_norm)
        )
        learning_rate = tf.cast(self.learning_rate, tf.float32)

        def update():
            for variable, grad in zip(variables, grads, strict=True):
                rate = self.layer_decay ** self._exponents[id(variable)] * learning_rate
                self._update(variable, *self._slots[id(variable)], grad, factor, rate)
            return tf.no_op()

        is_finite = tf.math.is_finite(norm)
        tf.cond(is_finite, update, tf.no_op)
        self.iterations.assign_add(tf.cast(is_finite, self.iterations.dtype))
        return norm

    def _powers(self):
        """beta_1^t and beta_2^t of the bias correction; 0 without it."""
        step = tf.cast(self.iterations, tf.float32) + 1.0
        if not self.bias_correction:
            return tf.zeros([]), tf.zeros([])
        return tf.pow(self.beta_1, step), tf.pow(self.beta_2, step)

    def get_config(self):
        inherited = super().get_config()
        own = (
            "weight_decay_rate beta_1 beta_2 epsilon clip_norm bias_correction layer_decay".split()
        )
        return {
            "name": inherited["name"],
            "learning_rate": inherited["learning_rate"],
            **{name: getattr(self, name) for name in own},
        }


def _exponents(variables):
    """{id(variable): how often layer_decay is multiplied into its rate}."""
    matches = {id(variable): _BELOW_HEADS.search(variable.path) for variable in variables}
    layers = {key: int(match[1] or -1) for key, match in matches.items() if match}
    num_layers = 1 + max(layers.values(), default=-1)
    return {key: num_layers - layers.get(key, num_layers) for key in matches}


@keras.saving.register_keras_serializable("bert_tf")
class AdamW(AdamBase):
    """Adam with decoupled weight decay, as released (AdamWeightDecayOptimizer).

    `bias_correction` False is as released; True is what small data sets want (Mosbach et al. 2021).
    """

    def _update(self, variable, m, v, gradient, factor, learning_rate):
        """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= rate (m / (sqrt v + eps) + decay w).

        With bias correction m and v are divided by 1 - b1^t and 1 - b2^t first. g is the gradient
        times `factor`. Every replica updates its own copy with the same numbers.
        """
        power_1, power_2 = self._powers()
        fused_ops.adamw(
            [of.value.handle for of in (variable, m, v)],
            variable.shape,
            gradient,
            tf.stack([factor, learning_rate, 1.0 - power_1, 1.0 - power_2]),
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            decay=self.weight_decay_rate if self.decays(variable) else 0.0,
        )


@keras.saving.register_keras_serializable("bert_tf")
class Lamb(AdamBase):
    """LAMB (You et al. 2020, algorithm 2): Adam's update, as long as the variable it is for.

    u = m_hat / (sqrt v_hat + eps) + decay w;  w -= rate |w| / |u| u. Keras' Lamb leaves the decay
    out of u. What does not decay (biases, LayerNorm) is not scaled either, as in the released LAMB.
    """

    def _update(self, variable, m, v, gradient, factor, learning_rate):
        power_1, power_2 = self._powers()
        gradient *= factor
        m_new = self.beta_1 * tf.convert_to_tensor(m.value) + (1 - self.beta_1) * gradient
        v_new = self.beta_2 * tf.convert_to_tensor(v.value) + (1 - self.beta_2) * gradient**2
        update = m_new / (1 - power_1) / (tf.sqrt(v_new / (1 - power_2)) + self.epsilon)
        weights = tf.convert_to_tensor(variable.value)
        if self.decays(variable):
            update += self.weight_decay_rate * weights
            update_norm, weight_norm = tf.norm(update), tf.norm(weights)
            update *= tf.where(
                (update_norm > 0) & (weight_norm > 0), weight_norm / update_norm, 1.0
            )
        # On every replica its own copy, with the same numbers.
        for target, value in ((m, m_new), (v, v_new), (variable, weights - learning_rate * update)):
            tf.raw_ops.AssignVariableOp(resource=target.value.handle, value=value)
