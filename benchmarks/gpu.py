"""Check and measure training and serving on a GPU.

    python benchmarks/gpu.py --minutes=8

Each part runs in a process of its own with a time limit, so that a failure costs that part alone:

    device        GPU, versions, precision that "auto" selects, memory growth, rates of a matrix
                  product and of a copy
    equality      losses, gradients and outputs of a small model, compared with the CPU in float32
    pretraining   a step of base and large with 128 and 512 tokens, by compilation and layout
    finetuning    a step of base with 32 texts of up to 128 tokens, by compilation and layout
    serving       export for GPUs with its parity check, and latency for 1, 8 and 64 texts
    determinism   two equal runs of 20 steps, compared bit for bit and timed, without and with what
                  --deterministic sets
    cache         the first step without and with saved programs and timings of kernels
    pytorch       the same pretraining steps with transformers, SDPA and torch.compile

FLOPs are those of matrix products (bert_tf.planning.estimates.flops_per_token); MFU is their rate
over the peak of the GPU for dense bfloat16 products. Prints a JSON object per case; --toy runs all
parts with tiny sizes on any device.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import results
from pretraining_batch import Sizes, examples

HERE = pathlib.Path(__file__).resolve().parent
PEAK_FLOPS = 989e12  # H100 and H200, dense bfloat16 products, without sparsity.
BASE, LARGE = {"layers": 12, "hidden": 768}, {"layers": 24, "hidden": 1024}
TOY = {"layers": 2, "hidden": 128, "vocabulary": 2000}
# Name of a case: sizes of the model, and options of the step.
PRETRAINING = {
    "base 128 packed step": (BASE, {"batch": 256, "length": 128}),
    "base 128 padded step": (BASE, {"batch": 256, "length": 128, "layout": "padded"}),
    "base 128 padded kernels": (
        BASE,
        {"batch": 256, "length": 128, "layout": "padded", "compile": "kernels"},
    ),
    "base 512 packed step": (BASE, {"batch": 64, "length": 512}),
    "large 128 packed step": (LARGE, {"batch": 128, "length": 128}),
    "large 512 packed step": (LARGE, {"batch": 32, "length": 512}),
    "base 128 packed step, mixed lengths": (BASE, {"batch": 512, "length": 128, "mixed": True}),
}
FINETUNING = {
    "base 32 x 128 packed step": (BASE, {"batch": 32, "length": 128}),
    "base 32 x 128 padded step": (BASE, {"batch": 32, "length": 128, "layout": "padded"}),
    "base 32 x 128 flat kernels": (
        BASE,
        {"batch": 32, "length": 128, "layout": "flat", "compile": "kernels"},
    ),
    "base 32 x 128 packed step, mixed lengths": (
        BASE,
        {"batch": 32, "length": 128, "mixed": True},
    ),
}
SERVING = {
    f"{name} {precision}": (model, precision)
    for name, model, precision in (
        ("base", BASE, "float16"),
        ("base", BASE, "bfloat16"),
        ("base", BASE, "float32"),
        ("large", LARGE, "float16"),
    )
}
PYTORCH = {
    "base 128": (BASE, {"batch": 256, "length": 128}),
    "base 512": (BASE, {"batch": 64, "length": 512}),
    "large 128": (LARGE, {"batch": 128, "length": 128}),
    "large 512": (LARGE, {"batch": 32, "length": 512}),
}
# Part: seconds at most, of the default of 8 minutes.
LIMITS = {
    "device": 60,
    "equality": 90,
    "pretraining": 100,
    "finetuning": 90,
    "serving": 90,
    "determinism": 150,  # Two processes, of which each compiles.
    "cache": 200,  # Three of them.
    "pytorch": 90,
}


def sizes_of(model, options, toy):
    """Return the `Sizes` of a case."""
    if toy:
        model, options = TOY, {**options, "batch": 8, "length": min(options["length"], 64)}
    return Sizes(**model, batch=options["batch"], length=options["length"])


def batch_of(sizes, mixed):
    """Return examples as in shards; with `mixed`, of lengths from an eighth to all of L."""
    batch = examples(sizes)
    if mixed:
        rng = np.random.default_rng(1)
        lengths = rng.integers(sizes.length // 8, sizes.length + 1, sizes.batch)
        mask = (np.arange(sizes.length) < lengths[:, np.newaxis]).astype(np.int32)
        for name in ("input_ids", "input_mask", "segment_ids"):
            batch[name] = batch[name] * mask
        positions = batch["masked_lm_positions"]
        batch["masked_lm_weights"] = (positions < lengths[:, np.newaxis]).astype(np.float32)
        batch["masked_lm_positions"] = np.minimum(positions, lengths[:, np.newaxis] - 1)
    return {
        name: values.astype(np.int32) if values.dtype.kind == "i" else values
        for name, values in batch.items()
    }


def measured(step, dataset, seconds, steps_per_execution=10):
    """Run a train step on a repeated dataset; return times, rates and the peak of the memory."""
    import tensorflow as tf

    from bert_tf.train.distribution import distribute

    batches = distribute(lambda local: dataset, step.strategy, step.is_compiled)
    iterator, no_stop = iter(batches), tf.constant(False)
    count, norm = tf.constant(steps_per_execution), tf.constant(0.0)
    start = time.perf_counter()
    logs = step(iterator, no_stop, tf.constant(1), norm)
    loss = float(logs["loss"])
    first = time.perf_counter() - start
    logs = step(iterator, no_stop, count, logs["gradient_norm"])
    float(logs["loss"])
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        before, logs = logs, step(iterator, no_stop, count, logs["gradient_norm"])
        float(before["loss"])  # One call late, as in the training loop.
        calls += 1
    last = float(logs["loss"])
    took = time.perf_counter() - start
    steps = calls * steps_per_execution
    result = {
        "first_step_seconds": round(first, 1),
        "ms_per_step": round(1000 * took / steps, 2),
        "tokens_per_step": int(logs["tokens"]) // steps_per_execution,
        "loss": [loss, last],
    }
    if tf.config.list_physical_devices("GPU"):
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        result["peak_gb"] = round(peak / 1e9, 2)
    return result


def pretraining(name, toy, seconds):
    """Time the pretraining step of a case."""
    import tensorflow as tf
    from pretraining_step_tensorflow import config_of

    from bert_tf.data.batches import flatten_examples, pack_examples, pad_examples
    from bert_tf.planning.estimates import flops_per_token
    from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
    from bert_tf.text.encoder_inputs import PackedShape
    from bert_tf.train import compilation
    from bert_tf.train.distribution import use_precision
    from bert_tf.train.optimizer import AdamW
    from bert_tf.train.step import TrainStep

    model_sizes, options = PRETRAINING[name]
    sizes = sizes_of(model_sizes, options, toy)
    strategy, config = tf.distribute.get_strategy(), config_of(sizes)
    batch = batch_of(sizes, options.get("mixed"))
    lengths = batch["input_mask"].sum(axis=1)
    shape = PackedShape.of_lengths(lengths, sizes.batch, sizes.length)
    layouts = {
        "packed": lambda values: pack_examples(values, shape),
        "padded": pad_examples,
        "flat": flatten_examples,
    }
    layout = layouts[options.get("layout", "packed")]
    is_compiled = compilation.resolve(options.get("compile", "step"), strategy)
    model = PretrainingModel(config, use_precision("bfloat16"))
    optimizer = AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    step = TrainStep(
        model, LOSSES, optimizer, strategy, 0, metrics=METRICS, is_compiled=is_compiled
    )
    dataset = tf.data.Dataset.from_tensors(batch).map(layout).map(to_batch).cache().repeat()
    result = measured(step, dataset.prefetch(2), seconds)
    rate = 1000 / result["ms_per_step"]
    flops = flops_per_token(config, sizes.length, sizes.predictions) * result["tokens_per_step"]
    return {
        **result,
        "sequences_per_second": round(sizes.batch * rate, 1),
        "tokens_per_second": round(result["tokens_per_step"] * rate),
        "tflops": round(flops * rate / 1e12, 1),
        "mfu": round(flops * rate / PEAK_FLOPS, 3),
    }


def finetuning(name, toy, seconds):
    """Time the fine-tuning step of a case: a classifier of 3 labels."""
    import tensorflow as tf
    from pretraining_step_tensorflow import config_of

    from bert_tf.planning.estimates import flops_per_token
    from bert_tf.text.encoder_inputs import PackedShape, padded_to_flat, padded_to_packed
    from bert_tf.train import compilation
    from bert_tf.train.distribution import use_precision
    from bert_tf.train.losses import softmax_cross_entropy
    from bert_tf.train.optimizer import AdamW
    from bert_tf.train.step import TrainStep
    from tasks.graph.heads import SequenceClassifier

    model_sizes, options = FINETUNING[name]
    sizes = sizes_of(model_sizes, options, toy)
    strategy, config = tf.distribute.get_strategy(), config_of(sizes)
    batch = batch_of(sizes, options.get("mixed"))
    inputs = {key: batch[key] for key in ("input_ids", "input_mask", "segment_ids")}
    shape = PackedShape.of_lengths(inputs["input_mask"].sum(axis=1), sizes.batch, sizes.length)
    layouts = {
        "packed": lambda values: padded_to_packed(values, shape),
        "padded": dict,
        "flat": padded_to_flat,
    }
    layout = layouts[options.get("layout", "packed")]
    labels = np.arange(sizes.batch, dtype=np.int32) % 3
    weights = np.ones(sizes.batch, np.float32)
    dataset = (
        tf.data.Dataset.from_tensors(inputs)
        .map(layout)
        .map(lambda values: (values, {"label": labels}, {"label": weights}))
    )
    is_compiled = compilation.resolve(options.get("compile", "step"), strategy)
    model = SequenceClassifier(config, 3, dtype=use_precision("bfloat16"))
    optimizer = AdamW(1e-5)
    optimizer.build(model.trainable_variables)
    step = TrainStep(
        model, {"label": softmax_cross_entropy}, optimizer, strategy, 0, is_compiled=is_compiled
    )
    result = measured(step, dataset.cache().repeat().prefetch(2), seconds)
    rate = 1000 / result["ms_per_step"]
    flops = flops_per_token(config, sizes.length, 0) * result["tokens_per_step"]
    return {
        **result,
        "examples_per_second": round(sizes.batch * rate, 1),
        "tflops": round(flops * rate / 1e12, 1),
        "mfu": round(flops * rate / PEAK_FLOPS, 3),
    }


def device(name, toy, seconds):
    """Describe the device and measure its rates in TensorFlow."""
    import keras
    import tensorflow as tf

    from bert_tf.train.distribution import resolve_precision

    gpus = tf.config.list_physical_devices("GPU")
    size = 256 if toy else 8192
    dtype = tf.bfloat16
    a, b = (tf.cast(tf.random.normal([size, size]), dtype) for _ in range(2))

    def seconds_of(function, *args, count=3 if toy else 20):
        function(*args)
        float(tf.reduce_sum(tf.cast(function(*args)[:1, :1], tf.float32)))
        start = time.perf_counter()
        for _ in range(count):
            result = function(*args)
        float(tf.reduce_sum(tf.cast(result[:1, :1], tf.float32)))
        return (time.perf_counter() - start) / count

    product = tf.function(lambda a, b: tf.matmul(a, b), jit_compile=True)
    copied = tf.function(lambda a: a + 1.0, jit_compile=True)
    big = tf.zeros([64 if toy else 2**14, 2**14], tf.float32)
    copied_bytes = 2 * 4 * big.shape[0] * big.shape[1]
    result = {
        "gpus": [tf.config.experimental.get_device_details(gpu) for gpu in gpus],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cuda": tf.sysconfig.get_build_info().get("cuda_version"),
        "precision": resolve_precision("auto", tf.distribute.get_strategy()),
        "matmul_tflops": round(2 * size**3 / seconds_of(product, a, b) / 1e12, 1),
        "copy_gb_per_second": round(copied_bytes / seconds_of(copied, big) / 1e9),
    }
    if gpus:
        smi = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,driver_version,memory.used,memory.total",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
        )
        result["nvidia_smi"] = smi.stdout.strip()  # Memory growth: little is used.
    return result


def equality(name, toy, seconds):
    """Compare a step in float32 on the GPU, compiled, with one on the CPU."""
    import keras
    import tensorflow as tf
    from pretraining_step_tensorflow import config_of

    from bert_tf.data.batches import flatten_examples, pack_examples
    from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
    from bert_tf.text.encoder_inputs import PackedShape
    from bert_tf.train import compilation
    from bert_tf.train.distribution import use_precision
    from bert_tf.train.optimizer import AdamW
    from bert_tf.train.step import TrainStep

    sizes = Sizes(layers=4, hidden=256, batch=16, length=64, vocabulary=4000)
    if toy:
        sizes = Sizes(**TOY, batch=8, length=64)
    config = dataclasses.replace(
        config_of(sizes), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    batch = batch_of(sizes, True)
    shape = PackedShape.of_lengths(batch["input_mask"].sum(axis=1), sizes.batch, sizes.length)
    strategy, results = tf.distribute.get_strategy(), {}
    cases = {
        "cpu": ("CPU:0", "kernels", flatten_examples),
        "gpu step": ("GPU:0", "step", lambda values: pack_examples(values, shape)),
        "gpu kernels": ("GPU:0", "kernels", flatten_examples),
        "gpu none": ("GPU:0", "none", flatten_examples),
    }
    use_precision("float32")
    if toy:
        cases = {"cpu": cases["cpu"], "gpu step": ("CPU:0", *cases["gpu step"][1:])}
    failed = {}
    for case, (place, compile, layout) in cases.items():
        try:
            with tf.device(place):
                keras.utils.set_random_seed(0)
                model = PretrainingModel(config)
                optimizer = AdamW(1e-3)
                optimizer.build(model.trainable_variables)
                is_compiled = compilation.resolve(compile, strategy)
                step = TrainStep(
                    model, LOSSES, optimizer, strategy, 0, METRICS, is_compiled=is_compiled
                )
                data = tf.data.Dataset.from_tensors(batch).map(layout).map(to_batch).repeat()
                iterator = iter(data)
                logs = [step(iterator) for _ in range(3)]
            results[case] = (
                [float(of["loss"]) for of in logs],
                float(logs[0]["gradient_norm"]),
                [moment.numpy() for moment in optimizer._adam_m],
            )
        except Exception as error:
            failed[case] = str(error)[:1500]
    losses, norm, moments = results["cpu"]
    return {"failed": failed, "losses": losses} | {
        case: {
            "loss": float(np.max(np.abs(np.subtract(of[0], losses)))),
            "gradient_norm": abs(of[1] / norm - 1),
            # Relative to the largest of all, since the gradient of a key's bias is rounding alone.
            "moments": max(
                float(np.max(np.abs(a - b))) for a, b in zip(of[2], moments, strict=True)
            )
            / max(float(np.max(np.abs(b))) for b in moments),
        }
        for case, of in results.items()
        if case != "cpu"
    }


def serving(name, toy, seconds):
    """Export a classifier for GPUs, compare it with the trained one, and time requests to it."""
    import tensorflow as tf
    from pretraining_step_tensorflow import config_of

    from bert_tf import Vocabulary
    from bert_tf.runs.checkpoints import load_saved_model
    from export import publish
    from tasks import TextClassifier
    from tasks.types.classification.text_classifier import ClassificationTask

    model_sizes, precision = SERVING[name]
    sizes = sizes_of(model_sizes, {"batch": 64, "length": 128}, toy)
    config = config_of(sizes)
    words = [f"w{number}" for number in range(config.vocab_size - 5)]
    vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=sizes.length)
    rng, latencies = np.random.default_rng(0), {}
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        model = TextClassifier(task, config, vocabulary)
        # It is published only if its predictions are those of the model.
        version = publish(model, f"{directory}/model", precision=precision, device="gpu")
        took = time.perf_counter() - start
        loaded = load_saved_model(version)  # Kept, since a signature does not keep the variables.
        predict = loaded.signatures["serving_default"]
        for count in (1, 8, 64):
            texts = [" ".join(rng.choice(words, sizes.length - 2)) for _ in range(count)]
            times, end = [], time.perf_counter() + seconds / 3
            while time.perf_counter() < end or len(times) < 5:
                start = time.perf_counter()
                predict(text=tf.constant(texts))["probabilities"].numpy()
                times.append(1000 * (time.perf_counter() - start))
            latencies[count] = {
                "median_ms": round(float(np.median(times[2:])), 2),
                "p90_ms": round(float(np.quantile(times[2:], 0.9)), 2),
            }
    return {"publish_seconds": round(took, 1), "tokens": sizes.length, "texts": latencies}


def determinism(name, toy, seconds):
    """Run 20 steps twice and compare their losses."""
    runs = [in_own_process("losses", name, toy) for _ in range(2)]
    return {
        "equal": runs[0]["losses"] == runs[1]["losses"],
        "losses": [run["losses"][-1] for run in runs],
        "ms_per_step": [run["ms_per_step"] for run in runs],
    }


def cache(name, toy, seconds):
    """Time the first step: without XLA's caches, filling them, and with them."""
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={directory}/programs",
            "XLA_FLAGS": f"--xla_gpu_per_fusion_autotune_cache_dir={directory}/kernels "
            + os.environ.get("XLA_FLAGS", ""),
        }
        runs = {"without": {}, "filling": flags, "with": flags}
        return {
            f"{run}_seconds": in_own_process("pretraining", name, toy, environment)[
                "first_step_seconds"
            ]
            for run, environment in runs.items()
        }


