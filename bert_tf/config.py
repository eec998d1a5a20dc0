"""Model configuration (`BertConfig`), the published model sizes, and the keys of other programs.

transformers writes the attributes of a configuration object to config.json: besides those of BERT
also those of training, of text generation and of whatever program handled the model. A key beside
the fields of `BertConfig` either leaves the encoder's outputs as they are, or it is accepted with
one value only.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json
from bert_tf.system.scalars import to_python

ACTIVATIONS = ("gelu", "gelu_new")  # Exact (erf) and tanh approximation, named as in Hugging Face.
# Other names at Hugging Face. The forms of a group differ by rounding only.
_ACTIVATION_ALIASES = {
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
}

# Fields that determine how text becomes token ids, together with the vocabulary.
TOKENIZER_SETTINGS = ("do_lower_case", "strip_accents", "max_input_chars_per_word")

MAX_LAYERS = 1_000
MAX_PARAMETERS = 10**11  # 400 GB in float32; the largest published BERT has 3.9e9.
MAX_WORD_CHARACTERS = 1 << 20  # Numbers of bytes, four per character, are int32.
MAX_FILE_BYTES = 64 << 20  # Enough for the manifest of 200,000 shards.

# Keys without an effect on the outputs of the encoder, by the reason why.
_IGNORED = {
    "describes the head, which is read with it": """
        _num_labels architectures classifier_dropout finetuning_task id2label label2id language name
        num_labels problem_type sbert_ce_default_activation_function task_specific_params
    """,
    "names the file, its tokenizer and the program that wrote it": """
        _commit_hash _name_or_path model_max_length model_type
        sentence_transformers tokenizer_class transformers.js_config transformers_version
        unsloth_fixed unsloth_version
    """,
    "is another way to compute the same numbers, or to run the model": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _experts_implementation attn_implementation chunk_size_feed_forward dtype
        gradient_checkpointing output_past pretraining_tp torch_dtype torchscript use_bfloat16
        use_cache use_flash_attention_2 xla_device
    """,
    "chooses which outputs are returned": """
        keys_to_ignore_at_inference output_attentions output_hidden_states return_dict
        use_return_dict
    """,
    "belongs to training": """
        ignore_index label_smoothing layerdrop loss_type tf_legacy_loss
    """,
    "is the id of a token, which the vocabulary has": """
        bos_token_id cls_token_id eos_token_id mask_token_id pad_token_id sep_token_id unk_token_id
    """,
    "is part of Google's configurations, and unused there": """
        directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type
    """,
    "belongs to heads of XLNet and GPT-2": """
        summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
        summary_type summary_use_proj
    """,
    "belongs to decoders, or to the generation of text": """
        bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size epsilon_cutoff
        eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id
        forced_eos_token_id guidance_scale length_penalty max_length max_new_tokens min_length
        min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
        output_scores penalty_alpha prefix remove_invalid_values renormalize_logits
        repetition_penalty return_dict_in_generate suppress_tokens temperature tie_encoder_decoder
        top_k top_p typical_p
    """,
}
IGNORED_KEYS = frozenset(name for names in _IGNORED.values() for name in names.split())


class Fixed(NamedTuple):
    """The only accepted value of a key, besides null.

    Attributes:
        value: The value under which the key has no effect.
        reason: What another value means.
    """

    value: Any
    reason: str


FIXED_KEYS = {
    "add_cross_attention": Fixed(False, "the layers attend to another sequence too"),
    "adapters": Fixed({}, "adapters are additional layers; merge or remove them"),
    "alibi_starting_size": Fixed(None, "positions are biases of the attention"),
    "auto_map": Fixed({}, "the model is computed by code of its own"),
    "feed_forward_type": Fixed("original", "the feed-forward layers are gated"),
    "is_decoder": Fixed(False, "tokens attend to earlier ones only"),
    "is_encoder_decoder": Fixed(False, "the model has a decoder"),
    "position_embedding_type": Fixed("absolute", "positions enter the attention"),
    "pruned_heads": Fixed({}, "the listed heads have no weights"),
    "quantization_config": Fixed(
        {}, "the weights are quantized; expected the model in floating-point numbers"
    ),
    "rope_parameters": Fixed({}, "positions are rotations"),
    "rope_scaling": Fixed({}, "positions are rotations"),
    "rope_theta": Fixed(None, "positions are rotations"),
    "tie_word_embeddings": Fixed(True, "the output layer has weights of its own"),
    "use_rope": Fixed(False, "positions are rotations"),
}


