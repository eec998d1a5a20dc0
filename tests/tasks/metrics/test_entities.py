"""Metrics of entities: by hand, and against both modes of seqeval."""

import numpy as np
import pytest
import seqeval.metrics
import seqeval.metrics.sequence_labeling
import seqeval.scheme

from bert_tf import UserError
from tasks.metrics.entities import entities_of, entity_scores

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-A-B", "I-A-B", "B", "I"]


@pytest.mark.parametrize(
    ("tags", "default", "strict"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)], None),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)], None),
        ("O I-PER I-PER O", [("PER", 1, 3)], []),
        ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)], [("PER", 0, 1)]),
        ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)], [("PER", 0, 1)]),
        ("O O", [], None),
        ("", [], None),
    ],
)
def test_entities_by_hand(tags, default, strict):
    assert entities_of(tags.split()) == default
    assert entities_of(tags.split(), strict=True) == (default if strict is None else strict)


def test_scores_by_hand():
    gold = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "B-LOC"]]
    predicted = [["B-PER", "O", "O"], ["B-LOC", "O", "I-LOC"]]
    assert entity_scores(gold, predicted) == {
        "precision": 2 / 3,
        "recall": 2 / 3,
        "f1": 4 / 6,
        "types": {
            "LOC": {"precision": 1, "recall": 1, "f1": 1, "support": 2},
            "PER": {"precision": 0, "recall": 0, "f1": 0, "support": 1},
        },
    }
    strict = entity_scores(gold, predicted, strict=True)
    assert (strict["precision"], strict["recall"], strict["f1"]) == (1 / 2, 1 / 3, 2 / 5)


def test_entities_do_not_continue_in_the_next_sentence():
    apart = [["O", "B-PER"], ["I-PER", "O"]]
    joined = [["O", "B-PER", "I-PER", "O"]]
    assert entity_scores(apart, apart)["types"]["PER"]["support"] == 2
    assert entity_scores(joined, joined)["types"]["PER"]["support"] == 1


@pytest.mark.parametrize("strict", [False, True])
def test_scores_equal_seqeval(strict):
    rng = np.random.default_rng(0)
    options = {"mode": "strict", "scheme": seqeval.scheme.IOB2} if strict else {}
    for _ in range(150):
        gold, predicted = [], []
        for length in rng.integers(1, 9, rng.integers(1, 5)):
            tags = rng.choice(TAGS, length)
            gold.append(tags.tolist())
            changed = rng.random(length) < 0.3
            predicted.append(np.where(changed, rng.choice(TAGS, length), tags).tolist())
        for tags in gold + predicted:
            if strict:
                theirs = seqeval.scheme.Tokens(tags, seqeval.scheme.IOB2).entities
                expected = [(entity.tag, entity.start, entity.end) for entity in theirs]
            else:
                theirs = seqeval.metrics.sequence_labeling.get_entities(tags)
                expected = [(kind, start, last + 1) for kind, start, last in theirs]
            assert entities_of(tags, strict) == expected
        ours = entity_scores(gold, predicted, strict)
        for name in ("precision", "recall", "f1"):
            theirs = getattr(seqeval.metrics, f"{name}_score")
            expected = theirs(gold, predicted, zero_division=0, **options)
            assert ours[name] == pytest.approx(expected)
        if ours["types"]:
            report = seqeval.metrics.classification_report(
                gold, predicted, output_dict=True, zero_division=0, **options
            )
            for kind, expected in report.items():
                if not kind.endswith(" avg"):
                    metrics = ours["types"].pop(kind)
                    assert list(metrics.values()) == pytest.approx(list(expected.values()))
            assert not ours["types"]


def test_undefined_scores_are_0():
    nothing = {"precision": 0, "recall": 0, "f1": 0, "types": {}}
    assert entity_scores([], []) == nothing
    assert entity_scores([[]], [[]]) == nothing
    assert entity_scores([["O", "O"]], [["O", "O"]]) == nothing
    assert entity_scores([["B-PER"]], [["O"]])["precision"] == 0
    assert entity_scores([["O"]], [["B-PER"]])["recall"] == 0


@pytest.mark.parametrize("tag", ["PER", "E-PER", "o", "", "b-PER", "BPER"])
def test_other_tags_are_rejected(tag):
    with pytest.raises(UserError, match=f"tag '{tag}': expected O, or B- or I- and a type"):
        entities_of(["O", tag])


def test_sentences_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match="expected 2 tags of a sentence, received 1"):
        entity_scores([["O", "O"]], [["O"]])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        entity_scores([["O"], ["O"]], [["O"]])
