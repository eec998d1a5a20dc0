"""Ten jobs in keras-hub, as docs/python-compared.md counts them; it has no entities and answers."""

import json

import keras
import numpy as np
import tensorflow as tf
from keras_hub.models import (
    BertMaskedLM,
    BertTextClassifier,
    BertTextClassifierPreprocessor,
    BertTokenizer,
)
from sklearn.metrics import precision_recall_curve


def fit(path, texts, labels, directory):
    names, ids = np.unique(labels, return_inverse=True)
    model = BertTextClassifier.from_preset(path, num_classes=len(names))
    model.fit(np.array(texts), ids, epochs=3)
    return model, names


def fit_with_schedule(path, texts, labels, directory):
    names, ids = np.unique(labels, return_inverse=True)
    model = BertTextClassifier.from_preset(path, num_classes=len(names))
    steps = 3 * -(-len(texts) // 32)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - steps // 10, warmup_target=5e-5, warmup_steps=steps // 10
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    model.compile(optimizer=optimizer)
    model.fit(np.array(texts), ids, epochs=3)
    return model, names


def fit_until_best(path, texts, labels, dev_texts, dev_labels, directory):
    names, ids = np.unique(labels, return_inverse=True)
    model = BertTextClassifier.from_preset(path, num_classes=len(names))
    model.compile(
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.F1Score("macro", name="macro_f1")],
    )
    stop = keras.callbacks.EarlyStopping("val_macro_f1", mode="max", restore_best_weights=True)
    dev = np.array(dev_texts), keras.utils.to_categorical(np.searchsorted(names, dev_labels))
    targets = keras.utils.to_categorical(ids)
    model.fit(np.array(texts), targets, validation_data=dev, epochs=9, callbacks=[stop])
    return model, names


def predict_labels(model, names, texts):
    return names[model.predict(np.array(texts)).argmax(axis=-1)]


def save_and_load(model, names, directory):
    model.save_to_preset(directory)
    np.save(f"{directory}/labels.npy", names)
    loaded = BertTextClassifier.from_preset(directory)
    names = np.load(f"{directory}/labels.npy")
    return loaded, names


def write_saved_model(model, names, directory):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def serve(texts):
        logits = model(model.preprocessor(texts))
        return {"label": tf.gather(names, tf.argmax(logits, axis=-1))}

    module = tf.Module()
    module.model, module.tokenizer, module.serve = model, model.preprocessor.tokenizer, serve
    tf.saved_model.save(module, directory, signatures=serve)


def fill_mask(path, texts):
    tokenizer = BertTokenizer.from_preset(path, special_tokens_in_strings=True)
    inputs = BertTextClassifierPreprocessor(tokenizer)(texts)
    model = BertMaskedLM.from_preset(path, preprocessor=None)
    positions = tf.argmax(inputs["token_ids"] == tokenizer.mask_token_id, axis=1)[:, tf.newaxis]
    scores = model.predict({**inputs, "mask_positions": positions})
    return [tokenizer.id_to_token(token) for token in scores[:, 0].argmax(axis=-1)]


def fit_with_threshold(path, texts, labels, dev_texts, dev_labels, positive, directory):
    names, ids = np.unique(labels, return_inverse=True)
    model = BertTextClassifier.from_preset(path, num_classes=len(names))
    model.fit(np.array(texts), ids, epochs=3)
    column = list(names).index(positive)
    scores = keras.ops.softmax(model.predict(np.array(dev_texts))).numpy()[:, column]
    is_positive = np.array(dev_labels) == positive
    _, recall, thresholds = precision_recall_curve(is_positive, scores)
    threshold = thresholds[recall[:-1] >= 0.9][-1]
    model.save_to_preset(directory)
    with open(f"{directory}/labels.json", "w") as file:
        json.dump({"labels": names.tolist(), "threshold": float(threshold)}, file)
    loaded = BertTextClassifier.from_preset(directory)
    with open(f"{directory}/labels.json") as file:
        record = json.load(file)
    scores = keras.ops.softmax(loaded.predict(np.array(dev_texts))).numpy()[:, column]
    other = next(name for name in record["labels"] if name != positive)
    return np.where(scores >= record["threshold"], positive, other)
