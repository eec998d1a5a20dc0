"""Files that transformers itself writes, with the interpreter of BERT_TF_TRANSFORMERS_PYTHON."""

import json
import pathlib
import subprocess

import numpy as np
import pytest

from bert_tf.text.tokenizer import Tokenizer
from bert_tf.weights import huggingface, tokenizer_files

WRITER = pathlib.Path(__file__).with_name("transformers_writer.py")
pytestmark = pytest.mark.slow
# Without a sigma at the end of a word and words of over 100 characters: there, the tokenizers
# library differs from google-research/bert, which we equal.
TEXTS = [
    *("Hello WORLD", "Café naïve ÅNGSTRÖM", "中文 and 日本語", "x\u200by\tz\n", "#hash ##tag [x]"),
    *("İstanbul ß ﬁ", "ὈΔΎΣΣΕΙΑ", "🙂 emoji", "", "unaffable!?", "e\u0301\u0327", "\x00a\ufffdb"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory, data_dir, transformers_python):
    directory = tmp_path_factory.mktemp("transformers")
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    subprocess.run(
        [
            *(transformers_python, "-I", str(WRITER)),
            *(str(directory), str(data_dir / "vocab"), str(directory / "texts.json")),
        ],
        check=True,
    )
    return directory


def test_every_tensor_equals_the_one_that_transformers_saved(written):
    kinds = sorted((written / "models").iterdir())
    assert len(kinds) == 13
    for path in kinds:
        stored = huggingface.read(path)
        expected = {
            name.removeprefix("bert."): array
            for name, array in np.load(path / "tensors.npz").items()
            if ".decoder." not in name and "position_ids" not in name
        }
        tensors = {
            name: array for name, array in stored.tensors.items() if "position_ids" not in name
        }
        assert set(tensors) == set(expected), path.name
        for name, array in expected.items():
            np.testing.assert_array_equal(tensors[name], array, err_msg=f"{path.name} {name}")
        assert len(stored.vocabulary) == stored.config.vocab_size == 2_048


def test_token_ids_equal_those_of_transformers(written):
    paths = sorted((written / "tokenizers").iterdir())
    assert len(paths) == 48
    for path in paths:
        size = json.loads((path / "config.json").read_text())["vocab_size"]
        vocabulary, settings = tokenizer_files.read(path, size)
        tokenizer = Tokenizer(vocabulary, **settings)
        ids = tokenizer.tokenize(TEXTS).ids.to_list()
        assert ids == json.loads((path / "ids.json").read_text()), path.name
