"""Shards of predictions and vectors: equal to --output, of runs and of published models."""

import json
import pathlib

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.data import jobs
from bert_tf.system import command
from bert_tf.weights.sources import read_pretrained
from export.graph.saved_model import write_saved_model
from tasks import extract
from tasks.base.task import task_from_dict
from tasks.graph.published import published_task, published_version
from tasks.model.loading import load_model
from tasks.predict import PredictSettings
from tasks.prediction.outputs import EmbedderSettings, PredictionJob, VectorJob, predict
from tasks.types.similarity.text_embedder import SimilarityTask, TextEmbedder
from tasks.types.tagging import TaggingTask
from tests import small
from tests.corpus import run_here

pytestmark = pytest.mark.medium
TEXTS = ["the bill is too high", "my screen , broken", "app", "", "a b c ! the the the the the"]
ENTITIES = ("O", "B-X", "I-X")


@pytest.fixture(scope="module")
def models(tmp_path_factory, config, vocabulary):
    """Write a tagging run, its SavedModel as version 2, and rows of which one is bad."""
    directory = tmp_path_factory.mktemp("models")
    small.write_huggingface(directory / "bert", config, vocabulary)
    pretrained = read_pretrained(directory / "bert")
    task = TaggingTask(labels=ENTITIES, max_seq_length=8, doc_stride=3)
    trained = small.trained(
        directory / "run", pretrained, task, task.build_model(pretrained.config)
    )
    (directory / "models" / "2").parent.mkdir()
    write_saved_model(trained, directory / "models" / "2")
    (directory / "models" / "10").mkdir()  # Not a version, since it has no graph.
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines.insert(2, '{"words": 1}')
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def rows_of(job, directory, path):
    """Write one shard of all rows in this process and return its rows."""
    directory.mkdir(exist_ok=True)
    shard = directory / f"shard.{job.file_format}"
    count = sum(1 for _ in job.rows(str(path)))
    entry = job.open()(0, str(shard), [(str(path), 0, count)])
    assert entry["rows"] == count
    if job.file_format == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        return parquet.read_table(shard).to_pylist()
    return [json.loads(line) for line in shard.open()]


def job_of(models, **changes):
    values = {"batch_size": 2, "file_format": "jsonl", **changes}
    task = json.loads((models / "run" / "task.json").read_text())
    checkpoint = next((models / "run" / "checkpoints").iterdir()).name
    return PredictionJob(model=str(models / "run"), task=task, checkpoint=checkpoint, **values)


@pytest.mark.slow
def test_shards_of_a_run_are_the_rows_of_output(models, tmp_path):
    predict(load_model(models / "run"), models / "rows.jsonl", tmp_path / "out", 2, lambda _: None)
    expected = [json.loads(line) for line in (tmp_path / "out").open()]
    found = rows_of(job_of(models), tmp_path / "shards", models / "rows.jsonl")
    assert [row.pop("row") for row in found] == [
        f"{models}/rows.jsonl:{line}" for line in range(1, 7)
    ]
    assert expected.pop(2)["error"].endswith(found.pop(2)["error"])
    assert found == expected
    assert len({row["num_entities"] for row in found}) > 1  # Lists of several lengths.


def test_a_published_model_writes_the_rows_of_its_run_without_padding(models, tmp_path):
    expected = rows_of(job_of(models), tmp_path / "run", models / "rows.jsonl")
    version = published_version(str(models / "models"))
    assert version == str(models / "models" / "2") == published_version(version)
    task = published_task(version)
    job = PredictionJob(model=version, task=task, batch_size=2, file_format="jsonl")
    found = rows_of(job, tmp_path / "published", models / "rows.jsonl")
    for row, same in zip(found, expected, strict=True):
        scores = row.pop("entity_score", []), same.pop("entity_score", [])
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert found == expected
    assert published_version(str(models / "run")) is None


