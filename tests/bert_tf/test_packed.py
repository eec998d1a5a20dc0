"""The packed layout: where sequences go, equal outputs and gradients, and no neighbours."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from bert_tf import AdamW
from bert_tf.data.batches import flatten_examples, pack_examples
from bert_tf.model import fused_kernels
from bert_tf.model.layout import by_sequence, count_tokens, to_dense_like
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.text.encoder_inputs import (
    Packed,
    PackedShape,
    assign_rows,
    to_flat,
    to_packed,
    to_padded,
)
from bert_tf.train import compilation
from bert_tf.train import step as step_module
from bert_tf.train.distribution import distribute, make_strategy, resolve_precision
from bert_tf.train.step import TrainStep
from tests import reference, small
from tests.bert_tf.test_encoder import make_encoder

LENGTHS = [5, 16, 3, 9, 1, 2]
SHAPE = PackedShape(16, (1, 2, 6))
STILL = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_hidden_layers": 1,
}
SEED = tf.constant([1, 2], tf.int64)


def random_texts(lengths, config, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, config.vocab_size, sum(lengths)).astype(np.int32)
    segments = rng.integers(0, 2, sum(lengths)).astype(np.int32)
    return Packed(*(tf.RaggedTensor.from_row_lengths(part, lengths) for part in (ids, segments)))


def test_rows_are_filled_with_the_longest_sequences_first():
    row_B, offset_B = assign_rows(np.array([3, 6, 2, 5, 4]), 8)
    assert row_B.tolist() == [1, 0, 0, 1, 2] and offset_B.tolist() == [5, 0, 6, 0, 0]


@pytest.mark.parametrize(
    ("max_seq_length", "length"), [(16, 64), (64, 64), (65, 128), (400, 512), (600, 640)]
)
def test_a_row_has_one_of_few_lengths(max_seq_length, length):
    assert PackedShape(max_seq_length, (1,)).length == length


def test_a_run_has_at_most_four_numbers_of_rows_and_the_last_one_always_suffices():
    shape = PackedShape.of_lengths(np.array([10, 20, 60]), 32, 64)
    assert len(shape.row_counts) <= 3 and shape.row_counts[-1] == 32
    assert shape.row_counts == PackedShape.of_lengths(np.array([10, 20, 60]), 32, 64).row_counts
    short = PackedShape.of_lengths(np.full(100, 8), 80, 64, splits=[0, *range(3, 101)])
    assert short.row_counts == (11, 51, 240)
    assert [PackedShape(8, (2, 5)).rows_for(needed) for needed in (1, 2, 3, 5)] == [2, 2, 5, 5]


def test_a_sequence_that_no_row_holds_is_an_error(config, vocabulary):
    with pytest.raises(ValueError, match="a sequence has 70 tokens; expected at most 64"):
        to_packed(random_texts([70], config), vocabulary, SHAPE)


def test_a_single_number_of_rows_is_known_before_the_first_batch(config):
    """TPUs require it."""
    on_tpu = tf.distribute.TPUStrategy.__new__(tf.distribute.TPUStrategy)
    shape = compilation.packed_shape(np.array([5, 9]), 12, 16, on_tpu)
    data = tf.data.Dataset.from_tensor_slices(pretraining_examples(config, 24))
    data = data.batch(12, drop_remainder=True).map(lambda of: pack_examples(of, shape))
    assert all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(data.element_spec))


def test_packed_rows_by_hand(vocabulary):
    ids, segments = [[7, 8, 9], [5, 6]], [[0, 0, 1], [0, 1]]
    texts = Packed(*(tf.ragged.constant(part, dtype=tf.int32) for part in (ids, segments)))
    packed = to_packed(texts, vocabulary, PackedShape(4, (1,)), num_sequences=3)
    first = {name: values[0, :6].numpy().tolist() for name, values in packed.items()}
    assert packed["input_ids"].shape == (1, 64)
    assert first["input_ids"] == [7, 8, 9, 5, 6, 0]
    assert first["segment_ids"] == [0, 0, 1, 0, 1, 0]
    assert first["position_ids"] == [0, 1, 2, 0, 1, 0]
    assert first["sequence_ids"] == [1, 1, 1, 2, 2, 0]
    assert packed["token_indices"].numpy().tolist() == [
        [0, 1, 2, -1],
        [3, 4, -1, -1],
        [-1, -1, -1, -1],
    ]
    assert int(count_tokens(packed)) == 5
    assert int(count_tokens({"input_ids": packed["input_ids"]})) == 64  # All, without a mask.
    assert int(count_tokens({"row_splits": tf.ragged.constant([[0, 3, 5], [0, 3]])})) == 8
    labels = to_dense_like(tf.ragged.constant([[1, 2, 3], [4, 5], []]), packed)
    assert labels.numpy().tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [0, 0, 0, 0]]


def outputs_and_gradients(encoder, inputs, seed, pooled_only):
    """Return outputs by sequence, and the gradient of a sum that weights them differently."""
    weights = tf.range(1.0, len(LENGTHS) + 1)[:, tf.newaxis]
    with tf.GradientTape() as tape:
        outputs = encoder(inputs, training=seed is not None, seed=seed, pooled_only=pooled_only)
        loss = tf.reduce_sum(outputs["pooled"] * weights)
        found = [outputs["pooled"]]
        if not pooled_only:
            values, is_token = by_sequence(outputs["sequence"], inputs)
            values = tf.where(is_token[..., tf.newaxis], values, 0.0)[:, : max(LENGTHS)]
            loss += tf.reduce_sum(tf.square(values) * weights[:, tf.newaxis])
            found.append(values)
    variables = encoder.trainable_variables
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    gradients = [None if of is None else tf.convert_to_tensor(of) for of in gradients]
    return [of.numpy() for of in found], [of.numpy() for of in gradients if of is not None]


@pytest.mark.parametrize("pooled_only", [False, True])
@pytest.mark.parametrize("seed", [None, SEED], ids=["inference", "training"])
def test_packed_equals_flat_and_padded(config, vocabulary, seed, pooled_only):
    config = dataclasses.replace(config, **STILL)
    encoder = make_encoder(config, small.random_weights(config))
    texts = random_texts(LENGTHS, config)
    expected, of_weights = outputs_and_gradients(
        encoder, to_flat(texts, vocabulary), seed, pooled_only
    )
    for inputs in (to_padded(texts, vocabulary), to_packed(texts, vocabulary, SHAPE)):
        actual, gradients = outputs_and_gradients(encoder, inputs, seed, pooled_only)
        for mine, theirs in zip([*actual, *gradients], [*expected, *of_weights], strict=True):
            reference.assert_equal(mine, theirs, 2)


def test_a_sequence_never_sees_its_neighbours(config, vocabulary):
    """Change one sequence; the outputs of all others stay equal bit for bit."""
    encoder = make_encoder(config, small.random_weights(config))
    texts = random_texts(LENGTHS, config)
    other = random_texts(LENGTHS, config, seed=5)
    splits = np.cumsum([0, *LENGTHS])
    changed = [
        np.where(np.arange(splits[-1]) < splits[1], theirs.flat_values, mine.flat_values)
        for mine, theirs in zip(texts[:2], other[:2], strict=True)
    ]
    changed = Packed(*(tf.RaggedTensor.from_row_lengths(part, LENGTHS) for part in changed))
    results = []
    for of in (texts, changed):
        inputs = to_packed(of, vocabulary, SHAPE)
        assert inputs["input_ids"].shape == (1, 64)  # All share one row.
        outputs = encoder(inputs)
        results.append((outputs["pooled"], by_sequence(outputs["sequence"], inputs)[0]))
    for mine, theirs in zip(*results, strict=True):
        assert not np.array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1:], theirs[1:])


def pretraining_examples(config, count):
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 17, count)
    mask = (np.arange(16) < lengths[:, np.newaxis]).astype(np.int32)

    def ids(low, high, *shape):
        return rng.integers(low, high, shape).astype(np.int32)

    return {
        "input_ids": ids(1, config.vocab_size, count, 16) * mask,
        "input_mask": mask,
        "segment_ids": ids(0, 2, count, 16) * mask,
        "masked_lm_positions": ids(0, 3, count, 4),
        "masked_lm_ids": ids(0, config.vocab_size, count, 4),
        "masked_lm_weights": ids(0, 2, count, 4).astype(np.float32),
        "next_sentence_labels": ids(0, 2, count, 1),
    }


class Training:
    """Training in steps of 12 examples."""

    def __init__(self, config, strategy, is_compiled, parts=1, optimizer=None, **options):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = PretrainingModel(config, **options)
            self.optimizer = optimizer or AdamW(1e-3)
            self.optimizer.build(self.model.trainable_variables)
        self.step = TrainStep(
            *(self.model, LOSSES, self.optimizer, strategy, 1, METRICS, parts),
            is_compiled=is_compiled,
        )
        self.strategy, self.parts, self.is_compiled = strategy, parts, is_compiled

    def take(self, examples, steps):
        """Return the logs of the steps."""
        parts, size = self.parts, 12 // self.strategy.num_replicas_in_sync
        data = tf.data.Dataset.from_tensor_slices(examples)
        if self.is_compiled:
            shape = PackedShape(16, (2, 3, 12))
            data = data.batch(size).map(lambda of: pack_examples(of, shape, parts)).map(to_batch)
        else:
            data = data.batch(size // parts).map(flatten_examples).map(to_batch)
            data = data.ragged_batch(parts) if parts > 1 else data
        iterator = iter(distribute(lambda local: data, self.strategy))
        norm = tf.constant(0.0)
        for _ in range(steps):
            logs = self.step(iterator, gradient_norm=norm)
            norm = logs["gradient_norm"]
            yield {name: float(value) for name, value in logs.items()}

    def results(self, config, steps=2):
        """Train on 24 examples; return logs and moments."""
        logs = list(self.take(pretraining_examples(config, 24), steps))
        return logs, [moment.numpy() for moment in self.optimizer._adam_m]


def train(config, *arguments, **options):
    return Training(config, *arguments, **options).results(config)


def assert_equal_training(config, mine, theirs):
    for actual, expected in zip(mine[0], theirs[0], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for actual, expected in zip(mine[1], theirs[1], strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.fixture(scope="module")
def flat_training(config):
    return train(dataclasses.replace(config, **STILL), make_strategy("none"), False)


@pytest.fixture(scope="module")
def compiled_training(config):
    """Return a compiled `Training` on one device and its results; XLA takes seconds for it."""
    config = dataclasses.replace(config, **STILL)
    training = Training(config, make_strategy("none"), True)
    return training, training.results(config)


CASES = {
    "accumulation": {"parts": 2},
    "recomputation": {"recompute": True},
    "replicas": {"is_mirrored": True},
    "replicas, accumulation, recomputation": {
        "is_mirrored": True,
        "parts": 3,
        "recompute": True,
    },
}


@pytest.mark.medium
def test_the_compiled_step_on_packed_rows_equals_the_flat_one(
    config, flat_training, compiled_training
):
    assert_equal_training(config, compiled_training[1], flat_training)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_variants_of_the_compiled_step_equal_the_flat_one(config, flat_training, mirrored, case):
    options = dict(CASES[case])
    strategy = mirrored if options.pop("is_mirrored", False) else make_strategy("none")
    config = dataclasses.replace(config, **STILL)
    assert_equal_training(config, train(config, strategy, True, **options), flat_training)


def compiled_calls(graph):
    """Return the operations of a graph and of its functions that XLA does not compile, and calls.

    Functions that XLA compiles are counted, not entered.
    """
    operations, calls = [], 0
    for operation in graph.get_operations():
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            name = operation.get_attr("f").name
            function = graph._get_function(name)
            if function.function_type and "_XlaMustCompile" in function.cached_definition.attr:
                is_compiled = function.cached_definition.attr["_XlaMustCompile"].b
            else:
                is_compiled = False
            if is_compiled:
                calls += 1
                continue
            inner, more = compiled_calls(function.graph)
            operations, calls = operations + inner, calls + more
        operations.append(operation)
    return operations, calls


@pytest.mark.medium
def test_a_compiled_step_is_one_program_that_the_host_does_not_wait_for(config):
    keras.utils.set_random_seed(1)
    model, optimizer = PretrainingModel(config), AdamW(1e-3)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, LOSSES, optimizer, make_strategy("none"), 1, is_compiled=True)
    data = tf.data.Dataset.from_tensors(pretraining_examples(config, 12))
    shape = PackedShape(16, (12,))
    data = data.map(lambda of: pack_examples(of, shape)).map(to_batch)
    traced = step.__call__.get_concrete_function(iter(data), tf.constant(False))
    operations, calls = compiled_calls(traced.graph)
    types = [operation.type for operation in operations]
    executed = [of for of in types if of not in ("Placeholder", "Const", "NoOp", "Identity")]
    assert calls == 1 and len(executed) <= 100, executed
    assert not set(types) & {"If", "StatelessIf", "While", "CheckNumerics", "Switch"}
    assert not [of for of in operations if tf.string in [out.dtype for out in of.outputs]]


@pytest.mark.medium
def test_the_loop_over_steps_needs_no_other_device(config, monkeypatch):
    """A loop of two devices waits for both of them in each round; here a CPU is the GPU."""
    monkeypatch.setattr(step_module, "GPU", "/CPU:1")
    monkeypatch.setattr(step_module, "is_accelerated", lambda strategy: True)
    keras.utils.set_random_seed(1)
    with tf.device("/CPU:1"):
        model = PretrainingModel(dataclasses.replace(config, **STILL))
        optimizer = AdamW(1e-3)
        optimizer.build(model.trainable_variables)
        step = TrainStep(model, LOSSES, optimizer, make_strategy("none"), 1, is_compiled=True)
    data = tf.data.Dataset.from_tensors(pretraining_examples(config, 12)).repeat()
    data = data.map(lambda of: pack_examples(of, PackedShape(16, (12,)))).map(to_batch)
    data = data.apply(tf.data.experimental.prefetch_to_device("/CPU:1"))
    eager = context.context()
    eager.enable_run_metadata()
    try:
        logs = step(iter(data), tf.constant(False), tf.constant(2), tf.constant(0.0))
        functions = eager.export_run_metadata().function_graphs
    finally:
        eager.disable_run_metadata()
    assert float(logs["loss"]) > 0 and optimizer.iterations == 2
    devices = {
        node.device
        for function in functions
        for graph in function.partition_graphs
        for node in graph.node
        if node.op in ("Merge", "NextIteration", "LoopCond")
    }
    assert [device[-5:] for device in devices] == ["CPU:1"]


@pytest.mark.medium
def test_a_gradient_that_is_not_finite_stops_a_compiled_training(config, compiled_training):
    """The calls after it change nothing, so that the host may read its result late."""
    training, _ = compiled_training
    before = int(training.optimizer.iterations)
    examples = {name: value[:12] for name, value in pretraining_examples(config, 24).items()}
    bad = {**examples, "masked_lm_weights": examples["masked_lm_weights"] * np.inf}
    data = {name: np.concatenate([value, bad[name], value]) for name, value in examples.items()}
    weights = []
    expected = ((1, True), (1, False), (1, False))
    for logs, (updates, is_finite) in zip(training.take(data, 3), expected, strict=True):
        assert int(training.optimizer.iterations) == before + updates
        assert np.isfinite(logs["gradient_norm"]) == is_finite
        weights.append([weight.numpy() for weight in training.model.trainable_variables])
        assert all(np.isfinite(weight).all() for weight in weights[-1])
    for after in weights[1:]:
        for value, other in zip(weights[0], after, strict=True):
            np.testing.assert_array_equal(value, other)


@pytest.mark.medium
def test_float16_skips_updates_that_overflow_and_halves_the_scale(config, flat_training):
    config = dataclasses.replace(config, **STILL)
    optimizer = AdamW(1e-3, scales_loss=True)
    logs, moments = train(
        config, make_strategy("none"), False, optimizer=optimizer, dtype="mixed_float16"
    )
    expected, expected_moments = flat_training
    scale = float(optimizer.loss_scale)
    skipped = round(np.log2(2.0**15 / scale))
    assert int(optimizer.iterations) == 2 - skipped and int(optimizer.finite_steps) == 2 - skipped
    assert logs[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-2)
    if not skipped:
        for mine, theirs in zip(moments, expected_moments, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-2)
    optimizer.loss_scale.assign(2.0**120)  # Any gradient overflows.
    before = [weight.numpy() for weight in optimizer._trainable_variables]
    assert_skipped(config, optimizer, before)


def assert_skipped(config, optimizer, before):
    variables = optimizer._trainable_variables
    grads = [tf.fill(variable.shape, np.float32(np.inf)) for variable in variables]
    iterations = int(optimizer.iterations)
    assert float(optimizer.apply(grads)) == 0.0  # Skipped, and not an error.
    assert float(optimizer.loss_scale) == 2.0**119 and int(optimizer.iterations) == iterations
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    optimizer.loss_scale.assign(1.0)
    assert np.isinf(float(optimizer.apply(grads)))  # No smaller scale helps.
    optimizer.loss_scale.assign(4.0)
    optimizer.finite_steps.assign(1999)
    optimizer.apply([tf.zeros(variable.shape) for variable in variables])
    assert float(optimizer.loss_scale) == 8.0 and int(optimizer.finite_steps) == 0


def test_auto_selects_precision_and_compilation_by_device(monkeypatch, mirrored):
    strategy = make_strategy("none")
    monkeypatch.setattr(fused_kernels, "_is_enabled", True)  # Restored after the test.
    assert resolve_precision("auto", strategy) == "float32"
    assert resolve_precision("tf32", strategy) == "tf32"
    assert resolve_precision("auto", mirrored) == "float32"
    assert not compilation.resolve("auto", strategy)
    assert compilation.resolve("step", strategy)
    on_tpu = tf.distribute.TPUStrategy.__new__(tf.distribute.TPUStrategy)
    assert compilation.resolve("auto", on_tpu)
    assert resolve_precision("auto", on_tpu) == "bfloat16"
    new, old = {"compute_capability": (9, 0)}, {"compute_capability": (7, 5)}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: gpu)
    for gpus, precision in (([old], "float16"), ([new], "bfloat16"), ([new, old], "bfloat16")):
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind, gpus=gpus: gpus)
        assert resolve_precision("auto", strategy) == precision
    for number, precision in enumerate(("bfloat16", "float16")):
        named = tf.distribute.OneDeviceStrategy(f"GPU:{number}")
        assert resolve_precision("auto", named) == precision
    assert compilation.resolve("auto", strategy)
    assert not compilation.resolve("kernels", strategy)
    assert fused_kernels.are_compiled()
    assert not compilation.resolve("none", strategy)
    assert not fused_kernels.are_compiled()
