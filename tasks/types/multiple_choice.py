"""Multiple choice: select the text that continues a prompt (SWAG; Devlin et al. 2019, 4.4).

Each choice is encoded as [CLS] prompt [SEP] choice [SEP] and gets one score; a softmax normalizes
the scores of a question. Questions may have different numbers of choices.

Shape suffixes: B questions, C choices of the question that has most, W choices of all questions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.train.losses import softmax_cross_entropy, softmax_divergence
from tasks.base.task import ChoiceTask, OutputSpec, top2_gap
from tasks.data.examples import Arrays, EncodedExamples, Tensors
from tasks.data.labels import check_batch
from tasks.data.windows import Windows
from tasks.graph.heads import ChoiceModel
from tasks.metrics.classification import accuracy
from tasks.model.task_model import TaskModel

EQUAL = 1e-6  # Closer probabilities count as ties, so that rounding does not decide.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoiceTask(ChoiceTask):
    """Questions with any number of choices.

    An empty string is a missing choice: it is never selected and its probability is 0. The
    prediction for a question without choices is -1.
    """

    file_format: str = "rows"  # See tasks.data.readers.choices.

    kind = "multiple_choice"
    description = "Predicts which of several choices fits a prompt best."
    outputs = {
        "choice": OutputSpec("index of the best choice, from 0; -1 if there are no choices"),
        "probabilities": OutputSpec("probability of each choice", in_near_ties=True),
    }
    best_metric = "accuracy"
    input_descriptions = {
        "prompt": 'text that the choices continue or answer; "" for none',
        "choices": 'choices; rows with fewer choices than others are padded with ""',
    }
    input_names = ("prompt", "choices")
    INPUT_RANKS = {"choices": 2}
    fillers = {"probabilities": 0.0}
    accuracies = ("choice",)
    losses = {"choice": softmax_cross_entropy}
    soft_losses = {"choice": softmax_divergence}

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> int:
        """Return the index of the correct choice."""
        choices = texts["choices"]
        if not any(choices):
            raise ValueError("choices: expected at least one that is not empty, received none")
        if type(value) is not int or not 0 <= value < len(choices):
            raise ValueError(
                f"choice {value!r:.80}: expected an integer from 0 to {len(choices) - 1}"
            )
        if not choices[value]:
            raise ValueError(f"choice {value}: expected one that is not empty")
        return value

    def batch_labels(self, y: tf.Tensor) -> tf.Tensor:
        """Return the indices of the correct choices, int32 `(B,)`, of integers of any size."""
        if y.shape.rank not in (1, None) or not y.dtype.is_integer:
            raise UserError(f"y: expected integers (B,), received {y.dtype.name} {y.shape}")
        with check_batch(y >= 0, y, "the index of a choice"):
            return tf.cast(y, tf.int32)

    def build_model(self, config: BertConfig, dtype: str = "float32") -> ChoiceModel:
        """Return the encoder with one score per choice."""
        return ChoiceModel(config, name=self.kind, dtype=dtype)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return `choice`, int32 `(B,)`, and `probabilities`, float32 `(B, C)`."""
        scores_BC = outputs["choice"]
        # Compared like this, a score that is NaN is not taken for a missing choice.
        probabilities_BC = tf.where(scores_BC <= MASKED_SCORE, 0.0, tf.nn.softmax(scores_BC))
        # Ties go to the first choice; -1 if there is none.
        best_B1 = tf.reduce_max(probabilities_BC, axis=1, keepdims=True)
        is_best_BC = (probabilities_BC > 0) & (probabilities_BC >= best_B1 - EQUAL)
        count = tf.shape(scores_BC)[1]
        first_B = tf.reduce_min(tf.where(is_best_BC, tf.range(count), count), axis=1)
        return {
            "choice": tf.where(first_B < count, first_B, -1),
            "probabilities": probabilities_BC,
        }

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the gap between the two most probable choices, `(B,)`."""
        # top2_gap needs two values; questions may have fewer choices.
        return top2_gap(tf.pad(predictions["probabilities"], [[0, 0], [0, 2]]))

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove the choices that a batch adds, whose probability is 0."""
        probabilities = row["probabilities"]
        count = max((n for n, value in enumerate(probabilities, start=1) if value != 0), default=0)
        return {**row, "probabilities": probabilities[:count]}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the accuracy."""
        choices_B = self.predictions({}, data.windows, outputs)["choice"].numpy()
        return {"accuracy": accuracy(data.labels["choice"], choices_B)}


@keras.saving.register_keras_serializable("bert_tf")
class MultipleChoice(TaskModel):
    """Selection of one of several texts that continue a prompt.

        rows = {"prompt": ["The sky is"], "choices": [["a fish.", "blue."]]}
        model = MultipleChoice.from_pretrained(PATH)
        model.fit(rows, [1], epochs=1)
        model.predict(rows)["choice"]  # int32 (1,)

    Rows have the columns prompt, a string, and choices, a list of strings. Labels of `fit` are the
    indices of the correct choices.
    """

    task_class = MultipleChoiceTask
