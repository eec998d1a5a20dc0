"""A task type that the product does not have: ratings of texts, from 1 to 5 stars."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from bert_tf.train.losses import squared_error
from tasks.base.task import OutputSpec, Postprocessor, Reader
from tasks.base.text_task import LabelledTextTask
from tasks.graph.heads import SequenceClassifier
from tasks.model.task_model import TaskModel


class RatingReader(Reader["RatingTask"]):
    def label_of(self, label):
        if label not in tuple("12345"):
            raise ValueError(f"label {label!r}: expected 1 to 5")
        return int(label)

    def encode_label(self, value, texts):
        return self.label_of(str(value))


class RatingPostprocessor(Postprocessor["RatingTask"]):
    description = "Predicts the rating of a text."
    outputs = {
        "stars": OutputSpec("rating, from 1 to 5"),
        "score": OutputSpec("rating before rounding"),
    }
    best_metric = "accuracy"

    def predictions(self, texts, windows, outputs):
        score = outputs["score"][:, 0]
        stars = tf.cast(tf.clip_by_value(tf.round(score), 1, 5), tf.int32)
        return {"stars": stars, "score": score}

    def margin(self, predictions, windows, outputs):
        return 0.5 - tf.abs(predictions["score"] - tf.round(predictions["score"]))

    def metrics(self, data, outputs):
        stars = np.clip(np.round(outputs["score"][:, 0]), 1, 5)
        return {"accuracy": float(np.mean(stars == data.labels["score"]))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingTask(LabelledTextTask):
    kind = "rating"
    reader_class = RatingReader
    postprocessor_class = RatingPostprocessor
    losses = {"score": squared_error}

    @classmethod
    def from_data(cls, data, **options):
        return cls(**options)

    def targets(self, examples, windows):
        stars = np.array(examples.labels, np.float32)
        return {"score": stars}, {"score": np.ones_like(stars)}

    def build_model(self, config, dtype="float32"):
        model = SequenceClassifier(config, 1, output="score", name=self.kind, dtype=dtype)
        model.build()
        return model


@keras.saving.register_keras_serializable("tests")
class TextRater(TaskModel):
    task_class = RatingTask
    options = ("truncation",)
