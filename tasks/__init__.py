"""BERT for tasks: Keras models from strings to predictions, and commands that train and use them.

Names are imported lazily: TensorFlow is loaded with the first name that needs it.
"""

from bert_tf.system.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AnomalyDetector": "tasks.types.anomaly",
        "MaskedLanguageModel": "tasks.types.masked_lm",
        "MultipleChoice": "tasks.types.multiple_choice",
        "QuestionAnswerer": "tasks.types.question_answering",
        "Rows": "tasks.model.labelled_rows",
        "TextClassifier": "tasks.types.classification.text_classifier",
        "TextEmbedder": "tasks.types.similarity.text_embedder",
        "TextRanker": "tasks.types.ranking",
        "TextRegressor": "tasks.types.regression",
        "TokenClassifier": "tasks.types.tagging",
        "load_model": "tasks.model.loading",
        "read_examples": "tasks.model.labelled_rows",
    },
)
