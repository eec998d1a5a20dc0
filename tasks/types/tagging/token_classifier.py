"""Tagging: entities of a text, one BIO label per token (Devlin et al. 2019, 5.3; no CRF).

Which tokens have a label is defined in entity_labels.py. A text that is too long is split into
windows; each of its tokens is trained, scored and predicted in the window with most context.

Shape suffixes: B texts, W windows of them, (L) tokens of a window, C labels, T tokens of all texts.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import softmax_cross_entropy, softmax_divergence
from tasks.base.plots import MAX_LABELS, Plot, draw_bars
from tasks.base.task import OutputSpec, Task, Tokenize, cut_lists, described
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import as_list, named, without_axis
from tasks.data.readers.rows import FileRows, Source, as_label, raise_bad_rows
from tasks.data.readers.tagged import Entity, WordTags, entities_of, to_bio
from tasks.data.windows import Windows, pack_windows
from tasks.graph.heads import TokenModel
from tasks.metrics.entities import entity_scores, strict_f1
from tasks.model.task_model import TaskModel
from tasks.types.tagging.entity_labels import (
    BioLabels,
    TokenLabels,
    first_pieces,
    join_words,
    label_spans,
    label_words,
    word_predictions,
)
from tasks.types.tagging.entity_spans import (
    entities,
    in_text_order,
    in_windows,
    min_top2_gap,
    texts_tokens,
)

FEW_TYPES = 20  # With more entity types there are no metrics per type.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggingTask(Task):
    """Entity tagging; an example's label is `WordTags` or a list of entities."""

    labels: tuple[str, ...]  # BIO tags, O first.
    doc_stride: int = described("tokens between the starts of the windows of a longer text")
    text_column: str = "text"  # In tables.

    kind = "tagging"
    description = "Extracts the entities of a text: their text, type and position."
    outputs = {
        "entity_text": OutputSpec("text of each entity, as in the input"),
        "entity_type": OutputSpec("type of each entity"),
        "entity_start": OutputSpec("start of each entity, in characters; -1 for padding"),
        "entity_end": OutputSpec("end of each entity (exclusive), in characters; -1 for padding"),
        "entity_score": OutputSpec("confidence of each entity, from 0 to 1; -1 for padding"),
        "num_entities": OutputSpec("number of entities; entries after it are padding"),
    }
    best_metric = "f1"
    input_names = ("text",)
    has_lists_of_labels = True
    has_windows = True
    needs_offsets = True
    accuracies = ("tag",)
    losses = {"tag": softmax_cross_entropy}
    soft_losses = {"tag": softmax_divergence}

    @classmethod
    def from_data(
        cls,
        data: Source | FileRows,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        doc_stride: int | None = None,
        text_columns: Sequence[str] = ("text",),
        **options: Any,
    ) -> Self:
        """Create the task from a training file, by default with its entity types, sorted.

        `labels` are entity types, or BIO tags with O; `doc_stride` is half a window by default.
        Raises UserError if the file contains no entity.
        """
        (text_column,) = text_columns
        task = cls(
            max_seq_length=max_seq_length,
            labels=(),
            doc_stride=doc_stride or max((max_seq_length - 2) // 2, 1),
            text_column=text_column,
            **options,
        )
        found = set()
        for row in raise_bad_rows(task.iter_rows(data, labelled=True)):
            found |= _types(row.label)
        if not found:
            raise UserError(f"{data}: expected at least one entity to train on, received none")
        names = tuple(map(as_label, labels)) or sorted(found)
        return dataclasses.replace(task, labels=BioLabels.of_names(names, "--labels").labels)

    @classmethod
    def from_options(
        cls,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        doc_stride: int | None = None,
        **options: Any,
    ) -> Self:
        """Create the task from entity types, or from BIO tags with O."""
        names = [as_label(str(label)) for label in as_list(labels, "labels")]
        if not names:
            raise UserError("labels: expected entity types, in a list, received none")
        return cls(
            max_seq_length=max_seq_length,
            labels=BioLabels.of_names(names).labels,
            doc_stride=doc_stride or max((max_seq_length - 2) // 2, 1),
            **options,
        )

    @functools.cached_property
    def bio(self) -> BioLabels:
        """The labels as `BioLabels`."""
        return BioLabels(self.labels)

    def summary(self) -> str:
        """Return the entity types, for the log."""
        return f"; entities {', '.join(self.bio.types)}"

    def columns(self, x: Any) -> dict[str, list]:
        """Return texts by input name; lists of words are joined by spaces."""
        columns = named(x, self.input_names)
        rows = as_list(without_axis(columns["text"]), "text")
        return super().columns(
            {"text": [_joined(row, f"x: text[{n}]") for n, row in enumerate(rows)]}
        )

    def encode_labels(
        self,
        values: Sequence[Any],
        texts: Mapping[str, Sequence[Any]],
        what: str = "y[{}]",
        is_batch: bool = False,
    ) -> list:
        """Convert the labels of rows; see `Task.encode_labels`.

        All rows have entities, or all have a tag per word; [] may be either.
        """
        labels = super().encode_labels(values, texts, what, is_batch)
        if not any(isinstance(label, WordTags) for label in labels):
            return labels
        for row, label in enumerate(labels):
            if not isinstance(label, WordTags):
                if label or texts["text"][row]:
                    raise UserError(
                        f"{what.format(row)}: expected a tag per word, as in other rows, received "
                        f"{values[row]!r:.80}"
                    )
                labels[row] = WordTags([], [])
        return labels

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> WordTags | list[Entity]:
        """Return entities, given as dicts with start, end and type, or one tag per word."""
        label: WordTags | list[Entity]
        if isinstance(value, WordTags):
            label = value
        elif (value := as_list(value, "label")) and all(isinstance(tag, str) for tag in value):
            words = texts["text"].split(" ")
            if len(words) != len(value):
                raise ValueError(f"expected {len(words)} tags, one per word, received {len(value)}")
            label = WordTags(words, to_bio(value))
        else:
            label = entities_of({"entities": value}, len(texts["text"]))
        return self.label_of(label)

    def label_of(self, label: WordTags | list[Entity]) -> WordTags | list[Entity]:
        """Return the label; raises ValueError at an entity type that the task does not have."""
        unknown = sorted(_types(label).difference(self.bio.types))
        if unknown:
            known = ", ".join(self.bio.types)
            raise ValueError(f"entity type {unknown[0]!r:.80}: expected one of {known}")
        return label

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize texts into overlapping windows; `is_first` marks tokens that have labels."""
        tokens = tokenize(texts["text"])
        windows = pack_windows(None, tokens, vocabulary, self.max_seq_length, self.doc_stride)
        ids = windows.packed.input_ids
        is_first = tf.gather(tf.constant(first_pieces(vocabulary)), ids.flat_values)
        return windows._replace(is_first=ids.with_flat_values(is_first))

    def targets(
        self, examples: Examples, windows: Windows
    ) -> tuple[dict[str, tf.RaggedTensor], dict[str, tf.RaggedTensor]]:
        """Return label ids and weights per token, ragged `(W, (L))`.

        The weight is 1 at labelled tokens in their window of most context, otherwise 0.
        """
        # Labels are negative at tokens without a label and outside the window of most context.
        labels = in_windows(windows, self.token_labels(examples, windows)[0].labels)
        return (
            {"tag": tf.maximum(labels, 0)},
            {"tag": labels.with_flat_values(tf.cast(labels.flat_values >= 0, tf.float32))},
        )

    def soft_weights(self, windows: Windows, num_samples: int) -> dict[str, tf.RaggedTensor]:
        """Return 1 at the first token of each word, in its window of most context, otherwise 0."""
        assert windows.is_first is not None and windows.is_max_context is not None
        is_counted = windows.is_first.flat_values & windows.is_max_context.flat_values
        return {"tag": windows.is_first.with_flat_values(tf.cast(is_counted, tf.float32))}

    def build_model(self, config: BertConfig, dtype: str = "float32") -> TokenModel:
        """Return the encoder with one logit per token and label."""
        return TokenModel(config, len(self.labels), name=self.kind, dtype=dtype)

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Count words and entities that tokens cannot represent; warn if there is no entity."""
        _, warnings = self.token_labels(data.examples, data.windows)
        if not any(_types(item) for item in data.examples.labels):
            warnings.append("no row has an entity: precision, recall and F1 cannot be measured")
        return warnings

    def token_labels(self, examples: Examples, windows: Windows) -> tuple[TokenLabels, list[str]]:
        """Return labels per token, and warnings about labels that tokens cannot represent."""
        bio, texts, items = self.bio, examples.texts["text"], examples.labels
        tokens, is_first_T = texts_tokens(windows, len(texts))
        is_first_T = is_first_T.numpy()
        if isinstance(items[0], WordTags):
            words = join_words([item.words for item in items])
            numbers = {label: number for number, label in enumerate(bio.labels)}
            ids_N = np.array([numbers[tag] for item in items for tag in item.tags], np.int32)
            labelled = label_words(bio, words, tokens, ids_N, is_first_T)
            missing = int(np.sum(labelled.firsts < 0))
            counts = {"words have no token; they are predicted as O": missing}
            count = len(ids_N)
        else:
            labelled, num_widened, num_lost = label_spans(bio, texts, tokens, items, is_first_T)
            counts = {
                "entities begin or end inside a token; they are extended to all of it": (
                    num_widened
                ),
                "entities have no token of their own; they are skipped": num_lost,
            }
            count = sum(map(len, items))
        return labelled, [f"{n} of {count} {what}" for what, n in counts.items() if n]

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return the entities per text (`tasks.types.tagging.entity_spans.entities`)."""
        return entities(texts["text"], windows, outputs["tag"], self.bio)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the smallest margin of any token of a text, `(B,)`."""
        return min_top2_gap(windows, outputs["tag"], tf.size(predictions["num_entities"]))

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep the first `num_entities` entries of each list."""
        return cut_lists(row, row["num_entities"])

    def metric_inputs(self, outputs: Arrays) -> Arrays:
        """Return the most likely labels `(W, L)`, int16 if possible.

        The logits of a million windows would take gigabytes.
        """
        is_few = len(self.labels) < 2**15
        return {"tag": np.argmax(outputs["tag"], axis=-1).astype(np.int16 if is_few else np.int32)}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return entity-level F1, precision and recall, and the accuracy of tags.

        Also "strict_f1", for the strict reading of tags, and "f1_TYPE" with at most FEW_TYPES
        types.
        """
        gold, predicted = self._tags(data, outputs)
        scores = entity_scores(gold, predicted)
        hits = [
            tag == other
            for tags, others in zip(gold, predicted, strict=True)
            for tag, other in zip(tags, others, strict=True)
        ]
        of_types = scores["types"] if len(self.bio.types) <= FEW_TYPES else {}
        return {
            **{name: scores[name] for name in ("f1", "precision", "recall")},
            "strict_f1": strict_f1(gold, predicted),
            "accuracy": float(np.mean(hits)) if hits else 0.0,
            **{f"f1_{name}": metrics["f1"] for name, metrics in of_types.items()},
        }

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return precision, recall and F1 of entities per type."""
        types = entity_scores(*self._tags(data, outputs))["types"]
        if not 0 < len(types) <= MAX_LABELS:
            return {}
        names = ("precision", "recall", "f1")
        values = {name: [of_type[name] for of_type in types.values()] for name in names}
        return {"entities": lambda axes: draw_bars(axes, list(types), values)}

    def _tags(self, data, outputs):
        """Return gold and predicted tags per sentence."""
        bio, sentences = self.bio, data.examples.labels
        labelled, _ = self.token_labels(data.examples, data.windows)
        predictions_T = in_text_order(data.windows, outputs["tag"]).numpy()
        predicted = word_predictions(bio, predictions_T, labelled)
        if isinstance(sentences[0], WordTags):
            # The file's own tags, so that entities of words without a token count as missed.
            return [sentence.tags for sentence in sentences], predicted
        # Spans are compared at token borders, since the model cannot predict others.
        return word_predictions(bio, labelled.labels, labelled), predicted


def _joined(row, what):
    """Return a text, or the words of a list as a text."""
    if isinstance(row, str) or not hasattr(row, "__len__"):
        return row
    words = as_list(row, what)
    for word in words:
        if not isinstance(word, str):
            raise UserError(f"{what}: expected words, received {type(word).__name__} {word!r:.60}")
    return " ".join(words)


def _types(label):
    """Return the entity types of a label."""
    if isinstance(label, WordTags):
        return {tag.partition("-")[2] for tag in label.tags} - {""}
    return {name for _, _, name in label}


@keras.saving.register_keras_serializable("bert_tf")
class TokenClassifier(TaskModel):
    """Tagger of entities in texts of any length.

    Options of `from_pretrained`:
        labels: Entity types, or BIO tags with O.
        doc_stride: Tokens between the starts of two windows; by default half a window.

    Labels of `fit` are, per text, a list of {"start", "end", "type"} in characters, the end
    exclusive; or, per list of words, a list of tags.
    """

    task_class = TaggingTask
    options = ("labels", "doc_stride")
