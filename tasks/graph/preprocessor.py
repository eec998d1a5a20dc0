"""Preprocessing layer: from strings to the inputs of a model.

Shape suffixes: B texts, L tokens of the longest text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.normalizer import MAX_INPUT_CHARS_PER_WORD
from bert_tf.text.tokenizer import Tokenizer, truncate_utf8
from bert_tf.text.vocabulary import Vocabulary
from tasks.base.task import task_from_dict

if TYPE_CHECKING:
    from bert_tf.config import BertConfig
    from tasks.base.task import Task

VOCABULARY_NAME = "vocab.txt"


@keras.saving.register_keras_serializable("bert_tf")
class Preprocessor(keras.layers.Layer):
    """Map strings to padded token ids, as the trained and the served model see them.

    Keras saves the vocabulary inside of a .keras file.

    Args:
        task: The task, which defines inputs, maximum length and truncation; or its dict form.
        do_lower_case: Whether text is lower-cased.
        strip_accents: Whether accents are removed; `None` means as `do_lower_case`.
        vocabulary: The vocabulary. `None` until `load_assets` reads it from a .keras file.
        max_input_chars_per_word: Maximum number of characters of a word; a longer one is [UNK].
        **kwargs: `keras.layers.Layer` arguments.

    Call arguments:
        inputs: Strings `(B,)`; for several inputs a tuple or dict of them.

    Returns:
        Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids".
    """

    def __init__(
        self,
        task: Task | Mapping[str, Any],
        do_lower_case: bool,
        strip_accents: bool | None = None,
        vocabulary: Vocabulary | None = None,
        max_input_chars_per_word: int = MAX_INPUT_CHARS_PER_WORD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA has no strings.
        self.task = task_from_dict(task) if isinstance(task, Mapping) else task
        self.do_lower_case, self.strip_accents = do_lower_case, strip_accents
        self.max_input_chars_per_word = max_input_chars_per_word
        # Not an attribute of Keras, which would track the tables of a tf.Module as its own.
        object.__setattr__(self, "_tokenizer", None)
        if vocabulary is not None:
            self._set_vocabulary(vocabulary)
        self.built = True

    @classmethod
    def of(cls, task: Task, config: BertConfig, vocabulary: Vocabulary | None) -> Self:
        """Create the layer for a task and the configuration of its model."""
        return cls(task, vocabulary=vocabulary, **config.tokenizer_settings)

    def _set_vocabulary(self, vocabulary):
        tokenizer = Tokenizer(
            vocabulary, self.do_lower_case, self.strip_accents, self.max_input_chars_per_word
        )
        object.__setattr__(self, "_tokenizer", tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            UserError: If the layer was created from its config alone, as by clone_model of Keras.
        """
        if self._tokenizer is None:
            raise UserError(
                "preprocessor: has no vocabulary, since it was copied without its assets; copy "
                "the model with save and load_model"
            )
        return self._tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; raises UserError as `tokenizer`."""
        return self.tokenizer.vocabulary

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, tf.Tensor]:
        """Convert Python strings to tensors first, which Keras does not accept."""
        # Checked here, since Keras adds lines to the errors of `call`.
        if self.task.has_windows or self.task.INPUT_RANKS:
            raise UserError(
                f"preprocessor: a row of {self.task.kind} becomes several sequences; pass strings "
                "to fit, predict and evaluate of the model"
            )
        if not _is_symbolic(inputs):
            columns = self.task.columns(inputs)
            inputs = {name: tf.constant(values) for name, values in columns.items()}
        return super().__call__(inputs, **kwargs)

    def call(self, inputs: Any) -> dict[str, tf.Tensor]:
        """Tokenize, truncate and pad; see the class docstring."""
        names = self.task.input_names
        if isinstance(inputs, Mapping):
            texts = {name: inputs[name] for name in names}
        else:
            parts = inputs if isinstance(inputs, list | tuple) else [inputs]
            texts = dict(zip(names, parts, strict=True))
        return self.encode({name: tf.reshape(values, [-1]) for name, values in texts.items()})

    def encode(self, texts: Mapping[str, tf.Tensor], length: int | None = None) -> dict:
        """Return the inputs of the model for strings of a batch, in the graph.

        Args:
            texts: Strings `(B,)` by input name; `(B, C)` for lists, such as choices.
            length: Tokens per row; by default those of the longest one.

        Raises:
            UserError: If a row of the task may become several sequences.
        """
        task = self.task
        if task.has_windows:
            raise UserError(
                f"x: expected lists of strings, since a row of {task.kind} may become several "
                "sequences, received a dataset of strings"
            )
        texts = {name: truncate_utf8(values) for name, values in texts.items()}
        windows = task.encode(texts, self.tokenizer.tokenize, self.vocabulary)
        inputs = to_padded(windows.packed, self.vocabulary, length)
        if windows.choice_W is not None:
            (name,) = task.INPUT_RANKS
            inputs["windows"] = windows.choice_grid(*tf.unstack(tf.shape(texts[name])))
        return inputs

    def compute_output_spec(self, inputs: Any) -> dict[str, keras.KerasTensor]:
        """Return the symbolic outputs; Keras asks for them before it loads the vocabulary."""
        return {
            name: keras.KerasTensor((None, None), "int32")
            for name in ("input_ids", "input_mask", "segment_ids")
        }

    def save_assets(self, path: str) -> None:
        """Write the vocabulary; called by Keras when a model is saved."""
        self.vocabulary.save(os.path.join(path, VOCABULARY_NAME))

    def load_assets(self, path: str) -> None:
        """Read the vocabulary; called by Keras when a model is loaded."""
        self._set_vocabulary(Vocabulary.load(os.path.join(path, VOCABULARY_NAME)))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the vocabulary is an asset."""
        return {
            **super().get_config(),
            "task": self.task.to_dict(),
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "max_input_chars_per_word": self.max_input_chars_per_word,
        }


def _is_symbolic(inputs):
    """Whether inputs are tensors, of TensorFlow or of Keras, rather than Python objects."""
    parts = tf.nest.flatten(inputs)
    return bool(parts) and all(isinstance(part, tf.Tensor | keras.KerasTensor) for part in parts)
