"""SQuAD's exact match and F1, as defined by its evaluate-v1.1 and evaluate-v2.0 scripts.

They are from 0 to 1, as all metrics here; the scripts print percentages. "" means "no answer".
"""

import collections
import math
import re
import string
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from tasks.metrics.checks import finite
from tasks.metrics.thresholds import cut

ARTICLES = re.compile(r"\b(a|an|the)\b")
# Largest number of words of an answer, and its group.
_LENGTHS = (
    *((0, "no answer"), (1, "1 word"), (2, "2 words"), (5, "3 to 5 words")),
    (math.inf, "6 or more words"),
)
PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the scripts.


def normalize_answer(text: str) -> str:
    """Lower-case a text and remove punctuation, English articles and extra white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalized prediction equals a gold answer, otherwise 0.0."""
    return float(normalize_answer(prediction) in map(normalize_answer, golds))


def f1(prediction: str, golds: Iterable[str], version: int = 2) -> float:
    """Return the highest F1 of bags of words of a prediction and a gold answer, 0 without gold.

    If the prediction or the gold answer has no words, the F1 is 0 in version 1; in version 2 it is
    1 if neither has words, otherwise 0.
    """
    words = normalize_answer(prediction).split()
    return max((_f1(words, normalize_answer(gold).split(), version) for gold in golds), default=0.0)


def squad_scores(
    predictions: Mapping[Hashable, str],
    golds: Mapping[Hashable, Sequence[str]],
    version: int,
) -> dict[str, float]:
    """Return the mean exact match and F1 over questions; 0 without questions.

    Args:
        predictions: `{id: text}`, with all ids of `golds`.
        golds: `{id: texts}`; [] and [""] mean "no answer".
        version: 1 or 2. Version 2 skips gold answers without words.

    Returns:
        {"exact_match", "f1"}. In version 2 also has_answer_exact_match, has_answer_f1,
        no_answer_exact_match and no_answer_f1, each pair if there are such questions.
    """
    each = _each_question(predictions, golds, version)
    scores = _means("", each.values())
    if version == 2:
        for prefix, expected in (("has_answer_", True), ("no_answer_", False)):
            chosen = [each[name] for name, texts in golds.items() if any(texts) == expected]
            scores |= _means(prefix, chosen) if chosen else {}
    return scores


def scores_by_length(
    predictions: Mapping[Hashable, str], golds: Mapping[Hashable, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return exact_match and f1 by the number of words of the shortest answer, such as "2 words".

    Arguments as in `squad_scores`; groups without questions are left out.
    """
    groups: dict[str, list[Hashable]] = {name: [] for _, name in _LENGTHS}
    for question, answers in golds.items():
        length = min((len(normalize_answer(answer).split()) for answer in answers), default=0)
        groups[next(name for most, name in _LENGTHS if length <= most)].append(question)
    return {
        name: _means("", [(exact_match(*pair), f1(*pair)) for pair in pairs])
        for name, questions in groups.items()
        if (pairs := [(predictions[key], golds[key] or [""]) for key in questions])
    }


def best_null_threshold(
    no_answer_scores: Mapping[Hashable, float],
    predictions: Mapping[Hashable, str],
    golds: Mapping[Hashable, Sequence[str]],
) -> tuple[float, dict[str, float]]:
    """Return the no-answer threshold with the best F1 of version 2, and its exact_match and f1.

    A question is predicted as unanswerable if its no-answer score is above the threshold. Unlike
    the search of evaluate-v2.0, this one never separates equal scores, and includes a threshold
    below all scores. Of equally good thresholds the lowest is returned.

    Args:
        no_answer_scores: `{id: score}`, higher if an answer is less likely.
        predictions: `{id: text}`, the best text that is not "".
        golds: `{id: texts}`; [] and [""] mean "no answer".

    Raises:
        UserError: Without questions, at NaN and infinity.
    """
    scores_N = finite([no_answer_scores[name] for name in golds], "no-answer scores")
    answered = _each_question(predictions, golds, version=2)
    unanswered = _each_question(dict.fromkeys(golds, ""), golds, version=2)
    answered_N2 = np.reshape(list(answered.values()), (-1, 2))
    unanswered_N2 = np.reshape(list(unanswered.values()), (-1, 2))
    # Row k of the totals: scores if the questions with the k lowest no-answer scores are answered.
    ascending_K, group_N = np.unique(scores_N, return_inverse=True)
    gains_K2 = np.zeros((len(ascending_K) + 1, 2))
    np.add.at(gains_K2, group_N + 1, answered_N2 - unanswered_N2)
    totals_K2 = unanswered_N2.sum(0) + np.cumsum(gains_K2, 0)
    best = int(totals_K2[:, 1].argmax())
    threshold = -cut(-ascending_K, best)  # `cut` expects descending scores, hence the negation.
    exact, best_f1 = (totals_K2[best] / len(scores_N)).tolist()
    return threshold, {"exact_match": exact, "f1": best_f1}


def _f1(words, gold_words, version):
    if version == 2 and not (words and gold_words):
        return float(words == gold_words)
    same = (collections.Counter(words) & collections.Counter(gold_words)).total()
    return 2 * same / (len(words) + len(gold_words)) if same else 0.0


def _each_question(predictions, golds, version):
    """Return {id: (exact match, F1)}."""
    result = {}
    for name, texts in golds.items():
        if version == 2:
            # As in evaluate-v2.0: answers without words are dropped; none left means no answer.
            texts = [text for text in texts if normalize_answer(text)] or [""]
        result[name] = exact_match(predictions[name], texts), f1(predictions[name], texts, version)
    return result


def _means(prefix, metrics):
    means_2 = np.reshape(list(metrics), (-1, 2)).sum(0) / max(len(metrics), 1)
    return dict(zip((f"{prefix}exact_match", f"{prefix}f1"), means_2.tolist(), strict=True))
