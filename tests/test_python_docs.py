"""The snippets of docs/python.md and README.md, run in order with a tiny model."""

import dataclasses
import re

import pytest
import tensorflow as tf

from tests import small
from tests.bert_tf.test_head_weights import MASKED_LM, add_heads
from tests.conftest import ROOT
from tests.small import TEXTS

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
def test_the_snippet_of_the_readme_runs(namespace, tmp_path):
    (source,) = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    namespace["WEIGHTS"] = namespace["PATH"]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "complaints").symlink_to(tmp_path)
    run([source], namespace)
