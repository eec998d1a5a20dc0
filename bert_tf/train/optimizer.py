"""AdamW as released with BERT, LAMB as published, and the learning-rate schedule."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.fused_kernels import MIN_WIDTH, are_compiled

NOT_FINITE = "the loss or its gradient is not finite"
# Dynamic loss scaling of float16, as in tf.keras.mixed_precision.LossScaleOptimizer.
FIRST_LOSS_SCALE, GROWTH_STEPS = 2.0**15, 2000
NO_DECAY = ("gamma", "beta", "bias", "output_bias")  # Last component of a path.
_BELOW_HEADS = re.compile(r"(?:^|/)(?:embeddings|layer_(\d+))/")
# Maps weights, Adam's step, and the rate of decay or None, to the step of an optimizer.
Rule = Callable[[tf.Tensor, tf.Tensor, float | None], tf.Tensor]


@keras.saving.register_keras_serializable("bert_tf")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup from 0 to the peak, then linear decay to 0 at `num_train_steps` (N).

    By default the decay is counted from step 0, as released (google-research/bert,
    optimization.py): at the end of warmup, step W, the rate drops from nearly the peak to (1 - W /
    N) of it. With `continuous` it is counted from the peak at step W, as in Hugging Face
    Transformers.

    Args:
        peak: Peak learning rate.
        num_train_steps: N, the step at which the rate reaches 0.
        warmup_steps: W, the steps of the warmup.
        continuous: Counts the decay from step W.
    """

    def __init__(
        self, peak: float, num_train_steps: int, warmup_steps: int = 0, continuous: bool = False
    ) -> None:
        self.peak, self.num_train_steps, self.warmup_steps = peak, num_train_steps, warmup_steps
        self.continuous = continuous

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Return the learning rate at a step, a float32 scalar."""
        step, num_train_steps, warmup_steps = (
            tf.cast(number, tf.float32)
            for number in (step, self.num_train_steps, self.warmup_steps)
        )
        warming = step / tf.maximum(warmup_steps, 1)
        decay_steps = num_train_steps - warmup_steps * self.continuous
        decaying = tf.maximum(0.0, (num_train_steps - step) / tf.maximum(decay_steps, 1))
        return self.peak * tf.where(step < warmup_steps, warming, decaying)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config."""
        return {
            "peak": self.peak,
            "num_train_steps": self.num_train_steps,
            "warmup_steps": self.warmup_steps,
            "continuous": self.continuous,
        }


@keras.saving.register_keras_serializable("bert_tf")
class FitSchedule(WarmupLinearDecay):
    """`WarmupLinearDecay` over the steps of each `fit` of a `TaskModel`.

    `fit` sets the number of steps. A second `fit` warms up anew, without tracing the step again.

    Args:
        peak: Peak learning rate.
        warmup_proportion: Fraction of the steps of a `fit` used for the warmup.
        continuous: Counts the decay from the end of the warmup.
        first_step: Updates of the optimizer before the current `fit`.
        num_train_steps: Updates of the current `fit`; 0 before the first one, where the schedule
            has no rate.
        batches_per_update: Batches whose gradients the optimizer accumulates for an update.

    Raises:
        UserError: The rate is read before `fit` has set the steps.
    """

    num_train_steps: tf.Variable
    warmup_steps: tf.Variable

    def __init__(
        self,
        peak: float,
        warmup_proportion: float = 0.1,
        continuous: bool = False,
        first_step: int = 0,
        num_train_steps: int = 0,
        batches_per_update: int = 1,
    ) -> None:
        # Variables, so that a traced step reads their values.
        num_steps, warmup_steps, self._first_step, self._batches = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(4)
        )
        super().__init__(peak, num_steps, warmup_steps, continuous)
        self.warmup_proportion = warmup_proportion
        self.set_steps(first_step, num_train_steps, batches_per_update)

    def set_steps(self, first_step: int, num_train_steps: int, batches_per_update: int = 1) -> None:
        """Set the steps of a `fit`; arguments as of the class."""
        self._is_set = num_train_steps > 0
        self._batches.assign(batches_per_update)
        self._first_step.assign(first_step)
        self.num_train_steps.assign(num_train_steps)
        self.warmup_steps.assign(int(self.warmup_proportion * num_train_steps))

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Return the learning rate at a batch of the optimizer, a float32 scalar.

        Keras counts batches here, and not updates, if gradients are accumulated.
        """
        if not self._is_set:
            raise UserError(
                "FitSchedule: the number of steps is not set; expected the fit of a model such as "
                "TextClassifier, which sets it; elsewhere use WarmupLinearDecay"
            )
        return super().__call__(tf.cast(step, tf.int64) // self._batches - self._first_step)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config, with the steps of the last `fit`."""
        return {
            "peak": self.peak,
            "warmup_proportion": self.warmup_proportion,
            "continuous": self.continuous,
            "first_step": int(self._first_step.numpy()),
            "num_train_steps": int(self.num_train_steps.numpy()),
            "batches_per_update": int(self._batches.numpy()),
        }


