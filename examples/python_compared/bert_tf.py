"""Ten jobs in bert_tf, as docs/python-compared.md counts them."""

import keras

from export import publish
from tasks import MaskedLanguageModel, QuestionAnswerer, TextClassifier, TokenClassifier, load_model


def fit(path, texts, labels, directory):
    model = TextClassifier.from_pretrained(path, labels=sorted(set(labels)))
    model.fit(texts, labels)
    return (model,)


def fit_with_schedule(path, texts, labels, directory):
    model = TextClassifier.from_pretrained(path, labels=sorted(set(labels)))
    model.fit(texts, labels)
    return (model,)


def fit_until_best(path, texts, labels, dev_texts, dev_labels, directory):
    model = TextClassifier.from_pretrained(path, labels=sorted(set(labels)))
    stop = keras.callbacks.EarlyStopping("val_macro_f1", mode="max", restore_best_weights=True)
    dev = (dev_texts, dev_labels)
    model.fit(texts, labels, validation_data=dev, epochs=9, callbacks=[stop])
    return (model,)


def predict_labels(model, texts):
    return model.predict(texts)["label"]


def save_and_load(model, directory):
    model.save(f"{directory}/model.keras")
    loaded = load_model(f"{directory}/model.keras")
    return (loaded,)


def write_saved_model(model, directory):
    publish(model, directory)


def entities(path, texts, spans, directory):
    types = sorted({span["type"] for of_text in spans for span in of_text})
    model = TokenClassifier.from_pretrained(path, labels=types)
    model.fit(texts, spans, epochs=60)
    return [row["entity_text"] for row in model.predict_rows(texts)]


def answers(path, questions, contexts, gold, directory):
    model = QuestionAnswerer.from_pretrained(path)
    model.fit((questions, contexts), gold, epochs=20)
    return model.predict((questions, contexts))["answer"]


def fill_mask(path, texts):
    model = MaskedLanguageModel.from_pretrained(path)
    return [row["token"][0] for row in model.predict_rows(texts)]


def fit_with_threshold(path, texts, labels, dev_texts, dev_labels, positive, directory):
    names = sorted(set(labels), key=lambda name: name == positive)
    options = {"labels": names, "rare_label": positive, "threshold_objective": "recall=0.9"}
    model = TextClassifier.from_pretrained(path, **options)
    model.fit(texts, labels, validation_data=(dev_texts, dev_labels))
    model.save(f"{directory}/model.keras")
    loaded = load_model(f"{directory}/model.keras")
    return loaded.predict(dev_texts)["label"]
