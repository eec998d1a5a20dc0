"""Metrics of entities: by hand, at the edges, and against a reading of tags in a loop."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.types.tagging import entity_scores, strict_f1
from tests.tasks.metrics import brute_force

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-A-B", "I-A-B", "B", "I"]


@pytest.mark.parametrize(
    ("tags", "default", "strict"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)], None),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)], None),
        ("O I-PER I-PER O", [("PER", 1, 3)], []),
        ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)], [("PER", 0, 1)]),
        ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)], [("PER", 0, 1)]),
        ("B I O I", [("_", 0, 2), ("_", 3, 4)], [("_", 0, 2)]),
        ("B I-PER", [("_", 0, 1), ("PER", 1, 2)], [("_", 0, 1)]),
        ("B-A-B I-A-B I-A", [("A-B", 0, 2), ("A", 2, 3)], [("A-B", 0, 2)]),
        ("O O", [], None),
        ("", [], None),
    ],
)
def test_entities_by_hand(tags, default, strict):
    tags = tags.split()
    strict = default if strict is None else strict
    assert brute_force.entities_of(tags) == default
    assert brute_force.entities_of(tags, strict=True) == strict
    # As IOB2, in which both readings agree, the entities have perfect scores.
    for entities, f1 in (
        (default, lambda *pair: entity_scores(*pair)["f1"]),
        (strict, strict_f1),
    ):
        plain = ["O"] * len(tags)
        for kind, start, end in entities:
            plain[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
        assert f1([plain], [tags]) == f1([tags], [plain]) == bool(entities)


def test_scores_by_hand():
    gold = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "B-LOC"]]
    predicted = [["B-PER", "O", "O"], ["B-LOC", "O", "I-LOC"]]
    assert entity_scores(gold, predicted) == {
        "precision": 2 / 3,
        "recall": 2 / 3,
        "f1": pytest.approx(4 / 6, rel=1e-12),
        "types": {
            "LOC": {"precision": 1, "recall": 1, "f1": 1, "support": 2},
            "PER": {"precision": 0, "recall": 0, "f1": 0, "support": 1},
        },
    }
    # The stray I-LOC is no entity: one hit among two predicted entities, of three.
    assert strict_f1(gold, predicted) == pytest.approx(2 * 1 / (2 + 3), rel=1e-12)


def test_entities_do_not_continue_in_the_next_sentence():
    apart = [["O", "B-PER"], ["I-PER", "O"]]
    joined = [["O", "B-PER", "I-PER", "O"]]
    assert entity_scores(apart, apart)["types"]["PER"]["support"] == 2
    assert entity_scores(joined, joined)["types"]["PER"]["support"] == 1


def test_scores_equal_their_definitions():
    rng = np.random.default_rng(0)
    for _ in range(150):
        gold, predicted = [], []
        for length in rng.integers(0, 9, rng.integers(1, 5)):
            tags = rng.choice(TAGS, length)
            gold.append(tags.tolist())
            changed = rng.random(length) < 0.3
            predicted.append(np.where(changed, rng.choice(TAGS, length), tags).tolist())
        both = [brute_force.entities_of_all(sentences) for sentences in (gold, predicted)]
        scores = entity_scores(gold, predicted)
        kinds = sorted({kind for entities in both for _, kind, *_ in entities})
        assert list(scores["types"]) == kinds
        for kind, metrics in [(None, scores), *scores["types"].items()]:
            chosen = [
                {entity for entity in entities if kind in (None, entity[1])} for entities in both
            ]
            expected = brute_force.precision_recall_f1(*chosen)
            found = [metrics[name] for name in ("precision", "recall", "f1")]
            assert found == pytest.approx(expected, rel=1e-12)
            assert kind is None or metrics["support"] == len(chosen[0])
        strict = [brute_force.entities_of_all(tags, strict=True) for tags in (gold, predicted)]
        expected = brute_force.precision_recall_f1(*strict)[2]
        assert strict_f1(gold, predicted) == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_undefined_scores_are_0():
    nothing = {"precision": 0, "recall": 0, "f1": 0, "types": {}}
    assert entity_scores([], []) == nothing
    assert entity_scores([[]], [[]]) == nothing
    assert entity_scores([["O", "O"]], [["O", "O"]]) == nothing
    for sentences in ([], [[]], [["O", "O"]], [["I-PER"]]):
        assert strict_f1(sentences, sentences) == 0
    assert entity_scores([["B-PER"]], [["O"]])["precision"] == 0
    assert entity_scores([["O"]], [["B-PER"]])["recall"] == 0


@pytest.mark.parametrize("tag", ["PER", "E-PER", "o", "", "b-PER", "BPER"])
def test_other_tags_are_rejected(tag):
    for metric in (entity_scores, strict_f1):
        for pair in (([["O", tag]], [["O", "O"]]), ([["O", "O"]], [["O", tag]])):
            with pytest.raises(UserError, match=f"tag '{tag}': expected O, or B- or I- and a type"):
                metric(*pair)


def test_sentences_of_different_lengths_are_rejected():
    for metric in (entity_scores, strict_f1):
        for pair in (([["O", "O"]], [["O"]]), ([["O"], ["O"]], [["O"]])):
            with pytest.raises(ValueError, match="inconsistent numbers of samples"):
                metric(*pair)
