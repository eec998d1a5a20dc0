"""Pretrained weights from wherever they are: recognised by the files, read into one form."""

import dataclasses
import pathlib

import numpy as np

from bert_tf import checkpoints
from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import google, huggingface, keras_preset, names


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """An encoder's configuration, vocabulary and {our name: float32 array}, and where from."""

    config: BertConfig
    vocabulary: Vocabulary
    weights: dict[str, np.ndarray]
    origin: str

    def assign_to(self, model):
        """Sets all weights of the encoder in a model of this configuration (or of an Encoder)."""
        variables = checkpoints.model_variables(model)
        checkpoints.assign(
            {name: variables[name] for name in names.shapes(self.config)}, self.weights, self.origin
        )

    def save(self, path):
        """Writes these weights as a run directory, at step 0; returns the open Run."""
        run = Run.create(path, self.config, self.vocabulary, train={"origin": self.origin})
        run.checkpoints.save(0, self.weights)
        return run


def read_pretrained(path, do_lower_case=None):
    """Reads a run, a Hugging Face directory, a Google release, or a keras-nlp preset.

    `do_lower_case` overrides what the source says of its case. Raises UserError naming what is
    missing, left over or of the wrong shape.
    """
    config, vocabulary, weights, origin = _read(path)
    if do_lower_case is not None:
        config = dataclasses.replace(config, do_lower_case=do_lower_case)
    return Pretrained(config, vocabulary, weights, origin)


def _read(path):
    folder = pathlib.Path(path)
    if Run.is_at(folder):
        run = Run.open(folder)
        chosen = run.checkpoints.folder(run.checkpoints.chosen_step())
        values = checkpoints.read(chosen)
        wanted = names.shapes(run.config)
        missing = sorted(set(wanted) - set(values))
        if missing:
            raise UserError(f"{chosen}: {len(missing)} weights are missing, the first {missing[0]}")
        return run.config, run.vocabulary, {name: values[name] for name in wanted}, f"run {chosen}"
    for kind, reader in (
        ("Google release", google),
        ("Hugging Face directory", huggingface),
        ("keras-nlp preset", keras_preset),
    ):
        if reader.is_directory_of(folder):
            return _described(reader.read(folder), f"{kind} {folder.resolve().name}")
    if folder.exists():
        raise UserError(
            f"{folder}: no model there: wanted a run directory (config.json, vocab.txt, "
            "checkpoints/), a Hugging "
            "Face directory (model.safetensors), a Google release (bert_config.json) or a "
            "keras-nlp preset"
        )
    if "/" in str(path) and "://" not in str(path):
        raise UserError(f"{folder}: no such directory")
    return _described(keras_preset.read(str(path)), f"keras-nlp preset {path}")


def _described(read, origin):
    config, vocabulary, weights, passed_over = read
    if passed_over:
        more = f" and {len(passed_over) - 3} more" if len(passed_over) > 3 else ""
        origin += f" (not used: {', '.join(passed_over[:3])}{more})"
    return config, vocabulary, weights, origin
