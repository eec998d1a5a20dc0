"""The autoencoder against PCA by hand and in scikit-learn, and the features it is trained on."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf
from sklearn.decomposition import PCA

from bert_tf import AdamW
from bert_tf.text.encoder_inputs import pack, to_flat, to_padded
from bert_tf.train.distribution import distribute
from bert_tf.train.step import TrainStep
from bert_tf.weights.sources import read_pretrained
from tasks.data.examples import EncodedExamples, Examples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.types.anomaly import AnomalyTask, FeatureExamples
from tests import small
from tests.shared_graphs import tokenizer_of

TEXTS = small.TEXTS["billing"] + ["my bill !", "the bill", "is my bill high ?", "high , too high"]


@pytest.fixture
def task():
    return AnomalyTask(max_seq_length=12, latent_dim=3)


@pytest.fixture
def model(task, config, huggingface_dir):
    model = task.build_model(config)
    read_pretrained(huggingface_dir).assign_to(model)
    return model


def test_it_starts_as_pca_by_hand(model):
    """Use features in a plane, which two numbers represent; one orthogonal to it is lost."""
    axes = np.eye(12, dtype=np.float32)
    vectors = np.stack([axes[0] + s * axes[1] + t * axes[2] for s in (-3, 3) for t in (-1, 1)])
    model.adapt(vectors)  # Mean axes[0]; the other squares are 9 + 1 each, over 12 components.
    outputs = model({"vector": np.stack([vectors[0], axes[0] + 2 * axes[5]])})
    np.testing.assert_allclose(outputs["mean_distance"], [10 / 10, 4 / 10], rtol=1e-6)
    np.testing.assert_allclose(outputs["pca"], [0, 4 / 10], atol=1e-6)
    np.testing.assert_allclose(outputs["score"], [0, 4 / 10], atol=1e-6)


def test_pca_equals_scikit_learn(model):
    rng = np.random.default_rng(0)
    train, test = rng.normal(1, np.arange(1, 13), (2, 40, 12)).astype(np.float32)
    model.adapt(train)
    outputs = model({"vector": test})
    pca = PCA(3).fit(train)
    left = test - pca.inverse_transform(pca.transform(test))
    spread = np.mean((train - train.mean(0)) ** 2)
    np.testing.assert_allclose(outputs["pca"], np.mean(left**2, axis=1) / spread, rtol=1e-4)
    np.testing.assert_allclose(outputs["score"], outputs["pca"], rtol=1e-4)


def test_equal_training_features_have_finite_scores(model):
    model.adapt(np.ones((3, 12), np.float32))
    assert all(np.isfinite(values).all() for values in model({"vector": np.eye(12)}).values())


def test_features_are_normalized_means_in_any_layout(model, vocabulary):
    texts = tf.constant(TEXTS)
    packed = pack([tokenizer_of(vocabulary, True).tokenize(texts)], vocabulary, 12)
    inputs = to_padded(packed, vocabulary, 12)
    outputs = model(inputs)
    sequence = model.encoder(inputs)["sequence"].numpy()
    for row, length in enumerate(inputs["input_mask"].numpy().sum(1)):
        mean = sequence[row, :length].mean(0)
        np.testing.assert_allclose(outputs["vector"][row], mean / np.linalg.norm(mean), atol=1e-5)
    for other in (to_flat(packed, vocabulary), {"vector": outputs["vector"]}):
        for name, values in model(other).items():
            np.testing.assert_allclose(values, outputs[name], atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_features_are_computed_once_and_batches_hold_them(task, model, vocabulary):
    pipeline = Pipeline(task, tokenizer_of(vocabulary, True), model)
    examples = Examples({"text": TEXTS}, [0] * len(TEXTS))
    encoded = EncodedExamples.encode(examples, pipeline, to_flat)
    said = []
    evaluator = Evaluator(task, model, tf.distribute.get_strategy(), 2, said.append)
    on_vectors = task.training_data(encoded, evaluator)
    batches = list(on_vectors.training_batches(global_batch_size=4, num_epochs=2, seed=0))
    expected = evaluator.outputs(encoded)
    assert [len(inputs["vector"]) for inputs, *_ in batches] == [4, 3, 4, 3]
    order = np.random.default_rng([0, 0]).permutation(len(TEXTS))
    np.testing.assert_array_equal(batches[0][0]["vector"], expected["vector"][order[:4]])
    for name, values in evaluator.outputs(on_vectors).items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6)
    assert said.count("extracting features of 7 rows, once") == 1
    np.testing.assert_allclose(expected["score"], expected["pca"], rtol=1e-4)  # Not random.


def test_what_batches_are_made_of_takes_no_memory_of_a_gpu(task, vocabulary):
    """Let another CPU be the GPU, which constants are on by default."""
    pipeline = Pipeline(task, tokenizer_of(vocabulary, True), None)
    encoded = EncodedExamples.encode(Examples({"text": TEXTS}, [0] * 7), pipeline, to_flat)
    evaluator = types.SimpleNamespace(
        outputs=lambda encoded: {"vector": np.ones((7, 12))},
        log=lambda line: None,
        model=types.SimpleNamespace(is_new=False),
    )
    with tf.device("CPU:1"):
        on_vectors = FeatureExamples(encoded, evaluator)
        batches = on_vectors.training_batches(global_batch_size=4, num_epochs=1, seed=0)
    captured = batches._input_dataset._map_func.function.captured_inputs
    assert [of.device[-5:] for of in captured] == ["CPU:0"] * 4  # Labels and weights, too.


@pytest.mark.medium
def test_it_learns_a_curve_that_pca_cannot(task, config):
    """Use features on a half circle, which one number represents, but not a linear projection."""
    model = dataclasses.replace(task, latent_dim=1).build_model(config)
    angles = np.linspace(0, np.pi, 64)
    circle = np.zeros((64, 12), np.float32)
    circle[:, 0], circle[:, 1] = np.cos(angles), np.sin(angles)
    model.adapt(circle)
    before = model({"vector": circle})
    np.testing.assert_allclose(before["score"], before["pca"], atol=1e-5)
    of_all = {"score": np.ones(64, np.float32)}
    batches = tf.data.Dataset.from_tensors(({"vector": circle}, of_all, of_all)).repeat(300)
    step = TrainStep(model, task.losses, AdamW(1e-2), tf.distribute.get_strategy(), seed=0)
    step(iter(batches), num_steps=tf.constant(300))
    after = model({"vector": circle})
    np.testing.assert_array_equal(after["pca"], before["pca"])
    assert np.mean(after["score"]) < 0.1 * np.mean(after["pca"])
    center = model({"vector": np.zeros((1, 12))})  # The only text that is not on the circle.
    assert center["score"][0] > 5 * np.max(after["score"])


@pytest.mark.slow
def test_two_replicas_compute_the_same_features_and_start_equal(
    task, model, config, vocabulary, huggingface_dir, mirrored
):
    examples = Examples({"text": TEXTS}, [0] * len(TEXTS))
    with mirrored.scope():
        other = task.build_model(config)
    read_pretrained(huggingface_dir).assign_to(other)
    outputs = []
    for one, strategy in ((model, tf.distribute.get_strategy()), (other, mirrored)):
        pipeline = Pipeline(task, tokenizer_of(vocabulary, True), one)
        evaluator = Evaluator(task, one, strategy, 2)
        encoded = EncodedExamples.encode(examples, pipeline, to_padded, static_shape=True)
        encoded = task.training_data(encoded, evaluator)
        distribute(
            lambda local, data=encoded: data.training_batches(
                global_batch_size=4, num_epochs=1, seed=0, num_replicas=local.total
            ),
            strategy,
        )
        assert np.any(one.components_HK)
        outputs.append(evaluator.outputs(encoded))
    for name, values in outputs[0].items():
        np.testing.assert_allclose(outputs[1][name], values, atol=1e-5, err_msg=name)
