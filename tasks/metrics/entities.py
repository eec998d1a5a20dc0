"""F1 of entities, type and both borders being right, from tags "O", "B-TYPE" and "I-TYPE".

Two readings of tags that are no IOB2, both seqeval's; on tags that are, they agree:
default   as in CoNLL's script: an I- that continues nothing begins an entity
strict    it belongs to none
"""

import collections

from bert_tf.errors import UserError
from tasks.metrics.labels import ratio


def entities_of(tags, strict=False):
    """[(type, start, end)] of one sentence's tags, in order; tags[start:end] are the entity's.

    A bare "B" or "I" is of the type "_". Raises UserError at any other tag.
    """
    entities, open_type = [], None
    for index, tag in enumerate(tags):
        prefix, kind = _parse(tag)
        if prefix == "I" and kind == open_type:
            entities[-1] = (kind, entities[-1][1], index + 1)
        elif prefix == "B" or (prefix == "I" and not strict):
            entities.append((kind, index, index + 1))
            open_type = kind
        else:
            open_type = None
    return entities


def entity_scores(gold_sentences, predicted_sentences, strict=False):
    """{"precision", "recall", "f1", "types": {type: {"precision", "recall", "f1", "support"}}}.

    Both are lists of lists of tags, as many and as long. The first three figures count all entities
    alike (micro). 0 where undefined: no entity predicted, none there. Types are those of either.
    """
    gold, predicted, hits = collections.Counter(), collections.Counter(), collections.Counter()
    for gold_tags, predicted_tags in zip(gold_sentences, predicted_sentences, strict=True):
        if len(gold_tags) != len(predicted_tags):
            raise ValueError(f"{len(predicted_tags)} tags of a sentence of {len(gold_tags)}")
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
        raise UserError(f"tag {tag!r}, wanted O, or B- or I- and a type")
    return prefix, kind or "_"


def _metrics(hits, gold, predicted):
    return {
        "precision": float(ratio(hits, predicted)),
        "recall": float(ratio(hits, gold)),
        "f1": float(ratio(2 * hits, gold + predicted)),
    }
