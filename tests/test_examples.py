"""The notebooks and the scripts under examples/."""

import os
import pathlib
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOKS = sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb"))
# What each notebook shows: expressions that its printed output has to contain when it is executed.
SHOWN = {
    "finetune_with_fit": [
        r"^models/complaints/1$",
        r"^hardware .* led is not working(.|\n)*^software .*(.|\n)*^billing ",
    ],
    "named_entities": [r"'Greta Lindqvist \(PERSON\)', 'Madrid \(PLACE\)'", r"^\[\] The weather"],
    "question_answering": [r"[1-9]\d windows of 128 tokens", r"(\[right\](.|\n)*){3}"],
    "rare_classes": [r"tuned on dev: threshold 0\.\d", r"^network .* Open a connection"],
    "semantic_search": [
        r"^keep only the best checkpoint\n .*[Cc]heckpoint",
        r"^as it is: recall@1 0\.2\d+, recall@10 0\.6",
        r"^trained: recall@1 0\.3\d+, recall@10 0\.7",
        r"^hard negatives: recall@1 0\.3\d+, recall@10 0\.7",
        r"^reranked: recall@1 0\.[34]\d+, recall@10 0\.7",
    ],
    "inside_bert": [r"30,522 tokens, 6 layers", r"^telephone "],
    "pretrain_and_fill_masks": [r"step 1500/1500", r"mask 2: \S+ 0\.\d\d"],
    "domain_adaptation": [r"words added", r"seed 1: accuracy 0\.\d+ without, 0\.\d+ with"],
    "export_and_serve": [r"^1/saved_model\.pb$", r"'label': \[b'hardware'\]", r"\['1', '2'\]"],
}
PLOTS = set(NOTEBOOKS) - {"named_entities", "question_answering", "export_and_serve"}
PLOTS -= {"domain_adaptation"}


def read(name):
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


def outputs_of(notebook):
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def printed(notebook):
    return "\n".join(
        out.text if out.output_type == "stream" else out.get("data", {}).get("text/plain", "")
        for out in outputs_of(notebook)
    )


def assert_shown(name, notebook):
    for pattern in SHOWN[name]:
        assert re.search(pattern, printed(notebook), re.MULTILINE), (pattern, printed(notebook))
    has_image = any("image/png" in out.get("data", {}) for out in outputs_of(notebook))
    assert has_image == (name in PLOTS)


def test_all_notebooks_are_listed_and_checked():
    listed = re.findall(r"\((\w+)\.ipynb\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == NOTEBOOKS == sorted(SHOWN)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_saved_with_its_output(name):
    notebook = read(name)
    assert notebook.cells[0].source.startswith("# ")
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [out for out in outputs_of(notebook) if out.output_type == "error"]
    assert not [out for out in outputs_of(notebook) if out.get("name") == "stderr"]
    assert not re.search(r"(^|[\s=])/\w+/|Traceback", printed(notebook))
    assert_shown(name, notebook)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, pretrained_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Jupyter runs commands in a terminal, where they would show a bar instead of lines.
    monkeypatch.setenv("TQDM_DISABLE", "1")
    # Its commands are those of the interpreter of this test.
    folder = pathlib.Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    notebook = read(name)
    resources = {"metadata": {"path": str(ROOT / "examples")}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    assert_shown(name, notebook)


@pytest.mark.slow
def test_the_demo_answers_its_three_questions(pretrained_dir, run_command):
    done = run_command("examples.demo")
    assert done.returncode == 0, done.stderr
    answers = [
        line.split()[0]
        for line in done.stdout.splitlines()
        if line.endswith(("nothing.", "why is that?"))
    ]
    assert answers == ["hardware", "software", "billing"]
    learned, always = re.findall(r"([\d.]+)%", done.stdout.split("Accuracy on masked")[1])[:2]
    assert float(learned) > 2 * float(always) > 0
