"""BertConfig: what decides the numbers of a BERT, and the published sizes."""

import dataclasses
import json
import os

from bert_tf import files, strict_json
from bert_tf.errors import UserError

ACTIVATIONS = ("gelu", "gelu_new")  # erf and tanh, as Hugging Face names them.

MAX_LAYERS = 1_000
MAX_PARAMETERS = 10**11  # 400 GB in float32; the largest published BERT has 3.9e9.
MAX_FILE_BYTES = 64 << 20  # Of a JSON object: a manifest of 200,000 shards.

# Keys of published configurations that change no number of the encoder.
IGNORED_KEYS = frozenset(
    """
    _name_or_path architectures bos_token_id chunk_size_feed_forward directionality dtype
    eos_token_id finetuning_task gradient_checkpointing id2label label2id language model_type name
    output_attentions output_hidden_states pad_token_id pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type problem_type return_dict tokenizer_class
    torch_dtype transformers_version use_cache
    """.split()
)

# Keys that are accepted with the one value under which they change nothing.
NEUTRAL_VALUES = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "classifier_dropout": None,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The keys of the published bert_config.json, and how text was normalized.

    `hidden_act` is "gelu" (erf) or "gelu_new" (tanh). The released code began with erf and has used
    tanh since February 2019, under the one name "gelu"; `from_google` therefore reads "gelu" as
    "gelu_new". The two differ by at most 4.7e-4 an activation. `strip_accents` None follows
    `do_lower_case`. Raises UserError on values that make no model.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2  # 16 in the released class, 2 in every released configuration.
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    do_lower_case: bool = True
    strip_accents: bool | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(
                    f"configuration: {name} is {value!r:.40}, wanted a whole number from 1"
                )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < 1:
                raise UserError(
                    f"configuration: {name} is {value!r:.40}, wanted a share from 0 up to 1"
                )
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < float("inf"):
                raise UserError(f"configuration: {name} is {value!r:.40}, wanted a number over 0")
        if type(self.do_lower_case) is not bool or type(self.strip_accents) not in (
            bool,
            type(None),
        ):
            raise UserError(
                f"configuration: do_lower_case={self.do_lower_case!r}, strip_accents="
                f"{self.strip_accents!r}: wanted true or false (strip_accents may be null)"
            )
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"configuration: hidden_size {self.hidden_size} does not divide by "
                "num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(
                f"configuration: hidden_act is {self.hidden_act!r:.40}, wanted one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        # Before memory is asked for: a digit too many ends in one line, not in a killed process.
        if self.num_hidden_layers > MAX_LAYERS or self.num_parameters > MAX_PARAMETERS:
            raise UserError(
                f"configuration: hidden_size {self.hidden_size} and num_hidden_layers "
                f"{self.num_hidden_layers} make {self.num_parameters} parameters; wanted at most "
                f"{MAX_LAYERS} layers and {MAX_PARAMETERS:.0e} parameters"
            )

    @property
    def num_parameters(self) -> int:
        """The number of the encoder's parameters, but for its biases and norms."""
        rows = self.vocab_size + self.max_position_embeddings + self.type_vocab_size
        of_layer = 4 * self.hidden_size + 2 * self.intermediate_size
        return self.hidden_size * (rows + self.hidden_size + self.num_hidden_layers * of_layer)

    @classmethod
    def from_dict(cls, values, where="configuration"):
        """Reads the keys of a run's or a Hugging Face config.json; refuses unknown ones."""
        values = dict(values)
        if values.get("model_type", "bert") != "bert":
            raise UserError(f"{where}: model_type is {values['model_type']!r:.80}, wanted 'bert'")
        for name, neutral in NEUTRAL_VALUES.items():
            if values.get(name, neutral) != neutral:
                raise UserError(
                    f"{where}: {name}={values[name]!r:.80} is not supported, only {neutral!r} is"
                )
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - fields - IGNORED_KEYS - set(NEUTRAL_VALUES))
        if unknown:
            raise UserError(
                f"{where}: unknown key {', '.join(unknown):.200}; remove it if it changes no number"
            )
        if "vocab_size" not in values:
            raise UserError(f"{where}: vocab_size is missing")
        try:
            return cls(**{name: value for name, value in values.items() if name in fields})
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def from_google(cls, values, where="configuration"):
        """Reads a released bert_config.json, whose "gelu" is the tanh form."""
        if values.get("hidden_act") == "gelu":
            values = {**values, "hidden_act": "gelu_new"}
        return cls.from_dict(values, where)

    @classmethod
    def load(cls, path):
        """Reads a file, as Google's if it is called bert_config.json, else as Hugging Face's."""
        is_google = os.path.basename(path) == "bert_config.json"
        read = cls.from_google if is_google else cls.from_dict
        return read(read_json_object(path), where=str(path))

    def to_dict(self):
        return dataclasses.asdict(self)


def read_json_object(path, **parsers) -> dict:
    """The JSON object in a file. Raises UserError if the file is missing or holds none.

    `parsers` are those of strict_json.parse.
    """
    size = files.size(path)
    if size is None:
        raise UserError(f"{path}: no such file")
    if size > MAX_FILE_BYTES:
        raise UserError(f"{path}: {size} bytes, wanted a JSON object of at most {MAX_FILE_BYTES}")
    try:
        return strict_json.parse_object(files.read_text(path), **parsers)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _model_size(layers, hidden, heads):
    return BertConfig(
        vocab_size=30522,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )


# Layers, hidden size, heads: Turc et al. 2019 (tiny to medium), Devlin et al. 2019 (base, large).
MODEL_SIZES = {
    "tiny": _model_size(2, 128, 2),
    "mini": _model_size(4, 256, 4),
    "small": _model_size(4, 512, 8),
    "medium": _model_size(8, 512, 8),
    "base": _model_size(12, 768, 12),
    "large": _model_size(24, 1024, 16),
}
