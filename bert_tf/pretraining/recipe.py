"""The recipe of pretraining, from shards to a run directory."""

import dataclasses
import json
import tempfile

import keras

from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.data.batches import PretrainingDataset, flatten_examples, pad_examples
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.pretraining import curves
from bert_tf.pretraining.evaluation import PretrainingEvaluator
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.run import Run
from bert_tf.text.packing import to_flat
from bert_tf.train.distribution import (
    barrier,
    check_alike,
    choose_layout,
    from_chief,
    is_chief,
    make_strategy,
    names_lost_worker,
    use_precision,
)
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.optimizer import AdamW, Lamb, WarmupLinearDecay
from bert_tf.train.step import TrainStep
from bert_tf.weights.name_map import HEADS
from bert_tf.weights.sources import read_pretrained

OPTIMIZERS = {"adamw": AdamW, "lamb": Lamb}
TOY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@names_lost_worker
def pretrain(settings, log=lambda line: None, strategy=None):
    """Trains what the PretrainSettings say, or goes on with it; returns the open Run.

    `log` takes lines of progress; `strategy` overrides the flag's with one made by the caller.
    Raises UserError on shards, sizes or an output directory that do not fit, Interrupted after
    Ctrl-C or SIGTERM.
    """
    # First of all: a strategy of several processes has to find TensorFlow unused.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu)
    with Run.writing(settings.output_dir, is_chief(strategy)):
        return _pretrain(settings, log, strategy)


def _pretrain(settings, log, strategy):
    """Pretrain; the caller holds the run directory."""
    chief = is_chief(strategy)
    if not chief:
        log = _silent

    replicas, parts = strategy.num_replicas_in_sync, settings.gradient_accumulation_steps
    if settings.global_batch_size % (replicas * parts):
        raise UserError(
            f"--global_batch_size={settings.global_batch_size}: does not divide by {replicas} "
            f"replicas and --gradient_accumulation_steps={parts}"
        )

    # What trains: shards of one vocabulary, a configuration, maybe weights.
    source = settings.init_from and read_pretrained(settings.init_from)
    manifests = [Manifest.load(directory) for directory in settings.shards]
    vocabulary = manifests[0].vocabulary()
    config = _config(settings, source, manifests[0], vocabulary)
    phases = [PretrainingDataset(directory, vocabulary, config) for directory in settings.shards]
    held_out = settings.eval_shards and PretrainingDataset(settings.eval_shards, vocabulary, config)
    for data in (*phases, *([held_out] if held_out else [])):
        data.verify()
    num_train_steps = settings.phase_ends[-1]

    # The run that is there, or a new one.
    record = [data.manifest.sha256 for data in phases]
    check_alike(strategy, [settings.recorded(), record])
    run = None
    if from_chief(strategy, lambda: Run.has_checkpoint(settings.output_dir)):
        run = Run.open(settings.output_dir, is_writer=chief)
        run.check_resumable(settings.recorded(), None)
        if run.train.get("data") != record:
            raise UserError(
                f"--shards: not those that {run.path} began with; name a new --output_dir"
            )
        if from_chief(strategy, lambda: run.is_finished(num_train_steps, bool(held_out))):
            newest = run.checkpoints.steps()[-1]
            log(f"{run.path}: finished at step {newest}, nothing to do")
            return run
        for line in run.changes():
            log(line)

    # Model and optimizer.
    keras.utils.set_random_seed(settings.seed)
    with strategy.scope():
        model = PretrainingModel(
            config, use_precision(settings.precision), recompute=settings.gradient_checkpointing
        )
        schedule = _schedule(settings, num_train_steps)
        optimizer = OPTIMIZERS[settings.optimizer](
            schedule, settings.weight_decay_rate, bias_correction=settings.bias_correction
        )
        optimizer.build(model.trainable_variables)
    layout = flatten_examples if choose_layout(strategy) is to_flat else pad_examples

    # All that can be wrong has been looked at: now a new run may be made.
    if run is None:
        if source:
            source.assign_to(model)
        train = {"settings": settings.recorded(), "data": record}
        train["origin"] = _origin(source)
        if chief:
            Run.create(settings.output_dir, config, vocabulary, train)
        barrier(strategy)
        run = Run.open(settings.output_dir, is_writer=chief)
    elif line := _change_steps(run, settings, num_train_steps):
        log(line)
    for line in _plan(settings, config, model, phases, replicas, run.train.get("origin")):
        log(line)

    # The loop, phase by phase: one schedule, one optimizer.
    step = TrainStep(
        model,
        LOSSES,
        optimizer,
        strategy,
        settings.seed,
        metrics=METRICS,
        accumulation_steps=parts,
    )
    evaluate = None
    if held_out:
        evaluator = PretrainingEvaluator(model, strategy, held_out, layout, settings.eval_batches)

        def evaluate():
            metrics = evaluator.metrics()
            return -metrics["masked_lm_loss"], {f"eval_{k}": v for k, v in metrics.items()}

    first_step = 0
    for data, last_step in zip(phases, settings.phase_ends, strict=True):
        phase = _Phase(data, layout, first_step, settings, replicas)
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
            flops_per_token=flops_per_token(config, data),
            describe_position=phase.describe_position,
            steps_per_execution=settings.steps_per_execution,
        ).train()
        first_step = last_step
    log(f"finished: {run.path}")
    if not chief:
        return run
    try:
        log(f"the losses as a picture: {curves.draw(run)}")
    except ImportError:
        log("no picture of the losses: matplotlib is not installed (pip install 'bert_tf[plots]')")
    return run


