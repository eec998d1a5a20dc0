"""Scalars of NumPy as options and arguments: used, and saved, as Python's own."""

import dataclasses
import json

import numpy as np
import pytest

from bert_tf import BertConfig, UserError
from bert_tf.system.scalars import to_python
from tasks import TextClassifier, load_model
from tasks.base.task import task_class
from tasks.base.task_types import TASK_TYPES
from tasks.model import run_training
from tasks.model.task_model import TaskModel
from tests.tasks.test_task_model import LABELS, NAMES, ROWS, create

INTEGER, FLOAT = np.int64, np.float32


@pytest.fixture(scope="module")
def config(config):
    """Return a configuration with two layers."""
    return dataclasses.replace(config, num_hidden_layers=2)


def test_values_have_the_types_of_python():
    values = {np.str_("a"): (INTEGER(1), [FLOAT(0.5), np.bool_(True)], np.array(2)), "b": b"\xff"}
    found = to_python(values)
    assert found == {"a": (1, [0.5, True], 2), "b": "\ufffd"}
    assert [type(value) for value in (*found["a"][1], *found["a"][::2])] == [float, bool, int, int]


def test_a_configuration_can_be_saved():
    config = BertConfig(vocab_size=INTEGER(9), hidden_dropout_prob=FLOAT(0.5))
    assert json.loads(json.dumps(config.to_dict()))["vocab_size"] == 9


@pytest.mark.medium
def test_options_and_arguments(huggingface_dir, tmp_path):
    model = TextClassifier.from_pretrained(
        huggingface_dir,
        labels=np.array(LABELS),
        max_seq_length=INTEGER(12),
        seed=INTEGER(3),
        frozen_layers=INTEGER(1),
        class_weights=np.array([1, 2, 3], FLOAT),
        focal_gamma=FLOAT(2),
        calibrate=np.bool_(True),
    )
    model.compile(learning_rate=FLOAT(1e-3), warmup_proportion=FLOAT(0.5), layer_decay=FLOAT(1))
    arguments = {"epochs": INTEGER(1), "batch_size": np.uint8(8), "validation_split": FLOAT(0.25)}
    model.fit(ROWS, NAMES, verbose=0, validation_freq=INTEGER(1), **arguments)
    model.freeze(INTEGER(2))
    model.save_run(tmp_path / "run")
    model.save(tmp_path / "model.keras")
    assert load_model(tmp_path / "run").task == model.task
    assert load_model(tmp_path / "model.keras").frozen_layers == 2


OPTIONS = {
    "classification": {"labels": LABELS},
    "tagging": {"labels": LABELS, "doc_stride": INTEGER(4)},
    "span_qa": {"doc_stride": INTEGER(4), "max_query_length": INTEGER(4)},
    "anomaly": {"latent_dim": INTEGER(3), "false_alarm_rate": FLOAT(0.5)},
}


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_tasks_can_be_saved(kind):
    class Pretrained:
        config = BertConfig(vocab_size=9)
        task = run_task = embedder = unsupported_embedder = None
        has_trained_pooler = True

    of_kind = task_class(kind)  # Its import defines the model.
    (model,) = (one for one in TaskModel.__subclasses__() if one.task_class is of_kind)
    task = model._create_task(Pretrained(), INTEGER(16), OPTIONS.get(kind, {}))
    assert json.loads(json.dumps(task.to_dict()))["max_seq_length"] == 16


def test_settings_of_train(huggingface_dir):
    model = create("TextRegressor", huggingface_dir)
    settings = run_training._settings(model, {"epochs": INTEGER(2), "learning_rate": FLOAT(0.5)})
    assert (settings.epochs, settings.learning_rate) == (2, 0.5)
    assert type(settings.epochs) is int


@pytest.mark.parametrize(
    ("class_weights", "expected"),
    [({2: 3.0}, (1, 1, 3)), ({"hardware": 2}, (1, 2, 1)), (np.array([1, 2, 3]), (1, 2, 3))],
)
def test_class_weights_by_name_id_or_in_order(class_weights, expected):
    options = {"max_seq_length": 8, "labels": LABELS, "class_weights": class_weights}
    assert task_class("classification").from_options(**options).class_weights == expected


def test_class_weights_of_other_labels_are_refused():
    options = {"max_seq_length": 8, "labels": LABELS, "class_weights": [1.0, 2.0]}
    with pytest.raises(UserError, match="class_weights=1.0,2.0: 2 weights; expected 3, in the or"):
        task_class("classification").from_options(**options)
