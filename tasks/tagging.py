"""Tagging: entities of a text, a BIO label a token (Devlin et al. 2019, 5.3; no CRF).

What carries a label is said in entity_labels.py. A text that is too long goes through windows, and
each of its tokens is learned, measured and answered in the one that shows most around it.

Legend: B texts, W windows of them, (L) tokens of a window, C labels, T tokens of all texts.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train.losses import softmax_cross_entropy
from tasks.entity_labels import (
    BioLabels,
    entity_type,
    first_pieces,
    join_words,
    label_spans,
    label_words,
    word_predictions,
)
from tasks.entity_spans import entities, in_text_order, in_windows, min_top2_gap, texts_tokens
from tasks.examples import Example
from tasks.heads import TokenClassifier
from tasks.metrics.entities import entity_scores
from tasks.readers.records import BadRow, as_label, raise_bad_rows
from tasks.readers.tagged import TaggedSentence, read_tagged
from tasks.task import Task
from tasks.windows import pack_windows

FEW_TYPES = 20  # So many have a figure each among the metrics.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tagging(Task):
    """One tagging task. `labels` are its BIO tags, O first; `doc_stride` tokens lie between
    windows.

    An example's label is what the file's form gives: a TaggedSentence or a TaggedText.
    """

    labels: tuple[str, ...]
    doc_stride: int
    text_column: str = "text"

    kind = "tagging"
    best_metric = "f1"
    input_names = ("text",)
    has_windows = True
    needs_offsets = True
    losses = {"tag": softmax_cross_entropy}

    @classmethod
    def from_data(cls, path, *, max_seq_length, labels=(), doc_stride=None, text_columns=("text",)):
        """The task that a training file shows: its types in order, or the types or tags given.

        By default windows overlap by half. Raises UserError if the file holds no entity.
        """
        (text_column,) = text_columns
        found = set()
        for item in raise_bad_rows(read_tagged(path, text_column=text_column)):
            found |= _types(item)
        if not found:
            raise UserError(f"{path}: not one entity in it; there is nothing to learn")
        labels = tuple(map(as_label, labels))
        bio = BioLabels(labels, "--labels") if "O" in labels else None
        bio = bio or BioLabels.of_types(labels or sorted(found))
        return cls(
            max_seq_length=max_seq_length,
            labels=bio.labels,
            doc_stride=doc_stride or max((max_seq_length - 2) // 2, 1),
            text_column=text_column,
        )

    @property
    def bio(self):
        return BioLabels(self.labels)

    def description(self):
        return f"; entities {', '.join(self.bio.types)}"

    def iter_examples(self, path, labelled):
        types = self.bio.types
        for item in read_tagged(path, labelled, self.text_column):
            if isinstance(item, BadRow):
                yield item
                continue
            unknown = sorted(_types(item).difference(types)) if labelled else ()
            if unknown:
                yield BadRow(
                    item.location,
                    f"entity type {unknown[0]!r:.80} is none of the task's: {', '.join(types)}",
                )
                continue
            text = " ".join(item.words) if isinstance(item, TaggedSentence) else item.text
            yield Example({"text": text}, item if labelled else None, item.location)

    def encode(self, texts, tokenize, vocabulary):
        tokens = tokenize(texts["text"])
        windows = pack_windows(None, tokens, vocabulary, self.max_seq_length, self.doc_stride)
        ids = windows.packed.input_ids
        is_first = tf.gather(tf.constant(first_pieces(vocabulary)), ids.flat_values)
        return windows._replace(is_first=ids.with_flat_values(is_first))

    def targets(self, examples, windows):
        labels = in_windows(windows, self._labelled(examples, windows)[0].labels)
        return (
            {"tag": tf.maximum(labels, 0)},
            {"tag": labels.with_flat_values(tf.cast(labels.flat_values >= 0, tf.float32))},
        )

    def build_model(self, config, dtype="float32"):
        model = TokenClassifier(config, len(self.labels), name=self.kind, dtype=dtype)
        model.build()
        return model

    def metric_inputs(self, outputs):
        """The likeliest labels [W, L]: the logits of a million windows would be gigabytes."""
        is_few = len(self.labels) < 2**15
        return {"tag": np.argmax(outputs["tag"], axis=-1).astype(np.int16 if is_few else np.int32)}

    def metrics(self, data, outputs):
        bio, sentences = self.bio, data.examples.labels
        labelled, _ = self._labelled(data.examples, data.windows)
        predictions_T = in_text_order(data.windows, outputs["tag"]).numpy()
        predicted = word_predictions(bio, predictions_T, labelled)
        if isinstance(sentences[0], TaggedSentence):
            gold = [sentence.tags for sentence in sentences]
        else:
            gold = word_predictions(bio, labelled.labels, labelled)

        scores = entity_scores(gold, predicted)
        hits = [
            tag == other
            for tags, others in zip(gold, predicted, strict=True)
            for tag, other in zip(tags, others, strict=True)
        ]
        of_types = scores["types"] if len(bio.types) <= FEW_TYPES else {}
        return {
            **{name: scores[name] for name in ("f1", "precision", "recall")},
            "strict_f1": entity_scores(gold, predicted, strict=True)["f1"],
            "accuracy": float(np.mean(hits)) if hits else 0.0,
            **{f"f1_{name}": metrics["f1"] for name, metrics in of_types.items()},
        }

    def label_warnings(self, data):
        return self._labelled(data.examples, data.windows)[1]

    def serving_outputs(self, texts, windows, outputs):
        return entities(texts["text"], windows, outputs["tag"], self.bio)

    def margin(self, predictions, windows, outputs):
        return min_top2_gap(windows, outputs["tag"], tf.size(predictions["num_entities"]))

    def strip_padding(self, row):
        return {
            name: value[: row["num_entities"]] if isinstance(value, list) else value
            for name, value in row.items()
        }

    def _labelled(self, examples, windows):
        """TokenLabels of the texts' tokens, and in lines what of the file they do not hold."""
        bio, texts, items = self.bio, examples.texts["text"], examples.labels
        tokens, is_first_T = texts_tokens(windows, len(texts))
        is_first_T = is_first_T.numpy()
        if isinstance(items[0], TaggedSentence):
            words = join_words([item.words for item in items])
            numbers = {label: number for number, label in enumerate(bio.labels)}
            ids_N = np.array([numbers[tag] for item in items for tag in item.tags], np.int32)
            labelled = label_words(bio, words, tokens, ids_N, is_first_T)
            missing = labelled.num_without_token
            counts = {"words leave no token; they are answered with O": missing}
            count = len(ids_N)
        else:
            spans = [item.entities for item in items]
            labelled, num_widened, num_lost = label_spans(bio, texts, tokens, spans, is_first_T)
            counts = {
                "entities begin or end inside a token; they are taken to hold all of it": (
                    num_widened
                ),
                "entities hold no token of their own; they are left out": num_lost,
            }
            count = sum(map(len, spans))
        return labelled, [f"{n} of {count} {what}" for what, n in counts.items() if n]


def _types(item):
    """The entity types of a TaggedSentence or TaggedText."""
    if isinstance(item, TaggedSentence):
        return {entity_type(tag, item.location) for tag in item.tags} - {None}
    return {name for _, _, name in item.entities}
