"""Pretraining recipe, from shards to a run directory, and its dry run."""

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bert_tf.config import MODEL_SIZES, TOKENIZER_SETTINGS, BertConfig, read_json_object
from bert_tf.data.batches import PretrainingDataset, flatten_examples, pack_examples
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.model.dense import initial_weights_seed
from bert_tf.planning.devices import measure_processor, planned_precision
from bert_tf.planning.estimates import Training, estimate, flops_per_token
from bert_tf.planning.memory import StepSizes, step_memory
from bert_tf.planning.report import device_line, training_lines
from bert_tf.pretraining.evaluation import PretrainingEvaluator
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.pretraining.settings import (
    PretrainCommandSettings,
    PretrainSettings,
    check_same_objective,
    load_config,
)
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.command import defaults
from bert_tf.system.plotting import plot_metrics, to_png
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train import compilation
from bert_tf.train.distribution import (
    LocalReplicas,
    check_alike,
    from_chief,
    is_chief,
    is_multi_worker,
    make_strategy,
    names_lost_worker,
    resolve_precision,
    use_precision,
    warn_of_float16,
)
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.optimizer import AdamW, Lamb, WarmupLinearDecay
from bert_tf.train.shared_files import open_run
from bert_tf.train.signals import Interrupted
from bert_tf.train.step import TrainStep
from bert_tf.weights.name_map import HEADS
from bert_tf.weights.sources import PretrainedWeights, read_pretrained

VERIFIED_SHARDS = "verified_shards.json"  # In a run: what does not have to be read again.
OPTIMIZERS = {"adamw": AdamW, "lamb": Lamb}
# Metrics of both plots of RUN/loss.png.
_LOSSES = ("loss", "eval_masked_lm_loss", "eval_next_sentence_loss")
_ACCURACIES = (
    *("masked_lm_accuracy", "next_sentence_accuracy"),
    *("eval_masked_lm_accuracy", "eval_next_sentence_accuracy"),
)


@names_lost_worker
def pretrain(
    settings: PretrainSettings,
    log: Callable[[str], None] = lambda line: None,
    strategy: tf.distribute.Strategy | None = None,
) -> Run:
    """Pretrain a model, or resume its run (Devlin et al. 2019, 3.1 and A.2).

    By default the distribution strategy is that of the settings.

    Raises:
        UserError: Shards, sizes, weights or the output directory do not fit together.
        Interrupted: After Ctrl-C or SIGTERM, once the current step is saved.
    """
    # A multi-worker strategy has to be created before TensorFlow is used for anything else.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu, log=log)
    with Run.writing(settings.output_dir, is_chief(strategy)):
        return _pretrain(settings, log, strategy)


