"""Estimates of bert_tf.plan against counts by hand, measured peaks and published throughputs."""

import dataclasses
import os

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import plan
from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.data import tf_examples
from bert_tf.errors import UserError
from bert_tf.planning import devices
from bert_tf.planning.devices import (
    DEVICES,
    INT8_SPEEDUP,
    measure_processor,
    processor,
)
from bert_tf.planning.estimates import (
    IMPORTS_BYTES,
    Finetuning,
    Training,
    estimate,
    estimate_finetuning,
    estimate_serving,
    example_bytes,
    example_seconds,
    flops_per_token,
)
from bert_tf.planning.memory import (
    StepSizes,
    count_parameters,
    largest_batch,
    process_memory,
    step_memory,
)
from bert_tf.planning.report import finetuning_lines, training_lines
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.system import command
from bert_tf.weights.pretrained_encoder import Encoder

TINY = BertConfig(
    vocab_size=50,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=12,
)
LARGE = MODEL_SIZES["large"]
# Sequences per second of BERT-large on one device: device, precision, length, published.
PUBLISHED = (
    ("a100", "bfloat16", 128, 485.59),  # float16 there, at the same peak rate.
    ("a100", "bfloat16", 512, 96.52),
    ("a100", "tf32", 128, 282.98),
    ("a100", "tf32", 512, 54.92),
    ("v100", "float32", 128, 841.72 / 16),
    ("v100", "float32", 512, 180 / 16),
)


# Of MLPerf Training v2.1, closed division, BERT, by NVIDIA: samples per second of one of 8 devices,
# from train_samples and the times of run_start and run_stop in result_0.txt. A sample has at most
# 512 tokens, about half of which are padding, which these submissions do not compute.
MLPERF_TOKENS = 256
MLPERF = (
    ("a100", "dgxa100_ngc22.09_pytorch", 2_250_304 / 925.828 / 8),
    ("h100", "dgxh100_preview", 2_548_054 / 377.392 / 8),
)

# Peak memory in MB of a process that repeats a pretraining step, on an AMD EPYC with AVX2: layers,
# hidden size, examples, tokens, precision, gradient checkpointing.
MEASURED = {
    (2, 128, 8, 128, "float32", False): 887,
    (6, 256, 8, 128, "float32", False): 1121,
    (6, 256, 32, 128, "float32", False): 1436,
    (6, 256, 8, 512, "float32", False): 1538,
    (6, 384, 8, 128, "float32", False): 1295,
    (6, 512, 16, 128, "float32", False): 1661,
    (6, 512, 16, 128, "float32", True): 1546,
    (12, 768, 8, 128, "float32", False): 2915,
    (12, 768, 8, 512, "float32", False): 4433,
    (12, 768, 8, 512, "float32", True): 3637,
    (24, 1024, 2, 128, "float32", False): 6818,
}

# Peak memory in GB of a compiled step in bfloat16 on an NVIDIA H200 (benchmarks/gpu.py): model,
# examples, tokens, masked positions (none in fine-tuning), attention dropout.
MEASURED_ON_GPU = {
    ("base", 256, 128, 20, 0.1): 13.89,
    ("base", 256, 128, 20, 0.0): 12.08,
    ("base", 64, 512, 80, 0.1): 19.57,
    ("base", 64, 512, 80, 0.0): 12.08,
    ("large", 128, 128, 20, 0.1): 20.50,
    ("large", 128, 128, 20, 0.0): 18.10,
    ("large", 32, 512, 80, 0.0): 18.10,
    ("base", 32, 128, 0, 0.1): 2.932,
    ("base", 32, 128, 0, 0.0): 2.888,
}


