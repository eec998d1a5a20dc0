"""Keras models that map strings to predictions, one class per task type.

    model = TextClassifier.from_pretrained(PATH, labels=["billing", "hardware"])
    model.fit(texts, labels)
    model.predict_rows(["My invoice is wrong."])[0]["label"]

A `TaskModel` joins four parts: a reader (rows to examples), a preprocessor (strings to token ids),
a network (token ids to outputs) and a postprocessor (outputs to predictions and metrics).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError, argument_names
from bert_tf.model.custom_gradient import own_gradients
from bert_tf.runs.run import Run
from bert_tf.system.processes import check_not_forked
from bert_tf.system.scalars import to_python
from bert_tf.train.step import dropout_seed
from bert_tf.weights.sources import read_pretrained
from tasks.base.registry import task_from_dict
from tasks.data.readers.memory import columns_of
from tasks.finetuning.settings import task_defaults
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.graph.preprocessor import Preprocessor
from tasks.graph.run_checkpoint import RunCheckpoint, save_run
from tasks.graph.serving_functions import ROWS_PER_CALL, ServingFunctions
from tasks.model import compiling, creation, fitting, run_training
from tasks.model.labelled_rows import first_batches, inputs_of, is_token_ids, positive

if TYPE_CHECKING:
    from bert_tf.text.vocabulary import Vocabulary
    from bert_tf.weights.sources import PretrainedWeights
    from tasks.base.task import Task

_PUBLISH = "expected export.publish(model, 'MODELS/name'), which writes a SavedModel of strings"


class TaskModel(keras.Model):
    """Base class of the models of the task types.

    Subclasses define `task_class`, whose `from_options` reads the `options` of `from_pretrained`.

    Args:
        task: The task, or its dict form as stored in a Keras config.
        config: Configuration of the encoder, or its dict form.
        vocabulary: The vocabulary; `None` if `load_assets` reads it.
        network: A model made by `task.build_model`; by default a new one.
        seed: Seed of the order of rows and of dropout in `fit`.
        frozen_layers: Number of lowest encoder layers that are not trained, with the embeddings.
        record: What a run directory records about the origin of the weights.
        has_new_head: Whether the head is untrained, so that `fit` initializes it from its rows.
        dtype: Keras dtype policy, "float32", "mixed_bfloat16" or "mixed_float16".
        **kwargs: Arguments of keras.Model.

    Attributes:
        task: The task: labels, lengths, thresholds.
        config: The `BertConfig`.
        preprocessor: `Preprocessor`, from strings to token ids.
        network: Encoder and head, from token ids to outputs.
        source: The `RunCheckpoint` that `load_model` read the weights from, or that `train` wrote;
            else `None`.
    """

    source: RunCheckpoint | None
    task_class: ClassVar[type[Task]]
    options: ClassVar[tuple[str, ...]] = ()
    max_seq_length_default: ClassVar[int | None] = None  # By default that of the task type.
    pipeline_class: type[Pipeline] = Pipeline
    has_head: ClassVar[bool] = True  # Beside what all pretrained weights of its class contain.

    def __init__(
        self,
        task: Task | Mapping[str, Any],
        config: BertConfig | Mapping[str, Any],
        vocabulary: Vocabulary | None = None,
        *,
        network: keras.Model | None = None,
        seed: int = 0,
        frozen_layers: int | None = None,
        record: Mapping[str, Any] | None = None,
        has_new_head: bool = True,
        dtype: Any = "float32",
        **kwargs: Any,
    ) -> None:
        task = task_from_dict(task) if isinstance(task, Mapping) else task
        config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        kwargs.pop("name", None)  # The name is part of the names of variables in checkpoints.
        super().__init__(name=task.kind, dtype=compiling.dtype_policy(dtype), **kwargs)
        self.seed, self.frozen_layers = to_python(seed), to_python(frozen_layers)
        self.has_new_head = has_new_head and self.has_head
        # Keras would replace dicts by tracked copies.
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "record", dict(record or {}))
        for name in ("source", "_serving", "_evaluator", "_validation"):
            object.__setattr__(self, name, None)
        object.__setattr__(self, "_created_in", tf.distribute.get_strategy())
        object.__setattr__(self, "_process", os.getpid())
        object.__setattr__(
            self, "_graph_lock", threading.RLock()
        )  # Of graphs, which are built once.
        self.network = network or task.build_model(config, self.dtype_policy)
        if frozen_layers is not None:
            self.network.encoder.freeze(frozen_layers)
        self.preprocessor = Preprocessor.of(task, config, vocabulary)
        self.built = True

    @classmethod
    @argument_names()
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        max_seq_length: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
        do_lower_case: bool | None = None,
        frozen_layers: int | None = None,
        keep_head: bool = True,
        **options: Any,
    ) -> Self:
        """Create a model with pretrained weights.

        Args:
            path: Run, Hugging Face directory, TensorFlow checkpoint or keras-nlp preset.
            max_seq_length: Maximum tokens per sequence; by default 128 (384 for QuestionAnswerer,
                512 for MaskedLanguageModel).
            seed: Seed of the head, of the order of rows and of dropout.
            dtype: Keras dtype policy.
            do_lower_case: Overrides the setting of the pretrained weights.
            frozen_layers: Number of lowest encoder layers that are not trained.
            keep_head: Keeps the head of fine-tuned weights if task type and labels match; warns
                if they do not. False is a new head without a warning.
            **options: Options of the task, see the class.

        Raises:
            UserError: If there is no model, or an option does not fit it.
        """
        creation.check_options(cls, options)
        pretrained = read_pretrained(path, do_lower_case)
        task = creation.create_task(cls, pretrained, max_seq_length, options)
        if keep_head and cls.has_head:
            creation.warn_of_other_head(pretrained, task)
        return cls.from_weights(
            pretrained,
            task,
            seed=seed,
            keep_head=None if keep_head else False,
            frozen_layers=frozen_layers,
            dtype=dtype,
        )

    @classmethod
    def from_weights(
        cls,
        pretrained: PretrainedWeights,
        task: Task,
        *,
        seed: int = 0,
        keep_head: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a model of a task with pretrained weights that have been read.

        Args:
            pretrained: Configuration, vocabulary and weights.
            task: The task.
            seed: Seed of the head, of the order of rows and of dropout.
            keep_head: Whether to keep the head of fine-tuned weights; by default if task type and
                labels match.
            **kwargs: Arguments of the constructor.

        Raises:
            UserError: If the task does not fit the weights.
        """
        if len(task.input_names) > pretrained.config.type_vocab_size:
            raise UserError(
                f"{', '.join(task.input_names)}: pairs require two segments, but "
                f"{pretrained.origin} has one"
            )
        seed = to_python(seed)
        keras.utils.set_random_seed(seed)
        model = cls(task, pretrained.config, pretrained.vocabulary, seed=seed, **kwargs)
        head = pretrained.head_for(task.to_dict(), keep_head)
        pretrained.assign_to(model.network, head)
        model.has_new_head = head is None and cls.has_head
        model.record["origin"] = pretrained.origin_in(model.network, head)
        return model

    # Parts.

    @property
    def fit_defaults(self) -> dict[str, Any]:
        """Batch size, epochs and learning rate of the task type."""
        return task_defaults(self.task.kind)

    @property
    def task(self) -> Task:
        """The task, with the values that were tuned."""
        return self.preprocessor.task

    @property
    def encoder(self) -> keras.layers.Layer:
        """The `Encoder`."""
        return self.network.encoder

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary."""
        return self.preprocessor.vocabulary

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The labels in the order of their ids, or `None` if the task has none."""
        return getattr(self.task, "labels", None)

    @property
    def serving(self) -> ServingFunctions:
        """The traced functions from strings to predictions, as they are exported."""
        check_not_forked(self._process)
        with self._graph_lock:
            # A tuned task has other thresholds in its graph. New weights need no other graph.
            if self._serving is None or self._serving.task != self.task:
                tokenizer = self.preprocessor.tokenizer
                serving = ServingFunctions(self.pipeline_class(self.task, tokenizer, self.network))
                _ = serving.signatures  # Made here, in one thread.
                object.__setattr__(self, "_serving", serving)
            return self._serving

    def adapt_to(self, names: Collection[str]) -> None:
        """Adapt to the weights of a run, of which these are loaded; called by `load_model`."""

    # Calls.

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> dict[str, tf.Tensor]:
        """Convert Python strings to token ids first, since Keras accepts tensors only."""
        check_not_forked(self._process)
        return super().__call__(self._token_ids(inputs), *args, **kwargs)

    def _token_ids(self, inputs):
        if isinstance(inputs, Mapping) and not set(self.task.input_names) & set(inputs):
            return inputs
        return self.preprocessor(inputs)

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Map token ids to the outputs of the network.

        Args:
            inputs: Batch of the encoder; strings are converted before.
            training: Turns dropout on.
            seed: int64 `(2,)`, the dropout seed; by default a function of the model's seed, the
                step and the replica, so that a resumed `fit` draws the same masks.
        """
        replica = tf.distribute.get_replica_context()
        if training and seed is None and self.optimizer is not None and replica is not None:
            step = compiling.batch_counter(self.optimizer)
            seed = dropout_seed(self.seed, step, replica.replica_id_in_sync_group)
        return self.network(inputs, training=training, seed=seed)

    @argument_names()
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> dict[str, np.ndarray]:
        """Return the predictions of rows, as the served model returns them.

        Args:
            x: Strings, see `fit`. Dicts of token ids return the network's outputs instead.
            batch_size: Rows per call of the traced function; by default 1024.
            verbose: As in Keras for token ids; nothing is printed for strings.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.

        Returns:
            `{name: array (N, ...)}`; strings are `str`. Lists of different lengths are padded with
            "" and -1.

        Raises:
            UserError: If x has no rows, or rows that are no strings.
        """
        batch_size = ROWS_PER_CALL if batch_size is None else batch_size
        if is_token_ids(x):
            return super().predict(x, batch_size, verbose, steps, callbacks)
        x, batch_size = first_batches(x, steps), positive("batch_size", batch_size)
        fitting.check_none(callbacks=callbacks)
        creation.warn_if_untrained(self)
        return self.serving.call("serving_default", self._columns(x), batch_size)

    @argument_names()
    def predict_rows(self, x: Any, batch_size: int = ROWS_PER_CALL) -> list[dict[str, Any]]:
        """Return one dict of Python values per row, without padding, as tasks.predict writes."""
        batch_size = positive("batch_size", batch_size)
        creation.warn_if_untrained(self)
        return self.serving.predict_rows(self._columns(x), batch_size)

    def tokenize(self, x: Any) -> dict[str, np.ndarray]:
        """Return token ids, mask, segments and character offsets, int32 `(N, L)` or `(N, W, L)`."""
        return self.serving.call("tokenize", self._columns(x))

    @argument_names()
    def embed(self, texts: Any) -> dict[str, np.ndarray]:
        """Return vectors of texts: "pooled" and "mean" over all tokens, float32 `(N, H)`."""
        return self.serving.call("embed", columns_of(texts, ("text",)))

    def attention(self, x: Any) -> list[tuple[list[str], np.ndarray]]:
        """Return the attention maps of each sequence.

        Returns:
            Per sequence its tokens, and the attention probabilities, float32 `(layers, heads, L,
            L)`. A long text of a task with windows has several sequences.
        """
        return self.serving.attention(self._columns(x))

    def _columns(self, x):
        return self.task.reader.columns(inputs_of(x))

    # Training.

    def compile(self, optimizer: Any = "auto", loss: Any = "auto", **kwargs: Any) -> None:
        """Configure training; see `tasks.model.compiling.resolve` for defaults and arguments."""
        compiling.check_scope(self._created_in, "compile")
        with self.distribute_strategy.scope():
            super().compile(**compiling.resolve(self, optimizer, loss, **kwargs))
            # Variables made inside of the first step would double the time to trace it.
            self.optimizer.build(self.trainable_variables)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with the configuration of a saved model; called by Keras."""
        super().compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    @argument_names()
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: Any = "auto",
        callbacks: Any = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Train on strings and labels; see `tasks.model.fitting.fit` for the arguments."""
        check_not_forked(self._process)
        compiling.check_scope(self._created_in, "fit")
        if not self.compiled:
            self.compile()
        callbacks = [] if callbacks is None else tf.nest.flatten(callbacks)
        compiling.check_callbacks(self, callbacks)
        kwargs |= {"batch_size": batch_size, "verbose": verbose, "callbacks": callbacks}
        if epochs is not None:  # The default of Keras is another one.
            kwargs["epochs"] = epochs
        if is_token_ids(x):
            return fitting.fit_batches(self, super().fit, x, y, **kwargs)
        return fitting.fit(self, super().fit, x, y, **kwargs)

    @argument_names()
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = True,
        _use_cached_eval_dataset: bool = False,
    ) -> dict[str, float]:
        """Return the loss and the task's metrics by name.

        Args:
            x: Rows, see `fit`.
            y: Labels, see `fit`.
            batch_size: Sequences per step and replica; by default 64.
            verbose: As in Keras for token ids; nothing is printed for strings.
            sample_weight: As in Keras, for token ids only: metrics count every row once.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.
            return_dict: False returns a list, for token ids only.
            _use_cached_eval_dataset: Given by `fit` of Keras.
        """
        if _use_cached_eval_dataset and self._validation is not None:
            return self._validation()
        batch_size = 64 if batch_size is None else batch_size
        if is_token_ids(x):
            if not self.compiled:
                self.compile()
            return super().evaluate(
                *(x, y, batch_size, verbose, sample_weight, steps, callbacks),
                return_dict=return_dict,
                _use_cached_eval_dataset=_use_cached_eval_dataset,
            )
        x, batch_size = first_batches(x, steps), positive("batch_size", batch_size)
        fitting.check_none(sample_weight=sample_weight, callbacks=callbacks)
        if not return_dict:
            raise UserError("return_dict=False: expected True, since metrics have names")
        return self.evaluator(batch_size).metrics(fitting.encode(self, x, y))

    @argument_names()
    def report(self, x: Any, y: Any = None) -> dict[str, Any]:
        """Return the metrics, and tables such as metrics per label and the confusion matrix."""
        return self.evaluator().report(fitting.encode(self, x, y))

    @argument_names()
    def tune(self, x: Any, y: Any = None) -> Self:
        """Fit thresholds and temperature to dev rows, if the task has any; return the model."""
        encoded = fitting.encode(self, x, y)
        self.preprocessor.task = self.task.postprocessor.tune(
            encoded, self.evaluator().outputs(encoded)
        )
        return self

    def evaluator(self, batch_size: int = 64) -> Evaluator:
        """Return the evaluator of the model, whose graph is built once."""
        check_not_forked(self._process)
        with self._graph_lock:
            if self._evaluator is None:
                evaluator = Evaluator(self.task, self.network, self.distribute_strategy)
                object.__setattr__(self, "_evaluator", evaluator)
        # Neither is part of the graph.
        self._evaluator.task, self._evaluator.replica_batch_size = self.task, batch_size
        return self._evaluator

    def train(
        self,
        x: Any,
        y: Any = None,
        dev: Any = (),
        *,
        output_dir: str | os.PathLike[str],
        **settings: Any,
    ) -> Self:
        """Train in a run directory as tasks.finetune does; see `tasks.model.run_training.train`."""
        compiling.check_scope(self._created_in, "train")
        run_training.train(self, x, y, dev, output_dir=output_dir, **settings)
        return self

    def freeze(self, num_layers: int) -> None:
        """Exclude the embeddings and the lowest `num_layers` encoder layers from training.

        A compiled model is compiled again; the optimizer's moments start from 0.
        """
        self.encoder.freeze(num_layers)
        self.frozen_layers = to_python(num_layers)
        if self.compiled:
            self.compile_from_config(self.get_compile_config())

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of Keras."""
        logs = super().train_step(data)
        own_gradients()
        return logs

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one evaluation step of Keras."""
        logs = super().test_step(data)
        own_gradients()
        return logs

    # Methods of Keras for token ids, which strings have others for.

    def train_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch of token ids; strings are trained with `fit`."""
        _check_token_ids(x, "train_on_batch", "fit")
        return super().train_on_batch(x, *args, **kwargs)

    def test_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch of token ids; strings are evaluated with `evaluate`."""
        _check_token_ids(x, "test_on_batch", "evaluate")
        return super().test_on_batch(x, *args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the network's outputs of token ids; strings are predicted with `predict`."""
        _check_token_ids(x, "predict_on_batch", "predict")
        return super().predict_on_batch(x)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Raise UserError: the package `export` writes SavedModels."""
        raise UserError(f"export: {_PUBLISH}")

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Raise UserError: the package `export` writes quantized SavedModels."""
        raise UserError(f"quantize: {_PUBLISH} with precision='int8'")

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Return what TensorFlow saves; called by `tf.saved_model.save`, which cannot save it."""
        if save_type == "savedmodel":
            raise UserError(f"tf.saved_model.save: {_PUBLISH}")
        return super()._trackable_children(save_type, **kwargs)

    # Files.

    def save(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a .keras file with weights, vocabulary and optimizer, which `load_model` reads."""
        if not str(filepath).endswith(".keras"):
            raise UserError(
                f"{filepath}: expected a file that ends in .keras; save_run writes a run directory"
            )
        super().save(filepath, *args, **kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Create a model from its Keras config; files without `has_new_head` have a trained one."""
        return super().from_config({"has_new_head": False, **config}, custom_objects)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Load weights, and with them a head; see keras.Model.load_weights."""
        super().load_weights(filepath, *args, **kwargs)
        self.has_new_head = False

    def save_run(self, path: str | os.PathLike[str]) -> Run:
        """Write a run directory, which all commands and `load_model` read."""
        return save_run(path, self.config, self.vocabulary, self.record, self.task, self.network)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the vocabulary is an asset of the preprocessor."""
        return {
            "task": self.task.to_dict(),
            "config": self.config.to_dict(),
            "seed": self.seed,
            "frozen_layers": self.frozen_layers,
            "record": self.record,
            "has_new_head": self.has_new_head,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
        }


def _check_token_ids(x, method, other):
    if not is_token_ids(x):
        raise UserError(f"{method}: expected token ids; call {other} with strings")
