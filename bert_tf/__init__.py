"""BERT in TensorFlow and Keras: model, tokenizer and pretraining.

Names are imported lazily: TensorFlow is loaded with the first name that needs it, so that commands
can check their flags before.
"""

from bert_tf.system.environment import set_defaults
from bert_tf.system.lazy_names import lazy_names

set_defaults()

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AdamW": "bert_tf.train.optimizer",
        "BertConfig": "bert_tf.config",
        "Encoder": "bert_tf.weights.pretrained_encoder",
        "FitSchedule": "bert_tf.train.optimizer",
        "Lamb": "bert_tf.train.optimizer",
        "MODEL_SIZES": "bert_tf.config",
        "Tokenizer": "bert_tf.text.tokenizer",
        "UserError": "bert_tf.errors",
        "Vocabulary": "bert_tf.text.vocabulary",
        "WarmupLinearDecay": "bert_tf.train.optimizer",
        "WeightedMean": "bert_tf.train.losses",
        "pack": "bert_tf.text.encoder_inputs",
        "read_pretrained": "bert_tf.weights.sources",
        "to_flat": "bert_tf.text.encoder_inputs",
        "to_padded": "bert_tf.text.encoder_inputs",
    },
)