def sizes_of(layers, hidden, examples, length, precision, recompute):
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    return StepSizes(config, examples, length, -(-15 * length // 100), precision, recompute)


def test_parameters_are_those_of_the_models():
    encoder = Encoder(TINY)
    encoder.build()
    assert count_parameters(TINY) == PretrainingModel(TINY).count_params()
    trained = sum(int(np.prod(weight.shape)) for weight in encoder.trainable_variables)
    assert count_parameters(TINY, has_pretraining_heads=False) == trained


def test_memory_of_a_small_step_by_hand():
    memory = step_memory(StepSizes(TINY, examples=2, length=4, predictions=1))
    layer = (5 * 8 + 16) * 8 * 4
    assert memory["activations"] == 3 * layer + 8 * 8 * 12
    assert memory["logits over the vocabulary"] == 2 * 2 * 50 * 4
    assert memory["weights"] == 4 * count_parameters(TINY) == memory["AdamW moments"] // 2
    assert memory["bfloat16 copies of kernels"] == 0
    assert memory["gradients"] == memory["weights"]
    temporary = memory["temporary tensors of a layer"]
    begin_of_backward = memory["activations"] + 800 + temporary
    first_layer = memory["gradients"] - 50 * 8 * 4 + layer + temporary + 400
    largest = max(begin_of_backward, first_layer, memory["gradients"] + 400)
    assert memory["peak"] == 3 * memory["weights"] + largest


def test_parts_of_a_batch_keep_the_sum_of_their_gradients():
    alone, part = (step_memory(StepSizes(TINY, 2, 4, 1, accumulates=of)) for of in (False, True))
    assert part["accumulated gradients"] == 4 * count_parameters(TINY)
    assert part["peak"] - alone["peak"] == 4 * count_parameters(TINY)


def test_recomputed_layers_keep_their_inputs_only():
    stored, recomputed = (
        step_memory(StepSizes(TINY, 2, 4, 1, "float32", recompute))["activations"]
        for recompute in (False, True)
    )
    layer = (stored - 8 * 8 * 12) // 3
    assert recomputed == 3 * 8 * 8 * 4 + layer + 8 * 8 * 12


@pytest.mark.parametrize("point", MEASURED, ids=str)
def test_memory_is_near_the_measured_peak(point):
    sizes = sizes_of(*point)
    estimated = (step_memory(sizes)["peak"] + process_memory(sizes.config)) / 1e6
    assert estimated == pytest.approx(MEASURED[point], rel=0.1)


@pytest.mark.parametrize("point", MEASURED_ON_GPU, ids=str)
def test_memory_is_near_the_measured_peak_of_a_gpu(point):
    size, examples, length, predictions, attention_dropout = point
    layers, hidden = {"base": (12, 768), "large": (24, 1024)}[size]
    sizes = sizes_of(layers, hidden, examples, length, "bfloat16", False)
    config = dataclasses.replace(sizes.config, attention_probs_dropout_prob=attention_dropout)
    sizes = dataclasses.replace(sizes, config=config, predictions=predictions, is_compiled=True)
    assert step_memory(sizes)["peak"] / 1e9 == pytest.approx(MEASURED_ON_GPU[point], rel=0.1)


def test_a_compiled_step_keeps_more_of_a_layer():
    def activations(dropout, precision="bfloat16", **step):
        config = dataclasses.replace(TINY, attention_probs_dropout_prob=dropout)
        return step_memory(StepSizes(config, 2, 4, 1, precision, **step))["activations"]

    without = activations(0.0)
    scores = 2 * 4 * 4 * TINY.num_attention_heads
    more = 3 * 2 * 4 * (2 * TINY.hidden_size + TINY.intermediate_size) * 2
    assert activations(0.1) == without
    assert activations(0.0, is_compiled=True) == without + more
    assert activations(0.1, is_compiled=True) == without + more + 3 * 3 * scores
    float32 = activations(0.1, "float32", is_compiled=True) - activations(0.1, "float32")
    assert float32 == 2 * more + 3 * 5 * scores


@pytest.mark.parametrize(("device", "precision", "length", "published"), PUBLISHED)
def test_rates_are_near_the_published_ones(device, precision, length, published):
    sizes = StepSizes(LARGE, 8, length, 20 if length == 128 else 80, precision)
    # On H100 these submissions have fused attention and products in FP8, which TensorFlow lacks.
    assert 1 / example_seconds(sizes, DEVICES[device]) == pytest.approx(published, rel=0.3)


@pytest.mark.parametrize(("device", "submission", "published"), MLPERF)
def test_rates_are_near_those_of_mlperf(device, submission, published):
    sizes = StepSizes(LARGE, 8, MLPERF_TOKENS, -(-15 * MLPERF_TOKENS // 100), "bfloat16")
    # On H100 these submissions have fused attention and products in FP8, which TensorFlow lacks.
    assert 1 / example_seconds(sizes, DEVICES[device]) == pytest.approx(published, rel=0.3)


def test_largest_batch_fits_and_one_more_does_not():
    sizes = sizes_of(6, 256, 1, 128, "float32", False)
    number = largest_batch(sizes, 1e9)
    peaks = [
        step_memory(dataclasses.replace(sizes, examples=number + more))["peak"] for more in (0, 1)
    ]
    assert peaks[0] <= 1e9 < peaks[1]
    assert largest_batch(sizes, 1e6) == 0


def elementwise(activations, scores, logits=0, per_score=8):
    """Return the seconds between the products of a forward pass, at 1 TB/s."""
    return 4 * (2 * activations + per_score * scores + 10 * logits) / 1e12


def test_estimate_by_hand():
    """2 devices of 1 TFLOP/s and 1 TB/s, 64 examples of 128 tokens per step."""
    device = dataclasses.replace(processor(64e9, {"float32": 1e12}, 1e12), link=1e9)
    sizes = sizes_of(2, 128, 8, 128, "float32", False)
    training = Training(sizes, global_batch_size=64, tokens=128e4, devices=2, device=device)
    result = estimate(training)
    parameters = count_parameters(sizes.config)
    assert result.num_steps == 157  # 10,000 examples / 64, rounded up.
    assert result.accumulation_steps == 4
    assert result.all_reduce_bytes == 4 * parameters
    assert result.checkpoint_bytes == 12 * parameters
    products = 32 * 128 * flops_per_token(sizes.config, 128, 20) / 1e12
    activations, scores, logits = 2 * 128 * (8 * 128 + 2 * 512), 2 * 128**2 * 2, 20 * 30_522
    between = 32 * 3 * elementwise(activations, scores, logits)
    fixed = 5e-3 + 2 * 0.6e-3
    expected = products + between + fixed + 40 * parameters / 1e12 + 4 * parameters / 1e9
    assert result.step_seconds == pytest.approx(expected)
    lines = "\n".join(training_lines(training, result))
    assert "157 of 64 examples" in lines and "fits into 64 GB" in lines
    assert "of which a run keeps two, and the best one with --eval_shards" in lines


def test_flops_by_hand():
    weights, attention, head = 3 * (4 * 64 + 2 * 8 * 16), 3 * 2 * 4 * 8, (64 + 8 * 50) / 4
    assert flops_per_token(TINY, length=4, predictions=1) == 6 * (weights + attention + head)


def test_a_frozen_layer_has_no_gradient_and_no_slots():
    def memory(frozen_layers):
        sizes = StepSizes(TINY, 2, 4, 0, frozen_layers=frozen_layers)
        return sizes.trained_parameters, step_memory(sizes)

    layer = 4 * (64 + 8) + 2 * 8 * 16 + 8 + 16 + 4 * 8
    pooler = 64 + 8
    trained, two_frozen = memory(2)
    assert trained == layer + pooler
    assert two_frozen["AdamW moments"] == 2 * 4 * trained
    assert two_frozen["gradients"] == 4 * trained
    assert memory(1)[0] - trained == layer
    assert memory(None)[1]["weights"] == two_frozen["weights"]


DEVICE = processor(64e9, {"float32": 1e12}, 1e12)


def finetuning(**changes):
    values = {
        "config": TINY,
        "samples": [[4], [6], [8], [10]],
        "dev_samples": [],
        "epochs": 3,
        "global_batch_size": 4,
        "devices": 1,
        "device": DEVICE,
    }
    return Finetuning(**{**values, **changes})


def test_finetuning_by_hand():
    """28 tokens in one step per epoch; attention pads to 16, and the flat layout to 32 tokens."""
    result = estimate_finetuning(finetuning())
    forward = 2 * 3 * (32 * (4 * 64 + 2 * 8 * 16) + 4 * 2 * 16**2 * 8) / 1e12
    forward += elementwise(3 * 32 * (8 * 8 + 2 * 16), 3 * 4 * 16**2 * 2)
    parameters = count_parameters(TINY, has_pretraining_heads=False)
    fixed = 40 * parameters / 1e12 + 5e-3 + 3 * 0.6e-3
    step = 1.25 * 3 * forward + fixed
    assert result.step_seconds == pytest.approx(step)
    assert result.num_steps == 3 and result.tokens_per_step == 28 and result.most_tokens == 32
    assert result.seconds == pytest.approx(3 * step)
    assert result.memory["AdamW moments"] == 8 * parameters
    tensors = result.memory["activations"] + result.memory["temporary tensors of a layer"]
    assert result.memory["heap of batches of other shapes"] == tensors
    assert result.memory["TensorFlow Text and scikit-learn"] == IMPORTS_BYTES
    accelerator = dataclasses.replace(DEVICE, is_accelerator=True)
    on_accelerator = estimate_finetuning(finetuning(device=accelerator)).memory
    on_processor = step_memory(StepSizes(TINY, 4, 32 / 4, 0, longest=16))["peak"]
    assert result.memory["peak"] == on_processor + tensors + IMPORTS_BYTES
    sizes = StepSizes(TINY, 4, 32 / 4, 0, longest=16, is_compiled=True)
    assert on_accelerator == step_memory(sizes)
    assert "3 of 4 samples" in "\n".join(finetuning_lines(finetuning(), result))


def test_parts_of_a_batch_take_their_own_memory_and_the_time_of_all():
    whole = estimate_finetuning(finetuning(samples=[[8]] * 8, global_batch_size=8))
    part = estimate_finetuning(finetuning(samples=[[8]] * 8, global_batch_size=2))
    parts = {"samples": [[8]] * 8, "global_batch_size": 8, "accumulation_steps": 4}
    result = estimate_finetuning(finetuning(**parts))
    sums = result.memory["accumulated gradients"]
    assert result.memory["peak"] == part.memory["peak"] + sums < whole.memory["peak"]
    assert result.most_tokens == part.most_tokens
    less = dataclasses.replace(DEVICE, memory=DEVICE.memory - sums)
    part = estimate_finetuning(finetuning(samples=[[8]] * 8, global_batch_size=2, device=less))
    assert result.largest_batch == 4 * part.largest_batch
    assert result.step_seconds == pytest.approx(whole.step_seconds, rel=0.05)
    cached = estimate_finetuning(finetuning(**parts, is_cached=True))
    assert cached.step_seconds > 1.2 * (result.step_seconds - 5e-3)


def test_finetuning_adds_evaluations_runs_and_padding():
    result = estimate_finetuning(finetuning())
    evaluated = estimate_finetuning(finetuning(dev_samples=[[4], [6], [8], [10]]))
    forward = 2 * 3 * (32 * (4 * 64 + 2 * 8 * 16) + 4 * 2 * 16**2 * 8) / 1e12
    forward += elementwise(3 * 32 * (8 * 8 + 2 * 16), 3 * 4 * 16**2 * 2, per_score=2)
    assert evaluated.seconds - result.seconds == pytest.approx(3 * forward)
    assert estimate_finetuning(finetuning(runs=5)).seconds == pytest.approx(5 * result.seconds)
    padded = estimate_finetuning(finetuning(static_length=12))
    assert padded.most_tokens == 48 and padded.tokens_per_step == 28


def test_largest_batch_of_finetuning_fits_and_one_more_does_not():
    device = dataclasses.replace(DEVICE, memory=process_memory(TINY) + IMPORTS_BYTES + 1e7)
    plan = {"device": device, "static_length": 16}
    number = estimate_finetuning(finetuning(**plan)).largest_batch
    assert number > 1
    for more, fits in ((0, True), (1, False)):
        samples, size = [[16]] * (number + more), number + more
        result = estimate_finetuning(finetuning(samples=samples, global_batch_size=size, **plan))
        assert result.fits is fits


def test_a_frozen_encoder_runs_once():
    few, many = (
        estimate_finetuning(finetuning(is_frozen=True, epochs=epochs)) for epochs in (1, 20)
    )
    assert few.seconds == many.seconds > 0
    assert "encoder           runs once" in "\n".join(
        finetuning_lines(finetuning(is_frozen=True), few)
    )


def test_tokens_are_rounded_up_as_in_the_layout():
    from bert_tf.model.bucketing import bucket_of, round_up_to_bucket

    for number in (1, 8, 9, 63, 64, 65, 72, 73, 128, 129, 500, 513, 4097):
        assert bucket_of(number) == int(round_up_to_bucket(number))


def test_serving_by_hand():
    """A request reads the layers once and computes two texts of five tokens."""
    layers = 3 * (4 * (64 + 8) + 2 * 8 * 16 + 8 + 16 + 4 * 8)
    products = 2 * 3 * (2 * 5 * (4 * 64 + 2 * 8 * 16) + 2 * 2 * 5**2 * 8)
    between = elementwise(2 * 3 * 5 * (8 * 8 + 2 * 16), 2 * 3 * 5**2 * 2, per_score=2)
    result = estimate_serving(TINY, length=5, texts=2, device=DEVICE)
    assert result.request_seconds == pytest.approx((4 * layers + products) / 1e12 + between)
    assert result.texts_per_second == pytest.approx(2 / result.request_seconds)
    int8 = estimate_serving(TINY, 5, 2, DEVICE, "int8")
    seconds = (layers + products / INT8_SPEEDUP) / 1e12 + between
    assert int8.request_seconds == pytest.approx(seconds)
    assert int8.memory["weights"] < result.memory["weights"]


@pytest.mark.parametrize(
    ("length", "texts", "precision", "width"),
    [
        (64, 1, "float32", 4),
        (65, 1, "float32", None),
        (5, 2, "float32", None),
        (5, 2, "bfloat16", 2),
        (65, 1, "int8", 1),
    ],
)
def test_packed_weights_are_counted_on_processors(length, texts, precision, width):
    layers = 3 * (4 * (64 + 8) + 2 * 8 * 16 + 8 + 16 + 4 * 8)
    on_processor = processor(64e9, dict.fromkeys(("float32", "bfloat16"), 1e12), 1e12)
    memory = estimate_serving(TINY, length, texts, on_processor, precision).memory
    assert memory.get("packed weights") == (width and width * layers)
    assert memory["peak"] == sum(memory.values()) - memory["peak"] - memory["process"]
    if width:
        on_accelerator = dataclasses.replace(on_processor, is_accelerator=True)
        other = estimate_serving(TINY, length, texts, on_accelerator, precision).memory
        assert "packed weights" not in other


def test_bytes_of_an_example_are_those_of_the_writer():
    draws = np.random.default_rng(0)
    ids = draws.integers(1000, 30_522, (50, 128))
    examples = {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.ones_like(ids),
        "masked_lm_positions": draws.integers(0, 128, (50, 20)),
        "masked_lm_ids": ids[:, :20],
        "masked_lm_weights": np.ones((50, 20), np.float32),
        "next_sentence_labels": np.ones((50, 1), np.int32),
    }
    sizes = [len(record) for record in tf_examples.serialize(examples)]
    assert example_bytes(128, 20) == pytest.approx(np.mean(sizes), rel=0.1)


def test_a_processor_is_measured_on_the_processor(monkeypatch):
    used = []
    monkeypatch.setattr(devices, "ROUNDS", 1)
    monkeypatch.setattr(devices, "SECONDS", 0.0)
    for name in ("matmul", "reduce_sum"):
        of_name = getattr(tf, name)
        monkeypatch.setattr(
            *(tf, name),
            lambda *args, of_name=of_name, **kwargs: used.append(of_name(*args, **kwargs).device),
        )
    with tf.device("CPU:1"):  # In place of a GPU.
        measure_processor(TINY, tokens=8, precision="float32")
    assert len(used) == 8 and all(device.endswith("CPU:0") for device in used)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("8000000\n", None), 8_000_000),
        (("max\n", "9000000\n"), 9_000_000),
        (("max\n", f"{(1 << 63) - 4096}\n"), None),
        ((None, None), None),
    ],
)
def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch, texts, expected):
    paths = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    for path, text in zip(paths, texts, strict=True):
        if text:
            path.write_text(text)
    monkeypatch.setattr(devices, "_LIMITS", paths)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert devices.machine_memory() == (expected or whole)


