"""Map strings to predictions in one graph, for training, prediction and export alike.

Shape suffixes: B texts, W windows (token sequences made of them), L tokens, C choices, H hidden
size.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from bert_tf.text.excerpts import tokenize_ends, truncate_utf8
from bert_tf.text.packing import pack, token_budget
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.compilation import compile_with_weights
from tasks.base.task import OutputSpec, SignatureSpec, Task
from tasks.data.examples import Tensors
from tasks.data.windows import Windows
from tasks.graph.chunking import run_in_chunks, run_in_packed_batches, run_texts_in_chunks
from tasks.graph.heads import on_grid
from tasks.graph.pooling import mean_of_tokens

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


class Pipeline(tf.Module):
    """A task's tokenizer and model, combined; its methods map tensors to tensors.

    Of each string only the first MAX_BYTES (bert_tf.text.excerpts) are read.

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
    """

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
        budget = token_budget(1, self.task.max_seq_length)
        tokens = tokenize_ends(self.tokenizer.tokenize, truncate_utf8(text), budget)
        packed = pack([tokens], self.vocabulary, self.task.max_seq_length)
        return self._run_in_chunks("embed", packed)

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
                # The grid is -1 for a missing choice; row 0, all padding, is its entry.
                dense_WL = tf.pad(ragged.to_tensor(padding), [[1, 0], [0, 0]], "CONSTANT", padding)
                return tf.gather(dense_WL, self._choice_grid(windows, texts) + 1)
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

    def _windows(self, **texts):
        tokenizer = self.tokenizer
        with_offsets = self.task.needs_offsets
        tokenize = tokenizer.tokenize_with_offsets if with_offsets else tokenizer.tokenize
        return self.task.encode(texts, tokenize, self.vocabulary)

    def _make_token_functions(self):
        return {"serving_default": self._head_outputs, "embed": self._vectors}

    def _head_outputs(self, inputs):
        if self.task.INPUT_RANKS:
            # Chunks may separate the choices of an example, so each is scored alone and put on the
            # grid afterwards.
            return {self.model.output_key: self.model.text_scores(inputs)[:, 0]}
        return self.model(inputs)

    def _vectors(self, inputs):
        encoded = self.model.encoder(inputs)
        return {
            "pooled": tf.cast(encoded["pooled"], tf.float32),
            "mean": mean_of_tokens(encoded["sequence"], inputs),
        }

    def _computed(self, texts):
        """Return texts as they are read, their windows, and the model's outputs."""
        texts = _limited(texts)
        windows = self._windows(**texts)
        return texts, windows, self._outputs(windows, texts)

    def _outputs(self, windows, texts):
        """Return the model's outputs, `(W, ...)` by name, or `(B, C)` of choices."""
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
        # Padding values that align chunks of different lengths.
        fillers = {"input_ids": self.vocabulary["[PAD]"], "input_mask": 0, "segment_ids": 0}
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
