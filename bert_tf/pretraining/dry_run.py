"""Dry run of pretraining: every stage with a toy model, and an estimate of the training."""

import dataclasses
import json
import tempfile
from collections.abc import Callable

from bert_tf.config import BertConfig
from bert_tf.data.manifest import Manifest
from bert_tf.planning.devices import measure_processor, planned_precision
from bert_tf.planning.estimates import Training, estimate
from bert_tf.planning.report import device_line, training_lines
from bert_tf.pretraining.recipe import case_of, config_of, pretrain, step_sizes
from bert_tf.pretraining.settings import PretrainCommandSettings, PretrainSettings
from bert_tf.weights.sources import read_pretrained


def dry_run(
    settings: PretrainCommandSettings, log: Callable[[str], None] = lambda line: None
) -> None:
    """Train a toy model for three steps on the given shards, in a temporary directory.

    It runs every stage, including a resume, and finds the user errors that do not depend on the
    model size, and ends with an estimate of the whole training, on the devices of the settings.
    """
    manifest = Manifest.load(settings.shards[0])
    lengths = [Manifest.load(directory).settings["max_seq_length"] for directory in settings.shards]
    with tempfile.TemporaryDirectory() as directory:
        toy = BertConfig(
            vocab_size=len(manifest.vocabulary()),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=max(lengths),
            **case_of(manifest),
        )
        path = f"{directory}/toy_config.json"
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(toy.to_dict(), stream)
        minimum = settings.gradient_accumulation_steps * 2
        small = PretrainSettings(
            **{
                **settings.recorded(),
                "model_size": None,
                "init_from": None,
                "config": path,
                "output_dir": f"{directory}/run",
                "phase_steps": ("3",) * len(settings.shards),
                "global_batch_size": min(settings.global_batch_size, 4 * minimum),
                "save_every": 2,
                "eval_every": None,
                "eval_batches": 2,
                "log_every": 1,
                "dry_run": False,
            }
        )
        pretrain(small, log)
        pretrain(small, log)  # Resumes a finished run.
    log("dry run: all stages completed; nothing was kept")
    for line in _estimate(settings):
        log(line)


def _estimate(settings):
    """Yield the report of each phase of the training on the planned devices."""
    source = read_pretrained(settings.init_from) if settings.init_from else None
    manifests = [Manifest.load(directory) for directory in settings.shards]
    config = config_of(settings, source, manifests[0], manifests[0].vocabulary())
    precision = planned_precision(settings.precision, settings.typical())
    settings = dataclasses.replace(settings, precision=precision)
    first_step = 0
    for manifest, last_step in zip(manifests, settings.phase_ends, strict=True):
        sizes = step_sizes(settings, config, [manifest], settings.devices)
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
