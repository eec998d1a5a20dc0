"""The pretraining model: both heads against float64 NumPy, both layouts, tied embeddings."""

import math

import h5py
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, WarmupLinearDecay
from bert_tf.data.batches import flatten_examples, pad_examples
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.runs.checkpoints import assign, model_variables
from bert_tf.train.losses import WeightedMean
from bert_tf.train.optimizer import NO_DECAY
from bert_tf.train.step import TrainStep
from bert_tf.weights import name_map
from tests import reference, small
from tests.bert_tf.test_training import assert_weights_equal, tiny_config, train

LENGTHS = (8, 5, 3)


def heads(config, seed=3):
    """Return {our name: array} for the variables of both heads."""
    rng = np.random.default_rng(seed)
    hidden, entries = config.hidden_size, config.vocab_size
    shapes = {
        "masked_lm/transform/kernel": (hidden, hidden),
        "masked_lm/transform/bias": (hidden,),
        "masked_lm/LayerNorm/gamma": (hidden,),
        "masked_lm/LayerNorm/beta": (hidden,),
        "masked_lm/output_bias": (entries,),
        "next_sentence/output_weights": (2, hidden),
        "next_sentence/output_bias": (2,),
    }
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def make_model(config, dtype="float32"):
    model = PretrainingModel(config, dtype=dtype)
    weights = {**small.random_weights(config), **heads(config)}
    variables = {
        name: variable for name, variable in model_variables(model).items() if "seed" not in name
    }
    assign(variables, weights, "test")  # These are all variables.
    return model, weights


def examples(config, seed=0):
    """Return three examples of the released features of length 10, with 3, 1 and 2 predictions."""
    rng = np.random.default_rng(seed)
    length, found = 10, {}
    is_token = np.arange(length) < np.array(LENGTHS)[:, np.newaxis]
    ids = rng.integers(5, config.vocab_size, (3, length))
    found["input_ids"] = np.where(is_token, ids, 0).astype(np.int32)
    found["input_mask"] = is_token.astype(np.int32)
    found["segment_ids"] = (is_token & (np.arange(length) > 2)).astype(np.int32)
    found["masked_lm_positions"] = np.array([[1, 4, 6, 0], [3, 0, 0, 0], [0, 2, 0, 0]], np.int32)
    found["masked_lm_weights"] = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    found["masked_lm_ids"] = rng.integers(5, config.vocab_size, (3, 4)).astype(np.int32)
    found["next_sentence_labels"] = np.array([0, 1, 1], np.int32)
    return found


def flat(found):
    """Convert to the flat layout by hand; four rows are padding."""
    is_token = found["input_mask"] > 0
    splits = np.cumsum([0, *LENGTHS]).astype(np.int32)
    tail = np.full(4, 9, np.int32)
    return {
        **{name: found[name] for name in found if name.startswith(("masked", "next"))},
        "input_ids": np.concatenate([found["input_ids"][is_token], tail]),
        "segment_ids": np.concatenate([found["segment_ids"][is_token], tail * 0]),
        "row_splits": splits,
        "masked_lm_positions": found["masked_lm_positions"] + splits[:-1, np.newaxis],
    }


def expected_outputs(found, weights, config):
    """Return masked_lm [B, P, V] and next_sentence [B, 2] in float64."""
    masked, pairs = [], []
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    for row, length in enumerate(LENGTHS):
        encoded = reference.encode(
            found["input_ids"][row, :length], found["segment_ids"][row, :length], weights, config
        )
        hidden = encoded["hidden_states"][-1][found["masked_lm_positions"][row]]
        hidden = hidden @ w["masked_lm/transform/kernel"] + w["masked_lm/transform/bias"]
        hidden = reference.layer_norm(
            reference.gelu(hidden, config.hidden_act),
            w["masked_lm/LayerNorm/gamma"],
            w["masked_lm/LayerNorm/beta"],
            config.layer_norm_eps,
        )
        scores = hidden @ w["bert/embeddings/word_embeddings"].T + w["masked_lm/output_bias"]
        masked.append(scores)
        pairs.append(
            w["next_sentence/output_weights"] @ encoded["pooled"] + w["next_sentence/output_bias"]
        )
    return np.array(masked), np.array(pairs)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
