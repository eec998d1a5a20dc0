"""A request in parts, in one graph, so that its memory is that of its largest part.

Rows of a part are padded to the longest of them, in attention and in answers. So a part is bounded
by its rows times the longest; and where one part is not enough, rows of like size share one.

Legend: R rows, r rows of a part, B texts, W sequences, L tokens of the longest.
"""

import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.byte_limit import MAX_BYTES
from bert_tf.text.packing import Packed, to_flat

TOKENS_PER_CHUNK = 2**14  # Sequences times the longest of them.
MIN_TOKENS = 8  # What a shorter sequence counts as.
BYTES_PER_CHUNK = MAX_BYTES  # Texts times the longest of them.
MIN_BYTES = 2**8  # What a shorter text counts as.
# Of an output of a request, 32 rows of 2**20 each: as many rows as batching_params.pbtxt allows.
MAX_VALUES = 2**25

DIFFERENT_ROWS = "inputs differ in their number of rows; send as many of each"


def run_in_chunks(function, packed, vocabulary):
    """Applies `function` to the flat inputs of some sequences at a time, of all of a Packed.

    Args:
        function: Flat inputs of n sequences -> {name: [n, ...]}, or [n, L, ...] of every token.

    Returns:
        {name: [W, ...]}; what is [W, L, ...] is padded with MASKED_SCORE.
    """

    def of_rows(row_r):
        of_chunk = [tf.gather(ragged, row_r) for ragged in (packed.input_ids, packed.segment_ids)]
        return function(to_flat(Packed(*of_chunk), vocabulary))

    size_W = tf.maximum(packed.input_ids.row_lengths(), MIN_TOKENS)
    return _run_in_chunks(of_rows, size_W, TOKENS_PER_CHUNK, lambda name, dtype: MASKED_SCORE)


def run_texts_in_chunks(function, texts, fillers):
    """Applies `function` to the texts of some rows at a time, of all rows of a request.

    Args:
        function: {input: strings [b] or [b, C]} -> {name: [b, ...]}.
        fillers: {name: value} that pads outputs whose width follows from the texts; "" or -1 by
            default.

    Returns:
        {name: [B, ...]}. An output of more than MAX_VALUES is an error, which says so.
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
        # A text counts with each choice, since it is read with each.
        sizes = [size if size.shape.rank == 2 else size[:, tf.newaxis] for size in sizes]
        sizes = [tf.reduce_sum(sum(sizes), axis=1)]
    return _run_in_chunks(
        of_rows,
        sum(sizes),
        BYTES_PER_CHUNK,
        lambda name, dtype: fillers.get(name, "" if dtype == tf.string else -1),
        MAX_VALUES,
    )


def _run_in_chunks(function, size_R, budget, filler, max_values=None):
    """Applies `function`, row numbers int32 [r] -> {name: [r, ...]}, to parts of R rows.

    A part is one row, or its rows times the largest of their `size_R` are at most `budget`. Returns
    {name: [R, ...]}, where parts differ in a width padded with `filler(name, dtype)`.
    """
    function = tf.function(
        function, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False
    ).get_concrete_function()
    outputs = function.structured_outputs

    num_rows = tf.size(size_R)
    size_R = tf.cast(tf.minimum(size_R, budget), tf.int32)
    largest = tf.reduce_max(tf.concat([[1], size_R], axis=0))
    is_one_chunk = num_rows <= budget // largest
    # In their own order where all are one part, as in nearly all requests.
    order_R = tf.where(
        is_one_chunk, tf.range(num_rows), tf.argsort(size_R, direction="DESCENDING", stable=True)
    )
    size_R = tf.where(is_one_chunk, largest, tf.gather(size_R, order_R))
    size_R = tf.concat([size_R, [1]], axis=0)  # One more, for no rows at all, which are one part.

    def end_of(first):
        return tf.minimum(first + tf.maximum(budget // size_R[first], 1), num_rows)

    _, num_chunks = tf.while_loop(
        lambda first, count: first < num_rows,
        lambda first, count: (end_of(first), count + 1),
        (end_of(0), 1),
    )
    inner = {name: tensor.shape[1:] for name, tensor in outputs.items()}
    fixed = {
        name: shape.num_elements() for name, shape in inner.items() if shape.is_fully_defined()
    }
    num_chunks = _checked(num_chunks, num_rows, max(fixed.values(), default=0), max_values)

    def body(chunk, first, widths, arrays):
        last = end_of(first)
        values = function(order_R[first:last])
        return (
            chunk + 1,
            last,
            {name: tf.maximum(width, tf.shape(values[name])[1:]) for name, width in widths.items()},
            {name: array.write(chunk, values[name]) for name, array in arrays.items()},
        )

    def new_arrays(names):
        return {
            name: tf.TensorArray(
                outputs[name].dtype,
                num_chunks,
                infer_shape=False,
                element_shape=[None, *inner[name]],
            )
            for name in names
        }

    widths = {name: tf.zeros([inner[name].rank], tf.int32) for name in outputs if name not in fixed}
    *_, widths, arrays = tf.while_loop(
        lambda chunk, *_: chunk < num_chunks,
        body,
        (0, 0, widths, new_arrays(outputs)),
        parallel_iterations=1,
    )
    if widths:
        sizes = [tf.reduce_prod(tf.cast(width, tf.int64)) for width in widths.values()]
        num_chunks = _checked(num_chunks, num_rows, tf.reduce_max(tf.stack(sizes)), max_values)

        def pad(chunk, arrays, padded):
            for name, width in widths.items():
                values = arrays[name].read(chunk)
                missing = tf.pad(width - tf.shape(values)[1:], [[1, 0]])
                paddings = tf.stack([tf.zeros_like(missing), missing], axis=1)
                values = tf.pad(values, paddings, constant_values=filler(name, values.dtype))
                padded = {**padded, name: padded[name].write(chunk, values)}
            return chunk + 1, arrays, padded

        *_, padded = tf.while_loop(
            lambda chunk, *_: chunk < num_chunks,
            pad,
            (0, {name: arrays[name] for name in widths}, new_arrays(widths)),
            parallel_iterations=1,
        )
        arrays = {**arrays, **padded}
    position_R = tf.math.invert_permutation(order_R)
    return {
        name: tf.ensure_shape(tf.gather(array.concat(), position_R), [None, *inner[name]])
        for name, array in arrays.items()
    }


def _checked(tensor, num_rows, width, max_values):
    """`tensor`, once `num_rows` of `width` values are no more than `max_values`."""
    if not max_values:
        return tensor
    rows, width = tf.cast(num_rows, tf.int64), tf.cast(width, tf.int64)
    parts = ["an output of", tf.strings.as_string(rows), "rows of", tf.strings.as_string(width)]
    parts.append(
        f"values has more than the {max_values} that are allowed; send fewer rows at a time"
    )
    check = tf.debugging.Assert(rows * width <= max_values, [tf.strings.join(parts, separator=" ")])
    with tf.control_dependencies([check]):
        return tf.identity(tensor)
