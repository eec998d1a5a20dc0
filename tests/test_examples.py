"""The notebook and the scripts under examples/."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_notebook_fine_tunes_with_fit_plots_exports_and_predicts(pretrained_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "finetune_with_fit.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    client.execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert "models/complaints/1\n" in printed
    answers = printed.strip().splitlines()[-3:]
    assert [line.split()[0] for line in answers] == ["hardware", "software", "billing"]


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
