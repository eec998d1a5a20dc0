"""Text files of a published model, from the templates in templates/.

The model card (MODEL_CARD.md) is written from the files of the run. The reference page of the
signatures (SIGNATURES.md) has requests and responses.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
import tensorflow as tf

from bert_tf.config import strips_accents
from bert_tf.system.versions import versions
from bert_tf.text import unicode_tables
from export.clients.signatures import Signature
from tasks.base.task import SignatureSpec

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

PACKAGES = ("tensorflow", "tensorflow-text", "keras", "bert_tf")
_SETTINGS = (
    "global_batch_size",
    "epochs",
    "num_train_steps",
    "learning_rate",
    "warmup_proportion",
    "warmup_steps",
    "distill_temperature",
    "distill_alpha",
    "seed",
    "precision",
)
SHOWN = 4  # Number of entries shown of a list that is longer than twice that.
DIGITS = 4  # Significant digits of numbers.


def render(file_name: str, **values: Any) -> str:
    """Return the content of a file from the template `templates/{file_name}.j2`."""
    return _ENVIRONMENT.get_template(f"{file_name}.j2").render(values)


def _printable(name):
    """Return a name with "?" for every character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _plain(value):
    """Return a value of a JSON file as text: numbers with 6 digits, lists without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _base_name(path: str) -> str:
    """Return the last part of a path, also if the path ends with a slash."""
    return os.path.basename(path.rstrip("/"))


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("export.package"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters.update(printable=_printable, plain=_plain, base_name=_base_name)


class MetricChange(NamedTuple):
    """A metric of a file of labelled rows, computed by the trained model and by the served graph.

    Attributes:
        name: The metric that selects the task's best checkpoint.
        path: The file.
        trained: Value of the trained model, in float32.
        served: Value of the served graph.
    """

    name: str
    path: str
    trained: float
    served: float

    @property
    def drop(self) -> float:
        """By how many points of 100 the metric is lower."""
        return 100 * (self.trained - self.served)


def model_card(
    name: str,
    model: TaskModel,
    precision: str,
    is_packed: bool,
    change: MetricChange | None = None,
    device: str = "cpu",
) -> str:
    """Return the model card as Markdown. It contains no path of this machine.

    `model` was loaded from a run. `is_packed` says whether the graph has packed products; see
    `export.graph.served_encoder`. `change` is what int8 has changed.
    """
    source, config = model.source, model.config
    assert source is not None  # `publish` saves other models to a run first.
    run, train = source.run, source.run.train
    settings, data = train.get("settings", {}), train.get("data") or {}
    if not isinstance(data, dict):  # Pretraining records one digest per directory of shards.
        data = dict(zip(settings.get("shards", ()), data, strict=False))
    checkpoint = _base_name(source.path)
    step = run.checkpoints.step_of(checkpoint)
    installed = versions(PACKAGES)
    tuned_metrics = (source.tuned or {}).get("metrics", {})
    return render(
        "MODEL_CARD.md",
        name=name,
        task=model.task.to_dict(),
        description=model.task.description,
        # Fields that predictions depend on, in addition to weights and vocabulary.
        fields={
            field.name: field.metadata["description"]
            for field in dataclasses.fields(model.task)
            if "description" in field.metadata
        },
        data=data,
        dev=settings.get("dev") or (),
        settings={field: settings[field] for field in _SETTINGS if settings.get(field) is not None},
        step=step,
        metrics={
            **(run.checkpoints.info(step).get("metrics") or {}),
            **{f"tuned_{metric}": value for metric, value in tuned_metrics.items()},
        },
        tuned=source.tuned,
        vocabulary={"entries": len(model.vocabulary), "sha256": model.vocabulary.sha256},
        config=config.to_dict(),
        keeps_accents=not strips_accents(config.do_lower_case, config.strip_accents),
        unicode={
            "version": unicode_tables.unicode_version(),
            "sha256": unicode_tables.sha256(),
        },
        origin=without_paths(str(train.get("origin", ""))),
        teacher=without_paths(str(train.get("teacher", {}).get("source", ""))),
        parameters=model.network.count_params(),
        checkpoint=checkpoint,
        precision=precision,
        is_packed=is_packed,
        change=change,
        device=device,
        checked_on=_gpu() if device == "gpu" else None,
        versions={
            package: {
                "trained": train.get("versions", {}).get(package),
                "exported": installed[package],
            }
            for package in PACKAGES
        },
    )


def without_paths(origin: str) -> str:
    """Return the origin of weights, as in train.json, without parent directories.

    "run /home/me/RUN/checkpoints/step-00000120" becomes "run RUN, step-00000120". The organization
    in the id of a model of the hub stays.
    """
    origin = re.sub(r"^run (?:.*/)?([^/]+)/checkpoints/+(step-\d+)", r"run \1, \2", origin)
    origin = re.sub(r"^run (?:.*/)?([^/]+?)/*(?=, unfinished)", r"run \1", origin)
    return re.sub(r"(?<!\S)(?<!Hugging Face model )\S*/(?=\S)", "", origin)


def _gpu():
    """Return the name of this machine's first GPU, or `None`."""
    for gpu in tf.config.get_visible_devices("GPU"):
        return tf.config.experimental.get_device_details(gpu).get("device_name", "a GPU")
    return None


