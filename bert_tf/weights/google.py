"""Reads a release of google-research/bert: bert_config.json, bert_model.ckpt.*, vocab.txt."""

from bert_tf.checkpoints import read_bundle
from bert_tf.config import BertConfig
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import name_map

# Heads of other tasks give way to the head of the task at hand; slots and counters belong to the
# run that made the release.
IGNORED = r"cls/.*|.*/adam_[mv]|global_step|output_weights|output_bias"


def is_directory_of(path):
    return (path / "bert_config.json").is_file()


def read_config(path):
    """-> (BertConfig, Vocabulary), without the weights."""
    config = BertConfig.load(path / "bert_config.json")
    vocabulary = Vocabulary.load(path / "vocab.txt")
    vocabulary.check_size(config.vocab_size, where=str(path / "vocab.txt"))
    config = BertConfig.from_dict(
        {**config.to_dict(), "do_lower_case": not vocabulary.looks_cased()}
    )
    return config, vocabulary


def read(path):
    """-> (BertConfig, Vocabulary, {our name: array}, names passed over)."""
    config, vocabulary = read_config(path)
    prefix = path / "bert_model.ckpt"
    tensors = read_bundle(prefix)
    return (
        config,
        vocabulary,
        *name_map.rename(tensors, config, "google", IGNORED, where=str(prefix)),
    )
