"""Reader of TensorFlow checkpoints of google-research/bert, released or fine-tuned.

Needed are the checkpoint, bert_config.json and vocab.txt. The checkpoint is in either format of
TensorFlow: V2 (PREFIX.index and PREFIX.data-*) or V1 (one file PREFIX). Checkpoints of the Model
Garden and SavedModels of TF-Hub have other names (bert_tf.weights.model_garden).
"""

import glob
import pathlib
import re
from typing import NamedTuple

import numpy as np

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.runs.checkpoints import read_bundle
from bert_tf.storage import files
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import model_garden
from bert_tf.weights.name_map import StoredModel

# Optimizer slots and step counters belong to the training of the checkpoint, position ids are a
# constant.
IGNORED = (
    r".*/adam_[mv]|.*/Adam(_1)?|.*/AdamWeightDecayOptimizer(_1)?|beta[12]_power|global_step|"
    r"bert/embeddings/position_ids"
)
_RELEASED = "bert_model.ckpt"
_SAVED_MODEL = "saved_model.pb"
# Classes of the heads, in the terms of Hugging Face, by the tensor that counts the outputs.
_CLASSES = {
    "output_bias": "BertForSequenceClassification",
    "cls/squad/output_bias": "BertForQuestionAnswering",
}
_OF_HEAD = ("architectures", "id2label", "problem_type", "task_specific_params")


class Location(NamedTuple):
    """Paths of the parts of a model."""

    prefix: pathlib.Path
    config: pathlib.Path
    vocabulary: pathlib.Path


def find(
    path: pathlib.Path, config: str | None = None, vocabulary: str | None = None
) -> Location | None:
    """Find the parts of a model.

    Args:
        path: Directory with a checkpoint, prefix of a checkpoint, such as DIR/model.ckpt-343, or
            SavedModel.
        config: Path of bert_config.json; by default beside the checkpoint or one level up.
        vocabulary: Path of vocab.txt, likewise.

    Returns:
        The paths, or `None` if there is no checkpoint.

    Raises:
        UserError: The directory has several checkpoints, and none is named bert_model.ckpt or by
            the file "checkpoint".
    """
    prefix = _prefix_in(path) if path.is_dir() else path
    if prefix is None or not _exists(prefix):
        # A release whose checkpoint is missing is reported as such.
        if not (path / "bert_config.json").is_file() or (path / "pytorch_model.bin").is_file():
            return None
        prefix = path / _RELEASED
    if not vocabulary and (path / _SAVED_MODEL).is_file():
        vocabulary = str(path / "assets" / "vocab.txt")
    return Location(
        prefix,
        pathlib.Path(config) if config else _beside(prefix, "bert_config.json"),
        pathlib.Path(vocabulary) if vocabulary else _beside(prefix, "vocab.txt"),
    )


def read_config(location: Location) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary without the weights.

    Args:
        location: The paths.

    Raises:
        UserError: A file is missing or invalid, or the two do not fit together.
    """
    for flag, path in (("config_file", location.config), ("vocab_file", location.vocabulary)):
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; expected it in the directory of the checkpoint or one "
                f"level up, or --{flag}"
            )
    # Unlike Hugging Face, Google calls the tanh form "gelu", whatever the file's name.
    values = read_json_object(location.config)
    config = BertConfig.from_google(values, where=str(location.config), is_foreign=True)
    vocabulary = Vocabulary.load(location.vocabulary)
    vocabulary.check_size(config.vocab_size, where=str(location.vocabulary))
    # A release does not record whether it is cased; its vocabulary shows it.
    config = BertConfig.from_dict(
        {**config.to_dict(), "do_lower_case": not vocabulary.looks_cased()}
    )
    return config, vocabulary


def read(location: Location) -> StoredModel:
    """Read a model. Raise `UserError` if a file is invalid."""
    config, vocabulary = read_config(location)
    tensors = read_bundle(location.prefix)
    if model_garden.OBJECT_GRAPH in tensors:
        tensors = model_garden.to_google(tensors, str(location.prefix))
    values = {}
    for bias, name in _CLASSES.items():
        if bias in tensors:
            # run_classifier.py does not save the names of the labels; bert_tf.convert does.
            labels = {str(number): str(number) for number in range(np.size(tensors[bias]))}
            saved = read_json_object(location.config)
            values = {
                "architectures": [name],
                "id2label": labels,
                **{key: saved[key] for key in _OF_HEAD if key in saved},
            }
    return StoredModel(config, vocabulary, tensors, "google", IGNORED, str(location.prefix), values)


def _prefix_in(directory):
    """Return the prefix of the checkpoint of a directory, or `None`."""
    if (directory / _SAVED_MODEL).is_file():
        return directory / "variables" / "variables"
    if _exists(directory / _RELEASED):
        return directory / _RELEASED
    state = directory / "checkpoint"  # Written by TensorFlow, names the newest.
    if state.is_file():
        found = re.search(r'^model_checkpoint_path: "(.+)"', files.read_text(state), re.MULTILINE)
        # The path may be that of another machine, so only the name counts.
        if found and _exists(directory / pathlib.PurePosixPath(found[1]).name):
            return directory / pathlib.PurePosixPath(found[1]).name
    prefixes = sorted(path.with_suffix("") for path in directory.glob("*.ckpt*.index"))
    if len(prefixes) > 1:
        raise UserError(
            f"{directory}: {len(prefixes)} checkpoints; name one of them, such as {prefixes[-1]}"
        )
    return prefixes[0] if prefixes else None


def _exists(prefix):
    """Return True if there is a checkpoint of either format."""
    if prefix.with_name(f"{prefix.name}.index").is_file():
        return True
    is_v1 = prefix.is_file() and ".ckpt" in prefix.name
    return is_v1 or any(prefix.parent.glob(f"{glob.escape(prefix.name)}-?????-of-?????"))


def _beside(prefix, name):
    """Return the path of a file beside a checkpoint or, if it is only there, one level up."""
    beside, above = prefix.parent / name, prefix.parent.parent / name
    return above if above.is_file() and not beside.is_file() else beside