def signature_page(
    name: str,
    signatures: Sequence[Signature],
    specs: Mapping[str, SignatureSpec],
    predictions: Mapping[str, Mapping[str, np.ndarray]],
) -> str:
    """Return the page as Markdown, with the outputs for each signature's example request."""
    url = f"http://localhost:8501/v1/models/{urllib.parse.quote(name, safe='')}:predict"
    return render(
        "SIGNATURES.md",
        name=name,
        digits=DIGITS,
        shown=SHOWN,
        url=shlex.quote(url),
        signatures=[
            _described(signature, specs[signature.name], predictions[signature.name])
            for signature in signatures
        ],
    )


def _described(signature, spec, prediction):
    """Return what the page shows of a signature, as strings."""
    descriptions = {name: output.description for name, output in spec.outputs.items()}
    given = [name for name in spec.outputs if name in signature.outputs]
    inputs = signature.example()
    outputs = {output: _shown(prediction[output].tolist()) for output in given}
    named = {} if signature.name == "serving_default" else {"signature_name": signature.name}
    return {
        "name": signature.name,
        "description": spec.description,
        "inputs": _table(signature.inputs.values(), spec.inputs),
        "outputs": _table([signature.outputs[output] for output in given], descriptions),
        "rows": {
            "request": _as_argument({**named, "instances": _unnamed(inputs) or _rows(inputs)}),
            "response": _json("predictions", _unnamed(outputs) or _rows(outputs)),
        },
        "columns": {
            "request": _as_argument({**named, "inputs": inputs}),
            "response": _json("outputs", _unnamed(outputs) or outputs),
        },
        "example": {key: json.dumps(values) for key, values in inputs.items()},
    }


def _table(tensors, descriptions):
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": ["B", *("*" if size is None else size for size in (tensor.shape or ())[1:])],
            "description": descriptions[tensor.name],
        }
        for tensor in tensors
    ]


def _unnamed(columns):
    """Return the only column, or `None`. In the REST API, a single input or output has no name."""
    return next(iter(columns.values())) if len(columns) == 1 else None


def _rows(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _shown(value, is_rows=True):
    """Prepare a nested list for JSON: decode text, round numbers and cut long rows."""
    if isinstance(value, list):
        shown = [_shown(entry, False) for entry in value]
        if is_rows or len(shown) <= 2 * SHOWN:
            return shown
        return [*shown[:SHOWN], f"... {len(shown) - SHOWN} more"]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return (
        float(np.format_float_positional(value, DIGITS, fractional=False))
        if isinstance(value, float)
        else value
    )


def _json(key, content):
    """Return a JSON object of one key, with one line per row or column."""
    if isinstance(content, dict):
        opening, closing = "{", "}"
        lines = [f"{json.dumps(name)}: {_dumps(entry)}" for name, entry in content.items()]
    else:
        opening, closing = "[", "]"
        lines = [_dumps(entry) for entry in content]
    return f'{{"{key}": {opening}\n  ' + ",\n  ".join(lines) + f"\n{closing}}}"


def _dumps(value):
    return json.dumps(value, ensure_ascii=False)


def _as_argument(value):
    return shlex.quote(_dumps(value))
