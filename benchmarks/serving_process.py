"""Process of one backend of benchmarks/serving.py. It imports no framework.

It is started as `python SCRIPT PLAN`, a JSON file with {"backend", "model", "precision", "texts",
"lengths" (in tokens), "batches", "output", "started" (Unix time), "result" (the file to write)}.
"output" is "predictions", the probabilities of all texts, or "times".
"""

import importlib
import json
import pathlib
import resource
import sys
import time

import numpy as np

THREADS = 2
MAX_LENGTH = 512  # Tokens per text, at most.
WARM_UP, NEW_LENGTHS = 8, 5


def work(plan, modules, load):
    """Load a model, run the plan and write the result.

    Args:
        plan: The plan of this process.
        modules: Names of the modules to import first. A server in another language has no imports.
        load: Function of model path and precision, which returns a function from strings to
            probabilities `(B, C)`.
    """
    for name in modules:
        importlib.import_module(name)
    imported = time.time()
    prediction = load(plan["model"], plan["precision"])
    loaded = time.time()
    if plan["output"] == "predictions":
        result = _predictions(prediction, plan)
    else:
        prediction(plan["texts"][:1])
        answered = time.time()
        start_up = {
            "imports_s": imported - plan["started"],
            "load_s": loaded - imported,
            "first_answer_s": answered - loaded,
            "cold_start_s": answered - plan["started"],
        }
        result = _times(prediction, plan)
        result["process"] = {**start_up, **result["process"]}
    pathlib.Path(plan["result"]).write_text(json.dumps(result), encoding="utf-8")


def plan_of_this_process():
    """Return the plan whose file is the first argument."""
    return json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))


def requests_of(texts, batch):
    """Split texts into requests of `batch` texts."""
    return [texts[start : start + batch] for start in range(0, len(texts), batch)]


def _predictions(prediction, plan):
    return [row for texts in requests_of(plan["texts"], 4) for row in prediction(texts).tolist()]


def _times(prediction, plan):
    texts, lengths = plan["texts"], plan["lengths"]
    _timed(prediction, requests_of(texts[:WARM_UP], 1))
    seen, new = set(lengths[:WARM_UP]), []
    for text, length in zip(texts, lengths, strict=True):
        if length not in seen and len(new) < NEW_LENGTHS:
            seen.add(length)
            new.append([text])
    # The difference between the two times is the cost of a new length.
    new_length, again = (np.median(_timed(prediction, new)) for _ in range(2))

    passes = []
    for batch in plan["batches"]:
        requests = requests_of(texts, batch)
        _timed(prediction, requests)  # A running server has seen the shapes before.
        seconds = np.array(_timed(prediction, requests))
        passes.append(
            {
                "batch": batch,
                "texts_per_second": len(texts) / seconds.sum(),
                "p50_ms": 1000 * np.percentile(seconds, 50),
                "p99_ms": 1000 * np.percentile(seconds, 99),
            }
        )
    process = {
        "new_length_ms": 1000 * new_length,
        "again_ms": 1000 * again,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return {"process": process, "passes": passes}


def _timed(prediction, requests):
    """Return the seconds of each request, sent one after the other."""
    seconds = []
    for texts in requests:
        start = time.perf_counter()
        prediction(texts)
        seconds.append(time.perf_counter() - start)
    return seconds
