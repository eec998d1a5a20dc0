"""Pretrained weights from wherever they are: recognised by the files, read into one form."""

import dataclasses
import pathlib

import numpy as np

from bert_tf import checkpoints, files
from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import google, huggingface, keras_preset, name_map


@dataclasses.dataclass(frozen=True)
class PretrainedWeights:
    """Configuration, vocabulary and {our name: float32 array} of an encoder and maybe heads.

    `source` says where from, `unused_tensors` names the tensors there that are no weight of these.
    """

    config: BertConfig
    vocabulary: Vocabulary
    weights: dict[str, np.ndarray]
    source: str
    unused_tensors: tuple[str, ...] = ()

    @property
    def heads(self):
        """Those of "masked_lm" and "next_sentence" that the source has."""
        return self._heads_in(self.weights)

    @property
    def origin(self):
        """Where all these weights are from, and what of it they are not."""
        return self._origin(self.unused_tensors)

    def origin_in(self, model):
        """The same of the weights that `assign_to` gives this model."""
        there = self._heads_in(checkpoints.model_variables(model))
        unused = [f"{head} head" for head in self.heads if head not in there]
        return self._origin([*unused, *self.unused_tensors])

    def assign_to(self, model):
        """Sets the encoder and those heads that both have, in a model of this configuration.

        An Encoder by itself is such a model.
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

    def save(self, path):
        """Writes these weights as a run directory, at step 0; returns the open Run."""
        with Run.writing(path):
            run = Run.create(path, self.config, self.vocabulary, train={"origin": self.origin})
            run.checkpoints.save(0, self.weights)
        return run

    def _heads_in(self, there):
        """Heads all of whose weights are among the names `there`."""
        return tuple(
            head
            for head in name_map.HEADS
            if set(name_map.weight_shapes(self.config, head)) <= set(there)
        )

    def _origin(self, unused):
        if not unused:
            return self.source
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return f"{self.source} (not used: {', '.join(unused[:3])}{more})"


def read_pretrained(path, do_lower_case=None):
    """Reads a run, a Hugging Face directory, a Google release, or a keras-nlp preset.

    `do_lower_case` overrides what the source says of its case. Raises UserError naming what is
    missing, left over or of the wrong shape.
    """
    pretrained = _read(path)
    if do_lower_case is None:
        return pretrained
    config = dataclasses.replace(pretrained.config, do_lower_case=do_lower_case)
    return dataclasses.replace(pretrained, config=config)


def check(path):
    """Return the BertConfig of a model at a path, or `None` where only TensorFlow can tell.

    Reads no weights. Raises UserError where there is no model, or its other files cannot be read.
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
    if Run.exists(path):
        run = Run.open(path)
        chosen = run.checkpoints.path(run.checkpoints.best_or_latest_step())
        # Slots, counters, seeds and the head of a task stay behind.
        weights, _ = name_map.rename(
            checkpoints.read(chosen), run.config, "ours", ignored=".*", where=str(chosen)
        )
        return PretrainedWeights(run.config, run.vocabulary, weights, f"run {chosen}")
    reader, where, source = _reader_of(path)
    return _pretrained(reader.read(where), source)


def _reader_of(path):
    """(module that reads the model at a path that is no run, what it takes, what the model is)."""
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
            f"{directory}: no model there: wanted a run directory (config.json, vocab.txt, "
            "checkpoints/), a Hugging "
            "Face directory (model.safetensors), a Google release (bert_config.json) or a "
            "keras-nlp preset"
        )
    if "/" in str(path):
        raise UserError(f"{directory}: no such directory")
    return keras_preset, str(path), f"keras-nlp preset {path}"


def _pretrained(read, source):
    config, vocabulary, weights, unused_tensors = read
    return PretrainedWeights(config, vocabulary, weights, source, tuple(unused_tensors))
