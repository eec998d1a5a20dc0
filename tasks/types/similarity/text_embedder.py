"""Embedder: one vector per text, from the tokens of an encoder, and similarities of vectors.

Shape suffixes: B or N texts or rows, M texts, C texts per row, G candidates, n rows of a block, D
size of a vector.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import keras
import numpy as np
import scipy.spatial
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model.bucketing import TOKENS_PER_CHUNK
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.tokenizer import Tokens, truncate_utf8
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import BatchLoss
from bert_tf.weights.sentence_transformers import FIELDS, pooled_size
from bert_tf.weights.sources import PretrainedWeights
from tasks.base.task import Loss, OutputSpec, SignatureSpec, TextTask, check_choice, described
from tasks.base.task_types import read_rows_of
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import as_list, columns_of, is_missing, without_axis
from tasks.data.readers.pairs import PAIR_COLUMNS, SCORED, negative_columns, score_column
from tasks.data.readers.rows import (
    BadRow,
    Example,
    FileRows,
    Source,
    as_label,
    raise_bad_rows,
)
from tasks.data.windows import Windows
from tasks.graph.heads import POOLING
from tasks.graph.pipeline import ROWS_PER_CALL, Pipeline
from tasks.metrics.checks import finite
from tasks.metrics.regression import pearson, spearman
from tasks.metrics.retrieval import normalized
from tasks.model.labelled_rows import positive
from tasks.model.task_model import TaskModel
from tasks.types.similarity.embedding_model import (
    ACTIVATIONS,
    LAYERS,
    SIMILARITIES,
    EmbeddingModel,
)
from tasks.types.similarity.losses import (
    LOSSES,
    NO_TEXT,
    embedding_loss,
    vector_distance,
)

BLOCK_ELEMENTS = 1 << 26  # Scores in memory at a time.
PAIR = ("text_a", "text_b")
# Options that the other losses do not use.
_OF_LOSSES = {
    "loss_temperature": ("contrastive", "cosent"),
    "symmetric": ("contrastive",),
    "triplet_margin": ("triplet",),
    "classes": ("contrastive",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityTask(TextTask):
    """One vector per text, or per pair of texts; for the other fields see `TextEmbedder`.

    Attributes:
        pair_columns: Columns of the two texts of a labelled row; found by their names if empty.
        negatives_column: Column of hard negatives; found by its name if `None`.
        classes: Whether labels given in Python are the classes of texts. In files, the columns say
            what a row is.
    """

    kind = "similarity"
    description = "Returns a vector for a text or for a pair of texts."
    outputs = {"embedding": OutputSpec("vector of the text or pair", is_vector=True)}

    layers: str = described("encoder layers that the vectors are taken from", "last")
    pooling: str = described("vector of a text from those of its tokens", "mean")
    dense_units: tuple[int, ...] = ()
    dense_activations: tuple[str, ...] = ()
    normalize: bool = described("whether vectors have the norm 1", False)
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = described("name of the prompt before every text", None)
    similarity: str = described("function that compares two vectors", "cosine")
    loss: str = "contrastive"
    loss_temperature: float = 0.05
    symmetric: bool = False
    triplet_margin: float = 5.0
    matryoshka_dims: tuple[int, ...] = ()
    pair_columns: tuple[str, ...] = ()
    negatives_column: str | None = None
    classes: bool = False

    def __post_init__(self) -> None:
        for name, known in (("layers", LAYERS), ("similarity", SIMILARITIES), ("loss", LOSSES)):
            check_choice(name, getattr(self, name), known)
        if not isinstance(self.pooling, str) or not set(self.pooling.split("+")) <= set(POOLING):
            raise UserError(
                f"pooling={self.pooling!r:.80}: expected one of {', '.join(POOLING)}, or several "
                "joined by +"
            )
        if not self.loss_temperature > 0:
            raise UserError(f"loss_temperature={self.loss_temperature}: expected a number > 0")
        # Lists are accepted in Python.
        for name in ("dense_units", "dense_activations", "matryoshka_dims"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("dense_units", "matryoshka_dims"):
            if any(type(size) is not int or size < 1 for size in getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)}: expected integers >= 1")
        if len(self.dense_activations) != len(self.dense_units) or not set(
            self.dense_activations
        ) <= set(ACTIVATIONS):
            raise UserError(
                f"dense_activations={self.dense_activations}: expected {len(self.dense_units)} of "
                f"{', '.join(ACTIVATIONS)}, one per dense layer"
            )
        if self.default_prompt is not None:
            self.prompt_text(self.default_prompt, "default_prompt")
            if len(self.text_columns) > 1:
                raise UserError(
                    f"default_prompt={self.default_prompt!r:.80}: expected none with pairs"
                )

    @classmethod
    def options_from(
        cls, source: Mapping[str, Any], given: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the pooling, dense layers, normalization and prompts of an embedder."""
        if source.get("kind") != cls.kind:
            return {}
        # --truncation has its own default, which cannot be told from a flag of that value.
        fields = [name for name in FIELDS if name in source and name != "truncation"]
        options = {name: source[name] for name in fields}
        # Layers of other sizes are new ones, which have the default activation.
        if "dense_units" in given and _sizes(given) != _sizes(source):
            options.pop("dense_activations", None)
        # That of single texts is none of pairs.
        prompts = given.get("prompts", source.get("prompts", {}))
        if given.get("pairs") or source.get("default_prompt") not in prompts:
            options.pop("default_prompt", None)
        return options

    @classmethod
    def from_data(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from a training file, whose columns choose the default of `loss`."""
        given = {"kind": cls.kind, **options}
        rows = data if isinstance(data, FileRows) else read_rows_of(given, data)
        first = next(iter(raise_bad_rows(rows)), None)
        is_scored = first is not None and len(first.texts["text"]) == 2 and first.label is not None
        # Texts for a teacher have no loss of their own: it says what dev rows are.
        is_alone = first is not None and len(first.texts["text"]) == 1 and first.label is None
        is_class = first is not None and len(first.texts["text"]) == 1 and not is_alone
        options.setdefault("classes", is_class)
        loss = options.setdefault("loss", "cosent" if is_scored else "contrastive")
        expected: tuple[str, ...] = ("contrastive", "triplet")
        what = "pairs without a score"
        if is_scored:
            what, expected = "pairs with a score", tuple(SCORED)
        elif is_class:
            what, expected = "texts of classes", ("contrastive",)
        if loss not in expected and not is_alone:
            raise UserError(f"--loss={loss}: expected {' or '.join(expected)} for {what}")
        column = options.get("negatives_column")
        others = raise_bad_rows(rows)  # Of a path, the first row has been read.
        if column and all(len(row.texts["text"]) < 3 for row in (first, *others) if row):
            raise UserError(f"--negatives_column={column}: {data} has no row with a text there")
        for name in ("dense_units", "matryoshka_dims"):
            if name in options:
                options[name] = _integers(name, options[name])
        if len(options.get("text_columns", ())) == 2:  # The model reads one text at a time.
            options["pair_columns"] = options.pop("text_columns")
        units = options.get("dense_units", ())
        if len(options.get("dense_activations", ())) != len(units):
            options["dense_activations"] = ("identity",) * len(units)
        defaults = {"normalize": True}
        task = cls(max_seq_length=max_seq_length, **{**defaults, **options})
        task._check_loss()
        return task

    @property
    def has_head(self) -> bool:
        """Whether there are dense layers, which are the head of an embedder."""
        return bool(self.dense_units)

    def summary(self) -> str:
        """Return which prompt the texts of a training get, if there are any."""
        if not self.prompts:
            return ""
        prompt = "no prompt" if self.default_prompt is None else f"prompt {self.default_prompt!r}"
        return f"; {prompt} before texts, of {', '.join(map(repr, self.prompts))}"

    @property
    def is_scored(self) -> bool:
        """Whether the labels are scores of pairs."""
        return self.loss in SCORED

    @property
    def best_metric(self) -> str:
        """Spearman's correlation of scored pairs, otherwise the mean reciprocal rank."""
        return "spearman" if self.is_scored else "mrr@10"

    @property
    def losses(self) -> Mapping[str, BatchLoss]:
        """The loss of the embeddings of a row."""
        loss = BatchLoss(
            embedding_loss,
            loss=self.loss,
            temperature=self.loss_temperature,
            symmetric=self.symmetric,
            margin=self.triplet_margin,
            sizes=self.matryoshka_dims,
        )
        return {"embedding": loss}

    @property
    def soft_losses(self) -> Mapping[str, Loss]:
        """The distance from the vectors of the teacher."""
        return {"embedding": functools.partial(vector_distance, similarity=self.similarity)}

    def can_learn_unlabelled(self, texts: Mapping[str, Any]) -> bool:
        """Whether a row is a text alone.

        Raises:
            UserError: If it is, and prefixes are to be trained.
        """
        is_alone = len(texts["text"]) == 1
        if is_alone and self.matryoshka_dims:
            # A prefix of a teacher's vector is a vector only if the teacher was trained for it.
            raise UserError(
                f"--matryoshka_dims={','.join(map(str, self.matryoshka_dims))}: expected none for "
                "texts without labels, which learn the teacher's complete vectors; labelled rows "
                "train prefixes"
            )
        return is_alone

    def as_training_rows(self, examples: Examples) -> Examples:
        """Return each text as a list of one."""
        return dataclasses.replace(
            examples, texts={"text": [[text] for text in examples.texts["text"]]}
        )

    def vector_size(self, config: BertConfig) -> int:
        """Return the size of the vectors."""
        if self.dense_units:
            return self.dense_units[-1]
        return pooled_size(config, self.layers, self.pooling)

    def labelled_columns(self, x: Any) -> dict[str, list]:
        """Return the texts of each row as a list: anchor, positive, negatives; or one text.

        Args:
            x: A tuple of anchors, positives and optionally negatives, texts or lists of them; a
                dict or DataFrame with the columns anchor, positive and negative or negatives, or
                text_a and text_b; or texts of classes.

        Raises:
            UserError: If x has other columns, an entry is no string, or a text is empty.
        """
        self._check_reads_one_text()
        names = PAIR_COLUMNS
        if isinstance(x, tuple):
            if len(x) not in (2, 3):
                raise UserError(
                    "x: expected (anchors, positives) or (anchors, positives, negatives), where "
                    f"negatives may be lists of texts; received {len(x)} columns"
                )
            x = dict(zip(("anchor", "positive", "negatives"), x, strict=False))
        there = _columns_there(x)
        if "text_a" in there:
            names = ("text_a", "text_b")
        if "anchor" in there or "text_a" in there:
            columns = columns_of(x, names)
            rows = [list(row) for row in zip(*columns.values(), strict=True)]
            for name in negative_columns(there):
                negatives = columns_of({name: _lists(x[name], name)}, (name,), (name,))[name]
                if len(negatives) != len(rows):
                    raise UserError(
                        f"x: expected {len(rows)} of {name}, one per row, received {len(negatives)}"
                    )
                rows = [
                    [*row, *filter(str.strip, more)]
                    for row, more in zip(rows, negatives, strict=True)
                ]
        elif "text" in there:
            rows = columns_of({"text": _lists(x["text"], "text")}, ("text",), ("text",))["text"]
        else:
            texts = as_list(without_axis(x), "text")
            if any(isinstance(text, list | tuple) for text in texts):
                raise UserError(
                    "x: expected texts, or a tuple of anchors, positives and optionally negatives; "
                    f"received a {type(x).__name__} of lists"
                )
            rows = [[text] for text in columns_of(texts, ("text",))["text"]]
        for number, row in enumerate(rows):
            if not row or not all(map(str.strip, row[:2])):
                raise UserError(f"x: row {number}: expected a text, received an empty string")
        return {"text": rows}

    def default_labels(self, x: Any, count: int) -> list:
        """Return no labels, for pairs of an anchor and its positive.

        Raises:
            UserError: If x has labels.
        """
        if name := score_column(_columns_there(x)):
            raise UserError(f"x: expected no column {name!r}; pass it as y, or remove it")
        return [None] * count

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> Any:
        """Return a score as a float, a class as a string, or None for a pair without a score."""
        num_texts = len(texts["text"])
        if self.classes:
            if num_texts > 1:
                raise ValueError(
                    f"expected a class and one text with classes=True, received {num_texts} texts; "
                    "pairs need a model without it"
                )
            if is_missing(value) or not isinstance(value, str | int | float):
                raise ValueError(f"expected a class, received {value}")
            value = as_label(str(value))
        elif num_texts == 1:
            example = "(texts_a, texts_b), scores" if self.is_scored else "(questions, answers)"
            raise ValueError(
                f"expected a pair of texts, received one text and {value!r:.80}; pass pairs as x, "
                f"as in fit({example}), and classes of texts with classes=True in from_pretrained"
            )
        self._check_label(value, num_texts)
        return float(value) if self.is_scored else value

    def label_of(self, label: Any) -> Any:
        """Return the score or class of a row of a file, see `encode_label`."""
        if label is None:
            return None
        if not self.is_scored:
            return as_label(label)
        try:
            score = float(label)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise ValueError(f"expected a number as the score, received {label!r:.80}")
        return score

    def iter_examples(self, data: Source | FileRows, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield the rows of a file; those whose label does not fit the loss are bad."""
        if labelled:
            self._check_reads_one_text()
        for row in super().iter_examples(data, labelled):
            if labelled and isinstance(row, Example):
                try:
                    self._check_label(row.label, len(row.texts["text"]))
                except ValueError as error:
                    row = BadRow(row.location, str(error))
            yield row

    def _check_reads_one_text(self):
        """Raise UserError if a vector is that of a pair, of which there are no labelled rows."""
        if len(self.text_columns) > 1:
            raise UserError(
                "pairs: an embedder of pairs of texts has no labelled rows; expected one of single "
                "texts"
            )

    def _check_label(self, label, num_texts):
        """Raise ValueError if a label does not fit the loss and the number of texts of its row."""
        if self.is_scored:
            if num_texts != 2 or isinstance(label, bool) or not isinstance(label, int | float):
                raise ValueError(
                    f"expected two texts and a number with loss={self.loss!r}, received "
                    f"{num_texts} and {label!r:.80}"
                )
            if not abs(label) <= float(np.finfo(np.float32).max):  # NaN, too.
                raise ValueError(f"expected a finite number of float32, received {label!r:.80}")
        elif num_texts == 1 and label is None:
            raise ValueError("expected a class per text, or pairs of texts, received texts alone")
        elif num_texts > 1 and label is not None:
            raise ValueError(
                f"expected no label for a pair with loss={self.loss!r}, received {label!r:.80}"
            )
        elif label == "":
            raise ValueError("expected a class, received an empty string")

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the examples.

        Raises:
            UserError: If nothing can be learned from the classes or scores.
        """
        if self.is_scored:
            self._check_scores(examples.labels)
        elif examples.labels and examples.labels[0] is not None:
            _check_classes(examples.labels)
        return examples

    def epoch_order(self, data: EncodedExamples, rng: np.random.Generator) -> np.ndarray:
        """Return rows `(N,)`; each text of a class is next to another one of it, drawn anew.

        They come in twos, and in three if a class has an odd number, so that a batch has as many
        classes as possible.
        """
        order, texts = super().epoch_order(data, rng), data.labels.get("embedding")
        if texts is None or texts.shape[1:] != (1,):
            return order
        # In distillation, texts without a class have the weight 0.
        class_N = np.where(data.weights["embedding"] > 0, texts[:, 0], NO_TEXT)
        order = order[np.argsort(class_N[order], kind="stable")]
        _, first_C, count_C = np.unique(class_N[order], return_index=True, return_counts=True)
        first_N = np.repeat(first_C, count_C)
        last_N = np.repeat(np.maximum(count_C // 2, 1) - 1, count_C)  # Number of the last group.
        group_N = first_N + np.minimum((np.arange(len(order)) - first_N) // 2, last_N)
        return order[np.argsort(rng.permutation(len(order))[group_N], kind="stable")]

    def _check_scores(self, scores):
        """Raise UserError if the loss cannot learn these scores."""
        if self.loss == "cosent" and len(set(scores)) == 1:
            raise UserError(
                "scores: expected different numbers, whose order loss='cosent' learns, received "
                f"{scores[0]} in every row"
            )
        for score in scores if self.loss == "cosine" else ():
            if abs(score) > 1 + 1e-4:  # Cosines are rounded.
                raise UserError(
                    f"score {score}: expected a number from -1 to 1 with loss='cosine'; divide the "
                    "scores by their maximum, or use loss='cosent'"
                )

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning if all scores are equal: correlations are 0 then."""
        scores = data.examples.labels
        if not self.is_scored or not len(set(scores)) == 1 < len(scores):
            return []
        return [f"all {len(scores)} rows have the same score; correlations do not measure a model"]

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return scores `(N,)`, or the numbers of the texts `(N, C)`, and weights of 1.

        A text of a class is a row of one. Equal numbers are texts of one class, or texts of the
        same tokens: a model cannot tell those apart, such as texts that differ in case alone.
        """
        rows, labels = examples.texts["text"], examples.labels
        weights = {"embedding": np.ones(len(rows), np.float32)}
        if self.is_scored:
            return {"embedding": np.array(labels, np.float32)}, weights
        assert windows.choice_W is not None  # As of all labelled rows.
        num_texts = 1 + int(np.max(windows.choice_W))
        if self.loss == "triplet" and num_texts < 3:
            raise UserError("loss='triplet': expected rows with negatives, received pairs")
        if num_texts == 1:
            _check_classes(labels)
        numbers = np.full((len(rows), num_texts), NO_TEXT, np.int32)
        ids = windows.packed.input_ids
        values_T, splits = np.asarray(ids.flat_values), np.asarray(ids.row_splits).tolist()
        known: dict[Any, int] = {}
        places = (np.asarray(of).tolist() for of in (windows.example_W, windows.choice_W))
        for window, (row, place) in enumerate(zip(*places, strict=True)):
            key = labels[row]
            if key is None:
                key = values_T[splits[window] : splits[window + 1]].tobytes()
            numbers[row, place] = known.setdefault(key, len(known))
        return {"embedding": numbers}, weights

    @classmethod
    def from_options(cls, *, max_seq_length: int, pairs: bool = False, **options: Any) -> Self:
        """Create the task from the options of `TextEmbedder.from_pretrained`.

        Dense layers without `dense_activations` have tanh, as in sentence-transformers. One value
        stands for a list of it.
        """
        for name in ("dense_units", "dense_activations", "matryoshka_dims"):
            if isinstance(options.get(name), int | str):
                options[name] = (options[name],)
        units = options.get("dense_units", ())
        if units and not options.get("dense_activations"):
            options["dense_activations"] = ("tanh",) * len(units)
        task = super().from_options(max_seq_length=max_seq_length, pairs=pairs, **options)
        task._check_loss()
        return task

    def _check_loss(self):
        """Raise UserError if an option is of another loss; warn if the margin is out of reach."""
        for name, losses in _OF_LOSSES.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.loss not in losses:
                raise UserError(
                    f"--{name}={value}: not used by --loss={self.loss}; expected "
                    f"--loss={' or '.join(losses)}"
                )
        has_length_1 = self.normalize or self.matryoshka_dims
        if self.loss == "triplet" and has_length_1 and self.triplet_margin >= 2:
            warnings.warn(
                f"triplet_margin={self.triplet_margin:g}: expected less than 2, such as 0.5: "
                "vectors of length 1 are at most 2 apart, so no triplet reaches this margin",
                stacklevel=2,
            )

    def prompt_text(self, name: str, argument: str = "prompt") -> str:
        """Return a prompt by its name; raises UserError, which names the argument."""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none, since the model has no prompts"
            raise UserError(f"{argument}={name!r:.80}: expected one of {known}")
        return self.prompts[name]

    def encode(
        self, texts: Tensors, tokenize: Callable[[tf.Tensor], Tokens], vocabulary: Vocabulary
    ) -> Windows:
        """Tokenize and truncate texts to one window each, with the default prompt before them.

        Texts `(N, C)` are those of labelled rows, padded with "".
        """
        if texts[self.input_names[0]].shape.rank == 2:
            texts_NC = texts["text"]
            indices_W2 = tf.cast(tf.where(texts_NC != ""), tf.int32)
            windows = self.encode(
                {"text": tf.gather_nd(texts_NC, indices_W2)}, tokenize, vocabulary
            )
            row_W, place_W = tf.unstack(indices_W2, axis=1)
            return windows._replace(example_W=row_W, choice_W=place_W)
        if self.default_prompt is None:
            return super().encode(texts, tokenize, vocabulary)
        prompt = tf.constant(self.prompts[self.default_prompt])
        return self.encode_prompted(texts, prompt, tokenize, vocabulary)

    def encode_prompted(
        self,
        texts: Tensors,
        prompt: tf.Tensor,
        tokenize: Callable[[tf.Tensor], Tokens],
        vocabulary: Vocabulary,
    ) -> Windows:
        """Tokenize texts after a prompt that replaces the default one.

        Args:
            texts: Strings `(N,)` by input name.
            prompt: String, `()` or `(N,)`.
            tokenize: As for `encode`. Offsets count characters of the text without the prompt; they
                are -1 for the tokens of the prompt.
            vocabulary: As for `encode`.
        """
        prompted = {name: tf.strings.join([prompt, values]) for name, values in texts.items()}
        windows = super().encode(prompted, tokenize, vocabulary)
        packed = windows.packed
        if packed.starts is None or packed.ends is None:
            return windows
        shift_B = tf.broadcast_to(
            tf.strings.length(prompt, unit="UTF8_CHAR"), tf.shape(packed.ends.row_lengths())
        )
        shift_T = tf.gather(shift_B, packed.ends.value_rowids())
        is_of_text_T = packed.ends.flat_values > shift_T

        def without_prompt(offsets):
            shifted_T = tf.maximum(offsets.flat_values - shift_T, 0)
            return offsets.with_flat_values(tf.where(is_of_text_T, shifted_T, -1))

        starts, ends = without_prompt(packed.starts), without_prompt(packed.ends)
        return windows._replace(packed=packed._replace(starts=starts, ends=ends))

    def build_model(self, config: BertConfig, dtype: str = "float32") -> EmbeddingModel:
        """Return the network; raises UserError if the encoder has too few layers."""
        expected = LAYERS[self.layers][0]
        if expected > config.num_hidden_layers:
            raise UserError(
                f"layers={self.layers}: requires {expected} layers, but the encoder has "
                f"{config.num_hidden_layers}"
            )
        model = EmbeddingModel(
            config,
            self.layers,
            self.pooling,
            self.dense_units,
            self.dense_activations,
            self.normalize,
            dtype,
            name=self.kind,
        )
        if any(size > model.vector_size for size in self.matryoshka_dims):
            raise UserError(
                f"matryoshka_dims={self.matryoshka_dims}: expected at most {model.vector_size}, "
                "the size of the vectors"
            )
        return model

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return correlations of scored pairs; otherwise how well texts find their positives."""
        labels, vectors = data.labels["embedding"], outputs["embedding"]
        if not self.is_scored:
            return ranks_of_positives(labels, vectors, self.similarity)
        compare = SIMILARITIES[self.similarity]
        scores = compare(tf.constant(vectors[:, 0]), tf.constant(vectors[:, 1])).numpy()
        return {"spearman": spearman(labels, scores), "pearson": pearson(labels, scores)}


def _columns_there(x):
    """Return the names of the columns of a dict or DataFrame, () of others."""
    return x if isinstance(x, Mapping) else getattr(x, "columns", ())


def _lists(column, name):
    """Return a column of texts, lists of texts, or missing values as lists."""
    rows = []
    for row in as_list(column, name):
        rows.append([] if is_missing(row) else [row] if isinstance(row, str) else row)
    return rows


def _check_classes(labels: Sequence[str]) -> None:
    """Raise UserError if no text has another one of its class, or all texts have the same."""
    if len(set(labels)) == 1 < len(labels):
        raise UserError(f"expected texts of two or more classes, received only {labels[0]!r:.80}")
    if len(set(labels)) == len(labels):
        raise UserError(
            f"expected several texts of a class, received {len(labels)} classes of one text each; "
            "pairs of texts are a tuple x=(anchors, positives), without classes=True"
        )


def _integers(name, values):
    """Return the values of a flag as integers."""
    try:
        return tuple(map(int, values))
    except ValueError:
        raise UserError(
            f"--{name}={','.join(map(str, values))}: expected integers separated by commas"
        ) from None


def _sizes(options):
    """Return the sizes of dense layers, one or a list of numbers or of flag values, as strings."""
    units = options.get("dense_units", ())
    return list(map(str, units if isinstance(units, list | tuple) else [units]))


def options_from(pretrained: PretrainedWeights, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an embedder; those that are not given are those of the weights.

    Args:
        pretrained: The weights, perhaps of an embedder.
        given: Options of `TextEmbedder.from_pretrained`, "max_seq_length" included.

    Raises:
        UserError: If the weights are of an embedder whose vectors cannot be computed here, or if
            its dense layers do not fit the vectors that the options describe.
    """
    if pretrained.unsupported_embedder:
        raise UserError(pretrained.unsupported_embedder)
    source = pretrained.embedder or {}
    names = ("max_seq_length", "truncation")
    brought: dict[str, Any] = {name: source[name] for name in names if name in source}
    if len(source.get("text_columns", ())) > 1:
        brought["pairs"] = True
    options = {**brought, **SimilarityTask.options_from(source, given), **given}
    if source.get("dense_units") and "dense_units" not in given:
        expected, size = (
            pooled_size(pretrained.config, of["layers"], str(of["pooling"]))
            for of in (source, options)
        )
        if size != expected:
            shown = [f"--{name}={given[name]}" for name in ("layers", "pooling") if name in given]
            raise UserError(
                f"{', '.join(shown)}: the dense layers of {pretrained.source} take vectors of "
                f"{expected} numbers, received {size}; leave the option out, or train new dense "
                "layers (dense_units)"
            )
    return options


def ranks_of_positives(
    numbers_NC: np.ndarray, vectors_NCD: np.ndarray, similarity: str
) -> dict[str, float]:
    """Return recall@1, recall@10 and mrr@10 of the anchors.

    They are the fractions of anchors with a positive among the first texts, and the mean of 1 /
    rank of the first positive.

    An anchor's candidates are the distinct positives and negatives of all rows; of rows of one
    text, the other texts. An anchor of several rows has the positives of all of them. A tie with
    the positive counts as better than it, so that equal vectors have no good ranks.

    Args:
        numbers_NC: Numbers of the texts, equal for equal texts and texts of one class; NO_TEXT for
            a missing text.
        vectors_NCD: Embeddings.
        similarity: A key of SIMILARITIES.

    Raises:
        UserError: If a vector is not finite, whose similarity is below no other.
    """
    finite(vectors_NCD.sum(axis=(1, 2)), "vectors")
    anchors_N, own_N = numbers_NC[:, 0], numbers_NC[:, min(1, numbers_NC.shape[1] - 1)]
    if numbers_NC.shape[1] == 1:
        candidates_G, vectors_GD = anchors_N, vectors_NCD[:, 0]
    else:
        candidates_G, first_G = np.unique(numbers_NC[:, 1:], return_index=True)
        vectors_GD = vectors_NCD[:, 1:].reshape(-1, vectors_NCD.shape[-1])[first_G]
        is_text_G = candidates_G != NO_TEXT
        candidates_G, vectors_GD = candidates_G[is_text_G], vectors_GD[is_text_G]
        of_anchor: dict[int, set[int]] = {}
        places_N = np.searchsorted(candidates_G, own_N)
        for anchor, place in zip(anchors_N.tolist(), places_N.tolist(), strict=True):
            of_anchor.setdefault(anchor, set()).add(place)
    size = max(1, BLOCK_ELEMENTS // len(vectors_GD))
    ranks = []
    for first in range(0, len(anchors_N), size):
        block = slice(first, first + size)
        scores_nG = _scores(vectors_NCD[block, 0], vectors_GD, similarity)
        if numbers_NC.shape[1] == 1:  # A text does not find itself.
            is_own_nG = candidates_G == own_N[block, np.newaxis]
            rows_n = np.arange(len(scores_nG))
            scores_nG[rows_n, first + rows_n] = -np.inf
            is_own_nG[rows_n, first + rows_n] = False
        else:
            is_own_nG = np.zeros(scores_nG.shape, bool)
            for row, anchor in enumerate(anchors_N[block].tolist()):
                is_own_nG[row, list(of_anchor[anchor])] = True
            is_anchor_nG = candidates_G == anchors_N[block, np.newaxis]
            scores_nG[is_anchor_nG & ~is_own_nG] = -np.inf
        best_n = np.max(np.where(is_own_nG, scores_nG, -np.inf), axis=1)
        is_better_nG = (scores_nG >= best_n[:, np.newaxis]) & ~is_own_nG
        ranks.append(np.where(is_own_nG.any(axis=1), 1.0 + is_better_nG.sum(axis=1), np.nan))
    ranks_N = np.concatenate(ranks)
    ranks_N = ranks_N[~np.isnan(ranks_N)]
    if not len(ranks_N):
        return {"recall@1": 0.0, "recall@10": 0.0, "mrr@10": 0.0}
    return {
        "recall@1": float(np.mean(ranks_N <= 1)),
        "recall@10": float(np.mean(ranks_N <= 10)),
        "mrr@10": float(np.mean(np.where(ranks_N <= 10, 1.0 / ranks_N, 0.0))),
    }


def _scores(anchors_nD, vectors_GD, similarity):
    if similarity in ("euclidean", "manhattan"):
        metric = similarity.replace("manhattan", "cityblock")
        return -scipy.spatial.distance.cdist(anchors_nD, vectors_GD, metric)
    if similarity == "cosine":
        anchors_nD, vectors_GD = normalized(anchors_nD), normalized(vectors_GD)
    return anchors_nD @ vectors_GD.T


class EmbeddingPipeline(Pipeline):
    """Pipeline with the signatures similarity and with_prompt, unless rows are pairs of texts."""

    task: SimilarityTask

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
        return self._outputs(self.counted(windows), texts)


@keras.saving.register_keras_serializable("bert_tf")
class TextEmbedder(TaskModel):
    """Embedder: one vector per text or pair.

        model = TextEmbedder.from_pretrained(PATH, normalize=True)
        model.fit((["my bill", "my router"], ["an invoice", "a modem"]), epochs=1)
        model.predict(["How do I change my plan?"])  # float32 (1, D)

    It is trained on pairs of an anchor and its positive, x=(anchors, positives) or x=(anchors,
    positives, negatives). y is the scores of pairs with the losses "cosent" and "cosine", or the
    classes of texts with `classes`; otherwise there is none.

    Settings of a sentence-transformers directory, or of the run of an embedder, are the defaults.

    Options of `from_pretrained`:
        layers: Encoder layers that the vectors are taken from: "last", "second_to_last",
            "sum_last_4" or "concat_last_4", which has 4 H numbers per vector.
        pooling: "mean" over all tokens, [CLS] and [SEP] included, "cls", "max", "mean_sqrt_len",
            the sum divided by the square root of the number of tokens, or several joined by "+".
        dense_units: Outputs of each dense layer after pooling, or of the only one.
        dense_activations: "tanh" or "identity" per dense layer.
        normalize: Whether vectors have the norm 1.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt that every text gets.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        loss: "contrastive" finds the positive among the texts of the batch, for pairs and classes;
            "triplet" asks for a margin between positive and negative; "cosent" and "cosine" learn
            the order or the values of scores.
        loss_temperature: Divisor of cosines in "contrastive" and "cosent".
        symmetric: Whether "contrastive" also finds the anchor of each positive.
        triplet_margin: Difference of distances in "triplet".
        matryoshka_dims: Sizes of prefixes of the vectors that are trained to be vectors themselves.
        classes: Whether it is trained on texts with classes as y: two texts of a class are a pair.
        pairs: Whether a row is a pair of texts, which has no prompt.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = SimilarityTask
    pipeline_class = EmbeddingPipeline
    options = (
        *("layers", "pooling", "dense_units", "dense_activations", "normalize"),
        *("prompts", "default_prompt", "similarity", "pairs", "truncation"),
        *("loss", "loss_temperature", "symmetric", "triplet_margin", "matryoshka_dims"),
        "classes",
    )

    @classmethod
    def _options_from(cls, pretrained, given) -> dict[str, Any]:
        return options_from(pretrained, given)

    @property
    def task(self) -> SimilarityTask:
        """The task."""
        return cast(SimilarityTask, super().task)

    @property
    def vector_size(self) -> int:
        """Number of components of a vector, D."""
        return self.network.vector_size

    def predict(  # type: ignore[override]  # The only output is returned without a dict.
        self,
        x: Any,
        batch_size: int | None = None,
        *,
        prompt: str | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Return the vectors of rows, float32 `(N, D)`.

        Args:
            x: Strings; for pairs a tuple of two lists, a dict or a DataFrame. Or a dict of token
                ids.
            batch_size: Rows per call of the traced function; by default 1024, of token ids 64.
            prompt: Name of the prompt before each text, one of `task.prompts`; by default
                `task.default_prompt`, if the model has one.
            **kwargs: Other arguments, see `TaskModel.predict`.

        Raises:
            UserError: If x has no rows, or rows that are no strings, or if there is no such prompt.
        """
        if prompt is None:
            return super().predict(x, batch_size, **kwargs)["embedding"]
        text = self.task.prompt_text(prompt)
        if len(self.task.input_names) > 1:
            raise UserError(f"prompt={prompt!r:.80}: expected none with pairs")
        return self._served("with_prompt", x, batch_size, more={"prompt": text}, **kwargs)[
            "embedding"
        ]

    def similarity(self, a: Any, b: Any) -> np.ndarray:
        """Return the similarity of each vector of `a` to each of `b`, float32 `(N, M)`.

        It is the task's `similarity`; distances are negated, so that more similar vectors have
        larger values.

        Args:
            a: N vectors of `predict`, or one.
            b: M vectors of `predict`, or one.
        """
        a_ND, b_MD = (
            tf.constant(np.atleast_2d(np.asarray(vectors, np.float32))) for vectors in (a, b)
        )
        compare = SIMILARITIES[self.task.similarity]
        # Row by row, since the differences of all pairs may not fit into memory.
        return np.stack([compare(vector_D, b_MD).numpy() for vector_D in a_ND])

    def token_vectors(
        self, x: Any, batch_size: int = ROWS_PER_CALL
    ) -> list[tuple[list[str], np.ndarray]]:
        """Return tokens and vectors per row, [CLS] and [SEP] included.

        Args:
            x: Rows, as for `predict`.
            batch_size: Maximum rows per call of the traced function, whose sequences have at most
                16,384 tokens.

        Returns:
            Per row L tokens, and float32 `(L, D)`.
        """
        entries, pipeline, rows = self.vocabulary.entries, self.serving.pipeline, []
        # Any sequence of a call may be as long as the longest one is allowed to be.
        most = max(TOKENS_PER_CHUNK // self.task.max_seq_length, 1)
        batch_size = min(positive("batch_size", batch_size), most)
        for texts in Examples(self._columns(x), []).slices(batch_size):
            packed = pipeline.counted(pipeline.encode(**texts)).packed
            vectors_BLD = self._token_vectors(to_padded(packed, self.vocabulary)).numpy()
            for ids, vectors_LD in zip(packed.input_ids.to_list(), vectors_BLD, strict=True):
                rows.append(([entries[number] for number in ids], vectors_LD[: len(ids)].copy()))
        return rows

    @tf.function(reduce_retracing=True, autograph=False)
    def _token_vectors(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.cast(self.network.token_vectors(inputs), tf.float32)
