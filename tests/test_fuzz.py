"""Mutated inputs of every format, which end in a result or in a one-line error."""

import random

import pytest

from tests.conftest import READS_PROC
from tests.fuzzed import FORMATS
from tests.fuzzing import attempt, fuzz, mutate

pytestmark = READS_PROC
COUNT = 300
FEW = 20
# These are slower to read: a model is built, or shards are written first.
SLOW = {
    *("manifest", "TFRecord shard", "config.json", "task.json", "train.json", "metrics.jsonl"),
    *("checkpoint.json", "checkpoint index", "checkpoint data", "REST request"),
}
# Checksums cover these files almost completely, so that (almost) every mutation is rejected.
SEALED = {"PyTorch zip", "checkpoint index", "checkpoint data"}
# Commands that read each format, with their flags; {0} is the directory of the file, {1} the
# file. (Readers of labels need a model with those labels; extract reads the same rows.)
EXTRACT = ("tasks.extract", "--output={0}/output.npy")
COMMANDS = {
    "CSV": (*EXTRACT, "--model={2}", "--input={1}"),
    "JSONL": (*EXTRACT, "--model={2}", "--input={1}"),
    "safetensors": (*EXTRACT, "--model={0}", "--input={3}"),
    "documents JSONL": (
        *("bert_tf.learn_vocab", "--input={1}", "--input_format=jsonl", "--vocab_size=50"),
        "--output={0}/output.txt",
    ),
    "manifest": ("bert_tf.inspect_shards", "--shards={0}"),
    "task.json": ("tasks.predict", "--run={0}", "--input={3}", "--output={0}/output.jsonl"),
    "checkpoint.json": ("tasks.predict", "--run={4}", "--input={3}", "--output={4}/output.jsonl"),
}


@pytest.mark.parametrize("name", sorted(set(FORMATS) - SLOW))
def test_a_mutated_file_is_read_or_rejected(tmp_path, name):
    path, read, *check = FORMATS[name](tmp_path)
    assert fuzz(path, read, f"fast {name}", FEW, *check)[2] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_hundreds_of_mutated_files_are_read_or_rejected(tmp_path, name):
    path, read, *check = FORMATS[name](tmp_path)
    accepted, rejected, findings = fuzz(path, read, name, COUNT, *check)
    assert findings == [] and rejected and accepted + rejected == COUNT
    assert accepted or name in SEALED


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_rejects_a_mutated_file_in_one_line(tmp_path, name, huggingface_dir, run_command):
    (tmp_path / name).mkdir()
    path, read, *_ = FORMATS[name](tmp_path / name)
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nthe bill\n")
    positions = (path.parent, path, huggingface_dir, rows, tmp_path / name / "run")
    module, *flags = (word.format(*positions) for word in COMMANDS[name])
    original, rejected = path.read_bytes(), 0
    for number in range(COUNT):
        path.write_bytes(mutate(random.Random(f"{name} {number}"), original))
        if attempt(read, path)[0] != "rejected":
            continue
        before = {file for file in tmp_path.rglob("*") if file.name != ".lock"}
        done = run_command(module, *flags, timeout=120)
        assert done.returncode == 2, (number, done)
        assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 2, done.stderr
        assert {file for file in tmp_path.rglob("*") if file.name != ".lock"} == before
        rejected += 1
        if rejected == 3:
            return
    raise AssertionError(f"{rejected} of {COUNT} were rejected")
