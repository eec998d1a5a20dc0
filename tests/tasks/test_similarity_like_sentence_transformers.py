"""Losses and 20 steps of SGD equal those of sentence-transformers, on the same weights and rows."""

import dataclasses
import json
import os
import pathlib
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.train.step import TrainStep
from tasks import TextEmbedder
from tests import small

SCRIPT = pathlib.Path(__file__).with_name("sentence_transformers_losses.py")
ROWS = {
    "anchor": ["the bill", "screen broken", "app does not open", "too high", "cafe", "a b"],
    "positive": ["bill is too high", "the screen", "the app", "is high", "my cafe !", "b c"],
    "negative": ["my app", "the bills", "screen is un", "a cafe", "not open", "c c c"],
    "score": [0.9, 0.1, 0.8, 0.2, 0.55, 0.3],
}
STEPS, LEARNING_RATE = 20, 0.05
COSENT_RATE = 0.005  # Larger steps of CoSENT diverge, and rounding errors grow with them.
# By name: columns, parts of a batch, options.
LOSSES = {
    "contrastive": (2, 1, {}),
    "negatives": (3, 1, {}),
    "cached": (3, 2, {}),
    "symmetric": (2, 1, {"symmetric": True}),
    "cosent": (2, 1, {"loss": "cosent"}),
    "cosine": (2, 1, {"loss": "cosine"}),
    "triplet": (3, 1, {"loss": "triplet", "triplet_margin": 1.0}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory, config, vocabulary):
    config = dataclasses.replace(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return small.write_huggingface(
        tmp_path_factory.mktemp("model") / "huggingface", config, vocabulary
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory, directory):
    name = "BERT_TF_SENTENCE_TRANSFORMERS_PYTHON"
    if name not in os.environ:
        pytest.skip(f"{name} is not set: no interpreter with sentence-transformers")
    folder = tmp_path_factory.mktemp("expected")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    output = folder / "losses.npz"
    command = [os.environ[name], SCRIPT, directory, folder / "rows.json", output]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return np.load(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_steps_are_equal(expected, directory, name):
    columns, parts, options = LOSSES[name]
    model = TextEmbedder.from_pretrained(directory, max_seq_length=16, **options)
    texts = tuple(list(ROWS.values())[:columns])
    encoded = model._evaluation_rows(texts, ROWS["score"] if model.task.is_scored else None)
    optimizer = keras.optimizers.SGD(COSENT_RATE if name == "cosent" else LEARNING_RATE)
    optimizer.build(model.network.trainable_variables)
    strategy = tf.distribute.get_strategy()
    step = TrainStep(
        *(model.network, model.task.losses, optimizer, strategy, 0), accumulation_steps=parts
    )
    batches = encoded.training_batches(
        global_batch_size=6, num_epochs=STEPS, seed=0, num_replicas=parts
    )
    iterator = iter(batches.ragged_batch(parts) if parts > 1 else batches)
    losses = [float(step(iterator)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected[f"{name}_losses"], rtol=1e-5, atol=1e-5)
    vectors = expected[f"{name}_vectors"]
    atol = 1e-5 * max(1.0, np.abs(vectors).max())
    np.testing.assert_allclose(model.predict(ROWS["anchor"]), vectors, rtol=1e-5, atol=atol)