@pytest.mark.parametrize("layout", [dict, flat])
def test_both_heads_equal_numpy(hidden_act, layout):
    config = tiny_config(hidden_act=hidden_act)
    model, weights = make_model(config)
    found = examples(config)
    outputs = model(to_batch(layout(found))[0])
    masked, pairs = expected_outputs(found, weights, config)
    reference.assert_equal(outputs["masked_lm"], masked, 2)
    reference.assert_equal(outputs["next_sentence"], pairs, 2)


def log_softmax(scores):
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.medium
def test_the_loss_is_the_sum_of_both_means():
    config = tiny_config(
        num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    found = examples(config)
    losses = []
    for layout in (dict, flat):
        model, weights = make_model(config)
        optimizer = AdamW(1e-3)
        optimizer.build(model.trainable_variables)
        step = TrainStep(model, LOSSES, optimizer, tf.distribute.get_strategy(), seed=0)
        batch = tf.data.Dataset.from_tensors(to_batch(layout(found)))
        logs, _ = train(step, batch, 1)
        losses.append(logs[0]["loss"])
    masked, pairs = expected_outputs(found, weights, config)
    each = -np.take_along_axis(
        log_softmax(masked), found["masked_lm_ids"][..., np.newaxis].astype(int), axis=-1
    )[..., 0]
    lm = (each * found["masked_lm_weights"]).sum() / found["masked_lm_weights"].sum()
    nsp = -log_softmax(pairs)[np.arange(3), found["next_sentence_labels"]].mean()
    assert losses == pytest.approx([lm + nsp] * 2, rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("layout", [dict, flat])
def test_recomputed_layers_have_the_same_gradients(layout):
    """Check that dropout repeats its mask in a recomputed layer, and that the graph differs."""
    config = tiny_config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    inputs, labels, weights = to_batch(layout(examples(config)))
    results, sizes = [], []
    for recompute in (False, True):
        model = PretrainingModel(config, recompute=recompute)
        values = {**small.random_weights(config), **heads(config)}
        variables = model_variables(model)
        assign({name: variables[name] for name in values}, values, "test")

        @tf.function(autograph=False)
        def gradients(model=model):
            with tf.GradientTape() as tape:
                outputs = model(inputs, training=True, seed=tf.constant([3, 4], tf.int64))
                losses = [
                    tf.reduce_sum(weights[name] * LOSSES[name](labels[name], outputs[name]))
                    for name in LOSSES
                ]
                loss = tf.add_n(losses)
            found = tape.gradient(loss, model.trainable_variables)
            return loss, [tf.convert_to_tensor(gradient) for gradient in found]

        results.append(gradients())
        graph = gradients.get_concrete_function().graph.as_graph_def()
        operations = [node.op for node in graph.node]
        operations += [node.op for part in graph.library.function for node in part.node_def]
        sizes.append(
            operations.count("PartitionedCall") + operations.count("StatefulPartitionedCall")
        )
    (loss, plain), (loss_again, again) = results
    # Equal up to the last digit but one: the two graphs may fuse products differently.
    np.testing.assert_allclose(loss, loss_again, rtol=2e-7)
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1.0, np.abs(one).max()))
    assert sizes[1] > sizes[0]  # Kernels are called twice.


def test_a_new_model_predicts_uniformly():
    config = tiny_config()
    model = PretrainingModel(config)
    outputs = model(to_batch(examples(config))[0])
    guess = -log_softmax(outputs["masked_lm"].numpy().astype(float)).mean()
    assert guess == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_token_embeddings_learn_from_both_ends_and_every_variable_learns():
    config = tiny_config()
    model, _ = make_model(config)
    inputs, labels, weights = to_batch(examples(config))
    with tf.GradientTape() as tape:
        outputs = model(inputs)
        losses = [
            tf.reduce_sum(LOSSES[name](labels[name], outputs[name]) * weights[name])
            for name in LOSSES
        ]
        loss = tf.add_n(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert gradient is not None and tf.reduce_any(tf.convert_to_tensor(gradient) != 0), (
            variable.path
        )
    # An entry that occurs in no text still gets a gradient as a wrong prediction.
    table = next(
        tf.convert_to_tensor(gradient)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True)
        if variable.path.endswith("word_embeddings")
    )
    assert tf.reduce_all(tf.reduce_any(table != 0, axis=1))


