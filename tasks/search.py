"""Search texts by meaning: print the rows whose vectors are most similar to a query's.

    python -m tasks.extract --model=DIR --input=rows.csv --output=vectors.npy
    python -m tasks.search --model=DIR --input=rows.csv --vectors=vectors.npy --query="a text"

Each line of stdout is a JSON object, the most similar row first: {"similarity": ..., "row": ...,
"text": ...}. The similarity is the cosine; rows count from 0.
"""

import dataclasses

from bert_tf.errors import UserError
from bert_tf.storage import paths, strict_json
from bert_tf.system import command
from bert_tf.weights import sources
from tasks.base import input_checks

MIN_COSINE = 0.999  # Of a row to its vector; other batches change the last digits.


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """Flags of the command. Those that tasks.extract has too must have the same values."""

    model: str = command.flag("model that the vectors come from")
    input: str = command.flag("rows that the vectors come from: .csv, .tsv or .jsonl file")
    vectors: str = command.flag(".npy file written by tasks.extract")
    query: str = command.flag("text to search for")
    top_k: int = command.flag("rows to print", 10, bounds={">=": 1})
    text_column: str = command.flag("column of the text", "text")
    unescape_html: bool = command.flag(
        "conversion of HTML character references, such as &amp;, to characters", False
    )
    layers: str | None = command.flag(
        "encoder layers that the vectors are taken from; default: those of an embedder, else last",
        None,
        choices=("last", "second_to_last", "sum_last_4", "concat_last_4"),
    )
    pooling: str | None = command.flag(
        "vector of a text; default: as in an embedder, else mean",
        None,
        choices=("cls", "mean", "max", "mean_sqrt_len"),
    )
    max_seq_length: int | None = command.flag(
        "maximum length of a text in tokens, including [CLS] and [SEP]; default: that of an "
        "embedder, else 128",
        None,
        bounds={">=": 4},
    )
    do_lower_case: bool | None = command.flag(
        "lowercasing of the text; by default as configured in the model", None
    )
    prompt: str | None = command.flag(
        "name of the embedder's prompt before each row; default: its default prompt", None
    )
    query_prompt: str | None = command.flag(
        "name of the embedder's prompt before the query; default: that before each row", None
    )

    def __post_init__(self) -> None:
        command.check_bounds(self)
        paths.check_local_file("input", self.input)
        paths.check_local_file("vectors", self.vectors)

    def check(self) -> None:
        """Check rows, vectors and model without TensorFlow; raises UserError."""
        from tasks.prediction.similarity import open_vectors

        rows = {"kind": "pretrained", "text_columns": [self.text_column]}
        input_checks.check_rows(rows, self.input, labelled=False)
        open_vectors(self.vectors)
        sources.check(self.model, as_embedder=True)


def main(settings: SearchSettings) -> None:
    """Print the most similar rows."""
    from tasks.data.readers.rows import raise_bad_rows, read_rows
    from tasks.prediction.feature_extraction import create_embedder
    from tasks.prediction.similarity import cosines, nearest, open_vectors

    column = settings.text_column
    rows = raise_bad_rows(read_rows(settings.input, (column,), settings.unescape_html))
    texts, vectors = [row.texts[column] for row in rows], open_vectors(settings.vectors)
    if len(texts) != len(vectors):
        raise UserError(
            f"{settings.vectors}: {len(vectors):,} vectors, but {settings.input} has "
            f"{len(texts):,} rows; run tasks.extract on it again"
        )
    embedder = create_embedder(
        sources.read_pretrained(settings.model, settings.do_lower_case),
        settings.layers,
        settings.pooling,
        settings.max_seq_length,
        prompt=settings.prompt,
    )
    query, first = embedder.predict([settings.query, texts[0]])
    if settings.query_prompt is not None:
        (query,) = embedder.predict([settings.query], prompt=settings.query_prompt)
    strict_json.check_finite(query.tolist(), settings.model)
    # Vectors of another model or pooling have no meaning beside the query's.
    if len(query) != vectors.shape[1] or cosines(vectors[:1], first)[0] < MIN_COSINE:
        raise UserError(
            f"{settings.vectors}: not the vectors of {settings.input} by {settings.model} with "
            "these flags; pass the flags of the tasks.extract command, or run it again"
        )
    for row, similarity in nearest(vectors, query, settings.top_k):
        line = {"similarity": round(similarity, 4), "row": row, "text": texts[row]}
        print(strict_json.dumps_result(line, f"{settings.vectors}: row {row}"))


if __name__ == "__main__":
    command.run_main(main, SearchSettings, __doc__)
