"""A model over any number of sequences, a part of them at a time, in one graph.

The memory of a request is that of its largest part, however many texts it holds or windows they
have.

Legend: W sequences, (L) tokens of one, L the longest of all.
"""

import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.packing import Packed, flat

TOKENS_AT_A_TIME = 2**14


def in_parts(function, packed, vocabulary, of_tokens=False):
    """`function` of the flat inputs of n sequences -> {name: [n, ...]}, over Packed sequences.

    Returns {name: [W, ...]}, [W, L, ...] where its outputs are `of_tokens`: those are filled up
    with MASKED_SCORE.
    """
    specs = {
        name: tf.TensorSpec([None], tf.int32, name=name)
        for name in ("input_ids", "segment_ids", "row_splits")
    }
    function = tf.function(function, input_signature=[specs], autograph=False)
    function = function.get_concrete_function()
    outputs = function.structured_outputs

    splits = packed.input_ids.row_splits
    # A sequence is of the part that its last token falls in. No part between two is empty, since no
    # sequence is as long as a part; where there is no sequence at all there is one empty part.
    part_W = (splits[1:] - 1) // TOKENS_AT_A_TIME
    num_parts = tf.cast(tf.reduce_max(tf.concat([[0], part_W], axis=0)), tf.int32) + 1
    first_W = tf.searchsorted(part_W, tf.cast(tf.range(num_parts + 1), tf.int64))
    longest = tf.cast(packed.input_ids.bounding_shape(1), tf.int32)

    def filled(values):
        missing = longest - tf.shape(values)[1]
        paddings = [[0, 0], [0, missing], *[[0, 0]] * (values.shape.rank - 2)]
        return tf.pad(values, paddings, constant_values=MASKED_SCORE)

    def body(part, arrays):
        first, last = first_W[part], first_W[part + 1]
        begin, end = splits[first], splits[last]
        of_part = [
            tf.RaggedTensor.from_row_splits(
                ragged.flat_values[begin:end], splits[first : last + 1] - begin, validate=False
            )
            for ragged in (packed.input_ids, packed.segment_ids)
        ]
        values = function(flat(Packed(*of_part), vocabulary))
        return part + 1, {
            name: array.write(part, filled(values[name]) if of_tokens else values[name])
            for name, array in arrays.items()
        }

    arrays = {
        name: tf.TensorArray(
            tensor.dtype, num_parts, infer_shape=False, element_shape=[None, *tensor.shape[1:]]
        )
        for name, tensor in outputs.items()
    }
    _, arrays = tf.while_loop(
        lambda part, arrays: part < num_parts,
        body,
        (tf.constant(0), arrays),
        parallel_iterations=1,
    )
    return {
        name: tf.ensure_shape(array.concat(), [None, *outputs[name].shape[1:]])
        for name, array in arrays.items()
    }
