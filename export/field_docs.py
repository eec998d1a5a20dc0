"""Descriptions of the inputs and outputs of signatures, for SIGNATURES.md and the model card."""

from collections.abc import Mapping

TASKS = {
    "classification": "Predicts the labels of a text or of a pair of texts.",
    "regression": "Predicts a number for a text or for a pair of texts.",
    "tagging": "Extracts the entities of a text: their text, type and position.",
    "span_qa": "Extracts the answer to a question from a context that may contain it.",
    "multiple_choice": "Predicts which of several choices fits a prompt best.",
    "anomaly": "Detects texts that differ from the normal texts of the training data.",
    "pretrained": "Predicts the token at the first [MASK] of a text.",
}
SIGNATURES = {
    "serving_default": "The prediction of the model.",
    "tokenize": "The tokens that the model receives, and their positions in the text.",
    "embed": "Vectors of a text, for similarity and search.",
    "masked_lm": "Predictions for the token at the first [MASK] of a text.",
    "next_sentence": "The probability that the second text follows the first.",
}
INPUTS = {
    "text": "text",
    "text_a": "first text of the pair",
    "text_b": "second text of the pair",
    "question": "question",
    "context": "text that may contain the answer, of any length",
    "prompt": 'text that the choices continue or answer; "" for none',
    "choices": 'choices; rows with fewer choices than others are padded with ""',
}
_TOKENS = {
    "input_ids": "token ids, which are line numbers of assets.extra/vocab.txt from 0",
    "input_mask": "1 for tokens, 0 for padding",
    "segment_ids": "0 in the first text, 1 in the second",
    "start": "start of the token in its own text, in characters; -1 for [CLS], [SEP] and padding",
    "end": "end of the token (exclusive), in characters; -1 for [CLS], [SEP] and padding",
}
_VECTORS = {
    "pooled": "output of the pooler, from [CLS]",
    "mean": "mean of the vectors of all tokens",
}
_MASKED_LM = {
    "token": "most probable tokens at the first [MASK], best first",
    "score": "probabilities of these tokens",
}
_NEXT_SENTENCE = {"is_next": "probability that the second text follows the first"}
_LABELS = {
    "label": "most probable label, or the rare label if it reaches its threshold",
    "score": "probability of `label`",
    "probabilities": "probability of each label, in the order of `labels`",
    "labels": "all labels, the same in every row",
    "selected": "whether each label reaches its own threshold",
}
_OUTPUTS = {
    "classification": _LABELS,
    "regression": {"value": "predicted number"},
    "tagging": {
        "entity_text": "text of each entity, as in the input",
        "entity_type": "type of each entity",
        "entity_start": "start of each entity, in characters; -1 for padding",
        "entity_end": "end of each entity (exclusive), in characters; -1 for padding",
        "entity_score": "confidence of each entity, from 0 to 1; -1 for padding",
        "num_entities": "number of entities; entries after it are padding",
    },
    "span_qa": {
        "answer": 'answer; "" if there is none',
        "start": "start of the answer in the context, in characters; -1 if there is none",
        "end": "end of the answer (exclusive), in characters; -1 if there is none",
        "score": "probability among the best answers and, if allowed, no answer",
        "no_answer_score": "score of no answer; higher is more likely",
        "nbest_answer": "best answers, best first",
        "nbest_start": "starts of the best answers, in characters; -1 for padding",
        "nbest_end": "ends of the best answers (exclusive), in characters; -1 for padding",
        "nbest_score": "scores of the best answers",
    },
    "multiple_choice": {
        "choice": "index of the best choice, from 0; -1 if there are no choices",
        "probabilities": "probability of each choice",
    },
    "anomaly": {
        "score": "anomaly score: the reconstruction error of the text",
        "is_anomaly": "whether the score reaches the threshold",
    },
    "pretrained": _MASKED_LM,
}
# The outputs of these signatures mean the same in every model.
_OF_SIGNATURES = {
    "tokenize": _TOKENS,
    "embed": _VECTORS,
    "masked_lm": _MASKED_LM,
    "next_sentence": _NEXT_SENTENCE,
}


def of_outputs(kind: str, signature: str) -> Mapping[str, str]:
    """Return the descriptions of a signature's outputs.

    Args:
        kind: Task type, such as "classification"; see `tasks.registry`.
        signature: Name of the signature.

    Returns:
        Output names with their descriptions, in reading order. Empty for an unknown task type.
    """
    return _OF_SIGNATURES.get(signature) or _OUTPUTS.get(kind, {})