def _schedule(settings, num_train_steps):
    return WarmupLinearDecay(
        settings.learning_rate,
        num_train_steps,
        settings.warmup_steps,
        continuous=settings.schedule == "continuous",
    )


def _change_steps(run, settings, num_train_steps):
    """Record another --num_train_steps than the run had; return what it changes, as a line."""
    before = run.train["settings"].get("num_train_steps", num_train_steps)
    if settings.phase_steps or before == num_train_steps:
        return None
    step = run.checkpoints.latest_readable()
    if step is None:
        return None  # The loop refuses the run.
    rates = [float(_schedule(settings, steps)(step)) for steps in (before, num_train_steps)]
    run.change_num_train_steps(step, before, num_train_steps, *rates)
    return (
        f"--num_train_steps: was {before}, is {num_train_steps}; from step {step} on this changes "
        f"the learning rate, there from {rates[0]:.3g} to {rates[1]:.3g} (recorded in "
        f"{run.file('train.json')})"
    )


def _silent(line):
    """What a process says that is not the chief."""


@dataclasses.dataclass(frozen=True)
class _Phase:
    """The batches of one folder of shards, from the step that its phase begins with."""

    data: PretrainingDataset
    layout: object
    first_step: int
    settings: object
    replicas: int

    def batches(self, step):
        """The dataset from a step on, a replica's share (or a stack of its parts) an element."""
        parts = self.settings.gradient_accumulation_steps
        size = self.settings.global_batch_size // (self.replicas * parts)
        batches = self.data.training_batches(self._position(step), size, self.layout)
        batches = batches.map(to_batch)
        if parts == 1:
            return batches
        is_flat = self.layout is flatten_examples
        return (batches.ragged_batch if is_flat else batches.batch)(parts, drop_remainder=True)

    def describe_position(self, step):
        """Where in the data a step reads, for messages."""
        position = self._position(step)
        return (
            f"epoch {position.epoch} of {self.data.manifest.directory}, from example "
            f"{position.next_example} in the order of seed {position.seed}"
        )

    def _position(self, step):
        examples = (step - self.first_step) * self.settings.global_batch_size
        return self.data.position(self.settings.seed, examples)


def dry_run(settings, log=lambda line: None):
    """Three steps of a toy model on the given shards, through every stage, in a folder that goes.

    Raises UserError where pretraining would, but for what depends on the size.
    """
    manifest = Manifest.load(settings.shards[0])
    lengths = [Manifest.load(directory).settings["max_seq_length"] for directory in settings.shards]
    with tempfile.TemporaryDirectory() as directory:
        toy = BertConfig(
            vocab_size=len(manifest.vocabulary()), max_position_embeddings=max(lengths), **TOY
        )
        path = f"{directory}/toy_config.json"
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(dataclasses.replace(toy, **_case(manifest)).to_dict(), stream)
        minimum = settings.gradient_accumulation_steps * 2
        small = dataclasses.replace(
            settings,
            model_size=None,
            init_from=None,
            config=path,
            output_dir=f"{directory}/run",
            phase_steps=("3",) * len(settings.shards),
            global_batch_size=min(settings.global_batch_size, 4 * minimum),
            save_every=2,
            eval_every=None,
            eval_batches=2,
            log_every=1,
            dry_run=False,
        )
        pretrain(small, log)
        pretrain(small, log)  # As it would go on.
    log("dry run: every stage has run; nothing was kept")


