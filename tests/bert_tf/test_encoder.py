"""The encoder against float64 NumPy, KerasNLP and real activations, and its invariants."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import BertConfig, Encoder, UserError
from bert_tf.model import encoder as encoder_module
from bert_tf.model import fused_kernels
from bert_tf.model.layout import PackedLayout
from bert_tf.runs.checkpoints import assign, model_variables
from bert_tf.weights import name_map, tensor_files
from tests import reference, small


def make_encoder(config, weights, **kwargs):
    encoder = Encoder(config, **kwargs)
    encoder.build()
    variables = model_variables(encoder)
    assign({name: variables[name] for name in weights}, weights, "test")
    return encoder


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, tf.function, functools.partial(tf.function, jit_compile=True)],
    ids=["eager", "graph", "xla"],
)
def test_equals_numpy_in_every_layer_and_attention(config, inputs_BL, hidden_act, wrap):
    config = dataclasses.replace(config, hidden_act=hidden_act)
    weights = small.random_weights(config)
    encoder = make_encoder(config, weights)
    outputs = wrap(lambda inputs: encoder(inputs, output_hidden_states=True))(inputs_BL)
    for row, length in enumerate(inputs_BL["input_mask"].sum(1)):
        expected = reference.encode(
            inputs_BL["input_ids"][row, :length],
            inputs_BL["segment_ids"][row, :length],
            weights,
            config,
        )
        reference.assert_equal(outputs["pooled"][row], expected["pooled"], 2)
        reference.assert_equal(outputs["sequence"][row, :length], expected["hidden_states"][-1], 2)
        for actual, layer in zip(outputs["hidden_states"], expected["hidden_states"], strict=True):
            reference.assert_equal(actual[row, :length], layer, 2)
        for actual, layer in zip(outputs["attentions"], expected["attentions"], strict=True):
            reference.assert_equal(actual[row, :, :length, :length], layer, 2)
            np.testing.assert_array_equal(actual[row, :, :length, length:], 0)


def test_erf_and_tanh_differ(config, inputs_BL):
    weights = small.random_weights(config)
    pooled = [
        make_encoder(dataclasses.replace(config, hidden_act=act), weights)(inputs_BL)[
            "pooled"
        ].numpy()
        for act in ("gelu", "gelu_new")
    ]
    assert 1e-6 < np.abs(pooled[0] - pooled[1]).max() < 1e-2


def test_equals_keras_nlp_with_the_same_weights(vocabulary, tmp_path):
    keras_nlp = pytest.importorskip("keras_nlp")
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=50,
        num_layers=3,
        num_heads=4,
        hidden_dim=24,
        intermediate_dim=40,
        max_sequence_length=16,
        num_segments=2,
    )
    rng = np.random.default_rng(3)
    backbone.set_weights(
        [
            weight
            if weight.dtype.kind != "f"
            else rng.normal(float("gamma" in variable.path), 0.2, weight.shape)
            for variable, weight in zip(backbone.weights, backbone.get_weights(), strict=True)
        ]
    )
    config = BertConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    backbone.save_weights(tmp_path / "model.weights.h5")
    tensors = tensor_files.read_h5(tmp_path / "model.weights.h5", kinds="fiu")
    weights, _ = name_map.rename(
        name_map.StoredModel(
            config, vocabulary, tensors, "keras", r".*seed_generator.*", "backbone"
        )
    )
    ids, lengths = rng.integers(0, 50, (5, 11)), np.array([11, 1, 7, 4, 10])
    inputs = {
        "input_ids": ids,
        "input_mask": (np.arange(11) < lengths[:, None]).astype(int),
        "segment_ids": (np.arange(11) > 4) * np.ones((5, 1), int),
    }
    expected = backbone(
        {
            "token_ids": ids,
            "padding_mask": inputs["input_mask"],
            "segment_ids": inputs["segment_ids"],
        }
    )
    actual = make_encoder(config, weights)(inputs)
    is_token = inputs["input_mask"] == 1
    reference.assert_equal(actual["pooled"], expected["pooled_output"].numpy(), 3)
    reference.assert_equal(
        actual["sequence"].numpy()[is_token], expected["sequence_output"].numpy()[is_token], 3
    )


def test_equals_the_activations_of_the_real_bert_tiny(data_dir):
    """Compare with Google's bert-tiny fine-tuned on SST-2, from its embeddings to the logits."""
    directory = data_dir / "checkpoints" / "bert_tiny_sst2_encoder_only"
    theirs = dict(np.load(directory / "bert_tiny_sst2_encoder.npz"))
    expected = dict(np.load(directory / "expected_numpy_float64.npz"))
    config = BertConfig(
        vocab_size=4,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        hidden_act="gelu",
    )
    weights = small.random_weights(config)  # The file has no embedding tables.
    found = {}
    for row in name_map.table(config):
        name = "bert." + row.huggingface
        if name in theirs:
            found[row.ours] = theirs[name].T if row.ours.endswith("/kernel") else theirs[name]
    assert set(weights) - set(found) == {
        name for name in weights if name.startswith("bert/embeddings/")
    }
    encoder = make_encoder(config, {**weights, **found})
    hidden_TH = tf.constant(expected["embedding_output"], tf.float32)
    layout = PackedLayout({"input_mask": tf.ones((1, 10), tf.int32)})
    for layer in encoder.transformer:
        hidden_TH, *_ = layer(hidden_TH, layout=layout)
    pooled_BH = encoder.pooler(layout.cls_vectors(hidden_TH))
    reference.assert_equal(hidden_TH, expected["last_hidden_state"], 2)
    reference.assert_equal(pooled_BH[0], expected["pooler_output"], 2)
    logits = pooled_BH[0].numpy() @ theirs["classifier.weight"].T + theirs["classifier.bias"]
    reference.assert_equal(logits, expected["logits"], 2)