def in_own_process(part, case, toy, environment=None):
    """Return the result of a part in a process of its own, with variables of the environment."""
    command = [sys.executable, __file__, f"--part={part}", f"--case={case}", "--seconds=1"]
    done = subprocess.run(
        [*command, *["--toy"] * toy],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def losses(name, toy, seconds):
    """Return the losses of 20 steps of base, and the median duration of a step."""
    import keras
    import tensorflow as tf
    from pretraining_step_tensorflow import config_of

    from bert_tf.data.batches import pack_examples
    from bert_tf.pretraining.model import LOSSES, PretrainingModel, to_batch
    from bert_tf.text.encoder_inputs import PackedShape
    from bert_tf.train import compilation
    from bert_tf.train.distribution import use_precision
    from bert_tf.train.optimizer import AdamW
    from bert_tf.train.step import TrainStep

    if name == "deterministic":
        compilation.make_deterministic()
    sizes = sizes_of(BASE, {"batch": 64, "length": 128}, toy)
    keras.utils.set_random_seed(0)
    model, optimizer = PretrainingModel(config_of(sizes), use_precision("bfloat16")), AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, LOSSES, optimizer, tf.distribute.get_strategy(), 0, is_compiled=True)
    shape = PackedShape(sizes.length, (sizes.batch,))
    data = tf.data.Dataset.from_tensors(batch_of(sizes, False))
    iterator = iter(data.map(lambda of: pack_examples(of, shape)).map(to_batch).repeat())
    found, took = [], []
    for _ in range(20):
        start = time.perf_counter()
        found.append(float(step(iterator)["loss"]).hex())
        took.append(1000 * (time.perf_counter() - start))
    return {"losses": found, "ms_per_step": round(float(np.median(took)), 2)}


