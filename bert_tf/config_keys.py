"""Keys of published configurations beside the fields of `BertConfig`, by their meaning.

transformers writes the attributes of a configuration object to config.json: besides those of BERT
also those of training, of text generation and of whatever program handled the model. A key either
leaves the encoder's outputs as they are, or it is accepted with one value only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Keys without an effect on the outputs of the encoder, by the reason why.
_IGNORED = {
    "describes the head, which is read with it": """
        _num_labels architectures classifier_dropout finetuning_task id2label label2id language name
        num_labels problem_type task_specific_params
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
    """Return `FIXED_KEYS` and the keys whose only accepted value is that of another key.

    Args:
        values: The configuration.
    """
    return {
        **FIXED_KEYS,
        "embedding_size": Fixed(
            values.get("hidden_size"), "narrower embeddings are projected to the hidden size"
        ),
        "vocab_size_or_config_json_file": Fixed(
            values.get("vocab_size"), "the configuration has two sizes of the vocabulary"
        ),
    }
