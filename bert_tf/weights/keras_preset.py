"""Reads a keras-nlp (KerasHub) BERT preset; the one module that imports keras_nlp."""

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import name_map

IGNORED = r".*seed_generator.*"  # Dropout's state.


def is_directory_of(path):
    return (path / "model.weights.h5").is_file() and (path / "metadata.json").is_file()


def read_config(preset):
    """`None`: it is known once keras-nlp, with TensorFlow, has loaded the preset."""
    return None


def read(preset):
    """-> (BertConfig, Vocabulary, {our name: array}, names passed over), by path or preset name.

    The backbone's gelu is the tanh form. Differs: its tokenizer keeps accents even in uncased
    presets; the weights are Google's, trained without, so accents follow the case here.
    """
    import keras_nlp

    directory_config = preset / "config.json" if not isinstance(preset, str) else None
    if directory_config and read_json_object(directory_config).get("class_name") != "BertBackbone":
        raise UserError(
            f"{directory_config}: class_name is "
            f"{read_json_object(directory_config).get('class_name')!r}, "
            "wanted a preset of BertBackbone"
        )
    try:
        backbone = keras_nlp.models.BertBackbone.from_preset(str(preset))
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(preset))
    except Exception as error:  # Whatever the library, Kaggle or the network has to say.
        raise UserError(
            f"{preset}: keras-nlp cannot load this preset: {type(error).__name__}: {error}"
        ) from None
    config = BertConfig(
        vocab_size=backbone.vocabulary_size,
        hidden_size=backbone.hidden_dim,
        num_hidden_layers=backbone.num_layers,
        num_attention_heads=backbone.num_heads,
        intermediate_size=backbone.intermediate_dim,
        hidden_act="gelu_new",
        hidden_dropout_prob=backbone.dropout,
        attention_probs_dropout_prob=backbone.dropout,
        max_position_embeddings=backbone.max_sequence_length,
        type_vocab_size=backbone.num_segments,
        do_lower_case=bool(tokenizer.lowercase),
    )
    vocabulary = Vocabulary(tokenizer.get_vocabulary(), where=f"the vocabulary of {preset}")
    vocabulary.check_size(config.vocab_size, where=f"the vocabulary of {preset}")
    tensors = {variable.path: variable.numpy() for variable in backbone.variables}
    return (
        config,
        vocabulary,
        *name_map.rename(tensors, config, "keras", IGNORED, where=str(preset)),
    )
