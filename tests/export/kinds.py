"""A small model of every kind of task with random weights, written without the gate's questions."""

import dataclasses

import tensorflow as tf

from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from export.signatures import write_saved_model
from tasks.anomaly import Anomaly
from tasks.classification import Classification
from tasks.multiple_choice import MultipleChoice
from tasks.pipeline import Pipeline
from tasks.regression import Regression
from tasks.span_qa import SpanQA
from tasks.tagging import Tagging
from tasks.trained import Trained

# Decided where there is something to decide, and so that every operation of a kind is there.
TASKS = {
    "classification": Classification(labels=("a", "b", "c"), max_seq_length=12, temperature=1.5),
    "classification_pair": Classification(
        labels=("a", "b", "c"),
        max_seq_length=12,
        text_columns=("a", "b"),
        multi_label=True,
        thresholds=(0.4, 0.5, 0.6),
    ),
    "classification_binary": Classification(
        labels=("a", "b"), max_seq_length=12, thresholds=(0.4,)
    ),
    "regression": Regression(text_columns=("a", "b"), max_seq_length=12),
    "tagging": Tagging(
        labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), max_seq_length=12, stride=4
    ),
    "span_qa": SpanQA(
        max_seq_length=14,
        stride=3,
        max_query_length=5,
        max_answer_length=4,
        may_be_impossible=True,
        null_threshold=0.5,
    ),
    "multiple_choice": MultipleChoice(max_seq_length=12),
    "anomaly": Anomaly(max_seq_length=12, ordinary_labels=("a",), code_size=4, threshold=0.5),
}


def trained(folder, kind, config, vocabulary, **changes):
    """A run of TASKS[kind], its weights so large that answers differ."""
    task = TASKS[kind]
    config = dataclasses.replace(config, **changes)
    run = Run.create(folder, config, vocabulary, {"origin": "random"}, task.to_dict())
    model = task.build_model(config)
    for number, variable in enumerate(model.variables):
        if variable.dtype == "float32":
            noise = tf.random.stateless_normal(variable.shape, [number, 1])
            variable.assign_add(noise * 0.3)
    tokenizer = Tokenizer(vocabulary, config.do_lower_case, config.strip_accents)
    return Trained(run, task, Pipeline(task, tokenizer, model), "random")


def write_model(folder, kind, config, vocabulary, **changes):
    """folder/model, a SavedModel of TASKS[kind]; returns its path."""
    write_saved_model(
        trained(folder / "run", kind, config, vocabulary, **changes), folder / "model"
    )
    return folder / "model"
