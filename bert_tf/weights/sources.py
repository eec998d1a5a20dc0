"""Pretrained weights of any supported source, recognized by its files."""

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from bert_tf import checkpoints, files
from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import google, hub, huggingface, keras_preset, name_map
from bert_tf.weights.name_map import StoredModel

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass(frozen=True)
class PretrainedWeights:
    """Configuration, vocabulary and weights of an encoder, with or without heads.

    Attributes:
        config: Configuration of the encoder.
        vocabulary: Vocabulary of the encoder.
        weights: float32 arrays by our names.
        source: Description of the source, such as "run PATH".
        unused_tensors: Names of tensors in the source that are not in `weights`.
    """

    config: BertConfig
    vocabulary: Vocabulary
    weights: dict[str, np.ndarray]
    source: str
    unused_tensors: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the heads in the source: "masked_lm", "next_sentence", both or none."""
        return self._heads_in(self.weights)

    @property
    def origin(self) -> str:
        """Return the source and its unused tensors, as text."""
        return self._origin(self.unused_tensors)

    def origin_in(self, model: "keras.Model | keras.layers.Layer") -> str:
        """Return the source and what is unused after `assign_to(model)`, as text."""
        there = self._heads_in(checkpoints.model_variables(model))
        unused = [f"{head} head" for head in self.heads if head not in there]
        return self._origin([*unused, *self.unused_tensors])

    def assign_to(self, model: "keras.Model | keras.layers.Layer") -> None:
        """Assign the encoder, and the heads that the model has too, to a model's variables.

        Args:
            model: Model of the same configuration, or an `Encoder`.

        Raises:
            UserError: A shape differs.
        """
        variables = checkpoints.model_variables(model)
        heads = self._heads_in(self.weights.keys() & variables.keys())
        used = [
            name for part in ("bert", *heads) for name in name_map.weight_shapes(self.config, part)
        ]
        checkpoints.assign(
            {name: variables[name] for name in used},
            {name: self.weights[name] for name in used},
            self.origin,
        )

    def save(self, path: str | os.PathLike[str]) -> Run:
        """Write the weights to a new run directory, as its checkpoint of step 0.

        Args:
            path: Directory to create.

        Returns:
            The run, open.
        """
        with Run.writing(path):
            run = Run.create(path, self.config, self.vocabulary, train={"origin": self.origin})
            run.checkpoints.save(0, self.weights)
        return run

    def _heads_in(self, there):
        """Return the heads all of whose weights are among the names `there`."""
        return tuple(
            head
            for head in name_map.HEADS
            if set(name_map.weight_shapes(self.config, head)) <= set(there)
        )

    def _origin(self, unused):
        """Describe the source and up to three unused items."""
        if not unused:
            return self.source
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return f"{self.source} (not used: {', '.join(unused[:3])}{more})"


def read_pretrained(
    path: str | os.PathLike[str], do_lower_case: bool | None = None
) -> PretrainedWeights:
    """Read a run, a Hugging Face directory, a Google release or a keras-nlp preset.

    Args:
        path: Directory, or the name of a published keras-nlp preset. Only runs may be remote.
        do_lower_case: Overrides the source's setting.

    Returns:
        `PretrainedWeights`.

    Raises:
        UserError: There is no model, or a tensor is missing, unknown or of the wrong shape.
    """
    pretrained = _read(path)
    if do_lower_case is None:
        return pretrained
    config = dataclasses.replace(pretrained.config, do_lower_case=do_lower_case)
    return dataclasses.replace(pretrained, config=config)


def check(path: str | os.PathLike[str]) -> BertConfig | None:
    """Check for a model at a path without reading its weights.

    Args:
        path: As for `read_pretrained`.

    Returns:
        `BertConfig`, or `None` if only TensorFlow can read it (remote paths, keras-nlp presets).

    Raises:
        UserError: There is no model, or its other files are invalid.
    """
    if files.is_remote(path):
        return None
    if Run.exists(path):
        run = Run.open(path)
        run.checkpoints.best_or_latest_step()
        return run.config
    reader, where, _ = _reader_of(path)
    found = reader.read_config(where)
    return found and found[0]


def _read(path):
    """Read the model at a path with the reader of its source."""
    if Run.exists(path):
        run = Run.open(path)
        chosen = run.checkpoints.path(run.checkpoints.best_or_latest_step())
        # Optimizer slots, counters, seeds and task heads are not loaded.
        tensors = checkpoints.read(chosen)
        stored = StoredModel(run.config, run.vocabulary, tensors, "ours", ".*", str(chosen))
        weights, _ = name_map.rename(stored)
        return PretrainedWeights(run.config, run.vocabulary, weights, f"run {chosen}")
    reader, where, source = _reader_of(path)
    stored = reader.read(where)
    weights, unused_tensors = name_map.rename(stored)
    return PretrainedWeights(
        stored.config, stored.vocabulary, weights, source, tuple(unused_tensors)
    )


def _reader_of(path):
    """Return the reader module, its argument and a description for a path that is no run."""
    if files.is_remote(path):
        raise UserError(
            f"{path}: expected a run; other weights cannot be read from remote paths, copy them to "
            "this machine first"
        )
    directory = pathlib.Path(path)
    for kind, reader in (
        ("Google release", google),
        ("Hugging Face directory", huggingface),
        ("keras-nlp preset", keras_preset),
    ):
        if reader.is_directory_of(directory):
            return reader, directory, f"{kind} {directory.resolve().name}"
    if directory.exists():
        raise UserError(
            f"{directory}: no model found; expected a run directory (config.json, vocab.txt, "
            "checkpoints/), a Hugging Face directory (model.safetensors), a Google release "
            "(bert_config.json) or a keras-nlp preset"
        )
    if downloaded := hub.find(str(path)):
        return huggingface, downloaded, f"Hugging Face model {path}"
    return keras_preset, str(path), f"keras-nlp preset {path}"
