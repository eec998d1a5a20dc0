"""Feature extraction from the layers of a pretrained encoder (Devlin et al. 2019, 5.3, table 7).

Shape suffixes: B texts, H hidden size, D size of a vector (H, or 4 H for four concatenated layers).
"""

import json
import os
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.files import atomic_bytes_writer, atomic_writer
from bert_tf.layout import to_flat
from bert_tf.model.encoder import Encoder
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, token_budget
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import use_precision
from bert_tf.weights.sources import PretrainedWeights
from tasks.pooling import first_token, mean_of_tokens
from tasks.prediction import in_batches
from tasks.readers.rows import BadRow, raise_bad_rows
from tasks.readers.tables import Row, read_rows

# By value of --layers: number of last layers, and their combination. Embeddings are not a layer.
LAYERS = {
    "last": (1, lambda outputs: outputs[0]),
    "second_to_last": (2, lambda outputs: outputs[0]),
    "sum_last_4": (4, tf.add_n),
    "concat_last_4": (4, lambda outputs: tf.concat(outputs, axis=-1)),
}
POOLING = {"cls": first_token, "mean": mean_of_tokens}


class FeatureExtractor:
    """Pretrained encoder that maps texts to vectors.

    Attributes:
        vectors: tf.function from string `(B,)`, for pairs twice, to float32 `(B, D)`.
        vector_size: D.
    """

    def __init__(
        self,
        pretrained: PretrainedWeights,
        layers: str,
        pooling: str,
        max_seq_length: int,
        num_texts: int = 1,
    ):
        """Build the encoder and assign its weights.

        Args:
            pretrained: Configuration, vocabulary and weights.
            layers: A key of LAYERS.
            pooling: "cls" for the vector of [CLS], or "mean" over all tokens, including [CLS] and
                [SEP].
            max_seq_length: Maximum length in tokens, including [CLS] and [SEP]; longer texts are
                truncated.
            num_texts: 2 for pairs.

        Raises:
            UserError: The encoder has too few layers, positions or segments.
        """
        config, self.vocabulary = pretrained.config, pretrained.vocabulary
        self.num_layers, self.combine = LAYERS[layers]
        self.pool, self.max_seq_length = POOLING[pooling], max_seq_length
        for flag, expected, available, what in (
            (f"--layers={layers}", self.num_layers, config.num_hidden_layers, "layers"),
            ("--max_seq_length", max_seq_length, config.max_position_embeddings, "positions"),
            ("--text_b_column", num_texts, config.type_vocab_size, "segments"),
        ):
            if expected > available:
                raise UserError(
                    f"{flag}: requires {expected} {what}, but {pretrained.origin} has {available}"
                )
        self.tokenizer = Tokenizer.from_config(config, self.vocabulary)
        self.encoder = Encoder(config, dtype=use_precision("float32"))
        self.encoder.build()
        pretrained.assign_to(self.encoder)
        self.vector_size = config.hidden_size * (4 if layers == "concat_last_4" else 1)
        specs = [tf.TensorSpec([None], tf.string)] * num_texts
        self.vectors = tf.function(self._vectors, input_signature=specs, autograph=False)

    def _vectors(self, *texts):
        budget = token_budget(len(texts), self.max_seq_length)
        segments = [tokenize_ends(self.tokenizer.tokenize, text, budget) for text in texts]
        inputs = to_flat(pack(segments, self.vocabulary, self.max_seq_length), self.vocabulary)
        outputs = self.encoder(inputs, output_hidden_states=True)["hidden_states"][
            -self.num_layers :
        ]
        return self.pool(self.combine(outputs), inputs)

    def of_rows(self, rows: Sequence[Row], columns: Sequence[str]) -> np.ndarray:
        """Return the vectors of rows, float32 `(len(rows), D)`."""
        if not rows:
            return np.empty((0, self.vector_size), np.float32)
        texts = ([row.values[column] for row in rows] for column in columns)
        return self.vectors(*(tf.constant(column, tf.string) for column in texts)).numpy()


def extract(
    extractor: FeatureExtractor,
    input_path: str,
    columns: Sequence[str],
    output_path: str | os.PathLike,
    unescape_html: bool,
    batch_size: int,
    log: Callable[[str], None],
) -> tuple[int, int]:
    """Write one vector per row, in order.

    Rows are streamed; the output file is written atomically.

    Args:
        extractor: The encoder.
        input_path: .csv, .tsv or .jsonl file.
        columns: Columns of the texts, one or two.
        output_path: A .npy file gets an array, float32 (rows, D); a .jsonl file gets one
            {"vector": [...]} per line, or {"error": ...} for a bad row.
        unescape_html: Whether HTML character references are converted to characters.
        batch_size: Rows per batch.
        log: Callable that takes log lines.

    Returns:
        Number of rows, and number of bad rows among them.

    Raises:
        UserError: A row is bad and the output is .npy; raised before any computation.
    """

    def rows():
        return read_rows(input_path, columns, unescape_html)

    write = _write_array if str(output_path).endswith(".npy") else _write_lines
    return write(extractor, rows, columns, output_path, batch_size, log)


def _write_lines(extractor, rows, columns, output_path, batch_size, log):
    count = bad = 0
    with atomic_writer(output_path) as lines:
        for batch in in_batches(rows(), batch_size):
            good = [row for row in batch if not isinstance(row, BadRow)]
            vectors = iter(extractor.of_rows(good, columns).tolist())
            for row in batch:
                is_bad = isinstance(row, BadRow)
                bad += is_bad
                line = {"error": str(row)} if is_bad else {"vector": next(vectors)}
                lines.write(json.dumps(line) + "\n")
            count += len(batch)
            log(f"{count} rows")
    return count, bad


def _write_array(extractor, rows, columns, output_path, batch_size, log):
    count = sum(1 for _ in raise_bad_rows(rows()))  # The .npy header contains the shape.
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": (count, extractor.vector_size),
    }
    done = 0
    with atomic_bytes_writer(output_path) as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for batch in in_batches(raise_bad_rows(rows()), batch_size):
            stream.write(extractor.of_rows(batch, columns).tobytes())
            done += len(batch)
            log(f"{done}/{count} rows")
        if done != count:
            raise UserError(
                f"{output_path}: not written: the input changed while it was read; rerun"
            )
    return count, 0