def _pretrain(settings, log, strategy):
    """Pretrain; the caller holds the lock of the run directory."""
    chief, log_wait = is_chief(strategy), log
    log = log if chief else (lambda line: None)
    settings = dataclasses.replace(
        settings, precision=resolve_precision(settings.precision, strategy)
    )
    if settings.deterministic:
        compilation.make_deterministic()
    is_compiled = compilation.resolve(settings.compile, strategy)

    replicas, parts = strategy.num_replicas_in_sync, settings.gradient_accumulation_steps
    if settings.global_batch_size % (replicas * parts):
        raise UserError(
            f"--global_batch_size={settings.global_batch_size}: expected a multiple of "
            f"{replicas} replicas * --gradient_accumulation_steps={parts}"
        )

    # An existing run is resumed only with the settings and shards that it was started with.
    run = None
    if from_chief(strategy, lambda: Run.has_checkpoint(settings.output_dir)):
        run = open_run(strategy, settings.output_dir, log_wait)
        run.check_resumable(settings.recorded(), None, defaults(PretrainSettings))
        _check_config(settings, run)
    directories = (*settings.shards, *filter(None, [settings.eval_shards]))
    manifests = [Manifest.load(directory) for directory in directories]
    check_same_objective(manifests)
    has_next_sentence = manifests[0].has_next_sentence
    # The masks that are drawn in training leave no trace in the shards.
    record = {
        "data": [manifest.sha256 for manifest in manifests],
        "masks": [manifest.masks for manifest in manifests],
    }
    if run:
        recorded = {"masks": record["masks"], **run.train}  # Older runs have no masks.
        columns = (
            zip(values["data"], values["masks"], strict=True) for values in (recorded, record)
        )
        for directory, was, now in zip(directories, *columns, strict=True):
            if was != now:
                raise UserError(
                    f"{directory}: differs from the shards {run.path} was started with; restore "
                    "them or name a new --output_dir"
                )
    source, vocabulary, config, phases, held_out = _inputs(settings, run)
    verified, before = {}, _read_verified(settings.output_dir)
    for manifest in manifests:
        verified |= manifest.check_files(log, before)
        for warning in () if run else manifest.warnings():
            log(f"warning: {warning}")
    num_train_steps = settings.phase_ends[-1]

    values = [settings.recorded(), record, config.to_dict(), vocabulary.sha256]
    if source and is_multi_worker(strategy):
        values.append(source.sha256)
    check_alike(strategy, values)
    if run:
        if from_chief(strategy, lambda: run.is_finished(num_train_steps, bool(held_out))):
            newest = from_chief(strategy, lambda: run.checkpoints.steps()[-1])
            log(f"{run.path}: finished at step {newest}, nothing to do")
            if not files.exists(run.file("loss.png")):  # Killed after the last evaluation.
                _draw_curves(run, log)
            return run
        for line in run.changes():
            log(line)

    # Without next sentences to learn from, a run has a head only if its start has one.
    if run:
        heads = run.train.get("heads", list(HEADS))
    else:
        is_kept = source is not None and "next_sentence" in source.heads
        heads = list(HEADS) if has_next_sentence or is_kept else ["masked_lm"]
    # The seed makes the initial weights equal on all workers.
    with strategy.scope(), initial_weights_seed(settings.seed):
        policy = use_precision(settings.precision)
        warn_of_float16(policy)
        model = PretrainingModel(
            config,
            policy,
            recompute=settings.gradient_checkpointing,
            next_sentence="next_sentence" in heads,
        )
        if not has_next_sentence:
            model.freeze_next_sentence()
        schedule = _schedule(settings, num_train_steps)
        optimizer = OPTIMIZERS[settings.optimizer](
            schedule,
            settings.weight_decay_rate,
            bias_correction=settings.bias_correction,
            scales_loss=settings.precision == "float16",
        )
        optimizer.build(model.trainable_variables)
    # All user errors have been ruled out, so a new run directory may be created now.
    if run is None:
        if source:
            source.assign_to(model)
        is_trained = has_next_sentence or (source is not None and source.has_trained_pooler)
        train = {"settings": settings.recorded(), **record, "origin": _origin(source, heads)}
        train |= {"heads": heads, "has_trained_pooler": is_trained}
        if chief:
            Run.create(settings.output_dir, config, vocabulary, train)
        run = open_run(strategy, settings.output_dir, log_wait)
    # The others need no record of the change and do not look for the step: they could see another.
    elif chief and (line := _change_steps(run, settings, num_train_steps)):
        log(line)
    if chief:
        files.atomic_write_text(run.file(VERIFIED_SHARDS), json.dumps(verified, indent=0) + "\n")
    origin = run.train.get("origin")
    for line in _plan(settings, config, model, phases, replicas, is_compiled, origin):
        log(line)
    log(compilation.describe(settings.precision, is_compiled))

    # All phases share one step counter, learning-rate schedule and optimizer state.
    trained = HEADS if has_next_sentence else ("masked_lm",)
    step = TrainStep(
        model,
        {name: LOSSES[name] for name in trained},
        optimizer,
        strategy,
        settings.seed,
        metrics={name: metric for name, metric in METRICS.items() if metric[0] in trained},
        accumulation_steps=parts,
        is_compiled=is_compiled,
    )
    evaluate = None
    if held_out:
        evaluator = PretrainingEvaluator(
            model, strategy, held_out, is_compiled, settings.eval_batches
        )

        def evaluate():
            metrics = evaluator.metrics()
            # The loop keeps the checkpoint with the highest score, hence the negated loss.
            return -metrics["masked_lm_loss"], {f"eval_{k}": v for k, v in metrics.items()}

    first_step = 0
    for data, last_step in zip(phases, settings.phase_ends, strict=True):
        phase = _Phase(data, first_step, settings, strategy, is_compiled)
        TrainingLoop(
            run,
            step,
            phase.batches,
            num_train_steps,
            settings.save_every,
            settings.log_every,
            log,
            evaluate,
            settings.eval_every or num_train_steps,
            throughput_unit="tokens",
            last_step=last_step,
            flops_per_token=flops_per_token(
                config, data.max_seq_length, data.manifest.settings["max_predictions_per_seq"]
            ),
            describe_position=phase.describe_position,
            steps_per_execution=settings.steps_per_execution
            or (compilation.STEPS_PER_EXECUTION if is_compiled else 1),
            log_wait=log_wait,
        ).train()
        first_step = last_step
    log(f"finished: {run.path}")
    _draw_curves(run, log)
    return run


