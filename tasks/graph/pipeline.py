"""Map strings to predictions in one graph, for training, prediction and export alike.

`Serving` calls its signatures, or those of a published version, with Python strings.

Shape suffixes: B texts, W windows (token sequences made of them), L tokens, C choices, H hidden
size.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations of published tokenizers.

from bert_tf.errors import UserError, tensorflow_reason
from bert_tf.runs.checkpoints import load_saved_model
from bert_tf.system.processes import FirstCalls
from bert_tf.text.encoder_inputs import Packed, to_padded
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.tokenizer import Tokenizer, truncate_utf8
from bert_tf.train.compilation import compile_with_weights
from tasks.base.task import OutputSpec, SignatureSpec, Task, task_from_dict
from tasks.data.examples import Examples, Tensors
from tasks.data.readers.memory import jsonable
from tasks.data.windows import TokenCounter, Windows, pack_texts
from tasks.graph.chunking import run_in_chunks, run_in_packed_batches, run_texts_in_chunks
from tasks.graph.heads import mean_of_tokens, on_grid
from tasks.graph.published import published_device, published_task

TOKENIZE_OUTPUTS = {
    "input_ids": OutputSpec("token ids, which are line numbers of assets.extra/vocab.txt from 0"),
    "input_mask": OutputSpec("1 for tokens, 0 for padding"),
    "segment_ids": OutputSpec("0 in the first text, 1 in the second"),
    "start": OutputSpec(
        "start of the token in its own text, in characters; -1 for [CLS], [SEP] and padding"
    ),
    "end": OutputSpec(
        "end of the token (exclusive), in characters; -1 for [CLS], [SEP] and padding"
    ),
}
EMBED_OUTPUTS = {
    "pooled": OutputSpec("output of the pooler, from [CLS]", is_vector=True),
    "mean": OutputSpec("mean of the vectors of all tokens", is_vector=True),
}
_CPU, _GPU = "/CPU:0", "/GPU:0"
ROWS_PER_CALL = 1024  # Bounds memory.


class Pipeline(tf.Module):
    """A task's tokenizer and model, combined; its methods map tensors to tensors.

    Of each string only the first MAX_BYTES (bert_tf.text.tokenizer) are read.

    Args:
        task: The task.
        tokenizer: Tokenizer of the model's vocabulary.
        model: The Keras model of the task.
        short_tokens: Up to this many tokens, a single sequence has a branch of its own; see
            `tasks.graph.chunking.run_in_chunks`. 0 for none.
        is_on_gpu: Whether XLA compiles the model for a GPU, on packed batches of few shapes. The
            rest of the graph then runs on the CPU, which has all operations of strings.

    Attributes:
        token_functions: By signature, the function from the encoder's inputs of W windows, in
            either layout, to outputs `(W, ...)` by name. Those of a converted model may replace
            them; then `model` is not used.
        token_counter: Counts the tokens of predictions, if it is set before they are traced. A
            graph that counts cannot be saved.
    """

    token_counter: TokenCounter | None = None

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        model: keras.Model,
        short_tokens: int = 0,
        is_on_gpu: bool = False,
    ) -> None:
        super().__init__(name="pipeline")
        self.task, self.tokenizer, self.model = task, tokenizer, model
        self.is_on_gpu = is_on_gpu
        self.vocabulary, self.short_tokens = tokenizer.vocabulary, short_tokens
        self.token_functions = self._make_token_functions()
        self._encoders: dict[str, Callable[..., Windows]] = {}

    def encode(self, **texts: tf.Tensor) -> Windows:
        """Tokenize strings per input name into windows, to encode a dataset.

        They are `(B,)`, or `(B, C)` for lists of strings.
        """
        in_order = [tf.convert_to_tensor(texts[name]) for name in self.task.input_names]
        ranks = [text.shape.rank for text in in_order]
        key = "".join(map(str, ranks))
        if key not in self._encoders:  # Rows of a dataset may have lists where requests have none.
            self._encoders[key] = self._traced(
                lambda **texts: self._windows(**_limited(texts)), self.task.input_names, ranks
            )
        return self._encoders[key](*in_order)

    def predict(self, **texts: tf.Tensor) -> Tensors:
        """Map strings `(B,)` per input name to the task's predictions, `(B, ...)` each."""
        return self.task.predictions(*self._computed(texts))

    def margin(self, **texts: tf.Tensor) -> tf.Tensor:
        """Return by how much probability each prediction leads the second best one, `(B,)`."""
        texts, windows, outputs = self._computed(texts)
        predictions = self.task.predictions(texts, windows, outputs)
        return self.task.margin(predictions, windows, outputs)

    def embed(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """Map strings `(B,)` to vectors "pooled" and "mean", over all tokens, float32 `(B, H)`."""
        return self._run_in_chunks("embed", self._packed(text))

    def tokenize(self, **texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Map strings `(B,)` per input name to the model's inputs and their character offsets.

        Returns:
            input_ids, input_mask, segment_ids, start and end, int32 `(B, L)`, or `(B, W, L)` if
            texts may have several windows or there are choices. start and end count characters of
            the token's own text as sent; they are -1 at [CLS], [SEP] and padding.
        """
        texts = _limited(texts)
        windows = self.task.encode(texts, self.tokenizer.tokenize_with_offsets, self.vocabulary)
        count = tf.shape(texts[self.task.input_names[0]])[0]
        packed = windows.packed

        def dense(ragged, padding):
            if windows.choice_W is not None:
                grid = self._choice_grid(windows, texts)
                return on_grid(ragged.to_tensor(padding), grid, padding)
            if self.task.has_windows:
                # All windows of a text become one row.
                ragged = windows.by_example(ragged, count)
            return ragged.to_tensor(padding)

        return {
            "input_ids": dense(packed.input_ids, self.vocabulary["[PAD]"]),
            "input_mask": dense(tf.ones_like(packed.input_ids), 0),
            "segment_ids": dense(packed.segment_ids, 0),
            "start": dense(packed.starts, -1),
            "end": dense(packed.ends, -1),
        }

    @functools.cached_property
    def signatures(self) -> dict[str, tf.types.experimental.GenericFunction]:
        """A tf.function per signature, with string inputs by position, traced once each.

        Prediction, export and its parity check share them, since tracing takes seconds.
        """
        texts = self.task.input_names
        return {
            "serving_default": self._served(self.predict, texts),
            "tokenize": self._served(self.tokenize, texts),
            "embed": self._served(self.embed, ("text",)),
        }

    @property
    def token_fillers(self) -> dict[str, int]:
        """Padding values, by output, that align tokens of chunks of different lengths."""
        return {"input_ids": self.vocabulary["[PAD]"], "input_mask": 0, "segment_ids": 0}

    def signature_specs(self) -> dict[str, SignatureSpec]:
        """Return the specification of each signature."""
        task, inputs = self.task, self.task.input_descriptions
        return {
            "serving_default": SignatureSpec(
                task.description,
                inputs,
                task.outputs,
                has_margin=True,
                splits_texts=task.has_windows,
            ),
            "tokenize": SignatureSpec(
                "The tokens that the model receives, and their positions in the text.",
                inputs,
                TOKENIZE_OUTPUTS,
                splits_texts=task.has_windows,
            ),
            "embed": SignatureSpec(
                "Vectors of a text, for similarity and search.", {"text": "text"}, EMBED_OUTPUTS
            ),
        }

    def _packed(self, *texts):
        """Tokenize and truncate strings `(B,)`, or pairs of them, to one sequence each."""
        return pack_texts(
            list(map(truncate_utf8, texts)),
            self.tokenizer.tokenize,
            self.vocabulary,
            self.task.max_seq_length,
            getattr(self.task, "truncation", "head"),
        )

    def _windows(self, **texts):
        tokenizer = self.tokenizer
        with_offsets = self.task.needs_offsets
        tokenize = tokenizer.tokenize_with_offsets if with_offsets else tokenizer.tokenize
        return self.task.encode(texts, tokenize, self.vocabulary)

    def counted(self, windows: Windows) -> Windows:
        """Return the same windows, after `token_counter` has counted their tokens, if it is set."""
        if self.token_counter:
            self.token_counter.add(windows)
        return windows

    def _make_token_functions(self):
        return {"serving_default": lambda inputs: self.model(inputs), "embed": self._vectors}

    def _vectors(self, inputs):
        encoded = self.model.encoder(inputs)
        return {
            "pooled": tf.cast(encoded["pooled"], tf.float32),
            "mean": mean_of_tokens(encoded["sequence"], inputs),
        }

    def _computed(self, texts):
        """Return texts as they are read, their windows, and the model's outputs."""
        texts = _limited(texts)
        windows = self.counted(self._windows(**texts))
        return texts, windows, self._outputs(windows, texts)

    def _outputs(self, windows, texts):
        """Return the model's outputs, `(W, ...)` by name, or `(B, C)` of choices."""
        # Chunks may separate the choices of an example.
        outputs = self._run_in_chunks("serving_default", windows.packed)
        if windows.choice_W is None:
            return outputs
        grid = self._choice_grid(windows, texts)
        return {name: on_grid(scores, grid) for name, scores in outputs.items()}

    def _choice_grid(self, windows, texts):
        """Return `Windows.choice_grid` for the choices as they were sent, int32 `(B, C)`."""
        (name,) = self.task.INPUT_RANKS
        return windows.choice_grid(*tf.unstack(tf.shape(texts[name])))

    def _run_in_chunks(self, name, packed):
        function = self.token_functions[name]
        if not self.is_on_gpu:
            return run_in_chunks(function, packed, self.vocabulary, self.short_tokens)
        compiled = compile_with_weights(self.model, function, tf.distribute.get_strategy())

        def run(inputs):
            with tf.device(_GPU):
                return compiled(inputs)

        return run_in_packed_batches(run, packed, self.vocabulary, self.task.max_seq_length)

    def _served(self, function, names):
        """Return a signature's tf.function, which runs requests of any size in chunks."""
        fillers = self.token_fillers
        return self._traced(lambda **texts: run_texts_in_chunks(function, texts, fillers), names)

    def _traced(self, function, names, ranks=None):
        ranks = ranks or [self.task.INPUT_RANKS.get(name, 1) for name in names]
        specs = [
            tf.TensorSpec([None] * rank, tf.string, name=name)
            for name, rank in zip(names, ranks, strict=True)
        ]

        def call(*texts):
            # TF Serving does not check shapes: it would take texts of shape (2, 2) as four texts.
            texts = [
                tf.ensure_shape(text, spec.shape) for text, spec in zip(texts, specs, strict=True)
            ]
            with tf.device(_CPU if self.is_on_gpu else None):
                return function(**dict(zip(names, texts, strict=True)))

        traced = tf.function(call, input_signature=specs, autograph=False)
        # It is traced once; TensorFlow would add up the traces of all models of a process.
        traced._omit_frequent_tracing_warning = True
        return traced


def _limited(texts):
    return {name: truncate_utf8(values) for name, values in texts.items()}


class Serving:
    """The signatures of a task, called with Python strings.

    Args:
        task: The task.
        signatures: Functions of string tensors by position, by name of the signature.
        fillers: Padding of outputs by name, beside those of the task; by default "" or -1.
    """

    def __init__(
        self,
        task: Task,
        signatures: Mapping[str, tf.types.experimental.GenericFunction],
        fillers: Mapping[str, float] | None = None,
    ) -> None:
        self.task, self.signatures = task, signatures
        self.fillers = {**task.fillers, **(fillers or {})}
        self._first_calls = FirstCalls()

    def call(
        self,
        signature: str,
        columns: Mapping[str, list],
        batch_size: int = ROWS_PER_CALL,
        progress: Callable[[int], None] = lambda done: None,
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        Args:
            signature: Its name.
            columns: N strings, or lists of strings, by input name.
            batch_size: Rows per call.
            progress: Receives the number of rows that are done.

        Returns:
            `{name: array (N, ...)}`, with `str` for strings. Batches of different widths are padded
            as the rows of a batch are, mostly with "" and -1.
        """
        function = self.signatures[signature]
        parts: list[dict[str, np.ndarray]] = []
        for texts in Examples(dict(columns), []).slices(batch_size):
            outputs = self._first_calls.call(signature, function, *texts.values())
            parts.append({name: _with_str(values.numpy()) for name, values in outputs.items()})
            progress(len(parts) * batch_size)
        outputs = {
            name: concat_padded(
                [part[name] for part in parts],
                self.fillers.get(name, "" if values.dtype == object else -1),
            )
            for name, values in parts[0].items()
        }
        is_prediction = signature == "serving_default"
        return dict(self.task.with_word_outputs(outputs, columns)) if is_prediction else outputs

    def predict_rows(self, columns: Mapping[str, list], batch_size: int) -> list[dict[str, Any]]:
        """Return the prediction per row as a dict of JSON types, without padding; see `call`."""
        outputs = self.call("serving_default", columns, batch_size)
        rows = zip(*(values.tolist() for values in outputs.values()), strict=True)
        return [self.task.strip_padding(dict(zip(outputs, row, strict=True))) for row in rows]

    def take_token_counts(self) -> TokenCounts:
        """Return the counts of the calls since the last time; zeros of a published version."""
        return TokenCounts()

    def output_types(self) -> dict[str, tuple[str, int]]:
        """Return the name of the dtype and the number of list levels per predicted output."""
        function = self.signatures["serving_default"].get_concrete_function()
        types = {
            name: (spec.dtype.name, spec.shape.rank - 1)
            for name, spec in function.structured_outputs.items()
        }
        return {**types, **self.task.word_output_types}


class ServingFunctions(Serving):
    """The signatures of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.task, pipeline.signatures, pipeline.token_fillers)
        self.pipeline = pipeline
        self.token_counter = pipeline.token_counter = TokenCounter(pipeline.vocabulary)

    def take_token_counts(self) -> TokenCounts:
        """Return the counts of the calls since the last time."""
        return self.token_counter.take()

    def attention(self, columns: Mapping[str, list]) -> list[tuple[list[str], np.ndarray]]:
        """Return tokens and attention probabilities per sequence; see `TaskModel.attention`."""
        entries = self.pipeline.vocabulary.entries
        maps = []
        for texts in Examples(dict(columns), []).slices():
            packed = self.pipeline.encode(**texts).packed
            for row in range(int(packed.input_ids.nrows())):
                one = Packed(*(ragged[row : row + 1] for ragged in packed[:2]))
                inputs = to_padded(one, self.pipeline.vocabulary)
                tokens = [entries[number] for number in inputs["input_ids"][0].numpy()]
                maps.append((tokens, self._attention(inputs).numpy()))
        return maps

    @tf.function(reduce_retracing=True, autograph=False)
    def _attention(self, inputs: dict[str, tf.Tensor]) -> Any:
        outputs = self.pipeline.model.encoder(inputs, output_hidden_states=True)
        return tf.stack([of_layer[0] for of_layer in outputs["attentions"]])


def load_published(version: str | os.PathLike) -> Any:
    """Return `tf.saved_model.load` of a version, on the device that it was published for.

    Raises:
        UserError: If that is a GPU, and TensorFlow sees none.
        OSError: If there is no SavedModel.
        tf.errors.OpError: If it is damaged.
    """
    device = published_device(version)
    if device == "gpu" and not tf.config.get_visible_devices("GPU"):
        raise UserError(
            f"{version}: was exported with --device=gpu, and TensorFlow sees no GPU; export the "
            "run with --device=cpu"
        )
    # Otherwise a GPU would hold the variables of a graph for CPUs.
    with tf.device("CPU:0" if device == "cpu" else None):
        return load_saved_model(version)


class PublishedModel(Serving):
    """The default signature of a published version.

    Args:
        version: Directory of the version.

    Raises:
        UserError: If it cannot be loaded.
    """

    def __init__(self, version: str) -> None:
        task = task_from_dict(published_task(version))
        try:
            # Kept, since a signature does not keep the variables of its model alive.
            self._model = load_published(version)
            served = self._model.signatures["serving_default"]
        except (OSError, KeyError, tf.errors.OpError) as error:
            reason = tensorflow_reason(error)
            raise UserError(f"{version}: not a published model: {reason}") from None
        names, specs = task.input_names, served.structured_input_signature[1]

        @tf.function(input_signature=[specs[name] for name in names], autograph=False)
        def by_position(*texts):
            return served(**dict(zip(names, texts, strict=True)))

        super().__init__(task, {"serving_default": by_position})


def _with_str(values):
    """Return an array with `str` for bytes."""
    if values.dtype != object:
        return values
    return np.array(jsonable(values), object).reshape(values.shape)


def concat_padded(parts: Sequence[np.ndarray], filler: Any) -> np.ndarray:
    """Concatenate arrays along axis 0, padded with `filler` to the largest of each other axis."""
    shape = np.max([part.shape for part in parts], axis=0)

    def padded(part):
        missing = (shape - part.shape)[1:]
        return np.pad(part, [(0, 0), *((0, size) for size in missing)], constant_values=filler)

    return np.concatenate([padded(part) for part in parts])
