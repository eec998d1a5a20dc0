"""Write one shard: a TFRecord file of masked examples from the documents assigned to it.

The content of a shard depends only on its documents, its number and the settings: any process on
any machine writes the same bytes.
"""

import errno
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.data import masking, tf_examples
from bert_tf.data.instances import (
    Instances,
    make_instances,
    make_texts,
    to_examples,
    tokenize_documents,
)
from bert_tf.data.settings import MASK_SETTINGS, WriteShardsSettings
from bert_tf.data.sharded_output import Entry, Span
from bert_tf.errors import UserError, tensorflow_reason
from bert_tf.storage import files
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.text.vocabulary import Vocabulary

BATCH_TOKENS = 1 << 18  # Tokens, with padding, that are masked and serialized at once.


class ShardWriter:
    """Writer of any shard of a corpus; `tokenizer` are keyword arguments of the `Tokenizer`."""

    def __init__(
        self, settings: WriteShardsSettings, vocabulary: Vocabulary, tokenizer: dict[str, Any]
    ) -> None:
        self.settings, self.vocabulary = settings, vocabulary
        self._tokenizer = Tokenizer(vocabulary, **tokenizer)
        self._mask = None
        if settings.masking == "static":
            masks = {name: getattr(settings, name) for name in MASK_SETTINGS}
            mask = masking.MaskGenerator(vocabulary, **masks)
            ids = tf.TensorSpec([None, settings.max_seq_length], tf.int32)
            # One graph for all batch sizes, since the last batch of a shard may have any size.
            self._mask = tf.function(
                lambda input_ids, input_mask, shard, numbers: mask(
                    {"input_ids": input_ids, "input_mask": input_mask},
                    masking.keys(settings.seed, shard, numbers),
                ),
                input_signature=[
                    ids,
                    ids,
                    tf.TensorSpec([], tf.int64),
                    tf.TensorSpec([None], tf.int64),
                ],
                autograph=False,
            )

    def write(self, number: int, path: str, spans: Iterable[Span]) -> Entry:
        """Write a shard atomically; see `sharded_output.WriteShard`.

        Raises:
            UserError: If the documents cannot be read or give no instances.
            OSError: If the file cannot be written.
        """
        settings, name = self.settings, os.path.basename(path)
        documents = tokenize_documents(
            spans,
            settings.input_format,
            settings.text_field,
            self._tokenizer,
            splits_sentences=settings.next_sentence,
        )
        make: Callable[..., Instances] = make_texts
        if settings.next_sentence:
            make = functools.partial(
                make_instances,
                short_seq_prob=settings.short_seq_prob,
                same_document_next=settings.same_document_next,
            )
        try:
            instances = make(
                documents,
                max_seq_length=settings.max_seq_length,
                dupe_factor=settings.dupe_factor,
                seed=settings.seed * 100_000 + number,
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        with files.atomic_path(path) as temporary:
            try:
                with tf.io.TFRecordWriter(temporary) as writer:
                    size = max(1, BATCH_TOKENS // settings.max_seq_length)
                    for begin in range(0, len(instances), size):
                        batch = instances.rows(slice(begin, begin + size))
                        examples = self._examples(batch, documents.ids, number, begin)
                        for record in tf_examples.serialize(examples):
                            writer.write(record)
            except tf.errors.OpError as error:
                reason = tensorflow_reason(error)
                raise OSError(errno.EIO, f"cannot be written: {reason}", path) from None
            return {
                "file": name,
                "records": len(instances),
                "bytes": files.stamp(temporary)[0],
                "sha256": files.sha256(temporary),
                "documents": len(documents),
                "tokens": int(instances.num_tokens.sum()),
                "random_next": int(instances.is_random_next.sum()),
                **documents.token_counts.to_entry(),
            }

    def _examples(self, instances, ids, number, begin):
        examples = to_examples(instances, ids, self.vocabulary, self.settings.max_seq_length)
        if not self.settings.next_sentence:
            del examples[tf_examples.LABELS]
        if self._mask is None:
            return examples
        numbers = np.arange(begin, begin + len(instances))
        masked = self._mask(examples["input_ids"], examples["input_mask"], number, numbers)
        return {**examples, **{name: value.numpy() for name, value in masked.items()}}
