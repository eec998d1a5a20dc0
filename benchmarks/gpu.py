"""Check and measure training and serving on a GPU.

    python benchmarks/gpu.py --minutes=8

Each case runs in a process of its own with a time limit, so that a failure costs that case alone.
Several cases prepare their programs side by side, and are timed one after the other:

    device        precision that "auto" selects, memory growth, and rates of a matrix product and
                  of a copy
    equality      losses, gradients and moments of a small model, compared with the CPU in float32
    pretraining   a step of base and large with 128 and 512 tokens, by compilation and layout
    finetuning    a step of base with 32 texts of up to 128 tokens, by compilation and layout
    serving       export for GPUs with its parity check, and latency for 1, 8 and 64 texts
    determinism   two equal runs of 20 steps, compared bit for bit, without and with --deterministic
    cache         the first step without and with saved programs and timings of kernels
    pytorch       the same steps with transformers, SDPA and torch.compile

With attention_probs_dropout_prob=0, "no attention dropout", bert_tf uses cuDNN's attention. MFU is
the rate of matrix products over the peak of the GPU. Rates are means over the timed steps of one
run. --toy runs all parts with tiny sizes on any device.
"""

import concurrent.futures
import json
import os
import pathlib
import re
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
SIZES = ("base, 256 x 128", "base, 64 x 512", "large, 128 x 128", "large, 32 x 512")
DROPOUTS = ("", ", no attention dropout")
PRETRAINING = tuple(size + dropout for size in SIZES for dropout in DROPOUTS)
FINETUNING = tuple(f"base, 32 x 128{dropout}" for dropout in DROPOUTS)
PYTORCH = (
    *(f"pretraining, {case}" for case in PRETRAINING),
    *(f"finetuning, {case}" for case in FINETUNING),
)
PRETRAINING += (
    "base, 512 x 128, mixed lengths",
    "base, 256 x 128, padded step",
    "base, 256 x 128, padded kernels",
)
FINETUNING += (
    "base, 32 x 128, padded step",
    "base, 32 x 128, flat kernels",
    "base, 32 x 128, mixed lengths",
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
        lengths = rng.integers(sizes.length // 8, sizes.length + 1, (sizes.batch, 1))
        mask = (np.arange(sizes.length) < lengths).astype(np.int32)
        for name in ("input_ids", "input_mask", "segment_ids"):
            batch[name] = batch[name] * mask
        positions = batch["masked_lm_positions"]
        batch["masked_lm_weights"] = (positions < lengths).astype(np.float32)
        batch["masked_lm_positions"] = np.minimum(positions, lengths - 1).astype(np.int32)
    return batch


def prepare(case, sizes, precision, mixed=False, **options):
    """Return the train step of a case and its dataset, on one repeated batch.

    Sets what XLA compiles. `options` are those of pretraining_step_tensorflow.
    """
    import pretraining_step_tensorflow
    import tensorflow as tf

    from bert_tf.data.batches import flatten_examples, pack_examples, pad_examples
    from bert_tf.text.encoder_inputs import PackedShape
    from bert_tf.train import compilation

    batch = batch_of(sizes, mixed)
    shape = PackedShape.of_lengths(batch["input_mask"].sum(axis=1), sizes.batch, sizes.length)
    layouts = {"padded": pad_examples, "flat": flatten_examples}
    layout = layouts.get(found_in(case, layouts), lambda values: pack_examples(values, shape))
    compiled = compilation.resolve(
        found_in(case, ("kernels", "none")) or "step", tf.distribute.get_strategy()
    )
    return pretraining_step_tensorflow.prepare(
        sizes, precision, batch, layout, is_compiled=compiled, **options
    )


def found_in(case, names):
    """Return the first of some names that a case has, or `None`."""
    return next((name for name in names if name in case), None)


def dropout_of(case):
    """Return the keyword arguments of a BertConfig that a case sets."""
    return {"attention_probs_dropout_prob": 0.0} if "no attention dropout" in case else {}


def timed_steps(run, seconds):
    """Return seconds of the first step, milliseconds of later ones, and the first and last loss.

    `run` runs a number of steps, and returns the last loss as soon as it can.
    """
    start = time.perf_counter()
    first_loss = float(run(1))
    first = time.perf_counter() - start
    await_turn()
    float(run(STEPS_PER_CALL))
    start = time.perf_counter()
    loss, count = run(STEPS_PER_CALL), STEPS_PER_CALL
    while time.perf_counter() - start < seconds:
        before, loss = loss, run(STEPS_PER_CALL)
        count += STEPS_PER_CALL
        float(before)  # One call late, as in the training loop.
    last_loss = float(loss)
    return first, 1000 * (time.perf_counter() - start) / count, first_loss, last_loss


def pretraining(case, toy, seconds, is_classifier=False):
    """Time the pretraining step of a case, or the fine-tuning step of a classifier of 3 labels."""
    import tensorflow as tf

    from bert_tf import BertConfig
    from bert_tf.planning.estimates import flops_per_token
    from bert_tf.train.distribution import distribute

    sizes, options = sizes_of(case, toy), dropout_of(case)
    if is_classifier:
        options |= {"is_classifier": True, "rate": 1e-5}
    step, dataset = prepare(case, sizes, "bfloat16", "mixed" in case, **options)
    iterator = iter(distribute(lambda local: dataset, step.strategy, step.is_compiled))
    no_stop, logs = tf.constant(False), {"gradient_norm": tf.constant(0.0)}

    def run(count):
        logs.update(step(iterator, no_stop, tf.constant(count), logs["gradient_norm"]))
        return logs["loss"]

    first, ms, *losses = timed_steps(run, seconds)
    tokens = int(logs["tokens"]) // STEPS_PER_CALL
    num_predictions = 0 if is_classifier else sizes.predictions
    flops = flops_per_token(BertConfig(**sizes.config), sizes.length, num_predictions)
    figures = {
        "ms": ms,
        "TFLOP/s": flops * tokens / ms / 1e9,
        "MFU": 1000 * flops * tokens / ms / PEAK_FLOPS,
        "tokens/s": 1000 * tokens / ms,
        "examples/s" if is_classifier else "sequences/s": 1000 * sizes.batch / ms,
    }
    if tf.config.list_physical_devices("GPU"):
        figures["GB"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 1e9
    more = {" (per step)": {"tokens": tokens}, " (first step)": {"s": first}}
    return {"figures": {"": figures, **more}, "loss": losses}


def finetuning(case, toy, seconds):
    """Time the fine-tuning step of a case: a classifier of 3 labels."""
    return pretraining(case, toy, seconds, is_classifier=True)


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
    return {
        "cuda": tf.sysconfig.get_build_info().get("cuda_version"),
        "precision": resolve_precision("auto", tf.distribute.get_strategy()),
        # Memory growth: little is used.
        "memory": results.nvidia_smi("driver_version,memory.used,memory.total"),
        "figures": {
            "matrix product": {"TFLOP/s": rate(lambda a: a @ a, factor, flops) / 1e12},
            "copy": {"GB/s": rate(lambda a: a + 1.0, large, num_bytes) / 1e9},
        },
    }


def equality(case, toy, seconds):
    """Compare a step in float32 on the GPU, compiled, with one on the CPU."""
    import tensorflow as tf

    sizes = Sizes(layers=4, hidden=256, batch=16, length=64, vocabulary=4000)
    if toy:
        sizes = Sizes(**TOY, batch=8, length=64)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "rate": 1e-3}
    cases = {
        "cpu": "flat kernels",
        "gpu step": "step",
        "gpu kernels": "flat kernels",
        "gpu none": "flat none",
    }
    found, failed = {}, {}
    for name, of_case in cases.items():
        try:
            with tf.device("CPU:0" if toy or name == "cpu" else "GPU:0"):
                step, dataset = prepare(of_case, sizes, "float32", mixed=True, **options)
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
    figures = {}
    for name, (of_losses, of_norm, of_moments) in found.items():
        pairs = zip(of_moments, moments, strict=True)
        worst = max(float(np.abs(a - b).max()) for a, b in pairs)
        figures[name] = {"difference": float(np.abs(of_losses - losses).max())}
        figures[f"{name} (gradient norm)"] = {"difference": abs(of_norm / norm - 1)}
        figures[f"{name} (moments)"] = {"difference": worst / largest}
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
    text, figures = " ".join(words[: sizes.length - 2]), {}
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
            texts = tf.constant([text] * count)
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
    step, dataset = prepare("", sizes, "bfloat16")
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
    import torch
    import training_torch

    kind, _, case = case.partition(", ")
    sizes, is_classifier = sizes_of(case, toy), kind == "finetuning"
    place = "cuda" if torch.cuda.is_available() else "cpu"
    step = training_torch.prepare(sizes, "bfloat16", True, place, is_classifier, **dropout_of(case))
    first, ms, *losses = timed_steps(lambda count: [step() for _ in range(count)][-1], seconds)
    figures = {"ms": ms, "examples/s" if is_classifier else "sequences/s": 1000 * sizes.batch / ms}
    if place == "cuda":
        figures["GB"] = torch.cuda.max_memory_allocated() / 1e9
    return {"figures": {"": figures, " (first step)": {"s": first}}, "loss": losses}


if __name__ == "__main__":
    main()