@pytest.mark.medium
def test_a_processor_is_measured():
    device = measure_processor(TINY, tokens=64, precision="bfloat16")
    assert device.flops["bfloat16"] > 0 and device.bandwidth > 0 and device.memory > 1e9
    served = measure_processor(TINY, tokens=1, precision="int8", training=False)
    assert served.flops["int8"] == INT8_SPEEDUP * served.flops["float32"]


def settings(**values):
    return plan.PlanSettings(**{"model_size": "large", "tokens": 1e9, "device": "a100", **values})


def test_command_chooses_the_largest_batch_that_fits(capsys):
    plan.main(settings(global_batch_size=64, device="t4", max_seq_length=512))
    lines = capsys.readouterr().out
    largest = int(lines.partition("the largest batch that fits: ")[2].split()[0])
    assert 0 < largest < 64
    assert f"memory per device, {largest} examples of 512 tokens" in lines
    assert f"{-(-64 // largest)} per step and device" in lines
    assert "accumulated gradients" in lines and "GB fits into 16 GB" in lines


def test_command_names_what_makes_it_cheaper(capsys):
    plan.main(settings(global_batch_size=256, devices=8))
    lines = capsys.readouterr().out
    assert "--precision=bfloat16: " in lines and "sent per device and step" in lines
    plan.main(settings(replica_batch_size=4096))
    assert "DOES NOT FIT into 80 GB" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["v100", "t4"])
