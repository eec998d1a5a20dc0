"""Check and measure training and serving on a GPU.

    python benchmarks/gpu.py --minutes=8

Each case runs in a process of its own with a time limit, so that a failure costs that case alone.
Several cases prepare their programs side by side, and are timed one after the other:

    device        GPU, versions, precision that "auto" selects, memory growth, rates of a matrix
                  product and of a copy
    equality      losses, gradients and outputs of a small model, compared with the CPU in float32
    pretraining   a step of base and large with 128 and 512 tokens, by compilation and layout
    finetuning    a step of base with 32 texts of up to 128 tokens, by compilation and layout
    serving       export for GPUs with its parity check, and latency for 1, 8 and 64 texts
    determinism   two equal runs of 20 steps, compared bit for bit and timed, without and with what
                  --deterministic sets
    cache         the first step without and with saved programs and timings of kernels
    pytorch       the same steps with transformers, SDPA and torch.compile

Cases with "no attention dropout" set attention_probs_dropout_prob=0, with which bert_tf uses
cuDNN's attention.

FLOPs are those of matrix products (bert_tf.planning.estimates.flops_per_token); MFU is their rate
over the peak of the GPU for dense bfloat16 products. Rates are means over the timed steps of one
run. Prints a JSON object per case; --toy runs all parts with tiny sizes on any device.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import own_process
import results
from pretraining_batch import Sizes, examples, timed

PEAK_FLOPS = 989e12  # H100 and H200, dense bfloat16 products, without sparsity.
MODELS = {"base": {"layers": 12, "hidden": 768}, "large": {"layers": 24, "hidden": 1024}}
STEPS_PER_CALL = 10
TOY = {"layers": 2, "hidden": 128, "vocabulary": 2000}
# Model, examples x tokens, and what differs from a step in the packed layout, compiled as a whole.
PRETRAINING = (
    "base, 256 x 128",
    "base, 256 x 128, no attention dropout",
    "base, 64 x 512",
    "base, 64 x 512, no attention dropout",
    "large, 128 x 128",
    "large, 128 x 128, no attention dropout",
    "large, 32 x 512",
    "large, 32 x 512, no attention dropout",
    "base, 512 x 128, mixed lengths",
    "base, 256 x 128, padded step",
    "base, 256 x 128, padded kernels",
)
FINETUNING = (
    "base, 32 x 128",
    "base, 32 x 128, no attention dropout",
    "base, 32 x 128, padded step",
    "base, 32 x 128, flat kernels",
    "base, 32 x 128, mixed lengths",
)
PYTORCH = (
    *(f"pretraining, {case}" for case in PRETRAINING[:8]),
    *(f"finetuning, {case}" for case in FINETUNING[:2]),
)
# Part: its cases, and seconds at most of the default of 8 minutes.
PARTS = {
    "device": (("",), 60),
    "equality": (("",), 90),
    "pretraining": (PRETRAINING, 180),
    "finetuning": (FINETUNING, 150),
    "serving": (("base float16", "base bfloat16", "base float32", "large float16"), 150),
    "determinism": (("default", "deterministic"), 200),  # Two processes, of which each compiles.
    "cache": (("base, 256 x 128",), 200),  # Three of them.
    "pytorch": (PYTORCH, 150),
}
TABLES = {"pretraining": "Pretraining, bfloat16", "finetuning": "Fine-tuning, bfloat16"}


def main():
    """Run the parts from the command line."""
    flags = results.parser(__doc__)
    flags.add_argument("--minutes", type=float, default=8.0)
    flags.add_argument("--parts", default=",".join(PARTS))
    flags.add_argument("--cases", default="", help="only cases that match this expression")
    flags.add_argument("--together", type=int, default=4, help="cases prepared side by side")
    flags.add_argument("--toy", action="store_true")
    flags.add_argument("--seconds", type=float, default=5.0, help="measured time per case")
    flags.set_defaults(baselines=sys.executable)  # PyTorch is in the same environment.
    options = flags.parse_args()
    measured = results.Results("gpu", options)
    end = time.perf_counter() + 60 * options.minutes
    wanted = [
        (part, case)
        for part in options.parts.split(",")
        for case in PARTS[part][0]
        if re.search(options.cases, f"{part}: {case}")
    ]
    for first in range(0, len(wanted), options.together):
        group = wanted[first : first + options.together]
        for (part, case), found in prepared_together(group, options, end):
            if isinstance(found, Exception):
                measured.leave_out(f"{part}: {case}", found)
                continue
            print(f"{part}: {case}: {json.dumps(found)}", flush=True)
            kind, _, of_pytorch = case.partition(", ")
            program = "transformers" if part == "pytorch" else "bert_tf"
            workload = of_pytorch if part == "pytorch" else case
            table = TABLES.get(kind if part == "pytorch" else part, part)
            for suffix, values in found["figures"].items():
                for unit, value in values.items():
                    measured.add(table, workload + suffix, program, unit, [value])
            measured.save()  # An interruption loses one case at most.


def prepared_together(cases, options, end):
    """Yield each (part, case) and its result, or why there is none.

    The cases are prepared side by side. Once all of them are ready, each is timed on its own.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(len(cases)) as pool,
    ):
        gates = [pathlib.Path(directory, str(number)) for number in range(len(cases))]
        running = []
        for (part, case), gate in zip(cases, gates, strict=True):
            gate.mkdir()
            limit = min(end - time.perf_counter(), PARTS[part][1] * max(options.minutes / 8, 1))
            arguments = (part, case, options.toy, options.seconds, {"GATE": str(gate)})
            running.append(pool.submit(call, *arguments, timeout=max(limit, 1)))
        for gate, future in zip(gates, running, strict=True):
            while not (future.done() or pathlib.Path(gate, "ready").exists()):
                time.sleep(0.05)
        for of, gate, future in zip(cases, gates, running, strict=True):
            pathlib.Path(gate, "turn").touch()
            try:
                yield of, future.result()
            except own_process.Failed as failure:
                yield of, failure