FLAT = {
    "input_ids": np.array([2, 5, 6, 7, 3, 2, 9, 3], np.int32),
    "segment_ids": np.array([0, 0, 1, 1, 1, 0, 1, 1], np.int32),
    "row_splits": np.array([0, 5, 8], np.int32),
}
DEFAULTS = {"segment_ids": np.zeros_like, "input_mask": np.ones_like}


def assert_same_outputs(actual, expected):
    for name in ("sequence", "pooled"):
        np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.parametrize("missing", [["segment_ids"], ["input_mask"], list(DEFAULTS)])
def test_missing_inputs_are_one_segment_without_padding(config, inputs_BL, missing):
    encoder = make_encoder(config, small.random_weights(config))
    ids_BL = inputs_BL["input_ids"]
    explicit = {**inputs_BL, **{name: DEFAULTS[name](ids_BL) for name in missing}}
    given = {name: values for name, values in inputs_BL.items() if name not in missing}
    assert_same_outputs(encoder(given), encoder(explicit))
    if len(missing) == 2:
        assert_same_outputs(encoder(ids_BL), encoder(explicit))


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("input_mask", "attention_mask"),
        ("segment_ids", "token_type_ids"),
        ("segment_ids", "input_type_ids"),
        ("segment_ids", "type_ids"),
        ("input_ids", "input_word_ids"),
        ("input_ids", None),
    ],
)
def test_inputs_of_other_names_are_not_ignored(config, inputs_BL, own, other):
    inputs = {**inputs_BL, other: inputs_BL[own]} if other else dict(inputs_BL)
    del inputs[own]
    named = other or "input_mask, segment_ids"
    with pytest.raises(UserError, match=f"^{named}: expected as inputs of the encoder input_ids, "):
        Encoder(config)(inputs)


@pytest.mark.parametrize("segment", [-1, 2])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_segments_that_the_table_does_not_have_are_not_zeros(
    config, inputs_BL, segment, jit_compile
):
    inputs = {**inputs_BL, "segment_ids": np.full_like(inputs_BL["segment_ids"], segment)}
    encoder = Encoder(config)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in \\[0, 2\\)"):
        encoder(inputs)
    train = tf.function(encoder, jit_compile=jit_compile)
    pooled = train(tf.nest.map_structure(tf.constant, inputs), training=True)["pooled"]
    assert np.isnan(pooled).all()  # The loss is not finite, which stops training.


def is_trained(encoder):
    return [weight.trainable for weight in encoder.weights]


def parts(encoder):
    return encoder, *encoder.transformer, encoder.pooler


def biases_only(encoder):
    for weight in encoder.weights:
        weight.trainable = weight.name == "bias"


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: setattr(encoder, "trainable", False),
        lambda encoder: encoder.freeze(1),
        lambda encoder: setattr(encoder.pooler, "trainable", False),
        biases_only,
        lambda encoder: None,
    ],
)
def test_what_is_not_trained_stays_untrained_in_a_saved_model(config, inputs_BL, tmp_path, change):
    encoder = Encoder(config, name="mine")
    encoder.build()
    change(encoder)
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(3)(encoder(ids)["pooled"]))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    for copy in (loaded.get_layer("mine"), Encoder.from_config(encoder.get_config())):
        assert is_trained(copy) == is_trained(encoder)
        assert copy.frozen_layers == encoder.frozen_layers
        for part, of_copy in zip(parts(encoder), parts(copy), strict=True):
            assert of_copy.trainable == part.trainable, part.name


