"""Task of a pretrained run: masked language model and next-sentence prediction.

Shape suffixes: B texts, N texts of a chunk, T tokens of a chunk, L tokens of its longest text, H
hidden size, V vocabulary size, K predictions, M masks of a chunk, P maximum masks of a text, S
texts of an evaluation.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.data import masking
from bert_tf.errors import UserError
from bert_tf.pretraining.masked_tokens import Candidates, check_head, fill_masks
from bert_tf.pretraining.model import LOSSES, PretrainingModel
from bert_tf.text.tokenizer import MASK, tokenize_masked
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights.sources import PretrainedWeights
from tasks.base.task import Loss, OutputSpec, SignatureSpec, Task, Tokenize, described, top2_gap
from tasks.data.examples import Arrays, Draw, EncodedExamples, Tensors
from tasks.data.readers.memory import columns_of, named
from tasks.data.windows import Windows, one_window_each, pack_texts
from tasks.graph.pipeline import Pipeline
from tasks.model.labelled_rows import class_factors
from tasks.model.task_model import TaskModel

NUM_PREDICTIONS = 5  # Entries returned per text.
MASKED_LM_PROB = 0.15  # Fraction of the tokens of a text that are predicted (Devlin et al. 2019).


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLmTask(Task):
    """Masked language model: the most probable entries at the first [MASK] of a text.

    Attributes:
        heads: The pretraining heads of the model, those of the weights.
        next_sentence: Whether next sentence prediction is trained, too; the model then has its
            head. Otherwise the pooler and this head are not trained.
        whole_word_mask: Whether the masks that are drawn are of whole words.
    """

    heads: tuple[str, ...] = described("pretraining heads of the weights", tuple(LOSSES))
    next_sentence: bool = False
    whole_word_mask: bool = False

    kind = "pretrained"
    has_head = False
    description = "Predicts the token at the first [MASK] of a text."
    outputs = {
        # A near tie is one of the best token; the order of the next ones may differ, too.
        "token": OutputSpec(
            "most probable tokens at the first [MASK], best first", compared="first"
        ),
        "score": OutputSpec("probabilities of these tokens"),
    }
    input_names = ("text",)
    num_ids = {"next_sentence": 2}
    has_lists_of_labels = True
    best_metric = "loss"
    no_labels = (
        "the run is only pretrained and cannot be evaluated on labelled rows; use "
        "bert-tf pretrain --eval_shards"
    )

    @property
    def losses(self) -> Mapping[str, Loss]:
        """The losses of the heads that are trained."""
        return LOSSES if self.next_sentence else {"masked_lm": LOSSES["masked_lm"]}

    @property
    def accuracies(self) -> tuple[str, ...]:  # type: ignore[override]
        """The heads that are trained."""
        return tuple(self.losses)

    def for_weights(self, names: Collection[str]) -> Self:
        """See `Task.for_weights`; weights of BertForMaskedLM have no next sentence head."""
        heads = tuple(
            head
            for head in LOSSES
            if head in self.losses or any(name.startswith(f"{head}/") for name in names)
        )
        return dataclasses.replace(self, heads=heads)

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize and pack texts, in which the string "[MASK]" is the mask token."""

        def with_masks(texts):
            return tokenize_masked(texts, tokenize, vocabulary)

        packed = pack_texts([texts["text"]], with_masks, vocabulary, self.max_seq_length)
        return one_window_each(packed)

    def build_model(self, config: BertConfig, dtype: str = "float32") -> PretrainingModel:
        """Return the pretraining model."""
        has_next_sentence = "next_sentence" in self.heads
        model = PretrainingModel(config, dtype=dtype, next_sentence=has_next_sentence)
        if not self.next_sentence:
            model.freeze_next_sentence()
        return model

    def default_labels(self, x: Any, count: int) -> list:
        """Return no label for each text; the labels are tokens."""
        if self.next_sentence:
            raise UserError(
                "x: received texts, which have no next sentences; expected a dataset of batches of "
                "bert_tf.pretraining.model.to_batch, or a model without next_sentence=True"
            )
        return [None] * count

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> None:
        """Raise ValueError for a label."""
        if value is not None:
            raise ValueError(f"{value!r:.80}: expected no labels, since the labels are tokens of x")

    def draw(self, vocabulary: Vocabulary, length: int) -> Draw:
        """Return the function that masks texts; see `Task.draw`.

        The masks of a text depend on its key alone, not on the batch, its layout, or `length`.
        """
        mask = masking.MaskGenerator(
            vocabulary,
            masked_lm_prob=MASKED_LM_PROB,
            max_predictions_per_seq=max(1, round(length * MASKED_LM_PROB)),
            whole_word_mask=self.whole_word_mask,
        )

        def draw(inputs, keys_B):
            ids, index_BL = inputs["input_ids"], _token_indices(inputs)
            is_token_BL = index_BL >= 0
            tokens_BL = tf.gather(tf.reshape(ids, [-1]), tf.maximum(index_BL, 0))
            drawn = mask(
                {
                    "input_ids": tf.where(is_token_BL, tokens_BL, vocabulary["[PAD]"]),
                    "input_mask": tf.cast(is_token_BL, tf.int32),
                },
                keys_B,
            )
            masked = tf.tensor_scatter_nd_update(
                tf.reshape(ids, [-1]),
                tf.boolean_mask(index_BL, is_token_BL)[:, tf.newaxis],
                tf.boolean_mask(drawn["input_ids"], is_token_BL),
            )
            positions_BP = drawn["masked_lm_positions"]
            if "input_mask" not in inputs:  # Positions count from the first token of all texts.
                positions_BP = tf.maximum(tf.gather(index_BL, positions_BP, batch_dims=1), 0)
            inputs = {
                **inputs,
                "input_ids": tf.ensure_shape(tf.reshape(masked, tf.shape(ids)), ids.shape),
                "masked_lm_positions": positions_BP,
            }
            labels, weights = drawn["masked_lm_ids"], drawn["masked_lm_weights"]
            return inputs, {"masked_lm": labels}, {"masked_lm": weights}

        return draw

    def metric_inputs(self, outputs: Arrays) -> Arrays:
        """Return the most probable token per mask, int32 `(B, P)`."""
        return {"masked_lm": np.argmax(outputs["masked_lm"], axis=-1).astype(np.int32)}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the accuracy over all masks."""
        is_correct_SP = outputs["masked_lm"] == data.labels["masked_lm"]
        weights_SP = data.weights["masked_lm"]
        return {"accuracy": float(np.sum(is_correct_SP * weights_SP) / np.sum(weights_SP))}

    def metrics_of_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity; exp overflows float64 above 709."""
        return {"perplexity": math.exp(min(losses["masked_lm"], 700))}

    def prediction_error(self, row: Mapping[str, Any]) -> str | None:
        """See `Task.prediction_error`; a text without [MASK] has a score of 0."""
        if row["score"][0] > 0:
            return None
        return f"expected a text with [MASK] among its first {self.max_seq_length} tokens"

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the gap between the two best entries, `(B,)`, inf for texts without [MASK]."""
        margin_N = top2_gap(predictions["score"])
        return tf.where(predictions["score"][:, 0] > 0, margin_N, float("inf"))


class MaskedLmPipeline(Pipeline):
    """Pipeline with a signature per head: masked_lm, the default, and next_sentence."""

    @functools.cached_property
    def signatures(self) -> dict[str, tf.types.experimental.GenericFunction]:
        """See `Pipeline.signatures`."""
        signatures = super().signatures
        signatures["masked_lm"] = signatures["serving_default"]
        if "next_sentence" in self.token_functions:
            names = ("text_a", "text_b")
            signatures["next_sentence"] = self._served(self.next_sentence, names)
        return signatures

    def _make_token_functions(self):
        functions = {"serving_default": self._at_first_mask, "embed": self._vectors}
        if "next_sentence" in self.task.heads:
            functions["next_sentence"] = self._is_next
        return functions

    def signature_specs(self) -> dict[str, SignatureSpec]:
        """Return the specification of each signature."""
        specs = super().signature_specs()
        masked_lm = dataclasses.replace(
            specs["serving_default"],
            description="Predictions for the token at the first [MASK] of a text.",
        )
        next_sentence = SignatureSpec(
            "The probability that the second text follows the first.",
            self.task.input_descriptions,
            {"is_next": OutputSpec("probability that the second text follows the first")},
        )
        return {**specs, "masked_lm": masked_lm, "next_sentence": next_sentence}

    def next_sentence(self, text_a: tf.Tensor, text_b: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return `is_next`, float32 `(B,)`, the probability that text_b follows text_a."""
        return self._run_in_chunks("next_sentence", self._packed(text_a, text_b))

    def _is_next(self, inputs):
        pooled_NH = self.model.encoder(inputs, pooled_only=True)["pooled"]
        return {"is_next": tf.nn.softmax(self.model.next_sentence(pooled_NH))[:, 0]}

    def _outputs(self, windows, texts):
        """Return token, string (B, K), and score, float32 (B, K); "" and 0 without [MASK]."""
        outputs = self._run_in_chunks("serving_default", windows.packed)
        entries_V = tf.constant(self.vocabulary.entries)
        has_mask_B1 = outputs["score"][:, :1] > 0
        return {
            "token": tf.where(has_mask_B1, tf.gather(entries_V, outputs["id"]), ""),
            "score": outputs["score"],
        }

    def _at_first_mask(self, inputs):
        """Return id, int32 (N, K), and score, float32 (N, K); 0 without [MASK]."""
        # Texts without a mask are read at [CLS], to keep the shape; their scores are set to 0.
        find = self._first_mask_of_flat if "row_splits" in inputs else self._first_mask_of_rows
        position_N, has_mask_N1 = find(inputs)
        logits_NV = self.model({**inputs, "masked_lm_positions": tf.expand_dims(position_N, 1)})
        probabilities_NV = tf.nn.softmax(logits_NV["masked_lm"][:, 0])
        score_NK, id_NK = tf.math.top_k(probabilities_NV, NUM_PREDICTIONS)
        return {"id": id_NK, "score": tf.where(has_mask_N1, score_NK, 0.0)}

    def _first_mask_of_flat(self, inputs):
        """Return the index of each text's first mask, int32 (N,), and whether there is one."""
        splits, ids_T = inputs["row_splits"], inputs["input_ids"]
        count = tf.size(splits) - 1
        (mask_M,) = tf.unstack(tf.where(ids_T[: splits[-1]] == self.vocabulary[MASK]), axis=1)
        text_M = tf.searchsorted(splits, tf.cast(mask_M, tf.int32), side="right") - 1
        first_N = tf.math.unsorted_segment_min(mask_M, text_M, count)
        has_mask_N = first_N < tf.size(ids_T, tf.int64)
        position_N = tf.where(has_mask_N, tf.cast(first_N, tf.int32), splits[:-1])
        return position_N, has_mask_N[:, tf.newaxis]

    def _first_mask_of_rows(self, inputs):
        """Return the position of each text's first mask, int32 (N,), and whether there is one.

        It is that in the text's row, or, with several texts per row, among all tokens.
        """
        ids_NL, index_NL = inputs["input_ids"], inputs.get("token_indices")
        if index_NL is not None:
            ids_NL = tf.gather(tf.reshape(ids_NL, [-1]), tf.maximum(index_NL, 0))
            ids_NL = tf.where(index_NL < 0, -1, ids_NL)
        # Padding has another id. GPUs have no argmax of integers.
        is_mask_NL = tf.cast(ids_NL == self.vocabulary[MASK], tf.float32)
        has_mask_N1 = tf.reduce_max(is_mask_NL, axis=1, keepdims=True) > 0
        position_N = tf.argmax(is_mask_NL, axis=1, output_type=tf.int32)
        if index_NL is not None:
            position_N = tf.maximum(tf.gather(index_NL, position_N, batch_dims=1), 0)
        return position_N, has_mask_N1


