"""Metrics by their definitions, in plain loops: the opinion that the libraries are checked with."""


def precision_recall_f1(gold, found):
    """Compare two sets; a ratio with denominator 0 is 0."""
    hits = len(gold & found)
    return (
        hits / len(found) if found else 0.0,
        hits / len(gold) if gold else 0.0,
        2 * hits / (len(gold) + len(found)) if gold or found else 0.0,
    )


def numbers_of(decisions):
    """Return the numbers of the true decisions."""
    return {number for number, decision in enumerate(decisions) if decision}


def roc_auc(is_positive, scores):
    """Return the fraction of pairs of a positive and a negative in order; ties count half."""
    pairs = [
        (high > low) + (high == low) / 2
        for high, first in zip(scores, is_positive, strict=True)
        for low, second in zip(scores, is_positive, strict=True)
        if first and not second
    ]
    return sum(pairs) / len(pairs)


def pr_auc(is_positive, scores):
    """Return the sum over thresholds of precision times the step of recall."""
    gold, area, before = numbers_of(is_positive), 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        found = numbers_of(score >= threshold for score in scores)
        precision, recall, _ = precision_recall_f1(gold, found)
        area, before = area + precision * (recall - before), recall
    return area


def entities_of(tags, strict=False):
    """Return the entities of a sentence in order, as (type, start, end) of tags[start:end]."""
    entities, open_type = [], None
    for index, tag in enumerate(tags):
        prefix, kind = tag[0], tag[2:] or "_"
        if prefix == "I" and kind == open_type:
            entities[-1] = (kind, entities[-1][1], index + 1)
        elif prefix == "B" or (prefix == "I" and not strict):
            entities.append((kind, index, index + 1))
            open_type = kind
        else:
            open_type = None
    return entities


def entities_of_all(sentences, strict=False):
    """Return the entities of all sentences, as {(sentence, type, start, end)}."""
    return {
        (number, *entity)
        for number, tags in enumerate(sentences)
        for entity in entities_of(tags, strict)
    }


def cosine_ranking(vectors, query):
    """Return (index, cosine) pairs, largest first, equal ones by index; 0 for zeros."""
    scored = []
    for index, vector in enumerate(vectors.tolist()):
        product = sum(a * b for a, b in zip(vector, query.tolist(), strict=True))
        sizes = sum(a * a for a in vector) * sum(b * b for b in query.tolist())
        scored.append((index, product / sizes**0.5 if sizes else 0.0))
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))
