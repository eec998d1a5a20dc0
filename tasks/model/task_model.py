"""Keras models that map strings to predictions, one class per task type.

    model = TextClassifier.from_pretrained(PATH, labels=["billing", "hardware"])
    model.fit(texts, labels)
    model.predict_rows(["My invoice is wrong."])[0]["label"]

A `TaskModel` is a Keras model on token ids. It joins three parts: a preprocessor (strings to token
ids), a network (token ids to outputs), and the task, which knows how rows become examples, and
outputs predictions and metrics. `fit` of strings makes one dataset of token ids and calls Keras
with it; `predict` and `evaluate` of strings are those of the served model and of the task.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError, argument_names
from bert_tf.model.dense import initial_weights_seed
from bert_tf.model.encoder import set_untrained
from bert_tf.model.encoder import untrained as names_of_untrained
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from bert_tf.system.processes import check_not_forked
from bert_tf.system.scalars import to_python
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train import compilation
from bert_tf.train.compilation import is_accelerated, is_default
from bert_tf.train.distribution import DTYPE_POLICIES, distribute, warn_of_float16
from bert_tf.train.losses import compares_examples
from bert_tf.train.optimizer import AdamBase
from bert_tf.train.step import TrainStep
from bert_tf.weights import heads
from bert_tf.weights.sources import PretrainedWeights, read_pretrained
from tasks.base.task import Task, task_from_dict
from tasks.base.task_types import default_settings, task_type
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.readers.memory import columns_of, without_axis
from tasks.graph.evaluation import Evaluator
from tasks.graph.heads import EncoderModel
from tasks.graph.pipeline import ROWS_PER_CALL, Pipeline, ServingFunctions
from tasks.graph.preprocessor import Preprocessor
from tasks.graph.run_checkpoint import PRETRAINED, RunCheckpoint
from tasks.model import run_training
from tasks.model.compile_arguments import (
    LossMeans,
    check_outputs,
    copy_of,
    factors_by_output,
    for_step,
    losses_by_output,
    metrics_by_output,
    optimizer_of,
)
from tasks.model.fit_callback import FitCallback, training_errors
from tasks.model.labelled_rows import (
    check_dataset,
    class_factors,
    evaluation_examples,
    examples_of,
    first_batches,
    inputs_of,
    is_token_ids,
    positive,
    split,
    unweighted,
)
from tasks.model.private_keras import ReplicaMetrics, forget_resumed_epoch, with_num_steps
from tasks.model.string_batches import checked, to_token_ids
from tasks.training.training_run import has_trained_pooler

_COMMON_OPTIONS = (
    "max_seq_length",
    "seed",
    "dtype",
    "do_lower_case",
    "frozen_layers",
    "keep_head",
)
_DTYPES = tuple(dict.fromkeys(DTYPE_POLICIES.values()))  # Weights and outputs are float32.
# Stages of the head: untrained, with the weights that it came with, trained with fit.
_NEW, _KEPT, _TRAINED = 0.0, 1.0, 2.0


class TaskModel(ReplicaMetrics, EncoderModel):
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
        has_new_head: Whether the head is untrained.
        untrained: Names of the variables that are not trained, of a Keras config, since `trainable`
            may have been set; by default those of `frozen_layers`.
        dtype: Keras dtype policy, "float32", "mixed_bfloat16" or "mixed_float16"; by default the
            global policy of Keras.
        **kwargs: Arguments of keras.Model.

    Attributes:
        config: The `BertConfig`.
        preprocessor: `Preprocessor`, from strings to token ids.
        network: Encoder and head, from token ids to outputs.
        source: The `RunCheckpoint` that `load_model` read the weights from, or that `train` wrote;
            else `None`.
    """

    source: RunCheckpoint | None = None
    task_class: ClassVar[type[Task]]
    options: ClassVar[tuple[str, ...]] = ()
    pipeline_class: type[Pipeline] = Pipeline
    # Made when they are needed, and by `compile`.
    _serving: Any = None
    _evaluator: Any = None
    _step: Any = None
    _compile_arguments: Any = None

    def __init__(
        self,
        task: Task | Mapping[str, Any] | None = None,
        config: BertConfig | Mapping[str, Any] | None = None,
        vocabulary: Vocabulary | None = None,
        *,
        network: keras.Model | None = None,
        seed: int = 0,
        frozen_layers: int | None = None,
        record: Mapping[str, Any] | None = None,
        has_new_head: bool = True,
        untrained: Collection[str] | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if task is None or config is None:
            name = type(self).__name__
            raise UserError(
                f"{name}(): expected {name}.from_pretrained(PATH, ...), which has weights"
            )
        task = task_from_dict(task) if isinstance(task, Mapping) else task
        config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        kwargs.pop("name", None)  # The name is part of the names of variables in checkpoints.
        # Keras would round features and token ids that are floats to the compute dtype.
        super().__init__(name=task.kind, dtype=_dtype_policy(dtype), autocast=False, **kwargs)
        warn_of_float16(self.dtype_policy.name)
        self.seed, self.config = to_python(seed), config
        # Keras would replace a dict by a tracked copy.
        object.__setattr__(self, "record", dict(record or {}))
        self._created_in, self._process = tf.distribute.get_strategy(), os.getpid()
        self._graph_lock = threading.RLock()  # Of graphs, which are built once.
        self.network = network or task.build_model(config, self.dtype_policy)
        self.uses_pooler = getattr(self.network, "uses_pooler", True)
        if frozen_layers is not None:
            self.network.encoder.freeze(frozen_layers)
        if untrained is not None:
            set_untrained(self.network, untrained)
        # Of which runs consist.
        object.__setattr__(self, "_shapes", _shapes(self.network))
        # Not a layer that Keras tracks: it would refuse to compile the step, which has no strings.
        preprocessor = Preprocessor.of(task.with_tuned({}), config, vocabulary)
        object.__setattr__(self, "preprocessor", preprocessor)
        self.loss_means = LossMeans(task.losses)
        # What belongs to the weights is loaded and saved with them, and ends with a train step.
        stage = _NEW if has_new_head and task.has_head else _KEPT
        self._stage = self._state("stage", (), stage)
        tuned = {
            name: self._state(name, shape, float("nan"))
            for name, shape in task.tunable_fields.items()
        }
        object.__setattr__(self, "_tuned", tuned)
        self._set_tuned(task)
        # Read by the datasets of `dataset`, set by `fit`.
        object.__setattr__(self, "_epoch", tf.Variable(0, dtype=tf.int64, trainable=False))
        self.built = True

    def _state(self, name, shape, value):
        """Return a variable that belongs to the weights."""
        return self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(value),
            dtype="float64",
            trainable=False,
            name=name,
            aggregation="only_first_replica",
        )

    @classmethod
    @argument_names()
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        max_seq_length: int | None = None,
        seed: int = 0,
        dtype: str | None = None,
        do_lower_case: bool | None = None,
        frozen_layers: int | None = None,
        keep_head: bool = True,
        **options: Any,
    ) -> Self:
        """Create a model with pretrained weights.

        Args:
            path: Id of a model of the Hugging Face hub, run, Hugging Face directory, TensorFlow
                checkpoint or keras-hub preset.
            max_seq_length: Maximum tokens per sequence; by default that of a head or embedder at
                the path whose options are kept, else 128 (256 for TextRanker, 384 for
                QuestionAnswerer, 512 for MaskedLanguageModel).
            seed: Seed of the head, of the order of rows and of dropout.
            dtype: Keras dtype policy; by default the global one.
            do_lower_case: Overrides the setting of the pretrained weights.
            frozen_layers: Number of lowest encoder layers that are not trained.
            keep_head: Keeps the head of fine-tuned weights if task type and labels match; warns
                if they do not. False is a new head without a warning.
            **options: Options of the task, see the class; by default those of a head of this task
                type, unless `labels` are given.

        Raises:
            UserError: If there is no model, or an option does not fit it.
        """
        for name in options:
            if name not in cls.options:
                raise UserError(
                    f"{name}: unknown option of {cls.__name__}; expected one of "
                    f"{', '.join((*cls.options, *_COMMON_OPTIONS))}"
                )
        pretrained = read_pretrained(path, do_lower_case)
        # A new head has no option of the one that it replaces.
        source = pretrained if keep_head else dataclasses.replace(pretrained, task=None)
        task = cls._create_task(source, max_seq_length, options)
        if keep_head and task.has_head:
            _warn_of_other_head(pretrained, task)
        return cls.from_weights(
            pretrained,
            task,
            seed=seed,
            keep_head=None if keep_head else False,
            frozen_layers=frozen_layers,
            dtype=dtype,
        )

    @classmethod
    def _create_task(cls, pretrained, max_seq_length, options) -> Task:
        """Create the task of the options of `from_pretrained` for pretrained weights."""
        given = {} if max_seq_length is None else {"max_seq_length": to_python(max_seq_length)}
        options = cls._options_from(pretrained, {**to_python(options), **given})
        limit = pretrained.config.max_position_embeddings
        default = min(default_settings(cls.task_class.kind)["max_seq_length"], limit)
        max_seq_length = options.pop("max_seq_length", default)
        if type(max_seq_length) is not int or not 4 <= max_seq_length <= limit:
            raise UserError(
                f"max_seq_length={max_seq_length!r:.80}: expected 4 to {limit}, the number of "
                f"positions of {pretrained.origin}"
            )
        task = cls.task_class.from_options(max_seq_length=max_seq_length, **options)
        task.checked(dataclasses.asdict(task), cls.__name__)  # As its files are.
        return task

    @classmethod
    def _options_from(cls, pretrained, given) -> dict[str, Any]:
        """Return the options of the task; those that are not given are those of the weights."""
        source, kind = pretrained.run_task or {}, cls.task_class.kind
        brought = heads.options_of(pretrained.task or {}, kind, cls.options, given)
        trained = pretrained.has_trained_pooler
        options = {**brought, **cls.task_class.options_from(source, given, trained), **given}
        if "labels" in cls.options and "labels" not in options:
            found = f"a {pretrained.task['kind']} head" if pretrained.task else "no head"
            raise UserError(
                f"labels: expected names, in a list, or weights with a {kind} head to keep. "
                f"Received: no labels, and {pretrained.origin} with {found}"
            )
        return options

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
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise UserError(f"seed={seed!r:.80}: expected an integer >= 0 and < 2**32")
        with initial_weights_seed(seed):
            task = task.for_weights(pretrained.weights)
            model = cls(task, pretrained.config, pretrained.vocabulary, seed=seed, **kwargs)
            head = pretrained.head_for(task.to_dict(), keep_head)
            pretrained.assign_to(model.network, head)
        model.has_new_head = head is None or pretrained.has_new_head
        model.record["origin"] = pretrained.origin_in(model.network, head)
        model.record["has_trained_pooler"] = pretrained.has_trained_pooler
        return model

    # Parts.

    @property
    def fit_defaults(self) -> dict[str, Any]:
        """Batch size, epochs and learning rate of the task type."""
        return default_settings(self.task.kind)

    @property
    def task(self) -> Task:
        """The task, with the values that were tuned for the weights."""
        task = self.preprocessor.task
        if not self._tuned:
            return task
        values = {name: variable.numpy().tolist() for name, variable in self._tuned.items()}
        return task.with_tuned(
            {name: value for name, value in values.items() if not np.isnan(value).any()}
        )

    def _set_tuned(self, task):
        """Keep the tuned values of a task."""
        for name, variable in self._tuned.items():
            value = getattr(task, name)
            variable.assign(np.full(variable.shape, np.nan if value is None else value))

    @property
    def has_new_head(self) -> bool:
        """Whether the head is untrained; set it to False after a training loop of your own."""
        return bool(self._stage.numpy() == _NEW)

    @has_new_head.setter
    def has_new_head(self, value: bool) -> None:
        self._stage.assign(_NEW if value and self.preprocessor.task.has_head else _KEPT)

    @property
    def origin(self) -> str:
        """The origin of the weights, as a run directory records it."""
        is_trained = bool(self._stage.numpy() == _TRAINED)
        return self.record.get("origin", "new weights") + ", trained with fit" * is_trained

    def set_source(self, origin: str, task: Task) -> None:
        """Record that `train` has changed the weights: their origin, and the values tuned for them.

        Args:
            origin: The run, as a run directory records it.
            task: The task, with its tuned values.
        """
        self.record["origin"] = origin
        self.record["has_trained_pooler"] = has_trained_pooler(self.record, self.network)
        self._stage.assign(_KEPT)
        self._set_tuned(task)

    @property
    def encoder(self) -> keras.layers.Layer:
        """The `Encoder`."""
        return self.network.encoder

    @property
    def frozen_layers(self) -> int | None:
        """Number of lowest encoder layers that are not trained; see `Encoder.frozen_layers`."""
        return self.encoder.frozen_layers

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
            task = self.task
            if self._serving is None or self._serving.task != task:
                tokenizer = self.preprocessor.tokenizer
                strategy = self.distribute_strategy
                is_on_gpu = is_accelerated(strategy) and not isinstance(
                    strategy, tf.distribute.TPUStrategy
                )
                pipeline = self.pipeline_class(task, tokenizer, self.network, is_on_gpu=is_on_gpu)
                self._serving = ServingFunctions(pipeline)
            return self._serving

    # Calls.

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Map token ids to the outputs of the network.

        Args:
            inputs: Batch of the encoder, as `preprocess` returns it.
            training: Turns dropout on.
            seed: int64 `(2,)`, the dropout seed; drawn by the encoder if `None`. That of `fit` is a
                function of the model's seed, the step and the replica, so that a resumed `fit`
                draws the same masks.
        """
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
            x: Strings, see `fit`. Token ids go to Keras, and return the network's outputs.
            batch_size: Rows per call of the traced function; by default 1024.
            verbose: As in Keras.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.

        Returns:
            `{name: array (N, ...)}`; strings are `str`. Lists of different lengths are padded with
            "" and -1, scores and probabilities of missing texts with 0.

        Raises:
            UserError: If x has no rows, or rows that are no strings.
        """
        if is_token_ids(x):
            return super().predict(x, batch_size, verbose, steps, callbacks)
        return self._served("serving_default", x, batch_size, verbose, steps, callbacks)

    def _served(
        self, signature, x, batch_size=None, verbose="auto", steps=None, callbacks=None, *, more=()
    ):
        """Return the outputs of a signature for strings; `more` are inputs of all rows by name."""
        _check_no_callbacks(callbacks)
        batch_size = positive("batch_size", ROWS_PER_CALL if batch_size is None else batch_size)
        columns = self._columns(first_batches(x, steps))
        count = len(next(iter(columns.values())))
        columns |= {name: [value] * count for name, value in dict(more).items()}
        self._warn_if_untrained()
        progress = _progress(count, batch_size, verbose)
        return self.serving.call(signature, columns, batch_size, progress)

    @argument_names()
    def predict_rows(self, x: Any, batch_size: int = ROWS_PER_CALL) -> list[dict[str, Any]]:
        """Return one dict of Python values per row, without padding, as bert-tf predict writes."""
        batch_size = positive("batch_size", batch_size)
        self._warn_if_untrained()
        return self.serving.predict_rows(self._columns(x), batch_size)

    def _warn_if_untrained(self):
        untuned = self.task.untuned_fields
        if self.has_new_head:
            warn_of_new_head(self, stacklevel=5)
        elif untuned and not (
            self.task.tunes_without_request or task_type(self.task.kind).needs_dev
        ):
            warnings.warn(f"{', '.join(untuned)}: never tuned; call tune(x, y)", stacklevel=5)

    def tokenize(self, x: Any) -> dict[str, np.ndarray]:
        """Return token ids, mask, segments and character offsets, int32 `(N, L)` or `(N, W, L)`."""
        return self.serving.call("tokenize", self._columns(x))

    @argument_names()
    def embed(self, texts: Any) -> dict[str, np.ndarray]:
        """Return vectors of texts: "pooled" and "mean" over all tokens, float32 `(N, H)`."""
        return self.serving.call("embed", columns_of(inputs_of(texts), ("text",)))

    def attention(self, x: Any) -> list[tuple[list[str], np.ndarray]]:
        """Return the attention maps of each sequence.

        Returns:
            Per sequence its tokens, and the attention probabilities, float32 `(layers, heads, L,
            L)`. A long text of a task with windows has several sequences.
        """
        return self.serving.attention(self._columns(x))

    def _columns(self, x):
        return self.task.columns(inputs_of(x))

    # From strings to datasets.

    @argument_names()
    def dataset(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> tf.data.Dataset:
        """Return the batches (token ids, labels, weights) that `fit` of strings trains on.

        `fit` of this dataset draws the same order in each epoch.

        Args:
            x: Strings, see `fit`.
            y: Labels, see `fit`.
            sample_weight: Loss weight per row.
            batch_size: Sequences per step over all replicas; by default that of the task type.
            shuffle: Draws the order anew in each epoch, as a function of (seed, epoch).
        """
        encoded = self._training_rows(examples_of(self.preprocessor.task, x, y, sample_weight))
        if self._num_replicas > 1:  # Keras divides these batches.
            encoded.layout, encoded.static_shape = to_padded, True
        return encoded.epoch_batches(
            global_batch_size=self._batch_size(batch_size),
            seed=self.seed,
            epoch=self._epoch,
            shuffle=shuffle,
        )

    @tf.autograph.experimental.do_not_convert
    def preprocess(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Map a batch of strings to token ids, for `tf.data.Dataset.map`.

            dataset = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(32)
            model.fit(dataset.map(model.preprocess))

        Args:
            x: Strings `(B,)`; for several inputs a tuple, or a dict by name.
            y: Labels; names or ids, see `fit`.
            sample_weight: Loss weights `(B,)`.

        Returns:
            Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids"; with labels, a
            tuple of it, labels by output, and loss weights `(B,)` by output.

        Raises:
            UserError: If rows of the task may have several sequences, or labels need the tokens.
        """
        return self._preprocessed(x, y, sample_weight)

    def _preprocessed(self, x, y=None, sample_weight=None, factors_C=()):
        """Do what `preprocess` does; `factors_C` are loss weights by label."""
        length = self.preprocessor.task.max_seq_length if self._is_compiled else None
        return to_token_ids(
            self.preprocessor, x, y, sample_weight, factors_C=factors_C, length=length
        )

    # Training.

    @argument_names()
    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        learning_rate: float | None = None,
        warmup_proportion: float = 0.1,
        schedule: str = "released",
        layer_decay: float = 1.0,
        jit_compile: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        """Configure training.

        Args:
            optimizer: "auto" is AdamW with weight decay 0.01, clipping at 1 and bias correction.
                Otherwise as in Keras.
            loss: "auto" is the task's loss, a mean over all replicas; or an object of Keras for
                logits, or a function.
            metrics: "accuracy", if the task has one, and metrics of Keras. Keras gives these no
                weights: they count padding, and rows that fill a batch up.
            weighted_metrics: Metrics that are weighted as the loss. By default, the accuracy is the
                only metric.
            loss_weights: As in Keras.
            learning_rate: Peak learning rate; by default that of the task type (5e-5; ranking 2e-5;
                anomaly 3e-3). Another schedule than those below is part of the optimizer, as in
                AdamW(schedule).
            warmup_proportion: Fraction of the steps of a `fit` used for warmup.
            schedule: Linear decay, "released" (google-research/bert) or "continuous" (Hugging
                Face).
            layer_decay: Factor on the learning rate from each layer to the one below.
            jit_compile: Compiles the step with XLA, on batches of few shapes. "auto" does so on
                GPUs and TPUs, those of the machine that loads a saved model. On several, a loss
                that compares the rows of a batch turns it off.
            **kwargs: Other arguments of keras.Model.compile, unchanged.

        Raises:
            UserError: If an argument is wrong, or does not fit the task.
        """
        self._check_trainable("compile")
        if self._num_replicas > 1 and kwargs.get("steps_per_execution", 1) != 1:
            raise UserError(
                f"steps_per_execution={kwargs['steps_per_execution']!r:.80}: expected 1 on several "
                "replicas, where the loop of Keras 3 over steps fails; train has a loop of its own"
            )
        of_auto = {
            "learning_rate": learning_rate,
            "warmup_proportion": warmup_proportion,
            "schedule": schedule,
            "layer_decay": layer_decay,
        }
        given = {"loss": loss, "metrics": metrics, "weighted_metrics": weighted_metrics}
        given |= {"loss_weights": loss_weights, "jit_compile": jit_compile}
        arguments = {"optimizer": optimizer, **of_auto, **given, **kwargs}
        # Keras would replace a dict by a tracked copy.
        object.__setattr__(self, "_compile_arguments", arguments)
        task, strategy = self.preprocessor.task, self.distribute_strategy
        with strategy.scope():
            optimizer = optimizer_of(self, optimizer, **of_auto)
            losses = losses_by_output(task, loss)
            check_outputs(task, losses, "loss_weights", loss_weights)
            metrics, weighted_metrics = metrics_by_output(task, losses, metrics, weighted_metrics)
            is_compiled = is_accelerated(strategy) if jit_compile == "auto" else bool(jit_compile)
            if self._num_replicas > 1 and compares_examples(losses.values()):
                is_compiled = False  # XLA does not gather the outputs of other replicas.
            if isinstance(optimizer, AdamBase) and optimizer.scales_loss:
                kwargs.setdefault("auto_scale_loss", False)  # Keras would scale it again.
            super().compile(
                optimizer=optimizer,
                loss=losses,
                loss_weights=loss_weights,
                metrics=metrics or None,
                weighted_metrics=weighted_metrics or None,
                # Keras would compile the calls of all replicas as one program, in which XLA cannot
                # sum their gradients.
                jit_compile=is_compiled and is_default(strategy),
                **kwargs,
            )
            # Variables made inside of the first step would double the time to trace it.
            self.optimizer.build(self.trainable_variables)
        self.loss_means.loss_weights = factors_by_output(losses, loss_weights)
        self._step = TrainStep(
            self,
            {name: for_step(given) for name, given in losses.items()},
            self.optimizer,
            strategy,
            self.seed,
            is_compiled=is_compiled,
            loss_weights=self.loss_means.loss_weights,
        )

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile`; called by Keras."""
        config: Any = super().get_compile_config()
        if config:  # As given, since "auto" depends on the devices of the process.
            config["jit_compile"] = self._compile_arguments["jit_compile"]
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with the arguments of a saved model; called by Keras."""
        self.compile(**keras.saving.deserialize_keras_object(config))

    def _check_trainable(self, method):
        """Raise UserError in the scope of another strategy, or if `compute_loss` is overridden."""
        own, strategy = type(self), tf.distribute.get_strategy()
        is_overridden = own.compute_loss is not keras.Model.compute_loss
        if is_overridden and own.train_step is TaskModel.train_step:
            raise UserError(
                f"{method}: {own.__name__}.compute_loss would never be called; pass a loss to "
                "compile, or call add_loss in a layer of the network"
            )
        if tf.distribute.has_strategy() and strategy is not self._created_in:
            raise UserError(
                f"{method}: the model was created outside of the scope of this "
                f"{type(strategy).__name__}; create it inside"
            )

    @property
    def _is_compiled(self):
        """Whether XLA compiles the step, on batches of few shapes."""
        return self._step.is_compiled if self._step else is_accelerated(self.distribute_strategy)

    @property
    def _num_replicas(self):
        return self.distribute_strategy.num_replicas_in_sync

    @argument_names()
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[Any, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> keras.callbacks.History:
        """Train on strings and labels; arguments as of keras.Model.fit.

        Rows are tokenized once. Their order is a function of (seed, epoch), so that a `fit` that
        BackupAndRestore resumes sees the same batches.

        Args:
            x: Strings: a list, tuple, NumPy array or pandas column; for two inputs a tuple of two,
                or a dict or DataFrame with a column per input. Or `Rows` of `read_examples`, with
                y. Or a tf.data.Dataset of batches (x, y) or (x, y, sample_weight) of strings, which
                `preprocess` maps. Token ids, as a dict or a dataset, go to Keras as they are.
            y: Labels per row: names or ids of classes, numbers, entities, answers or choices. With
                token ids, ids.
            batch_size: Sequences per step over all replicas; by default that of the task type.
            epochs: By default those of the task type, and 1 for token ids.
            verbose: As in Keras.
            callbacks: As in Keras. Logs contain each metric of the task on the validation rows as
                val_NAME, and those of `compile`.
            validation_split: Fraction of the rows, the last ones, for validation.
            validation_data: Rows for validation: (x, y), `Rows` or a dataset. Every row counts
                once.
            shuffle: Draws the order of rows anew in each epoch.
            class_weight: Loss weight by label name or id; by id for token ids.
            sample_weight: Loss weight per row.
            initial_epoch: As in Keras.
            steps_per_epoch: Steps of an epoch; by default all rows once. The rows of the next epoch
                are those that follow.
            validation_steps: Batches of a dataset as `validation_data` that are read; by default
                all.
            validation_batch_size: Sequences per step and replica in validation and tuning; by
                default 64.
            validation_freq: As in Keras.

        Returns:
            The Keras History.

        Raises:
            UserError: If a column, label, type or length is wrong.
        """
        check_not_forked(self._process)
        self._check_trainable("fit")
        if not self.compiled:
            self.compile()
        forget_resumed_epoch(self)
        size = 64 if validation_batch_size is None else validation_batch_size
        size = positive("validation_batch_size", size)
        is_ids, dev = is_token_ids(x), None
        if validation_data is not None and not _has_token_ids(validation_data):
            dev = self._dev_rows(validation_data, validation_steps)
            validation_data = validation_steps = None
        elif validation_data is not None:
            several = isinstance(validation_data, list | tuple)
            checked_x = self._checked(*(validation_data if several else [validation_data]))
            validation_data = validation_data if several else checked_x
        # Token ids and their arguments are those of Keras.
        data: dict[str, Any] = {
            "x": x,
            "y": y,
            "batch_size": batch_size,
            "validation_split": validation_split,
            "shuffle": shuffle,
            "class_weight": class_weight,
            "sample_weight": sample_weight,
            "steps_per_epoch": steps_per_epoch,
        }
        if is_ids:
            data["x"] = self._checked(x, y, sample_weight)
            data["shuffle"] = shuffle and not isinstance(x, tf.data.Dataset)
        elif isinstance(x, tf.data.Dataset):
            data |= self._dataset_for_keras(**data)
        else:
            data, dev = self._rows_for_keras(dev, size, **data)
        callbacks = [] if callbacks is None else tf.nest.flatten(callbacks)
        encoded_dev, validate = None, None
        if dev is not None:
            task, evaluator = self.preprocessor.task, self.evaluator(size)
            encoded_dev = task.training_data(self.encode_examples(dev), evaluator)
            _warn(encoded_dev.token_counts.warnings("validation rows"))
            validate = functools.partial(self._validate, encoded_dev, size, callbacks)
        with training_errors(self):
            history = super().fit(
                **data,
                epochs=epochs or (1 if is_ids else self.fit_defaults["epochs"]),
                verbose=verbose,
                callbacks=[FitCallback(self._epoch, validate, validation_freq), *callbacks],
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
            )
        if encoded_dev is not None and self._tuned:
            self._tune(encoded_dev, size)
        return history

    def _checked(self, x, y=None, sample_weight=None):
        """Return token ids whose labels are checked."""
        with training_errors(self):
            return checked(self.preprocessor.task, x, y, sample_weight)

    def _dataset_for_keras(self, x, class_weight, **given):
        """Return the arguments of Keras for a dataset of strings."""
        names = ("y", "sample_weight", "batch_size")
        check_dataset(x, **{name: given[name] for name in names})
        if given["validation_split"]:
            raise UserError(
                "validation_split: expected none for a dataset; pass validation_data instead"
            )
        return {"x": self._stream(x, class_weight), "class_weight": None, "shuffle": False}

    def _rows_for_keras(
        self,
        dev,
        dev_batch_size,
        x,
        y,
        batch_size,
        validation_split,
        shuffle,
        class_weight,
        sample_weight,
        steps_per_epoch,
    ):
        """Return the arguments of Keras for rows of strings, and the validation rows."""
        examples = examples_of(self.preprocessor.task, x, y, sample_weight, class_weight)
        if dev is None and validation_split:
            examples, dev = split(examples, validation_split)
            self._check_dev(dev, "validation_split")
        encoded = self._training_rows(examples, dev_batch_size)
        batch_size = self._batch_size(batch_size)
        batches = self._distributed(encoded, batch_size, shuffle, steps_per_epoch)
        return {"x": batches, "shuffle": False}, dev

    def _validate(self, encoded, batch_size, callbacks):
        """Return the metrics of validation rows; call callbacks as Keras does around it."""
        for callback in callbacks:
            callback.on_test_begin(None)
        metrics = self._measured(encoded, batch_size)
        for callback in callbacks:
            callback.on_test_end(metrics)
        return metrics

    def _dev_rows(self, data, steps):
        """Return the rows of `validation_data` of strings."""
        task = self.preprocessor.task
        try:
            dev = evaluation_examples(task, first_batches(data, steps, "validation_steps"))
        except UserError as error:
            raise UserError(f"validation_data: {error}") from None
        self._check_dev(dev, "validation_data")
        return dev

    def _stream(self, dataset, class_weight):
        """Return a dataset of strings as one of token ids."""
        spec = dataset.element_spec
        if not isinstance(spec, tuple) or not 2 <= len(spec) <= 3:
            raise UserError("x: expected batches (x, y) or (x, y, sample_weight) in the dataset")
        task = self.preprocessor.task
        factors_C = () if class_weight is None else class_factors(task, class_weight)

        @tf.autograph.experimental.do_not_convert
        def to_ids(*batch):
            return self._preprocessed(*batch, factors_C=factors_C)

        dataset = dataset.map(to_ids, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _training_rows(self, examples, dev_batch_size=64):
        """Return the rows that training uses, encoded; warn of what they lose."""
        task = self.preprocessor.task
        selected = task.select_training_examples(examples)
        if not len(selected):
            raise UserError("x: expected at least one row to train on, received none")
        encoded = task.training_data(self.encode_examples(selected), self.evaluator(dev_batch_size))
        lines = [f"x: {line}" for line in task.label_warnings(encoded)]
        num_unused = len(examples) - len(selected)
        if num_unused and task.fault_of_unused:
            lines.append(
                f"x: {num_unused:,} of {len(examples):,} rows, {task.fault_of_unused}, are not "
                "used for training"
            )
        _warn([*encoded.token_counts.warnings("x"), *lines])
        return encoded

    def _distributed(self, encoded, batch_size, shuffle, steps_per_epoch):
        """Return the batches of one epoch in the layout of the device, for all replicas."""
        strategy, is_compiled = self.distribute_strategy, self._is_compiled
        if steps_per_epoch is None:
            steps_per_epoch = -(-len(encoded) // batch_size)
        steps_per_epoch = positive("steps_per_epoch", steps_per_epoch)

        def of_process(local):
            return encoded.epoch_batches(
                global_batch_size=batch_size,
                seed=self.seed,
                epoch=self._epoch,
                steps_per_epoch=steps_per_epoch,
                num_replicas=self._num_replicas,
                shuffle=shuffle,
                select=local.select,
            )

        return with_num_steps(distribute(of_process, strategy, is_compiled), steps_per_epoch)

    def encode_examples(self, examples: Examples) -> EncodedExamples:
        """Tokenize examples of the task, in the layout of the device."""
        is_compiled = self._is_compiled
        layout = compilation.layout(is_compiled, self.distribute_strategy)
        return EncodedExamples.encode(examples, self.serving.pipeline, layout, is_compiled)

    def _batch_size(self, batch_size):
        """Return the batch size of rows; raises UserError if replicas cannot share it."""
        if batch_size is None:
            batch_size = self.fit_defaults["global_batch_size"]
        batch_size = positive("batch_size", batch_size)
        if batch_size % self._num_replicas:
            raise UserError(
                f"batch_size={batch_size}: expected a multiple of the {self._num_replicas} replicas"
            )
        return batch_size

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of `fit`, that of `TrainStep`; return the means of the epoch so far."""
        x, y, weights = self._batch(data)
        outputs, terms, norm = self._step.on_batch((x, y, weights), self.loss_means.is_finite())
        self.loss_means.update_state(terms, norm)
        is_updated = tf.math.is_finite(norm)
        trained = tf.cast(_TRAINED, tf.float64)
        self._stage.assign(tf.where(is_updated, trained, self._stage))
        for variable in self._tuned.values():  # Which were tuned for other weights.
            variable.assign(tf.where(is_updated, tf.cast(np.nan, tf.float64), variable))
        return self._metrics_so_far(x, y, weights, outputs)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of `evaluate` on token ids; return the means so far."""
        x, y, weights = self._batch(data)
        outputs = self(x, training=False)
        own = self._step.own_losses(y)
        self.loss_means.update_state({**self._step.sums_of(y, weights, outputs), **own})
        return self._metrics_so_far(x, y, weights, outputs)

    def _batch(self, data):
        """Return inputs, and labels and weights by output, of what Keras allows."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        names = self._step.losses
        if isinstance(y, list | tuple):  # Keras sorts the outputs.
            y = dict(zip(sorted(names), y, strict=True))
        y, weights = (
            {name: of.get(name) if isinstance(of, Mapping) else of for name in names}
            for of in (y, weights)
        )
        if not self.preprocessor.task.has_lists_of_labels:
            # Those of token ids may be (B, 1), which would be broadcast with the losses (B,).
            y, weights = (
                {name: without_axis(values) for name, values in of.items()} for of in (y, weights)
            )
        return x, y, weights

    def _metrics_so_far(self, x, y, weights, outputs):
        """Return the means of the loss and of the metrics of `compile` so far."""
        has_weights = any(values is not None for values in weights.values())
        outputs = {name: outputs[name] for name in y}  # Keras expects labels of each output.
        return self.compute_metrics(x, y, outputs, weights if has_weights else None)

    # Evaluation.

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
        """Return the loss, the task's metrics and those of `compile`, by name.

        Args:
            x: Rows, see `fit`. Token ids go to Keras, which knows no metrics of the task.
            y: Labels, see `fit`.
            batch_size: Sequences per step and replica; by default 64.
            verbose: As in Keras.
            sample_weight: As in Keras for token ids; for strings 1, as metrics count each row once.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.
            return_dict: False returns a list, for token ids only.
            _use_cached_eval_dataset: Given by `fit` of Keras.
        """
        if is_token_ids(x):
            if not self.compiled:
                self.compile()
            with training_errors(self):
                return super().evaluate(
                    self._checked(x, y, sample_weight),
                    y,
                    batch_size,
                    verbose,
                    sample_weight,
                    steps,
                    callbacks,
                    return_dict,
                    _use_cached_eval_dataset=_use_cached_eval_dataset,
                )
        _check_no_callbacks(callbacks)
        if not return_dict:
            raise UserError("return_dict=False: expected True, since metrics have names")
        encoded = self._evaluation_rows(first_batches(x, steps), y, sample_weight)
        size = positive("batch_size", 64 if batch_size is None else batch_size)
        return self._measured(encoded, size, verbose)

    def _measured(self, encoded, batch_size, verbose=0):
        """Return the metrics of rows: those of `compile`, and those of the task."""
        evaluator, compiled = self.evaluator(batch_size), {}
        if self.compiled:
            self.reset_metrics()

        def add(numbers, labels, weights, outputs):
            if self.compiled:
                compiled.update(self.compute_metrics(None, labels, outputs, weights))

        evaluator.on_labels = add
        evaluator.on_samples = _progress(len(encoded), batch_size * self._num_replicas, verbose)
        try:
            metrics = evaluator.metrics(encoded)
        finally:
            evaluator.on_labels = evaluator.on_samples = None
        own = {name: float(value) for name, value in compiled.items() if name not in self._of_loss}
        return {**own, **metrics}

    @property
    def _of_loss(self):
        """Names of the losses among the metrics of Keras."""
        return {"loss", *(f"{name}_loss" for name in self.loss_means.names)}

    def _evaluation_rows(self, x, y, sample_weight=None):
        if isinstance(x, EncodedExamples):
            return x
        return self.encode_examples(unweighted(examples_of(self.task, x, y, sample_weight)))

    @argument_names()
    def report(self, x: Any, y: Any = None) -> dict[str, Any]:
        """Return the metrics, and tables such as metrics per label and the confusion matrix."""
        return self.evaluator().report(self._evaluation_rows(x, y))

    @argument_names()
    def tune(self, x: Any, y: Any = None) -> Self:
        """Fit thresholds and temperature to dev rows; return the model.

        Raises:
            UserError: If the task has neither, or the labels of the rows cannot tune a threshold.
        """
        if not self.task.tunable_fields:
            raise UserError(
                f"tune: {type(self).__name__} has nothing to tune; pass an option such as "
                "threshold_objective or calibrate to from_pretrained, if it has one"
            )
        encoded = self._evaluation_rows(x, y)
        self._check_dev(encoded.examples, "x")
        self._tune(encoded)
        return self

    def _check_dev(self, examples, name):
        """Check the labels of rows to tune on, as `train` does; warn of what they cannot tune."""
        _warn([f"{name}: {line}" for line in self.task.check_dev(examples, name)])

    def _tune(self, encoded, batch_size=64):
        """Tune the task on rows; warn of what they cannot tune."""
        outputs = self.evaluator(batch_size).outputs(encoded)
        _warn([line.removeprefix("--") for line in self.task.tuning_warnings(encoded, outputs)])
        self._set_tuned(self.task.tune(encoded, outputs))

    def evaluator(self, batch_size: int = 64) -> Evaluator:
        """Return the evaluator of the model, whose graph is built once."""
        check_not_forked(self._process)
        with self._graph_lock:
            if self._evaluator is None:
                self._evaluator = Evaluator(self.task, self.network, self.distribute_strategy)
        # None of these is part of the graph.
        self._evaluator.task, self._evaluator.replica_batch_size = self.task, batch_size
        if self._step is not None:
            self._evaluator.losses = self._step.losses
            self._evaluator.loss_weights = self._step.loss_weights
        return self._evaluator

    # Training in a run directory, and files.

    @argument_names()
    def train(
        self,
        x: Any,
        y: Any = None,
        dev: Any = None,
        *,
        output_dir: str | os.PathLike[str],
        teacher: str | os.PathLike[str] | TaskModel | None = None,
        unlabelled: Any = None,
        log: Callable[[str], None] = lambda line: None,
        **settings: Any,
    ) -> Self:
        """Train on rows, or resume, in a run directory that all commands read.

        The same call resumes after an interruption, with the same bits. The model gets the weights
        of the best checkpoint, and the values tuned for it.

        Args:
            x: Rows, see `fit`.
            y: Labels, see `fit`.
            dev: Rows that select the best checkpoint and tune thresholds: (x, y), `Rows` or a
                dataset; or a list of these, of which the first one does.
            output_dir: Run directory, created or resumed.
            teacher: Model whose outputs are learned, or its run or SavedModel
                (docs/distillation.md).
            unlabelled: Rows without labels, which are learned from the teacher alone.
            log: Receives progress lines.
            **settings: Fields of `TrainingSettings`, such as epochs, learning_rate and patience.
                Seed, frozen layers and precision ("auto") are those of the model by default.

        Returns:
            The model.

        Raises:
            UserError: If rows, settings or the run directory do not fit, or if the model holds the
                weights of a `train` in another directory that did not finish.
            Interrupted: After Ctrl-C or SIGTERM; the state is saved.
        """
        self._check_trainable("train")
        self._check_variables()
        run_training.train(self, x, y, dev, output_dir, teacher, unlabelled, log, settings)
        return self

    def freeze(self, num_layers: int | None) -> None:
        """Exclude the embeddings and the lowest `num_layers` encoder layers from training.

        `None` trains all again. A compiled model is compiled again; the optimizer's moments start
        from 0.
        """
        self.encoder.freeze(num_layers)
        if self.compiled:
            given = dict(self._compile_arguments)
            with self.distribute_strategy.scope():
                if isinstance(given["optimizer"], keras.optimizers.Optimizer):
                    given["optimizer"] = copy_of(given["optimizer"])
                self.compile(**given)

    def save_run(self, path: str | os.PathLike[str]) -> Run:
        """Write a run directory, which all commands and `load_model` read."""
        self._check_variables()
        task = self.task
        # Tuned values belong to the checkpoint.
        values = None if task.kind == PRETRAINED else self.preprocessor.task.to_dict()
        record = {
            **self.record,
            "origin": self.origin,
            "has_trained_pooler": (
                has_trained_pooler(self.record, self.network)
                if self._stage.numpy() == _TRAINED
                else self.record.get("has_trained_pooler", True)
            ),
            "has_new_head": self.has_new_head,
            "untrained": names_of_untrained(self.network),
        }
        with Run.writing(path):
            run = Run.create(path, self.config, self.vocabulary, record, values)
            run.checkpoints.save(0, self._saved_variables())
            if task.tunable_fields and not task.untuned_fields:
                tuned = {name: getattr(task, name) for name in task.tunable_fields}
                run.checkpoints.set_tuned(0, {"values": tuned, "metrics": {}})
        return run

    def _check_variables(self):
        """Raise UserError if the network has other variables than files of its task."""
        others = {name for name, _ in self._shapes.items() ^ _shapes(self.network).items()}
        if others:
            raise UserError(
                f"{min(others)}: files of {type(self).__name__} have no variable that enable_lora, "
                "quantize or a layer of your own adds or changes; create the model again; to train "
                "a LoRA, call fit and save, whose .keras file has it merged"
            )

    def _saved_variables(self):
        """Return the variables of a run directory by name."""
        return model_variables(self.network)

    def load_own_variables(self, store: Any) -> None:
        """Load what belongs to the weights; called by Keras, before all other variables."""
        for variable in self._tuned.values():  # Those of other weights, also if loading fails.
            variable.assign(np.full(variable.shape, np.nan))
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the vocabulary is an asset of the preprocessor."""
        return {
            "task": self.preprocessor.task.to_dict(),
            "config": self.config.to_dict(),
            "seed": self.seed,
            "record": self.record,
            "has_new_head": self.has_new_head,
            "untrained": names_of_untrained(self.network),
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
        }


def _shapes(network):
    """Return the shape and dtype of each variable by name."""
    return {name: (one.shape, one.dtype) for name, one in model_variables(network).items()}


def _has_token_ids(data):
    """Return whether validation data are token ids, with or without labels."""
    return is_token_ids(data[0] if isinstance(data, list | tuple) else data)


def _check_no_callbacks(callbacks):
    """Raise UserError for callbacks of Keras, which rows of strings do not support."""
    if callbacks:
        raise UserError(
            "callbacks: expected with token ids only, since strings are not read batch by batch"
        )


def _progress(count, batch_size, verbose):
    """Return a function that shows as Keras does how many of `count` rows are done."""
    steps = -(-count // batch_size)
    if not verbose:
        return lambda done: None
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    return lambda done: bar.update(min(-(-done // batch_size), steps))


def _warn(lines):
    """Warn of each line, as if the caller of `fit` or `evaluate` had done it."""
    for line in lines:
        warnings.warn(line, stacklevel=5)


def _dtype_policy(dtype):
    """Return a Keras dtype policy; raises UserError if models do not have it."""
    dtype = keras.config.dtype_policy() if dtype is None else dtype
    name = getattr(dtype, "name", dtype)
    if isinstance(dtype, Mapping):  # As in a Keras config.
        name = dtype.get("config", {}).get("name")
    if name not in _DTYPES:
        raise UserError(f"dtype={name!r:.80}: expected {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}")
    return keras.DTypePolicy(name)


def warn_of_new_head(model: TaskModel, stacklevel: int) -> None:
    """Warn that predictions are random; `stacklevel` is as if the caller warned itself."""
    warnings.warn(
        f"{type(model).__name__}: predictions of an untrained head are random; call fit or train, "
        "or load weights with a head; after a training loop of your own, set has_new_head = False",
        stacklevel=stacklevel + 1,
    )


def _warn_of_other_head(pretrained, task):
    """Warn if a task gets a new head although the weights have one, of another task or labels."""
    if pretrained.task is None:
        return
    try:
        pretrained.head_for(task.to_dict(), keep=True)
    except UserError as error:
        warnings.warn(
            f"{error}; the model has a new head, which is random before training (keep_head=False "
            "omits this warning)",
            stacklevel=4,
        )