def test_an_encoder_that_is_created_untrained_is_untrained(config):
    encoder = Encoder(config, trainable=False)
    encoder.build()
    assert not any(is_trained(encoder))


IDS_BL = np.array([[2, 10, 11, 3]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (IDS_BL.tolist(), "input_ids: expected a tensor, received a list; pass tf.constant"),
        (
            {"input_ids": IDS_BL, "input_mask": None},
            "input_mask: expected a tensor, received a None",
        ),
        ({"input_ids": [[2, 3]]}, "input_ids: expected a tensor, received a list; pass tf.const"),
        (IDS_BL[0], "input_ids: expected the shape (B, L), or (T,) with row_splits, received (4,)"),
        (IDS_BL[0, 0], "input_ids: expected the shape (B, L), or (T,) with row_splits, received "),
        (
            tf.ragged.constant([[2, 3], [2]]),
            "input_ids: expected a dense tensor, received a ragged",
        ),
        (
            {"input_ids": IDS_BL, "input_mask": np.ones((1, 6), np.int32)},
            "input_mask: expected the shape of input_ids, (1, 4), received (1, 6)",
        ),
        (
            {"input_ids": IDS_BL, "segment_ids": np.zeros((2, 4), np.int32)},
            "segment_ids: expected the shape of input_ids, (1, 4), received (2, 4)",
        ),
        (
            {"input_ids": IDS_BL, "row_splits": np.array([0, 4])},
            "input_ids: expected the shape (T,), received (1, 4)",
        ),
    ],
    ids=[
        "list",
        "none",
        "dict of list",
        "one axis",
        "scalar",
        "ragged",
        "mask",
        "segments",
        "flat",
    ],
)
def test_inputs_of_another_shape_are_refused(config, inputs, message):
    with pytest.raises(UserError) as raised:
        Encoder(config)(inputs)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_flat_inputs_without_segments_are_one_segment(config):
    encoder = make_encoder(config, small.random_weights(config))
    given = {name: values for name, values in FLAT.items() if name != "segment_ids"}
    explicit = {**FLAT, "segment_ids": np.zeros_like(FLAT["input_ids"])}
    assert_same_outputs(encoder(given), encoder(explicit))


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_defaults_add_no_operation_for_given_inputs(config, inputs_BL, layout, monkeypatch):
    encoder = Encoder(dataclasses.replace(config, num_hidden_layers=1))
    encoder.build()
    inputs = {"padded": inputs_BL, "flat": FLAT}[layout]

    def operations(inputs):
        tensors = {name: tf.constant(values) for name, values in inputs.items()}
        graph = tf.function(lambda given: encoder(given)).get_concrete_function(tensors).graph
        return [operation.type for operation in graph.get_operations()]

    actual = operations(inputs)
    monkeypatch.setattr(encoder_module, "with_defaults", lambda inputs: inputs)
    assert actual == operations(inputs)


def test_content_of_padding_does_not_affect_tokens(config, inputs_BL):
    encoder = make_encoder(config, small.random_weights(config))
    is_token = inputs_BL["input_mask"] == 1
    garbled = {
        **inputs_BL,
        "input_ids": np.where(is_token, inputs_BL["input_ids"], 11),
        "segment_ids": np.where(is_token, inputs_BL["segment_ids"], 1),
    }
    for name, kept in (("sequence", is_token), ("pooled", slice(None))):
        np.testing.assert_array_equal(
            encoder(inputs_BL)[name].numpy()[kept], encoder(garbled)[name].numpy()[kept]
        )


@pytest.mark.parametrize("padding", [1, 4, 11])
def test_amount_of_padding_does_not_affect_tokens(config, inputs_BL, padding):
    encoder = make_encoder(config, small.random_weights(config))
    longer = {name: np.pad(values, [(0, 0), (0, padding)]) for name, values in inputs_BL.items()}
    short, long = encoder(inputs_BL), encoder(longer)
    reference.assert_equal(long["pooled"], short["pooled"].numpy(), 2)
    reference.assert_equal(long["sequence"][:, :5], short["sequence"].numpy(), 2)


