"""Ranking: order the texts of a query by relevance, as a cross-encoder (Nogueira and Cho 2019).

Each text is encoded as [CLS] query [SEP] text [SEP] and gets one logit, whose order is the ranking.
The binary loss (cross-entropy per text) makes its sigmoid a probability of relevance; the listwise
loss (softmax over the texts of a query; Cao et al. 2007) compares texts of the same query alone.

Shape suffixes: B queries, C texts of the query that has most, S samples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.train.losses import (
    listwise_binary_cross_entropy,
    listwise_binary_divergence,
    listwise_softmax_cross_entropy,
    softmax_divergence,
)
from bert_tf.weights.heads import is_ranker
from tasks.base.task import (
    ChoiceTask,
    Loss,
    OutputSpec,
    check_choice,
    check_positive,
    top2_gap,
)
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.rows import FileRows, Source
from tasks.data.windows import Windows
from tasks.graph.heads import ChoiceModel
from tasks.metrics.checks import finite
from tasks.metrics.retrieval import CUTOFF, ranked, retrieval_metrics
from tasks.model.task_model import TaskModel

# By name: loss, loss of distillation, and activation of the served scores.
LOSSES = {
    "binary": (listwise_binary_cross_entropy, listwise_binary_divergence, "sigmoid"),
    "listwise": (listwise_softmax_cross_entropy, softmax_divergence, "identity"),
}
ACTIVATIONS = {"sigmoid": tf.sigmoid, "identity": tf.identity}
EQUAL = 1e-4  # Closer logits count as ties, so that rounding does not decide their order.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingTask(ChoiceTask):
    """Queries with any number of texts.

    An empty string is a missing text: its score is 0 and the order does not contain it.

    Attributes:
        ranking_loss: A key of LOSSES.
        texts_per_query: Maximum texts of a query in training.
        activation: A key of ACTIVATIONS.
    """

    ranking_loss: str = "binary"
    texts_per_query: int = 16
    activation: str = "sigmoid"

    kind = "ranking"
    description = "Ranks texts by their relevance to a query."
    best_metric = f"ndcg@{CUTOFF}"
    has_lists_of_labels = True
    input_descriptions = {
        "query": "query that the texts are ranked for",
        "texts": 'texts to rank; rows with fewer texts than others are padded with ""',
    }
    input_names = ("query", "texts")
    INPUT_RANKS = {"texts": 2}
    fillers = {"scores": 0.0}

    def __post_init__(self) -> None:
        for name, known in (("ranking_loss", LOSSES), ("activation", ACTIVATIONS)):
            check_choice(name, getattr(self, name), known)
        check_positive("texts_per_query", self.texts_per_query)

    @classmethod
    def from_data(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from options; it does not depend on the training file."""
        return cls.from_options(max_seq_length=max_seq_length, **options)

    @classmethod
    def from_options(cls, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from options; the activation follows from the loss by default."""
        *_, activation = LOSSES.get(options.get("ranking_loss", "binary"), (None, "sigmoid"))
        return cls(max_seq_length=max_seq_length, **{"activation": activation, **options})

    @classmethod
    def options_from(
        cls, source: Mapping[str, Any], given: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the activation of a ranker or cross-encoder, unless the loss gives it no level."""
        if not is_ranker(source) or "activation" not in source:
            return {}
        is_listwise = given.get("ranking_loss") == "listwise"
        return {} if is_listwise else {"activation": source["activation"]}

    @property
    def outputs(self) -> Mapping[str, OutputSpec]:  # type: ignore[override]
        """Scores and order; scores are log-odds if there is no activation."""
        return {
            "scores": OutputSpec(
                "score of each text, higher if it is more relevant; 0 for a missing text",
                in_near_ties=True,
                is_log_odds=self.activation == "identity",
            ),
            "order": OutputSpec(
                "indices of the texts, from 0, the best first; -1 for missing texts",
                compared="first",
            ),
        }

    @property
    def losses(self) -> Mapping[str, Loss]:
        """The loss of `ranking_loss`."""
        return {"score": LOSSES[self.ranking_loss][0]}

    @property
    def soft_losses(self) -> Mapping[str, Loss]:
        """The divergence of the same form."""
        return {"score": LOSSES[self.ranking_loss][1]}

    def label_of(self, label: list[str]) -> list[float]:
        """Return the relevance of each text.

        Raises:
            ValueError: If one is not a finite number.
        """
        return [_number(text) for text in label]

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> list[float]:
        """Return the relevance of each text."""
        expected = len(texts["texts"])
        if not isinstance(value, list | tuple | np.ndarray) or len(value) != expected:
            raise ValueError(
                f"relevance {value!r:.80}: expected a list of {expected} numbers, one per text"
            )
        return [_number(number) for number in value]

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the queries with at most `texts_per_query` texts each.

        At least half of them are irrelevant, if there are as many; in their order, which is that of
        a search in mined files.
        """
        texts, labels = [], []
        rows = zip(examples.texts["texts"], examples.labels, strict=True)
        for texts_C, labels_C in rows:
            kept = _kept(texts_C, labels_C, self.texts_per_query)
            texts.append([texts_C[index] for index in kept])
            labels.append([labels_C[index] for index in kept])
        return dataclasses.replace(
            examples, texts={**examples.texts, "texts": texts}, labels=labels
        )

    def as_training_rows(self, examples: Examples) -> Examples:
        """Return the queries with their first `texts_per_query` texts each."""
        rows = examples.texts["texts"]
        texts = [[text for text in texts_C if text][: self.texts_per_query] for texts_C in rows]
        return dataclasses.replace(examples, texts={**examples.texts, "texts": texts})

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return the relevance, float32 `(S, C)`, and the weights of queries, float32 `(S,)`.

        With the binary loss, a mean over the texts of a query, the weight is their number, so that
        all texts count alike. With the listwise loss it is 1, or 0 without a relevant text.
        """
        width = int(np.max(np.asarray(windows.choice_W), initial=0)) + 1
        relevance_SC = np.zeros((len(examples), width), np.float32)
        for row, labels in enumerate(examples.labels):
            relevance_SC[row, : len(labels)] = labels[:width]
        if self.ranking_loss == "binary":
            weights_S = np.bincount(windows.example_W, minlength=len(examples))
        else:
            weights_S = np.any(relevance_SC > 0, axis=1)
        return {"score": relevance_SC}, {"score": weights_S.astype(np.float32)}

    def soft_weights(self, windows: Windows, num_samples: int) -> Arrays:
        """Return the weights of queries without labels, as those of `targets`."""
        if self.ranking_loss == "listwise":
            return super().soft_weights(windows, num_samples)
        counts = np.bincount(windows.example_W, minlength=num_samples)
        return {"score": counts.astype(np.float32)}

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning per kind of query whose metrics do not depend on the model."""
        total = f"of {len(data.examples):,} queries have"
        queries = zip(data.examples.labels, data.examples.texts["texts"], strict=True)
        labels = [
            [label for label, text in zip(*of_query, strict=True) if text] for of_query in queries
        ]
        without = sum(not any(value > 0 for value in of_query) for of_query in labels)
        equal = sum(len(set(of_query)) == 1 and of_query[0] > 0 for of_query in labels)
        lines = {
            "no relevant text; they count as 0 in the metrics": without,
            "only texts of equal relevance; any order of them counts as 1 in ndcg and mrr": equal,
        }
        return [f"{count:,} {total} {line}" for line, count in lines.items() if count]

    def build_model(self, config: BertConfig, dtype: str = "float32") -> ChoiceModel:
        """Return the encoder with one logit per text."""
        return ChoiceModel(config, output="score", name=self.kind, dtype=dtype)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return `scores`, float32 `(B, C)`, and `order`, int32 `(B, C)`."""
        logits_BC = outputs["score"]
        is_missing_BC = _is_missing(logits_BC)
        scores_BC = ACTIVATIONS[self.activation](logits_BC)
        order_BC = tf.argsort(tf.round(logits_BC / EQUAL), direction="DESCENDING", stable=True)
        # Missing texts come last.
        count_B1 = tf.reduce_sum(tf.cast(~is_missing_BC, tf.int32), axis=1, keepdims=True)
        is_text_BC = tf.range(tf.shape(logits_BC)[1]) < count_B1
        return {
            "scores": tf.where(is_missing_BC, 0.0, scores_BC),
            "order": tf.where(is_text_BC, order_BC, -1),
        }

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the gap between the two best texts, as probabilities, `(B,)`.

        Scores without activation have no unit; their softmax is the probability to be the best.
        """
        to_probabilities = tf.sigmoid if self.activation == "sigmoid" else tf.nn.softmax
        # top2_gap needs two values; queries may have fewer texts.
        return top2_gap(tf.pad(to_probabilities(outputs["score"]), [[0, 0], [0, 2]]))

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove the texts that a batch adds."""
        order = [index for index in row["order"] if index >= 0]
        return {**row, "scores": row["scores"][: max(order, default=-1) + 1], "order": order}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the metrics of `tasks.metrics.retrieval` over the queries.

        Raises:
            UserError: If a score is NaN or infinite.
        """
        finite(outputs["score"])  # NaN has no order: it would leave the texts as they are.
        relevance, rankings = {}, {}
        rows = zip(data.labels["score"], outputs["score"], strict=True)
        for number, (labels_C, logits_C) in enumerate(rows):
            there = np.flatnonzero(~_is_missing(logits_C)).tolist()
            relevance[number] = dict(zip(there, labels_C[there].tolist(), strict=True))
            rankings[number] = ranked(dict(zip(there, logits_C[there].tolist(), strict=True)))
        return retrieval_metrics(relevance, rankings)


def _number(value):
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= float(np.finfo(np.float32).max):  # NaN, too.
        raise ValueError(f"relevance {value!r:.80}: expected a number")
    return number


def _is_missing(logits):
    """Return which texts are missing. Compared like this, NaN is not."""
    return logits <= MASKED_SCORE


def _kept(texts, labels, limit):
    """Return the indices of the texts of a query that are trained on, in their order."""
    there = [index for index, text in enumerate(texts) if text]
    relevant = [index for index in there if labels[index] > 0]
    others = [index for index in there if labels[index] <= 0]
    relevant.sort(key=lambda index: -labels[index])  # Stable.
    count = max(limit - len(others), limit // 2, 1)
    relevant = relevant[:count]
    return sorted([*relevant, *others[: limit - len(relevant)]])


@keras.saving.register_keras_serializable("bert_tf")
class TextRanker(TaskModel):
    """Ranker of the texts of a query by relevance, also of a cross-encoder with one logit.

        rows = {"query": ["opening hours"], "texts": [["It rained.", "We open at nine."]]}
        model = TextRanker.from_pretrained(PATH)
        model.fit(rows, [[0, 1]], epochs=1)
        model.predict(rows)["order"]  # int32 (1, 2)

    Rows have the columns query, a string, and texts, a list of strings. Labels of `fit` are lists
    of the relevance of each text, from 0; grades above 1 count as 1 in the binary loss.

    Options of `from_pretrained`:
        ranking_loss: "binary" or "listwise".
        texts_per_query: Maximum texts of a query in training.
        activation: "sigmoid" or "identity", of the scores; by default identity with the listwise
            loss; otherwise that of a cross-encoder whose head is kept, else sigmoid.
    """

    task_class = RankingTask
    options = ("ranking_loss", "texts_per_query", "activation")