def many(config, count):
    """Return `count` released examples of 3 to 10 tokens with 0 to 4 predictions."""
    parts = [examples(config, seed) for seed in range(-(-count // 3))]
    found = {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}
    found["masked_lm_weights"][1] = 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pad_examples, flatten_examples])
@pytest.mark.parametrize("size", [pytest.param(12, marks=pytest.mark.slow), 10])
def test_accumulated_batches_equal_one_large_batch(layout, size):
    """Check a last accumulated step of fewer batches as well."""
    config = tiny_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = many(config, 2 * size)
    found["next_sentence_labels"] = found["next_sentence_labels"][:, np.newaxis]
    rows = tf.data.Dataset.from_tensor_slices(found)

    def batches(rows, size):
        return rows.batch(size).map(lambda batch: to_batch(layout(batch)))

    # Ten rows are 3 + 3 + 3 + 1.
    steps = [batches(rows.skip(begin).take(size), 3).ragged_batch(4) for begin in (0, size)]
    results = []
    for data, accumulation_steps in (
        (batches(rows, size), 1),
        (steps[0].concatenate(steps[1]), 4),
    ):
        model, _ = make_model(config)
        optimizer = AdamW(1e-2, clip_norm=0.05)
        optimizer.build(model.trainable_variables)
        step = TrainStep(
            model,
            LOSSES,
            optimizer,
            tf.distribute.get_strategy(),
            seed=0,
            metrics=METRICS,
            accumulation_steps=accumulation_steps,
        )
        results.append(train(step, data, 2))
    (logs, weights), (logs_accumulated, weights_accumulated) = results
    for one, other in zip(logs, logs_accumulated, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert_weights_equal(weights, weights_accumulated)


@pytest.mark.slow
def test_losses_of_20_steps_equal_an_independent_implementation(tmp_path):
    """Compare with KerasNLP's backbone, plain heads, its gradients and AdamW in float64 NumPy."""
    keras_nlp = pytest.importorskip("keras_nlp", reason="keras-nlp is not installed")
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = tiny_config(hidden_act="gelu_new", **no_dropout)
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        hidden_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        dropout=0.0,
        max_sequence_length=config.max_position_embeddings,
        num_segments=config.type_vocab_size,
    )
    model, weights = make_model(config)
    exported = name_map.export_tensors(config, "keras", weights, ["bert"])
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file.update(exported)
    backbone.load_weights(tmp_path / "model.weights.h5")
    # All values differ, so they identify the variables.
    by_value = {variable.numpy().tobytes(): variable for variable in backbone.trainable_variables}
    variables = {
        row.ours: by_value[exported[row.keras].tobytes()] for row in name_map.table(config)
    }
    for name in heads(config):
        variables[name] = tf.Variable(weights[name])

    def loss_of(found):
        outputs = backbone(
            {
                "token_ids": found["input_ids"],
                "segment_ids": found["segment_ids"],
                "padding_mask": found["input_mask"],
            }
        )
        hidden = tf.gather(
            outputs["sequence_output"], found["masked_lm_positions"], axis=1, batch_dims=1
        )
        hidden = tf.tensordot(hidden, variables["masked_lm/transform/kernel"], 1)
        hidden = tf.nn.gelu(hidden + variables["masked_lm/transform/bias"], approximate=True)
        mean, variance = tf.nn.moments(hidden, -1, keepdims=True)
        hidden = tf.nn.batch_normalization(
            hidden,
            mean,
            variance,
            variables["masked_lm/LayerNorm/beta"],
            variables["masked_lm/LayerNorm/gamma"],
            config.layer_norm_eps,
        )
        table = tf.convert_to_tensor(variables["bert/embeddings/word_embeddings"])
        scores = tf.einsum("bph,vh->bpv", hidden, table) + variables["masked_lm/output_bias"]
        picked = tf.one_hot(found["masked_lm_ids"], config.vocab_size)
        each = -tf.reduce_sum(picked * tf.nn.log_softmax(scores), axis=-1)
        pairs = tf.einsum(
            "bh,ch->bc", outputs["pooled_output"], variables["next_sentence/output_weights"]
        )
        pairs = tf.nn.log_softmax(pairs + variables["next_sentence/output_bias"])
        picked = tf.one_hot(found["next_sentence_labels"], 2)
        masked = tf.reduce_sum(each * found["masked_lm_weights"])
        return masked / found["masked_lm_weights"].sum() - tf.reduce_sum(picked * pairs) / 3

    batches = [examples(config, seed) for seed in range(20)]
    schedule = WarmupLinearDecay(1e-2, 20, 5)
    decayed = {name for name in variables if name.split("/")[-1] not in NO_DECAY}
    start = {name: np.array(variable) for name, variable in variables.items()}
    start = {name: array.reshape(weights[name].shape) for name, array in start.items()}
    gradients, expected = [], []
    for found in batches:
        with tf.GradientTape() as tape:
            loss = loss_of(found)
        grads = tape.gradient(loss, [variables[name] for name in start])
        gradients.append(
            {
                name: tf.convert_to_tensor(grad).numpy().reshape(start[name].shape)
                for name, grad in zip(start, grads, strict=True)
            }
        )
        expected.append(float(loss))
        rates = [float(schedule(step)) for step in range(len(gradients))]
        now = reference.adamw(start, gradients, rates, decayed, bias_correction=False)
        for name, variable in variables.items():
            variable.assign(now[name].reshape(variable.shape))

    optimizer = AdamW(schedule, bias_correction=False)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, LOSSES, optimizer, tf.distribute.get_strategy(), seed=0)
    data = tf.data.Dataset.from_generator(
        lambda: (to_batch(flat(found)) for found in batches),
        output_signature=tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype),
            tf.nest.map_structure(np.asarray, to_batch(flat(batches[0]))),
        ),
    )
    logs, last = train(step, data, 20)
    assert [line["loss"] for line in logs] == pytest.approx(expected, rel=1e-4)
    assert np.ptp(expected) > 0.2  # The weights do move.
    for name, variable in variables.items():
        array = np.array(variable).reshape(last[name].shape)
        # Updates are up to 0.01 each; where a gradient is almost 0, rounding decides them.
        np.testing.assert_allclose(last[name], array, rtol=0, atol=3e-4, err_msg=name)


