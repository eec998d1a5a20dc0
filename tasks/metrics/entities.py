"""Entity-level F1 of tags "O", "B-TYPE" and "I-TYPE"; type and both borders have to match.

There are two readings of tags that are not IOB2, both of seqeval; on IOB2 they agree:

default: an I- that continues no entity begins one, as in CoNLL's conlleval.
strict: it belongs to no entity.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import seqeval.metrics
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from seqeval.scheme import IOB2

from bert_tf.errors import UserError


def entity_scores(
    gold_sentences: Sequence[Sequence[str]], predicted_sentences: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return micro-averaged precision, recall and F1 of entities, and those per type.

    Args:
        gold_sentences: Tags per sentence; a bare "B" or "I" has the type "_".
        predicted_sentences: Tags per sentence, as many and as long, otherwise ValueError.

    Returns:
        {"precision", "recall", "f1", "types": {type: {"precision", "recall", "f1", "support"}}},
        with the types that occur in either. Undefined ratios are 0.

    Raises:
        UserError: At an invalid tag.
    """
    gold, predicted = _as_lists(gold_sentences), _as_lists(predicted_sentences)
    precision, recall, f1, _ = precision_recall_fscore_support(
        gold, predicted, average="micro", zero_division=0
    )
    of_types = precision_recall_fscore_support(gold, predicted, average=None, zero_division=0)
    # The types in seqeval's order: in this reading, every tag but O belongs to an entity.
    tags = {tag for sentence in gold + predicted for tag in sentence} - {"O"}
    types = sorted({tag[2:] or "_" for tag in tags})
    names = ("precision", "recall", "f1", "support")
    rows = np.transpose(np.array(of_types, object))
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "types": {
            kind: dict(zip(names, row, strict=True))
            for kind, row in zip(types, rows.tolist(), strict=True)
        },
    }


def strict_f1(
    gold_sentences: Sequence[Sequence[str]], predicted_sentences: Sequence[Sequence[str]]
) -> float:
    """Return the micro-averaged F1 of the strict reading; arguments as in `entity_scores`."""
    gold, predicted = _as_lists(gold_sentences), _as_lists(predicted_sentences)
    return float(
        seqeval.metrics.f1_score(gold, predicted, mode="strict", scheme=IOB2, zero_division=0)
    )


def _as_lists(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    for tag in dict.fromkeys(tag for sentence in sentences for tag in sentence):
        if tag != "O" and tag.partition("-")[0] not in ("B", "I"):
            raise UserError(f"tag {tag!r}: expected O, or B- or I- and a type")
    # seqeval rejects data without a sentence; one without a word changes no count.
    return [*map(list, sentences), []]
