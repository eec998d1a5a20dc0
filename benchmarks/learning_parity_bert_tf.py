"""Backends of learning_parity.py in bert_tf, with its own dropout noise or TensorFlow's.

All trainings of a process share one model and one train step, so that kernels are built once.
"""

import math
import pathlib
import time

import tensorflow as tf
from learning_parity import dropout_seed_of, first_head, metrics_of
from own_process import append

from bert_tf.model import fused_kernels
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import make_strategy
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.step import TrainStep
from bert_tf.weights.sources import read_pretrained
from tasks.data.examples import EncodedExamples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.types.classification.text_classifier import ClassificationTask


def uniform_mask(shape, rate, seed):
    """Return a dropout mask from Philox numbers; replaces fused_kernels.dropout_mask."""
    return tf.random.stateless_uniform(shape, seed, alg="philox") >= rate


def measure(backend, directory, recipe, trainings, output, keeps_losses):
    """Train, and append one record per training, (seed, dropout seed), to the file `output`.

    With `keeps_losses`, records contain the losses of all steps.
    """
    if backend == "uniform":
        fused_kernels.dropout_mask = uniform_mask
    directory, strategy = pathlib.Path(directory), make_strategy("none")
    source = read_pretrained(str(directory / "encoder"))
    task = ClassificationTask.from_data(
        str(directory / "train.csv"), max_seq_length=recipe["max_seq_length"]
    )
    model = task.build_model(source.config)
    tokenizer = Tokenizer.from_config(source.config, source.vocabulary)
    pipeline = Pipeline(task, tokenizer, model)
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
    dropout_seed = tf.Variable(0, dtype=tf.int64)
    step = TrainStep(model, task.losses, optimizer, strategy, dropout_seed)
    evaluator = Evaluator(task, model, strategy)
    for training in trainings:
        start = time.process_time()
        source.assign_to(model)
        kernel = first_head(training[0], source.config.hidden_size, len(task.labels))
        model.head.kernel.assign(kernel)
        model.head.bias.assign(tf.zeros_like(model.head.bias))
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        dropout_seed.assign(dropout_seed_of(training))
        batches = train.training_batches(
            global_batch_size=recipe["global_batch_size"],
            num_epochs=recipe["epochs"],
            seed=training[0],
        )
        iterator = iter(batches)
        losses = [float(step(iterator)["loss"]) for _ in range(num_steps)]
        logits = evaluator.outputs(test)["label"]
        record = {
            "backend": backend,
            "seed": training[0],
            "dropout": training[1],
            **recipe,
            **metrics_of(losses, logits, test.labels["label"]),
            "processor_seconds": round(time.process_time() - start, 1),
        }
        if keeps_losses:
            record["losses"] = losses
        append(pathlib.Path(output), record)
    return {"trainings": len(trainings)}