@pytest.mark.slow
def test_fit_has_the_same_losses_and_weights():
    """Run 20 steps of Keras `fit` on the same batches, padded as Keras requires."""
    config = tiny_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batches = [to_batch(examples(config, seed)) for seed in range(20)]
    signature = tf.nest.map_structure(
        lambda array: tf.TensorSpec(array.shape, array.dtype),
        tf.nest.map_structure(np.asarray, batches[0]),
    )
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    results = []
    for by_fit in (False, True):
        model, _ = make_model(config)
        optimizer = AdamW(WarmupLinearDecay(1e-2, 20, 5), bias_correction=False)
        if by_fit:
            model.compile(
                optimizer=optimizer,
                loss={name: WeightedMean(loss) for name, loss in LOSSES.items()},
            )
            # Keras reports a running mean over the epoch; one step per epoch shows each loss.
            history = model.fit(data, epochs=20, steps_per_epoch=1, verbose=0)
            losses = history.history["loss"]
            weights = {
                name: variable.numpy()
                for name, variable in model_variables(model).items()
                if "seed" not in name
            }
        else:
            optimizer.build(model.trainable_variables)
            step = TrainStep(model, LOSSES, optimizer, tf.distribute.get_strategy(), seed=0)
            logs, weights = train(step, data, 20)
            losses = [line["loss"] for line in logs]
        results.append((losses, weights))
    (ours, our_weights), (theirs, their_weights) = results
    assert len(theirs) == 20 and theirs == pytest.approx(ours, rel=1e-5)
    assert_weights_equal(our_weights, their_weights)
