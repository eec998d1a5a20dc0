"""Pretraining steps of training.py, scale.py and gpu.py in TensorFlow: bert_tf and keras-hub.

Each function but `prepare` is called in a separate process and returns metrics.
"""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from bert_tf.system.command import import_tensorflow

import_tensorflow()  # As in the commands.

import keras
import tensorflow as tf
from pretraining_batch import POSITIONS, WARMUP_STEPS, Sizes, examples, timed

from bert_tf.config import BertConfig
from bert_tf.data.batches import flatten_examples
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.train.distribution import use_precision
from bert_tf.train.losses import softmax_cross_entropy
from bert_tf.train.optimizer import AdamW
from bert_tf.train.step import TrainStep


def prepare(
    sizes, precision, batch=None, layout=flatten_examples, is_classifier=False, rate=1e-4, **options
):
    """Return a train step and a dataset that repeats one batch.

    The step pretrains, or trains a classifier of 3 labels. The layout is part of the dataset, so
    that static shapes are the same as in training. `options` are is_compiled, recompute, and
    further keyword arguments of the BertConfig.
    """
    keras.utils.set_random_seed(0)
    is_compiled, recompute = options.pop("is_compiled", False), options.pop("recompute", False)
    config, policy = BertConfig(**{**sizes.config, **options}), use_precision(precision)
    batches = tf.data.Dataset.from_tensors(batch or examples(sizes)).map(layout).map(to_batch)
    if is_classifier:
        from tasks.graph.heads import SequenceClassifier

        labels = {"label": tf.range(sizes.batch) % 3}
        weights = {"label": tf.ones(sizes.batch)}
        batches = batches.map(lambda inputs, *_: (inputs, labels, weights))
        model = SequenceClassifier(config, 3, dtype=policy)
        losses, metrics = {"label": softmax_cross_entropy}, {}
    else:
        model = PretrainingModel(config, policy, recompute=recompute)
        losses, metrics = LOSSES, METRICS
    optimizer, strategy = AdamW(rate), tf.distribute.get_strategy()
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, losses, optimizer, strategy, 0, metrics, is_compiled=is_compiled)
    return step, batches.cache().repeat().prefetch(1)


def bare(sizes, precision, steps, recompute=False, uncounted=WARMUP_STEPS):
    """Time the train step on one repeated batch."""
    step, batches = prepare(Sizes(**sizes), precision, recompute=recompute)
    iterator = iter(batches)
    return timed(lambda: float(step(iterator)["loss"]), steps, uncounted)


def keras_hub(sizes, precision, steps):
    """Time keras-hub's BertMaskedLM; it has no next sentence prediction."""
    from keras_hub.models import BertBackbone, BertMaskedLM

    sizes = Sizes(**sizes)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(use_precision(precision))
    backbone = BertBackbone(
        vocabulary_size=sizes.vocabulary,
        num_layers=sizes.layers,
        num_heads=sizes.hidden // 64,
        hidden_dim=sizes.hidden,
        intermediate_dim=4 * sizes.hidden,
        dropout=0.1,
        max_sequence_length=POSITIONS,
    )
    model = BertMaskedLM(backbone)
    optimizer = keras.optimizers.AdamW(1e-4, weight_decay=0.01, epsilon=1e-6, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=[], jit_compile=False)
    batch = examples(sizes)
    inputs = {
        "token_ids": batch["input_ids"],
        "segment_ids": batch["segment_ids"],
        "padding_mask": batch["input_mask"],
        "mask_positions": batch["masked_lm_positions"],
    }
    row = inputs, batch["masked_lm_ids"], batch["masked_lm_weights"]
    return timed(lambda: model.train_on_batch(*row), steps)