def test_older_gpus_are_planned_in_float16(device, capsys):
    plan.main(settings(device=device))
    cheaper = capsys.readouterr().out.partition("cheaper:")[2]
    assert "--precision=float16: " in cheaper and "bfloat16" not in cheaper
    flags = [f"--device={device}", "--model_size=large", "--tokens=1e9", "--precision=float16"]
    plan.main(command.parse(plan.PlanSettings, ["plan", *flags])[0])
    assert "GFLOP/s in float16" in capsys.readouterr().out


def test_a_network_takes_longer_than_a_link_inside_a_machine(capsys):
    times = []
    for strategy, gbps in (("mirrored", 25.0), ("multi_worker", 25.0), ("multi_worker", 100.0)):
        plan.main(settings(devices=8, strategy=strategy, network_gbps=gbps))
        line = capsys.readouterr().out.partition("seconds per step  ")[2].split()[0]
        times.append(float(line))
    parameters = count_parameters(LARGE)
    sent = 2 * 7 / 8 * 4 * parameters
    assert times[1] - times[0] == pytest.approx(sent / (25e9 / 8) - sent / 300e9, rel=0.02)
    assert times[0] < times[2] < times[1]


def test_serving_is_planned_without_tokens(capsys):
    plan.main(settings(tokens=None, serve=True, device="cpu", model_size="base"))
    lines = capsys.readouterr().out
    assert "typical, --calibrate measures it" in lines
    rows = [line.split() for line in lines.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["1", "16", "64"]
    assert float(rows[0][1].replace(",", "")) < float(rows[1][1].replace(",", ""))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": "x.json"}, "exactly one of them"),
        ({"serve": True}, "--tokens, --serve: expected exactly one"),
        ({"tokens": None}, "--tokens, --serve: expected exactly one"),
        ({"precision": "int8"}, "--precision=int8: expected with --serve"),
        ({"calibrate": True}, "--calibrate: expected with --device=cpu only"),
        ({"devices": 2, "strategy": "none"}, "--devices=2: expected 1"),
        ({"strategy": "tpu"}, "--device=a100: does not fit --strategy=tpu"),
        ({"device": "tpu-v4", "strategy": "none"}, "--device=tpu-v4: does not fit"),
        (
            {"device": "tpu-v4", "devices": 2, "strategy": "multi_worker"},
            "--device=tpu-v4: does not fit --strategy=multi_worker",
        ),
        ({"network_gbps": 0.0}, "--network_gbps=0.0"),
        ({"global_batch_size": 10, "devices": 4}, "multiple of --devices=4"),
        ({"tokens": 0.0}, "--tokens=0.0"),
        ({"tokens": float("inf")}, "--tokens=inf: expected a finite number > 0"),
    ],
)
def test_wrong_flags(values, message):
    with pytest.raises(UserError, match=message):
        settings(**values)


def test_a_length_beyond_the_positions_is_rejected():
    with pytest.raises(UserError, match="expected at most 512"):
        settings(max_seq_length=1024).check()
