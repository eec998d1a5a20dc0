"""Training of a model on examples in a run directory, for `train` and bert-tf finetune."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.runs import checkpoints
from bert_tf.runs.run import Run
from bert_tf.system import plotting
from bert_tf.system.command import defaults
from bert_tf.train import compilation
from bert_tf.train.distribution import (
    barrier,
    check_alike,
    from_chief,
    is_chief,
)
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.losses import compares_examples
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.shared_files import open_run, wait_for_files
from bert_tf.train.step import TrainStep
from tasks.base import plots
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples, stacked
from tasks.graph.evaluation import Evaluator
from tasks.graph.run_checkpoint import PRETRAINED, RunCheckpoint, task_at
from tasks.training.distillation import Distillation
from tasks.training.settings import TrainingSettings, parse_best_metric

if TYPE_CHECKING:
    import keras

    from tasks.base.task import Task
    from tasks.graph.pipeline import Pipeline


@dataclasses.dataclass
class TrainingRun:
    """Training of a task on examples in a run directory, which the caller holds.

    Attributes:
        settings: Settings of training.
        task: The task, without tuned values.
        names: Names of the data, training rows first.
        examples: The data in the same order. The first dev data selects the best checkpoint.
        digests: sha256 of the data by name, as in train.json.
        rows: The data, for messages.
        recorded: Settings as in train.json.
        output_dir: Run directory, created or resumed.
        strategy: Distribution strategy.
        log: Callable that takes log lines.
        distillation: The teacher and the unlabelled rows, if there are any.
    """

    settings: TrainingSettings
    task: Task
    names: Sequence[str]
    examples: Sequence[Examples]
    digests: Mapping[str, str]
    rows: str
    recorded: Mapping[str, Any]
    output_dir: str
    strategy: tf.distribute.Strategy
    log: Callable[[str], None]
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        self.log_wait = self.log
        # The contents of task.json. A run of the pretraining heads has none.
        self.task_values: dict[str, Any] | None = self.task.to_dict()
        if self.task.kind == PRETRAINED:
            unsaved = {name: value for name, value in self.task_values.items() if name != "kind"}
            self.task_values, self.recorded = None, {**self.recorded, **unsaved}
        if self.settings.deterministic:
            compilation.make_deterministic()
        self.is_compiled = compilation.resolve(self.settings.compile, self.strategy)
        if not is_chief(self.strategy):
            self.log = lambda line: None
        replicas = self.strategy.num_replicas_in_sync
        parts = self.settings.gradient_accumulation_steps
        if self.settings.global_batch_size % (replicas * parts):
            of_parts = f" * --gradient_accumulation_steps={parts}" if parts > 1 else ""
            raise UserError(
                f"--global_batch_size={self.settings.global_batch_size}: expected a multiple of "
                f"the {replicas} replicas{of_parts}"
            )
        if replicas > 1 and compares_examples(self.task.losses.values()):
            self.is_compiled = False  # XLA does not gather the outputs of other replicas.

    def open_run(self) -> Run | None:
        """Check the dev data, and return the run to resume, or `None` if a new one starts.

        Raises:
            UserError: If the run was started with other settings, labels or data.
        """
        for examples in (*self.examples, *self._unlabelled):
            if examples.skipped_rows:
                self.log(examples.skipped_rows_message())
        if self.examples[1:]:
            for line in self.task.check_dev(self.examples[1]):
                self.log(f"warning: {self.names[1]}: {line}")
        teacher = self.distillation and self.distillation.teacher.record
        check_alike(self.strategy, [self.recorded, self.digests, teacher])
        if not from_chief(self.strategy, lambda: Run.has_checkpoint(self.output_dir)):
            if self.distillation:
                self.distillation.check(self.task, None)
            return None
        run = open_run(self.strategy, self.output_dir, self.log_wait)
        if run.task:  # With the fields that were added since it was written.
            run.task = task_from_dict(run.task).to_dict()
        run.check_resumable(self.recorded, self.task_values, defaults(type(self.settings)))
        # Not the paths, since the files may have been moved.
        if [*run.train.get("data", {}).values()] != [*self.digests.values()]:
            raise UserError(
                f"{self.rows} differ from those that {run.path} was started with; "
                "choose a new --output_dir"
            )
        if self.distillation:
            self.distillation.check(self.task, run)
        return run

    def train(
        self,
        pipeline: Pipeline,
        record: Mapping[str, Any],
        run: Run | None,
        begin: Callable[[], None] = lambda: None,
    ) -> Run:
        """Train, then tune the task with the best checkpoint; return the open run.

        Args:
            pipeline: Tokenizer and model of the task. The model ends with the weights of any step.
            record: What train.json records about the origin of the model's weights.
            run: Result of `open_run`.
            begin: Called once everything is checked, before the optimizer is built. It may freeze
                layers.

        Raises:
            Interrupted: After Ctrl-C or SIGTERM; the state is saved.
        """
        settings, strategy, task, log = self.settings, self.strategy, self.task, self.log
        model = pipeline.model
        replicas = strategy.num_replicas_in_sync
        evaluator = Evaluator(task, model, strategy, log=log)
        encoded, *encoded_devs = [
            task.training_data(data, evaluator) for data in self.encode(pipeline)
        ]
        unlabelled = self.encode_unlabelled(pipeline)
        num_samples = len(encoded) + sum(map(len, unlabelled))
        steps_per_epoch = math.ceil(num_samples / settings.global_batch_size)
        num_train_steps = settings.total_steps(steps_per_epoch)
        if run and from_chief(strategy, lambda: self._is_finished(run, num_train_steps)):
            checkpoints = run.checkpoints
            best = from_chief(strategy, checkpoints.best_or_latest_step)
            newest = from_chief(strategy, lambda: checkpoints.steps()[-1])
            log(f"{run.path}: finished at step {newest}, nothing to do; best step {best}")
            begin()
            if from_chief(strategy, plotting.is_installed):  # Or killed before its plots.
                self._plot(run, evaluator, encoded_devs[:1])
            return run
        distilled = None
        losses: dict[str, Any] = {"losses": task.losses}
        if self.distillation:
            self.distillation.teacher.check_size(task.vector_size(model.encoder.config))
            distilled = self.distillation.distilled(encoded, unlabelled, run, log)
            losses = self.distillation.losses(distilled)
        best_metric, factor = parse_best_metric(task.best_metric, [task.best_metric])
        if settings.best_metric is not None:
            known = evaluator.metrics(encoded_devs[0])
            best_metric, factor = parse_best_metric(settings.best_metric, known)
        # Create the run directory only now, after all checks, so that user errors leave none.
        if run is None:
            run = self._create_run(pipeline, record)
        else:
            for line in run.changes():
                log(line)
            if settings.num_train_steps and (
                change := run.change_num_train_steps(
                    num_train_steps, lambda steps, step: float(self._schedule(steps)(step))
                )
            ):
                log(change)
        if self.distillation and distilled:
            self.distillation.save(distilled, run)
        log(_summary(task, encoded, encoded_devs, len(self.examples[0]) - len(encoded.examples)))
        for name, data in zip(self.names, (encoded, *encoded_devs), strict=True):
            for line in task.label_warnings(data):
                log(f"{name}: {line}")
        log(
            f"{model.count_params():,} parameters from {run.train.get('origin')}; "
            f"{'uncased' if run.config.do_lower_case else 'cased'}; {num_train_steps} steps of "
            f"{settings.global_batch_size} samples on {replicas} replica{'s' * (replicas > 1)}"
        )
        log(compilation.describe(settings.precision, self.is_compiled))
        begin()
        with strategy.scope():
            optimizer = AdamW(
                self._schedule(num_train_steps),
                settings.weight_decay_rate,
                bias_correction=settings.bias_correction,
                layer_decay=settings.layer_decay,
                scales_loss=settings.precision == "float16",
            )
            optimizer.build(model.trainable_variables)

        # Train; the best checkpoint is selected by the first dev data.
        def evaluate():
            results = [evaluator.metrics(dev) for dev in encoded_devs]
            return factor * results[0][best_metric], _by_dev(results)

        TrainingLoop(
            run,
            TrainStep(
                model=model,
                optimizer=optimizer,
                strategy=strategy,
                seed=settings.seed,
                accumulation_steps=settings.gradient_accumulation_steps,
                is_compiled=self.is_compiled,
                **losses,
            ),
            lambda step, local: self._batches(
                distilled or encoded, math.ceil(num_train_steps / steps_per_epoch), step, local
            ),
            num_train_steps,
            settings.save_every,
            settings.log_every,
            log,
            evaluate if encoded_devs else None,
            settings.eval_every or steps_per_epoch,
            patience=settings.patience,
            steps_per_execution=compilation.STEPS_PER_EXECUTION if self.is_compiled else 1,
            log_wait=self.log_wait,
        ).train()
        best = from_chief(strategy, run.checkpoints.best_or_latest_step)
        if encoded_devs:
            self._finish(run, evaluator, encoded_devs, best)
        self._plot(run, evaluator, encoded_devs[:1])
        barrier(strategy)
        log(f"finished: {run.path}, best checkpoint step {best}")
        return run

    def _schedule(self, num_train_steps):
        """Return the learning rate by step."""
        settings = self.settings
        return WarmupLinearDecay(
            settings.learning_rate,
            num_train_steps,
            int(settings.warmup_proportion * num_train_steps),
            continuous=settings.schedule == "continuous",
        )

    def _batches(self, encoded, num_epochs, step, local):
        """Return the batches of some replicas from a step on; with accumulation, stacks of them."""
        settings, parts = self.settings, self.settings.gradient_accumulation_steps
        batches = encoded.training_batches(
            global_batch_size=settings.global_batch_size,
            num_epochs=num_epochs,
            seed=settings.seed,
            first_step=step,
            num_replicas=self.strategy.num_replicas_in_sync * parts,
            select=functools.partial(local.select, per_replica=parts),
        )
        return stacked(batches, parts, self.is_compiled)

    def open_best(self, run: Run) -> RunCheckpoint:
        """Open the best checkpoint, the same one in all workers, once each of them sees it."""
        best = run.checkpoints.path(from_chief(self.strategy, run.checkpoints.best_or_latest_step))
        wait_for_files(self.strategy, best, checkpoints.CHECKPOINT_FILES, self.log_wait)
        return RunCheckpoint.open(run.path, os.path.basename(best))

    def encode(self, pipeline: Pipeline) -> list[EncodedExamples]:
        """Return the training and dev examples as token ids.

        The pipeline is the one that is exported for serving, so that both see the same ids.
        """
        train, *devs = self.examples
        parts = [self.task.select_training_examples(train), *devs]
        return self._encode(pipeline, parts, self.names)

    def encode_unlabelled(self, pipeline: Pipeline) -> list[EncodedExamples]:
        """Return the encoded unlabelled examples."""
        parts = list(map(self.task.as_training_rows, self._unlabelled))
        return self._encode(pipeline, parts, ["unlabelled"] * len(parts))

    @property
    def _unlabelled(self):
        return self.distillation.unlabelled if self.distillation else ()

    def _encode(self, pipeline, parts, names):
        """Return encoded examples; raises UserError if the vocabulary knows no token of a part."""
        layout, found = compilation.layout(self.is_compiled, self.strategy), []
        for examples, name in zip(parts, names, strict=True):
            encoded = EncodedExamples.encode(examples, pipeline, layout, self.is_compiled)
            for line in encoded.token_counts.warnings(name):
                self.log(f"warning: {line}")
            found.append(encoded)
        return found

    def _create_run(self, pipeline, record):
        """Create the run directory."""
        entries = {"settings": self.recorded, "data": self.digests, **record}
        entries["has_trained_pooler"] = has_trained_pooler(record, pipeline.model)
        if self.distillation:
            entries["teacher"] = self.distillation.teacher.record
        if is_chief(self.strategy):
            config = pipeline.model.encoder.config
            Run.create(self.output_dir, config, pipeline.vocabulary, entries, self.task_values)
        return open_run(self.strategy, self.output_dir, self.log_wait)

    def _is_finished(self, run, num_train_steps):
        """Whether the run is trained and evaluated, and its task is tuned."""
        has_dev = len(self.names) > 1
        if not run.is_finished(num_train_steps, has_dev, self.settings.patience):
            return False
        best = run.checkpoints.best_or_latest_step()
        return not has_dev or not task_at(run, best).untuned_fields

    def _finish(self, run, evaluator, devs, best):
        """Tune the task on dev with the best checkpoint, save the values, and log the metrics."""
        task, name, log = self.task, self.names[1], self.log
        if task.tunable_fields:
            self._assign_best(run, evaluator.model)
            outputs = [evaluator.outputs(dev) for dev in devs]
            warnings = task.tuning_warnings(devs[0], outputs[0])
            task = task.tune(devs[0], outputs[0])
            metrics = _by_dev(
                [task.metrics(dev, of_dev) for dev, of_dev in zip(devs, outputs, strict=True)]
            )
            values = {field: getattr(task, field) for field in task.tunable_fields}
            run.checkpoints.set_tuned(
                best,
                {
                    "values": values,
                    "metrics": metrics,
                    "file": name,
                    "sha256": self.digests[name],
                    "warnings": warnings,
                },
            )
            scores = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
            log(f"tuned on dev: {task.tuned_summary()}; {scores}")
            for line in warnings:
                log(f"warning: {name}: {line}")
            run.log_metrics({"step": best, **{f"tuned_{k}": v for k, v in metrics.items()}})
        elif is_chief(self.strategy):
            metrics = run.checkpoints.info(best)["metrics"]
        else:
            return  # The others log nothing, and may see the file as it was before its evaluation.
        warning = task.warning(
            {metric.removeprefix("dev_"): value for metric, value in metrics.items()}
        )
        if warning:
            log(f"warning: {warning}")

    def _plot(self, run, evaluator, devs):
        """Write the plots of the best checkpoint on the first dev file, if there is one."""
        # All workers take part in an evaluation, or none.
        if from_chief(self.strategy, lambda: plots.are_complete(run)):
            return
        if not from_chief(self.strategy, plotting.is_installed):
            self.log("plots skipped: matplotlib is not installed (pip install 'bert_tf[plots]')")
            return
        found = {}
        for dev in devs:
            task = self._assign_best(run, evaluator.model)
            outputs = evaluator.outputs(dev)
            if is_chief(self.strategy):
                found = task.plots(dev, outputs)
        if is_chief(self.strategy):
            self.log(f"plots: {plots.write(run, found)}")

    def _assign_best(self, run, model):
        """Assign the best weights, since training ends with the last ones; return their task."""
        source = self.open_best(run)
        source.assign(source.read(), model)
        return source.task


def has_trained_pooler(record: Mapping[str, Any], model: keras.Model) -> bool:
    """Return the entry of train.json after a training of weights that `record` describes."""
    kernel = model.encoder.pooler.kernel
    is_trained = any(weight is kernel for weight in model.trainable_weights)
    return is_trained or record.get("has_trained_pooler", True)


def digests_of(names: Sequence[str], examples: Sequence[Examples]) -> dict[str, str]:
    """Return the sha256 of texts, labels and weights by name."""
    digests = {}
    for name, data in zip(names, examples, strict=True):
        digest = hashlib.sha256()
        for row in zip(*data.texts.values(), *[data.labels] * bool(data.labels), strict=True):
            digest.update(repr(row).encode())
        digest.update(repr(data.weights).encode())
        digests[name] = digest.hexdigest()
        if "train" in digests and name != "train" and digests[name] == digests["train"]:
            raise UserError(f"{name}: same rows as x; expected rows that training does not use")
    return digests


def _by_dev(results):
    return {
        f"dev{number if number > 1 else ''}_{name}": value
        for number, result in enumerate(results, start=1)
        for name, value in result.items()
    }


def _summary(task, train, devs, num_unused):
    """Return a log line with the task type and the numbers of rows and windows."""
    counts = ", ".join(f"{len(dev.examples)} dev rows" for dev in devs) or "no dev rows"
    windows = f" in {len(train)} windows" if len(train) != len(train.examples) else ""
    fault = task.fault_of_unused and f"{task.fault_of_unused}, "
    unused = f", {num_unused} more {fault}not used for training" if num_unused else ""
    rows = f"{len(train.examples)} rows{windows}{unused}"
    return f"{task.kind}: {rows}, {counts}{task.summary()}"
