"""A task type is added by one module, tests/rating_task.py, and one line in the registry."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bert_tf import UserError
from tasks import load_model, read_examples
from tasks.base import task_types
from tests import small
from tests.conftest import ROOT

LINE = task_types.TaskType("tests.rating_task:RatingTask")
TEXTS = ["my bill is too high !", "the screen is broken", "the app does not open", "the bill is a"]
STARS = [1, 2, 2, 5]


@pytest.fixture
def rating(monkeypatch):
    """Return the module of the task type, which is registered."""
    monkeypatch.setitem(task_types.TASK_TYPES, "rating", LINE)
    from tests import rating_task

    return rating_task


@pytest.mark.medium
def test_it_is_fitted_evaluated_saved_and_loaded(rating, huggingface_dir, tmp_path):
    path = small.write_rows(tmp_path / "rows.csv", list(zip(TEXTS, STARS, strict=True)))
    rows = read_examples(path, "rating")
    assert rows.y == STARS
    model = rating.TextRater.from_pretrained(huggingface_dir, max_seq_length=12)
    model.fit(rows, epochs=2, validation_data=(TEXTS[:2], STARS[:2]), verbose=0)
    metrics = model.evaluate(rows)
    assert set(metrics) == {"accuracy", "loss"}
    stars = model.predict(TEXTS)["stars"]
    assert stars.dtype == np.int32 and set(stars) <= {1, 2, 3, 4, 5}
    assert metrics["accuracy"] == np.mean(stars == STARS)
    with pytest.raises(UserError, match=r"y\[1\]: label '6': expected 1 to 5"):
        model.fit(TEXTS[:2], [1, 6])
    model.save(tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    assert type(loaded) is rating.TextRater
    assert loaded.predict_rows(TEXTS) == model.predict_rows(TEXTS)


@pytest.mark.slow
def test_it_is_saved_as_a_run(rating, huggingface_dir, tmp_path):
    model = rating.TextRater.from_pretrained(huggingface_dir, max_seq_length=12)
    model.save_run(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert type(loaded) is rating.TextRater
    assert loaded.predict_rows(TEXTS) == model.predict_rows(TEXTS)


SCRIPT = """
import json, sys
from tasks.base import task_types
task_types.TASK_TYPES["rating"] = task_types.TaskType("tests.rating_task:RatingTask")
from bert_tf.system import command
{imports}
sys.argv = {argv}
command.run_main({main}, {settings}, "A test.")
"""


@pytest.mark.slow
def test_all_commands_have_it(huggingface_dir, tmp_path):
    data = small.write_rows(tmp_path / "rows.csv", list(zip(TEXTS, STARS, strict=True)))
    dev = small.write_rows(tmp_path / "dev.csv", [(TEXTS[0], 2), (TEXTS[3], 4)])

    def run(module, settings, **flags):
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        script = SCRIPT.format(
            imports=f"import {module} as module",
            argv=["test", *arguments],
            main="module.main",
            settings=f"module.{settings}",
        )
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(
        "tasks.finetune",
        "FinetuneSettings",
        task="rating",
        train=data,
        dev=dev,
        init_from=huggingface_dir,
        output_dir=tmp_path / "run",
        epochs=1,
        max_seq_length=12,
    )
    of_run = {"run": tmp_path / "run"}
    report = json.loads(run("tasks.evaluate", "EvaluateSettings", **of_run, data=dev))
    assert 0 <= report["accuracy"] <= 1
    output = tmp_path / "predictions.jsonl"
    run("tasks.predict", "PredictSettings", **of_run, input=data, output=output)
    predictions = [json.loads(line) for line in output.read_text().splitlines()]
    assert [set(row) for row in predictions] == [{"stars", "score"}] * len(TEXTS)
    # Its worker process does not register the type.
    shards = {"output_dir": tmp_path / "shards", "num_shards": 1, "num_workers": 1}
    run("tasks.predict", "PredictSettings", **of_run, input=data, **shards)
    (shard,) = (tmp_path / "shards").glob("predictions-*.jsonl")
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    assert [set(row) for row in rows] == [{"row", "stars", "score"}] * len(TEXTS)
    models = tmp_path / "models"
    run("export.export_saved_model", "ExportSettings", **of_run, output_dir=models)
    assert "rating: Predicts the rating of a text." in (models / "1/MODEL_CARD.md").read_text()
    assert (
        "| `stars` | int32 | [B] | rating, from 1 to 5 |"
        in (models / "1/SIGNATURES.md").read_text()
    )
