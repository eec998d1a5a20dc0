"""Measure how time and memory grow with sizes of model and input, machines and shards.

    python benchmarks/scale.py --quick
    python benchmarks/scale.py --data=DIR

Beside a step and a request is the estimate of `bert-tf plan`, for which the rates of the processor
are measured before and after; the estimate is their mean. Training is a pretraining step on one
repeated batch, or 40 steps of a recipe of task_recipes.py after ten others. Requests go to a served
BERT-base with random weights. Processes train the size mini on shards of 128 tokens with one global
batch, on loopback. Shards hold a few examples of random letters each.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import socket
import sys
import tempfile

import data
import own_process
import results
from pretraining_batch import Sizes, timed
from task_recipes import TASKS, files_of, minilm

# Layers and hidden size: examples, tokens per example, and what is not as usual.
QUICK = {(6, 256): ((8, 128), (8, 512), (8, 512, "checkpointing"))}
COMPLETE = {
    (2, 128): ((1, 16), (8, 128)),
    (6, 384): ((1, 16),),
    (6, 256): ((8, 128), (32, 128), (8, 512), (8, 512, "checkpointing")),
    (12, 256): ((8, 128),),
    (6, 512): ((16, 128), (16, 128, "bfloat16")),
    (12, 768): ((8, 128), (8, 128, "bfloat16"), (8, 512), (8, 512, "checkpointing")),
}
FINETUNING = ("banking77", "wnut17", "hate_speech", "arc", "squad")
# Tokens per text, texts per request.
REQUESTS = ((8, 1), (32, 1), (128, 1), (512, 1), (32, 16), (128, 16))
STEPS, WARMUP_STEPS, REQUESTS_TIMED = 4, 2, 5
DOCUMENTS_PER_SHARD = 6
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


def compare(measured, table, workload, function, estimate, shared, **arguments):
    """Record time and memory of a function between two estimates, and the mean of these.

    `arguments` are those of the function, `shared` those of both.
    """
    before = own_process.call(estimate, **shared)
    found = own_process.call(function, **shared, **arguments)
    after = own_process.call(estimate, **shared)
    for unit, values in (("ms", found["ms"]), ("MB", [found["peak_mb"]])):
        measured.add(table, workload, "bert_tf", unit, values)
        mean = (before[unit] + after[unit]) / 2
        measured.add(table, workload, "estimate", unit, [mean])


def training(options, measured):
    """Measure pretraining steps."""
    models = QUICK if options.quick else COMPLETE
    points = [(*model, *batch) for model, batches in models.items() for batch in batches]
    for layers, hidden, batch, length, *unusual in points:
        if "bfloat16" in unusual and not results.has_feature("avx512_bf16"):
            continue
        sizes = Sizes(layers=layers, hidden=hidden, batch=batch, length=length)
        workload = [f"{layers} layers of {hidden}, {batch} x {length} tokens", *unusual]
        functions = "pretraining_step_tensorflow.bare", "scale.estimate_pretraining"
        shared = {
            "sizes": dataclasses.asdict(sizes),
            "precision": "bfloat16" if "bfloat16" in unusual else "float32",
            "recompute": "checkpointing" in unusual,
        }
        own = {"steps": STEPS, "uncounted": WARMUP_STEPS}
        compare(measured, "Pretraining step", ", ".join(workload), *functions, shared, **own)


def estimate_pretraining(sizes, precision, recompute):
    """Return the estimated milliseconds and MB of a step, from measured rates."""
    from bert_tf.system.command import import_tensorflow

    import_tensorflow()  # As in the commands.

    from bert_tf import BertConfig
    from bert_tf.planning.devices import measure_processor
    from bert_tf.planning.estimates import Training, estimate
    from bert_tf.planning.memory import StepSizes

    sizes = Sizes(**sizes)
    config, tokens = BertConfig(**sizes.config), sizes.batch * sizes.length
    device = measure_processor(config, tokens, precision)
    step = StepSizes(config, sizes.batch, sizes.length, sizes.predictions, precision, recompute)
    return _in_units(estimate(Training(step, sizes.batch, tokens, 1, device)), "step_seconds")


def _in_units(result, seconds):
    memory = (result.memory["peak"] + result.memory["process"]) / 1e6
    return {"ms": 1000 * getattr(result, seconds), "MB": memory}


def finetuning(options, measured):
    """Measure steps of the recipes."""
    for name in ("complaints",) if options.quick or not options.data else FINETUNING:
        shared = {"name": name, "data": str(options.data or ".")}
        functions = "scale.train", "scale.estimate_finetuning"
        compare(measured, "Fine-tuning step", name, *functions, shared)


def train(name, data):
    """Return the mean milliseconds of 40 steps of a recipe after ten others."""
    import finetuning_tensorflow

    ends = finetuning_tensorflow.train(name, data, max_steps=50)["ends"][10:]
    return {"ms": [1000 * (ends[-1] - ends[0]) / (len(ends) - 1)]}


def estimate_finetuning(name, data):
    """Return the estimated milliseconds and MB of a recipe's step."""
    from bert_tf.planning import estimates as planning
    from tasks.finetuning.recipe import plan_of
    from tasks.finetuning.settings import FinetuneSettings

    with tempfile.TemporaryDirectory() as scratch:
        settings = FinetuneSettings(
            **TASKS[name][0],
            train=files_of(name, data, scratch)[0],
            init_from=str(minilm()),
            output_dir=f"{scratch}/run",
            dry_run=True,
        )
        plan = plan_of(settings, lambda line: None)
        return _in_units(planning.estimate_finetuning(plan), "step_seconds")