def await_turn():
    """Report that this case is ready, and wait until no other one is timed."""
    if gate := os.environ.get("GATE"):
        pathlib.Path(gate, "ready").touch()
        while not pathlib.Path(gate, "turn").exists():
            time.sleep(0.05)


def call(part, case, toy, seconds=1, environment=None, **options):
    """Return the result of a part in a process of its own.

    Its "figures" are {end of the workload: {unit: value}}; the rest is printed only.
    """
    arguments = {"case": case, "toy": toy, "seconds": seconds}
    return own_process.call(f"gpu.{part}", environment=environment or {}, **options, **arguments)


def sizes_of(case, toy):
    """Return the `Sizes` of a case."""
    model, size = case.split(", ")[:2]
    batch, length = map(int, size.split(" x "))
    if toy:
        return Sizes(**TOY, batch=8, length=min(length, 64))
    return Sizes(**MODELS[model], batch=batch, length=length)


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


def prepare(sizes, batch, precision, layout, is_compiled, rate=1e-4, **config):
    """Return the train step of pretraining and its dataset, on one repeated batch."""
    import pretraining_step_tensorflow

    from bert_tf import BertConfig
    from bert_tf.data.batches import flatten_examples, pack_examples, pad_examples
    from bert_tf.text.encoder_inputs import PackedShape

    lengths = batch["input_mask"].sum(axis=1)
    shape = PackedShape.of_lengths(lengths, sizes.batch, sizes.length)
    layouts = {"padded": pad_examples, "flat": flatten_examples}
    layout = layouts.get(layout, lambda values: pack_examples(values, shape))
    config = BertConfig(**{**sizes.config, **config})
    return pretraining_step_tensorflow.prepare(
        config, batch, precision, layout, is_compiled, rate=rate
    )


def dropout_of(case):
    """Return the keyword arguments of a BertConfig that a case sets."""
    return {"attention_probs_dropout_prob": 0.0} if "no attention dropout" in case else {}


def layout_of(case):
    """Return the layout of a case."""
    return next((name for name in ("padded", "flat") if name in case), "packed")


