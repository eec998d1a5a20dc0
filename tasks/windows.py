"""Windows: the token sequences that texts become, and where in them a text's tokens stand.

Legend: N examples, W windows, (L) tokens of a window, C choices of an example.
"""

from typing import NamedTuple

import tensorflow as tf

from bert_tf.text.packing import Packed


class Windows(NamedTuple):
    """W sequences made of N examples; `owner_W` int32, ascending, says of which each is.

    Where a long text goes through several windows, `begin_W` is the number in the text of the
    window's first token, `offset_W` where in the sequence that token stands, and `is_best`, bool
    [W, (L)], in which window a token of the text has the most context. `choice_W` is the number of
    the choice that a window holds.
    """

    packed: Packed
    owner_W: tf.Tensor
    begin_W: tf.Tensor | None = None
    offset_W: tf.Tensor | None = None
    is_best: tf.RaggedTensor | None = None
    choice_W: tf.Tensor | None = None

    def by_example(self, of_windows, num_examples):
        """What belongs to each window -> ragged [N, (windows of it), ...]."""
        return tf.RaggedTensor.from_value_rowids(
            of_windows,
            tf.cast(self.owner_W, tf.int64),
            tf.cast(num_examples, tf.int64),
            validate=False,
        )

    def grid(self, num_examples, num_choices):
        """Which window is which choice of an example, int32 [N, C]; -1 where there is none."""
        count = tf.size(self.choice_W)
        places = tf.stack([tf.cast(self.owner_W, tf.int32), self.choice_W], axis=1)
        return tf.tensor_scatter_nd_update(
            tf.fill([num_examples, num_choices], -1), places, tf.range(count)
        )


def one_each(packed):
    """The Windows of texts that are one sequence each."""
    return Windows(packed, tf.range(tf.cast(packed.input_ids.nrows(), tf.int32)))


def concat(parts, counts):
    """Windows of several slices of a data set, of `counts` examples each, as those of all of it."""
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    parts = [
        part._replace(owner_W=part.owner_W + first)
        for part, first in zip(parts, firsts, strict=True)
    ]

    def joined(values):
        return None if values[0] is None else tf.concat(values, axis=0)

    packed = Packed(*map(joined, zip(*(part.packed for part in parts), strict=True)))
    return Windows(packed, *map(joined, zip(*(part[1:] for part in parts), strict=True)))
