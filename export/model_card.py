"""Model card (MODEL_CARD.md) of a published model, from the files of its run."""

from __future__ import annotations

import os
import re
from importlib import metadata
from typing import TYPE_CHECKING

from bert_tf.text import unicode_tables
from export import field_docs
from export.tf_serving_config import printable

if TYPE_CHECKING:
    from tasks.trained_model import TrainedModel

NOT_RECORDED = "not recorded"
PACKAGES = ("tensorflow", "tensorflow-text", "keras", "bert_tf")
# Values of task.json that predictions depend on, in addition to weights and vocabulary.
_DECISIONS = {
    "max_seq_length": "maximum tokens per window",
    "truncation": "part of a longer text that is kept",
    "doc_stride": "tokens between the starts of the windows of a longer text",
    "max_query_length": "maximum tokens of a question; the rest is removed",
    "max_answer_length": "maximum tokens of an answer",
    "may_be_impossible": "whether a question may have no answer",
    "temperature": "divisor of the logits",
    "thresholds": "minimum probability of a label to be returned",
    "rare_label": "label that the threshold applies to",
    "null_threshold": "no-answer score above which there is no answer",
    "threshold": "minimum score of an anomaly",
    "false_alarm_rate": "maximum fraction of normal dev texts above the threshold",
}
_SETTINGS = (
    "global_batch_size",
    "epochs",
    "num_train_steps",
    "learning_rate",
    "warmup_proportion",
    "warmup_steps",
    "seed",
    "precision",
)

_PRECISIONS = {
    "float32": "float32",
    "bfloat16": "bfloat16, for processors with AVX512-BF16 or AMX (slow on others); outputs "
    "are float32, and probabilities are within 0.02 of the trained model's",
}
_CARD = """\
# {name}

{task}

## Predictions

{answers}

Inputs and outputs in detail: SIGNATURES.md.

## Training data

{data}

## Training

{training}

## Evaluation

{evaluation}
{tuning}
## Text

- vocabulary: {entries:,} entries, {case}, sha256 {vocabulary}
- accents are {accents}
- characters as in Unicode {unicode}, tables sha256 {tables}

## Weights

- origin: {origin}
- size: {parameters:,} parameters; {layers} layers of {hidden}
- licence of the origin's weights: not recorded; check it with the origin
- checkpoint: {checkpoint}
- served in: {precision}

## Versions

| | trained with | exported with |
|---|---|---|
{versions}

## Limits

The model reflects its pretraining and training data, with their errors and bias. The metrics above
hold for the data named there, not for other kinds of text. The export has checked that the served
model's predictions match the trained model's, not that they are correct.
"""