class AdamBase(keras.optimizers.Optimizer):
    """Base class of `AdamW` and `Lamb`: moments, weight decay, clipping, layer-wise rates.

    `apply` sums the gradients over all replicas and clips the sum by its global norm. (Keras
    optimizers clip each replica's gradients before the sum.) Weight decay applies to every variable
    whose path does not end in one of `NO_DECAY`, unless `exclude_from_weight_decay` excludes it.

    Layer-wise decay follows Sun et al. 2019, 5.3.4. Of N Transformer layers (the highest index
    among the variables plus 1), layer i learns at layer_decay^(N - i) times the rate, the
    embeddings at layer_decay^(N + 1), pooler and heads at the full rate. ELECTRA's release applies
    one more factor below the heads. Weight decay is scaled alike. Layers are recognized by their
    path, ".../layer_3/...".

    Args:
        learning_rate: Rate or schedule.
        weight_decay_rate: Factor of the decoupled weight decay.
        beta_1: Decay rate of the first moment.
        beta_2: Decay rate of the second moment.
        epsilon: Added to the square root of the second moment.
        clip_norm: Maximum global norm of the gradient, or `None` for no clipping.
        bias_correction: Divides the moments by 1 - beta^t (Kingma & Ba 2015). The released BERT
            code does not.
        layer_decay: Factor per layer; 1 for equal rates.
        scales_loss: Scales the loss of the train step dynamically, as float16 requires: a gradient
            that is not finite skips the update and halves the scale. A Keras model of your own
            requires `compile(..., auto_scale_loss=False)` with it.
        name: Name of the Keras optimizer. Defaults to the class name in lower case.
    """

    _rule: Rule

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        weight_decay_rate: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        clip_norm: float | None = 1.0,
        bias_correction: bool = True,
        layer_decay: float = 1.0,
        scales_loss: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name or type(self).__name__.lower())
        self.weight_decay_rate, self.clip_norm = weight_decay_rate, clip_norm
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.bias_correction, self.layer_decay = bias_correction, layer_decay
        self.scales_loss, self._has_scaled = scales_loss, False
        if scales_loss:  # Keras scales the first loss before it builds the optimizer.
            with keras.name_scope(self.name):
                scale, steps = (
                    keras.Variable(first, dtype=dtype, trainable=False, name=name)
                    for first, dtype, name in (
                        (FIRST_LOSS_SCALE, "float32", "loss_scale"),
                        (0, "int64", "finite_steps"),
                    )
                )
            object.__setattr__(self, "_of_scale", (scale, steps))

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create both moments for each variable, once."""
        if not self.built:
            super().build(variables)
            self._adam_m, self._adam_v = self.add_optimizer_variables(
                variables, ["adam_m", "adam_v"]
            )
            # Keyed by id, because == on Keras variables compares their values. Not attributes of
            # Keras, which tf.train.Checkpoint would refuse to save.
            slots = zip(self._adam_m, self._adam_v, strict=True)
            slots_of = {id(variable): pair for variable, pair in zip(variables, slots, strict=True)}
            object.__setattr__(self, "_slots", slots_of)
            object.__setattr__(self, "_exponents", _exponents(variables))
            if self.scales_loss:
                # As attributes Keras saves them, after the moments.
                self.loss_scale, self.finite_steps = self._of_scale

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss whose gradient `apply` expects."""
        self._has_scaled = True
        return loss * tf.convert_to_tensor(self._of_scale[0]) if self.scales_loss else loss

    def decays(self, variable: keras.Variable) -> bool:
        """Return True if weight decay applies to a variable."""
        is_weight = variable.path.split("/")[-1] not in NO_DECAY
        return is_weight and self._use_weight_decay(variable)

    def state(self, names: Mapping[str, str]) -> dict[str, keras.Variable]:
        """Return the variables of a checkpoint: the moments and the step.

        Args:
            names: Maps the path of each weight to its name in the checkpoint.

        Returns:
            Dict from "NAME/adam_m", "NAME/adam_v", "step" and, with a scaled loss, "loss_scale" and
            "finite_steps" to Keras variables.
        """
        slots = {
            f"{names[variable.path]}/{kind}": slot
            for kind, of_kind in (("adam_m", self._adam_m), ("adam_v", self._adam_v))
            for variable, slot in zip(self._trainable_variables, of_kind, strict=True)
        }
        of_scale = {}
        if self.scales_loss:
            of_scale = {"loss_scale": self.loss_scale, "finite_steps": self.finite_steps}
        return {**slots, **of_scale, "step": self.iterations}

    def apply(
        self,
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
        is_running: tf.Tensor | None = None,
        wrap: Callable[[Callable[..., tf.Tensor]], Callable[..., tf.Tensor]] | None = None,
    ) -> tf.Tensor:
        """Run one update. Every replica has to call this.

        If the norm is not finite, no variable changes. Variables without a gradient are left
        unchanged. The constraints of the others hold afterwards.

        Args:
            grads: Gradient of this replica's summand of the loss per variable, or `None`; with
                `scales_loss`, of what `scale_loss` returns for it.
            trainable_variables: Variables of the gradients. Defaults to those of `build`.
            is_running: Bool scalar for a step that XLA compiles: `False` changes no variable, and
                neither does a norm that is not finite, which raises no error. By default the step
                is not compiled.
            wrap: Wraps the function of clipping and update, for example to compile it. By default
                it is part of the compiled step.

        Returns:
            float32 scalar, the global norm of the summed gradient before clipping. With
            `scales_loss`, 0 for a skipped update, as long as a smaller scale may be finite.

        Raises:
            tf.errors.InvalidArgumentError: The norm is not finite, without `is_running` and
                `scales_loss`. Code compiled by XLA omits this check.
            ValueError: A variable was not passed to `build`, none has a gradient, or the loss was
                not scaled though `scales_loss` is set.
        """
        if self.scales_loss and not self._has_scaled:
            raise ValueError(
                f"{type(self).__name__}(scales_loss=True): received gradients of a loss that "
                "`scale_loss` has not scaled; expected those of scale_loss(loss), and with Keras "
                "compile(..., auto_scale_loss=False), since it scales the loss itself otherwise"
            )
        if trainable_variables is not None:
            self.build(trainable_variables)
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        unknown = [variable.path for variable in variables if id(variable) not in self._slots]
        if unknown:
            raise ValueError(
                f"not among the variables this optimizer was built with: {', '.join(unknown)}"
            )
        pairs = [pair for pair in zip(variables, grads, strict=True) if pair[1] is not None]
        if not pairs:
            raise ValueError("no variable has a gradient; expected the loss to depend on one")
        variables, grads = zip(*pairs, strict=True)
        # A sparse gradient may list a row twice; its norm is only right once these are summed.
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)
        if is_running is not None or self.scales_loss:
            is_running = tf.constant(True) if is_running is None else is_running
            return self._apply_or_skip(variables, grads, is_running, wrap)
        norm = tf.debugging.check_numerics(tf.linalg.global_norm(grads), NOT_FINITE)
        # Clipping the sum over all replicas makes the update independent of their number.
        factor = (
            1.0 if self.clip_norm is None else self.clip_norm / tf.maximum(norm, self.clip_norm)
        )
        learning_rate = tf.cast(self.learning_rate, tf.float32)
        power_1, power_2 = self._powers()

        def update():
            for variable, grad in zip(variables, grads, strict=True):
                rate = self.layer_decay ** self._exponents[id(variable)] * learning_rate
                update_in_place(
                    self._rule,
                    [of.value.handle for of in (variable, *self._slots[id(variable)])],
                    variable.shape,
                    grad,
                    tf.stack([factor, rate, 1.0 - power_1, 1.0 - power_2]),
                    **self._options(variable),
                )
                if variable.constraint is not None:
                    _constrain(variable)
            return tf.no_op()

        # This condition protects the variables where XLA drops the check above.
        is_finite = tf.math.is_finite(norm)
        tf.cond(is_finite, update, tf.no_op)
        self.iterations.assign_add(tf.cast(is_finite, self.iterations.dtype))
        return norm

    def _apply_or_skip(self, variables, grads, is_running, wrap):
        """Clip and update without a condition, which would wait for the device."""
        power_1, power_2 = self._powers()
        rate = tf.cast(self.learning_rate, tf.float32)
        scale = tf.convert_to_tensor(self.loss_scale) if self.scales_loss else tf.constant(1.0)
        scalars = tf.stack([rate, 1.0 - power_1, 1.0 - power_2, scale])
        slots = [self._slots[id(variable)] for variable in variables]
        handles = [
            [of.value.handle for of in (variable, *pair)]
            for variable, pair in zip(variables, slots, strict=True)
        ]

        def update(handles, grads, scalars, is_running):
            rate, *corrections, scale = tf.unstack(scalars)
            norm = tf.linalg.global_norm(grads) / scale
            is_applied = is_running & tf.math.is_finite(norm)
            factor = 1.0 / scale
            if self.clip_norm is not None:
                factor *= self.clip_norm / tf.maximum(norm, self.clip_norm)
            for variable, of_variable, grad in zip(variables, handles, grads, strict=True):
                before = _read(of_variable, variable.shape)
                own_rate = self.layer_decay ** self._exponents[id(variable)] * rate
                scalars = (own_rate, *corrections)
                options = self._options(variable)
                after = _updated(self._rule, before, grad * factor, scalars, **options)
                if variable.constraint is not None:
                    after = (variable.constraint(after[0]), *after[1:])
                for handle, old, new in zip(of_variable, before, after, strict=True):
                    value = tf.where(is_applied, new, old)
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            return norm

        norm = (wrap(update) if wrap else update)(handles, list(grads), scalars, is_running)
        is_finite = tf.math.is_finite(norm)
        self.iterations.assign_add(tf.cast(is_running & is_finite, self.iterations.dtype))
        return self._rescaled(norm, scale, is_finite, is_running) if self.scales_loss else norm

    def _rescaled(self, norm, scale, is_finite, is_running):
        """Adapt the scale of the loss; return the norm, 0 for a skipped update."""
        before = tf.convert_to_tensor(self.finite_steps)
        finite_steps = tf.where(is_finite, before + 1, tf.zeros_like(before))
        grows = finite_steps >= GROWTH_STEPS
        after = tf.where(grows, tf.zeros_like(before), finite_steps)
        new_scale = tf.where(is_finite, tf.where(grows, scale * 2, scale), scale / 2)
        self.loss_scale.assign(tf.where(is_running, tf.maximum(new_scale, 1.0), scale))
        self.finite_steps.assign(tf.where(is_running, after, before))
        return tf.where(is_finite | (scale <= 1.0), norm, 0.0)

    def _options(self, variable):
        """Return the constants of a variable's update; its decay is None if it does not decay."""
        options = {name: getattr(self, name) for name in ("beta_1", "beta_2", "epsilon")}
        return {**options, "decay": self.weight_decay_rate if self.decays(variable) else None}

    def _powers(self):
        """Return beta_1^t and beta_2^t for bias correction, or zeros without it."""
        step = tf.cast(self.iterations, tf.float32) + 1.0
        if not self.bias_correction:
            return tf.zeros([]), tf.zeros([])
        return tf.pow(self.beta_1, step), tf.pow(self.beta_2, step)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config."""
        inherited = super().get_config()
        own = (
            "weight_decay_rate beta_1 beta_2 epsilon clip_norm bias_correction layer_decay "
            "scales_loss"
        ).split()
        return {
            "name": inherited["name"],
            "learning_rate": inherited["learning_rate"],
            **{name: getattr(self, name) for name in own},
        }


def _exponents(variables):
    """Map id(variable) to the exponent of `layer_decay` in its learning rate."""
    matches = {id(variable): _BELOW_HEADS.search(variable.path) for variable in variables}
    # Embeddings have no index and count as layer -1. Paths without a match belong to the pooler or
    # a head and keep the full rate.
    layers = {key: int(match[1] or -1) for key, match in matches.items() if match}
    num_layers = 1 + max(layers.values(), default=-1)
    return {key: num_layers - layers.get(key, num_layers) for key in matches}


def update_in_place(
    rule: Rule,
    handles: Sequence[tf.Tensor],
    shape: Sequence[int],
    gradient: tf.Tensor,
    scalars: tf.Tensor,
    **options: float | None,
) -> None:
    """Apply one update of an optimizer to this replica's copy of a variable and its moments.

    Args:
        rule: That of the optimizer, a function of this module.
        handles: Resource handles of the float32 variables w, m and v.
        shape: Their static shape.
        gradient: float32, of that shape.
        scalars: float32 `(4,)`: gradient factor, learning rate, 1 - beta_1^t, 1 - beta_2^t.
        **options: beta_1, beta_2, epsilon and decay.
    """
    is_compiled = are_compiled() and max(shape, default=1) >= MIN_WIDTH  # A scalar has no width.
    known = tuple(shape) if is_compiled else (None,) * len(shape)
    update = _traced(rule, is_compiled, known, tuple(sorted(options.items())))
    update(*handles, gradient, scalars)


@functools.cache
def _traced(rule, is_compiled, shape, options):
    """Return the traced update for a shape; one per rank if it is not compiled."""
    specs = [tf.TensorSpec([], tf.resource)] * 3
    specs += [tf.TensorSpec(shape, tf.float32), tf.TensorSpec([4], tf.float32)]

    def update(weights_at, m_at, v_at, gradient, scalars):
        handles = (weights_at, m_at, v_at)
        factor, *others = tf.unstack(scalars)
        before = _read(handles, shape)
        after = _updated(rule, before, gradient * factor, others, **dict(options))
        # A variable's own assign methods return a copy; raw ones let XLA write in place.
        for handle, value in zip(handles, after, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    return tf.function(update, input_signature=specs, jit_compile=is_compiled, autograph=False)


def _constrain(variable):
    """Apply the constraint of a variable to this replica's copy."""
    handle = variable.value.handle
    (value,) = _read([handle], variable.shape)
    tf.raw_ops.AssignVariableOp(resource=handle, value=variable.constraint(value))


