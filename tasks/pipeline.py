"""From strings to answers in one graph, for training, predict and the export alike.

Legend: B texts, L tokens, H hidden size.
"""

import tensorflow as tf

from bert_tf.text.packing import flat, pack, padded


class Pipeline(tf.Module):
    """A task's tokenizer and model, joined; its methods take and return tensors."""

    def __init__(self, task, tokenizer, model):
        super().__init__(name="pipeline")
        self.task, self.tokenizer, self.model = task, tokenizer, model
        self.vocabulary = tokenizer.vocabulary
        text = tf.TensorSpec([None], tf.string)
        self._encode = tf.function(
            lambda *texts: self._pack(texts, self.tokenizer.tokenize),
            input_signature=[text] * len(task.input_names),
            autograph=False,
        )

    def encode(self, **texts):
        """{input name: [B] string} -> Packed ids, without offsets; for encoding a data set."""
        return self._encode(*(texts[name] for name in self.task.input_names))

    def answer(self, **texts):
        """{input name: [B] string} -> the task's answer, a dict of [B, ...]."""
        packed = self._pack(
            [texts[name] for name in self.task.input_names], self.tokenizer.tokenize
        )
        return self.task.answer(self.model(flat(packed, self.vocabulary)))

    def embed(self, text):
        """[B] string -> {"pooled", "mean"} [B, H], the mean over all tokens, specials too."""
        packed = self._pack([text], self.tokenizer.tokenize)
        encoded = self.model.encoder(flat(packed, self.vocabulary))
        count = packed.input_ids.row_splits[-1]
        sequence_TH = tf.cast(encoded["sequence"][:count], tf.float32)
        mean_BH = tf.reduce_mean(packed.input_ids.with_flat_values(sequence_TH), axis=1)
        return {"pooled": tf.cast(encoded["pooled"], tf.float32), "mean": mean_BH}

    def tokenize(self, **texts):
        """{input name: [B] string} -> what the model sees, and from which characters, [B, L].

        start and end count characters of the token's own text as sent; -1 at [CLS], [SEP] and
        padding.
        """
        packed = self._pack(
            [texts[name] for name in self.task.input_names], self.tokenizer.tokenize_with_offsets
        )
        return {
            **padded(packed, self.vocabulary),
            "start": packed.starts.to_tensor(-1),
            "end": packed.ends.to_tensor(-1),
        }

    def signatures(self):
        """{signature: tf.function} of [B] string inputs by position, each traced once."""
        texts = self.task.input_names
        return {
            "serving_default": self._traced(self.answer, texts),
            "tokenize": self._traced(self.tokenize, texts),
            "embed": self._traced(self.embed, ("text",)),
        }

    def _traced(self, function, names):
        def call(*texts):
            return function(**dict(zip(names, texts, strict=True)))

        specs = [tf.TensorSpec([None], tf.string, name=name) for name in names]
        return tf.function(call, input_signature=specs, autograph=False)

    def _pack(self, texts, tokenize):
        return pack([tokenize(text) for text in texts], self.vocabulary, self.task.max_seq_length)
