"""SQuAD's exact match and F1, as its evaluate-v1.1 and evaluate-v2.0 scripts define them.

From 0 to 1, as all metrics here; the scripts print percents. Texts that mean "no answer" are "".
"""

import collections
import re
import string

import numpy as np

from tasks.metrics.checks import finite
from tasks.metrics.labels import ratio
from tasks.metrics.thresholds import cut

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII alone, as in the scripts.


def normalize_answer(text):
    """In lower case, without punctuation and English articles, one space between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction, golds):
    """1.0 if the prediction, normalized, is one of the gold answers; else 0.0."""
    return float(normalize_answer(prediction) in map(normalize_answer, golds))


def f1(prediction, golds, version=2):
    """The F1 of the bags of words, of the gold answer that it fits best; 0 without gold answers.

    Where one of the two has no words: version 2, whether both have none; version 1, 0.
    """
    words = normalize_answer(prediction).split()
    return max((_f1(words, normalize_answer(gold).split(), version) for gold in golds), default=0.0)


def squad_scores(predictions, golds, version):
    """{"exact_match", "f1"}: means over the questions; 0 where there are none.

    predictions: {id: text}. golds: {id: [texts]}; [] and [""] mean that there is no answer.
    Version 2 passes over gold answers without words, and tells the questions that have an answer
    from those that have not: has_answer_exact_match, has_answer_f1, no_answer_exact_match,
    no_answer_f1, each pair only if there are such. Raises KeyError at a question without a
    prediction.
    """
    each = _each_question(predictions, golds, version)
    scores = _means("", each.values())
    if version == 2:
        for prefix, expected in (("has_answer_", True), ("no_answer_", False)):
            chosen = [each[name] for name, texts in golds.items() if any(texts) == expected]
            scores |= _means(prefix, chosen) if chosen else {}
    return scores


def best_null_threshold(no_answer_scores, predictions, golds):
    """(threshold, {"exact_match", "f1"}): the best F1 of version 2, and the exact match with it.

    The rule: where the no-answer score (higher: likelier that there is none) is above the
    threshold, the answer is "", else the prediction, which should be the best text, not "".
    Of equals the lowest threshold. Unlike the script's search it does not part equal scores, and
    knows a threshold below all of them. Raises UserError without questions, at NaN and infinity.
    """
    scores_N = finite([no_answer_scores[name] for name in golds], "no-answer scores")
    answered = _each_question(predictions, golds, version=2)
    unanswered = _each_question(dict.fromkeys(golds, ""), golds, version=2)
    answered_N2 = np.reshape(list(answered.values()), (-1, 2))
    unanswered_N2 = np.reshape(list(unanswered.values()), (-1, 2))
    # In order of falling confidence in an answer: which k of K are given.
    ascending_K, group_N = np.unique(scores_N, return_inverse=True)
    gains_K2 = np.zeros((len(ascending_K) + 1, 2))
    np.add.at(gains_K2, group_N + 1, answered_N2 - unanswered_N2)
    totals_K2 = unanswered_N2.sum(0) + np.cumsum(gains_K2, 0)
    best = int(totals_K2[:, 1].argmax())
    exact, best_f1 = (float(ratio(total, len(scores_N))) for total in totals_K2[best])
    return -cut(-ascending_K, best), {"exact_match": exact, "f1": best_f1}


def _f1(words, gold_words, version):
    if version == 2 and not (words and gold_words):
        return float(words == gold_words)
    same = (collections.Counter(words) & collections.Counter(gold_words)).total()
    return 2 * same / (len(words) + len(gold_words)) if same else 0.0


def _each_question(predictions, golds, version):
    """{id: (exact match, F1)}."""
    result = {}
    for name, texts in golds.items():
        if version == 2:
            texts = [text for text in texts if normalize_answer(text)] or [""]
        result[name] = exact_match(predictions[name], texts), f1(predictions[name], texts, version)
    return result


def _means(prefix, metrics):
    exact, f1s = np.reshape(list(metrics), (-1, 2)).sum(0)
    return {
        f"{prefix}exact_match": float(ratio(exact, len(metrics))),
        f"{prefix}f1": float(ratio(f1s, len(metrics))),
    }
