"""Arguments of `compile` do what Keras documents: those of a keras.Model on the same token ids."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf.train.optimizer import WarmupLinearDecay
from tests import small
from tests.tasks.test_task_model import CASES, LABELS, NAMES, ROWS
from tests.tasks.test_task_model_training import NO_DROPOUT

IDS = np.array([LABELS.index(name) for name in NAMES])


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    path = tmp_path_factory.mktemp("plain") / "huggingface"
    return small.write_huggingface(path, config, vocabulary, **NO_DROPOUT)


class Plain(keras.Model):
    """Model of Keras with the encoder and head of another one."""

    def __init__(self, network, outputs):
        super().__init__()
        self.network, self.names = network, outputs

    def call(self, inputs, training=False):
        outputs = self.network(inputs, training=training)
        found = {name: outputs[name] for name in self.names}
        return found if len(found) > 1 else found[self.names[0]]


def cross_entropy(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)


def hinge(labels, logits):
    """Return a loss that no task has."""
    return keras.losses.categorical_hinge(tf.one_hot(tf.cast(labels, tf.int32), 3), logits)


class LargestLogit(keras.metrics.Mean):
    """Metric of one's own."""

    def update_state(self, labels, logits, sample_weight=None):
        return super().update_state(tf.reduce_max(logits, axis=-1))


class Decay(keras.optimizers.schedules.LearningRateSchedule):
    """Schedule of one's own."""

    def __call__(self, step):
        return 0.1 / (tf.cast(step, tf.float32) + 1.0)


def top(name):
    return keras.metrics.SparseTopKCategoricalAccuracy(2, name=name)


ARGUMENTS = {
    "a function as loss": lambda: {"loss": hinge},
    "a function as metric": lambda: {"metrics": [hinge]},
    "a metric of one's own": lambda: {"metrics": [LargestLogit("largest")]},
    "metrics": lambda: {"metrics": [top("top")], "weighted_metrics": [top("weighted")]},
    "an optimizer": lambda: {"optimizer": keras.optimizers.AdamW(1e-2, clipnorm=0.5)},
    "its name": lambda: {"optimizer": "adam"},
    "a schedule of Keras": lambda: {
        "optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9))
    },
    "a schedule of one's own": lambda: {"optimizer": keras.optimizers.SGD(Decay())},
    "a schedule of bert_tf": lambda: {
        "optimizer": keras.optimizers.Adam(WarmupLinearDecay(1e-2, 9, 3))
    },
    "accumulated batches": lambda: {
        "optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    },
    "averaged weights": lambda: {"optimizer": keras.optimizers.SGD(0.1, use_ema=True)},
    "a factor": lambda: {"loss_weights": 0.5},
    "jit_compile": lambda: {"jit_compile": True},
    "run_eagerly": lambda: {"run_eagerly": True},
    "two steps per execution": lambda: {"steps_per_execution": 2},
    "steps of more than an epoch": lambda: {"steps_per_execution": 20},
    "mixed precision": dict,
    "label smoothing": lambda: {
        "loss": lambda labels, logits: keras.losses.categorical_crossentropy(
            tf.one_hot(tf.cast(labels, tf.int32), 3), logits, from_logits=True, label_smoothing=0.1
        )
    },
}


def compared(model, plain, rows, ids, arguments, rtol, **options):
    """Compare the logs of each epoch of a model of strings and of a plain one."""
    logs = []
    for of, (x, y) in ((model, rows), (plain, ids)):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        given = {"optimizer": keras.optimizers.SGD(0.1), "loss": loss, "metrics": [], **arguments()}
        of.compile(**given)
        for name, value in given.items():  # Which change no result.
            if name in ("jit_compile", "run_eagerly", "steps_per_execution"):
                assert getattr(of, name) == value
        logs.append(of.fit(x, y, shuffle=False, verbose=0, **options).history)
    found, expected = logs
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=rtol, err_msg=name)
    assert len({round(value, 4) for value in found["loss"]}) > 1  # It learns.


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(ARGUMENTS, "a function as loss", "run_eagerly"))
def test_arguments_of_compile_do_what_keras_documents(name, weights):
    is_mixed = name == "mixed precision"
    dtype = "mixed_bfloat16" if is_mixed else "float32"
    model, other = (
        tasks.TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12, dtype=dtype)
        for _ in range(2)
    )
    ids = {key: value.numpy() for key, value in other.preprocessor(ROWS).items()}
    compared(
        *(model, Plain(other.network, ["label"]), (ROWS, NAMES), (ids, IDS), ARGUMENTS[name]),
        rtol=2e-2 if is_mixed else 2e-5,
        batch_size=4,
        epochs=3,
    )


@pytest.mark.medium
def test_loss_weights_of_two_outputs_are_those_of_keras(weights):
    options, x, y = CASES["QuestionAnswerer"]
    model, other = (
        tasks.QuestionAnswerer.from_pretrained(weights, max_seq_length=12, **options)
        for _ in range(2)
    )
    rows = other.dataset(x, y, batch_size=32, shuffle=False)  # A single batch.

    def arguments():
        losses = {
            name: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for name in ("start", "end")
        }
        return {"loss": losses, "loss_weights": {"start": 1.0, "end": 0.25}}

    compared(
        *(model, Plain(other.network, ["start", "end"]), (x, y), (rows, None), arguments),
        rtol=2e-5,
        epochs=3,
    )


# Metrics of validation rows.


def evaluated(model, **arguments):
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), **arguments)
    return model.fit(
        *(ROWS, NAMES), batch_size=4, epochs=1, validation_data=(ROWS, NAMES), verbose=0
    ).history


@pytest.mark.medium
@pytest.mark.parametrize("replicas", small.fast([1, 2], 1))
def test_metrics_of_compile_are_measured_on_validation_rows(weights, mirrored, replicas):
    strategy = mirrored if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = tasks.TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
        metrics = [LargestLogit("largest"), top("top"), "accuracy"]
    logs = evaluated(model, metrics=metrics)
    plain = Plain(
        tasks.TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12).network,
        ["label"],
    )
    plain.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[LargestLogit("largest"), top("top"), "accuracy"],
    )
    ids = {key: value.numpy() for key, value in model.preprocessor(ROWS).items()}
    expected = plain.evaluate(ids, IDS, batch_size=4, verbose=0, return_dict=True)
    for name in ("loss", "largest", "top", "accuracy"):
        assert logs[f"val_{name}"] == [pytest.approx(expected[name], rel=1e-5)], name
    assert logs["val_macro_f1"] == [pytest.approx(model.evaluate(ROWS, NAMES)["macro_f1"])]
    assert model.evaluate(ROWS, NAMES)["top"] == pytest.approx(expected["top"], rel=1e-5)


@pytest.mark.medium
def test_a_metric_of_the_task_wins_over_one_of_compile(weights):
    model = tasks.TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
    logs = evaluated(model, metrics=[LargestLogit("macro_f1")])
    expected = model.report(ROWS, NAMES)["macro_f1"]
    assert logs["val_macro_f1"] == [pytest.approx(expected)] != logs["macro_f1"]
