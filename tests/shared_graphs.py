"""One tokenizer per vocabulary, and one graph per task that encodes texts, for all tests.

Most tests create models of the same vocabulary and task, and would trace these graphs for each of
them, which takes longer than their trainings.
"""

from bert_tf import Tokenizer
from tasks.graph import preprocessor
from tasks.graph.pipeline import Pipeline

_tokenizers, _encoders = {}, {}


def tokenizer_of(vocabulary, *settings):
    """Return the `Tokenizer` of a vocabulary and settings."""
    key = (*vocabulary.lines, settings)
    if key not in _tokenizers:
        _tokenizers[key] = Tokenizer(vocabulary, *settings)
    return _tokenizers[key]


def share(monkeypatch):
    """Let preprocessors share tokenizers of equal settings, and pipelines graphs of equal tasks."""
    initialize = Pipeline.__init__

    def initialize_shared(self, task, tokenizer, *rest, **options):
        initialize(self, task, tokenizer, *rest, **options)
        if (task, tokenizer) not in _encoders:
            # Without the model, which would never be freed.
            alone = Pipeline.__new__(Pipeline)
            initialize(alone, task, tokenizer, None)
            _encoders[task, tokenizer] = alone._encode
        self._encode = _encoders[task, tokenizer]

    monkeypatch.setattr(preprocessor, "Tokenizer", tokenizer_of)
    monkeypatch.setattr(Pipeline, "__init__", initialize_shared)