def flops_per_token(config, data):
    """Floating-point operations of a training step for each token, matrix products alone.

    Twice a multiply-add for every weight, attention over the shards' length, predictions at the
    share of the places that shards give room for; backward counts twice forward.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * hidden**2 + 2 * hidden * inner)
    attention = layers * 2 * data.max_seq_length * hidden
    fraction = data.manifest.settings["max_predictions_per_seq"] / data.max_seq_length
    head = fraction * (hidden**2 + hidden * config.vocab_size)
    return 3 * 2 * (weights + attention + head)


def _config(settings, source, manifest, vocabulary):
    """The BertConfig: of the weights, of a file, or of a published size with this vocabulary.

    Raises UserError where the weights have another vocabulary than the shards.
    """
    if source:
        if source.vocabulary.sha256 != vocabulary.sha256:
            raise UserError(
                f"{manifest.directory}: made with a vocabulary of {len(vocabulary)} entries "
                f"(sha256 {vocabulary.sha256[:12]}...), but that of {source.source} has "
                f"{len(source.vocabulary)} ({source.vocabulary.sha256[:12]}...); write the shards "
                "with the vocabulary of --init_from"
            )
        return source.config
    if settings.config:
        return BertConfig.load(settings.config)
    return dataclasses.replace(
        MODEL_SIZES[settings.model_size], vocab_size=len(vocabulary), **_case(manifest)
    )


def _case(manifest):
    """How the shards' text was normalized; shards of other programs do not say."""
    tokenizer = manifest.values.get("tokenizer")
    if tokenizer is None:
        return {"do_lower_case": not manifest.vocabulary().looks_cased()}
    return {name: tokenizer[name] for name in ("do_lower_case", "strip_accents")}


def _origin(source):
    """Where the weights are from, and which of the heads are not from there."""
    if not source:
        return "new weights"
    new = [head for head in HEADS if head not in source.heads]
    rest = f"; new {' and '.join(new)} head{'s' * (len(new) > 1)}" if new else ""
    return source.origin + rest


def _plan(settings, config, model, phases, replicas, origin):
    """What is about to be done, as lines."""
    count = model.count_params()
    case = "uncased" if config.do_lower_case else "cased"
    yield f"{count:,} parameters, {origin}; {case}; on {replicas} replica{'s' * (replicas > 1)}"
    first_step = 0
    for data, last_step in zip(phases, settings.phase_ends, strict=True):
        examples = (last_step - first_step) * settings.global_batch_size
        num_tokens = settings.global_batch_size * data.max_seq_length
        yield (
            f"{data.manifest.directory}: steps {first_step} to {last_step}, {num_tokens:,} tokens "
            f"a step, {examples / len(data):.2f} epochs over {len(data):,} examples"
        )
        first_step = last_step
    replica_batch = settings.global_batch_size // (replicas * settings.gradient_accumulation_steps)
    tokens = replica_batch * max(data.max_seq_length for data in phases)
    # Weights, gradients and two moments; of each layer some 16 hidden and 2 inner vectors a token,
    # and attention's probabilities.
    longest = max(data.max_seq_length for data in phases)
    per_token = 16 * config.hidden_size + 2 * config.intermediate_size
    per_token = config.num_hidden_layers * (per_token + 3 * config.num_attention_heads * longest)
    num_predictions = max(data.manifest.settings["max_predictions_per_seq"] for data in phases)
    scores = 3 * replica_batch * num_predictions * config.vocab_size
    memory = 4 * (4 * count + tokens * per_token + scores)
    yield f"about {memory / 1e9:.1f} GB a replica in float32, TensorFlow itself aside"