def requests(options, measured):
    """Measure requests to a served BERT-base."""
    with tempfile.TemporaryDirectory() as directory:
        own_process.call("serving_models.write", directory=directory, counts={}, size="base")
        ours = {"precision": "float32", "backend": "ours"}
        own_process.call("serving_models.convert", directory=directory, **ours)
        for length, batch in REQUESTS[::2] if options.quick else REQUESTS:
            shared = {"length": length, "batch": batch}
            functions = "scale.send", "scale.estimate_request"
            row = ("Request, BERT-base", f"{batch} x {length} tokens")
            compare(measured, *row, *functions, shared, directory=directory)


def send(directory, length, batch):
    """Return the milliseconds of requests, with few imports."""
    from bert_tf.system.command import import_tensorflow

    import_tensorflow()  # As in the commands.

    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations of the tokenizer.

    serve = tf.saved_model.load(f"{directory}/ours").signatures["serving_default"]
    texts = tf.constant([" ".join(["the"] * (length - 2))] * batch)
    return timed(lambda: serve(text=texts)["probabilities"].numpy(), REQUESTS_TIMED)


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
        data.write_shards(path, directory / "shards", 16)
        steps, batches = (8, (32,)) if options.quick else (20, (32, 128))
        for batch in batches:
            flags = {
                "shards": directory / "shards",
                "model_size": "mini",
                "num_train_steps": steps,
                "global_batch_size": batch,
                "warmup_steps": 1,
                "save_every": steps,
                "log_every": max(1, steps // 4),
            }
            for count, cores, title in (
                (1, 1, "1 process, 1 core"),
                (2, 1, "2 processes, 1 core each"),
                (1, 2, "1 process, 2 cores"),
                (2, 2, "2 processes, 2 cores together"),
            ):
                run = directory / f"run-{batch}-{count}-{cores}"
                rates = _train({**flags, "output_dir": run}, count, cores == 1)
                workload = f"{title}, {batch} examples"
                measured.add("Processes", workload, "bert_tf", "tokens/s", rates)


def _train(flags, count, is_pinned):
    """Return tokens per second of the log lines after the first one, of `count` processes."""
    with contextlib.ExitStack() as stack:
        servers = [socket.create_server(("localhost", 0)) for _ in range(count)]
        ports = [stack.enter_context(server).getsockname()[1] for server in servers]
    workers, cores = [f"localhost:{port}" for port in ports], sorted(os.sched_getaffinity(0))
    flags = {**flags, "strategy": "none" if count == 1 else "multi_worker"}
    words = [f"--{name}={value}" for name, value in flags.items()]

    def run(index):
        cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(cluster)} if count > 1 else {}
        own_cores = ",".join(map(str, [cores[index]] if is_pinned else cores[:2]))
        command = ["taskset", "--cpu-list", own_cores, sys.executable, "-m", "bert_tf.pretrain"]
        own_process.run(*command, *words, environment=environment)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))
    lines = map(json.loads, (flags["output_dir"] / "metrics.jsonl").read_text().splitlines())
    return [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:]


def shards(options, measured):
    """Measure commands on many shards."""
    count, letters = 1000 if options.quick else 10_000, "abcdefghijklmnopqrstuvwxyz "
    with tempfile.TemporaryDirectory() as directory:
        rng = random.Random(0)
        with open(f"{directory}/text.txt", "w") as stream:
            for _ in range(count * DOCUMENTS_PER_SHARD):
                sentences = ("".join(rng.choices(letters, k=40)) for _ in range(6))
                stream.write("\n".join(sentences) + "\n\n")
        write = [f"--input={directory}/text.txt", f"--vocab={minilm()}/vocab.txt"]
        write += [f"--output_dir={directory}/shards", f"--num_shards={count}"]
        write += ["--max_seq_length=64", "--max_predictions_per_seq=10"]
        read = [f"--shards={directory}/shards"]
        pretrain = [*read, f"--output_dir={directory}/run", "--model_size=tiny"]
        pretrain += ["--global_batch_size=32", "--num_train_steps=1", "--log_every=1"]
        for workload, module, flags in (
            ("write", "bert_tf.write_shards", write),
            ("rerun when all are there", "bert_tf.write_shards", write),
            ("inspect", "bert_tf.inspect_shards", read),
            ("pretrain one step of a toy model", "bert_tf.pretrain", pretrain),
        ):
            seconds, peak = own_process.run(sys.executable, "-m", module, *flags)
            workload = f"{count:,} shards: {workload}"
            measured.add("Shards", workload, "bert_tf", "s", [seconds])
            measured.add("Shards", workload, "bert_tf", "MB", [peak])


if __name__ == "__main__":
    main()