def fixed_keys(values: Mapping[str, Any]) -> dict[str, Fixed]:
    """Return `FIXED_KEYS` and the keys of a configuration that have to equal another key."""
    return {
        **FIXED_KEYS,
        "embedding_size": Fixed(
            values.get("hidden_size"), "narrower embeddings are projected to the hidden size"
        ),
        "vocab_size_or_config_json_file": Fixed(
            values.get("vocab_size"), "the configuration has two sizes of the vocabulary"
        ),
    }


def strips_accents(do_lower_case: bool, strip_accents: bool | None) -> bool:
    """Return whether accents are removed; by default from lower-cased text only, as released."""
    return do_lower_case if strip_accents is None else strip_accents


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Model and text normalization parameters, with the keys of the published bert_config.json.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Width of the token vectors, a multiple of `num_attention_heads`.
        num_hidden_layers: Number of transformer layers.
        num_attention_heads: Attention heads per layer.
        intermediate_size: Width of the feed-forward layer.
        hidden_act: "gelu" (erf) or "gelu_new" (tanh). google-research/bert started with erf and
            has used tanh since February 2019, both under the name "gelu". `from_google` therefore
            reads "gelu" as "gelu_new". The two differ by at most 4.7e-4 per activation.
        hidden_dropout_prob: Dropout rate of embeddings and layer outputs, in [0, 1).
        attention_probs_dropout_prob: Dropout rate of attention probabilities, in [0, 1).
        max_position_embeddings: Maximum sequence length in tokens.
        type_vocab_size: Number of segment ids.
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Epsilon of layer normalization.
        do_lower_case: Whether text is lower-cased.
        strip_accents: Whether accents are removed; `None` means as `do_lower_case`.
        max_input_chars_per_word: Number of characters up to which a word is split into pieces; a
            longer one is [UNK]. 200 in google-research/bert, 100 in Hugging Face.

    Raises:
        UserError: If a value is invalid or the model would be too large.
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
    type_vocab_size: int = 2  # 16 in the released class, 2 in all released checkpoints.
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    do_lower_case: bool = True
    strip_accents: bool | None = None
    max_input_chars_per_word: int = 200

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, to_python(value))  # The dataclass is frozen.
        self._check(
            "an integer >= 1",
            lambda value: type(value) is int and value >= 1,
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("intermediate_size", "max_position_embeddings", "type_vocab_size"),
            "max_input_chars_per_word",
        )
        self._check(
            "a number in [0, 1)",
            lambda value: _is_number(value) and 0 <= value < 1,
            *("hidden_dropout_prob", "attention_probs_dropout_prob"),
        )
        self._check(
            "a number > 0",
            lambda value: _is_number(value) and 0 < value < float("inf"),
            *("initializer_range", "layer_norm_eps"),
        )
        if type(self.do_lower_case) is not bool or type(self.strip_accents) not in (
            bool,
            type(None),
        ):
            raise UserError(
                f"configuration: do_lower_case={self.do_lower_case!r:.40}, strip_accents="
                f"{self.strip_accents!r:.40}; expected true or false (strip_accents may be null)"
            )
        if self.max_input_chars_per_word > MAX_WORD_CHARACTERS:
            raise UserError(
                f"configuration: max_input_chars_per_word is {self.max_input_chars_per_word:.3g}; "
                f"expected at most {MAX_WORD_CHARACTERS}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"configuration: hidden_size is {self.hidden_size}; expected a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        self._check(
            f"one of {', '.join(ACTIVATIONS)}", lambda value: value in ACTIVATIONS, "hidden_act"
        )
        # Checked before any allocation: a typo ends in a message, not in a killed process.
        if self.num_hidden_layers > MAX_LAYERS or self.num_parameters > MAX_PARAMETERS:
            raise UserError(
                f"configuration: hidden_size {self.hidden_size} and num_hidden_layers "
                f"{self.num_hidden_layers} give {self.num_parameters} parameters; expected at most "
                f"{MAX_LAYERS} layers and {MAX_PARAMETERS:.0e} parameters"
            )

    def _check(self, expected, is_valid, *names):
        for name in names:
            if not is_valid(value := getattr(self, name)):
                raise UserError(f"configuration: {name} is {value!r:.40}; expected {expected}")

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """Keyword arguments of the `Tokenizer`."""
        return {name: getattr(self, name) for name in TOKENIZER_SETTINGS}

    @property
    def num_parameters(self) -> int:
        """Number of encoder parameters without biases and layer normalization."""
        # Embeddings, the pooler, and per layer four attention and two feed-forward matrices.
        rows = self.vocab_size + self.max_position_embeddings + self.type_vocab_size
        of_layer = 4 * self.hidden_size + 2 * self.intermediate_size
        return self.hidden_size * (rows + self.hidden_size + self.num_hidden_layers * of_layer)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: str = "configuration", *, is_foreign: bool = False
    ) -> Self:
        """Build a configuration from the config.json of a run or of Hugging Face.

        Args:
            values: The JSON object.
            where: The file, for error messages.
            is_foreign: Whether another program wrote the file. A key that nothing is known about is
                then a warning that names it, otherwise an error. It may be null, false or empty.

        Raises:
            UserError: If a key is unknown, or a value is invalid or not supported.
        """
        values = dict(values)
        if values.get("model_type", "bert") != "bert":
            raise UserError(f"{where}: model_type is {values['model_type']!r:.80}; expected 'bert'")
        fixed = fixed_keys(values)
        for name, (value, reason) in fixed.items():
            if values.get(name) not in (None, value):
                raise UserError(
                    f"{where}: {name}={values[name]!r:.80} is not supported ({reason}); expected "
                    f"{value!r}"
                )
        fields = {field.name for field in dataclasses.fields(cls)}
        known = fields | IGNORED_KEYS | set(fixed)
        unknown = sorted(
            name for name, value in values.items() if name not in known and not _is_unset(value)
        )
        if unknown and not is_foreign:
            raise UserError(
                f"{where}: unknown key {', '.join(unknown):.200}; expected the fields of "
                f"BertConfig, {', '.join(sorted(fields))}"
            )
        if "vocab_size" not in values:
            raise UserError(f"{where}: vocab_size is missing")
        activation = values.get("hidden_act")
        if isinstance(activation, str) and activation in _ACTIVATION_ALIASES:
            values["hidden_act"] = _ACTIVATION_ALIASES[activation]
        if unknown:
            warnings.warn(
                f"{where}: ignored the unknown key {', '.join(unknown):.200}; if the model was "
                "changed by it, outputs differ",
                stacklevel=2,
            )
        try:
            return cls(**{name: value for name, value in values.items() if name in fields})
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def from_google(
        cls, values: Mapping[str, Any], where: str = "configuration", *, is_foreign: bool = False
    ) -> Self:
        """Build a configuration from a bert_config.json of google-research/bert.

        Its "gelu" is the tanh approximation. Otherwise like `from_dict`.
        """
        if values.get("hidden_act") == "gelu":
            values = {**values, "hidden_act": "gelu_new"}
        return cls.from_dict(values, where, is_foreign=is_foreign)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a JSON file: with `from_google` if named bert_config.json, else with `from_dict`."""
        is_google = os.path.basename(path) == "bert_config.json"
        read = cls.from_google if is_google else cls.from_dict
        return read(read_json_object(path), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as saved in config.json."""
        return dataclasses.asdict(self)


def read_json_object(path: str | os.PathLike, **parsers: Callable[[str], Any]) -> dict[str, Any]:
    """Read a file that contains one JSON object; `parsers` are those of `strict_json.parse`.

    Raises:
        UserError: If the file is missing, too large or not a JSON object.
    """
    size = files.size(path)
    if size is None:
        raise UserError(f"{path}: no such file")
    if size > MAX_FILE_BYTES:
        raise UserError(f"{path}: {size} bytes; expected a JSON object of at most {MAX_FILE_BYTES}")
    try:
        return strict_json.parse_object(files.read_text(path), **parsers)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _is_unset(value):
    """Return True for the values with which a feature is switched off or absent."""
    return value is None or value is False or value in ([], {})


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
