"""Chunked execution of a request in one graph, so that memory does not grow with the request.

Rows of a chunk are padded to the longest of them, in attention and in outputs. Therefore a chunk is
limited by its number of rows times the longest row. If one chunk is not enough, rows are sorted by
size first, which saves padding.

Shape suffixes: R rows, r rows of a chunk, B texts, W sequences, L tokens of the longest sequence.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf

from bert_tf.model.bucketing import TOKENS_PER_CHUNK
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.encoder_inputs import Packed, PackedShape, one_sequence, to_flat, to_packed
from bert_tf.text.tokenizer import MAX_BYTES
from bert_tf.text.vocabulary import Vocabulary

# A chunk of up to this many tokens gets no padding. In BERT-base a new number of tokens takes 1 to
# 3 ms more once, for oneDNN's kernels, and two tokens of padding take 0.3 ms in each call.
EXACT_TOKENS = 64
SEQUENCES_PER_BATCH = 64  # Of a program that XLA compiles.
MIN_TOKENS = 8  # Shorter sequences count as this many, for the overhead per row.
BYTES_PER_CHUNK = MAX_BYTES  # Number of texts times the length of the longest, in bytes.
MIN_BYTES = 2**8  # Shorter texts count as this many, for the overhead per row.
# Limit per output of a request: 32 rows, as allowed by batching_params.pbtxt, of 2**20 values.
MAX_VALUES = 2**25

DIFFERENT_ROWS = "inputs: numbers of rows differ; send equally many rows of each input"


def run_in_chunks(
    function: Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]],
    packed: Packed,
    vocabulary: Vocabulary,
    short_tokens: int = 0,
) -> dict[str, tf.Tensor]:
    """Apply a function to all sequences, in chunks of at most TOKENS_PER_CHUNK tokens.

    Args:
        function: Maps the flat inputs of n sequences to outputs `(n, ...)`, or `(n, L, ...)` per
            token, by name.
        packed: W sequences.
        vocabulary: Vocabulary of the ids.
        short_tokens: Up to this many tokens, a single sequence has a branch of its own, in which
            the function receives `one_sequence`.

    Returns:
        Outputs `(W, ...)` by name; outputs per token are padded with MASKED_SCORE.
    """

    def of_rows(row_r):
        of_chunk = [tf.gather(ragged, row_r) for ragged in (packed.input_ids, packed.segment_ids)]
        return function(to_flat(Packed(*of_chunk), vocabulary, EXACT_TOKENS))

    def in_chunks():
        size_W = tf.maximum(packed.input_ids.row_lengths(), MIN_TOKENS)
        return _run_in_chunks(of_rows, size_W, TOKENS_PER_CHUNK, lambda name, dtype: MASKED_SCORE)

    if not short_tokens:
        return in_chunks()
    ids = packed.input_ids
    is_short = (ids.nrows() == 1) & (tf.size(ids.flat_values) <= short_tokens)
    return tf.cond(is_short, lambda: function(one_sequence(packed)), in_chunks)


def run_in_packed_batches(
    function: Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]],
    packed: Packed,
    vocabulary: Vocabulary,
    max_seq_length: int,
) -> dict[str, tf.Tensor]:
    """Apply a function to all sequences, in packed batches of at most four shapes.

    Args:
        function: Maps the packed inputs of SEQUENCES_PER_BATCH sequences to outputs, as of
            `run_in_chunks`.
        packed: W sequences.
        vocabulary: Vocabulary of the ids.
        max_seq_length: Maximum tokens per sequence.

    Returns:
        As of `run_in_chunks`.
    """
    shape = PackedShape.of_unknown_lengths(SEQUENCES_PER_BATCH, max_seq_length)

    def of_rows(row_r):
        of_batch = [tf.gather(ragged, row_r) for ragged in (packed.input_ids, packed.segment_ids)]
        inputs = to_packed(Packed(*of_batch), vocabulary, shape, SEQUENCES_PER_BATCH)
        return {name: values[: tf.size(row_r)] for name, values in function(inputs).items()}

    # Sequences stay in their order: those of one length would leave the ends of the rows empty.
    ones_W = tf.ones_like(packed.input_ids.row_lengths())
    return _run_in_chunks(of_rows, ones_W, SEQUENCES_PER_BATCH, lambda name, dtype: MASKED_SCORE)


def run_texts_in_chunks(
    function: Callable[..., Mapping[str, tf.Tensor]],
    texts: Mapping[str, tf.Tensor],
    fillers: Mapping[str, int],
) -> dict[str, tf.Tensor]:
    """Apply a function to all rows of a request, in chunks of at most BYTES_PER_CHUNK bytes.

    Args:
        function: Maps strings `(b,)` or `(b, C)`, keyword arguments by input name, to outputs
            `(b, ...)` by name.
        texts: Strings `(B,)` or `(B, C)` by input name.
        fillers: Padding values, by name, of outputs whose width depends on the texts; by default ""
            or -1.

    Returns:
        Outputs `(B, ...)` by name.

    Raises:
        tf.errors.InvalidArgumentError: Inputs differ in their number of rows, or an output has more
            than MAX_VALUES values. Raised when the graph runs.
    """
    num_rows = [tf.shape(values)[0] for values in texts.values()]
    same = tf.debugging.assert_equal(tf.stack(num_rows), num_rows[0], DIFFERENT_ROWS)
    with tf.control_dependencies([same]):
        texts = {name: tf.identity(values) for name, values in texts.items()}

    def of_rows(row_b):
        return function(**{name: tf.gather(values, row_b) for name, values in texts.items()})

    sizes = [
        tf.cast(tf.clip_by_value(tf.strings.length(values), MIN_BYTES, MAX_BYTES), tf.int64)
        for values in texts.values()
    ]
    if max(size.shape.rank for size in sizes) == 2:
        # The prompt counts once per choice, since it is paired with each choice.
        sizes = [size if size.shape.rank == 2 else size[:, tf.newaxis] for size in sizes]
        sizes = [tf.reduce_sum(sum(sizes), axis=1)]
    return _run_in_chunks(
        of_rows,
        sum(sizes),
        BYTES_PER_CHUNK,
        lambda name, dtype: fillers.get(name, "" if dtype == tf.string else -1),
        MAX_VALUES,
    )


class _Chunks:
    """Plan of the chunks: which rows each of them has.

    Attributes:
        num_rows: int32, R.
        order_R: int32, the rows in the order of the chunks.
    """

    def __init__(self, size_R, budget):
        """Sort the rows by size unless they fit into one chunk.

        The budget limits a chunk's number of rows times its largest size; a larger row is a chunk
        of its own.
        """
        self.budget = budget
        self.num_rows = tf.size(size_R)
        size_R = tf.cast(tf.minimum(size_R, budget), tf.int32)
        largest = tf.reduce_max(tf.concat([[1], size_R], axis=0))
        is_one_chunk = self.num_rows <= budget // largest
        # Most requests fit into one chunk, which needs no sorting.
        by_size_R = tf.argsort(size_R, direction="DESCENDING", stable=True)
        self.order_R = tf.where(is_one_chunk, tf.range(self.num_rows), by_size_R)
        size_R = tf.where(is_one_chunk, largest, tf.gather(size_R, self.order_R))
        # One more size, because a request without rows runs as one empty chunk.
        self.sizes = tf.concat([size_R, [1]], axis=0)

    def end_of(self, first):
        """Return the index into `order_R` after the chunk that starts at `first`."""
        count = tf.maximum(self.budget // tf.gather(self.sizes, first), 1)
        return tf.minimum(first + count, self.num_rows)

    def count(self):
        """Return the number of chunks."""
        _, num_chunks = tf.while_loop(
            lambda first, count: first < self.num_rows,
            lambda first, count: (self.end_of(first), count + 1),
            (self.end_of(0), 1),
        )
        return num_chunks


def _run_in_chunks(function, size_R, budget, filler, max_values=None):
    """Apply a function to chunks of R rows within a tf.while_loop.

    Args:
        function: Maps row indices, int32 `(r,)`, to outputs `(r, ...)` by name.
        size_R: Size of each row.
        budget: Limit of a chunk, as in `_Chunks`.
        filler: Padding value, by name and dtype, of outputs whose width differs between chunks.
        max_values: Limit of the number of values of an output.

    Returns:
        Outputs `(R, ...)` by name, in the order of the rows.
    """
    function = tf.function(
        function, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False
    ).get_concrete_function()
    outputs = function.structured_outputs
    inner = {name: output.shape[1:] for name, output in outputs.items()}
    chunks = _Chunks(size_R, budget)
    # The chunks are counted first, because TensorArrays are created with their number.
    num_values = [shape.num_elements() for shape in inner.values() if shape.is_fully_defined()]
    num_chunks = _checked(chunks.count(), chunks.num_rows, max(num_values, default=0), max_values)
    arrays, widths = _outputs_of_chunks(function, chunks, num_chunks)
    if widths:
        sizes = [tf.reduce_prod(tf.cast(width, tf.int64)) for width in widths.values()]
        largest = tf.reduce_max(tf.stack(sizes))
        num_chunks = _checked(num_chunks, chunks.num_rows, largest, max_values)
        arrays |= _padded(arrays, outputs, widths, num_chunks, filler)
    # Undo the sorting.
    position_R = tf.math.invert_permutation(chunks.order_R)
    return {
        name: tf.ensure_shape(tf.gather(array.concat(), position_R), [None, *inner[name]])
        for name, array in arrays.items()
    }


def _outputs_of_chunks(function, chunks, num_chunks):
    """Run the chunks.

    Returns:
        A TensorArray of one element per chunk, by output; and the sizes after the first of the
        widest chunk, for outputs whose width is unknown, which are not padded.
    """
    outputs = function.structured_outputs
    widths = {
        name: tf.zeros([output.shape.rank - 1], tf.int32)
        for name, output in outputs.items()
        if not output.shape[1:].is_fully_defined()
    }

    def body(chunk, first, widths, arrays):
        last = chunks.end_of(first)
        values = function(chunks.order_R[first:last])
        return (
            chunk + 1,
            last,
            {name: tf.maximum(width, tf.shape(values[name])[1:]) for name, width in widths.items()},
            {name: array.write(chunk, values[name]) for name, array in arrays.items()},
        )

    *_, widths, arrays = tf.while_loop(
        lambda chunk, *_: chunk < num_chunks,
        body,
        (0, 0, widths, _arrays(outputs, num_chunks)),
        parallel_iterations=1,
    )
    return arrays, widths


def _padded(arrays, outputs, widths, num_chunks, filler):
    """Return the TensorArrays of `widths` with each chunk padded to the widest one."""

    def padded_to(width, values, value):
        missing = tf.pad(width - tf.shape(values)[1:], [[1, 0]])
        paddings = tf.stack([tf.zeros_like(missing), missing], axis=1)
        return tf.pad(values, paddings, constant_values=value)

    def body(chunk, arrays, padded):
        for name, width in widths.items():
            values = padded_to(width, arrays[name].read(chunk), filler(name, outputs[name].dtype))
            padded = {**padded, name: padded[name].write(chunk, values)}
        return chunk + 1, arrays, padded

    of_widths = {name: outputs[name] for name in widths}
    *_, padded = tf.while_loop(
        lambda chunk, *_: chunk < num_chunks,
        body,
        (0, {name: arrays[name] for name in widths}, _arrays(of_widths, num_chunks)),
        parallel_iterations=1,
    )
    return padded


def _arrays(outputs, num_chunks):
    """Return a TensorArray per output, for one element per chunk."""
    return {
        name: tf.TensorArray(
            output.dtype, num_chunks, infer_shape=False, element_shape=[None, *output.shape[1:]]
        )
        for name, output in outputs.items()
    }


def _checked(tensor, num_rows, width, max_values):
    """Return `tensor` after asserting that num_rows * width <= max_values."""
    if not max_values:
        return tensor
    rows, width = tf.cast(num_rows, tf.int64), tf.cast(width, tf.int64)
    parts = ["an output of", tf.strings.as_string(rows), "rows of", tf.strings.as_string(width)]
    parts.append(f"values exceeds the limit of {max_values} values; send fewer rows per request")
    check = tf.debugging.Assert(rows * width <= max_values, [tf.strings.join(parts, separator=" ")])
    with tf.control_dependencies([check]):
        return tf.identity(tensor)