def is_compiled(case):
    """Set what XLA compiles for a case; return whether it compiles the step as a whole."""
    import tensorflow as tf

    from bert_tf.train import compilation

    what = next((name for name in ("kernels", "none") if name in case), "step")
    return compilation.resolve(what, tf.distribute.get_strategy())


def measured_steps(step, dataset, sizes, unit, num_predictions, seconds):
    """Run a train step on a repeated dataset; return times, rates and the peak of the memory.

    `unit` is that of the rate of the examples.
    """
    import tensorflow as tf

    from bert_tf import BertConfig
    from bert_tf.planning.estimates import flops_per_token
    from bert_tf.train.distribution import distribute

    batches = distribute(lambda local: dataset, step.strategy, step.is_compiled)
    iterator, no_stop = iter(batches), tf.constant(False)
    count, norm = tf.constant(STEPS_PER_CALL), tf.constant(0.0)
    start = time.perf_counter()
    logs = step(iterator, no_stop, tf.constant(1), norm)
    loss = float(logs["loss"])
    first = time.perf_counter() - start
    await_turn()
    logs = step(iterator, no_stop, count, logs["gradient_norm"])
    float(logs["loss"])
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        before, logs = logs, step(iterator, no_stop, count, logs["gradient_norm"])
        float(before["loss"])  # One call late, as in the training loop.
        calls += 1
    last = float(logs["loss"])
    rate = calls * STEPS_PER_CALL / (time.perf_counter() - start)
    tokens = int(logs["tokens"]) // STEPS_PER_CALL
    config = BertConfig(**sizes.config)
    flops = flops_per_token(config, sizes.length, num_predictions) * tokens
    figures = {
        "ms": 1000 / rate,
        "TFLOP/s": flops * rate / 1e12,
        "MFU": flops * rate / PEAK_FLOPS,
        "tokens/s": tokens * rate,
        unit: sizes.batch * rate,
    }
    if tf.config.list_physical_devices("GPU"):
        figures["GB"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 1e9
    more = {" (per step)": {"tokens": tokens}, " (first step)": {"s": first}}
    return {"figures": {"": figures, **more}, "loss": [loss, last]}


def pretraining(case, toy, seconds):
    """Time the pretraining step of a case."""
    sizes = sizes_of(case, toy)
    batch = batch_of(sizes, "mixed" in case)
    compiled = is_compiled(case)
    prepared = prepare(sizes, batch, "bfloat16", layout_of(case), compiled, **dropout_of(case))
    return measured_steps(*prepared, sizes, "sequences/s", sizes.predictions, seconds)


def finetuning(case, toy, seconds):
    """Time the fine-tuning step of a case: a classifier of 3 labels."""
    import tensorflow as tf

    from bert_tf import BertConfig
    from bert_tf.text.encoder_inputs import PackedShape, from_padded, to_flat, to_packed
    from bert_tf.train.distribution import use_precision
    from bert_tf.train.losses import softmax_cross_entropy
    from bert_tf.train.optimizer import AdamW
    from bert_tf.train.step import TrainStep
    from tasks.graph.heads import SequenceClassifier

    sizes = sizes_of(case, toy)
    batch, strategy = batch_of(sizes, "mixed" in case), tf.distribute.get_strategy()
    inputs = {name: batch[name] for name in ("input_ids", "input_mask", "segment_ids")}
    shape = PackedShape.of_lengths(inputs["input_mask"].sum(axis=1), sizes.batch, sizes.length)
    layouts = {
        "padded": dict,
        "flat": lambda values: to_flat(from_padded(values), None),
        "packed": lambda values: to_packed(from_padded(values), None, shape),
    }
    layout = layouts[layout_of(case)]
    labels = {"label": np.arange(sizes.batch, dtype=np.int32) % 3}
    weights = {"label": np.ones(sizes.batch, np.float32)}
    dataset = tf.data.Dataset.from_tensors(inputs).map(layout)
    dataset = dataset.map(lambda values: (values, labels, weights)).cache().repeat().prefetch(2)
    compiled = is_compiled(case)
    config = BertConfig(**sizes.config, **dropout_of(case))
    model = SequenceClassifier(config, 3, dtype=use_precision("bfloat16"))
    optimizer, losses = AdamW(1e-5), {"label": softmax_cross_entropy}
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, losses, optimizer, strategy, 0, is_compiled=compiled)
    return measured_steps(step, dataset, sizes, "examples/s", 0, seconds)