def test_every_variable_gets_a_gradient(config, inputs_BL):
    encoder = make_encoder(config, small.random_weights(config))
    inputs = {**inputs_BL, "segment_ids": inputs_BL["segment_ids"]}
    with tf.GradientTape() as tape:
        outputs = encoder(inputs)
        loss = tf.reduce_sum(outputs["sequence"][:, :3] ** 2) + tf.reduce_sum(
            outputs["pooled"] ** 2
        )
    gradients = tape.gradient(loss, encoder.trainable_variables)
    for variable, gradient in zip(encoder.trainable_variables, gradients, strict=True):
        assert gradient is not None, variable.path
        # A key bias shifts all scores of a query alike, and softmax removes the shift: its true
        # gradient is 0.
        if not variable.path.endswith("key/bias"):
            assert np.abs(tf.convert_to_tensor(gradient)).max() > 1e-6, variable.path
    assert len(gradients) == len(name_map.table(config))


def test_dropout_is_a_function_of_its_seed(config, inputs_BL):
    encoder = make_encoder(config, small.random_weights(config))
    pooled = {
        seed: encoder(inputs_BL, training=True, seed=np.array(seed))["pooled"].numpy()
        for seed in ((1, 0), (2, 0), (1, 2**16))
    }
    np.testing.assert_array_equal(
        pooled[1, 0], encoder(inputs_BL, training=True, seed=np.array((1, 0)))["pooled"]
    )
    assert np.abs(pooled[1, 0] - pooled[2, 0]).max() > 1e-3
    assert np.abs(pooled[1, 0] - pooled[1, 2**16]).max() > 1e-3
    np.testing.assert_array_equal(
        encoder(inputs_BL)["pooled"], encoder(inputs_BL, training=False)["pooled"]
    )


def test_dropout_without_a_seed_differs_per_call(config, inputs_BL):
    encoder = make_encoder(config, small.random_weights(config))
    first, second = (encoder(inputs_BL, training=True)["pooled"].numpy() for _ in range(2))
    assert np.abs(first - second).max() > 1e-3


def test_bfloat16_is_close_to_float32_and_has_float32_variables(config, inputs_BL):
    weights = small.random_weights(config)
    exact = make_encoder(config, weights)(inputs_BL)["pooled"].numpy()
    encoder = make_encoder(config, weights, dtype="mixed_bfloat16")
    outputs = encoder(inputs_BL, output_hidden_states=True)
    assert outputs["pooled"].dtype == tf.bfloat16
    assert {variable.dtype for variable in encoder.trainable_variables} == {"float32"}
    assert {probs.dtype for probs in outputs["attentions"]} == {tf.float32}
    np.testing.assert_allclose(tf.cast(outputs["pooled"], tf.float32), exact, atol=0.05)


def test_under_bfloat16_statistics_and_softmax_are_float32(config, inputs_BL):
    """Use rows of mean 100, whose variance would be far off if computed in bfloat16 (8 bits)."""
    from bert_tf.model.layers import LayerNorm

    rows = tf.cast(100 + np.random.default_rng(0).normal(size=(4, 64)) * 3, tf.bfloat16)
    norm = LayerNorm(1e-12, dtype="mixed_bfloat16")
    expected = reference.layer_norm(tf.cast(rows, tf.float64).numpy(), 1.0, 0.0, 1e-12)
    # What remains is rounding of the result: half a unit in the last of its 8 bits.
    np.testing.assert_allclose(tf.cast(norm(rows), tf.float64), expected, rtol=2**-8, atol=1e-6)
    encoder = make_encoder(config, small.random_weights(config), dtype="mixed_bfloat16")
    for probs in encoder(inputs_BL, output_hidden_states=True)["attentions"]:
        np.testing.assert_allclose(tf.reduce_sum(probs, axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 40, 1100])
@pytest.mark.parametrize("seed", [None, [1, 2]])
@pytest.mark.parametrize("epsilon", [1e-12, 0.05])
def test_layer_norm_equals_numpy_in_a_graph(epsilon, seed, num_rows):
    """Check the epsilon of the fused kernel that TensorFlow substitutes for many rows."""
    from bert_tf.model.layers import FEW_NUMBERS, LayerNorm

    assert 40 * 64 < FEW_NUMBERS < 1100 * 64  # Both formulas of LayerNorm are checked.

    rng = np.random.default_rng(0)
    rows, gamma, beta = rng.normal(3, 0.1, (num_rows, 64)), rng.normal(size=64), rng.normal(size=64)
    norm = LayerNorm(epsilon)
    norm.build((None, 64))
    norm.gamma.assign(gamma)
    norm.beta.assign(beta)
    actual = tf.function(lambda x: norm(x, seed=seed))(tf.constant(rows, tf.float32))
    reference.assert_equal(actual, reference.layer_norm(rows, gamma, beta, epsilon), 1)


