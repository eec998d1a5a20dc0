"""Search by cosine similarity: the order of rows, and vectors that do not belong to them."""

import json

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.system import command
from tasks import extract, search
from tasks.prediction.similarity import open_vectors
from tests import small

TEXTS = ["the bill is too high", "my app does not open", "the screen", "the bill is high"]


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros((2, 3)), None])
def test_a_file_without_vectors_is_rejected(tmp_path, array):
    path = tmp_path / "x.npy"
    path.write_text("no array") if array is None else np.save(path, array)
    with pytest.raises(UserError, match=r"x\.npy: expected a (\.npy file|float32 array)"):
        open_vectors(str(path))


@pytest.fixture
def flags(huggingface_dir, tmp_path):
    rows = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    flags = [f"--model={huggingface_dir}", f"--input={rows}", "--max_seq_length=16"]
    output = f"--output={tmp_path / 'vectors.npy'}"
    extract.main(command.parse(extract.ExtractSettings, ["extract", *flags, output])[0])
    return [*flags, f"--vectors={tmp_path / 'vectors.npy'}", "--query=the bill is high"]


def run(flags):
    settings, _ = command.parse(search.SearchSettings, ["search", *flags])
    settings.check()
    search.main(settings)


def test_the_command_finds_the_row_of_the_query(flags, capsys):
    run([*flags, "--top_k=2"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"similarity": 1.0, "row": 3, "text": "the bill is high"}
    assert list(second) == ["similarity", "row", "text"] and second["similarity"] < 1


def test_vectors_of_other_flags_or_rows_are_rejected(flags, tmp_path):
    with pytest.raises(UserError, match=r"vectors\.npy: not the vectors of .*rows\.csv"):
        run([*flags, "--pooling=cls"])
    small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS[:3]])
    with pytest.raises(UserError, match="4 vectors, but .* has 3 rows; run tasks.extract"):
        run(flags)
