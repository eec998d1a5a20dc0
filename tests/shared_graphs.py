"""One tokenizer per vocabulary, and one graph per task that encodes texts, for all tests.

Most tests create models of the same vocabulary and task, and would trace these graphs for each of
them, which takes longer than their trainings.
"""

from bert_tf import Tokenizer
from tasks.graph import preprocessor
from tasks.graph.pipeline import Pipeline

_tokenizers, _pipelines = {}, {}


def tokenizer_of(vocabulary, *settings):
    """Return the `Tokenizer` of a vocabulary and settings."""
    key = (*vocabulary.lines, settings)
    if key not in _tokenizers:
        _tokenizers[key] = Tokenizer(vocabulary, *settings)
    return _tokenizers[key]


def share(monkeypatch):
    """Let preprocessors share tokenizers of equal settings, and pipelines graphs of equal tasks."""
    encode = Pipeline.encode

    def encode_shared(self, **texts):
        key = (repr(self.task), self.tokenizer)  # Some tasks have a dict.
        if key not in _pipelines:
            # Without the model, which is freed then.
            _pipelines[key] = Pipeline(self.task, self.tokenizer, None)
        return encode(_pipelines[key], **texts)

    monkeypatch.setattr(preprocessor, "Tokenizer", tokenizer_of)
    monkeypatch.setattr(Pipeline, "encode", encode_shared)
