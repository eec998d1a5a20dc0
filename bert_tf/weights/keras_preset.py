"""Reader of keras-nlp (KerasHub) BERT presets. The only module that imports keras_nlp."""

import pathlib

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights.name_map import StoredModel

IGNORED = r".*seed_generator.*"  # State of dropout.


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds a keras-nlp preset."""
    return (path / "model.weights.h5").is_file() and (path / "metadata.json").is_file()


def read_config(preset: pathlib.Path | str) -> None:
    """Return `None`: the configuration is only known after keras-nlp has loaded the preset."""
    return None


def read(preset: pathlib.Path | str) -> StoredModel:
    """Read a preset.

    The backbone's GELU is the tanh form. Unlike here, its tokenizer keeps accents even in uncased
    presets. The weights are Google's, trained without accents, so accents follow the case here.

    Args:
        preset: Directory, or the name of a published preset.

    Raises:
        UserError: keras-nlp cannot load the preset, or it is not a BERT backbone.
    """
    # Imported here because keras-nlp is an optional dependency and slow to import.
    import keras_nlp

    directory_config = preset / "config.json" if not isinstance(preset, str) else None
    if directory_config and read_json_object(directory_config).get("class_name") != "BertBackbone":
        raise UserError(
            f"{directory_config}: class_name is "
            f"{read_json_object(directory_config).get('class_name')!r}, "
            "expected BertBackbone"
        )
    try:
        backbone = keras_nlp.models.BertBackbone.from_preset(str(preset))
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(preset))
    except Exception as error:  # The library, Kaggle and the network raise many types of errors.
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
    return StoredModel(config, vocabulary, tensors, "keras", IGNORED, str(preset))
