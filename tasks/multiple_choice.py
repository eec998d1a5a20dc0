"""Multiple choice: which text goes best with a prompt (SWAG; Devlin et al. 2019, 4.4).

Each choice is read behind the prompt, [CLS] prompt [SEP] choice [SEP], and gets one score; a
softmax goes over the choices of a question. Questions may differ in how many they have.

Legend: B questions, C choices of the one that has most, W choices of all.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from bert_tf.text.tokenizer import Tokens
from bert_tf.train.losses import softmax_cross_entropy
from tasks.decisions import top2_gap
from tasks.examples import Example
from tasks.heads import ChoiceModel
from tasks.metrics.labels import accuracy
from tasks.readers.choices import read_choices
from tasks.readers.records import BadRow
from tasks.task import Task
from tasks.windows import Windows

MAX_CHOICES = 2**12  # Of a question; each is read with the prompt, which takes memory.
TOO_MANY = f"wanted at most {MAX_CHOICES} choices per question"
EQUAL = 1e-6  # Probabilities so near are of equal choices; rounding shall not decide.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task):
    """Questions of any number of choices; `file_format` is that of the files, see readers.choices.

    "" among the choices is no choice: it is never chosen, and its probability is 0. Where there is
    nothing else the choice is -1.
    """

    file_format: str = "rows"

    kind = "multiple_choice"
    best_metric = "accuracy"
    input_names = ("prompt", "choices")
    INPUT_RANKS = {"choices": 2}
    losses = {"choice": softmax_cross_entropy}

    @classmethod
    def from_data(cls, path, **options):
        """The task as the options say it: there is nothing to learn from the file."""
        return cls(**options)

    def iter_examples(self, path, labelled):
        for row in read_choices(path, self.file_format, labelled):
            if isinstance(row, BadRow):
                yield row
            else:
                texts = {"prompt": row.prompt, "choices": row.choices}
                yield Example(texts, row.label, row.location)

    def encode(self, texts, tokenize, vocabulary):
        prompt_B, choices_BC = texts["prompt"], texts["choices"]
        tf.debugging.assert_equal(
            tf.size(prompt_B), tf.shape(choices_BC)[0], "wanted choices for each prompt"
        )
        tf.debugging.assert_less_equal(tf.shape(choices_BC)[1], MAX_CHOICES, TOO_MANY)
        indices_W2 = tf.where(choices_BC != "")
        example_W, choice_W = tf.unstack(indices_W2, axis=1)
        room = token_budget(2, self.max_seq_length)
        prompts = Tokens(
            *(
                None if ragged is None else tf.gather(ragged, example_W)
                for ragged in tokenize_ends(tokenize, prompt_B, room)
            )
        )
        choices = tokenize_ends(tokenize, tf.gather_nd(choices_BC, indices_W2), room)
        return Windows(
            pack([prompts, choices], vocabulary, self.max_seq_length),
            tf.cast(example_W, tf.int32),
            choice_W=tf.cast(choice_W, tf.int32),
        )

    def targets(self, examples, windows):
        labels = np.array(examples.labels, np.int32)
        return {"choice": labels}, {"choice": np.ones(len(labels), np.float32)}

    def build_model(self, config, dtype="float32"):
        model = ChoiceModel(config, name=self.kind, dtype=dtype)
        model.build()
        return model

    def metrics(self, data, outputs):
        choices_B = self.serving_outputs(None, None, outputs)["choice"].numpy()
        return {"accuracy": accuracy(data.labels["choice"], choices_B)}

    def serving_outputs(self, texts, windows, outputs):
        scores_BC = outputs["choice"]
        probabilities_BC = tf.where(scores_BC > MASKED_SCORE, tf.nn.softmax(scores_BC), 0.0)
        # The first of the best, or -1.
        best_B1 = tf.reduce_max(probabilities_BC, axis=1, keepdims=True)
        is_best_BC = (probabilities_BC > 0) & (probabilities_BC >= best_B1 - EQUAL)
        count = tf.shape(scores_BC)[1]
        first_B = tf.reduce_min(tf.where(is_best_BC, tf.range(count), count), axis=1)
        return {
            "choice": tf.where(first_B < count, first_B, -1),
            "probabilities": probabilities_BC,
        }

    def margin(self, predictions, windows, outputs):
        # Two more, for questions of less than two choices.
        return top2_gap(tf.pad(predictions["probabilities"], [[0, 0], [0, 2]]))
