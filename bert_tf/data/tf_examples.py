"""Serialize and parse examples as tf.train.Example, with the features of google-research/bert.

The protobuf wire format is written with numpy for a batch of examples at once, since protobuf in
Python takes longer than all other steps.

Shape suffixes: N examples, L sequence length, P maximum predictions per sequence.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

INPUTS = ("input_ids", "input_mask", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
LABELS = "next_sentence_labels"
_FLOATS = ("masked_lm_weights",)


def parser(
    max_seq_length: int, max_predictions_per_seq: int, next_sentence: bool = True
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Return a function that parses serialized examples.

    `max_predictions_per_seq` is 0 if the records contain no masks. With `next_sentence` they are
    pairs of segments with a label.

    Returns:
        Function from a string tensor `(N,)` to int64 and float32 tensors `(N, L)`, `(N, P)` and
        `(N, 1)` by feature name.
    """
    features = {name: tf.io.FixedLenFeature([max_seq_length], tf.int64) for name in INPUTS}
    if max_predictions_per_seq:
        for name in MASKS:
            dtype = tf.float32 if name in _FLOATS else tf.int64
            features[name] = tf.io.FixedLenFeature([max_predictions_per_seq], dtype)
    if next_sentence:
        features[LABELS] = tf.io.FixedLenFeature([1], tf.int64)
    return lambda records: tf.io.parse_example(records, features)


def parser_of(settings: Mapping[str, Any]) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Return the `parser` for the shards of a manifest with these settings."""
    is_masked = settings["masking"] == "static"
    return parser(
        settings["max_seq_length"],
        settings["max_predictions_per_seq"] * is_masked,
        settings.get("next_sentence", True),
    )


def limits(vocab_size: int, max_seq_length: int, type_vocab_size: int = 2) -> dict[str, int]:
    """Return the exclusive upper bound of the values of each feature. The lower bound is 0."""
    return {
        "input_ids": vocab_size,
        "input_mask": 2,
        "segment_ids": min(2, type_vocab_size),
        "masked_lm_positions": max_seq_length,
        "masked_lm_ids": vocab_size,
        LABELS: 2,
    }


def serialize(examples: Mapping[str, np.ndarray]) -> list[bytes]:
    """Serialize integer or float32 arrays `(N, length)` by feature name as N tf.train.Examples.

    Features are sorted by name, so that equal examples give equal bytes.

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

    They are kept as a list of pairs of arrays `(N, n)`: bytes, and which of them to write. Nothing
    is copied before `to_bytes`. Other methods return `self`.
    """

    def __init__(self, num_messages):
        self.parts = []
        self.sizes = np.zeros(num_messages, np.int64)

    def add_bytes(self, data):
        """Append the same bytes to all messages."""
        data = np.frombuffer(data, np.uint8)
        return self._add_all(np.broadcast_to(data, (len(self.sizes), len(data))))

    def add_floats(self, numbers):
        return self._add_all(numbers.astype("<f4").view(np.uint8))

    def add_varints(self, numbers):
        """Append integers from 0 to 2**28 - 1 as varints: 7 bits per byte, lowest first."""
        numbers = numbers.astype(np.uint32)
        largest = int(numbers.max(initial=0))
        if largest >= 1 << 28:
            raise ValueError(f"{largest}: expected an integer < 2**28")
        if largest < 1 << 7:
            return self._add_all(numbers.astype(np.uint8))
        data = np.empty((*numbers.shape, -(-largest.bit_length() // 7)), np.uint8)
        is_written = np.ones(data.shape, bool)
        for number in range(data.shape[2]):
            # The high bit of a byte is set if another one follows.
            has_next = (numbers >= 1 << 7).view(np.uint8)
            data[:, :, number] = numbers.astype(np.uint8) & np.uint8(0x7F) | has_next << np.uint8(7)
            if number:
                is_written[:, :, number] = numbers > 0
            numbers >>= 7
        data, is_written = (part.reshape(len(part), -1) for part in (data, is_written))
        self.sizes += np.count_nonzero(is_written, axis=1)
        self.parts.append((data, is_written))
        return self

    def add_field(self, tag, message):
        """Append a length-delimited field: tag, size and the content of another message."""
        self.add_bytes(tag).add_varints(message.sizes[:, np.newaxis])
        self.parts += message.parts
        self.sizes += message.sizes
        return self

    def to_bytes(self):
        """Return the messages as N bytes objects."""
        data, is_written = (
            np.concatenate(parts, axis=1) for parts in zip(*self.parts, strict=True)
        )
        # np.compress is three times as fast as indexing with booleans.
        data = np.compress(is_written.reshape(-1), data.reshape(-1)).tobytes()
        ends = np.cumsum(self.sizes).tolist()
        return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _add_all(self, data):
        self.parts.append((data, np.broadcast_to(True, data.shape)))
        self.sizes += data.shape[1]
        return self


def _field(tag, message):
    return _Message(len(message.sizes)).add_field(tag, message)
