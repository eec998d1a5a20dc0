"""Token ids in training and in the exported model: case, accents and long words."""

import dataclasses
import json
from unittest import mock

import keras
import pytest
import tensorflow as tf

from bert_tf import Vocabulary
from export.graph.saved_model import write_saved_model
from tasks import TextClassifier
from tasks.model.loading import load_model
from tests import small
from tests.conftest import WORDS

# Each word in every form that a setting gives it; WORDS has "cafe".
FORMS = ("Été", "Ete", "été", "ete", "Café", "Cafe", "café", "ÉCOLE", "ECOLE", "école", "ecole")
# The last texts have decomposed characters and a word of 102 characters, where 100 is the maximum.
TEXTS = ["Été", "Café bill", "ÉCOLE Cafe my", "my bill is high", "Cafe\u0301", "un" + "able" * 25]
UNCASED = ["ete", "cafe bill", "ecole cafe my", "my bill is high", "cafe", "[UNK]"]
# Tokens by (do_lower_case, strip_accents).
EXPECTED = {
    (True, None): UNCASED,
    (True, True): UNCASED,
    (True, False): ["été", "café bill", "école cafe my", "my bill is high", "[UNK]", "[UNK]"],
    (False, None): ["Été", "Café bill", "ÉCOLE Cafe my", "my bill is high", "[UNK]", "[UNK]"],
    (False, False): ["Été", "Café bill", "ÉCOLE Cafe my", "my bill is high", "[UNK]", "[UNK]"],
    (False, True): ["Ete", "Cafe bill", "ECOLE Cafe my", "my bill is high", "Cafe", "[UNK]"],
}


def unpadded(inputs):
    if "row_splits" in inputs:
        flat = tf.RaggedTensor.from_row_splits(
            inputs["input_ids"][: inputs["row_splits"][-1]], inputs["row_splits"]
        )
        return flat.to_list()
    rows = zip(inputs["input_ids"].numpy(), inputs["input_mask"].numpy(), strict=True)
    return [ids[mask == 1].tolist() for ids, mask in rows]


def create_model(directory, config, do_lower_case, strip_accents):
    """Return a classifier with new weights, and the expected token ids of TEXTS."""
    vocabulary = Vocabulary([*WORDS, *FORMS])
    config = dataclasses.replace(config, vocab_size=len(vocabulary))
    weights = small.write_huggingface(directory / "weights", config, vocabulary)
    (weights / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": do_lower_case, "strip_accents": strip_accents})
    )
    model = TextClassifier.from_pretrained(weights, labels=["a", "b"], max_seq_length=8)
    expected = [
        [vocabulary[token] for token in ("[CLS]", *tokens.split(), "[SEP]")]
        for tokens in EXPECTED[do_lower_case, strip_accents]
    ]
    return model, expected


def ids_in_fit(model):
    """Return the token ids of the batches that Keras receives in `fit`."""
    model.compile()
    batches = []
    labels = ["a", "b"] * (len(TEXTS) // 2)
    with mock.patch.object(keras.Model, "fit", lambda _, x, **options: batches.extend(x)):
        model.fit(TEXTS, labels, batch_size=len(TEXTS), epochs=1, shuffle=False)
    return [ids for inputs, *_ in batches for ids in unpadded(inputs)]


@pytest.mark.medium
@pytest.mark.parametrize(("do_lower_case", "strip_accents"), small.fast(EXPECTED, (False, True)))
def test_preprocessor_training_and_signature_have_equal_token_ids(
    config, tmp_path, do_lower_case, strip_accents
):
    model, expected = create_model(tmp_path, config, do_lower_case, strip_accents)
    assert unpadded(model.preprocessor(TEXTS)) == expected
    assert ids_in_fit(model) == expected
    trained = load_model(model.save_run(tmp_path / "run").path)
    tokenize = trained.serving.pipeline.signatures["tokenize"]
    assert unpadded(tokenize(tf.constant(TEXTS))) == expected


@pytest.mark.slow
def test_a_saved_model_strips_accents_from_cased_text(config, tmp_path):
    model, expected = create_model(tmp_path, config, do_lower_case=False, strip_accents=True)
    trained = load_model(model.save_run(tmp_path / "run").path)
    write_saved_model(trained, tmp_path / "saved")
    tokenize = tf.saved_model.load(str(tmp_path / "saved")).signatures["tokenize"]
    assert unpadded(tokenize(text=tf.constant(TEXTS))) == expected
