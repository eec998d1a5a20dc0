"""The base class of all task types.

A task type is a module and an entry in tasks/base/registry.py. The module defines a `Task`, whose
fields are saved, and what acts on it: a `Reader` from rows to examples, a `Postprocessor` from
outputs to predictions and metrics, and a `TaskModel`. The `Preprocessor` from strings to token ids
is the same layer for all task types; it calls `Task.encode`.

Shape suffixes: N examples, W windows (token sequences made of the examples).
"""

from __future__ import annotations

import abc
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from bert_tf.errors import UserError
from tasks.base.postprocessor import Postprocessor
from tasks.base.reader import Reader

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from bert_tf.config import BertConfig
    from bert_tf.text.tokenizer import Tokens
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
    from tasks.data.windows import Windows


def described(description: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that predictions depend on, with its meaning for people."""
    return dataclasses.field(default=default, metadata={"description": description})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Base class of fine-tuning tasks.

    Its fields are saved in task.json. Every subclass defines `kind`, `reader_class`,
    `postprocessor_class` and the abstract members. One that is trained also defines `losses`,
    `from_data` and `targets`, and its postprocessor `best_metric` and `metrics`. A sample is the
    unit of a batch: a window or, in multiple choice, an example with all its choices.
    """

    max_seq_length: int = described("maximum tokens per window")

    kind: ClassVar[str]  # Name of the task type.
    reader_class: ClassVar[type[Reader[Any]]]
    postprocessor_class: ClassVar[type[Postprocessor[Any]]]
    input_descriptions: ClassVar[Mapping[str, str]] = {
        "text": "text",
        "text_a": "first text of the pair",
        "text_b": "second text of the pair",
    }
    predicts_untuned = True  # Whether it can predict while the tunable fields are None.
    # Whether the fields are tuned as soon as there is a dev file, without a flag for it.
    tunes_without_request = False
    # {input name: 2} of inputs of shape (N, C); all others are (N,).
    INPUT_RANKS: ClassVar[Mapping[str, int]] = {}
    has_windows = False  # Whether an example may become several windows, with outputs per token.
    trains_on_vectors = False  # Whether the encoder is frozen and run once (FeatureExamples).
    accuracies: ClassVar[tuple[str, ...]] = ()  # Outputs whose accuracy `fit` reports.
    needs_offsets = False  # Whether predictions refer to characters of the text.
    # Ends the log line about the rows that `select_training_examples` drops.
    unused = "not used for training"

    @property
    def reader(self) -> Reader[Any]:
        """The reader of the task's rows."""
        return self.reader_class(self)

    @property
    def postprocessor(self) -> Postprocessor[Any]:
        """The postprocessor of the outputs of the task's model."""
        return self.postprocessor_class(self)

    @property
    @abc.abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs of a served request."""

    @property
    def can_stream(self) -> bool:
        """Whether `targets` need no windows, so that `fit` reads datasets batch by batch."""
        return False

    @property
    def has_classes(self) -> bool:
        """Whether each example has one of `labels`, as class_weight requires."""
        return False

    @property
    def losses(self) -> Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]:
        """Functions from (labels, output) to one loss per element, by the name of the output."""
        raise NotImplementedError

    @property
    def soft_losses(self) -> Mapping[str, Callable[..., tf.Tensor]]:
        """Functions from (teacher's output, output, temperature) to one loss per element.

        By the name of the output, for distillation. A task without them has no teacher.
        """
        return {}

    @property
    def tunable_fields(self) -> tuple[str, ...]:
        """Fields that are tuned after training, on the first dev file.

        They belong to one checkpoint (tasks/base/tuning.py) and are `None` in task.json.
        """
        return ()

    @classmethod
    def from_data(cls, path: str, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from a training file.

        Args:
            path: Training file.
            max_seq_length: Maximum tokens per window, with special tokens.
            **options: Other fields of the task, as given by flags.

        Raises:
            UserError: If the file or an option does not fit the task.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def encode(
        self, texts: Tensors, tokenize: Callable[[tf.Tensor], Tokens], vocabulary: Vocabulary
    ) -> Windows:
        """Tokenize and pack texts, in the graph.

        Args:
            texts: Strings `(N,)` by input name; `(N, C)` for those in `INPUT_RANKS`.
            tokenize: `Tokenizer.tokenize` or `Tokenizer.tokenize_with_offsets`.
            vocabulary: Vocabulary of the ids.
        """

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return labels and weights, each with one entry per sample by the name of the output."""
        raise NotImplementedError

    @abc.abstractmethod
    def build_model(self, config: BertConfig, dtype: str = "float32") -> keras.Model:
        """Return the Keras model, built."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create the task from the values of task.json, without "kind".

        Raises:
            UserError: If a field is missing, unknown or of a wrong type.
        """
        # Files of earlier versions lack the fields that were added since. The default of such a
        # field has to reproduce what was done without it.
        fields = dataclasses.fields(cls)
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if missing := sorted(required - values.keys()):
            raise UserError(f"task.json: no field {', '.join(missing)}; expected it of {cls.kind}")
        known = sorted(field.name for field in fields)
        if unknown := sorted(values.keys() - set(known)):
            raise UserError(
                f"task.json: unknown field {', '.join(unknown):.200}; expected {', '.join(known)}; "
                "update bert_tf if a newer version wrote the file"
            )
        return cls(**cls._checked(values, "task.json"))

    def to_dict(self) -> dict[str, Any]:
        """Return the values of task.json, with "kind"."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_options(cls, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from the options of `TaskModel.from_pretrained`."""
        return cls(max_seq_length=max_seq_length, **options)

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the examples that training uses; by default all of them."""
        return examples

    def sample_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the loss weight per sample, float32 `(samples,)`, or `None` if all are 1."""
        return None

    def soft_weights(self, windows: Windows, num_samples: int) -> Arrays:
        """Return the loss weights of samples without labels in distillation, by output name."""
        return {name: np.ones(num_samples, np.float32) for name in self.soft_losses}

    def sampling_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the sampling weight per sample in training, `(samples,)`.

        `None` means that each sample is drawn once per epoch.
        """
        return None

    def init_head(  # noqa: B027  By default the weights stay random.
        self, model: keras.Model, encoded: EncodedExamples
    ) -> None:
        """Initialize weights of a new head from the training examples."""

    def with_tuned(self, values: Mapping[str, Any]) -> Self:
        """Return the task with these values of tunable fields; the other tunable fields are `None`.

        Raises:
            UserError: If `values` has a field that is not tunable, or a value of a wrong type.
        """
        unknown = sorted(set(values) - set(self.tunable_fields))
        if unknown:
            raise UserError(
                f"checkpoint.json: expected tuned values of "
                f"{', '.join(self.tunable_fields) or 'no field'}, received {', '.join(unknown)}"
            )
        # Values of another checkpoint must not remain, hence None for all that are not given.
        fields = {**dict.fromkeys(self.tunable_fields), **self._checked(values, "checkpoint.json")}
        return dataclasses.replace(self, **fields)

    @classmethod
    def _checked(cls, values: Mapping[str, Any], location: str) -> dict[str, Any]:
        """Return JSON values as field values, lists as tuples; raise UserError on a wrong type."""
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name])
                raise UserError(f"{location}: {name}: expected {expected}, received {value!r:.80}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    @property
    def untuned_fields(self) -> tuple[str, ...]:
        """The fields of `tunable_fields` without a value."""
        return tuple(name for name in self.tunable_fields if getattr(self, name) is None)

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return one warning per kind of label that cannot be encoded or scored."""
        return []

    def description(self) -> str:
        """Return a suffix for the log line with the number of rows, such as "; 3 labels"."""
        return ""


def _fits(value, hint):
    """Return whether a JSON value has a field's type; a tuple's value is a list."""
    kinds = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, kinds[0]) for entry in value)
    # Not isinstance, since bool is a subclass of int. A float may be written as an int in JSON.
    return type(value) is hint or (hint is float and type(value) is int)
