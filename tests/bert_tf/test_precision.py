"""Precision: sums of bfloat16 gradients, LayerNorm far from 0, and TF32."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import convert, fill_mask, plot_attention
from bert_tf.model.dense import dense, linear, tied_embeddings
from bert_tf.model.layers import Embeddings, LayerNorm
from bert_tf.model.layout import infer_layout
from bert_tf.pretraining import recipe as pretraining_recipe
from bert_tf.pretraining.model import MaskedLmHead
from bert_tf.train.distribution import use_precision
from bert_tf.weights.sources import PretrainedWeights, read_pretrained
from export import publishing
from tasks.finetuning import recipe as finetuning_recipe
from tasks.graph.heads import SequenceClassifier
from tasks.prediction.outputs import EmbedderSettings
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.corpus import config_of, write_shards
from tests.pretraining import TINY, settings_of

ROWS, POLICY = 4096, "mixed_bfloat16"  # bfloat16 represents 256 and 258, but not 257.
SEED = tf.constant([1, 2], tf.int64)


def gradients_of_ones(function, variables):
    """Return the gradients of the sum of all outputs of `function` as float32 arrays."""
    with tf.GradientTape() as tape:
        output = function()
    ones = tf.ones_like(output)
    gradients = tape.gradient(output, [variable.value for variable in variables], ones)
    return [tf.cast(tf.convert_to_tensor(value), tf.float32).numpy() for value in gradients]


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_the_gradient_of_a_bias_sums_all_rows(config, wrap):
    layer = dense(config, 3, "layer", POLICY)
    layer.build((None, 4))

    def call():
        with keras.src.backend.common.variables.AutocastScope("bfloat16"):
            return linear(tf.ones([ROWS, 4], tf.bfloat16), layer, SEED)

    assert wrap(call)().dtype == tf.bfloat16
    (of_bias,) = gradients_of_ones(wrap(call), [layer.bias])
    np.testing.assert_array_equal(of_bias, [ROWS] * 3)


@pytest.mark.parametrize("width", [8, 128])  # Plain and compiled by XLA.
def test_the_gradients_of_layer_norm_sum_all_rows(width):
    layer = LayerNorm(1e-12, dtype=POLICY)
    layer.build((None, width))
    x_TH = tf.tile(tf.constant([[1.0, -1.0]], tf.bfloat16), [ROWS, width // 2])
    calls = (
        lambda: layer(x_TH, seed=SEED),
        lambda: layer.dropout_add_norm(x_TH, tf.zeros_like(x_TH), 0.0, SEED, 1)[0],
    )
    for call in calls[width == 128 :]:
        of_gamma, of_beta = gradients_of_ones(call, [layer.gamma, layer.beta])
        # Reciprocal square roots of 1 differ from processor to processor, by a last digit.
        np.testing.assert_allclose(of_gamma, [ROWS, -ROWS] * (width // 2), rtol=1e-6)
        np.testing.assert_array_equal(of_beta, [ROWS] * width)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_the_gradients_of_embeddings_sum_all_rows(config, layout, monkeypatch):
    # The gradient of LayerNorm itself would be 0 for ones.
    monkeypatch.setattr(LayerNorm, "call", lambda self, x_TH, seed=None: x_TH)
    layer = Embeddings(dataclasses.replace(config, hidden_dropout_prob=0.0), dtype=POLICY)
    layer.build()
    length, texts = 8, ROWS // 8
    inputs = {"input_ids": tf.ones([ROWS], tf.int32), "row_splits": tf.range(texts + 1) * length}
    if layout == "padded":
        inputs = {"input_mask": tf.ones([texts, length], tf.int32)}

    def call():
        ids_T = tf.ones([ROWS], tf.int32)
        return layer(ids_T, ids_T, layout=infer_layout(inputs), seed=SEED)

    assert call().dtype == tf.bfloat16
    of_words, of_positions, of_types = gradients_of_ones(
        call,
        [layer.word_embeddings_VH, layer.position_embeddings_PH, layer.token_type_embeddings],
    )
    np.testing.assert_array_equal(of_words[1], ROWS)
    np.testing.assert_array_equal(of_types[1], ROWS)
    np.testing.assert_array_equal(of_positions[:length], texts)


def test_the_gradients_of_heads_sum_all_rows(config):
    config = dataclasses.replace(config, hidden_dropout_prob=0.0)
    masked_lm = MaskedLmHead(config, dtype=POLICY)
    masked_lm.build((None, config.hidden_size))
    vectors_NH = tf.ones([ROWS, config.hidden_size], tf.bfloat16)
    table_VH = tf.ones([config.vocab_size, config.hidden_size])
    _, project = tied_embeddings(table_VH, tf.bfloat16, SEED)
    (of_bias,) = gradients_of_ones(
        lambda: masked_lm(vectors_NH, project=project, seed=SEED), [masked_lm.output_bias_V]
    )
    np.testing.assert_array_equal(of_bias, [ROWS] * config.vocab_size)
    model = SequenceClassifier(config, 2, dtype=POLICY)
    (of_bias,) = gradients_of_ones(lambda: model.scores(vectors_NH, SEED), [model.head.bias])
    np.testing.assert_array_equal(of_bias, [ROWS] * 2)
    encoder = model.encoder
    for variable in (encoder.pooler.kernel, encoder.pooler.bias):
        variable.assign(tf.zeros_like(variable))  # The slope of tanh is 1 here.
    of_one = {"input_ids": tf.ones([ROWS], tf.int32), "row_splits": tf.range(ROWS + 1)}
    inputs = {**of_one, "segment_ids": tf.zeros([ROWS], tf.int32)}
    for options in ({}, {"pooled_only": True}):
        (of_bias,) = gradients_of_ones(
            lambda options=options: encoder(inputs, training=True, seed=SEED, **options)["pooled"],
            [encoder.pooler.bias],
        )
        np.testing.assert_array_equal(of_bias, [ROWS] * config.hidden_size)


# The error of a stable float32 LayerNorm, oneDNN's own, grows with the mean like this.
TOLERANCE_OF_MEAN = {0: 5e-6, 30: 5e-5, 300: 5e-4, 3000: 5e-3}


@pytest.mark.parametrize("mode", ["eager", "graph", "jit_compile", "nested", "concrete", "keras"])
def test_layer_norm_of_many_rows_far_from_zero(mode):
    """Use a mean of 3,000, where a variance of E[x^2] - E[x]^2 has no correct digit."""
    layer = LayerNorm(1e-12)
    layer.build((None, 384))
    rng, x_TH = np.random.default_rng(0), tf.TensorSpec([None, 384])
    model = keras.Sequential([keras.Input((384,)), layer])
    model.compile(jit_compile=True)
    call = {
        "eager": layer,
        "graph": tf.function(lambda x: layer(x)),
        "jit_compile": tf.function(lambda x: layer(x), jit_compile=True),
        "nested": tf.function(tf.function(lambda x: layer(x)), jit_compile=True),
        "concrete": tf.function(lambda x: layer(x), jit_compile=True).get_concrete_function(x_TH),
        "keras": model.predict_on_batch,
    }[mode]
    for mean, tolerance in TOLERANCE_OF_MEAN.items():
        x = (mean + rng.normal(size=[256, 384])).astype(np.float32)
        wide = x.astype(np.float64)
        expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
        np.testing.assert_allclose(call(tf.constant(x)), expected, rtol=0, atol=tolerance)


def test_set_jit_uses_the_same_formula(monkeypatch):
    layer = LayerNorm(1e-12)
    layer.build((None, 384))

    def operations():
        graph = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec([None, 384]))
        return {node.op for f in graph.graph.as_graph_def().library.function for node in f.node_def}

    assert "FusedBatchNormV3" in operations()
    monkeypatch.setattr(tf.config.optimizer, "get_jit", lambda: "autoclustering")
    assert "FusedBatchNormV3" not in operations()


@pytest.fixture
def is_tf32():
    """Restore TensorFlow's TF32 switch afterwards; return a function that reads it."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_tf32_is_on_only_if_requested(precision, is_tf32):
    for before in (True, False):
        tf.config.experimental.enable_tensor_float_32_execution(before)
        policy = use_precision(precision)
        assert policy == ("mixed_bfloat16" if precision == "bfloat16" else "float32")
        assert is_tf32() == (precision == "tf32")


