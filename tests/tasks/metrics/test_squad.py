"""SQuAD metrics: cases by hand, and the search for a threshold against all thresholds."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.metrics.squad import (
    best_null_threshold,
    exact_match,
    f1,
    normalize_answer,
    squad_scores,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's hat!", "cats hat"),
        ("a an the", ""),
        ("The", ""),
        ("", ""),
        ("...", ""),
        ("U.S. of A.", "us of"),  # "A." is an article once its period is removed.
        ("well-known theory", "wellknown theory"),
        ("AN\tapple\na\u00a0day", "apple day"),
        ("«Über» — 20 %", "«über» — 20"),  # Only ASCII punctuation is removed.
        ("the-end", "theend"),
        ("on—the—way", "on— —way"),
    ],
)
def test_answers_are_normalized(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "expected"),
    [
        ("the Denver Broncos!", ["Denver Broncos"], 1, 1),
        ("Denver", ["Denver Broncos"], 0, 2 * 1 * 0.5 / 1.5),
        ("Denver", ["Carolina", "Denver Broncos", "The Denver Team of 1960"], 0, 2 / 3),
        ("gold gold gold", ["gold gold rush"], 0, 2 / 3),  # As bags of words, they share two.
        ("Broncos Denver", ["Denver Broncos"], 0, 1),
        ("Panthers", ["Denver Broncos"], 0, 0),
        ("", [""], 1, 1),
        ("the", [""], 1, 1),
        ("", ["Denver"], 0, 0),
        ("Denver", [""], 0, 0),
        ("Denver", [], 0, 0),
    ],
)
def test_scores_of_one_answer_by_hand(prediction, golds, exact, expected):
    assert exact_match(prediction, golds) == exact
    assert f1(prediction, golds) == pytest.approx(expected)


def test_version_1_has_no_f1_for_answers_without_words():
    assert f1("the", ["The"], version=1) == 0
    assert f1("the", ["The"], version=2) == 1
    assert squad_scores({"q": "the"}, {"q": ["The"]}, version=1) == {"exact_match": 1, "f1": 0}


def test_scores_by_hand():
    predictions = {"q1": "Denver", "q2": "in 1990", "q3": "", "q4": "gold", "extra": "x"}
    golds = {"q1": ["Denver Broncos", "Denver"], "q2": ["1990"], "q3": [], "q4": [""]}
    assert squad_scores(predictions, golds, version=2) == {
        "exact_match": 2 / 4,
        "f1": pytest.approx((1 + 2 / 3 + 1 + 0) / 4),
        "has_answer_exact_match": 1 / 2,
        "has_answer_f1": pytest.approx((1 + 2 / 3) / 2),
        "no_answer_exact_match": 1 / 2,
        "no_answer_f1": 1 / 2,
    }
    first_two = {"q1": golds["q1"], "q2": golds["q2"]}
    assert squad_scores(predictions, first_two, version=1) == {
        "exact_match": 1 / 2,
        "f1": pytest.approx((1 + 2 / 3) / 2),
    }


def test_version_2_ignores_gold_answers_without_words():
    # The question counts as answerable, and the right answer is "".
    scores = squad_scores({"q": ""}, {"q": ["the"]}, version=2)
    assert scores == {"exact_match": 1, "f1": 1, "has_answer_exact_match": 1, "has_answer_f1": 1}
    assert squad_scores({"q": ""}, {"q": ["the", "cat"]}, version=2)["exact_match"] == 0


def test_without_questions_scores_are_0():
    assert squad_scores({}, {}, version=2) == {"exact_match": 0, "f1": 0}
    assert squad_scores({}, {}, version=1) == {"exact_match": 0, "f1": 0}


def test_a_question_without_a_prediction_is_rejected():
    with pytest.raises(KeyError, match="q1"):
        squad_scores({}, {"q1": ["x"]}, version=2)


def test_threshold_by_hand():
    golds = {"a": ["x"], "b": ["x y"], "c": [], "d": ["x"], "e": []}
    predictions = {"a": "x", "b": "x", "c": "x", "d": "z", "e": "x"}
    scores = {"a": -5.0, "b": 1.0, "c": 2.0, "d": 2.5, "e": 3.0}
    # If a and b are answered: 1 + 2/3 for them; c and e are right, d never is.
    assert best_null_threshold(scores, predictions, golds) == (
        1.5,
        {"exact_match": 3 / 5, "f1": pytest.approx((1 + 2 / 3 + 2) / 5)},
    )


def answered(scores, predictions, threshold):
    return {name: "" if scores[name] > threshold else text for name, text in predictions.items()}


def test_threshold_equals_the_best_of_all():
    rng = np.random.default_rng(0)
    words = ["x", "x y", "the", "y z", "x y z"]
    for _ in range(150):
        names = [f"q{number}" for number in range(rng.integers(1, 12))]
        golds = {
            name: [] if rng.random() < 0.5 else rng.choice(words, rng.integers(1, 3)).tolist()
            for name in names
        }
        predictions = {name: str(rng.choice(words)) for name in names}
        scores = {name: float(np.round(rng.normal(), rng.integers(0, 3))) for name in names}
        threshold, achieved = best_null_threshold(scores, predictions, golds)
        reached = squad_scores(answered(scores, predictions, threshold), golds, version=2)
        assert achieved == pytest.approx({name: reached[name] for name in achieved})
        assert threshold not in scores.values()
        for other in (min(scores.values()) - 1, *scores.values()):
            given = squad_scores(answered(scores, predictions, other), golds, version=2)
            assert given["f1"] <= reached["f1"] + 1e-12


def test_threshold_if_one_side_is_always_right():
    scores, predictions = {"a": 1.0, "b": 2.0}, {"a": "x", "b": "x"}
    threshold, achieved = best_null_threshold(scores, predictions, {"a": [], "b": [""]})
    assert threshold < 1
    assert achieved == {"exact_match": 1, "f1": 1}
    threshold, achieved = best_null_threshold(scores, predictions, {"a": ["x"], "b": ["x"]})
    assert threshold > 2
    assert achieved == {"exact_match": 1, "f1": 1}
    threshold, _ = best_null_threshold({"a": 0.0}, {"a": "x"}, {"a": []})
    assert threshold == -0.5


def test_values_without_a_threshold_are_rejected():
    with pytest.raises(UserError, match="threshold: expected at least one score"):
        best_null_threshold({}, {}, {})
    with pytest.raises(UserError, match="no-answer scores: .* received 1 of 1 that are NaN"):
        best_null_threshold({"a": float("inf")}, {"a": "x"}, {"a": ["x"]})