def device(case, toy, seconds):
    """Describe the device and measure its rates in TensorFlow."""
    import tensorflow as tf

    from bert_tf.train.distribution import resolve_precision

    size, steps = (256, 3) if toy else (8192, 10)
    factor = tf.cast(tf.random.normal([size, size]), tf.bfloat16)
    large = tf.zeros([64 if toy else 2**14, 2**14], tf.float32)

    def rate(function, tensor, amount):
        compiled = tf.function(function, jit_compile=True)
        # Reading a value waits for the device.
        times = timed(lambda: float([compiled(tensor) for _ in range(steps)][-1][0, 0]), 3)
        return 1000 * steps * amount / np.median(times["ms"])

    flops, num_bytes = 2 * size**3, 2 * 4 * large.shape.num_elements()
    result = {
        "cuda": tf.sysconfig.get_build_info().get("cuda_version"),
        "precision": resolve_precision("auto", tf.distribute.get_strategy()),
        "figures": {
            "matrix product": {"TFLOP/s": rate(lambda a: a @ a, factor, flops) / 1e12},
            "copy": {"GB/s": rate(lambda a: a + 1.0, large, num_bytes) / 1e9},
        },
    }
    if tf.config.list_physical_devices("GPU"):
        fields = "--query-gpu=name,driver_version,memory.used,memory.total"
        query = ["nvidia-smi", fields, "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        result["nvidia_smi"] = done.stdout.strip()  # Memory growth: little is used.
    return result


def equality(case, toy, seconds):
    """Compare a step in float32 on the GPU, compiled, with one on the CPU."""
    import tensorflow as tf

    sizes = Sizes(layers=4, hidden=256, batch=16, length=64, vocabulary=4000)
    if toy:
        sizes = Sizes(**TOY, batch=8, length=64)
    batch, found, failed = batch_of(sizes, True), {}, {}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    cases = {
        "cpu": ("CPU:0", "kernels", "flat"),
        "gpu step": ("GPU:0", "step", "packed"),
        "gpu kernels": ("GPU:0", "kernels", "flat"),
        "gpu none": ("GPU:0", "none", "flat"),
    }
    if toy:
        cases = {"cpu": cases["cpu"], "gpu step": ("CPU:0", "step", "packed")}
    for name, (place, compile, layout) in cases.items():
        try:
            with tf.device(place):
                compiled = is_compiled(compile)
                prepared = prepare(sizes, batch, "float32", layout, compiled, 1e-3, **no_dropout)
                step, dataset = prepared
                iterator = iter(dataset)
                logs = [step(iterator) for _ in range(3)]
            losses = np.array([float(of["loss"]) for of in logs])
            moments = [moment.numpy() for moment in step.optimizer._adam_m]
            found[name] = losses, float(logs[0]["gradient_norm"]), moments
        except Exception as error:  # The other cases are compared nevertheless.
            failed[name] = str(error)[:1500]
    losses, norm, moments = found.pop("cpu")
    # Relative to the largest of all, since the gradient of a key's bias is rounding alone.
    largest = max(float(np.abs(moment).max()) for moment in moments)
    differences = {}
    for name, (of_losses, of_norm, of_moments) in found.items():
        pairs = zip(of_moments, moments, strict=True)
        differences[name] = float(np.abs(of_losses - losses).max())
        differences[f"{name} (gradient norm)"] = abs(of_norm / norm - 1)
        differences[f"{name} (moments)"] = (
            max(float(np.abs(a - b).max()) for a, b in pairs) / largest
        )
    figures = {name: {"difference": value} for name, value in differences.items()}
    return {"failed": failed, "losses": losses.tolist(), "figures": figures}


def serving(case, toy, seconds):
    """Export a classifier for GPUs, compare it with the trained one, and time requests to it."""
    import tensorflow as tf

    from bert_tf import BertConfig, Vocabulary
    from bert_tf.runs.checkpoints import load_saved_model
    from export import publish
    from tasks import TextClassifier
    from tasks.types.classification.text_classifier import ClassificationTask

    model, precision = case.split()
    sizes = sizes_of(f"{model}, 64 x 128", toy)
    config = BertConfig(**sizes.config)
    words = [f"w{number}" for number in range(config.vocab_size - 5)]
    vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=sizes.length)
    rng, figures = np.random.default_rng(0), {}
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        model = TextClassifier(task, config, vocabulary)
        # It is published only if its predictions are those of the model.
        version = publish(model, f"{directory}/model", precision=precision, device="gpu")
        figures[" (publish)"] = {"s": time.perf_counter() - start}
        loaded = load_saved_model(version)  # Kept, since a signature does not keep the variables.
        predict = loaded.signatures["serving_default"]
        await_turn()
        for count in (1, 8, 64):
            texts = [" ".join(rng.choice(words, sizes.length - 2)) for _ in range(count)]
            texts = tf.constant(texts)
            times = timed(lambda texts=texts: predict(text=texts)["probabilities"].numpy(), 50)
            figures[f", {count} texts"] = {"ms": np.median(times["ms"])}
            figures[f", {count} texts (90th percentile)"] = {"ms": np.quantile(times["ms"], 0.9)}
    return {"figures": figures}


