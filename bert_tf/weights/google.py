"""Reader of google-research/bert releases: bert_config.json, bert_model.ckpt.*, vocab.txt."""

import pathlib

import numpy as np

from bert_tf.checkpoints import read_bundle
from bert_tf.config import BertConfig
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import name_map

# Task heads are initialized anew for the current task. Optimizer slots and step counters belong to
# the training of the release.
IGNORED = r"cls/.*|.*/adam_[mv]|global_step|output_weights|output_bias"


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds a Google release."""
    return (path / "bert_config.json").is_file()


def read_config(path: pathlib.Path) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary without the weights.

    Args:
        path: Directory.

    Raises:
        UserError: A file is missing or invalid, or the two do not fit together.
    """
    config = BertConfig.load(path / "bert_config.json")
    vocabulary = Vocabulary.load(path / "vocab.txt")
    vocabulary.check_size(config.vocab_size, where=str(path / "vocab.txt"))
    # A release does not record whether it is cased; its vocabulary shows it.
    config = BertConfig.from_dict(
        {**config.to_dict(), "do_lower_case": not vocabulary.looks_cased()}
    )
    return config, vocabulary


def read(path: pathlib.Path) -> tuple[BertConfig, Vocabulary, dict[str, np.ndarray], list[str]]:
    """Read a model.

    Args:
        path: Directory.

    Returns:
        Tuple of the configuration, the vocabulary, a dict from our weight names to float32 arrays,
        and the names of unused tensors.

    Raises:
        UserError: A tensor is missing, unknown or of the wrong shape.
    """
    config, vocabulary = read_config(path)
    prefix = path / "bert_model.ckpt"
    tensors = read_bundle(prefix)
    return (
        config,
        vocabulary,
        *name_map.rename(tensors, config, "google", IGNORED, where=str(prefix)),
    )
