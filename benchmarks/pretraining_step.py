"""Compare a pretraining step with keras-hub and PyTorch, and with the complete loop.

    python benchmarks/pretraining_step.py --data=DIR --baselines=PYTHON --precision=float32,bfloat16

The step has masked LM and next sentence prediction with 6 layers, hidden size 512, 30,522
vocabulary entries, 16 examples of 128 tokens without padding, 20 predictions per example, dropout
0.1, AdamW, clipping by the global norm and two threads. The backends alternate, each in a separate
process, --rounds times:

    ours_flat, ours_padded    the train step on one repeated batch, in each layout
    ours_loop                 bert_tf.pretrain on shards of DIR's books, with reading, log lines,
                              metrics, and the default of one checkpoint per 1,000 steps
    keras_hub, keras_hub_jit  BertMaskedLM with fit(), without and with XLA; it has no next sentence
                              prediction, which is a negligible part of a step
    torch, torch_compiled     transformers' BERT in PYTHON's environment, eager and torch.compile

Backends that need a missing DIR or PYTHON are skipped. Prints a Markdown table; --output=DIRECTORY
keeps one JSON line per measurement in pretraining_step.jsonl.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import tempfile

import own_process
from pretraining_batch import Sizes

from bert_tf.data.settings import WriteShardsSettings
from bert_tf.data.writing import write_shards

TENSORFLOW, TORCH = "pretraining_step_tensorflow", "pretraining_step_torch.measure"
BACKENDS = {
    "ours_flat": (f"{TENSORFLOW}.bare", {"layout": "flat"}),
    "ours_padded": (f"{TENSORFLOW}.bare", {"layout": "padded"}),
    "ours_loop": (f"{TENSORFLOW}.loop", {}),
    "keras_hub": (f"{TENSORFLOW}.keras_hub_fit", {"jit": False}),
    "keras_hub_jit": (f"{TENSORFLOW}.keras_hub_fit", {"jit": True}),
    "torch": (TORCH, {"compiled": False}),
    "torch_compiled": (TORCH, {"compiled": True}),
}
TEXT_BYTES = 4_000_000


def shards_of(data, directory, sizes):
    """Write shards of the first books and return their directory.

    Each word is a sentence: since examples are filled with sentences, they have no padding then,
    like the fixed batch.
    """
    with open(data / "text" / "books.txt", encoding="utf-8") as lines:
        text = lines.read(TEXT_BYTES)
    words = "\n\n".join("\n".join(document.split()) for document in text.split("\n\n"))
    (directory / "words.txt").write_text(words, encoding="utf-8")
    settings = WriteShardsSettings(
        input=(str(directory / "words.txt"),),
        vocab=str(data / "vocab" / "uncased" / "vocab.txt"),
        output_dir=str(directory / "shards"),
        num_shards=8,
        max_seq_length=sizes.length,
        max_predictions_per_seq=sizes.predictions,
        short_seq_prob=0.0,
    )
    write_shards(settings)
    return settings.output_dir


def measure(backend, precision, steps, shards, baselines):
    """Measure a backend in a separate process."""
    function, arguments = BACKENDS[backend]
    arguments = {**arguments, "sizes": dataclasses.asdict(Sizes())}
    if backend == "ours_loop":
        arguments["shards"] = shards
    if function == TORCH:
        arguments["python"] = baselines
    return own_process.call(function, precision=precision, steps=steps, **arguments)


def table(records):
    """Return a Markdown table of the median of the rounds, and of the time per token (ours = 1)."""
    times = {}
    for record in records:
        metrics = times.setdefault((record["precision"], record["backend"]), [])
        metrics.append((record["median_ms"], record["tokens_a_step"], record["peak_mb"]))
    lines = ["| precision | backend | ms per step | rounds | tokens/s | peak MB | time, ours = 1 |"]
    lines.append("|---|---|---|---|---|---|---|")
    microseconds = {
        key: statistics.median(1000 * ms / tokens for ms, tokens, _ in rounds)
        for key, rounds in times.items()
    }
    for (precision, backend), rounds in times.items():
        ours, own = microseconds.get((precision, "ours_flat")), microseconds[precision, backend]
        cells = (
            precision,
            backend,
            f"{statistics.median(ms for ms, _, _ in rounds):.0f}",
            ", ".join(f"{ms:.0f}" for ms, _, _ in rounds),
            f"{1e6 / own:,.0f}",
            f"{max(peak for _, _, peak in rounds):,}",
            f"{own / ours:.2f}" if ours else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument("--baselines", help="Python interpreter with torch and transformers")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    backends = options.backends.split(",")
    if unknown := sorted(set(backends) - set(BACKENDS)):
        parser.error(f"--backends={','.join(unknown)}: expected some of {', '.join(BACKENDS)}")
    if not options.data and "ours_loop" in backends:
        backends.remove("ours_loop")
        print("ours_loop skipped: --data is not set")
    if not options.baselines:
        backends = [backend for backend in backends if BACKENDS[backend][0] != TORCH]
        print("torch, torch_compiled skipped: --baselines is not set")

    records = []
    with tempfile.TemporaryDirectory() as directory:
        shards = None
        if "ours_loop" in backends:
            shards = shards_of(options.data, pathlib.Path(directory), Sizes())
        for number in range(options.rounds):
            for precision in options.precision.split(","):
                for backend in tuple(backends):
                    try:
                        metrics = measure(
                            backend, precision, options.steps, shards, options.baselines
                        )
                    except own_process.Failed as failure:
                        print(f"{backend} skipped from now on: {failure}", flush=True)
                        backends.remove(backend)
                        continue
                    record = {
                        "backend": backend,
                        "precision": precision,
                        "round": number,
                        **metrics,
                    }
                    print(record, flush=True)
                    records.append(record)
                    if options.output:
                        own_process.append(options.output / "pretraining_step.jsonl", record)
    print(table(records))


if __name__ == "__main__":
    main()
