"""Rare classes: complete runs with and without the options."""

import json

import numpy as np
import pytest

from tasks import evaluate
from tasks.finetuning.recipe import finetune
from tests import small


def imbalanced(path):
    """Write 60 rows of one label and 4 of another, which differ in one word."""
    fillers = ("the app", "my app", "the bill", "my bill", "the cafe", "my cafe")
    rows = [
        (f"{fillers[number % 6]} is {'too ' * (number % 3)}high", "ordinary")
        for number in range(60)
    ]
    rows += [(f"{text} is {how}broken", "rare") for text in fillers[:2] for how in ("", "too ")]
    return small.write_rows(path, rows)


@pytest.mark.slow
def test_the_options_find_a_rare_class_that_training_misses(huggingface_dir, tmp_path, capsys):
    path = imbalanced(tmp_path / "rows.csv")
    changes = {"epochs": 2, "learning_rate": 2e-3, "global_batch_size": 16, "log_every": 100}
    files, said = {"train": path, "dev": small.same_rows(path)}, []
    plain = finetune(
        small.settings(huggingface_dir, files, tmp_path / "plain", **changes), said.append
    )
    before = plain.checkpoints.info(plain.checkpoints.best_step())["metrics"]
    assert (before["dev_degenerate"], before["dev_f1"]) == (1.0, 0.0)
    assert [
        line for line in said if line.startswith("warning: every row has the same predicted label")
    ]

    changes |= {"balanced_sampling": True, "focal_gamma": 1.0, "rare_label": "rare"}
    kit = finetune(small.settings(huggingface_dir, files, tmp_path / "kit", **changes))
    report, logged = evaluated(kit, path, capsys)
    assert report["degenerate"] == 0.0 and report["f1"] > 0.5 and "warning" not in logged
    assert report["labels"] == ["ordinary", "rare"] and np.sum(report["confusion_matrix"]) == 64
    assert report["f1"] == kit.metrics()[-1]["tuned_dev_f1"]
    report, logged = evaluated(plain, path, capsys)
    assert "warning: every row has the same predicted label" in logged
    assert report["confusion_matrix"] == [[60, 0], [4, 0]]


def evaluated(run, path, capsys):
    """Return the report and the log lines of tasks.evaluate."""
    capsys.readouterr()
    evaluate.main(evaluate.EvaluateSettings(run.path, str(path)))
    printed = capsys.readouterr()
    return json.loads(printed.out.splitlines()[-1]), printed.err
