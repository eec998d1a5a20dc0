"""Feature extraction: files of the vectors of a `TextEmbedder`."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from bert_tf.errors import UserError
from bert_tf.storage.files import atomic_bytes_writer
from bert_tf.train.distribution import use_precision
from bert_tf.weights.sentence_transformers import KIND
from bert_tf.weights.sources import PretrainedWeights
from tasks.base.task_types import default_settings
from tasks.data.readers.rows import Example, raise_bad_rows, read_rows
from tasks.prediction.outputs import (
    outputs_with_progress,
    write_array,
    write_lines,
)
from tasks.types.similarity.embedding_model import LAYERS
from tasks.types.similarity.text_embedder import SimilarityTask, TextEmbedder, options_from


def create_embedder(
    pretrained: PretrainedWeights,
    layers: str | None,
    pooling: str | None,
    max_seq_length: int | None,
    num_texts: int = 1,
    prompt: str | None = None,
) -> TextEmbedder:
    """Create the embedder that the flags of bert-tf extract describe; for pairs, `num_texts` is 2.

    A flag that is `None` has the value of an embedder; of other weights those are layers "last",
    pooling "mean", 128 tokens and no prompt.

    Raises:
        UserError: If the encoder has too few layers, positions or segments, or there is no such
            prompt.
    """
    flags = {
        "layers": layers,
        "pooling": pooling,
        "max_seq_length": max_seq_length,
        "default_prompt": prompt,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    options = {
        "max_seq_length": default_settings(KIND)["max_seq_length"],
        **options_from(pretrained, {**given, "pairs": num_texts == 2}),
    }
    max_seq_length = options["max_seq_length"]
    layers = options.get("layers", "last")
    config = pretrained.config
    for flag, expected, available, what in (
        (f"--layers={layers}", LAYERS[layers][0], config.num_hidden_layers, "layers"),
        ("--max_seq_length", max_seq_length, config.max_position_embeddings, "positions"),
        ("--text_b_column", num_texts, config.type_vocab_size, "segments"),
    ):
        if expected > available:
            raise UserError(
                f"{flag}: requires {expected} {what}, but {pretrained.origin} has {available}"
            )
    task = SimilarityTask.from_options(**options)
    return TextEmbedder.from_weights(pretrained, task, dtype=use_precision("float32"))


def extract(
    embedder: TextEmbedder,
    input_path: str,
    columns: Sequence[str],
    output_path: str | os.PathLike,
    unescape_html: bool,
    batch_size: int,
    log: Callable[[str], None],
    per_token: bool = False,
) -> tuple[int, int]:
    """Write one vector per row or per token, in order.

    Rows are streamed; the output file is written atomically.

    Args:
        embedder: The embedder, from `create_embedder`.
        input_path: .csv, .tsv or .jsonl file.
        columns: Columns of the texts, one or two.
        output_path: A .npy file gets an array, float32 (rows, D); a .jsonl file gets one
            {"vector": [...]} per line, or {"error": ...} for a bad row, and for one whose vector is
            not finite.
        unescape_html: Whether HTML character references are converted to characters.
        batch_size: Rows per batch.
        log: Callable that takes log lines.
        per_token: Whether a line of .jsonl is {"tokens": [...], "vectors": [[...], ...]}.

    Returns:
        Number of rows, and number of bad rows among them.

    Raises:
        UserError: A row is bad and the output is .npy, raised before any computation; or a vector
            for a .npy file is not finite.
    """
    is_array = str(output_path).endswith(".npy")

    def rows():
        found = read_rows(input_path, columns, unescape_html)
        return raise_bad_rows(found) if is_array else found

    def outputs(batch):
        return row_outputs(embedder, batch, columns, per_token)

    count = sum(1 for _ in rows())  # The header of .npy contains it.
    found = outputs_with_progress(rows(), count, outputs, batch_size, log)
    if not is_array:
        return write_lines(output_path, found)
    with atomic_bytes_writer(output_path) as stream:
        if write_array(stream, found, count) != count:
            raise UserError(
                f"{output_path}: not written: the input changed while it was read; rerun"
            )
    return count, 0


def row_outputs(
    embedder: TextEmbedder, rows: Sequence[Example], columns: Sequence[str], per_token: bool
) -> list[dict[str, Any]]:
    """Return the vector of each row, or its tokens and their vectors, as JSON types by name."""
    in_order = [[row.texts[column] for row in rows] for column in columns]
    texts = dict(zip(embedder.task.input_names, in_order, strict=True))
    if not per_token:
        return [{"vector": vector} for vector in embedder.predict(texts).tolist()]
    return [
        {"tokens": tokens, "vectors": vectors_LD.tolist()}
        for tokens, vectors_LD in embedder.token_vectors(texts)
    ]
