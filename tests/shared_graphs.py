"""One tokenizer per vocabulary, and one graph per task that encodes texts, for all tests.

Most tests create models of the same vocabulary and task, and would trace these graphs for each of
them, which takes longer than their trainings.
"""

import functools

from bert_tf import Tokenizer
from bert_tf.data import shards, vocabulary_learning
from tasks.graph import preprocessor
from tasks.graph.pipeline import Pipeline

_tokenizers, _pipelines = {}, {}


def tokenizer_of(vocabulary, do_lower_case, strip_accents=None, max_input_chars_per_word=200):
    """Return the `Tokenizer` of a vocabulary and settings."""
    settings = (do_lower_case, strip_accents, max_input_chars_per_word)
    key = (*vocabulary.lines, settings)
    if key not in _tokenizers:
        _tokenizers[key] = Tokenizer(vocabulary, *settings)
    return _tokenizers[key]


def tokenizer_from_config(config, vocabulary):
    """Return the `Tokenizer` of a configuration and a vocabulary."""
    return tokenizer_of(vocabulary, **config.tokenizer_settings)


def share(monkeypatch):
    """Share tokenizers of equal settings, and let pipelines share graphs of equal tasks."""
    encode = Pipeline.encode

    def encode_shared(self, **texts):
        key = (repr(self.task), self.tokenizer)  # Some tasks have a dict.
        if key not in _pipelines:
            # Without the model, which is freed then.
            _pipelines[key] = Pipeline(self.task, self.tokenizer, None)
        return encode(_pipelines[key], **texts)

    for module in (preprocessor, shards):
        monkeypatch.setattr(module, "Tokenizer", tokenizer_of)
    monkeypatch.setattr(Tokenizer, "from_config", tokenizer_from_config)
    unique_words = functools.cache(vocabulary_learning.make_unique_words)
    monkeypatch.setattr(vocabulary_learning, "make_unique_words", unique_words)
    monkeypatch.setattr(Pipeline, "encode", encode_shared)
