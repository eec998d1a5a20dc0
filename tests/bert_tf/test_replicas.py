"""Replicas under Keras `fit`, and in the train step with gradient checkpointing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.train.distribution import make_strategy
from bert_tf.train.losses import softmax_cross_entropy
from bert_tf.train.optimizer import AdamW
from bert_tf.train.step import TrainStep
from tasks.graph.heads import SequenceClassifier
from tests import small
from tests.bert_tf.test_training import assert_weights_equal, tiny_config, train


class Observed(SequenceClassifier):
    """Sequence classifier that keeps each replica's outputs and dropout seed of a `fit` step."""

    def keep(self):
        """Create the variables under the strategy's scope."""
        own = {"synchronization": tf.VariableSynchronization.ON_READ, "trainable": False}
        own["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.kept = {
            "scores": tf.Variable(tf.zeros([1, self.units]), **own),
            "seed": tf.Variable(tf.zeros([2], tf.int64), **own),
        }

    def train_step(self, data):
        seed = self.encoder.dropout_seed(True)
        self.kept["seed"].assign(seed)
        self.kept["scores"].assign(self(data, training=True, seed=seed)["label"])
        return {"loss": tf.zeros([])}


def observe(strategy, inputs_BL):
    """Return {name: one array per replica} for each step of `fit` on copies of one row."""
    config = tiny_config(num_hidden_layers=1, hidden_dropout_prob=0.5)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Observed(config, 3)
        model.keep()
        # XLA does not compile for the second of two logical processors.
        model.compile(jit_compile=False)
    row = {name: values[:1] for name, values in inputs_BL.items()}
    rows = tf.data.Dataset.from_tensors(row).repeat().unbatch()
    rows = rows.batch(strategy.num_replicas_in_sync, drop_remainder=True)
    steps = []

    def keep(batch, logs):
        steps.append(
            {
                name: [value.numpy() for value in strategy.experimental_local_results(variable)]
                for name, variable in model.kept.items()
            }
        )

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=keep)
    model.fit(rows, steps_per_epoch=3, epochs=1, verbose=0, callbacks=[callback])
    return steps


class Stateful(SequenceClassifier):
    """Sequence classifier with layers of Keras that change variables in a call."""

    def build(self, inputs_shape=None):
        super().build(inputs_shape)
        self.norm = keras.layers.BatchNormalization(momentum=0.0)
        self.norm.build((None, self.units))
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs, training=False, seed=None):
        scores = super().call(inputs, training, seed)["label"]
        return {"label": self.dropout(self.norm(scores, training=training), training=training)}


def trained_stateful(strategy, is_compiled, num_steps, parts=1):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Stateful(tiny_config(num_hidden_layers=1), 3)
        optimizer = AdamW(1e-3)
        optimizer.build(model.trainable_variables)
    losses = {"label": softmax_cross_entropy}
    options = {"is_compiled": is_compiled, "accumulation_steps": parts}
    step = TrainStep(model, losses, optimizer, strategy, seed=0, **options)
    batches = small.batches(rows=16, replica_rows=8)
    logs, _ = train(step, batches.batch(parts) if parts > 1 else batches, num_steps)
    return logs, model


@pytest.fixture
def without_xla(monkeypatch):
    """Trace what XLA would compile; it does not compile for the second logical processor."""
    function = tf.function

    def traced(*args, jit_compile=None, **kwargs):
        return function(*args, **kwargs)

    monkeypatch.setattr(tf, "function", traced)


def test_a_compiled_step_of_replicas_assigns_what_the_layers_change(mirrored, without_xla):
    (logs, model), (expected, plain) = (
        trained_stateful(mirrored, is_compiled, 2) for is_compiled in (True, False)
    )
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected])
    assert all(np.abs(one.norm.moving_mean).max() > 1e-5 for one in (model, plain))
    # The bias before the normalization has no gradient but noise, of which Adam takes the sign.
    for name in ("moving_mean", "moving_variance"):
        values = (getattr(one.norm, name).numpy() for one in (model, plain))
        np.testing.assert_allclose(*values, atol=5e-3)
    assert int(model.dropout.seed_generator.state.numpy()[1]) == 2
    with pytest.raises(UserError, match="moving_mean: XLA cannot change it in each of several"):
        trained_stateful(mirrored, True, 1, parts=2)


@pytest.mark.medium
def test_each_replica_has_its_own_dropout_under_fit(mirrored, inputs_BL):
    steps = observe(mirrored, inputs_BL)
    for step in steps:
        first, second = step["scores"]
        assert np.abs(first - second).max() > 1e-4
    for replica in (0, 1):
        first, second = (step["scores"][replica] for step in steps[:2])
        assert np.abs(first - second).max() > 1e-4
    seeds = [seed for step in steps for seed in step["seed"]]
    keys = {(seed[0], seed[1] + position) for seed in seeds for position in (*range(8), 2**15)}
    assert len(keys) == 3 * 2 * 9
    # The first replica has the seeds of a model without a strategy.
    for step, alone in zip(steps, observe(make_strategy("none"), inputs_BL), strict=True):
        np.testing.assert_array_equal(step["seed"][0], alone["seed"][0])


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing_on_two_replicas(mirrored):
    """Check that dropout repeats its mask on each replica when a layer is recomputed."""
    config = tiny_config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    results = []
    for recompute in (False, True):
        with mirrored.scope():
            keras.utils.set_random_seed(0)
            model = SequenceClassifier(config, 3)
            model.encoder.recompute = recompute
            optimizer = AdamW(1e-3)
            optimizer.build(model.trainable_variables)
        losses = {"label": softmax_cross_entropy}
        step = TrainStep(model, losses, optimizer, mirrored, seed=0)
        results.append(train(step, small.batches(rows=16, replica_rows=8), 5))
    (logs, weights), (logs_again, weights_again) = results
    for name in ("loss", "gradient_norm"):
        values = ([log[name] for log in of] for of in (logs, logs_again))
        np.testing.assert_allclose(*values, rtol=1e-5, err_msg=name)
    assert_weights_equal(weights, weights_again)