@pytest.mark.slow
def test_predictions_in_parquet_have_the_types_of_the_outputs(models, tmp_path):
    expected = rows_of(job_of(models), tmp_path / "jsonl", models / "rows.jsonl")
    found = rows_of(
        job_of(models, file_format="parquet"), tmp_path / "parquet", models / "rows.jsonl"
    )
    for row, same in zip(found, expected, strict=True):
        assert {name: value for name, value in row.items() if value is not None} == same


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [False, True])
def test_vectors_are_those_of_the_embedder(models, tmp_path, per_token):
    job = VectorJob(
        model=str(models / "bert"),
        columns=("text",),
        layers="last",
        pooling="mean",
        per_token=per_token,
        max_seq_length=8,
        do_lower_case=None,
        prompt=None,
        batch_size=2,
        file_format="parquet",
    )
    found = rows_of(job, tmp_path / "shards", models / "rows.jsonl")
    assert found.pop(2)["error"].startswith("no column 'text'")
    task = SimilarityTask.from_options(max_seq_length=8, layers="last", pooling="mean", pairs=False)
    embedder = TextEmbedder.from_weights(read_pretrained(models / "bert"), task)
    if per_token:
        for row, (tokens, vectors) in zip(found, embedder.token_vectors(TEXTS), strict=True):
            assert row["tokens"] == tokens
            assert row["vectors"] == [
                pytest.approx(vector, abs=1e-5) for vector in vectors.tolist()
            ]
    else:
        for row, vector in zip(found, embedder.predict(TEXTS), strict=True):
            assert row["vector"] == pytest.approx(vector.tolist(), abs=1e-5)


def test_a_changed_checkpoint_is_another_model(models):
    weights = [path for path in job_of(models).model_files if "checkpoints" in path]
    assert weights and all(pathlib.Path(path).is_file() for path in weights)
    names = {pathlib.Path(path).name for path in job_of(models).model_files}
    assert {"config.json", "task.json", "vocab.txt"} <= names
    of_run = {"model": str(models / "run"), "checkpoint": job_of(models).checkpoint}
    job = VectorJob(**of_run, batch_size=2, file_format="npy")
    assert job.model_files == job_of(models).model_files


def test_vectors_of_a_run_are_of_one_checkpoint(models, tmp_path, monkeypatch):
    """The run is remote, and its training saves other weights before the workers read any."""
    pretrained = read_pretrained(models / "bert")
    run = pretrained.save("ram://prediction_shards/run")

    def run_after_training(*arguments):
        run.checkpoints.save(1, small.random_weights(pretrained.config, seed=1))
        return run_here(*arguments)

    monkeypatch.setattr(jobs, "run", run_after_training)
    rows = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    flags = [f"--model={run.path}", f"--input={rows}", f"--output_dir={tmp_path / 'out'}"]
    flags += ["--num_shards=2", "--file_format=npy", "--max_seq_length=8"]
    settings, _ = command.parse(extract.ExtractSettings, ["extract", *flags])
    extract.main(settings)
    found = [np.load(path) for path in sorted((tmp_path / "out").glob("vectors-*.npy"))]
    expected = EmbedderSettings(max_seq_length=8).create_embedder(pretrained).predict(TEXTS)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    with pytest.raises(UserError, match="the model: not the same as when"):
        extract.main(settings)


def test_a_checkpoint_of_a_published_model_and_other_directories_are_rejected(models, tmp_path):
    flags = {"input": str(models / "rows.jsonl"), "output_dir": str(tmp_path / "out")}
    settings = PredictSettings(run=str(models / "models"), checkpoint="best", **flags)
    with pytest.raises(UserError, match="--checkpoint: expected a run as --run"):
        settings.check()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(UserError, match="task.json: no such file; expected a version that bert_tf"):
        PredictSettings(run=str(tmp_path), **flags).check()
    assert task_from_dict(published_task(str(models / "models" / "2"))).labels == ENTITIES
