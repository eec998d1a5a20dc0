"""Paths in flags: inputs are never overwritten, remote paths never become local directories."""

import os

import numpy as np
import pytest

from bert_tf import UserError, Vocabulary, learn_vocab, read_pretrained
from bert_tf.learn_vocab import LearnVocabSettings
from bert_tf.storage import files, paths
from export.export_saved_model import ExportSettings
from export.request import RequestSettings
from tasks.data.readers import rows
from tasks.evaluate import EvaluateSettings
from tasks.extract import ExtractSettings
from tasks.finetuning.settings import FinetuneSettings
from tasks.mine_negatives import MineNegativesSettings
from tasks.predict import PredictSettings
from tests.corpus import write_corpus

OVERWRITES = {
    "predict": lambda path, **flags: PredictSettings(run="run", input="in.csv", **path, **flags),
    "extract": lambda path, **flags: ExtractSettings(model="run", input="in.csv", **path, **flags),
    "learn_vocab": lambda path, **flags: LearnVocabSettings(
        input=("*.csv", "run/*"), **path, **flags
    ),
}


@pytest.fixture(params=OVERWRITES)
def settings(request, tmp_path, monkeypatch):
    """Return a function that creates the settings of a command that writes a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text("text\nx\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.jsonl").touch()
    (tmp_path / "old.jsonl").write_text("old")
    make = OVERWRITES[request.param]
    return lambda output, **flags: make({"output": str(output)}, **flags)


def test_a_file_is_replaced_only_on_request(settings):
    settings("new.jsonl")
    with pytest.raises(UserError, match="--output=old.jsonl: already exists; .* --overwrite"):
        settings("old.jsonl")
    settings("old.jsonl", overwrite=True)
    for path in ("absent/new.jsonl", "."):
        with pytest.raises(UserError, match="--output="):
            settings(path, overwrite=True)


@pytest.mark.parametrize("kind", ["itself", "by another path", "link", "hard link", "in a folder"])
def test_an_input_is_never_replaced(settings, tmp_path, kind):
    path = {
        "itself": tmp_path / "in.csv",
        "by another path": tmp_path / "run" / ".." / "in.csv",
        "in a folder": tmp_path / "run" / "config.jsonl",
    }.get(kind, tmp_path / "link.jsonl")
    if "link" in kind:
        (os.link if kind == "hard link" else os.symlink)(tmp_path / "in.csv", path)
    for overwrite in (False, True):
        # A path that ends in neither .npy nor .jsonl is never an output of extract.
        with pytest.raises(
            UserError, match="is part of the input .* name another|expected a .npy or .jsonl"
        ):
            settings(path, overwrite=overwrite)


def test_remote_outputs_and_inputs_are_compared_by_name():
    paths.check_output("gs://b/out.jsonl", ["gs://b/in.csv", "here.csv"])
    for source in ("gs://b/out.jsonl", "gs://b", "gs://b/"):
        with pytest.raises(UserError, match="is part of the input"):
            paths.check_output("gs://b/out.jsonl", [source], overwrite=True)


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda path: ExportSettings(run="r", output_dir=path), "output_dir"),
        (lambda path: RequestSettings(input=("text=x",), model_dir=path), "model_dir"),
        (lambda path: EvaluateSettings(run="r", data=path), "data"),
        (lambda path: PredictSettings(run="r", input=path, output="o.jsonl"), "input"),
        (lambda path: ExtractSettings(model="r", input=path, output="o.npy"), "input"),
        (
            lambda path: MineNegativesSettings(
                run="r", pairs=__file__, corpus=__file__, output=path
            ),
            "output",
        ),
        (
            lambda path: FinetuneSettings(
                task="classification", train=path, init_from="x", output_dir="y"
            ),
            "train",
        ),
        (
            lambda path: FinetuneSettings(
                task="classification", train=__file__, dev=(path,), init_from="x", output_dir="y"
            ),
            "dev",
        ),
    ],
)
def test_paths_that_cannot_be_remote_are_reported(make, flag):
    with pytest.raises(UserError, match=f"--{flag}=gs://b/m: expected a local path"):
        make("gs://b/m")


def test_a_vocabulary_is_learned_from_and_written_to_a_remote_path(tmp_path):
    write_corpus(tmp_path / "corpus.txt")
    files.atomic_write_bytes("ram://paths/corpus.txt", (tmp_path / "corpus.txt").read_bytes())
    settings = LearnVocabSettings(("ram://paths/*.txt",), "ram://paths/vocab", vocab_size=60)
    learn_vocab.main(settings)
    assert len(Vocabulary.load("ram://paths/vocab")) == 60
    with pytest.raises(UserError, match="ram://paths/vocab: already exists"):
        learn_vocab.main(settings)
    assert files.listdir("ram://paths") == ["corpus.txt", "vocab"]


def test_a_run_is_written_to_and_read_from_a_remote_path(huggingface_dir):
    pretrained = read_pretrained(huggingface_dir)
    pretrained.save("ram://paths/run")
    again = read_pretrained("ram://paths/run")
    assert again.weights.keys() == pretrained.weights.keys()
    for name, array in again.weights.items():
        np.testing.assert_array_equal(array, pretrained.weights[name])
    with pytest.raises(UserError, match="contains other files"):
        pretrained.save("ram://paths/run")
    with pytest.raises(UserError, match="ram://paths/google: expected a run; .* copy"):
        read_pretrained("ram://paths/google")


def test_a_run_has_no_remote_path_that_tensorflow_cannot_read(huggingface_dir):
    pretrained = read_pretrained(huggingface_dir)
    with pytest.raises(UserError, match=r"ram://paths/r \[1\]: expected a remote path without"):
        pretrained.save("ram://paths/r [1]")
    assert not files.exists("ram://paths/r [1]")


def test_versions_are_not_exported_into_the_run_itself(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="is the run directory; choose another directory"):
        ExportSettings(run=str(tmp_path / "run"), output_dir=str(tmp_path / "run" / "." / ""))


@pytest.mark.parametrize("check", ["flag", "rows"])
def test_what_is_no_file_is_named(tmp_path, check):
    def refuses(path, found):
        with pytest.raises(UserError, match=f"{path}: {found}"):
            paths.check_local_file("dev", str(path)) if check == "flag" else rows.data_file(path)

    refuses(tmp_path / "absent.csv", "no such file$")
    refuses(tmp_path, "expected a file, received a directory$")
    os.mkfifo(tmp_path / "pipe.csv")
    refuses(tmp_path / "pipe.csv", "expected a file, received a pipe or a device; write its")
