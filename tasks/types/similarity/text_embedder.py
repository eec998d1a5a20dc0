"""Embedder: one vector per text, from the tokens of an encoder, and similarities of vectors.

Shape suffixes: N texts, M texts, D size of a vector.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.losses import BatchLoss
from bert_tf.weights import sources
from bert_tf.weights.sentence_transformers import FIELDS
from bert_tf.weights.sources import PretrainedWeights
from tasks.base.task import Loss, OutputSpec, Task, described
from tasks.base.task_types import row_reader
from tasks.base.text_task import TextTask
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import as_list, columns_of, without_axis
from tasks.data.readers.pairs import PAIR_COLUMNS, negative_columns
from tasks.data.readers.rows import (
    BadRow,
    Example,
    FileRows,
    Source,
    as_label,
    raise_bad_rows,
)
from tasks.data.windows import Windows
from tasks.graph.pooling import POOLING
from tasks.graph.serving_functions import ROWS_PER_CALL
from tasks.metrics.regression import pearson, spearman
from tasks.model.task_model import TaskModel
from tasks.types.similarity.embedding_model import (
    ACTIVATIONS,
    LAYERS,
    SIMILARITIES,
    EmbeddingModel,
    pooled_size,
)
from tasks.types.similarity.embedding_pipeline import EmbeddingPipeline
from tasks.types.similarity.losses import (
    LOSSES,
    NO_TEXT,
    SCORED,
    embedding_loss,
    vector_distance,
)
from tasks.types.similarity.ranks import ranks_of_positives


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityTask(TextTask):
    """One vector per text, or per pair of texts.

    Attributes:
        layers: A key of LAYERS.
        pooling: A key of POOLING, or several joined by "+", whose vectors are concatenated.
        dense_units: Outputs of each dense layer after pooling.
        dense_activations: A key of ACTIVATIONS per dense layer.
        normalize: Whether vectors have the norm 1.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt that every text gets, or `None`.
        similarity: A key of SIMILARITIES.
        loss: One of LOSSES.
        loss_temperature: Divisor of cosines in the losses "contrastive" and "cosent".
        symmetric: Whether the contrastive loss also looks for the anchor of each positive.
        triplet_margin: Difference of distances in the loss "triplet".
        matryoshka_dims: Sizes of the prefixes of vectors that are trained to be vectors themselves.
        pair_columns: Columns of the two texts of a labelled row; found by their names if empty.
        negatives_column: Column of hard negatives; found by its name if `None`.
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

    def __post_init__(self) -> None:
        for name, expected in (
            ("layers", LAYERS),
            ("similarity", SIMILARITIES),
            ("loss", LOSSES),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in expected:
                raise UserError(f"{name}={value!r:.80}: expected one of {', '.join(expected)}")
        if not isinstance(self.pooling, str) or not set(self.pooling.split("+")) <= set(POOLING):
            raise UserError(
                f"pooling={self.pooling!r:.80}: expected one of {', '.join(POOLING)}, or several "
                "joined by +"
            )
        if not self.loss_temperature > 0:
            raise UserError(f"loss_temperature={self.loss_temperature}: expected a number > 0")
        for name in (
            "dense_units",
            "dense_activations",
            "matryoshka_dims",
        ):  # Lists are accepted in Python.
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
    def options_of_weights(cls, path: str) -> dict[str, Any]:
        """Return the pooling, dense layers, normalization and prompts of an embedder."""
        settings = sources.embedder_settings(path)
        return {name: settings[name] for name in FIELDS if name in settings}

    @classmethod
    def from_data(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from a training file, whose columns choose the default of `loss`."""
        rows = row_reader(cls.kind)(options, data, True) if not isinstance(data, FileRows) else data
        first = next(iter(raise_bad_rows(rows)), None)
        is_scored = first is not None and len(first.texts["text"]) == 2 and first.label is not None
        # Texts for a teacher have no loss of their own: it says what dev rows are.
        is_alone = first is not None and len(first.texts["text"]) == 1 and first.label is None
        loss = options.setdefault("loss", "cosent" if is_scored else "contrastive")
        if is_scored != (loss in SCORED) and not is_alone:
            what = "pairs with a score" if is_scored else "pairs or classes without a score"
            expected = [name for name in LOSSES if (name in SCORED) == is_scored]
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
        return cls(max_seq_length=max_seq_length, **{**defaults, **options})

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
        options = {
            "loss": self.loss,
            "temperature": self.loss_temperature,
            "margin": self.triplet_margin,
        }
        options |= {"symmetric": self.symmetric, "margin": self.triplet_margin}
        options |= {"sizes": self.matryoshka_dims}
        return {"embedding": BatchLoss(embedding_loss, **options)}

    @property
    def soft_losses(self) -> Mapping[str, Loss]:
        """The distance from the vectors of the teacher."""
        return {"embedding": functools.partial(vector_distance, similarity=self.similarity)}

    def can_learn_unlabelled(self, texts: Mapping[str, Any]) -> bool:
        """Whether a row is a text alone."""
        return len(texts["text"]) == 1

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
        there = x if isinstance(x, Mapping) else getattr(x, "columns", ())
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

    def default_labels(self, count: int) -> list:
        """Return no labels, for pairs of an anchor and its positive."""
        return [None] * count

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> Any:
        """Return a score as a float, a class as a string, or None for a pair without a score."""
        if not self.is_scored and value is not None:
            # NaN and pandas.NA are missing in a DataFrame.
            is_nan = isinstance(value, float) and math.isnan(value)
            if is_nan or not isinstance(value, str | int | float):
                raise ValueError(f"expected a class, received {value}")
            value = as_label(str(value))
        self._check_label(value, len(texts["text"]))
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
            if not math.isfinite(label):
                raise ValueError(f"expected a finite number, received {label}")
        elif num_texts == 1 and label is None:
            raise ValueError("expected a class per text, or pairs of texts, received texts alone")
        elif num_texts > 1 and label is not None:
            raise ValueError(
                f"expected no label for a pair with loss={self.loss!r}, received {label!r:.80}"
            )
        elif label == "":
            raise ValueError("expected a class, received an empty string")

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the examples; a text of a class is paired with another one of its class."""
        if self.is_scored or not examples.labels or examples.labels[0] is None:
            return examples
        _check_classes(examples.labels)
        rows: dict[str, list[int]] = {}
        for number, label in enumerate(examples.labels):
            rows.setdefault(label, []).append(number)
        texts, rng = list(examples.texts["text"]), np.random.default_rng(0)
        for numbers in rows.values():
            order = rng.permutation(numbers)
            for number, other in zip(order, np.roll(order, 1), strict=True):
                texts[number] = [*examples.texts["text"][number], *examples.texts["text"][other]]
        return dataclasses.replace(examples, texts={"text": texts})

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return scores `(N,)`, or the numbers of the texts `(N, C)`, and weights of 1.

        Equal numbers are texts of one class, or texts of the same tokens: a model cannot tell those
        apart, such as texts that differ in case alone.
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

        Dense layers without `dense_activations` have tanh, as in sentence-transformers.
        """
        units = options.get("dense_units", ())
        if units and not options.get("dense_activations"):
            options["dense_activations"] = ("tanh",) * len(units)
        return super().from_options(max_seq_length=max_seq_length, pairs=pairs, **options)

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

    def predictions(
        self, texts: Tensors, windows: Windows, outputs: Tensors
    ) -> dict[str, tf.Tensor]:
        """Return the vectors, float32 `(N, D)`."""
        return dict(outputs)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return infinity, since nothing is decided."""
        return tf.fill(tf.shape(predictions["embedding"])[:1], float("inf"))


def _lists(column, name):
    """Return a column of texts, lists of texts, or missing values as lists."""
    rows = []
    for row in as_list(column, name):
        is_missing = row is None or (isinstance(row, float) and math.isnan(row))
        rows.append([] if is_missing else [row] if isinstance(row, str) else row)
    return rows


def _check_classes(labels: Sequence[str]) -> None:
    """Raise UserError if no text has another one of its class."""
    if len(set(labels)) == len(labels):
        raise UserError(
            f"expected several texts of a class, received {len(labels)} classes of one text each; "
            "pairs of texts are a tuple x=(anchors, positives)"
        )


def _integers(name, values):
    """Return the values of a flag as integers."""
    try:
        return tuple(map(int, values))
    except ValueError:
        raise UserError(
            f"--{name}={','.join(map(str, values))}: expected integers separated by commas"
        ) from None


def options_from(pretrained: PretrainedWeights, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an embedder; those that are not given are those of the weights.

    Args:
        pretrained: The weights, perhaps of an embedder.
        given: Options of `TextEmbedder.from_pretrained`, "max_seq_length" included.

    Raises:
        UserError: If the weights are of an embedder whose vectors cannot be computed here.
    """
    if pretrained.unsupported_embedder:
        raise UserError(pretrained.unsupported_embedder)
    source = pretrained.embedder or {}
    options = {name: source[name] for name in ("max_seq_length", *FIELDS) if name in source}
    if len(source.get("text_columns", ())) > 1:
        options["pairs"] = True
    if "dense_units" in given:
        options.pop("dense_activations", None)
    if options.get("default_prompt") not in given.get("prompts", options.get("prompts", {})):
        options.pop("default_prompt", None)
    return {**options, **given}


@keras.saving.register_keras_serializable("bert_tf")
class TextEmbedder(TaskModel):
    """Embedder: one vector per text or pair.

    It is trained on pairs of an anchor and its positive, (anchors, positives) or (anchors,
    positives, negatives); on pairs with a score as y; or on texts with a class as y.

    Settings of a sentence-transformers directory, or of the run of an embedder, are the defaults.

    Options of `from_pretrained`:
        layers: Encoder layers that the vectors are taken from: "last", "second_to_last",
            "sum_last_4" or "concat_last_4", which has 4 H numbers per vector.
        pooling: "mean" over all tokens, [CLS] and [SEP] included, "cls", "max", "mean_sqrt_len",
            the sum divided by the square root of the number of tokens, or several joined by "+".
        dense_units: Outputs of each dense layer after pooling.
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
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = SimilarityTask
    pipeline_class = EmbeddingPipeline
    options = (
        *("layers", "pooling", "dense_units", "dense_activations", "normalize"),
        *("prompts", "default_prompt", "similarity", "pairs", "truncation"),
        *("loss", "loss_temperature", "symmetric", "triplet_margin", "matryoshka_dims"),
    )

    @classmethod
    def _create_task(cls, pretrained, max_seq_length, options) -> Task:
        """Create the task, with the settings of an embedder as defaults of the options."""
        given = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
        options = options_from(pretrained, {**options, **given})
        return super()._create_task(pretrained, options.pop("max_seq_length", None), options)

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
        batch_size: int = ROWS_PER_CALL,
        *,
        prompt: str | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Return the vectors of rows, float32 `(N, D)`.

        Args:
            x: Strings; for pairs a tuple of two lists, a dict or a DataFrame. Or a dict of token
                ids.
            batch_size: Rows per call of the traced function.
            prompt: Name of the prompt before each text, one of `task.prompts`; by default
                `task.default_prompt`, if the model has one.
            **kwargs: Arguments of keras.Model.predict, for token ids only.

        Raises:
            UserError: If x has no rows, or rows that are no strings, or if there is no such prompt.
        """
        if prompt is None:
            return super().predict(x, batch_size, **kwargs)["embedding"]
        text = self.task.prompt_text(prompt)
        if len(self.task.input_names) > 1:
            raise UserError(f"prompt={prompt!r:.80}: expected none with pairs")
        self._warn_if_untrained()
        columns = self._columns(x)
        prompts = [text] * len(columns["text"])
        columns = {"text": columns["text"], "prompt": prompts}
        return self.serving.call("with_prompt", columns, batch_size)["embedding"]

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
            batch_size: Rows per call of the traced function.

        Returns:
            Per row L tokens, and float32 `(L, D)`.
        """
        entries, rows = self.vocabulary.entries, []
        for texts in Examples(self.task.columns(x), []).slices(batch_size):
            packed = self.serving.pipeline.encode(**texts).packed
            vectors_BLD = self._token_vectors(to_padded(packed, self.vocabulary)).numpy()
            for ids, vectors_LD in zip(packed.input_ids.to_list(), vectors_BLD, strict=True):
                rows.append(([entries[number] for number in ids], vectors_LD[: len(ids)]))
        return rows

    @tf.function(reduce_retracing=True, autograph=False)
    def _token_vectors(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return self.network.token_vectors(inputs)
