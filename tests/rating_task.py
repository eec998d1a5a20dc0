"""A task type that the product does not have: ratings of texts, from 1 to 5 stars."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from bert_tf.train.losses import squared_error
from tasks.base.task import LabelledTextTask, OutputSpec
from tasks.graph.heads import SequenceClassifier
from tasks.model.task_model import TaskModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingTask(LabelledTextTask):
    kind = "rating"
    description = "Predicts the rating of a text."
    outputs = {
        "stars": OutputSpec("rating, from 1 to 5"),
        "score": OutputSpec("rating before rounding"),
    }
    best_metric = "accuracy"
    losses = {"score": squared_error}
    label_dtype = np.float32

    def build_model(self, config, dtype="float32"):
        return SequenceClassifier(config, 1, output="score", name=self.kind, dtype=dtype)

    def label_of(self, label):
        if label not in tuple("12345"):
            raise ValueError(f"label {label!r}: expected 1 to 5")
        return int(label)

    def encode_label(self, value, texts):
        return self.label_of(str(value))

    def predictions(self, texts, windows, outputs):
        score = outputs["score"][:, 0]
        stars = tf.cast(tf.clip_by_value(tf.round(score), 1, 5), tf.int32)
        return {"stars": stars, "score": score}

    def margin(self, predictions, windows, outputs):
        return 0.5 - tf.abs(predictions["score"] - tf.round(predictions["score"]))

    def metrics(self, data, outputs):
        stars = np.clip(np.round(outputs["score"][:, 0]), 1, 5)
        return {"accuracy": float(np.mean(stars == data.labels["score"]))}


@keras.saving.register_keras_serializable("tests")
class TextRater(TaskModel):
    task_class = RatingTask
    options = ("truncation",)
