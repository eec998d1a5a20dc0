"""MODEL_CARD.md: what a published model is, from what its run recorded."""

import os
import re
from importlib import metadata

from bert_tf.text import unicode_tables
from export import field_docs
from export.tf_serving_config import printable

NOT_RECORDED = "not recorded"
PACKAGES = ("tensorflow", "tensorflow-text", "keras", "bert_tf")
# Of task.json, what an answer depends on beside weights and vocabulary.
_DECISIONS = {
    "max_seq_length": "tokens that the model takes at a time",
    "truncation": "what of a longer text is kept",
    "doc_stride": "tokens between the beginnings of the windows that a longer text goes through",
    "max_query_length": "tokens of a question that are kept",
    "max_answer_length": "tokens that an answer has at most",
    "may_be_impossible": "whether there may be no answer",
    "temperature": "what logits are divided by",
    "thresholds": "from which probability on a label is given",
    "rare_label": "the label that has the threshold",
    "null_threshold": "from which score on there is no answer",
    "threshold": "from which score on a text is unusual",
    "false_alarm_rate": "the share of normal texts that the threshold may take for unusual",
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
    "bfloat16": "bfloat16, for processors with AVX512-BF16 or AMX, others are slow with it; "
    "outputs are float32, probabilities within 0.02 of the trained model's",
}
_CARD = """\
# {name}

{task}

## Answers

{answers}

What it takes and gives in detail: SIGNATURES.md.

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
- licence of the origin's weights: not recorded; ask the origin
- checkpoint: {checkpoint}
- served in: {precision}

## Versions

| | trained with | exported with |
|---|---|---|
{versions}

## Limits

It knows what its training data and the data before that showed it, with their errors and bias. The
figures above are of the data named there, and say nothing of texts of another kind. The export has
tested that the served model answers as the trained one, not that the answers are right.
"""


def model_card(name, trained, precision):
    """The card of a TrainedModel that is published as `name`. It names no path of this machine."""
    run, config, model = trained.run, trained.run.config, trained.pipeline.model
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


def without_paths(origin):
    """Where weights are from, with files and folders by their own names.

    "run /home/me/RUN/checkpoints/step-00000120" becomes "run RUN, step-00000120".
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
        lines.append(f"Normal are the labels: {', '.join(normal)}.")
    return "\n\n".join(lines)


def _data(train):
    settings, recorded = train.get("settings", {}), train.get("data") or {}
    if not isinstance(recorded, dict):  # Pretraining: the manifests of its shards.
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
    """The figures of the exported checkpoint; with what was tuned afterwards, where it was."""
    checkpoints = trained.run.checkpoints
    step = checkpoints.step_of(_base(trained.checkpoint))
    metrics = dict(checkpoints.info(step).get("metrics") or {})
    tuned = (trained.tuned or {}).get("metrics", {})
    metrics |= {f"tuned_{name}": value for name, value in tuned.items()}
    if not metrics:
        return "The exported checkpoint was not evaluated in its run."
    lines = [f"| {name} | {_plain(value)} |" for name, value in metrics.items()]
    before = f"Of step {step}; the files are those under Training data."
    if tuned:
        before += " `tuned_...`: with thresholds and temperature as they are served."
    return "\n".join([before, "", "| figure | |", "|---|---|", *lines])


def _tuning(tuned):
    """The file that the served values were tuned on, and what that means for its metrics."""
    if tuned is None:
        return ""
    names, file = ", ".join(tuned["values"]), tuned.get("file")
    if file is None:
        return f"\nTuned: {names}. The file is not recorded; metrics on it are optimistic.\n"
    lines = [
        f"Tuned on {_base(file)} (sha256 {tuned.get('sha256') or NOT_RECORDED}): {names}. Metrics "
        "on that file (`dev_...`, `tuned_dev_...`) are optimistic: expect worse on other texts, "
        "and measure on a file that chose and tuned nothing.",
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