def _read(handles, shape):
    """Return the values of float32 variables of a shape."""
    values = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles]
    for value in values:
        # XLA would make a dynamic size of tf.ensure_shape.
        value.set_shape(shape)
    return values


def _updated(rule, before, gradient, scalars, *, beta_1, beta_2, epsilon, decay):
    """Return the weights and moments after an update with a clipped gradient g.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= rate * rule(w, m / (sqrt(v) + eps), decay).

    With bias correction m and v are first divided by 1 - b1^t and 1 - b2^t.
    """
    (weights, m, v), (rate, correction_1, correction_2) = before, scalars
    m = beta_1 * m + (1 - beta_1) * gradient
    v = beta_2 * v + (1 - beta_2) * tf.square(gradient)
    step = (m / correction_1) / (tf.sqrt(v / correction_2) + epsilon)
    return weights - rate * rule(weights, step, decay), m, v


def _decayed(weights, step, decay):
    return step + (decay or 0.0) * weights


def _scaled(weights, step, decay):
    if decay is None:
        return step
    # Scaled also if the rate of decay is 0.
    step += decay * weights
    step_norm, weight_norm = tf.norm(step), tf.norm(weights)
    return step * tf.where((step_norm > 0) & (weight_norm > 0), weight_norm / step_norm, 1.0)


@keras.saving.register_keras_serializable("bert_tf")
class AdamW(AdamBase):
    """Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019).

    With `bias_correction=False` it equals the released AdamWeightDecayOptimizer. On small datasets
    bias correction makes fine-tuning more stable (Mosbach et al. 2021).
    """

    _rule = staticmethod(_decayed)


@keras.saving.register_keras_serializable("bert_tf")
class Lamb(AdamBase):
    """LAMB (You et al. 2020, algorithm 2): Adam's update, scaled to the norm of the variable.

    u = m_hat / (sqrt(v_hat) + eps) + decay w; w -= rate |w| / |u| u. Keras' Lamb does not include
    the decay in u. Biases and LayerNorm, which have no decay, are not scaled, as in the released
    LAMB; all other variables are, also with a weight decay of 0.
    """

    _rule = staticmethod(_scaled)