def _schedule(settings, num_train_steps):
    """Return the learning-rate schedule of the settings over `num_train_steps`."""
    return WarmupLinearDecay(
        settings.learning_rate,
        num_train_steps,
        settings.warmup_steps,
        continuous=settings.schedule == "continuous",
    )


def _change_steps(run, settings, num_train_steps):
    """Record a changed --num_train_steps; return a line on its effect, or `None`."""
    if settings.phase_steps:
        return None
    return run.change_num_train_steps(
        num_train_steps, lambda steps, step: float(_schedule(settings, steps)(step))
    )


def _draw_curves(run, log):
    """Plot metrics.jsonl to RUN/loss.png, in the process that writes there."""
    if not run.is_writer:
        return

    def draw(figure):
        both = figure.subplots(2, 1, sharex=True)
        for axes, names in zip(both, (_LOSSES, _ACCURACIES), strict=True):
            plot_metrics(axes, run.metrics(), names, "eval")
        both[1].set_xlabel("step")

    path = run.file("loss.png")
    try:
        files.atomic_write_bytes(path, to_png(draw, figsize=(8, 7)))
    except UserError as error:
        log(f"loss curves skipped: {error}")
    else:
        log(f"loss curves: {path}")


@dataclasses.dataclass(frozen=True)
class _Phase:
    """Batches of one directory of shards, starting at the first step of its phase."""

    data: PretrainingDataset
    first_step: int
    settings: PretrainSettings
    strategy: tf.distribute.Strategy
    is_compiled: bool

    def batches(self, step: int, local: LocalReplicas) -> tf.data.Dataset:
        """Return the batches of some replicas from a step on, or stacks of them to accumulate."""
        parts = self.settings.gradient_accumulation_steps
        replicas = self.strategy.num_replicas_in_sync
        size = self.settings.global_batch_size // (replicas * parts)
        position = self._position(step)
        if self.is_compiled:
            lengths, max_seq_length = self.data.sequence_lengths(), self.data.max_seq_length
            shape = compilation.packed_shape(lengths, size, max_seq_length, self.strategy)
            layout = functools.partial(pack_examples, shape=shape, num_parts=parts)
            batches = self.data.training_batches(position, size * parts, layout, local.select)
            return batches.map(to_batch)
        select = functools.partial(local.select, per_replica=parts)
        batches = self.data.training_batches(position, size, flatten_examples, select).map(to_batch)
        if parts == 1:
            return batches
        # Flat batches differ in their number of tokens, so a stack of them is ragged.
        return batches.ragged_batch(parts, drop_remainder=True)

    def describe_position(self, step: int) -> str:
        """Describe the position in the data at a step, for error messages."""
        position = self._position(step)
        return (
            f"epoch {position.epoch} of {self.data.manifest.directory}, from example "
            f"{position.next_example} in the order of seed {position.seed}"
        )

    def _position(self, step):
        examples = (step - self.first_step) * self.settings.global_batch_size
        return self.data.position(self.settings.seed, examples)


def _inputs(settings, run=None):
    """Return pretrained weights or `None`, vocabulary, configuration, and the data of the phases.

    The last one is the held-out data, or `None`. Raise UserError if they do not fit each other.
    """
    if run:  # It has a model of its own: what it was started from may be gone.
        source, vocabulary, config = None, run.vocabulary, run.config
    else:
        source = read_pretrained(settings.init_from) if settings.init_from else None
        manifest = Manifest.load(settings.shards[0])
        vocabulary = source.vocabulary if source else manifest.vocabulary()
        config = config_of(settings, source, manifest, vocabulary)
        vocabulary = vocabulary.padded(config.vocab_size, manifest.directory)
    phases, held_out = (
        [PretrainingDataset(directory, vocabulary, config) for directory in directories]
        for directories in (settings.shards, filter(None, [settings.eval_shards]))
    )
    return source, vocabulary, config, phases, next(iter(held_out), None)