def pytorch(name, toy, seconds):
    """Time the pretraining step of a case in PyTorch."""
    import torch
    from pretraining_step_torch import Pretraining, parameter_groups

    sizes = sizes_of(*PYTORCH[name], toy)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    batch = {
        key: torch.from_numpy(values if values.dtype.kind == "f" else values.astype("int64"))
        for key, values in examples(sizes).items()
    }
    batch = {key: values.to(place) for key, values in batch.items()}
    model = Pretraining(sizes).train().to(place)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-4, eps=1e-6, fused=True)
    forward = torch.compile(model)

    def step():
        optimizer.zero_grad()
        with torch.autocast(place, torch.bfloat16):
            loss = forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    start = time.perf_counter()
    first_loss = step().item()
    first = time.perf_counter() - start
    for _ in range(5):
        loss = step()
    loss.item()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            loss = step()
        last = loss.item()
        count += 10
    ms = 1000 * (time.perf_counter() - start) / count
    return {
        "first_step_seconds": round(first, 1),
        "ms_per_step": round(ms, 2),
        "sequences_per_second": round(1000 * sizes.batch / ms, 1),
        "loss": [first_loss, last],
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if place == "cuda" else None,
        "torch": torch.__version__,
    }


PARTS = {
    "device": ("",),
    "equality": ("",),
    "pretraining": tuple(PRETRAINING),
    "finetuning": tuple(FINETUNING),
    "serving": tuple(SERVING),
    "determinism": ("default", "deterministic"),
    "cache": ("base 128 packed step",),
    "pytorch": tuple(PYTORCH),
}