def test_no_two_calls_share_dropout_noise(config):
    """Check seeds that count up per call under `fit`, and dropout ids that do within a call."""
    encoder = Encoder(config)
    seeds = [encoder.dropout_seed(True).numpy() for _ in range(3)]
    keys = {(seed[0], seed[1] + position) for seed in seeds for position in (*range(8), 2**15)}
    assert len(keys) == 3 * 9
    assert encoder.dropout_seed(False) is None


def test_products_read_recomputed_norms_in_the_backward_pass(config, inputs_BL, monkeypatch):
    """Count them: the feed-forward network of each layer, and Q, K, V of all but the first."""
    recomputed, norm_again = [], fused_kernels.norm_again
    monkeypatch.setattr(
        fused_kernels, "norm_again", lambda *args: recomputed.append(1) or norm_again(*args)
    )
    encoder = Encoder(config)
    encoder.build()
    with tf.GradientTape() as tape:
        pooled = encoder(inputs_BL, training=True)["pooled"]
    assert not recomputed
    tape.gradient(pooled, encoder.trainable_variables[0].value)
    assert len(recomputed) == 2 * config.num_hidden_layers - 1 > 1


def test_encoders_of_any_name_have_the_same_variable_names(config):
    encoder = Encoder(config, name="enc")
    encoder.build()
    assert set(name_map.weight_shapes(config)) < set(model_variables(encoder))


def test_weights_start_truncated_normal_and_independent():
    config = BertConfig(
        vocab_size=500,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=96,
    )
    encoder = Encoder(config)
    encoder.build()
    for name, variable in model_variables(encoder).items():
        if name.endswith(("kernel", "embeddings")):
            values = variable.numpy()
            assert np.abs(values).max() <= 0.04, name
            # The deviation of 0.02, truncated at two deviations, becomes 0.0176. Five standard
            # errors, since the initial weights are random.
            assert abs(values.std() - 0.0176) < 5 * 0.0176 / (2 * values.size) ** 0.5, name
        elif name in name_map.weight_shapes(config):
            np.testing.assert_array_equal(variable, 1.0 if name.endswith("gamma") else 0.0)
    attention = encoder.transformer[0].attention
    assert np.abs(attention.query.kernel.numpy() - attention.key.kernel.numpy()).max() > 0.01


def test_saves_and_loads_in_a_keras_model(config, inputs_BL, tmp_path):
    encoder = make_encoder(config, small.random_weights(config))
    symbols = {name: keras.Input((None,), dtype="int32", name=name) for name in inputs_BL}
    model = keras.Model(symbols, encoder(symbols)["pooled"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs_BL), model(inputs_BL))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_token_ids_that_are_floats_are_not_rounded_in_mixed_precision(config, dtype):
    config = dataclasses.replace(config, vocab_size=3000)
    encoder = make_encoder(config, small.random_weights(config), dtype="mixed_bfloat16")
    ids = np.array([[2054, 2003]], np.int32)
    symbol = keras.Input((2,), dtype=dtype)
    model = keras.Model(symbol, encoder(symbol)["pooled"])
    expected = encoder(ids)["pooled"]
    for found in (encoder(ids.astype(dtype))["pooled"], model(ids.astype(dtype))):
        np.testing.assert_array_equal(found, expected)


def test_more_tokens_than_positions_are_rejected(config):
    inputs = {
        name: np.ones((1, 17), np.int32) for name in ("input_ids", "input_mask", "segment_ids")
    }
    with pytest.raises(
        ValueError, match="17 tokens, 16 positions: a sequence is longer than max_pos"
    ):
        Encoder(config)(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "model_size"), [(12, "base"), (24, "large")])
def test_deep_encoders_equal_numpy(num_layers, model_size):
    from bert_tf import MODEL_SIZES

    config = dataclasses.replace(MODEL_SIZES[model_size], vocab_size=100)
    weights = small.random_weights(config, scale=0.02)
    ids, segments = np.array([2, 17, 30, 4, 99, 3]), np.array([0, 0, 0, 0, 1, 1])
    outputs = make_encoder(config, weights)(
        {"input_ids": ids[None], "input_mask": np.ones((1, 6), int), "segment_ids": segments[None]}
    )
    expected = reference.encode(ids, segments, weights, config)
    reference.assert_equal(outputs["sequence"][0], expected["hidden_states"][-1], num_layers)
    reference.assert_equal(outputs["pooled"][0], expected["pooled"], num_layers)
