"""Models that return NaN or infinite numbers: an error per row, counted, and never JSON."""

import json
import math
import re
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.storage import strict_json
from bert_tf.system import command
from bert_tf.weights.sources import read_pretrained
from export import request
from tasks import evaluate, predict
from tasks.data.readers.rows import BadRow
from tasks.prediction.outputs import EmbedderSettings, VectorJob, outputs_of_rows
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.regression import RegressionTask
from tasks.types.tagging import TaggingTask
from tests import small

NOT_FINITE = re.escape(strict_json.NOT_FINITE)
TASKS = {
    "classification": ClassificationTask(labels=("a", "b", "c"), max_seq_length=12),
    "regression": RegressionTask(max_seq_length=12),
    "tagging": TaggingTask(labels=("O", "B-X", "I-X"), max_seq_length=8, doc_stride=3),
    "span_qa": QuestionAnsweringTask(max_seq_length=12, max_query_length=4, doc_stride=3),
    "multiple_choice": MultipleChoiceTask(max_seq_length=12),
}
ROW = {
    "text": "the bill",
    "question": "my bill",
    "context": "the bill is high",
    "prompt": "my app",
    "choices": ["the bill", "a b"],
}


def diverged(directory, huggingface_dir, task):
    """Write a run whose encoder returns numbers that are not finite."""
    pretrained = read_pretrained(huggingface_dir)
    model = task.build_model(pretrained.config)
    pretrained.assign_to(model)
    gamma = model.encoder.transformer[-1].output_norm.gamma
    gamma.assign(tf.fill(gamma.shape, np.finfo(np.float32).max))
    return small.trained(directory, pretrained, task, model)


@pytest.mark.medium
@pytest.mark.parametrize("kind", TASKS)
def test_a_diverged_model_returns_nothing_but_errors(kind, huggingface_dir, tmp_path):
    model = diverged(tmp_path / "run", huggingface_dir, TASKS[kind])
    columns = {name: [ROW[name], ROW[name]] for name in model.task.input_names}
    rows = [types.SimpleNamespace(location=f"x:{number}") for number in (1, 2)]
    ((first, second),) = outputs_of_rows(rows, lambda _: model.predict_rows(columns), 8)
    assert first == (rows[0], BadRow("x:1", strict_json.NOT_FINITE))
    assert second[1].location == "x:2"


@pytest.mark.medium
def test_an_error_names_the_row_and_is_counted(huggingface_dir, tmp_path, capsys):
    diverged(tmp_path / "run", huggingface_dir, TASKS["classification"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the bill"}\n{"words": 1}\n{"text": "a b"}\n')
    output = tmp_path / "out.jsonl"
    run(predict, predict.PredictSettings, run=tmp_path / "run", input=rows, output=output)
    errors = [json.loads(line)["error"] for line in output.read_text().splitlines()]
    for number in (0, 2):
        assert errors[number] == f"{rows}:{number + 1}: {strict_json.NOT_FINITE}"
    assert "3 rows, 3 of them bad, with an error instead" in capsys.readouterr().err
    with pytest.raises(UserError, match=rf"{tmp_path}/run: {NOT_FINITE}"):
        run(predict, predict.PredictSettings, run=tmp_path / "run", text="the bill")
    data = small.write_rows(tmp_path / "dev.csv", [("the bill", "a"), ("a b", "b")])
    with pytest.raises(UserError, match="received 6 of 6 that are NaN or infinite"):
        run(evaluate, evaluate.EvaluateSettings, run=tmp_path / "run", data=data)
    captured = capsys.readouterr()
    assert "not finite for 2 of 2 samples, the first of them of row 0" in captured.err
    assert "NaN" not in captured.out


@pytest.mark.medium
def test_vectors_are_errors_in_jsonl_and_never_written_to_npy(huggingface_dir, tmp_path, capsys):
    pretrained = read_pretrained(huggingface_dir)
    *_, gamma = (name for name in pretrained.weights if name.endswith("gamma"))
    pretrained.weights[gamma] = np.full_like(pretrained.weights[gamma], np.inf)
    embedder = EmbedderSettings(max_seq_length=12).create_embedder(pretrained)
    rows = small.write_rows(tmp_path / "rows.csv", [("the bill", "")])
    for per_token in (False, True):
        job = VectorJob(model="", batch_size=8, file_format="npy", per_token=per_token)
        assert job.extract(embedder, rows, tmp_path / "out.jsonl", list) == (1, 1)
        assert "NaN" not in (tmp_path / "out.jsonl").read_text()
    with pytest.raises(UserError, match=rf"{rows}:2: {NOT_FINITE}"):
        VectorJob(model="", batch_size=8, file_format="npy").extract(
            embedder, rows, tmp_path / "out.npy", list
        )
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("value", [{"a": [1, [float("nan")]]}, [-np.inf], {"b": float("inf")}])
def test_results_that_are_not_finite_are_refused(value):
    with pytest.raises(UserError, match=f"^subject: {NOT_FINITE}"):
        strict_json.dumps_result(value, "subject")
    assert (
        strict_json.dumps_result([1, 2.5, "NaN", None, True], "x") == '[1, 2.5, "NaN", null, true]'
    )


def test_a_response_of_a_server_is_checked(monkeypatch, capsys):
    client = types.SimpleNamespace(predict=lambda inputs, signature: {"score": [1.0, math.nan]})
    monkeypatch.setattr(request, "opened", lambda settings: client)
    with pytest.raises(UserError, match=f"--signature=serving_default: {NOT_FINITE}"):
        run(request, request.RequestSettings, input="text=a", url="http://h:1/v1/models/m")
    assert capsys.readouterr().out == ""


def run(module, settings_class, **flags):
    """Run the main function of a command."""
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    module.main(command.parse(settings_class, ["command", *arguments])[0])
