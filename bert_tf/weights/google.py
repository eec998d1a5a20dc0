"""Reader of google-research/bert releases: bert_config.json, bert_model.ckpt.*, vocab.txt."""

import pathlib

from bert_tf.checkpoints import read_bundle
from bert_tf.config import BertConfig
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights.name_map import StoredModel

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


def read(path: pathlib.Path) -> StoredModel:
    """Read a model. Raise `UserError` if a file is invalid."""
    prefix = path / "bert_model.ckpt"
    return StoredModel(*read_config(path), read_bundle(prefix), "google", IGNORED, str(prefix))
