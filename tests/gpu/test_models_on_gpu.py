"""Keras models on a real GPU: `fit` and predictions in packed rows, and several replicas.

BERT_TF_TEST_GPU=1 python -m pytest -m gpu tests/gpu
"""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import export
import tasks
from bert_tf.train.distribution import exact_float32
from tests import small
from tests.conftest import ROOT
from tests.export.test_every_kind import TASKS, TEXTS, inputs_of, of_task
from tests.tasks.test_task_model import LABELS, NAMES, ROWS
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "BERT_TF_TEST_GPU" not in os.environ, reason="BERT_TF_TEST_GPU is not set: no GPU"
    ),
]
# The same training on one GPU and on two halves of it, each of which is a replica.
REPLICAS = """
import dataclasses
import sys

import tensorflow as tf

half = tf.config.LogicalDeviceConfiguration(memory_limit=3000)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("GPU")[0], [half, half]
)
from bert_tf import AdamW, BertConfig
from bert_tf.train.distribution import make_strategy, use_precision
from tests.bert_tf.test_packed import STILL, assert_equal_training, train

use_precision("float32")
config = dataclasses.replace(BertConfig.load(sys.argv[1]), **STILL)
together = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
assert together.num_replicas_in_sync == 2
expected = train(config, make_strategy("none"), True)
for parts in (1, 3):
    assert_equal_training(config, train(config, together, True, parts=parts), expected)
with together.scope():
    optimizer = AdamW(1e-3, scales_loss=True)
logs, _ = train(config, together, True, optimizer=optimizer, dtype="mixed_float16")
assert abs(logs[0]["loss"] / expected[0][0]["loss"] - 1) < 2e-2
"""


@pytest.fixture
def weights(tmp_path, config, vocabulary):
    return small.write_huggingface(tmp_path / "weights", config, vocabulary, **NO_DROPOUT)


def classifier(weights, **options):
    return tasks.TextClassifier.from_pretrained(
        weights, labels=LABELS, max_seq_length=12, **options
    )


@pytest.mark.parametrize("form", ["rows", "dataset"])
def test_fit_compiles_packed_rows_and_trains_equally(form, weights):
    plain, packed = classifier(weights), classifier(weights)
    plain.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    packed.compile(keras.optimizers.SGD(0.1))
    assert packed.jit_compile and not plain.jit_compile
    rows = {"x": ROWS, "y": NAMES, "batch_size": 4}
    if form == "dataset":
        rows = {"x": tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(4)}
    with exact_float32():
        for model in (plain, packed):
            model.fit(**rows, epochs=2, verbose=0)
    assert_equal_weights(weights_of(plain), weights_of(packed), rtol=1e-4, atol=1e-5)
    assert all("GPU" in weight.value.device for weight in packed.weights)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_fit_in_half_precision_is_close(dtype, weights):
    losses = []
    for policy in ("float32", dtype):
        model = classifier(weights, dtype=policy)
        model.compile(learning_rate=1e-3)
        losses.append(model.fit(ROWS, NAMES, batch_size=4, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-2)


@pytest.mark.parametrize("kind", TASKS)
def test_each_kind_predicts_as_its_export_for_cpus(kind, tmp_path, config, vocabulary):
    model = of_task(kind, tmp_path, config, vocabulary)
    columns = inputs_of(model.task, TEXTS)
    with exact_float32():
        found = model.serving.call("serving_default", columns)
        assert model.serving.pipeline.is_on_gpu
    export.publish(model, tmp_path / "models")
    expected = export.LocalClient(tmp_path / "models").predict(columns)
    assert expected.keys() == found.keys()
    for name, values in found.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-4)


def test_two_replicas_train_like_one(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    command = [sys.executable, "-c", REPLICAS, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
