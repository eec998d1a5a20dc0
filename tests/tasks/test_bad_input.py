"""Bad input to fine-tuning, each kind reported in one line."""

import dataclasses
import json
import pathlib

import pytest
import safetensors.numpy

from bert_tf import UserError, Vocabulary
from tasks.finetuning.recipe import finetune
from tests import small
from tests.conftest import WORDS


@pytest.fixture
def settings(huggingface_dir, complaints, tmp_path):
    return small.settings(huggingface_dir, complaints, tmp_path / "run")


def replace_rows(path, rows):
    small.write_rows(path, rows, ("text", "label"))


def reconfigure(settings, **changes):
    path = f"{settings.init_from}/config.json"
    with open(path) as file:
        values = json.load(file)
    with open(path, "w") as file:
        json.dump({**values, **changes}, file)


def other_task(settings):
    run = finetune(dataclasses.replace(settings, epochs=1))
    pathlib.Path(run.file("task.json")).write_text(json.dumps({**run.task, "kind": "tagging"}))


# Change of the settings or files, and the expected error.
MISTAKES = {
    "missing file": (
        lambda s, d: {"train": str(d / "absent.csv")},
        "--train=.*absent.csv: no such file",
    ),
    "empty file": (lambda s, d: open(s.train, "w").close(), "train.csv: expected at least one row"),
    "unknown column": (
        lambda s, d: {"text_column": "words"},
        "no column 'words'; the columns are 'text', 'label'",
    ),
    "strange dev label": (
        lambda s, d: replace_rows(s.dev[0], [("a", "billing"), ("b", "garden")]),
        "dev.csv:3: label 'garden': expected one of",
    ),
    "wrong vocabulary": (
        lambda s, d: Vocabulary([*WORDS, "x"]).save(f"{s.init_from}/vocab.txt"),
        "30 entries, but the configuration's vocab_size is 29",
    ),
    "wrong shape": (
        lambda s, d: reconfigure(s, hidden_size=15),
        "shape mismatch. Expected: .* Received: ",
    ),
    "no model": (lambda s, d: {"init_from": str(d)}, "no model found"),
    "another task's output": (
        lambda s, d: other_task(s),
        "contains a run of task 'tagging', not 'classification'",
    ),
    "too long": (
        lambda s, d: {"max_seq_length": 17},
        "--max_seq_length=17: expected at most 16, the number of positions",
    ),
    "no label": (
        lambda s, d: replace_rows(s.train, [("a", "x"), ("b", "")]),
        "train.csv:3: column 'label' is empty; expected a label",
    ),
    "one class": (
        lambda s, d: replace_rows(s.train, [("a", "x"), ("b", "x")]),
        "expected two or more labels. Received: 'x'",
    ),
    "other files in the way": (
        lambda s, d: {"output_dir": str(d)},
        "contains other files; name a new directory",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "another task's output" else [])
        for name in MISTAKES
    ],
)
def test_bad_input_is_reported_in_one_line(settings, tmp_path, name):
    change, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as raised:
        finetune(dataclasses.replace(settings, **(change(settings, tmp_path) or {})))
    assert "\n" not in str(raised.value)


def test_pairs_require_weights_with_two_segments(settings, huggingface_dir):
    reconfigure(settings, type_vocab_size=1)
    edit = safetensors.numpy.load_file(huggingface_dir / "model.safetensors")
    name = "bert.embeddings.token_type_embeddings.weight"
    edit[name] = edit[name][:1].copy()
    safetensors.numpy.save_file(edit, huggingface_dir / "model.safetensors")
    with pytest.raises(UserError, match="pairs require two segments"):
        finetune(dataclasses.replace(settings, text_b_column="text"))
