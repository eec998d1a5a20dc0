"""The snippets of the pages about Python and of README.md, run in order with a tiny model."""

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys

import pytest
import tensorflow as tf

import bert_tf
import export
import tasks
from tests import small
from tests.bert_tf.test_head_weights import MASKED_LM, add_heads
from tests.conftest import ROOT
from tests.small import TEXTS
from tests.test_docs import command_lines, read

MAX_LINES = 170
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def snippets(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def namespace(tmp_path, config, vocabulary, mirrored, monkeypatch):
    """Return the names that the page assumes, in a directory with train.csv and dev.csv."""
    monkeypatch.chdir(tmp_path)
    # Strategies of one process share the keys of their reductions.
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: mirrored)
    config = dataclasses.replace(config, max_position_embeddings=384)
    path = small.write_huggingface(tmp_path / "weights", config, vocabulary)
    add_heads(path, config, MASKED_LM)
    small.write_complaints(tmp_path)
    return {
        "PATH": str(path),
        "texts": [text for texts in TEXTS.values() for text in texts],
        "labels": [label for label, texts in TEXTS.items() for _ in texts],
    }


def run(found, namespace):
    for number, source in enumerate(found):
        exec(compile(source, f"<snippet {number}>", "exec"), namespace)


def test_the_page_is_short_and_its_snippets_are_complete():
    found = snippets(PAGE)
    assert len(PAGE.splitlines()) <= MAX_LINES
    assert len(found) == PAGE.count("```") / 2 == 10
    assert not [source for source in found if re.search(r"\.\.\.", re.sub(r"#.*", "", source))]


@pytest.mark.slow
def test_the_first_snippets_run(namespace):
    run(snippets(PAGE)[:2], namespace)
    assert namespace["model"].predict_rows(["a"])[0]["label"] in TEXTS


@pytest.mark.slow
def test_all_snippets_run(namespace, tmp_path):
    run(snippets(PAGE), namespace)
    assert namespace["other"].output_shape == (None, 3)
    assert (tmp_path / "MODELS" / "complaints" / "1" / "saved_model.pb").exists()


@pytest.mark.slow
def test_the_snippets_of_fit_or_train_run(namespace, tmp_path):
    run(snippets(read("docs/fit-or-train.md")), namespace)
    assert (tmp_path / "RUN" / "checkpoints").is_dir()


@pytest.mark.medium
def test_the_snippets_of_labels_run(namespace):
    run(snippets(read("docs/labels.md")), namespace)


@pytest.mark.slow
def test_the_snippets_of_large_data_run(namespace):
    run(snippets(read("docs/large-data.md")), namespace)
    assert not namespace["model"].has_new_head


@pytest.mark.medium
def test_the_snippet_of_few_rows_runs(namespace):
    run(snippets(read("docs/few-rows.md")), namespace)
    assert {*namespace["classifier"].classes_} == {*TEXTS}


@pytest.mark.medium
def test_the_snippet_of_anomaly_detection_runs(namespace):
    (source,) = snippets(read("docs/tasks/anomaly-detection.md"))
    run([source], namespace)
    assert namespace["model"].task.threshold > 0


@pytest.mark.medium
def test_the_snippet_of_domain_adaptation_runs(namespace):
    run(snippets(read("docs/domain-adaptation.md")), namespace)
    assert namespace["model"].record["origin"].startswith("run ADAPTED/")


def test_the_snippet_of_data_formats_unescapes_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small.write_rows(tmp_path / "raw.csv", [("AT&amp;T, &quot;new&quot;", "a&amp;b")])
    (source,) = (part for part in snippets(read("docs/data-formats.md")) if "html" in part)
    run([source], {})
    rows = tasks.data.readers.rows.read_texts(tmp_path / "train.csv")
    assert [(row.texts["text"], row.label) for row in rows] == [('AT&T, "new"', "a&amp;b")]


OWN_HEAD = snippets(read("docs/own-head.md"))


def test_the_task_type_of_the_page_is_the_tested_one():
    """tests/tasks/test_new_task_type.py tests it in all ways."""
    (module,) = (source for source in OWN_HEAD if "class RatingTask" in source)
    tested = (ROOT / "tests" / "rating_task.py").read_text(encoding="utf-8")
    assert module.replace('("rating")', '("tests")').strip() == tested.split('"""')[2].strip()


@pytest.mark.slow
def test_the_head_of_keras_runs(namespace):
    run([source for source in OWN_HEAD if "rating" not in source], namespace)
    own = namespace["own"]
    assert set(own.output) == {"topic", "urgency"}
    assert any("pooler/kernel" in variable.path for variable in own.trainable_variables)


@pytest.mark.slow
def test_the_commands_of_the_task_type_run(namespace, tmp_path):
    module, usage, program = (source for source in OWN_HEAD if "rating" in source)
    (tmp_path / "rating.py").write_text(module)
    (tmp_path / "rating_tf.py").write_text(program)
    (tmp_path / "usage.py").write_text(f"PATH = {namespace['PATH']!r}\n{usage}")
    rows = [("Never again.", 1), ("Very good.", 5)]
    small.write_rows(tmp_path / "train.csv", rows)
    small.write_rows(tmp_path / "dev.csv", [("Very bad.", 1)])
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in ("python usage.py", *command_lines(read("docs/own-head.md"))):
        line = line.replace("PATH", namespace["PATH"]).replace("bert-tf", "python -m bert_tf")
        done = subprocess.run(
            [sys.executable, *shlex.split(line)[1:]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert '"stars"' in done.stdout


@pytest.mark.slow
def test_the_examples_of_the_reference_run(namespace, vocabulary, tmp_path):
    vocabulary.save(tmp_path / "vocab.txt")
    public = {
        name: getattr(package, name)
        for package in (bert_tf, tasks, export)
        for name in package.__all__
    }
    namespace |= {"tf": tf, **public}
    examples = {
        name: example[1].replace("\n    ", "\n").strip()
        for name, value in public.items()
        if (example := re.search(r"\n\n((?:    .+\n)+)", inspect.getdoc(value) or ""))
    }
    model = namespace["TextClassifier"].from_pretrained(namespace["PATH"], labels=["a", "b"])
    for name in ("RUN", "ProsusAI/finbert"):  # A path that exists is no id of the hub.
        model.save_run(name)
    run(examples.values(), namespace)
    assert {"TextEmbedder", "Encoder", "Tokenizer", "load_model", "publish"} <= {*examples}


@pytest.mark.slow
def test_the_snippet_of_the_readme_runs(namespace, tmp_path):
    (source,) = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "sentence-transformers").mkdir()  # A path that exists is no id of the hub.
    (tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2").symlink_to(namespace["PATH"])
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "complaints").symlink_to(tmp_path)
    run([source], namespace)
