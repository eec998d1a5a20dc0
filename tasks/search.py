"""Search texts by meaning: print the rows whose vectors are most similar to a query's.

    bert-tf extract --model=DIR --input=rows.csv --output=vectors.npy
    bert-tf search --model=DIR --input=rows.csv --vectors=vectors.npy --query="a text"

Each line of stdout is a JSON object, the most similar row first: {"similarity": ..., "row": ...,
"text": ...}. The similarity is the cosine; rows count from 0. --rerank orders the --rerank_k most
similar rows by the score of a cross-encoder, which is then in the line.

The search is exact and reads all vectors. For millions of them, build an approximate index, which
is written next to the vectors, and use it:

    bert-tf search --vectors=vectors.npy --build_index
    bert-tf search --model=DIR --input=rows.csv --vectors=vectors.npy --query=a --use_index
"""

import dataclasses

from bert_tf.errors import UserError
from bert_tf.storage import paths, strict_json
from bert_tf.storage.ownership import sole_output
from bert_tf.system import command
from bert_tf.weights import sources
from tasks.base.task_types import check_unlabelled
from tasks.prediction.outputs import EmbedderSettings, input_files
from tasks.prediction.retrieval import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    check_ranker,
    open_ranker,
    prompt_of,
    rerank,
)
from tasks.prediction.vector_files import ApproximateIndex, Vectors, build_index, index_path

SAMPLE = 32  # Rows that are compared with their vectors.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings(EmbedderSettings):
    """Flags of the command. Those that bert-tf extract has too must have the same values."""

    vectors: str = command.flag(
        "vectors of bert-tf extract: .npy file, .parquet file with a column vector, a glob of such "
        "files, or a directory of shards"
    )
    model: str | None = command.flag("model that the vectors come from", None)
    input: str | None = command.flag(
        "rows that the vectors come from: .csv, .tsv or .jsonl file, or a glob", None
    )
    query: str | None = command.flag("text to search for", None)
    top_k: int = command.flag("rows to print", 10, bounds={">=": 1})
    rerank: str | None = command.flag(
        "run of task ranking, or a cross-encoder, that orders the most similar rows", None
    )
    rerank_k: int = command.flag("rows that --rerank orders", 50, bounds={">=": 1, "<=": 4096})
    build_index: bool = command.flag(
        "writing of an approximate index next to --vectors, instead of a search", False
    )
    use_index: bool = command.flag("search in the index instead of all vectors", False)
    text_column: str = command.flag("column of the text", "text")
    query_prompt: str | None = command.flag(
        "name of the embedder's prompt before the query; default: --prompt, unless that is one of "
        "documents, else its prompt query",
        None,
    )

    def __post_init__(self) -> None:
        command.check_bounds(self)
        command.check_text("query", self.query)
        paths.check_local("vectors", self.vectors)
        given = {name: getattr(self, name) for name in ("model", "input", "query")}
        for name, value in given.items():
            if self.build_index and value is not None:
                raise UserError(
                    f"--{name}: not supported with --build_index, which searches nothing"
                )
            if not self.build_index and value is None:
                raise UserError(f"--{name}: expected a value, or --build_index")
        if self.input is not None:
            paths.check_local("input", self.input)
            self.input_files()

    def input_files(self) -> list[str]:
        """Return the files of the rows in order, without those in the directory of the vectors."""
        assert self.input is not None
        return input_files(self.input, self.vectors)

    def check(self) -> None:
        """Check rows, vectors and models without TensorFlow; raises UserError."""
        vectors = Vectors(self.vectors)
        if self.build_index:
            return
        if self.use_index:
            ApproximateIndex(index_path(self.vectors), vectors)
        rows = {"kind": "pretrained", "text_columns": [self.text_column]}
        assert self.model is not None
        for path in self.input_files():
            check_unlabelled(rows, path)
        sources.check(self.model, as_embedder=True)
        if self.rerank:
            check_ranker(self.rerank)


