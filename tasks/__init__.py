"""BERT for tasks: Keras models from strings to predictions, and commands that train and use them.

Names are imported lazily: TensorFlow is loaded with the first name that needs it.
"""

import importlib
from typing import Any

_HOME = {
    "AnomalyDetector": "tasks.anomaly",
    "MaskedLanguageModel": "tasks.masked_lm",
    "MultipleChoice": "tasks.multiple_choice",
    "QuestionAnswerer": "tasks.span_qa",
    "Rows": "tasks.rows",
    "TextClassifier": "tasks.classification",
    "TextEmbedder": "tasks.embedding",
    "TextRegressor": "tasks.regression",
    "TokenClassifier": "tasks.tagging",
    "load_model": "tasks.loading",
    "read_examples": "tasks.rows",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