def config_of(
    settings: PretrainSettings,
    source: PretrainedWeights | None,
    manifest: Manifest,
    vocabulary: Vocabulary,
) -> BertConfig:
    """Return the `BertConfig` of the weights, of a file, or of a published size.

    Raise UserError if weights and shards have different vocabularies.
    """
    if source:
        if not manifest.has(vocabulary):
            raise UserError(
                f"{manifest.directory}: vocabulary mismatch. Expected that of {source.source}: "
                f"{len(vocabulary)} entries (sha256 {vocabulary.sha256[:12]}...). Received: "
                f"{manifest.vocab_size} entries ({manifest.vocabulary_sha256[:12]}...). Write the "
                "shards with the vocabulary of --init_from."
            )
        return source.config
    if settings.config:
        # A bert_config.json of google-research/bert does not say how text is normalized.
        given = read_json_object(settings.config)
        case = {name: value for name, value in case_of(manifest).items() if name not in given}
        return dataclasses.replace(load_config(settings.config, [manifest]), **case)
    return dataclasses.replace(
        MODEL_SIZES[str(settings.model_size)], vocab_size=len(vocabulary), **case_of(manifest)
    )


def _check_config(settings, run):
    """Raise UserError if the file --config, which may be gone, is not that of the run any more."""
    if not settings.config or not files.exists(settings.config):
        return
    given = BertConfig.load(settings.config)
    # The normalization of text is that of the shards.
    if dataclasses.replace(given, **run.config.tokenizer_settings) != run.config:
        raise UserError(
            f"--config={settings.config}: has changed since {run.path} was created; expected the "
            f"values of {run.file('config.json')}; restore them, or name a new --output_dir"
        )


def case_of(manifest: Manifest) -> dict[str, Any]:
    """Return the normalization of the shards' text; shards of other programs do not record it."""
    if manifest.tokenizer is None:
        return manifest.vocabulary().normalization()
    return {name: manifest.tokenizer[name] for name in TOKENIZER_SETTINGS}


def word_length_warning(config: BertConfig, manifest: Manifest) -> list[str]:
    """Return a line if the shards have other ids for long words than the model, else none."""
    found = (manifest.tokenizer or {}).get("max_input_chars_per_word")
    expected = config.max_input_chars_per_word
    if found in (None, expected):
        return []
    low, high = sorted((found, expected))
    return [
        f"warning: {manifest.directory}: words of {low + 1} to {high} characters have other token "
        f"ids than in the model; expected shards with --max_input_chars_per_word={expected}, "
        f"received {found}"
    ]


def warmup_warning(settings: PretrainSettings) -> list[str]:
    """Return a line if the training ends before its peak learning rate, else none."""
    steps = settings.phase_ends[-1]
    if settings.warmup_steps < steps:
        return []
    rate = float(_schedule(settings, steps)(steps - 1))
    return [
        f"warning: --warmup_steps={settings.warmup_steps}: the training ends at step {steps}, at a "
        f"learning rate of {rate:.3g} instead of {settings.learning_rate:.3g}; expected fewer "
        "warmup steps, such as a tenth of the training"
    ]


def _read_verified(path):
    """Return what `Manifest.check_files` returned at the last start of a run."""
    try:
        return read_json_object(os.path.join(path, VERIFIED_SHARDS))
    except (OSError, UserError):  # Missing or damaged: all shards are read again.
        return {}


def _origin(source, heads):
    """Describe where the weights come from and which heads are newly initialized."""
    if not source:
        return "new weights"
    new = [head for head in heads if head not in source.heads]
    rest = f"; new {' and '.join(new)} head{'s' * (len(new) > 1)}" if new else ""
    return source.origin + rest


