"""Entity-level F1 of tags "O", "B-TYPE" and "I-TYPE"; type and both borders have to match.

There are two readings of tags that are not IOB2, both of seqeval; on IOB2 they agree:

default: an I- that continues no entity begins one, as in CoNLL's conlleval.
strict: it belongs to no entity.
"""

import collections
from collections.abc import Sequence
from typing import Any

from bert_tf.errors import UserError
from tasks.metrics.labels import ratio


def entities_of(tags: Sequence[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """Return the entities of one sentence in order, as (type, start, end) of tags[start:end].

    A bare "B" or "I" has the type "_".

    Raises:
        UserError: At any other tag.
    """
    entities, open_type = [], None
    for index, tag in enumerate(tags):
        prefix, kind = _parse(tag)
        # An I- of the open entity's type extends it; any other tag closes it.
        if prefix == "I" and kind == open_type:
            entities[-1] = (kind, entities[-1][1], index + 1)
        elif prefix == "B" or (prefix == "I" and not strict):
            entities.append((kind, index, index + 1))
            open_type = kind
        else:
            open_type = None
    return entities


def entity_scores(
    gold_sentences: Sequence[Sequence[str]],
    predicted_sentences: Sequence[Sequence[str]],
    strict: bool = False,
) -> dict[str, Any]:
    """Return micro-averaged precision, recall and F1 of entities, and those per type.

    Args:
        gold_sentences: Tags per sentence.
        predicted_sentences: Tags per sentence, as many and as long.
        strict: Reading of tags that are not IOB2.

    Returns:
        {"precision", "recall", "f1", "types": {type: {"precision", "recall", "f1", "support"}}},
        with the types that occur in either. Undefined ratios are 0.

    Raises:
        ValueError: If numbers of sentences or tags differ.
        UserError: At an invalid tag.
    """
    gold, predicted, hits = collections.Counter(), collections.Counter(), collections.Counter()
    for gold_tags, predicted_tags in zip(gold_sentences, predicted_sentences, strict=True):
        if len(gold_tags) != len(predicted_tags):
            raise ValueError(
                f"expected {len(gold_tags)} tags of a sentence, received {len(predicted_tags)}"
            )
        gold_entities = set(entities_of(gold_tags, strict))
        predicted_entities = set(entities_of(predicted_tags, strict))
        for counter, entities in (
            (gold, gold_entities),
            (predicted, predicted_entities),
            (hits, gold_entities & predicted_entities),
        ):
            counter.update(kind for kind, _, _ in entities)
    return {
        **_metrics(hits.total(), gold.total(), predicted.total()),
        "types": {
            kind: {**_metrics(hits[kind], gold[kind], predicted[kind]), "support": gold[kind]}
            for kind in sorted(gold | predicted)
        },
    }


def _parse(tag):
    if tag == "O":
        return "O", None
    prefix, _, kind = tag.partition("-")
    if prefix not in ("B", "I"):
        raise UserError(f"tag {tag!r}: expected O, or B- or I- and a type")
    return prefix, kind or "_"


def _metrics(hits, gold, predicted):
    return {
        "precision": float(ratio(hits, predicted)),
        "recall": float(ratio(hits, gold)),
        "f1": float(ratio(2 * hits, gold + predicted)),
    }