def determinism(case, toy, seconds):
    """Run 20 steps twice and compare their losses."""
    runs = [call("losses", case, toy) for _ in range(2)]
    return {
        "figures": {},
        "equal": runs[0]["losses"] == runs[1]["losses"],
        "ms": [run["ms"] for run in runs],
    }


def losses(case, toy, seconds):
    """Return the losses of 20 steps of base, and the median duration of a step."""
    from bert_tf.train import compilation

    if case == "deterministic":
        compilation.make_deterministic()
    sizes = sizes_of("base, 64 x 128", toy)
    step, dataset = prepare(sizes, batch_of(sizes, False), "bfloat16", "packed", True)
    iterator, found = iter(dataset), []
    times = timed(lambda: found.append(float(step(iterator)["loss"]).hex()), 17)
    return {"losses": found, "ms": np.median(times["ms"])}


def cache(case, toy, seconds):
    """Time the first step: without XLA's caches, filling them, and with them."""
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={directory}/programs",
            "XLA_FLAGS": f"--xla_gpu_per_fusion_autotune_cache_dir={directory}/kernels "
            + os.environ.get("XLA_FLAGS", ""),
        }
        runs = {"without": {}, "filling": flags, "with": flags}
        found = {run: call("pretraining", case, toy, 1, of_run) for run, of_run in runs.items()}
    seconds = {run: of["figures"][" (first step)"]["s"] for run, of in found.items()}
    return {"figures": {}, "seconds of the first step": seconds}


def pytorch(case, toy, seconds):
    """Time a step of a case in PyTorch: of pretraining, or of a classifier of 3 labels."""
    import pretraining_step_torch
    import torch

    kind, _, case = case.partition(", ")
    sizes = sizes_of(case, toy)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    function = {
        "pretraining": pretraining_step_torch.prepare,
        "finetuning": pretraining_step_torch.prepare_classifier,
    }[kind]
    step = function(sizes, "bfloat16", True, place, **dropout_of(case))
    start = time.perf_counter()
    first_loss = step().item()
    first = time.perf_counter() - start
    for _ in range(5):
        loss = step()
    loss.item()
    await_turn()
    step().item()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            loss = step()
        last = loss.item()
        count += 10
    ms = 1000 * (time.perf_counter() - start) / count
    unit = "examples/s" if kind == "finetuning" else "sequences/s"
    figures = {"ms": ms, unit: 1000 * sizes.batch / ms}
    if place == "cuda":
        figures["GB"] = torch.cuda.max_memory_allocated() / 1e9
    figures = {"": figures, " (first step)": {"s": first}}
    return {"figures": figures, "loss": [first_loss, last]}


if __name__ == "__main__":
    main()