def run_case(part, case, toy, seconds, limit):
    """Run a case in a process of its own; return its result or the reason why there is none."""
    command = [sys.executable, __file__, f"--part={part}", f"--case={case}"]
    command += [f"--seconds={seconds}", *["--toy"] * toy]
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    start = time.perf_counter()
    # A group of its own, since parts have processes of their own that would keep the GPU.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
        return {"failed": f"more than {limit:.0f} s", "stderr": said[-1500:]}
    took = round(time.perf_counter() - start, 1)
    if process.returncode:
        return {"failed": said.strip()[-3000:], "process_seconds": took}
    return {**json.loads(output.strip().splitlines()[-1]), "process_seconds": took}


UNITS = {
    "ms_per_step": ("", "ms"),
    "median_ms": ("", "ms"),
    "p90_ms": (" (90th percentile)", "ms"),
    "sequences_per_second": ("", "sequences/s"),
    "examples_per_second": ("", "examples/s"),
    "tokens_per_second": ("", "tokens/s"),
    "tokens_per_step": (" (per step)", "tokens"),
    "peak_gb": ("", "GB"),
    "first_step_seconds": (" (first step)", "s"),
    "publish_seconds": (" (publish)", "s"),
    "tflops": ("", "TFLOP/s"),
    "matmul_tflops": ("matrix product", "TFLOP/s"),
    "copy_gb_per_second": ("copy", "GB/s"),
    "mfu": ("", "MFU"),
    "loss": ("", "difference"),
    "gradient_norm": (" (gradient norm)", "difference"),
    "moments": (" (moments)", "difference"),
}


