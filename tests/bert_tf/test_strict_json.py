"""Strict JSON, with every error in one line."""

import json

import pytest

from bert_tf import UserError
from bert_tf.data.manifest import Manifest
from bert_tf.runs.checkpoints import CheckpointManager
from bert_tf.runs.run import Run
from bert_tf.storage import strict_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -2.5, true, null, "\\ud83d\\ude00"]}', {"a": [1, -2.5, True, None, "😀"]}),
        ("9223372036854774784", 9223372036854774784),
        ("16931456849842234143", 16931456849842234143.0),  # Integers of up to 64 bits.
        ("[" * 100 + "]" * 100, json.loads("[" * 100 + "]" * 100)),
        ('["' + "[" * 200 + '"]', ["[" * 200]),
    ],
)
def test_valid_json_is_read(text, value):
    parsed = strict_json.parse(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "-Infinity", "1e999", "1" * 5_000, "[" * 101 + "]" * 101, "[" * 10**6),
        *('{"a":' * 10**5, '{"a": 1, "a": 1}', '[{"b": {"a": 1, "a": 1}}]'),
        *("", "{", "[1,]", "\ufeff{}", "{'a': 1}", '"\t"', "01"),
    ],
    ids=lambda text: text[:10],
)
def test_invalid_json_is_a_value_error_of_one_short_line(text):
    with pytest.raises(ValueError) as raised:
        strict_json.parse(text)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


# Damage to our own files by a killed process, a full disk or an editor.
DAMAGE = (
    b"",
    b"\0" * 100,
    b"{",
    b"[]",
    b"\xff",
    b'{"step": NaN}',
    b'{"step": ' + b"9" * 5_000 + b"}",
    b'{"step": ' + b"[" * 10**5 + b"}",
    b'{"step": 1, "step": 2}',
    b'{"step": "one", "score": "high", "complete": 1, "settings": []}',
    b'{"step": [1], "score": [1], "complete": true, "settings": {}, "vocabulary": {}}',
    b'{"step": 1e400, "score": NaN, "metrics": {}}',
    b'{"step": true, "score": 1, "metrics": {"f1": "high"}}',
)


@pytest.mark.parametrize("content", DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_files_of_a_run_are_reported(tmp_path, config, vocabulary, content):
    manifest, state, metrics = (
        tmp_path / name for name in ("manifest.json", "step-00000001", "metrics.jsonl")
    )
    state.mkdir()
    manifest.write_bytes(content)
    (state / "checkpoint.json").write_bytes(content)
    metrics.write_bytes(content + b"\n")
    cases = (
        (lambda: Manifest.load(tmp_path), "manifest.json"),
        (Run(tmp_path, config, vocabulary, {}).metrics, "metrics.jsonl"),
        (lambda: CheckpointManager(tmp_path).info(1), "checkpoint.json"),
    )
    rejected = 0
    for read, name in cases:
        try:
            read()
        except UserError as error:
            assert name in str(error) and "\n" not in str(error) and len(str(error)) < 400
            rejected += 1
    # A checkpoint.json without a score is valid, and its step is not read.
    assert rejected >= 2


def test_a_score_that_is_nan_is_not_the_best(tmp_path):
    for step, score in enumerate(("NaN", "0.5", "NaN"), start=1):
        directory = tmp_path / f"step-{step:08d}"
        directory.mkdir()
        (directory / "checkpoint.json").write_text(
            f'{{"step": {step}, "score": {score}, "metrics": {{"dev_loss": Infinity}}}}'
        )
    assert CheckpointManager(tmp_path).best_step() == 2


def test_a_partial_line_of_a_killed_process_is_ignored(tmp_path, config, vocabulary):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n{"step": 2, "lo')
    run = Run(tmp_path, config, vocabulary, {})
    assert run.metrics() == [{"step": 1, "loss": float("inf")}]
    run.forget_metrics_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": Infinity}\n'
