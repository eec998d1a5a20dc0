"""Vectors of texts from the layers of a pretrained encoder (Devlin et al. 2019, 5.3, table 7).

Legend: B texts, H hidden size, D size of a vector (H, or 4 H of four layers side by side).
"""

import json

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.files import atomic_bytes_writer, atomic_writer
from bert_tf.model.encoder import Encoder
from bert_tf.text.excerpts import tokenize_ends
from bert_tf.text.packing import pack, to_flat, token_budget
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import use_precision
from tasks.pooling import first_token, mean_of_tokens
from tasks.prediction import in_batches
from tasks.readers.records import BadRow, raise_bad_rows
from tasks.readers.tables import read_rows

# How many of the last layers each takes, and what becomes of them. The embeddings are no layer.
LAYERS = {
    "last": (1, lambda outputs: outputs[0]),
    "second_to_last": (2, lambda outputs: outputs[0]),
    "sum_last_4": (4, tf.add_n),
    "concat_last_4": (4, lambda outputs: tf.concat(outputs, axis=-1)),
}
POOLING = {"cls": first_token, "mean": mean_of_tokens}


class FeatureExtractor:
    """A PretrainedWeights' encoder: `vectors` takes [B] strings, of pairs twice, -> float32 [B, D].

    `layers` is one of LAYERS; `pooling` "cls", the vector of [CLS], or "mean", that of all tokens,
    [CLS] and [SEP] among them. What is longer is cut to `max_seq_length` tokens, those included.
    Raises UserError if the encoder has too few layers, positions or segments.
    """

    def __init__(self, pretrained, layers, pooling, max_seq_length, num_texts=1):
        config, self.vocabulary = pretrained.config, pretrained.vocabulary
        self.num_layers, self.combine = LAYERS[layers]
        self.pool, self.max_seq_length = POOLING[pooling], max_seq_length
        for flag, expected, there, what in (
            (f"--layers={layers}", self.num_layers, config.num_hidden_layers, "layers"),
            ("--max_seq_length", max_seq_length, config.max_position_embeddings, "positions"),
            ("--text_b_column", num_texts, config.type_vocab_size, "segments"),
        ):
            if expected > there:
                raise UserError(f"{flag}: wants {expected} {what}, {pretrained.origin} has {there}")
        self.tokenizer = Tokenizer(self.vocabulary, config.do_lower_case, config.strip_accents)
        self.encoder = Encoder(config, dtype=use_precision("float32"))
        self.encoder.build()
        pretrained.assign_to(self.encoder)
        self.vector_size = config.hidden_size * (4 if layers == "concat_last_4" else 1)
        specs = [tf.TensorSpec([None], tf.string)] * num_texts
        self.vectors = tf.function(self._vectors, input_signature=specs, autograph=False)

    def _vectors(self, *texts):
        room = token_budget(len(texts), self.max_seq_length)
        segments = [tokenize_ends(self.tokenizer.tokenize, text, room) for text in texts]
        inputs = to_flat(pack(segments, self.vocabulary, self.max_seq_length), self.vocabulary)
        outputs = self.encoder(inputs, output_hidden_states=True)["hidden_states"][
            -self.num_layers :
        ]
        return self.pool(self.combine(outputs), inputs)

    def of_rows(self, rows, columns):
        """Row objects -> array float32 [rows, D]."""
        if not rows:
            return np.empty((0, self.vector_size), np.float32)
        texts = ([row.values[column] for row in rows] for column in columns)
        return self.vectors(*(tf.constant(column, tf.string) for column in texts)).numpy()


def extract(extractor, input_path, columns, output_path, unescape_html, batch_size, log):
    """Writes a vector for each row of `input_path`, in order; returns (rows, bad ones).

    To .jsonl {"vector": [...]} a line, or {"error": ...} in a bad row's place; to .npy float32
    [rows, D], where a bad row is a UserError before anything is computed. Of the rows only some
    batches are in memory. The file appears once it is whole.
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
    count = sum(1 for _ in raise_bad_rows(rows()))  # The file's head tells how many there are.
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
            log(f"{done} of {count} rows")
        if done != count:
            raise UserError(f"{output_path}: not written, since the rows have changed meanwhile")
    return count, 0
