"""Heads of models that were fine-tuned elsewhere: their task, as in task.json, and their weights.

Every head is one dense layer, "classifier/kernel" `(H, C)` and "classifier/bias" `(C,)`. What its C
outputs mean is in the configuration of the source, or follows from its type and C:

    BertForSequenceClassification   regression if C is 1, sigmoid per label if multi-label, one
                                    sigmoid if C is 2, else softmax
    BertForTokenClassification      tagging of entities, or without a label O of words
    BertForQuestionAnswering        start and end of an answer
    BertForMultipleChoice           one score per choice
    BertForNextSentencePrediction   classification of pairs of texts

Shape suffixes: H hidden size, C outputs of the head.
"""

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bert_tf.errors import UserError
from bert_tf.runs import checkpoints
from bert_tf.storage import format_versions
from bert_tf.weights.name_map import architectures

KERNEL, BIAS = "classifier/kernel", "classifier/bias"
NEXT_SENTENCE_LABELS = ("is_next", "not_next")
MAX_SEQ_LENGTH = 512
ACTIVATIONS = ("identity", "sigmoid")  # Of a regressor's output.

_ROWS = {
    "max_seq_length": None,
    "file_format": "rows",
    "text_columns": ["text"],
    "label_column": "label",
    "truncation": "head",
}
# task.json of each task type that other libraries have, with the defaults of its fields; `None` is
# replaced where it is not a default. The task types, which import this package, are tested against
# it.
TEMPLATES: dict[str, dict[str, Any]] = {
    "classification": {
        **_ROWS,
        "labels": None,
        "multi_label": False,
        "class_weights": [],
        "balanced_sampling": False,
        "focal_gamma": 0.0,
        "rare_label": None,
        "threshold_objective": None,
        "calibrate": False,
        "temperature": None,
        "thresholds": None,
        "pooling": "pooled",
    },
    "regression": {**_ROWS, "activation": "identity"},
    "tagging": {
        "max_seq_length": None,
        "labels": None,
        "doc_stride": None,
        "text_column": "text",
        "scheme": "bio",
    },
    "span_qa": {
        "max_seq_length": None,
        "doc_stride": 128,
        "max_query_length": 64,
        "max_answer_length": 30,
        "may_be_impossible": False,
        "null_threshold": None,
    },
    "multiple_choice": {"max_seq_length": None, "file_format": "rows"},
    "ranking": {
        "max_seq_length": None,
        "ranking_loss": "binary",
        "texts_per_query": 16,
        "activation": "sigmoid",
    },
}
_NEXT_SENTENCE = "next_sentence/output_weights"
_RECORD = "bert_tf"  # Key of our task in task_specific_params of config.json.
_DIGEST = "head_sha256"  # Key of the digest of the head in this task.
# Fields whose values depend on the maximum length.
_OF_WINDOWS = ("doc_stride", "max_query_length")
# Fields that are tuned after training, for one checkpoint.
_TUNED = ("temperature", "thresholds", "null_threshold")
# Classes of transformers by task type.
CLASSES = {
    "ranking": "BertForSequenceClassification",
    "regression": "BertForSequenceClassification",
    "classification": "BertForSequenceClassification",
    "tagging": "BertForTokenClassification",
    "span_qa": "BertForQuestionAnswering",
    "multiple_choice": "BertForMultipleChoice",
}
_KIND_OF_CLASS = {
    **{name: kind for kind, name in CLASSES.items()},  # Regression is a classification there.
    "BertForNextSentencePrediction": "classification",
}


