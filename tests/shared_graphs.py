"""One tokenizer per vocabulary, and one graph per task that encodes texts, for all tests.

Most tests create models of the same vocabulary and task, and would trace these graphs for each of
them, which takes longer than their trainings.
"""

from tasks.graph import preprocessor
from tasks.graph.pipeline import Pipeline


def share(monkeypatch):
    """Let preprocessors share tokenizers of equal settings, and pipelines graphs of equal tasks."""
    create, initialize = preprocessor.Tokenizer, Pipeline.__init__
    tokenizers, encoders = {}, {}

    def shared_tokenizer(vocabulary, *settings):
        key = (*vocabulary.lines, settings)
        if key not in tokenizers:
            tokenizers[key] = create(vocabulary, *settings)
        return tokenizers[key]

    def initialize_shared(self, task, tokenizer, *rest, **options):
        initialize(self, task, tokenizer, *rest, **options)
        if (task, tokenizer) not in encoders:
            # Without the model, which would never be freed.
            alone = Pipeline.__new__(Pipeline)
            initialize(alone, task, tokenizer, None)
            encoders[task, tokenizer] = alone._encode
        self._encode = encoders[task, tokenizer]

    monkeypatch.setattr(preprocessor, "Tokenizer", shared_tokenizer)
    monkeypatch.setattr(Pipeline, "__init__", initialize_shared)
