"""Models of the tasks on a text or pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from bert_tf.errors import UserError
from tasks import class_imbalance
from tasks.classification import Classification
from tasks.readers.records import as_label
from tasks.regression import Regression
from tasks.task_model import TaskModel

_PAIR = ("text_a", "text_b")


@keras.saving.register_keras_serializable("bert_tf")
class TextClassifier(TaskModel):
    """Classifier of texts or pairs: sigmoid for two labels, softmax for more, or multi-label.

    Options of `from_pretrained`:
        labels: Names of the labels in the order of their ids.
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
        multi_label: Any number of labels per row.
        class_weights: Loss weight per label.
        balanced_sampling: Draws all classes equally often.
        focal_gamma: Exponent of the focal loss; 0 is cross-entropy.
        prior_bias: Initializes the output biases from class frequencies.
        rare_label: Label that is predicted from a threshold on.
        threshold_objective: "f1", "precision=P" or "recall=R": tunes thresholds on validation rows.
        calibrate: Temperature scaling, fitted on validation rows.
    """

    @classmethod
    def make_task(
        cls,
        *,
        max_seq_length: int,
        labels: Sequence[str],
        pairs: bool = False,
        truncation: str = "head",
        multi_label: bool = False,
        class_weights: Sequence[float] | Mapping[str, float] = (),
        **options: Any,
    ) -> Classification:
        """Return the task for options of `from_pretrained`."""
        names = tuple(as_label(str(label)) for label in labels)
        if isinstance(labels, str) or len(names) < 2 or len(set(names)) < len(names):
            raise UserError(
                f"labels={labels!r:.80}: expected at least two different names, in a list"
            )
        if isinstance(class_weights, Mapping):
            class_weights = [float(class_weights.get(name, 1.0)) for name in names]
        class_imbalance.check_options(
            class_weights=tuple(map(str, class_weights)), multi_label=multi_label, **options
        )
        return Classification(
            max_seq_length=max_seq_length,
            labels=names,
            text_columns=_PAIR if pairs else ("text",),
            truncation=truncation,
            multi_label=multi_label,
            class_weights=tuple(map(float, class_weights)),
            **options,
        )


@keras.saving.register_keras_serializable("bert_tf")
class TextRegressor(TaskModel):
    """Regressor: one number per text or pair.

    Options of `from_pretrained`:
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    @classmethod
    def make_task(
        cls, *, max_seq_length: int, pairs: bool = False, truncation: str = "head"
    ) -> Regression:
        """Return the task for options of `from_pretrained`."""
        return Regression(
            max_seq_length=max_seq_length,
            text_columns=_PAIR if pairs else ("text",),
            truncation=truncation,
        )