def of_next_sentence(
    weights: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the next sentence head as a classifier, if it is all that the model was made for.

    For other models, such as those with both pretraining heads, there are no arrays.
    """
    if architectures(values) != ["BertForNextSentencePrediction"] or _NEXT_SENTENCE not in weights:
        return {}
    return {KERNEL: weights[_NEXT_SENTENCE].T, BIAS: weights["next_sentence/output_bias"]}


def read_head(
    weights: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    max_seq_length: int,
    labels: Sequence[str] = (),
    pairs: bool = False,
    activation: str | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the task of a head, as in task.json, and its weights as the task's model has them.

    Args:
        weights: Arrays by our names, with the head as the source stores it, kernel `(H, C)`.
        values: Values of a Hugging Face configuration: architectures, id2label, problem_type.
        max_seq_length: Maximum tokens of the model or its tokenizer.
        labels: Names of the C labels; by default those of the configuration.
        pairs: Whether a sequence classifier or regressor reads pairs of texts.
        activation: Of the output of a cross-encoder, which reads pairs; `None` for other models.

    Raises:
        UserError: The head is of no supported task; the message says why.
    """
    kernel, bias = weights[KERNEL], weights[BIAS]
    kind = _kind(values)
    if architectures(values) == ["BertForNextSentencePrediction"]:
        labels, pairs = labels or NEXT_SENTENCE_LABELS, True
    # The table of a model of choices may be that of the classifier that it was trained from.
    named = {} if kind == "multiple_choice" else values
    names = _labels(named, len(bias), labels)
    if kind == "classification" and "O" in labels and any(label[:2] == "B-" for label in labels):
        kind = "tagging"  # Forks of run_classifier.py for entities have its names of tensors.
    limit = min(max_seq_length, MAX_SEQ_LENGTH)
    fields: dict[str, Any] = {}
    if kind == "classification":
        kind, fields = _classification(values, names)
        if activation and activation not in ACTIVATIONS:
            raise UserError(
                f"activation {activation:.80}: expected one of {', '.join(ACTIVATIONS)}"
            )
        if activation == "sigmoid" and kind == "classification":
            fields["multi_label"] = True  # Each score is a probability of its own.
        if is_binary({"kind": kind, **fields}):
            # softmax(W0 h, W1 h)[1] = sigmoid((W1 - W0) h)
            kernel, bias = kernel[:, 1:] - kernel[:, :1], bias[1:] - bias[:1]
        if activation and kind == "regression":
            fields["activation"] = activation
        if activation:
            fields["text_columns"] = ["text_a", "text_b"]
    elif kind == "tagging":
        scheme = "bio" if "O" in names else "plain"
        fields = {"labels": names, "doc_stride": max((limit - 2) // 2, 1), "scheme": scheme}
    elif kind == "span_qa":
        _check_units(len(bias), 2, "answer spans")
        # Questions and windows are shorter than usual if the model is short.
        query = min(64, max(limit // 2 - 2, 1))
        stride = min(128, max((limit - 3 - query) // 2, 1))
        fields = {"max_query_length": query, "doc_stride": stride}
    else:
        _check_units(len(bias), 1, "multiple choice")
    task = {"kind": kind, **copy.deepcopy(TEMPLATES[kind]), "max_seq_length": limit, **fields}
    task = _recorded(values, task, max_seq_length, weights)
    if pairs and len(task.get("text_columns", ())) == 1:
        task["text_columns"] = ["text_a", "text_b"]
    return task, {KERNEL: np.ascontiguousarray(kernel), BIAS: np.ascontiguousarray(bias)}


def is_binary(task: Mapping[str, Any]) -> bool:
    """Return True for a classification of two labels, whose one logit is that of the second."""
    labels = task.get("labels", ())
    return task["kind"] == "classification" and len(labels) == 2 and not task.get("multi_label")


def name_of(kind: str) -> str:
    """Return what messages call the head of a task type."""
    return "anomaly detector" if kind == "anomaly" else f"{kind} head"


def reads_pairs(task: Mapping[str, Any]) -> bool:
    """Return True for a task whose sequences are two texts, the second one with segment 1."""
    of_kind = task["kind"] in ("span_qa", "multiple_choice", "ranking")
    return of_kind or len(task.get("text_columns", ())) > 1


def options_of(
    source: Mapping[str, Any], kind: str, options: Collection[str], given: Collection[str]
) -> dict[str, Any]:
    """Return the options of a model that keeps a head: those of the head's task, if they fit.

    A model with labels of its own has a task of its own. An activation is chosen by the task type.

    Args:
        source: Task of the head, as in task.json; {} if there is none.
        kind: Task type of the model.
        options: Names of its options, beside max_seq_length.
        given: Names of those that the user gives; with any of them, nothing is tuned yet.
    """
    is_kept = source.get("kind") == kind or (kind == "ranking" and is_ranker(source))
    if not is_kept or "labels" in given:
        return {}
    names = {*options, "max_seq_length", *(() if given else _TUNED)} - {"activation"}
    if "max_seq_length" in given:
        names -= set(_OF_WINDOWS)
    found = {name: source[name] for name in names & source.keys()}
    is_pair = len(source.get("text_columns", ())) > 1
    return {**found, "pairs": True} if is_pair and "pairs" in options else found


def is_ranker(task: Mapping[str, Any]) -> bool:
    """Return True for a task whose one logit ranks the texts of a query, {} for none.

    A cross-encoder, a regressor of pairs, ranks the texts that it reads with a query.
    """
    kind = task.get("kind")
    return kind == "ranking" or (kind == "regression" and reads_pairs(task))


def record_of(
    task: Mapping[str, Any], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """Return the entry of config.json that keeps a task for `read_head`.

    Tuned values are for the head in `weights`, as it is written; by default for any head.
    """
    digest = {_DIGEST: _digest(weights)} if weights else {}
    return {"task_specific_params": {_RECORD: {**task, **digest}}}


def _digest(weights):
    """Return the SHA-256 of a head."""
    head = {name: np.asarray(weights[name], np.float32) for name in (KERNEL, BIAS)}
    return checkpoints.sha256_of(head)


def _recorded(values, task, max_seq_length, weights):
    """Return the task that a conversion recorded, if it is of the same outputs; else `task`.

    Unlike the default, a recorded length may be that of the model, `max_seq_length`, which limits
    it: windows of a shorter length are the default ones. Tuned values are left out if the head in
    `weights` is another one than when they were recorded.
    """
    entries = values.get("task_specific_params")
    found = entries.get(_RECORD) if isinstance(entries, dict) else None
    if isinstance(found, dict) and (found.get("kind"), task["kind"]) == ("ranking", "regression"):
        # A ranker is written as a regressor, which other libraries know.
        template = {"kind": "ranking", **TEMPLATES["ranking"]}
        task = {**template, "max_seq_length": task["max_seq_length"]}
    found = format_versions.without_removed(found) if isinstance(found, dict) else None
    same = ("kind", "labels", "multi_label")
    if not isinstance(found, dict) or any(found.get(name) != task.get(name) for name in same):
        return task
    if unknown := sorted(set(found) - {*task, _DIGEST}):
        warnings.warn(
            f"task_specific_params: ignored the recorded task, whose field "
            f"{', '.join(unknown):.200} is unknown; update bert_tf if a newer version wrote it",
            stacklevel=2,
        )
        return task
    length = found.get("max_seq_length")
    if type(length) is not int or length <= 0:
        return task
    if length > max_seq_length:
        windows = {name: task[name] for name in _OF_WINDOWS if name in task}
        found = {**found, **windows, "max_seq_length": max_seq_length}
    tuned = [name for name in _TUNED if found.get(name) is not None]
    if tuned and _DIGEST in found and found[_DIGEST] != _digest(weights):
        warnings.warn(
            f"task_specific_params: ignored {', '.join(tuned)}, since the head was changed after "
            "they were tuned; tune them again",
            stacklevel=2,
        )
        found = {**found, **dict.fromkeys(tuned)}
    # Fields that were added since have their defaults. Values are checked when the run is opened.
    return {**task, **{name: value for name, value in found.items() if name != _DIGEST}}


def match_head(
    source: Mapping[str, Any], head: Mapping[str, np.ndarray], task: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the weights of a head, of the task `source`, in the order of another task's labels.

    Raises:
        UserError: The head does not fit the task; the message says why.
    """
    if source["kind"] != task["kind"] and not (task["kind"] == "ranking" and is_ranker(source)):
        raise UserError(f"expected a head of task {task['kind']}, received {source['kind']}")
    if bool(source.get("multi_label")) != bool(task.get("multi_label")):
        raise UserError("expected both heads with multi_label, or none")
    if task["kind"] == "classification":
        pooling, other = (of.get("pooling", "pooled") for of in (task, source))
        if pooling != other:
            raise UserError(f"expected a head with pooling {pooling}, received {other}")
    ours, theirs = list(task.get("labels", ())), list(source.get("labels", ()))
    if sorted(ours) != sorted(theirs):
        raise UserError(
            f"expected a head with the labels {', '.join(ours):.200}, received "
            f"{', '.join(theirs):.200}"
        )
    kernel, bias = head[KERNEL], head[BIAS]
    if ours != theirs and len(bias) == 1:
        kernel, bias = -kernel, -bias  # The one logit is of the second label.
    elif ours != theirs:
        order = [theirs.index(label) for label in ours]
        kernel, bias = kernel[:, order], bias[order]
    return {KERNEL: kernel, BIAS: bias}


def _kind(values):
    """Return the task type of a source; "classification" includes regression."""
    classes = architectures(values)
    for name in classes:
        if name in _KIND_OF_CLASS:
            return _KIND_OF_CLASS[name]
    raise UserError(
        f"architectures is {', '.join(classes) or 'missing':.80}; expected one of "
        f"{', '.join(_KIND_OF_CLASS)}"
    )


def _labels(values, count, labels):
    """Return the names of the labels in the order of the head's outputs."""
    if labels:
        if len(labels) != count or len(set(labels)) != count or not all(labels):
            raise UserError(
                f"labels {', '.join(labels):.200}: expected {count} different names, one per "
                "output of the head"
            )
        return list(labels)
    default = [f"LABEL_{number}" for number in range(count)]
    table = values.get("id2label")
    # transformers prefers num_labels to a table of another length.
    if table is None or (
        isinstance(table, dict) and len(table) != count == values.get("num_labels")
    ):
        return default
    if not isinstance(table, dict) or {str(key) for key in table} != set(map(str, range(count))):
        raise UserError(f"id2label: expected names of the ids 0 to {count - 1}")
    names = [str(table[str(number)]).strip() for number in range(count)]
    if len(set(names)) != count or not all(names):
        raise UserError("id2label: expected different names")
    return names


def _classification(values, names):
    """Return the task type and its fields of a sequence classifier."""
    problem = values.get("problem_type")
    if problem == "regression" or (problem is None and len(names) == 1):
        _check_units(len(names), 1, "regression")
        return "regression", {}
    if problem not in (None, "single_label_classification", "multi_label_classification"):
        raise UserError(f"problem_type is {problem!r:.80}")
    is_multi = problem == "multi_label_classification"
    if len(names) == 1 and not is_multi:
        raise UserError("single_label_classification: expected two labels or more, received one")
    return "classification", {"labels": names, "multi_label": is_multi}


def _check_units(received, expected, what):
    if received != expected:
        raise UserError(f"{what}: expected a head with {expected} outputs, received {received}")
