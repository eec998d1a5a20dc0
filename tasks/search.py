"""Search texts by meaning: print the rows whose vectors are most similar to a query's.

    python -m tasks.extract --model=DIR --input=rows.csv --output=vectors.npy
    python -m tasks.search --model=DIR --input=rows.csv --vectors=vectors.npy --query="a text"

Each line of stdout is a JSON object, the most similar row first: {"similarity": ..., "row": ...,
"text": ...}. The similarity is the cosine; rows count from 0.
"""

import dataclasses

import numpy as np

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
    layers: str = command.flag(
        "encoder layers that the vectors are taken from",
        "last",
        choices=("last", "second_to_last", "sum_last_4", "concat_last_4"),
    )
    pooling: str = command.flag(
        "vector of a text: that of [CLS], or the mean over all tokens",
        "mean",
        choices=("cls", "mean"),
    )
    max_seq_length: int = command.flag(
        "maximum length of a text in tokens, including [CLS] and [SEP]", 128, bounds={">=": 4}
    )
    do_lower_case: bool | None = command.flag(
        "lowercasing of the text; by default as configured in the model", None
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
        sources.check(self.model)


def main(settings: SearchSettings) -> None:
    """Print the most similar rows."""
    from tasks.data.readers.rows import raise_bad_rows, read_rows
    from tasks.metrics.nearest_vectors import nearest
    from tasks.prediction.feature_extraction import create_embedder
    from tasks.prediction.similarity import open_vectors

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
    )
    query_1D, first_1D = np.split(embedder.predict([settings.query, texts[0]]), 2)
    strict_json.check_finite(query_1D.tolist(), settings.model)
    # Vectors of another model or pooling have no meaning beside the query's.
    is_other = query_1D.shape[1] != vectors.shape[1]
    if is_other or nearest(vectors[:1], first_1D, 1)[1][0, 0] < MIN_COSINE:
        raise UserError(
            f"{settings.vectors}: not the vectors of {settings.input} by {settings.model} with "
            "these flags; pass the flags of the tasks.extract command, or run it again"
        )
    rows_1K, similarities_1K = nearest(vectors, query_1D, settings.top_k)
    for row, similarity in zip(rows_1K[0].tolist(), similarities_1K[0].tolist(), strict=True):
        line = {"similarity": round(similarity, 4), "row": row, "text": texts[row]}
        print(strict_json.dumps_result(line, f"{settings.vectors}: row {row}"))


if __name__ == "__main__":
    command.run_main(main, SearchSettings, __doc__)