def model_card(name: str, trained: TrainedModel, precision: str) -> str:
    """Return the model card as Markdown. It contains no path of this machine.

    Args:
        name: Name of the published model.
        trained: The exported model.
        precision: "float32" or "bfloat16".
    """
    run, config, model = trained.run, trained.run.config, trained.pipeline.model
    # As in the released tokenizer: unless it is set, accents are removed from uncased text only.
    keeps = config.strip_accents is False or (
        config.strip_accents is None and not config.do_lower_case
    )
    return _CARD.format(
        name=printable(name),
        task=_task(trained),
        answers=_list(
            f"{name}: {_plain(values[name])} ({meaning})"
            for values in [trained.task.to_dict()]
            for name, meaning in _DECISIONS.items()
            if values.get(name) is not None
        ),
        data=_data(run.train),
        training=_training(run.train),
        evaluation=_evaluation(trained),
        tuning=_tuning(trained.tuned),
        entries=len(run.vocabulary),
        case="uncased" if config.do_lower_case else "cased",
        vocabulary=run.vocabulary.sha256,
        accents="kept" if keeps else "removed",
        unicode=unicode_tables.unicode_version(),
        tables=unicode_tables.sha256(),
        origin=without_paths(str(run.train.get("origin", NOT_RECORDED))),
        parameters=model.count_params(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        checkpoint=_base(trained.checkpoint),
        precision=_PRECISIONS[precision],
        versions=_versions(run.train.get("versions", {})),
    )


def without_paths(origin: str) -> str:
    """Return the origin of weights with file and directory names instead of paths.

    Args:
        origin: Origin as recorded in train.json, such as
            "run /home/me/RUN/checkpoints/step-00000120".

    Returns:
        The origin without parent directories, such as "run RUN, step-00000120".
    """
    origin = re.sub(r"^run (?:.*/)?([^/]+)/checkpoints/+(step-\d+)", r"run \1, \2", origin)
    return re.sub(r"(?<!\S)\S*/(?=\S)", "", origin)


def _task(trained):
    task = trained.task
    lines = [f"{task.kind}: {field_docs.TASKS.get(task.kind, '')}".rstrip(": ")]
    labels = getattr(task, "labels", ())
    if labels:
        lines.append(f"{len(labels)} labels, in order: {', '.join(labels)}.")
    normal = getattr(task, "normal_labels", ())
    if normal:
        lines.append(f"Normal labels: {', '.join(normal)}.")
    return "\n\n".join(lines)


def _data(train):
    settings, recorded = train.get("settings", {}), train.get("data") or {}
    if not isinstance(recorded, dict):  # Pretraining records one digest per directory of shards.
        recorded = dict(zip(settings.get("shards", ()), recorded, strict=False))
    used_for = dict.fromkeys(settings.get("dev") or (), "evaluated on")
    return (
        _list(
            f"{_base(path)}, {used_for.get(path, 'trained on')}, sha256 {digest}"
            for path, digest in recorded.items()
        )
        or NOT_RECORDED
    )


def _training(train):
    settings = train.get("settings", {})
    known = [name for name in _SETTINGS if settings.get(name) is not None]
    return _list(f"{name}: {_plain(settings[name])}" for name in known) or NOT_RECORDED


def _evaluation(trained):
    """Return the metrics of the exported checkpoint, also those with its tuned values."""
    checkpoints = trained.run.checkpoints
    step = checkpoints.step_of(_base(trained.checkpoint))
    metrics = dict(checkpoints.info(step).get("metrics") or {})
    tuned = (trained.tuned or {}).get("metrics", {})
    metrics |= {f"tuned_{name}": value for name, value in tuned.items()}
    if not metrics:
        return "The exported checkpoint was not evaluated in its run."
    lines = [f"| {name} | {_plain(value)} |" for name, value in metrics.items()]
    before = f"Metrics of step {step}, on the files under Training data."
    if tuned:
        before += " `tuned_...`: with the thresholds and the temperature that are served."
    return "\n".join([before, "", "| metric | value |", "|---|---|", *lines])


def _tuning(tuned):
    """Return a section on the file that the served values were tuned on, "" if there are none."""
    if tuned is None:
        return ""
    names, file = ", ".join(tuned["values"]), tuned.get("file")
    if file is None:
        return f"\nTuned: {names}. The file is not recorded; metrics on it are optimistic.\n"
    lines = [
        f"Tuned on {_base(file)} (sha256 {tuned.get('sha256') or NOT_RECORDED}): {names}. Metrics "
        "on that file (`dev_...`, `tuned_dev_...`) are optimistic: expect lower ones on other "
        "texts, and evaluate on a file that was not used for selection or tuning.",
        *(f"Warning: {line}." for line in tuned.get("warnings", ())),
    ]
    return "\n" + "\n\n".join(lines) + "\n"


def _versions(trained_with):
    rows = []
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = NOT_RECORDED
        rows.append(f"| {package} | {trained_with.get(package, NOT_RECORDED)} | {version} |")
    return "\n".join(rows)


def _list(lines):
    return "\n".join(f"- {line}" for line in lines)


def _plain(value):
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _base(path):
    return os.path.basename(str(path).rstrip("/"))