def main(settings: SearchSettings) -> None:
    """Print the most similar rows, or write the index."""
    vectors = Vectors(settings.vectors)
    if settings.build_index:
        _build_index(settings, vectors)
        return
    assert settings.query is not None and settings.model is not None
    sample = vectors.sample(SAMPLE)
    texts, count = _texts_of(settings, sample)
    if count != len(vectors):
        raise UserError(
            f"{settings.vectors}: {len(vectors):,} vectors, but {settings.input} has "
            f"{count:,} rows; run bert-tf extract on it again"
        )
    pretrained = sources.read_pretrained(settings.model, settings.do_lower_case)
    command.log(pretrained.origin)
    embedder = settings.create_embedder(pretrained)
    _warn_of_prompts(settings, embedder.task)
    query_1D = embedder.predict(
        [settings.query], verbose=0, prompt=_prompt_of_query(settings, embedder)
    )
    strict_json.check_finite(query_1D.tolist(), settings.model)
    # Vectors of another model or pooling have no meaning beside the query's.
    if not vectors.are_at(sample, embedder.predict(texts, verbose=0)):
        raise UserError(
            f"{settings.vectors}: not the vectors of {settings.input} by {settings.model} with "
            "these flags; pass the flags of the bert-tf extract command, or run it again"
        )
    searched = (
        ApproximateIndex(index_path(settings.vectors), vectors) if settings.use_index else vectors
    )
    count = max(settings.rerank_k, settings.top_k) if settings.rerank else settings.top_k
    rows, similarities = (values[0].tolist() for values in searched.nearest(query_1D, count))
    texts, _ = _texts_of(settings, rows)
    lines = [
        {"similarity": round(similarity, 4), "row": row, "text": text}
        for row, similarity, text in zip(rows, similarities, texts, strict=True)
    ]
    if settings.rerank:
        lines = _reranked(settings, lines)
    for line in lines[: settings.top_k]:
        print(strict_json.dumps_result(line, f"{settings.vectors}: row {line['row']}"))


def _prompt_of_query(settings, embedder):
    """Return the name of the prompt before the query, or `None` for the default prompt."""
    # A prompt for documents, which extract needs, is none for queries.
    of_rows = None if settings.prompt in DOCUMENT_PROMPTS else settings.prompt
    return settings.query_prompt or of_rows or prompt_of(embedder, QUERY_PROMPTS)


def _warn_of_prompts(settings, task):
    """Log a warning if the embedder has a prompt before documents, but the rows have none."""
    name = next((name for name in DOCUMENT_PROMPTS if task.prompts.get(name)), None)
    if name is not None and settings.prompt is None and task.default_prompt is None:
        command.log(
            f"warning: {settings.vectors}: its texts have no prompt, but the embedder has the "
            f"prompt {name!r} for documents; pass --prompt={name} to bert-tf extract and to this "
            "command"
        )


def _texts_of(settings, rows):
    """Return the texts of rows, by their numbers, and the number of all rows.

    The input files are read in the order of their names, and other texts are not kept.
    """
    from tasks.data.readers.rows import raise_bad_rows, read_rows

    column, wanted, texts, count = settings.text_column, set(rows), {}, 0
    for path in settings.input_files():
        for row in raise_bad_rows(read_rows(path, (column,))):
            if count in wanted:
                texts[count] = row.texts[column]
            count += 1
    return [texts[row] for row in rows if row in texts], count


def _reranked(settings, lines):
    """Return the first lines with their scores, in their order; a blank text comes last."""
    first, rest = lines[: settings.rerank_k], lines[settings.rerank_k :]
    blank = [line for line in first if not line["text"].strip()]
    first = [line for line in first if line["text"].strip()]
    ranked = rerank(open_ranker(settings.rerank), settings.query, [line["text"] for line in first])
    return [
        *({"score": round(score, 4), **first[index]} for index, score in ranked),
        *blank,
        *rest,
    ]


def _build_index(settings, vectors):
    path = index_path(settings.vectors)
    with sole_output(path, overwrite=True):  # Before an index is built that cannot be written.
        found = build_index(vectors, path, command.log)
    line = {"index": path, "vectors": len(vectors), "recall@10": round(found, 4)}
    print(strict_json.dumps_result(line, path))


if __name__ == "__main__":
    command.run_main(main, SearchSettings, __doc__)
