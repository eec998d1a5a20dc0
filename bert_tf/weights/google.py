"""Reads a release of google-research/bert: bert_config.json, bert_model.ckpt.*, vocab.txt."""

import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import names

# The pretraining heads are no part of the encoder; slots and counters belong to the run that made the release.
IGNORED = r"cls/.*|.*/adam_[mv]|global_step|output_weights|output_bias"


def is_directory_of(path):
    return (path / "bert_config.json").is_file()


def read(path):
    """-> (BertConfig, Vocabulary, {our name: array}, names passed over)."""
    config = BertConfig.load(path / "bert_config.json")
    vocabulary = Vocabulary.load(path / "vocab.txt")
    vocabulary.check_size(config.vocab_size, where=str(path / "vocab.txt"))
    config = BertConfig.from_dict({**config.to_dict(), "do_lower_case": not vocabulary.looks_cased()})
    prefix = path / "bert_model.ckpt"
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise UserError(f"{prefix}: not a readable TensorFlow checkpoint: {error}") from None
    return config, vocabulary, *names.rename(tensors, config, "google", IGNORED, where=str(prefix))
