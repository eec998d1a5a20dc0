"""Readers of retrieval datasets: relevance judgements of TREC, and the directories of BEIR.

A directory of BEIR (Thakur et al. 2021) holds

    corpus.jsonl     {"_id": ..., "title": ..., "text": ...} per document; the title may be missing
    queries.jsonl    {"_id": ..., "text": ...} per query
    qrels/test.tsv   the columns query-id, corpus-id and score

The files may be compressed (corpus.jsonl.gz). Judgements may also be a file of TREC, with the
columns query, iteration, document and relevance and without a header.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    DataFile,
    RowError,
    Source,
    check_text,
    data_file,
    json_rows,
    not_empty,
    quoted,
    read_lines,
)

HEADER = ["query-id", "corpus-id", "score"]
Relevance = dict[str, dict[str, int]]  # By document by query.


@dataclasses.dataclass(frozen=True)
class RetrievalDataset:
    """The files of a retrieval dataset.

    Attributes:
        corpus: File of the documents.
        queries: File of the queries.
        qrels: File of the relevance judgements.
    """

    corpus: DataFile
    queries: DataFile
    qrels: DataFile

    @classmethod
    def open(cls, directory: str | os.PathLike, qrels: str | None = None) -> RetrievalDataset:
        """Find the files of a directory of BEIR.

        Args:
            directory: The directory.
            qrels: File of the judgements; by default qrels/test.tsv in the directory.

        Raises:
            UserError: If a file is missing.
        """
        root = pathlib.Path(directory)
        return cls(
            _compressed_or_not(root / "corpus.jsonl"),
            _compressed_or_not(root / "queries.jsonl"),
            data_file(qrels) if qrels else _compressed_or_not(root / "qrels" / "test.tsv"),
        )

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (id, text) per document; the title, if there is one, precedes the text."""
        return read_jsonl(self.corpus)

    def check_documents(self, relevance: Relevance) -> str | None:
        """Read all documents; return a warning if some that are judged are missing, or `None`.

        Raises:
            UserError: At a bad row, or if none of the relevant documents is there.
        """
        relevant = {name for of in relevance.values() for name, value in of.items() if value > 0}
        there = {name for name, _ in self.documents()}
        if relevant and relevant.isdisjoint(there):
            raise UserError(
                f"{self.corpus}: expected documents of {self.qrels}; none of the {len(relevant):,} "
                f"relevant ones is there, such as {min(relevant)!r:.80}"
            )
        judged = {name for of in relevance.values() for name in of}
        if not (missing := judged - there):
            return None
        return (
            f"{self.corpus}: {len(missing):,} of {len(judged):,} documents of {self.qrels} are "
            f"missing, {len(missing & relevant):,} of them relevant, such as {min(missing)!r:.80}; "
            "no search finds them, and the metrics are those of such a search"
        )

    def judged_queries(self, relevance: Relevance) -> dict[str, str]:
        """Return the text by id of the queries that have judgements.

        Raises:
            UserError: At a bad row, or if a query is missing.
        """
        texts = {name: text for name, text in read_jsonl(self.queries) if name in relevance}
        if missing := [name for name in relevance if name not in texts]:
            raise UserError(
                f"{self.queries}: expected all queries of {self.qrels}; {len(missing):,} of "
                f"{len(relevance):,} are missing, the first is {missing[0]!r:.80}"
            )
        return texts


def _compressed_or_not(path):
    compressed = path.with_name(f"{path.name}.gz")
    return data_file(compressed if compressed.is_file() and not path.is_file() else path)


def read_qrels(source: Source) -> Relevance:
    """Read relevance judgements of TREC or BEIR.

    Args:
        source: Lines of query, iteration, document and relevance, separated by white space; or of
            query, document and relevance, separated by tabs, with or without a header.

    Returns:
        Relevance by document by query, in the order of the file.

    Raises:
        UserError: At a bad row, at a pair that occurs twice, or if there are no rows.
    """
    file, relevance = data_file(source), Relevance()
    for number, line in read_lines(file):
        location = f"{file}:{number}"
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != 3:
            fields = line.split()
        if not fields or (number == 1 and fields == HEADER):
            continue
        if len(fields) not in (3, 4):
            raise UserError(
                f"{location}: expected query, iteration, document and relevance, or query, "
                f"document and relevance separated by tabs; received {len(fields)} fields"
            )
        query, document, value = fields[0], fields[-2], fields[-1].strip()
        if not value.removeprefix("-").isdecimal() or len(value) > 9:
            raise UserError(f"{location}: relevance {value!r:.40}: expected an integer")
        judged = relevance.setdefault(query, {})
        if document in judged:
            raise UserError(
                f"{location}: query {query!r:.80} and document {document!r:.80} occur twice"
            )
        judged[document] = int(value)
    if not relevance:
        raise UserError(f"{file}: expected at least one row, received none")
    return relevance


def read_jsonl(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (id, text) per row of a corpus.jsonl or queries.jsonl of BEIR.

    Args:
        source: The file.

    Raises:
        UserError: At a bad row, at an id that occurs twice, or if there are no rows.
    """
    file, names = data_file(source, (".jsonl",)), set()
    for number, row in not_empty(json_rows(file, parse_int=str), file):
        location = f"{file}:{number}"
        try:
            name, text = _text(row)
        except RowError as error:
            raise UserError(f"{location}: {error}") from None
        if name in names:
            raise UserError(f"{location}: _id {name!r:.80} occurs twice")
        names.add(name)
        yield name, text


def _text(row: Any) -> tuple[str, str]:
    """Return (id, text) of a row."""
    if isinstance(row, RowError):
        raise row
    for name in ("_id", "text"):
        if name not in row:
            raise RowError(f"expected '_id' and 'text', received {quoted(row)}")
    values = {name: row.get(name) or "" for name in ("_id", "title", "text")}
    for name, value in values.items():
        check_text(value, repr(name))
    if not values["_id"]:
        raise RowError("'_id': expected an id, received an empty string")
    # As of BEIR and sentence-transformers.
    return values["_id"], f"{values['title']} {values['text']}".strip()
