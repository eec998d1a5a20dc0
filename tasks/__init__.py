"""BERT for tasks: Keras models from strings to predictions, and commands that train and use them.

Names are imported lazily: TensorFlow is loaded with the first name that needs it.
"""

from bert_tf.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
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
    },
)