def _token_indices(inputs):
    """Return the index of each token of a text among all tokens, int32 `(B, L)`; -1 at padding."""
    if "row_splits" in inputs:
        splits = inputs["row_splits"]
        return tf.ragged.range(splits[:-1], splits[1:]).to_tensor(-1)
    if "token_indices" in inputs:
        return inputs["token_indices"]
    mask_BL = inputs["input_mask"]
    index_BL = tf.reshape(tf.range(tf.size(mask_BL)), tf.shape(mask_BL))
    return tf.where(mask_BL > 0, index_BL, -1)


@keras.saving.register_keras_serializable("bert_tf")
class MaskedLanguageModel(TaskModel):
    """Masked language model: the most probable tokens at the first [MASK] of a text.

        model = MaskedLanguageModel.from_pretrained(PATH)
        model.fit(["Paris is the capital of France."], epochs=1)
        model.fill_masks("The capital of France is [MASK].", top_k=3)[0]["token"]

    `fit`, `train` and `evaluate` take texts without labels. 15% of the tokens are predicted: 80% of
    these are replaced by [MASK], 10% by another token, and 10% are kept. The masks are a function
    of the model's seed, the epoch and the row (in a dataset of strings, the text), drawn anew in
    each epoch; those of an evaluation are always the same. The metrics are accuracy and perplexity.
    The pooler and the next sentence head keep their weights.

    A run directory of `train` records max_seq_length and the options in train.json; of others,
    `load_model` takes all positions.

    Options of `from_pretrained`:
        next_sentence: Whether next sentence prediction is trained, too, on datasets of batches of
            `bert_tf.pretraining.model.to_batch`, which contain the masks; texts are refused.
            Weights without this head get a new one.
        whole_word_mask: Whether masks are of whole words instead of single pieces.
    """

    task_class = MaskedLmTask
    options = ("next_sentence", "whole_word_mask")
    pipeline_class = MaskedLmPipeline

    @classmethod
    def from_weights(
        cls, pretrained: PretrainedWeights, task: Task, *, seed: int = 0, **kwargs: Any
    ) -> Self:
        """Create a model with pretrained weights; see `TaskModel.from_weights`.

        Raises:
            UserError: If they have no masked language model head.
        """
        check_head(pretrained)
        model = super().from_weights(pretrained, task, seed=seed, **kwargs)
        if not pretrained.has_trained_pooler and "next_sentence" not in model.task.losses:
            model.record["has_trained_pooler"] = False
        return model

    def _preprocessed(self, x, y=None, sample_weight=None, factors_C=()):
        if y is not None:
            raise UserError("x: expected a dataset of texts without labels, which are tokens of x")
        inputs = super()._preprocessed(x)
        (texts,) = named(x, self.task.input_names).values()
        numbers = tf.strings.to_hash_bucket_fast(tf.reshape(texts, [-1]), 2**62)
        keys_B = masking.keys(self.seed, self._epoch, numbers)
        return self.task.draw(self.vocabulary, self.task.max_seq_length)(inputs, keys_B)

    def _stream(self, dataset, class_weight):
        if class_weight is not None:
            class_factors(self.task, class_weight)  # Raises UserError.
        dataset = dataset.map(
            self.preprocess, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _checked(self, x, y=None, sample_weight=None):
        spec = x.element_spec if isinstance(x, tf.data.Dataset) else None
        if isinstance(spec, tuple) and isinstance(spec[1], Mapping):
            if set(spec[1]) != set(self.task.losses):
                raise UserError(
                    f"x: the dataset has labels of {', '.join(spec[1])}; expected those of "
                    f"{', '.join(self.task.losses)}; next_sentence=True of from_pretrained trains "
                    "next sentence prediction, too"
                )
        return super()._checked(x, y, sample_weight)

    def fill_masks(self, text: str, top_k: int = 5) -> list[Candidates]:
        """Return the `top_k` most probable tokens at each "[MASK]" of a text, best first.

        Raises:
            UserError: If the text has no mask or too many tokens, or `top_k` is out of range.
        """
        return fill_masks(self.network, self.serving.pipeline.tokenizer, text, top_k)

    def predict_next_sentence(self, text_a: Any, text_b: Any) -> np.ndarray:
        """Return the probability that each text_b follows its text_a, float32 `(N,)`.

        Args:
            text_a: N strings.
            text_b: N strings.

        Raises:
            UserError: If the weights have no such head, as of BertForMaskedLM, and `fit` has not
                trained one.
        """
        if "next_sentence" not in self.serving.signatures:
            raise UserError(
                "predict_next_sentence: the weights have no next sentence head; load others, or "
                "train both heads with fit"
            )
        columns = columns_of((text_a, text_b), ("text_a", "text_b"))
        return self.serving.call("next_sentence", columns)["is_next"]
