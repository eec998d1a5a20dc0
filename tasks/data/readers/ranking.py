"""Reader of rankings: queries with texts and the relevance of each.

A row is a pair, a query with all its texts, or a query with its hard negatives:

    {"query": ..., "text": ..., "relevance": 1}
    {"query": ..., "texts": [...], "relevances": [1, 0, ...]}
    {"query": ..., "positive": ..., "negatives": [...]}

The last form is that of bert-tf mine_negatives; the query may be named "anchor". Pairs may be .csv,
.tsv, .jsonl or .parquet, the others .jsonl or .parquet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tasks.data.readers.rows import (
    MAX_CHOICES,
    SUFFIXES,
    BadRow,
    Example,
    RowError,
    Source,
    check_texts,
    data_file,
    good_or_bad,
    named_rows,
    not_empty,
    quoted,
)


def read_rankings(
    source: Source, labelled: bool = True, *, for_training: bool = False, **others: Any
) -> Iterator[Example | BadRow]:
    """Yield the queries of a file with their texts.

    The rows with one text of a query, wherever they are in the file, form one example, in the
    position of the first of them; this and all rows after it are yielded at the end of the file.

    Args:
        source: The file.
        labelled: Whether to read the relevance.
        for_training: Whether training reads them, which uses a part of the texts of a query.
        **others: Other values of a task.json, which are ignored.

    Yields:
        An `Example` with "query" and "texts", whose label has one entry per text as it is written;
        or a `BadRow` for a row that cannot be used.

    Raises:
        UserError: If the file cannot be read, or its header lacks a column.
    """
    file = data_file(source, SUFFIXES)
    limit = math.inf if for_training else MAX_CHOICES
    columns = ("query", "text", *(("relevance",) if labelled else ()))
    # Examples of pairs are filled while the file is read.
    items: list[Example | BadRow] = []
    of_query: dict[str, Example] = {}
    for number, values in not_empty(named_rows(file, columns), file):
        row = good_or_bad(f"{file}:{number}", values, _example, labelled)
        is_pair = not isinstance(values, RowError) and "text" in values
        if isinstance(row, Example) and is_pair:
            first = of_query.setdefault(str(row.texts["query"]), row)
            if first is not row:
                first.texts["texts"] += row.texts["texts"]  # type: ignore[operator]  # Lists.
                if labelled:
                    first.label.extend(row.label)
                continue
        if of_query:
            items.append(row)
        else:
            yield _within(limit, row)
    yield from (_within(limit, row) for row in items)


def _within(limit, row):
    """Return a row, or a `BadRow` if a query has more texts than the limit."""
    if isinstance(row, BadRow) or (count := len(row.texts["texts"])) <= limit:
        return row
    return BadRow(row.location, f"expected at most {limit:,} texts per query, received {count:,}")


def _example(values, labelled, location):
    """Return the example of one row, with one text if it is a pair."""
    query = values.get("query", values.get("anchor"))
    if "text" in values:
        texts, relevances = [values["text"]], [values.get("relevance")]
    elif "texts" in values:
        texts, relevances = values["texts"], values.get("relevances")
    elif "positive" in values and "negatives" in values:
        if not isinstance(values["negatives"], list):
            raise RowError(f"'negatives': expected a list, received {values['negatives']!r:.80}")
        texts = [values["positive"], *values["negatives"]]
        relevances = ["1", *["0"] * len(values["negatives"])]
    else:
        raise RowError(
            "expected 'query' with 'text' and 'relevance', with 'texts' and 'relevances', or with "
            f"'positive' and 'negatives'; received {quoted(values)}"
        )
    if not isinstance(texts, list) or not texts:
        raise RowError(f"'texts': expected a list of texts, received {texts!r:.80}")
    named = {f"text {number}": text for number, text in enumerate(texts, start=1)}
    check_texts({"'query'": query, **named})
    if not labelled:
        return Example({"query": query, "texts": list(texts)}, None, location)
    if not isinstance(relevances, list) or len(relevances) != len(texts):
        raise RowError(
            f"'relevances': expected a list of {len(texts)} numbers, one per text, received "
            f"{relevances!r:.80}"
        )
    for relevance in relevances:
        if not _is_number(relevance):
            raise RowError(f"relevance: expected a number, received {relevance!r:.80}")
    return Example({"query": query, "texts": list(texts)}, list(map(str, relevances)), location)


def _is_number(value):
    """Return whether a value is a finite number, or one as it is written in a file."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
