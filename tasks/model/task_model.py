"""Keras models that map strings to predictions, one class per task type.

    model = TextClassifier.from_pretrained(PATH, labels=["billing", "hardware"])
    model.fit(texts, labels)
    model.predict_rows(["My invoice is wrong."])[0]["label"]

A `TaskModel` joins three parts: a preprocessor (strings to token ids), a network (token ids to
outputs), and the task, which knows how rows become examples, and outputs predictions and metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import threading
import types
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import DivergenceError, UserError, argument_names
from bert_tf.model.dense import initial_weights_seed
from bert_tf.model.encoder import set_untrained
from bert_tf.model.encoder import untrained as names_of_untrained
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from bert_tf.system.processes import check_not_forked
from bert_tf.system.scalars import to_python
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train import compilation
from bert_tf.train.compilation import is_accelerated, is_default
from bert_tf.train.distribution import (
    DTYPE_POLICIES,
    distribute,
    is_chief,
    names_lost_worker,
    use_precision,
    warn_of_float16,
)
from bert_tf.train.losses import FunctionLoss, compares_examples
from bert_tf.train.optimizer import NOT_FINITE, AdamBase, AdamW, FitSchedule
from bert_tf.train.step import TrainStep, batch_counter, innermost, unstacked
from bert_tf.weights import heads
from bert_tf.weights.sources import PretrainedWeights, read_pretrained
from tasks.base.task import Task, task_from_dict
from tasks.base.task_types import default_settings
from tasks.data.examples import EncodedExamples, Examples, stacked
from tasks.data.readers.memory import as_list, columns_of, without_axis
from tasks.data.windows import TokenCounter
from tasks.graph.evaluation import Evaluator, FeatureExamples
from tasks.graph.heads import EncoderModel
from tasks.graph.pipeline import ROWS_PER_CALL, Pipeline, ServingFunctions
from tasks.graph.preprocessor import Preprocessor
from tasks.graph.run_checkpoint import PRETRAINED, RunCheckpoint
from tasks.model import keras_names, streaming
from tasks.model.labelled_rows import (
    check_dataset,
    class_factors,
    column_of,
    evaluation_examples,
    examples_of,
    first_batches,
    inputs_of,
    is_token_ids,
    positive,
    split,
    split_arrays,
    unweighted,
)
from tasks.training.distillation import Distillation, Teacher, model_teacher, read_teacher
from tasks.training.settings import TrainingSettings, recorded
from tasks.training.training_run import TrainingRun, digests_of

_PUBLISH = "expected export.publish(model, 'MODELS/name'), which writes a SavedModel of strings"
_COMMON_OPTIONS = (
    *("max_seq_length", "seed", "dtype", "do_lower_case", "frozen_layers", "keep_head"),
)
_DTYPES = tuple(dict.fromkeys(DTYPE_POLICIES.values()))  # Weights and outputs are float32.
_TRAINED, _LOADED, _UNFINISHED = ", trained with fit", ", loaded weights", ", unfinished"
# The origin of weights as `load_model` or `train` left them.
_OF_RUN = re.compile(rf"run (?P<path>.+?)(/checkpoints/step-\d+|(?P<unfinished>{_UNFINISHED}))")
_NO_PARTS = (
    "gradient_accumulation_steps: expected rows in memory; call train, or compile without it"
)
# Fields of `TrainingSettings` that are arguments of `train`.
_SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(TrainingSettings)
    if not field.metadata.get("of_model")
)


class TaskModel(EncoderModel):
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
        untrained: Names of the variables that are not trained, of a Keras config, since `trainable`
            may have been set; by default those of `frozen_layers`.
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

    source: RunCheckpoint | None = None
    task_class: ClassVar[type[Task]]
    options: ClassVar[tuple[str, ...]] = ()
    pipeline_class: type[Pipeline] = Pipeline
    # Made when they are needed, and by `compile`.
    _serving: Any = None
    _evaluator: Any = None
    _step: Any = None
    _loss_means: Any = None
    _compile_arguments: Any = None
    _num_stacked = 1  # Parts of the batches that Keras receives; several in `fit` only.

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
        dtype: Any = "float32",
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
        self.seed = to_python(seed)
        self.has_new_head = has_new_head and task.has_head
        self.config = config
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
            path: Id of a model of the Hugging Face hub, run, Hugging Face directory, TensorFlow
                checkpoint or keras-hub preset.
            max_seq_length: Maximum tokens per sequence; by default that of a head or embedder at
                the path whose options are kept, else 128 (256 for TextRanker, 384 for
                QuestionAnswerer, 512 for MaskedLanguageModel).
            seed: Seed of the head, of the order of rows and of dropout.
            dtype: Keras dtype policy.
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
        options = {**brought, **cls.task_class.options_from(source, given), **given}
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
        model.has_new_head = (head is None or pretrained.has_new_head) and task.has_head
        model.record["origin"] = pretrained.origin_in(model.network, head)
        return model

    # Parts.

    @property
    def fit_defaults(self) -> dict[str, Any]:
        """Batch size, epochs and learning rate of the task type."""
        return default_settings(self.task.kind)

    @property
    def task(self) -> Task:
        """The task, with the values that were tuned."""
        return self.preprocessor.task

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
            if self._serving is None or self._serving.task != self.task:
                tokenizer = self.preprocessor.tokenizer
                strategy = self.distribute_strategy
                is_on_gpu = is_accelerated(strategy) and not isinstance(
                    strategy, tf.distribute.TPUStrategy
                )
                pipeline = self.pipeline_class(
                    self.task, tokenizer, self.network, is_on_gpu=is_on_gpu
                )
                self._serving = ServingFunctions(pipeline)
            return self._serving

    # Calls.

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> dict[str, tf.Tensor]:
        """Convert Python strings to token ids first, since Keras accepts tensors only."""
        check_not_forked(self._process)
        if not isinstance(inputs, Mapping) or set(self.task.input_names) & set(inputs):
            inputs = self.preprocessor(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Map token ids to the outputs of the network.

        Args:
            inputs: Batch of the encoder; strings are converted before.
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
            x: Strings, see `fit`. Dicts of token ids return the network's outputs instead.
            batch_size: Rows per call of the traced function; by default 1024, of token ids 64.
            verbose: As in Keras for token ids; nothing is printed for strings.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.

        Returns:
            `{name: array (N, ...)}`; strings are `str`. Lists of different lengths are padded with
            "" and -1, scores and probabilities of missing texts with 0.

        Raises:
            UserError: If x has no rows, or rows that are no strings.
        """
        if is_token_ids(x):
            # As in `evaluate`; strings are chunked further by their numbers of tokens.
            batch_size = 64 if batch_size is None else batch_size
            return super().predict(x, batch_size, verbose, steps, callbacks)
        columns, batch_size = self._rows_to_predict(x, batch_size, verbose, steps, callbacks)
        self._warn_if_untrained()
        return self.serving.call("serving_default", columns, batch_size)

    def _rows_to_predict(self, x, batch_size=None, verbose="auto", steps=None, callbacks=None):
        """Return strings by input name, and the rows per call; arguments as of `predict`."""
        batch_size = ROWS_PER_CALL if batch_size is None else batch_size
        x, batch_size = first_batches(x, steps), positive("batch_size", batch_size)
        _check_no_callbacks(callbacks)
        return self._columns(x), batch_size

    @argument_names()
    def predict_rows(self, x: Any, batch_size: int = ROWS_PER_CALL) -> list[dict[str, Any]]:
        """Return one dict of Python values per row, without padding, as bert-tf predict writes."""
        batch_size = positive("batch_size", batch_size)
        self._warn_if_untrained()
        return self.serving.predict_rows(self._columns(x), batch_size)

    def _warn_if_untrained(self):
        untuned = self.task.untuned_fields
        if self.has_new_head:
            warn_of_new_head(self, stacklevel=4)
        elif untuned and self.task.predicts_untuned and not self.task.tunes_without_request:
            warnings.warn(f"{', '.join(untuned)}: never tuned; call tune(x, y)", stacklevel=4)

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

    # Training.

    @argument_names()
    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = None,
        weighted_metrics: Any = "auto",
        learning_rate: float | None = None,
        warmup_proportion: float = 0.1,
        schedule: str = "released",
        layer_decay: float = 1.0,
        jit_compile: bool | str = "auto",
        gradient_accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        """Configure training.

        Args:
            optimizer: "auto" is AdamW with weight decay 0.01, clipping at 1 and bias correction. An
                unused one that was created outside of the scope of the replicas is copied into it.
            loss: "auto" is the task's loss, a mean over all replicas. Names of Keras are those of
                losses of logits, such as "sparse_categorical_crossentropy".
            metrics: Keras metrics of training; with one output, of that output. Keras gives them no
                weights: unlike an accuracy, they count padding, and rows that fill a batch up.
            weighted_metrics: Keras metrics that do not, weighted as the loss. "auto" is the
                accuracy, if the task has one.
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
            gradient_accumulation_steps: Parts of a batch that are computed one after the other,
                which takes less memory; the loss is that of the complete batch, as in `train`. For
                rows in memory.
            **kwargs: Other arguments of keras.Model.compile.

        Raises:
            UserError: If an argument is wrong, or does not fit the task.
        """
        self._check_trainable("compile")
        of_auto: dict[str, Any] = {
            "learning_rate": learning_rate,
            "warmup_proportion": warmup_proportion,
            "schedule": schedule,
            "layer_decay": layer_decay,
        }
        settings, defaults = TrainingSettings(**to_python(of_auto)), TrainingSettings()
        for name in of_auto:
            if optimizer != "auto" and getattr(settings, name) != getattr(defaults, name):
                raise UserError(
                    f"{name}: expected with optimizer='auto' only; set it in the given optimizer"
                )
        keras_names.check_outputs(self.task, loss_weights=kwargs.get("loss_weights"))
        with self.distribute_strategy.scope():
            if optimizer == "auto":
                peak = settings.learning_rate or self.fit_defaults["learning_rate"]
                is_continuous = schedule == "continuous"
                optimizer = AdamW(
                    FitSchedule(peak, settings.warmup_proportion, is_continuous),
                    layer_decay=settings.layer_decay,
                    scales_loss=self.dtype_policy.name == "mixed_float16",
                )
            of_outputs = keras_names.compile_arguments(self.task, loss, metrics, weighted_metrics)
            self._compile(
                optimizer=_of_scope(optimizer),
                **of_outputs,
                is_compiled=jit_compile if jit_compile == "auto" else bool(jit_compile),
                gradient_accumulation_steps=positive(
                    "gradient_accumulation_steps", gradient_accumulation_steps
                ),
                **kwargs,
            )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with the configuration of a saved model; called by Keras."""
        self._compile(**keras.saving.deserialize_keras_object(config))

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile`; called by Keras."""
        config: Any = super().get_compile_config()
        if config:
            # As given, since "auto" depends on the devices of the process.
            config["is_compiled"] = self._compile_arguments["is_compiled"]
            config["gradient_accumulation_steps"] = self._num_parts
            del config["jit_compile"]
        return config

    @property
    def _num_parts(self):
        """The number of parts of a batch that are computed one after the other."""
        return self._step.accumulation_steps if self._step else 1

    def _compile(
        self, *, loss, is_compiled, gradient_accumulation_steps, loss_weights=None, **arguments
    ):
        """Compile; the arguments are those of Keras, with losses by output."""
        # Keras would track a dict, and save the metrics in it under other names than before.
        self._compile_arguments = types.MappingProxyType(
            {
                **arguments,
                "loss": loss,
                "is_compiled": is_compiled,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "loss_weights": loss_weights,
            }
        )
        if is_compiled == "auto":
            is_compiled = is_accelerated(self.distribute_strategy)
        optimizer = arguments.get("optimizer")
        if isinstance(optimizer, AdamBase) and optimizer.scales_loss:
            arguments.setdefault("auto_scale_loss", False)  # Keras would scale it again.
        if self._num_replicas > 1 and compares_examples(loss.values()):
            is_compiled = False  # XLA does not gather the outputs of other replicas.
        # Keras would compile the calls of all replicas as one program, in which XLA cannot sum
        # their gradients.
        of_keras = is_compiled and is_default(self.distribute_strategy)
        super().compile(loss=loss, loss_weights=loss_weights, jit_compile=of_keras, **arguments)
        # Variables made inside of the first step would double the time to trace it.
        self.optimizer.build(self.trainable_variables)
        losses = {name: keras.losses.get(given) for name, given in loss.items() if given}
        losses = {
            name: given if isinstance(given, keras.losses.Loss) else FunctionLoss(given)
            for name, given in losses.items()
        }
        if not isinstance(loss_weights, Mapping):
            several = isinstance(loss_weights, list | tuple)
            several = loss_weights if several else [loss_weights or 1.0] * len(losses)
            loss_weights = dict(zip(losses, several, strict=True))
        factors = {name: loss_weights.get(name, 1.0) for name in losses}
        self._step = TrainStep(
            *(self, losses, self.optimizer, self.distribute_strategy, self.seed),
            is_compiled=is_compiled,
            loss_weights=factors,
            accumulation_steps=gradient_accumulation_steps,
        )
        # Keras would list it among the metrics, and keep that of a compilation before.
        object.__setattr__(self, "_loss_means", keras_names.LossMeans(factors))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """Metrics of Keras, and the exact means of the loss, which replace its own."""
        return [*super().metrics, *([self._loss_means] if self.compiled else [])]

    @property
    def jit_compile(self) -> bool:
        """Compilation with XLA as in Keras, if the network supports it, which gets no strings."""
        return self.network.jit_compile

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.network.jit_compile = value

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

        Rows are tokenized once. All epochs are one dataset whose order is drawn from (seed, epoch),
        so that a `fit` that BackupAndRestore resumes sees the same batches. Without it, fits in a
        row count their epochs on.

        Args:
            x: Strings: a list, tuple, NumPy array or pandas column; for two inputs a tuple of two,
                or a dict or DataFrame with a column per input. Or `Rows` of `read_examples`, with
                y, or a tf.data.Dataset of batches (x, y) or (x, y, sample_weight). TextClassifier
                and TextRegressor read a dataset batch by batch in its own order, all others once.
                Keras reads a dict of token ids, or a dataset of them; options that need all rows
                are refused.
            y: Labels per row: names or ids of classes, numbers, entities, answers or choices.
                Integers are names if the labels are numbers that no ids could be; they are refused
                if both are possible. In a dataset of token ids they are ids. Predicted labels are
                names, as strings.
            batch_size: Sequences per step over all replicas; by default that of the task type. A
                dataset has its own.
            epochs: By default those of the task type.
            verbose: As in Keras.
            callbacks: As in Keras. Logs contain each metric of the task on the validation rows as
                val_NAME.
            validation_split: Fraction of the rows, the last ones, for validation.
            validation_data: Rows for validation: (x, y), `Rows` or a dataset. Every row counts
                once.
            shuffle: Draws the order of rows in memory anew in each epoch, from the model's seed.
            class_weight: Loss weight by label name or id.
            sample_weight: Loss weight per row.
            initial_epoch: Number of the first epoch.
            steps_per_epoch: Steps per epoch; by default all rows once. More steps repeat the rows.
                Required for a dataset of infinite length, and of unknown length if it is read batch
                by batch. Of such datasets, others read the first steps_per_epoch * epochs batches.
            validation_steps: Batches of a dataset as `validation_data` that are read; by default
                all.
            validation_batch_size: Sequences per step and replica in validation and tuning, and for
                the features of AnomalyDetector; by default 64.
            validation_freq: Epochs per validation, or a list of epochs, counted from 1.

        Returns:
            The Keras History.

        Raises:
            UserError: If a column, label, type or length is wrong.
        """
        check_not_forked(self._process)
        self._check_trainable("fit")
        self._initial_epoch = None  # Set by BackupAndRestore for one fit, but kept by Keras.
        if not self.compiled:
            self.compile()
        strategy, is_compiled, parts = self.distribute_strategy, self._is_compiled, self._num_parts
        callbacks = [] if callbacks is None else tf.nest.flatten(callbacks)
        self._check_callbacks(callbacks)
        of_keras = {"verbose": verbose, "initial_epoch": initial_epoch}
        is_dataset = isinstance(x, tf.data.Dataset)
        is_stream = is_dataset and (self.task.can_stream or is_token_ids(x))
        if self._num_parts > 1 and (is_token_ids(x) or is_stream):
            raise UserError(_NO_PARTS)
        if is_stream and validation_split:
            raise UserError(
                "validation_split: expected none for a dataset; pass validation_data instead"
            )
        if is_token_ids(x):
            return self._fit_token_ids(
                *((x, y, sample_weight), class_weight, validation_data, validation_split),
                batch_size=batch_size,
                epochs=1 if epochs is None else epochs,
                callbacks=callbacks,
                shuffle=shuffle,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
                **of_keras,
            )
        if is_dataset:
            check_dataset(x, y=y, sample_weight=sample_weight, batch_size=batch_size)
        epochs = positive("epochs", self.fit_defaults["epochs"] if epochs is None else epochs)
        if steps_per_epoch is not None:
            steps_per_epoch = positive("steps_per_epoch", steps_per_epoch)
            if is_dataset and not is_stream and x.cardinality() < 0:
                # Of infinite or unknown length: only what training uses is read into memory.
                x = x.take(steps_per_epoch * epochs)
        size_of_dev = 64 if validation_batch_size is None else validation_batch_size
        size_of_dev = positive("validation_batch_size", size_of_dev)
        validation_freq = to_python(validation_freq)
        if isinstance(validation_freq, str) or not isinstance(validation_freq, Container):
            validation_freq = positive("validation_freq", validation_freq)
        dev = first_step = encoded = counter = None
        if validation_data is not None:
            validation_data = first_batches(validation_data, validation_steps, "validation_steps")
            try:
                dev = evaluation_examples(self.task, validation_data)
            except UserError as error:
                raise UserError(f"validation_data: {error}") from None
            self._check_dev(dev, "validation_data")
        if is_stream:
            num_steps, data = streaming.num_steps(x, steps_per_epoch), x
            counter = self.serving.token_counter
            counter.take()  # Of predictions.
            # Keras knows the length of neither a distributed nor a prefetched dataset, and with
            # steps_per_epoch it would stop at the end of a finite one.
            is_prefetched = is_compiled and is_accelerated(strategy)
            if steps_per_epoch is not None or self._num_replicas > 1 or is_prefetched:
                steps_per_epoch, data = num_steps, x.repeat()

            def batches_of(local):
                return streaming.batches(
                    *(self.serving.pipeline, data, class_weight),
                    num_replicas=self._num_replicas,
                    layout=compilation.layout(is_compiled, strategy),
                    static_shape=is_compiled,
                    select=local.select,
                )

        else:
            size = self._batch_size(x, batch_size)
            train = examples_of(self.task, x, y, sample_weight, class_weight)
            if dev is None and validation_split:
                train, dev = split(train, validation_split)
                self._check_dev(dev, "validation_split")
            selected = self._training_examples(train)
            encoded = self._encode_for_fit(selected, size_of_dev)
            _check_tokens(encoded.token_counts, "x")
            lines = self.task.label_warnings(encoded)
            num_unused = len(train) - len(selected)
            if num_unused and self.task.fault_of_unused:
                lines.append(
                    f"{num_unused:,} of {len(train):,} rows, {self.task.fault_of_unused}, are not "
                    "used for training"
                )
            for line in lines:
                warnings.warn(f"x: {line}", stacklevel=3)
            num_steps = steps_per_epoch = steps_per_epoch or math.ceil(len(encoded) / size)
            # Fits in a row see other orders, unless one continues that of a process before.
            first_epoch = max(_batches_seen(self) - initial_epoch * num_steps, 0) // num_steps
            if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
                first_epoch = 0
            # A variable, because it is set after Keras has received the dataset.
            first_step = tf.Variable(0, dtype=tf.int64, trainable=False)

            def batches_of(local):
                batches = encoded.training_batches(
                    global_batch_size=size,
                    num_epochs=epochs,
                    seed=self.seed,
                    steps_per_epoch=num_steps,
                    first_step=first_step,
                    first_epoch=first_epoch,
                    num_replicas=self._num_replicas * parts,
                    shuffle=shuffle,
                    select=functools.partial(local.select, per_replica=parts),
                )
                return stacked(batches, parts, is_compiled)

        batches = distribute(batches_of, strategy, is_compiled)
        encoded_dev = None
        if dev is not None:
            encoded_dev = self._encode_for_fit(dev, size_of_dev)
            _check_tokens(encoded_dev.token_counts, "validation rows")
        if encoded is not None and self.has_new_head:
            self.task.init_head(self.network, encoded)

        def validate():
            if not encoded_dev:
                return {}
            for callback in callbacks:
                callback.on_test_begin(None)
            metrics = self.evaluator(size_of_dev).metrics(encoded_dev)
            for callback in callbacks:
                callback.on_test_end(metrics)
            return metrics

        keras_names.set_directions(self.task, callbacks)
        start = _Epochs(num_steps, epochs, first_step, validate, validation_freq, counter)
        with self._changing_weights(), streaming.raising_row_errors():
            history = super().fit(
                batches,
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                callbacks=[start, *callbacks],
                shuffle=False,  # The dataset is shuffled already.
                **of_keras,
            )
        if encoded_dev is not None and self.task.tunable_fields:
            self._tune(encoded_dev, size_of_dev)
        return history

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Build the metrics; called by Keras.

        On several replicas it would average their batches, which may differ in shape.
        """
        strategy = self.distribute_strategy
        if is_default(strategy) or iterator is None:
            super()._maybe_symbolic_build(iterator, data_batch)
        elif self._compile_metrics and not self._compile_metrics.built:
            _, _, batches = next(iter(iterator))
            batch = tf.nest.map_structure(
                lambda values: strategy.experimental_local_results(values)[0], next(batches)
            )
            if self._num_stacked > 1:
                batch = tf.nest.map_structure(lambda values: values[0], batch)
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            y, _ = self._targets(y, None, 1)
            with strategy.scope():
                outputs = self.network(x)
                self._compile_metrics.build(y, {name: outputs[name] for name in y})

    def _fit_token_ids(
        self, rows, class_weight, dev, fraction, *, steps_per_epoch, epochs, callbacks, **kwargs
    ):
        """Train on token ids (x, y, sample_weight); arguments as of keras.Model.fit.

        `dev` is its validation_data, and `fraction` its validation_split.
        """
        self._check_needs_no_rows()
        x, y, sample_weight = rows
        y = self._labels_of_token_ids(y)
        if isinstance(sample_weight, list):
            sample_weight = np.array(sample_weight)
        if isinstance(dev, list | tuple):
            dev_x, dev_y, *dev_weights = dev
            dev = (dev_x, self._labels_of_token_ids(dev_y, "validation_data: y"), *dev_weights)
        elif dev is None and fraction:
            # Not by Keras, which would use the class weights in validation, too.
            (x, y, sample_weight), dev = split_arrays((x, y, sample_weight), fraction)
        # Not by Keras either, which combines class weights with no sample weights.
        factors = np.array(getattr(self.task, "class_weights", ()) or 1.0, np.float32)
        if class_weight is not None:
            factors = factors * class_factors(self.task, class_weight)
        if np.any(factors != 1):
            weigh = functools.partial(_with_class_weights, factors)
            if isinstance(x, tf.data.Dataset):
                x = x.map(weigh)
            else:
                x, y, sample_weight = weigh(x, y, sample_weight)
        batch_size, num_steps = kwargs["batch_size"] or 32, steps_per_epoch  # As in Keras.
        if self._num_replicas > 1:
            self._batch_size(x, batch_size)
        if isinstance(x, tf.data.Dataset):
            kwargs["shuffle"] = False  # Keras warns otherwise.
            num_steps = streaming.num_steps(x, steps_per_epoch)
            if steps_per_epoch is not None:
                x = x.repeat()  # Keras would stop at the end of a finite one.
        elif num_steps is None:
            num_steps = math.ceil(len(x["input_ids"]) / batch_size)
        with self._changing_weights():
            return super().fit(
                *(x, y),
                sample_weight=sample_weight,
                validation_data=dev,
                steps_per_epoch=steps_per_epoch,
                epochs=epochs,
                callbacks=[_Epochs(num_steps, epochs), *callbacks],
                **kwargs,
            )

    def _check_needs_no_rows(self):
        """Raise UserError if batches of token ids do not suffice for training."""
        task = self.task
        if getattr(task, "balanced_sampling", False):
            raise UserError(
                "x: balanced_sampling needs all rows; expected strings in fit, received token ids"
            )
        if task.trains_on_vectors:
            raise UserError(
                "x: an autoencoder would learn the anomalies among token ids, too; expected "
                "strings in fit"
            )

    def _labels_of_token_ids(self, y, what="y"):
        """Return the labels of token ids as Keras takes them: no list, and of classes the ids."""
        y = column_of(self.task, y, is_scalar=self.task.has_classes)
        if isinstance(y, list) and y and np.ndim(y[0]) == 0:
            y = np.array(y)
        # Other labels, such as probabilities, are for a loss of the user; integers are always ids.
        is_column = self.task.has_classes and getattr(y, "ndim", 0) == 1
        kind, count = np.asarray(y).dtype.kind if is_column else "", len(self.labels or ())
        if kind in ("i", "u"):
            y = np.asarray(y)
            for row in np.flatnonzero((y < 0) | (y >= count))[:1]:
                raise UserError(
                    f"{what}[{row}]: label {y[row]}: expected an id from 0 to {count - 1}"
                )
        if kind in ("O", "S", "U"):
            y = np.array(self.task.encode_labels(as_list(y, what), {}, f"{what}[{{}}]"))
        return y

    def _check_callbacks(self, callbacks):
        """Raise UserError for callbacks that would fail in the middle of a `fit`, or change it."""
        schedules = keras.optimizers.schedules.LearningRateSchedule
        setters = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
        for callback in callbacks:
            name = type(callback).__name__
            if isinstance(callback, setters) and isinstance(
                innermost(self.optimizer)._learning_rate, schedules
            ):
                raise UserError(
                    f"callbacks: {name} requires a constant learning rate, but the optimizer has a "
                    "schedule; call compile(AdamW(2e-5))"
                )
            frequency = getattr(callback, "save_freq", "epoch")
            if isinstance(callback, keras.callbacks.BackupAndRestore) and frequency != "epoch":
                # Keras resumes at the start of the epoch, with the weights of its middle.
                raise UserError(
                    f"callbacks: {name} with save_freq={frequency} would repeat batches of an "
                    "epoch; expected save_freq='epoch'"
                )
            if isinstance(callback, keras.callbacks.TensorBoard) and not find_spec("tensorboard"):
                raise UserError(
                    f"callbacks: {name} requires tensorboard, which is not installed; run pip "
                    "install 'bert_tf[tensorboard]'"
                )

    def _encode_for_fit(self, examples, batch_size):
        encoded = self._encode(examples)
        if not self.task.trains_on_vectors:
            return encoded
        return FeatureExamples(encoded, self.evaluator(batch_size), lambda line: None)

    def _training_examples(self, examples):
        """Return the rows that training uses; raises UserError if there are none."""
        selected = self.task.select_training_examples(examples)
        if not len(selected):
            raise UserError("x: expected at least one row to train on, received none")
        return selected

    def _batch_size(self, x, batch_size):
        """Return the batch size of rows; raises UserError if replicas cannot share it."""
        if isinstance(x, tf.data.Dataset):
            batch_size = next((int(tf.nest.flatten(batch)[0].shape[0]) for batch in x), None)
            if batch_size is None:
                raise UserError("x: expected at least one batch, received an empty dataset")
        elif batch_size is None:
            batch_size = self.fit_defaults["global_batch_size"]
        batch_size = positive("batch_size", batch_size)
        if batch_size % (self._num_replicas * self._num_parts):
            factors = [f"the {self._num_replicas} replicas"] * (self._num_replicas > 1)
            factors += [f"gradient_accumulation_steps={self._num_parts}"] * (self._num_parts > 1)
            raise UserError(
                f"batch_size={batch_size}: expected a multiple of {' * '.join(factors)}"
            )
        return batch_size

    @contextlib.contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """Let what was tuned or recorded for the weights end with them, once a batch changes them.

        An error before leaves the model as it was.
        """
        tuned, before, origin = self.task, _batches_seen(self), self._origin
        self.preprocessor.task = tuned.with_tuned({})
        self._num_stacked = self._num_parts
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if NOT_FINITE not in str(error):
                raise
            raise _diverged(self) from None
        finally:
            self._num_stacked = 1
            if _batches_seen(self) == before:
                self.preprocessor.task = tuned
            else:
                self._record_training(origin)

    @property
    def _origin(self):
        return self.record.get("origin", "new weights")

    def _record_training(self, origin: str | None = None):
        """Record that `fit` has changed the weights, by default those of the recorded origin."""
        self.has_new_head = False
        self.record["origin"] = (origin or self._origin).removesuffix(_TRAINED) + _TRAINED

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
            sample_weight: As in Keras for token ids; for strings 1, as metrics count each row once.
            steps: Batches of a dataset that are read; by default all.
            callbacks: As in Keras, for token ids only.
            return_dict: False returns a list, for token ids only.
            _use_cached_eval_dataset: Given by `fit` of Keras.
        """
        batch_size = 64 if batch_size is None else batch_size
        if is_token_ids(x):
            if not self.compiled:
                self.compile()
            if not _use_cached_eval_dataset:  # Otherwise `fit` has converted them.
                y = self._labels_of_token_ids(y)
            return super().evaluate(
                *(x, y, batch_size, verbose, sample_weight, steps, callbacks),
                return_dict=return_dict,
                _use_cached_eval_dataset=_use_cached_eval_dataset,
            )
        x, batch_size = first_batches(x, steps), positive("batch_size", batch_size)
        _check_no_callbacks(callbacks)
        if not return_dict:
            raise UserError("return_dict=False: expected True, since metrics have names")
        return self.evaluator(batch_size).metrics(self.encode(x, y, sample_weight))

    def encode(self, x: Any, y: Any = None, sample_weight: Any = None) -> EncodedExamples:
        """Tokenize labelled rows for evaluation.

        Args:
            x: Rows, see `fit`; or rows that are tokenized already.
            y: Labels, see `fit`.
            sample_weight: 1 per row, since metrics count every row once.

        Raises:
            UserError: If rows and labels differ in number, or a label does not fit the task.
        """
        if isinstance(x, EncodedExamples):
            if y is not None or sample_weight is not None:
                raise UserError("y, sample_weight: expected with rows, received tokenized ones")
            return x
        return self._encode(unweighted(examples_of(self.task, x, y, sample_weight)))

    def _encode(self, examples):
        is_compiled = self._is_compiled
        layout = compilation.layout(is_compiled, self.distribute_strategy)
        return EncodedExamples.encode(examples, self.serving.pipeline, layout, is_compiled)

    @argument_names()
    def report(self, x: Any, y: Any = None) -> dict[str, Any]:
        """Return the metrics, and tables such as metrics per label and the confusion matrix."""
        return self.evaluator().report(self.encode(x, y))

    @argument_names()
    def tune(self, x: Any, y: Any = None) -> Self:
        """Fit thresholds and temperature to dev rows, if the task has any; return the model.

        Raises:
            UserError: If the labels of the rows cannot tune a threshold.
        """
        encoded = self.encode(x, y)
        self._check_dev(encoded.examples, "x")
        self._tune(encoded)
        return self

    def _check_dev(self, examples, name):
        """Check the labels of rows to tune on, as `train` does; warn of what they cannot tune."""
        for line in self.task.check_dev(examples, name):
            warnings.warn(f"{name}: {line}", stacklevel=4)

    def _tune(self, encoded, batch_size=64):
        """Tune the task on rows; warn of what they cannot tune."""
        outputs = self.evaluator(batch_size).outputs(encoded)
        for line in self.task.tuning_warnings(encoded, outputs):
            warnings.warn(line.removeprefix("--"), stacklevel=4)
        self.preprocessor.task = self.task.tune(encoded, outputs)

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

    @names_lost_worker
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
        if is_token_ids(x):
            raise UserError("x: expected strings, received token ids; use fit")
        strategy, task = self.distribute_strategy, self.task.with_tuned({})
        if teacher is not None:
            settings["teacher"] = "model" if isinstance(teacher, TaskModel) else os.fspath(teacher)
        chosen = self._training_settings(settings)
        chosen.check_teacher_fits(task.kind)
        has_teacher = teacher is not None
        train = examples_of(task, x, y, has_teacher=has_teacher)
        examples = [train, *_dev_examples(task, dev)]
        numbers = range(1, len(examples))
        names = ["train", *(f"dev{number if number > 1 else ''}" for number in numbers)]
        self._training_examples(examples[0])
        digests, distillation, rows = digests_of(names, examples), None, []
        if unlabelled is not None:
            if teacher is None:
                raise UserError("unlabelled: requires teacher")
            rows = [Examples(task.columns(inputs_of(unlabelled)), [])]
            digests |= digests_of(["unlabelled"], rows)
        if teacher is not None:
            distillation = Distillation(
                _teacher(teacher, task.kind, strategy),
                chosen.distill_temperature,
                chosen.distill_alpha,
                rows,
            )
        training = TrainingRun(
            settings=chosen,
            task=task,
            names=names,
            examples=examples,
            digests=digests,
            rows="x, dev: the rows",
            recorded=recorded(
                {"dev": names[1:], **{name: getattr(chosen, name) for name in _SETTINGS}}
            ),
            output_dir=os.fspath(output_dir),
            strategy=strategy,
            log=log,
            distillation=distillation,
        )
        chosen.check_has_dev(bool(examples[1:]))
        with Run.writing(output_dir, is_chief(strategy)):
            run = training.open_run()
            self._check_start(run)

            def begin():
                self.preprocessor.task, self.has_new_head = task, False
                self.record["origin"] = f"run {training.output_dir}{_UNFINISHED}"
                if chosen.frozen_layers != self.frozen_layers:
                    self.freeze(chosen.frozen_layers)

            run = training.train(self.serving.pipeline, self.record, self.has_new_head, run, begin)
            source = training.open_best(run)
        source.assign(source.read(), self.network)
        self.preprocessor.task, self.source = source.task, source
        self.record["origin"] = source.origin
        return self

    def _training_settings(self, given):
        """Return the settings of `train`; by default those of the model and of its task type."""
        for name in given:
            if name not in _SETTINGS:
                raise UserError(f"{name}: unknown setting; expected one of {', '.join(_SETTINGS)}")
        policy, of_task = self.dtype_policy.name, self.fit_defaults
        defaults = {
            **{name: of_task[name] for name in of_task.keys() & set(_SETTINGS)},
            "seed": self.seed,
            "frozen_layers": self.frozen_layers,
        }
        if given.get("num_train_steps") is not None:
            del defaults["epochs"]
        precision = given.get("precision", "auto")
        if precision == "auto":
            precision = policy.removeprefix("mixed_")
        settings = TrainingSettings(**to_python({**defaults, **given, "precision": precision}))
        if settings.epochs is None and settings.num_train_steps is None:
            raise UserError("epochs=None: expected an integer, or num_train_steps")
        settings.check_fits(self.config, self.record.get("origin", "the model"))
        if DTYPE_POLICIES[settings.precision] != policy:
            raise UserError(
                f"precision={settings.precision!r}: does not fit a model with dtype={policy!r}; "
                "pass dtype to from_pretrained instead"
            )
        use_precision(settings.precision)
        return settings

    def _check_start(self, run):
        """Raise UserError unless `train` starts a run, or resumes `run`, with these weights."""
        own = _OF_RUN.match(self._origin)
        is_changed = own and own.end() < len(self._origin)  # By `fit`, for example.
        is_own = run and own and os.path.abspath(own["path"]) == os.path.abspath(run.path)
        is_own = is_own and not is_changed
        if own and own["unfinished"] and not is_own:
            raise UserError(
                f"the model holds weights of an unfinished train in {own['path']}; create it again"
            )
        if run and not (
            (is_own or run.train.get("origin") == self.record.get("origin"))
            and run.config == self.config
            and run.vocabulary.sha256 == self.vocabulary.sha256
        ):
            raise UserError(f"{run.path}: was started with another model; choose a new output_dir")

    def freeze(self, num_layers: int | None) -> None:
        """Exclude the embeddings and the lowest `num_layers` encoder layers from training.

        `None` trains all again. A compiled model is compiled again; the optimizer's moments start
        from 0.
        """
        self.encoder.freeze(num_layers)
        if self.compiled:
            # Not from the Keras config, which has no functions of the user.
            given = self._compile_arguments
            optimizer = given["optimizer"]
            if not isinstance(optimizer, keras.optimizers.Optimizer):  # Such as a name.
                optimizer = innermost(self.optimizer)
            # Of variables outside of the scope, such as moments, all replicas would share one copy.
            with self.distribute_strategy.scope():
                self._compile(**{**given, "optimizer": _copy_of(optimizer)})

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of `fit`, that of `TrainStep`; return the means of the epoch so far."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y, weights = self._targets(y, weights, self._num_parts)
        outputs, terms, norm = self._step.on_batch((x, y, weights), self._loss_means.is_finite())
        self._loss_means.update_state(terms, norm)
        if self._num_parts > 1:
            y, weights = unstacked((y, weights))
        return self._compiled_metrics(x, y, weights, outputs)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of `evaluate` on token ids; return the means so far."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y, weights = self._targets(y, weights, 1)
        outputs = self(x, training=False)
        own = self._step.own_losses(y)
        self._loss_means.update_state({**self._step.sums_of(y, weights, outputs), **own})
        return self._compiled_metrics(x, y, weights, outputs)

    def _targets(self, y, weights, num_parts):
        """Return labels and weights by output, of what Keras allows; parts are stacked."""
        names = self._step.losses
        if isinstance(y, list | tuple):  # Keras sorts the outputs.
            y = dict(zip(sorted(names), y, strict=True))
        labels = y if isinstance(y, Mapping) else dict.fromkeys(names, y)
        labels = {name: labels[name] for name in names}
        by_name = weights if isinstance(weights, Mapping) else dict.fromkeys(names, weights)
        weights = {name: by_name.get(name) for name in names}
        if self.task.has_lists_of_labels or num_parts > 1:
            return labels, weights
        # Those of token ids may be (B, 1), which would be broadcast with the losses (B,).
        return tuple(
            {name: without_axis(values) for name, values in of_rows.items()}
            for of_rows in (labels, weights)
        )

    def _compiled_metrics(self, x, y, weights, outputs):
        """Return the means of the loss and of the metrics of `compile` so far."""
        has_weights = any(values is not None for values in weights.values())
        outputs = {name: outputs[name] for name in y}  # Keras expects labels of each output.
        return self.compute_metrics(x, y, outputs, weights if has_weights else None)

    # Methods of Keras for token ids, which strings have others for.

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch of token ids; strings are trained with `fit`."""
        _check_token_ids(x, "train_on_batch", "fit")
        if not self.compiled or isinstance(innermost(self.optimizer)._learning_rate, FitSchedule):
            raise UserError(
                "train_on_batch: expected an optimizer with a rate outside of fit, since the rate "
                "of the default one ends at 0; call compile(AdamW(2e-5))"
            )
        if self._num_parts > 1:
            raise UserError(_NO_PARTS)
        self._check_needs_no_rows()
        y = self._labels_of_token_ids(y)
        with self._changing_weights():
            return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch of token ids; strings are evaluated with `evaluate`."""
        _check_token_ids(x, "test_on_batch", "evaluate")
        y = self._labels_of_token_ids(y)
        return super().test_on_batch(x, y, *args, **kwargs)

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
        self._check_variables(merged="/lora_")  # By Keras, into the kernels.
        super().save(filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Load weights, and with them a head; see keras.Model.load_weights.

        What was tuned for the weights before, such as a threshold, ends with them; see `tune`. A
        new head that `skip_mismatch` leaves unchanged is still new.
        """
        with self._loading_weights():
            super().load_weights(filepath, *args, **kwargs)

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set all weights as `load_weights` does; see keras.Model.set_weights."""
        with self._loading_weights():
            super().set_weights(weights)

    @contextlib.contextmanager
    def _loading_weights(self) -> Iterator[None]:
        """Drop what was tuned or recorded for other weights; a head that changes is not new."""
        of_encoder = {id(variable) for variable in self.encoder.variables}
        variables = model_variables(self.network).items()
        of_head = {name: one for name, one in variables if id(one) not in of_encoder}
        before = {name: variable.numpy() for name, variable in of_head.items()}
        yield
        self._record_loading(
            {name for name, one in of_head.items() if not np.array_equal(one.numpy(), before[name])}
        )

    def _record_loading(self, changed: Collection[str]) -> None:
        """Record that weights were loaded, which has changed these variables of the head."""
        if changed:
            self.has_new_head = False
        self.preprocessor.task = self.task.with_tuned({})
        before = self._origin.removesuffix(_LOADED).replace(_UNFINISHED, "")
        self.record["origin"] = before + _LOADED

    def save_run(self, path: str | os.PathLike[str]) -> Run:
        """Write a run directory, which all commands and `load_model` read."""
        self._check_variables()
        task = self.task
        # Tuned values belong to the checkpoint.
        values = None if task.kind == PRETRAINED else task.with_tuned({}).to_dict()
        record = {
            **self.record,
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

    def _check_variables(self, merged: str = "") -> None:
        """Raise UserError if the network has other variables than files of its task.

        Names that contain `merged` are allowed, if it is given.
        """
        others = {name for name, _ in self._shapes.items() ^ _shapes(self.network).items()}
        others = {name for name in others if not (merged and merged in name)}
        if others:
            raise UserError(
                f"{min(others)}: files of {type(self).__name__} have no variable that enable_lora, "
                "quantize or a layer of your own adds or changes; create the model again; to train "
                "a LoRA, call fit and save, whose .keras file has it merged"
            )

    def _saved_variables(self):
        """Return the variables of a run directory by name."""
        return model_variables(self.network)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the vocabulary is an asset of the preprocessor."""
        return {
            "task": self.task.to_dict(),
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


def _check_token_ids(x, method, other):
    if not is_token_ids(x):
        raise UserError(f"{method}: expected token ids; call {other} with strings")


def _check_no_callbacks(callbacks):
    """Raise UserError for callbacks of Keras, which rows of strings do not support."""
    if callbacks:
        raise UserError(
            "callbacks: expected with token ids only, since strings are not read batch by batch"
        )


def _with_class_weights(factors_C, x, y, weights=None):
    """Return token ids and labels of one output, with sample weights times those of the classes."""
    (y,) = y.values() if isinstance(y, Mapping) else (y,)
    (weights,) = weights.values() if isinstance(weights, Mapping) else (weights,)
    classes = tf.cast(y, tf.float32)
    # Probabilities are for a loss of the user; like Keras, take the most probable class.
    if classes.shape.rank == 2 and classes.shape[1] != 1:
        classes = tf.argmax(classes, axis=1)
    factors_N = tf.gather(factors_C, tf.reshape(tf.cast(tf.round(classes), tf.int32), [-1]))
    if weights is not None:
        factors_N *= tf.reshape(tf.cast(weights, tf.float32), [-1])
    return x, y, factors_N


def _dtype_policy(dtype):
    """Return a Keras dtype policy; raises UserError if models do not have it."""
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


def _dev_examples(task, dev):
    """Return the examples of each dev data."""
    several = dev if isinstance(dev, list) else [] if dev is None else [dev]
    try:
        return [evaluation_examples(task, one) for one in several]
    except UserError as error:
        raise UserError(f"dev: {error}") from None


def _teacher(teacher, kind, strategy) -> Teacher:
    """Return the teacher of a model or path."""
    if not isinstance(teacher, TaskModel):
        return read_teacher(os.fspath(teacher), kind, strategy)
    return model_teacher(
        *(teacher.task, teacher.network, lambda: teacher.serving.pipeline),
        teacher.distribute_strategy,
    )


def _of_scope(optimizer):
    """Return an optimizer of the current scope: a copy of an unused one from outside of it.

    Of its variables, all replicas would share one copy.
    """
    is_from_outside = (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and not optimizer.built
        and optimizer._distribution_strategy is not tf.distribute.get_strategy()
    )
    return _copy_of(optimizer) if is_from_outside else optimizer


def _copy_of(optimizer):
    """Return a new optimizer with the settings of another one."""
    copy = type(optimizer).from_config(optimizer.get_config())
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(innermost(optimizer), name):  # Keras stores it in no config.
            setattr(innermost(copy), name, getattr(innermost(optimizer), name))
    return copy


def _batches_seen(model):
    return int(batch_counter(model.optimizer).numpy())


def _diverged(model):
    """Return the error for a loss or gradient that is not finite."""
    return DivergenceError(
        f"step {_batches_seen(model)}: {NOT_FINITE}; the update was not applied; try a lower "
        "learning_rate"
    )


def _check_tokens(counts, name):
    """Warn of what the vocabulary or the maximum length lose; raise UserError if it is all."""
    for line in counts.warnings(name):
        warnings.warn(line, stacklevel=4)


class _Epochs(keras.callbacks.Callback):
    """Set the first batch and the schedule of a `fit`, and add the metrics of the validation rows.

    Before all other callbacks, which read them, or save a model whose weights have changed. The
    first epoch is known when it begins, since BackupAndRestore sets it after Keras has received
    dataset and optimizer.

    Args:
        steps_per_epoch: Steps per epoch.
        epochs: The number of the last epoch.
        first_step: Set to the first step of the dataset.
        validate: Returns the metrics of the validation rows by name.
        validation_freq: Epochs per validation, or a list of epochs.
        counter: Has counted the tokens of a dataset of strings when the first epoch ends.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        epochs: int,
        first_step: tf.Variable | None = None,
        validate: Callable[[], dict[str, float]] = dict,
        validation_freq: int | Sequence[int] = 1,
        counter: TokenCounter | None = None,
    ) -> None:
        super().__init__()
        self.counter = counter
        self.steps_per_epoch, self.epochs, self.first_step = steps_per_epoch, epochs, first_step
        self.validate, self.validation_freq = validate, validation_freq
        self.is_started = self.is_recorded = False
        self.first_count = 0  # Batches that the optimizer had seen before.
        self.validated: dict[str, float] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the first epoch."""
        if self.is_started:
            return
        self.is_started, first_step = True, epoch * self.steps_per_epoch
        if self.first_step is not None:
            self.first_step.assign(first_step)
        optimizer = innermost(self.model.optimizer)
        per_update = optimizer.gradient_accumulation_steps or 1
        # Batches that the fit before has left over belong to the first update.
        self.first_count = _batches_seen(self.model)
        start = self.first_count - first_step
        end = start + self.steps_per_epoch * self.epochs
        num_updates = end // per_update - start // per_update
        if not num_updates:
            raise UserError(
                f"fit: {end - start} batches are less than an update with "
                f"gradient_accumulation_steps={per_update}; expected {per_update} or more"
            )
        if isinstance(optimizer._learning_rate, FitSchedule):
            optimizer._learning_rate.set_steps(start // per_update, num_updates, per_update)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop where XLA drops the check that raises an error; record the first update."""
        if not math.isfinite(logs["loss"]):
            raise _diverged(self.model)
        if not self.is_recorded and _batches_seen(self.model) != self.first_count:
            self.is_recorded = True
            self.model._record_training()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check the tokens of the first epoch; add the metrics of the validation rows."""
        if self.counter:
            _check_tokens(self.counter.take(), "x")
            self.counter = None
        frequency = self.validation_freq
        is_due = (
            (epoch + 1) % frequency == 0 if isinstance(frequency, int) else epoch + 1 in frequency
        )
        if is_due:
            self.validated = {f"val_{name}": value for name, value in self.validate().items()}
            logs.update(self.validated)

    def on_train_end(self, logs: Any = None) -> None:
        """Add the last metrics to the last logs."""
        if logs:
            logs.update(self.validated)
