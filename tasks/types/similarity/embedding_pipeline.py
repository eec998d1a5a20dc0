"""Pipeline of embedders, with signatures for prompts and for the similarity of two texts."""

import functools
from typing import Any

import tensorflow as tf

from bert_tf.text.excerpts import truncate_utf8
from tasks.base.task import OutputSpec, SignatureSpec
from tasks.graph.pipeline import Pipeline
from tasks.types.similarity.embedding_model import SIMILARITIES

PAIR = ("text_a", "text_b")


class EmbeddingPipeline(Pipeline):
    """Pipeline with the signatures similarity and with_prompt, unless rows are pairs of texts."""

    task: Any  # A SimilarityTask, whose module imports this one.

    @functools.cached_property
    def signatures(self) -> dict[str, tf.types.experimental.GenericFunction]:
        """See `Pipeline`."""
        signatures = super().signatures
        if len(self.task.input_names) == 1:
            signatures["similarity"] = self._served(self.similarity, PAIR)
            signatures["with_prompt"] = self._served(self.with_prompt, ("text", "prompt"))
        return signatures

    def signature_specs(self) -> dict[str, SignatureSpec]:
        """Return the specification of each signature."""
        specs = super().signature_specs()
        if len(self.task.input_names) > 1:
            return specs
        descriptions = self.task.input_descriptions
        return {
            **specs,
            "similarity": SignatureSpec(
                f"The similarity of two texts: {self.task.similarity} of their vectors.",
                {name: descriptions[name] for name in PAIR},
                {
                    "score": OutputSpec(
                        "similarity, larger for more similar texts",
                        is_derived=self.task.similarity != "cosine",
                    )
                },
            ),
            "with_prompt": SignatureSpec(
                "The vector of a text after a prompt, which replaces that of the model.",
                {"text": "text", "prompt": 'put before the text, such as "query: "; "" for none'},
                specs["serving_default"].outputs,
            ),
        }

    def similarity(self, text_a: tf.Tensor, text_b: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compare texts.

        Args:
            text_a: string `(B,)`.
            text_b: string `(B,)`.

        Returns:
            Dict of `score`, float32 `(B,)`.
        """
        vectors = self.predict(text=tf.concat([text_a, text_b], axis=0))["embedding"]
        a_BD, b_BD = tf.split(vectors, 2)
        return {"score": SIMILARITIES[self.task.similarity](a_BD, b_BD)}

    def with_prompt(self, text: tf.Tensor, prompt: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the vectors of texts after prompts.

        Args:
            text: string `(B,)`.
            prompt: string `(B,)`.

        Returns:
            Dict of `embedding`, float32 `(B, D)`.
        """
        texts = {"text": truncate_utf8(text)}
        windows = self.task.encode_prompted(
            texts, truncate_utf8(prompt), self.tokenizer.tokenize, self.vocabulary
        )
        return self._outputs(windows, texts)