class Built(Exception):
    """Raised in place of building the model, to end a recipe there."""


def test_both_recipes_set_tf32(is_tf32, huggingface_dir, complaints, tmp_path, monkeypatch):
    def build(*arguments, **options):
        raise Built

    monkeypatch.setattr(pretraining_recipe, "PretrainingModel", build)
    monkeypatch.setattr(finetuning_recipe, "model_class", build)
    directories = {"shards": write_shards(tmp_path / "shards"), "config": tmp_path / "config.json"}
    directories["config"].write_text(json.dumps(config_of(**TINY).to_dict()))
    for precision in ("float32", "tf32"):
        output = {"output_dir": tmp_path / "run", "precision": precision}
        for train, settings in (
            (pretraining_recipe.pretrain, settings_of(directories, **output)),
            (finetuning_recipe.finetune, small.settings(huggingface_dir, complaints, **output)),
        ):
            tf.config.experimental.enable_tensor_float_32_execution(precision != "tf32")
            with pytest.raises(Built):
                train(settings)
            assert is_tf32() == (precision == "tf32")


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (fill_mask, lambda: fill_mask.FillMaskSettings("run", "the [MASK]")),
        (
            plot_attention,
            lambda: plot_attention.PlotAttentionSettings(
                "run", "the bill", "x.png", max_seq_length=8
            ),
        ),
        (convert, lambda: convert.ConvertSettings("run", "out", "google")),
    ],
)
def test_commands_compute_in_float32(
    is_tf32, config, vocabulary, tmp_path, monkeypatch, command, settings
):
    def assign_to(*arguments):
        assert not is_tf32()
        raise Built

    monkeypatch.chdir(tmp_path)
    weights = small.random_weights(config, parts=("bert", "masked_lm"))
    PretrainedWeights(config, vocabulary, weights, "random").save("run")
    monkeypatch.setattr(PretrainedWeights, "assign_to", assign_to)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    with pytest.raises(Built):
        command.main(settings())


def test_a_model_trained_in_bfloat16_predicts_in_float32(huggingface_dir, tmp_path, is_tf32):
    tf.config.experimental.enable_tensor_float_32_execution(True)
    pretrained = read_pretrained(str(huggingface_dir))
    EmbedderSettings(max_seq_length=8).create_embedder(pretrained)
    assert not is_tf32()
    task = ClassificationTask(labels=("a", "b"), max_seq_length=8)
    model = task.build_model(pretrained.config)
    pretrained.assign_to(model)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    run = small.trained(tmp_path / "run", pretrained, task, model).source.run
    assert is_tf32()  # Loading a model in Python leaves the switch to its user.
    with pytest.raises(Built), publishing.loaded(run.path, None):
        assert not is_tf32()
        raise Built
    assert is_tf32()
