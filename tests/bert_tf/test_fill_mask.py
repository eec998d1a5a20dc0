"""Candidates at the masks of a text, and the command that prints them."""

import json

import numpy as np
import pytest

from bert_tf import Tokenizer, UserError, fill_mask
from bert_tf.fill_mask import FillMaskSettings
from bert_tf.pretraining.masked_tokens import fill_masks
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.system import command
from bert_tf.weights.sources import PretrainedWeights
from tests import small

TEXT = "the [MASK] is [MASK]!"


@pytest.fixture
def pretrained(config, vocabulary):
    weights = small.random_weights(config, parts=("bert", "masked_lm", "next_sentence"))
    return PretrainedWeights(config, vocabulary, weights, "random")


@pytest.fixture
def model(pretrained):
    model = PretrainingModel(pretrained.config)
    pretrained.assign_to(model)
    return model


@pytest.fixture
def tokenizer(config, vocabulary):
    return Tokenizer.from_config(config, vocabulary)


def test_each_mask_has_its_most_probable_tokens(model, tokenizer, vocabulary):
    found = fill_masks(model, tokenizer, TEXT, top_k=3)
    words = ["[CLS]", "the", "[MASK]", "is", "[MASK]", "!", "[SEP]"]
    ids = np.array([[vocabulary[word] for word in words]], np.int32)
    inputs = {"input_ids": ids, "input_mask": ids * 0 + 1, "segment_ids": ids * 0}
    logits = model({**inputs, "masked_lm_positions": np.array([[2, 4]])})["masked_lm"]
    for candidates, of_mask in zip(found, np.array(logits, np.float64)[0], strict=True):
        probabilities = np.exp(of_mask) / np.exp(of_mask).sum()
        best = np.argsort(-probabilities)[:3]
        assert candidates["token"] == [vocabulary.entries[number] for number in best]
        np.testing.assert_allclose(candidates["score"], probabilities[best], rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "top_k", "message"),
    [
        ("the bill", 5, r"'the bill': expected a text with \[MASK\]"),
        ("[MASK]", 30, r"top_k=30: expected an integer in \[1, 29\]"),
        ("the " * 14 + "[MASK]", 5, "expected at most 16 tokens .*, received 17"),
    ],
)
def test_wrong_arguments_are_reported(model, tokenizer, vocabulary, text, top_k, message):
    assert len(vocabulary) == 29
    with pytest.raises(UserError, match=message):
        fill_masks(model, tokenizer, text, top_k)


def test_a_text_that_is_not_utf_8_is_reported():
    with pytest.raises(UserError, match="--text: expected UTF-8"):
        FillMaskSettings(model="x", text="caf\udce9 [MASK]")


def test_the_command_prints_a_line_per_mask(pretrained, tmp_path, capsys):
    pretrained.save(tmp_path / "run")
    flags = [f"--model={tmp_path / 'run'}", f"--text={TEXT}", "--top_k=2"]
    settings, _ = command.parse(FillMaskSettings, ["fill_mask", *flags])
    settings.check()
    fill_mask.main(settings)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(first["token"]) == len(second["score"]) == 2 and first != second


def test_the_command_rejects_a_text_without_mask_and_weights_without_head(huggingface_dir):
    with pytest.raises(UserError, match=r"--text='the bill': expected a text with \[MASK\]"):
        FillMaskSettings(str(huggingface_dir), "the bill")
    settings = FillMaskSettings(str(huggingface_dir), TEXT)
    with pytest.raises(UserError, match="expected weights with a masked language model head"):
        fill_mask.main(settings)