def _plan(settings, config, model, phases, replicas, is_compiled, origin):
    """Yield lines that describe model, phases and memory before training starts."""
    count = model.count_params()
    case = "uncased" if config.do_lower_case else "cased"
    yield f"{count:,} parameters, {origin}; {case}; on {replicas} replica{'s' * (replicas > 1)}"
    first_step = 0
    for data, last_step in zip(phases, settings.phase_ends, strict=True):
        examples = (last_step - first_step) * settings.global_batch_size
        num_tokens = settings.global_batch_size * data.max_seq_length
        yield (
            f"{data.manifest.directory}: steps {first_step} to {last_step}, {num_tokens:,} tokens "
            f"per step, {examples / len(data):.2f} epochs over {len(data):,} examples"
        )
        yield from word_length_warning(config, data.manifest)
        first_step = last_step
    yield from warmup_warning(settings)
    manifests = [data.manifest for data in phases]
    sizes = _step_sizes(settings, config, manifests, replicas)
    peak = step_memory(dataclasses.replace(sizes, is_compiled=is_compiled))["peak"]
    yield f"about {peak / 1e9:.1f} GB per replica, excluding TensorFlow itself"


def _step_sizes(settings, config, manifests, replicas):
    """Return the sizes of the largest step on a replica."""
    recorded = [manifest.settings for manifest in manifests]
    return StepSizes(
        config,
        settings.global_batch_size // (replicas * settings.gradient_accumulation_steps),
        max(of["max_seq_length"] for of in recorded),
        max(of["max_predictions_per_seq"] for of in recorded),
        settings.precision,
        settings.gradient_checkpointing,
        accumulates=settings.gradient_accumulation_steps > 1,
    )


def dry_run(
    settings: PretrainCommandSettings, log: Callable[[str], None] = lambda line: None
) -> None:
    """Train a toy model for three steps on the given shards, in a temporary directory.

    It runs every stage, including a resume, and finds the user errors that do not depend on the
    model size, and ends with an estimate of the whole training, on the devices of the settings.
    These need not exist, so that the toy model is trained on one device of this machine.
    """
    _, vocabulary, config, phases, _ = _inputs(settings)
    with tempfile.TemporaryDirectory() as directory:
        toy = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=config.max_position_embeddings,
            type_vocab_size=config.type_vocab_size,
            **config.tokenizer_settings,
        )
        path = f"{directory}/toy_config.json"
        files.atomic_write_json(path, toy.to_dict())
        parts = settings.gradient_accumulation_steps
        small = PretrainSettings(
            **{
                **settings.recorded(),
                "model_size": None,
                "init_from": None,
                "config": path,
                "output_dir": f"{directory}/run",
                "phase_steps": ("3",) * len(settings.shards),
                "num_train_steps": 3 * len(settings.shards),
                "warmup_steps": min(settings.warmup_steps, 2),
                "global_batch_size": min(settings.global_batch_size, 8 * parts),
                "strategy": "none",
                "save_every": 2,
                "eval_every": None,
                "eval_batches": 2 if settings.eval_shards else None,
                "log_every": 1,
                "dry_run": False,
            }
        )
        try:
            pretrain(small, log)
            pretrain(small, log)  # Resumes a finished run.
        except Interrupted as error:
            raise Interrupted("dry run: stopped; nothing was kept", error.signum) from None
    log("dry run: all stages completed; nothing was kept")
    for line in _estimate(settings, config, [data.manifest for data in phases]):
        log(line)


def _estimate(settings, config, manifests):
    """Yield the report of each phase of the training on the planned devices."""
    precision = planned_precision(settings.precision, settings.typical())
    settings = dataclasses.replace(settings, precision=precision)
    yield from warmup_warning(settings)
    first_step = 0
    for manifest, last_step in zip(manifests, settings.phase_ends, strict=True):
        sizes = _step_sizes(settings, config, [manifest], settings.devices)
        device = settings.typical()
        if settings.device == "cpu":
            tokens = sizes.examples * sizes.length
            device = measure_processor(config, tokens, settings.precision)
        device = settings.linked(device, settings.strategy)
        tokens = (last_step - first_step) * settings.global_batch_size * sizes.length
        training = Training(sizes, settings.global_batch_size, tokens, settings.devices, device)
        yield f"{manifest.directory}: steps {first_step} to {last_step}"
        yield device_line(device, settings.precision, is_measured=True)
        yield from training_lines(training, estimate(training))
        first_step = last_step
