"""What the inputs and outputs of signatures mean, in words for those who send requests."""

TASKS = {
    "classification": "Which label fits a text, or a pair of texts.",
    "regression": "A number for a text, or for a pair of texts.",
    "tagging": "The entities of a text: what they are called, of which type, and where they stand.",
    "span_qa": "The answer to a question, cut from a text that may hold it.",
    "multiple_choice": "Which of several choices goes best with a prompt.",
    "anomaly": "Whether a text is unlike the normal ones that the model was trained on.",
    "pretrained": "What stands at the first [MASK] of a text.",
}
SIGNATURES = {
    "serving_default": "The model's answer.",
    "tokenize": "What the model sees of a text: its tokens, and where in the text they stand.",
    "embed": "Vectors of a text, to compare and search with.",
    "masked_lm": "What stands at the first [MASK] of a text.",
    "next_sentence": "Whether one text follows on another.",
}
INPUTS = {
    "text": "the text",
    "text_a": "the first text of the pair",
    "text_b": "the second text of the pair",
    "question": "the question",
    "context": "the text that the answer is looked for in, of any length",
    "prompt": 'what the choices go with, "" if nothing',
    "choices": 'the choices; where rows have fewer than others, filled up with ""',
}
_TOKENS = {
    "input_ids": "ids of the tokens, lines of assets.extra/vocab.txt from 0 on",
    "input_mask": "1 at tokens, 0 at padding",
    "segment_ids": "0 in the first text, 1 in the second",
    "start": "the first character of the token in its own text; -1 at [CLS], [SEP], padding",
    "end": "the character behind its last; -1 likewise",
}
_VECTORS = {
    "pooled": "the vector of the pooler, of [CLS]",
    "mean": "the mean of all tokens' vectors",
}
_MASKED_LM = {
    "token": "the likeliest tokens at the first [MASK], best first",
    "score": "their probabilities",
}
_NEXT_SENTENCE = {"is_next": "the probability that the second text follows on the first"}
_LABELS = {
    "label": "the label; where several may apply the likeliest",
    "score": "its probability",
    "probabilities": "the probability of each label, in the order of `labels`",
    "labels": "all labels, the same in every row",
    "selected": "of each label whether it applies, by its own threshold",
}
_OUTPUTS = {
    "classification": _LABELS,
    "regression": {"value": "the number"},
    "tagging": {
        "entity_text": "each entity as it stands in the text",
        "entity_type": "its type",
        "entity_start": "its first character; -1 behind the last entity",
        "entity_end": "the character behind its last; -1 likewise",
        "entity_score": "how sure the model is of it, from 0 to 1",
        "num_entities": "how many there are; what comes behind is padding",
    },
    "span_qa": {
        "answer": 'the answer; "" where there is none',
        "start": "its first character in the context; -1 where there is none",
        "end": "the character behind its last; -1 likewise",
        "score": "its probability among the best answers, and no answer where there may be none",
        "no_answer_score": "the higher, the more likely there is no answer",
        "nbest_answer": "the best answers, best first",
        "nbest_start": "their first characters; -1 behind the last of them",
        "nbest_end": "the characters behind their last; -1 likewise",
        "nbest_score": "their scores",
    },
    "multiple_choice": {
        "choice": "the number of the best choice, from 0 on; -1 if there is none",
        "probabilities": "the probability of each choice",
    },
    "anomaly": {
        "score": "how unusual the text is: the error of reconstruction",
        "is_anomaly": "whether that reaches the threshold",
    },
    "pretrained": _MASKED_LM,
}
# Those whose outputs mean the same in every model.
_OF_SIGNATURES = {
    "tokenize": _TOKENS,
    "embed": _VECTORS,
    "masked_lm": _MASKED_LM,
    "next_sentence": _NEXT_SENTENCE,
}


def of_outputs(kind, signature):
    """{output: what it is} of a signature of a kind of task, in an order to read them in."""
    return _OF_SIGNATURES.get(signature) or _OUTPUTS.get(kind, {})