TABLES = {"pretraining": "Pretraining, bfloat16", "finetuning": "Fine-tuning, bfloat16"}


def figures_of(cases):
    """Return the figures of results.py: rates are means over the timed steps of one run."""
    figures = []
    for key, case in cases.items():
        part, _, name = key.partition(": ")
        program = "transformers" if part == "pytorch" else "bert_tf"
        part = "pretraining" if part == "pytorch" else part
        table = TABLES.get(part, part)
        nested = {name: case}
        if part == "equality":
            nested = {of: values for of, values in case.items() if of.startswith("gpu")}
        elif "texts" in case:
            nested |= {f"{name}, {count} texts": of for count, of in case["texts"].items()}
        for workload, values in nested.items():
            title = workload_of(part, workload)
            for field, (suffix, unit) in UNITS.items():
                value = values.get(field)
                if isinstance(value, int | float):
                    row = {"table": table, "workload": title + suffix}
                    single = {"repetitions": None, "min": None, "median": value, "max": None}
                    figures.append({**row, "program": program, "unit": unit, **single})
    return figures


def workload_of(part, case):
    """Return the workload of a case, such as "base, 256 x 128"."""
    sizes = {"pretraining": {**PYTORCH, **PRETRAINING}, "finetuning": FINETUNING}.get(part, {})
    if case not in sizes:
        return case
    model, options = case.split()[0], sizes[case][1]
    variant = re.sub(r"^\w+ (\d+ x )?\d+( packed step)?,?", "", case).strip()
    workload = f"{model}, {options['batch']} x {options['length']}"
    return f"{workload}, {variant}" if variant else workload


