"""Exports on a real GPU: parity in each precision, and where they are loaded.

BERT_TF_TEST_GPU=1 python -m pytest -m gpu tests/gpu
"""

import os

import numpy as np
import pytest

import export
from bert_tf.train.distribution import exact_float32
from tests.export.test_every_kind import TASKS, TEXTS, inputs_of, of_pretraining, of_task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "BERT_TF_TEST_GPU" not in os.environ, reason="BERT_TF_TEST_GPU is not set: no GPU"
    ),
]


@pytest.mark.parametrize("kind", [*TASKS, "pretrained"])
def test_each_kind_is_published_and_predicts_as_trained(kind, tmp_path, config, vocabulary):
    is_pretrained = kind == "pretrained"
    model = (
        of_pretraining(tmp_path, config, vocabulary)
        if is_pretrained
        else of_task(kind, tmp_path, config, vocabulary)
    )
    export.publish(model, tmp_path / "models", device="gpu")
    texts = inputs_of(model.task, TEXTS)
    with exact_float32():
        served = export.LocalClient(tmp_path / "models").predict(texts)
        expected = model.serving.call("serving_default", texts)
    for name, values in expected.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(served[name], values, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "precision"),
    [("gpu", "float16"), ("gpu", "bfloat16"), ("cpu", "float32"), ("cpu", "bfloat16")],
)
def test_precisions_pass_the_parity_check(device, precision, tmp_path, config, vocabulary):
    model = of_task("classification", tmp_path, config, vocabulary)
    version = export.publish(model, tmp_path / "models", precision=precision, device=device)
    card = (version / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "since the export saw no GPU" not in card
    client = export.LocalClient(version)
    places = {variable.device for variable in client._model.weights[0]}
    assert all(device.upper() in place for place in places) and places
