"""Workflows of notebooks with all classes, in order, as people write them."""

import json

import numpy as np
import pytest

from tests.test_python_docs import namespace, run

__all__ = ["namespace"]  # A fixture.

WORKFLOWS = (
    # Lists, tables, datasets.
    """
import keras, pandas, tensorflow as tf
from keras.callbacks import EarlyStopping, ModelCheckpoint, TensorBoard
from keras.losses import SparseCategoricalCrossentropy
from keras.metrics import SparseTopKCategoricalAccuracy
from bert_tf import AdamW, FitSchedule
from export import LocalClient, publish
from tasks import (MaskedLanguageModel, QuestionAnswerer, TextClassifier, TextEmbedder,
                   TokenClassifier, load_model, read_examples)
table = pandas.DataFrame({"text": texts, "intent": labels})
model = TextClassifier.from_pretrained(PATH, labels=sorted(set(labels)), max_seq_length=64)
model.fit(texts, labels)
model.fit(table["text"], table["intent"], epochs=2, validation_split=0.1)
model.fit(tf.data.Dataset.from_tensor_slices((texts, labels)).shuffle(9999).batch(32))
""",
    # Validation data and callbacks.
    """
train, dev = read_examples("train.csv"), read_examples("dev.csv")
model.fit(train, validation_data=dev, epochs=2, callbacks=[
    EarlyStopping("val_macro_f1", mode="max", patience=2, restore_best_weights=True),
    ModelCheckpoint("best.keras", "val_macro_f1", mode="max", save_best_only=True),
    TensorBoard("logs")])
best = load_model("best.keras")
""",
    # Optimizers, losses and metrics of Keras.
    """
model.compile(keras.optimizers.Adam(FitSchedule(3e-5, 0.06)),
              metrics=[SparseTopKCategoricalAccuracy(3)])
top_3 = model.fit(texts, labels, epochs=1).history
model.compile(AdamW(2e-5), loss=SparseCategoricalCrossentropy(from_logits=True))
model.fit(texts, labels, class_weight={"software": 5.0})
""",
    # Predict and evaluate.
    """
dev = read_examples("dev.csv")
label = model.predict_rows(["My invoice is wrong."])[0]["label"]
probabilities = model.predict(texts)["probabilities"]
macro_f1 = model.evaluate(dev)["macro_f1"]
report = model.report(dev)
""",
    # Save, load, publish.
    """
expected = model.predict_rows(texts)
model.save("m.keras"); model.save_run("RUN")
model = load_model("m.keras")
loaded, from_run = model.predict_rows(texts), load_model("RUN").predict_rows(texts)
publish(model, "MODELS/mail")
served = LocalClient("MODELS/mail").predict({"text": texts})
""",
    # Other tasks.
    """
token = MaskedLanguageModel.from_pretrained(PATH).predict_rows(
    ["Paris is the [MASK] of France."])[0]["token"]
vectors = TextEmbedder.from_pretrained(PATH, pooling="mean").predict(texts)
lengths = {"max_seq_length": 24, "max_query_length": 8, "doc_stride": 4}
QuestionAnswerer.from_pretrained(PATH, **lengths).save_run("QA")
TokenClassifier.from_pretrained(PATH, labels=["PERSON"]).save_run("NER")
long_text = "the bill was high . " * 20 + "anna left rome ."
answer = load_model("QA").predict_rows({"question": ["who ?"], "context": [long_text]})[0]["answer"]
entities = load_model("NER").predict_rows(["Anna left Rome."])[0]["entity_text"]
""",
    # Frozen layers, composition, attention.
    """
model.freeze(1); model.fit(texts, labels)
text = keras.Input((), dtype="string")
mine = keras.Model(text, keras.layers.Dense(3)(model.encoder(model.preprocessor(text))["pooled"]))
mine.compile("adam", SparseCategoricalCrossentropy(from_logits=True))
mine.fit(tf.constant(texts), tf.constant([0] * len(texts)), verbose=0)
mine.save("mine.keras")
tokens, weights = model.attention(["The bill is high."])[0]
""",
    # Replicas.
    """
with tf.distribute.MirroredStrategy().scope():
    model = TextClassifier.from_pretrained(PATH, labels=sorted(set(labels)))
model.fit(texts, labels, batch_size=64)
""",
)


@pytest.mark.slow
def test_workflows_run(namespace, tmp_path):
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run(WORKFLOWS, namespace)
    labels = set(namespace["labels"])
    assert namespace["label"] in labels
    assert namespace["probabilities"].shape == (len(namespace["texts"]), len(labels))
    assert namespace["probabilities"].dtype == np.float32
    assert namespace["macro_f1"] == namespace["report"]["macro_f1"]
    assert "sparse_top_k_categorical_accuracy" in namespace["top_3"]
    assert (tmp_path / "best.keras").exists() and (tmp_path / "mine.keras").exists()
    assert namespace["best"].task.labels == tuple(sorted(labels))
    assert namespace["loaded"] == namespace["from_run"] == namespace["expected"]
    expected = [row["label"] for row in namespace["expected"]]
    assert namespace["served"]["label"] == expected
    assert len(namespace["token"]) == 5  # The best first.
    assert all(isinstance(token, str) for token in namespace["token"])
    assert namespace["vectors"].shape[0] == len(namespace["texts"])
    assert namespace["answer"] == "" or namespace["answer"] in namespace["long_text"]
    assert all(entity in "Anna left Rome." for entity in namespace["entities"])
    assert namespace["tokens"][0] == "[CLS]"
    assert json.loads((tmp_path / "NER" / "task.json").read_text())["kind"] == "tagging"
