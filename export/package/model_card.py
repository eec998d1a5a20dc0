"""Model card (MODEL_CARD.md) of a published model, from the files of its run."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from bert_tf.config import strips_accents
from bert_tf.system.versions import versions
from bert_tf.text import unicode_tables
from export.package import documents

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
    checkpoint = documents.base_name(source.path)
    step = run.checkpoints.step_of(checkpoint)
    installed = versions(PACKAGES)
    tuned_metrics = (source.tuned or {}).get("metrics", {})
    return documents.render(
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