def main():
    """Run the parts from the command line."""
    flags = results.parser(__doc__)
    flags.add_argument("--minutes", type=float, default=8.0)
    flags.add_argument("--parts", default=",".join(PARTS))
    flags.add_argument("--cases", help="only cases whose name contains this text")
    flags.add_argument("--toy", action="store_true")
    flags.add_argument("--seconds", type=float, default=5.0, help="measured time per case")
    flags.add_argument("--part", help=argparse.SUPPRESS)
    flags.add_argument("--case", default="", help=argparse.SUPPRESS)
    flags.set_defaults(baselines=sys.executable)  # PyTorch is in the same environment.
    options = flags.parse_args()
    if options.part:
        function = globals()[options.part]
        print(json.dumps(function(options.case, options.toy, options.seconds)))
        return
    measured, cases = results.Results("gpu", options), {}
    end = time.perf_counter() + 60 * options.minutes
    for part in options.parts.split(","):
        for case in PARTS[part]:
            if options.cases and options.cases not in case:
                continue
            left = end - time.perf_counter()
            result = {"failed": "no time left"}
            if left > 5:
                limit = min(left, LIMITS[part] * options.minutes / 8)
                result = run_case(part, case, options.toy, options.seconds, limit)
            cases[f"{part}: {case}".removesuffix(": ")] = result
            print(f"{part}: {case}: {json.dumps(result)}", flush=True)
            if "failed" in result and part != "equality":
                measured.record["left_out"][f"{part}: {case}"] = result["failed"][-300:]
            measured.record["figures"] = figures_of(cases)
            measured.save()  # After each case, since the machine is lent for minutes.


if __name__ == "__main__":
    main()
