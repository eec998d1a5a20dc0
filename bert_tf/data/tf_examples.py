"""Serialize and parse examples as tf.train.Example, with the features of google-research/bert.

The protobuf wire format is written with numpy for a batch of examples at once, since protobuf in
Python takes longer than all other steps.

Shape suffixes: N examples, L sequence length, P maximum predictions per sequence.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

INPUTS = ("input_ids", "input_mask", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
LABELS = "next_sentence_labels"
_FLOATS = ("masked_lm_weights",)
_FIRST_BYTES = np.array(
    [0, 1, 0x101, 0x10101, 0x1010101], "<u4"
)  # Masks of the first 0 to 4 bytes.


def parser(
    max_seq_length: int, max_predictions_per_seq: int
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Return a function that parses serialized examples.

    Args:
        max_seq_length: L.
        max_predictions_per_seq: P, or 0 if the records contain no masks.

    Returns:
        Function from a string tensor `(N,)` to int64 and float32 tensors `(N, L)`, `(N, P)` and
        `(N, 1)` by feature name.
    """
    features = {name: tf.io.FixedLenFeature([max_seq_length], tf.int64) for name in INPUTS}
    if max_predictions_per_seq:
        for name in MASKS:
            dtype = tf.float32 if name in _FLOATS else tf.int64
            features[name] = tf.io.FixedLenFeature([max_predictions_per_seq], dtype)
    features[LABELS] = tf.io.FixedLenFeature([1], tf.int64)
    return lambda records: tf.io.parse_example(records, features)


def limits(vocab_size: int, max_seq_length: int) -> dict[str, int]:
    """Return the exclusive upper bound of the values of each feature. The lower bound is 0."""
    return {
        "input_ids": vocab_size,
        "input_mask": 2,
        "segment_ids": 2,
        "masked_lm_positions": max_seq_length,
        "masked_lm_ids": vocab_size,
        LABELS: 2,
    }


def serialize(examples: Mapping[str, np.ndarray]) -> list[bytes]:
    """Serialize examples as tf.train.Example.

    Features are sorted by name, so that equal examples give equal bytes.

    Args:
        examples: Integer or float32 arrays `(N, length)` by feature name.

    Returns:
        N serialized examples.

    Raises:
        ValueError: If an integer is 2**28 or more.
    """
    num_examples = len(next(iter(examples.values())))
    entries = _Message(num_examples)
    for name in sorted(examples):
        payload = _Message(num_examples)
        if name in _FLOATS:
            payload.add_floats(examples[name])
        else:
            payload.add_varints(examples[name])
        list_tag = b"\x12" if name in _FLOATS else b"\x1a"  # float_list, int64_list
        key = _Message(num_examples).add_bytes(name.encode())
        feature = _Message(num_examples).add_field(list_tag, _field(b"\n", payload))
        # Each feature is a map entry: field 1 is the name, field 2 the value.
        entry = _field(b"\n", key).add_field(b"\x12", feature)
        entries.add_field(b"\n", entry)
    return _field(b"\n", entries).to_bytes()


class _Message:
    """Bytes of N protobuf messages.

    They are kept as a list of pairs of arrays `(N, n)`: little-endian uint32 values, and the number
    of bytes to write of each. Nothing is copied before `to_bytes`. Other methods return `self`.
    """

    def __init__(self, num_messages):
        self.parts = []
        self.sizes = np.zeros(num_messages, np.int64)

    def add_bytes(self, data):
        """Append the same bytes to all messages."""
        values = np.frombuffer(data, np.uint8).astype("<u4")
        values = np.broadcast_to(values, (len(self.sizes), len(data)))
        return self._add(values, np.broadcast_to(np.uint8(1), values.shape))

    def add_floats(self, numbers):
        values = numbers.astype("<f4").view("<u4")
        return self._add(values, np.broadcast_to(np.uint8(4), values.shape))

    def add_varints(self, numbers):
        """Append integers from 0 to 2**28 - 1 as varints: 7 bits per byte, lowest first."""
        numbers = numbers.astype("<u4")
        largest = numbers.max(initial=0)
        if largest >= 1 << 28:
            raise ValueError(f"{largest}: expected an integer < 2**28")
        values, widths = numbers, np.ones(numbers.shape, np.uint8)
        if largest >= 1 << 7:
            # Byte i gets bits 7i to 7i + 6. The high bit of a byte is set if another one follows.
            values = numbers & 0x7F
            for number in range(1, -(-int(largest).bit_length() // 7)):
                is_longer = numbers >= 1 << 7 * number
                widths += is_longer
                values |= (numbers >> 7 * number & 0x7F) << 8 * number
                values |= is_longer.astype("<u4") << 8 * number - 1
        return self._add(values, widths)

    def add_field(self, tag, message):
        """Append a length-delimited field: tag, size and the content of another message."""
        self.add_bytes(tag).add_varints(message.sizes[:, np.newaxis])
        self.parts += message.parts
        self.sizes += message.sizes
        return self

    def to_bytes(self):
        """Return the messages as N bytes objects."""
        values = np.concatenate([values for values, _ in self.parts], axis=1)
        widths = np.concatenate([widths for _, widths in self.parts], axis=1)
        # np.compress is three times as fast as indexing with booleans.
        kept = _FIRST_BYTES[widths].view(bool)
        data = np.compress(kept.reshape(-1), values.view(np.uint8).reshape(-1)).tobytes()
        ends = np.cumsum(self.sizes).tolist()
        return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _add(self, values, widths):
        self.parts.append((values, widths))
        self.sizes += widths.sum(axis=1, dtype=np.int64)
        return self


def _field(tag, message):
    return _Message(len(message.sizes)).add_field(tag, message)
