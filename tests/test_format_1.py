"""Files of format version 1, as written when the format was fixed: read with equal results.

The flags of the run are in tests/format_1/expected.json. It was stopped at step 6 of 8, and has
the checkpoint of step 4. model.keras is the resumed model. tasks.json has the task.json of each
task type, and manifest.json is that of two shards.
"""

import json
import shutil

import keras
import numpy as np
import pytest

from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.storage import format_versions
from bert_tf.system import command
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.distribution import make_strategy
from tasks.base.task import task_from_dict
from tasks.base.task_types import TASK_TYPES
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.model.loading import load_model
from tests.conftest import ROOT

FORMAT_1 = ROOT / "tests" / "format_1"
EXPECTED = json.loads((FORMAT_1 / "expected.json").read_text())
RECORDS = json.loads((FORMAT_1 / "tasks.json").read_text())


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    """Make a copy the working directory, because the flags of the run have relative paths."""
    shutil.copytree(FORMAT_1, tmp_path / "format_1")
    monkeypatch.chdir(tmp_path / "format_1")


def evaluate():
    model = load_model("run")
    examples = model.task.load_examples("data/labels.dev.csv")
    encoded = EncodedExamples.encode(examples, model.serving.pipeline, to_flat)
    return Evaluator(model.task, model.network, make_strategy("none")).metrics(encoded)


@pytest.mark.medium
def test_a_run_is_evaluated_and_resumed_as_before(working_directory):
    assert evaluate() == pytest.approx(EXPECTED["interrupted"], rel=1e-4, abs=1e-5)
    settings, _ = command.parse(
        FinetuneSettings, ["command", *EXPECTED["flags"], "--output_dir=run"]
    )
    finetune(settings)
    assert evaluate() == pytest.approx(EXPECTED["resumed"], rel=1e-3, abs=1e-4)


@pytest.mark.medium
def test_a_keras_file_predicts_as_before():
    model = keras.saving.load_model(FORMAT_1 / "model.keras")
    probabilities = model.predict(EXPECTED["texts"], verbose=0)["probabilities"]
    np.testing.assert_allclose(probabilities, EXPECTED["probabilities"], rtol=1e-4, atol=1e-5)


def test_there_is_a_record_of_every_task_type():
    assert [record["kind"] for record in RECORDS] == list(TASK_TYPES)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["kind"])
def test_the_task_of_a_record_has_its_values_and_defaults_for_newer_fields(record):
    values = format_versions.without_version(record, "task.json")
    read = json.loads(json.dumps(task_from_dict(values).to_dict()))
    values = {name: value for name, value in values.items() if name not in format_versions.REMOVED}
    assert read.items() >= values.items()


def test_a_removed_field_that_was_used_is_refused():
    with pytest.raises(UserError, match="task.json: unknown field .*unescape_html; expected"):
        task_from_dict({**RECORDS[0], "unescape_html": True})
    with pytest.raises(UserError, match="created with --unescape_html=True, which this version"):
        format_versions.check_same_settings("run", {"unescape_html": True}, {}, {})


def test_a_manifest_has_the_plan_as_before():
    manifest = Manifest.load(FORMAT_1)
    assert manifest.plan_sha256 == EXPECTED["plan_sha256"]
    assert manifest.settings["max_seq_length"] == 16
