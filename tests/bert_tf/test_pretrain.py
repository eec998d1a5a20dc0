"""The pretraining recipe: it learns, also in phases; inconsistent settings are rejected."""

import dataclasses
import json
import pathlib
import shutil
import signal
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import BertConfig, UserError, Vocabulary
from bert_tf.config import read_json_object
from bert_tf.data import inspection, tf_examples
from bert_tf.data.manifest import Manifest
from bert_tf.pretraining import recipe
from bert_tf.pretraining.settings import PretrainCommandSettings, PretrainSettings
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.signals import Interrupted
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights
from tests import small
from tests.corpus import ENTRIES, SMALL, write_shards
from tests.pretraining import (
    assert_same_bits,
    lines_of,
    make_directories,
    prepared,
    settings_of,
    stop_at,
    weights_of,
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_directories(tmp_path_factory.mktemp("data"))


@pytest.mark.plots
@pytest.mark.slow
def test_it_learns_and_logs_metrics(directories, tmp_path):
    said = []
    settings = settings_of(
        directories,
        tmp_path / "run",
        num_train_steps=120,
        learning_rate=1e-2,
        log_every=20,
        eval_shards=str(directories["held_out"]),
        eval_every=60,
    )
    run = recipe.pretrain(settings, said.append)
    first, last = (line for line in lines_of(run) if "loss" not in line)
    # Random letters are unpredictable, except which entries are letters and where sentences end.
    assert last["eval_masked_lm_loss"] < np.log(len(ENTRIES)) - 0.08
    assert first["step"] == 60 and last["step"] == 120
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_masked_lm_loss"]))
    assert last["eval_masked_lm_accuracy"] > 3 / len(ENTRIES)
    counts = sum(entry["records"] for entry in Manifest.load(directories["shards"]).shards)
    assert any(f"{120 * 12 / counts:.2f} epochs over {counts:,} examples" in line for line in said)
    step = next(line for line in said if line.startswith("step 20/120"))
    assert "masked_lm_accuracy" in step and "tokens/s" in step and "TFLOP/s" in step
    written = read_json_object(run.file("train.json"))
    manifests = [Manifest.load(directories[name]) for name in ("shards", "held_out")]
    assert written["data"] == [manifest.sha256 for manifest in manifests]
    assert written["settings"]["bias_correction"] is False
    assert not pathlib.Path(run.file("task.json")).exists()
    assert pathlib.Path(run.file("loss.png")).read_bytes()[1:4] == b"PNG"
    events = [
        (event.step, value.tag)
        for path in pathlib.Path(run.file("tensorboard")).iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert (120, "loss") in events and (60, "eval_perplexity") in events
    again = []
    recipe.pretrain(settings, again.append)
    assert again == [f"{run.path}: finished at step 120, nothing to do"]
    pathlib.Path(run.file("loss.png")).unlink()  # As if it was killed before.
    recipe.pretrain(settings, again.append)
    assert again[2:] == [f"loss curves: {run.file('loss.png')}"]
    assert pathlib.Path(run.file("loss.png")).exists()


@pytest.mark.slow
def test_phases_share_one_schedule_and_one_optimizer(directories, tmp_path, monkeypatch):
    shards = ("shards", "longer")
    settings = settings_of(directories, tmp_path / "whole", shards, phase_steps=("5", "3"))
    said = []
    complete = recipe.pretrain(settings, said.append)
    assert "steps 0 to 5, 384 tokens per step" in said[1]
    assert "steps 5 to 8, 576 tokens per step" in said[2]
    lines = lines_of(complete)
    assert [line["step"] for line in lines] == list(range(1, 9))
    rates = [1e-3 * (step / 2 if step < 2 else 1 - step / 8) for step in range(8)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    for step in (5, 6):
        settings = dataclasses.replace(settings, output_dir=str(tmp_path / f"stopped{step}"))
        with monkeypatch.context() as context:
            stop_at(context, step)
            with pytest.raises(Interrupted):
                recipe.pretrain(settings)
        run = recipe.pretrain(settings)
        assert_same_bits(weights_of(run), weights_of(complete))
        assert lines_of(run) == lines


@pytest.mark.slow
def test_two_replicas_and_gradient_accumulation_equal_one_large_batch(
    directories, tmp_path, mirrored, monkeypatch
):
    still = json.loads(directories["config"].read_text())
    still |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(still))
    changes = {"config": str(tmp_path / "config.json"), "optimizer": "lamb", "num_train_steps": 10}
    runs = {}
    for name, more, strategy in (
        ("one", {}, None),
        ("two", {}, mirrored),
        ("parts", {"gradient_accumulation_steps": 3}, None),
        ("both", {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, mirrored),
    ):
        settings = settings_of(directories, tmp_path / name, **{**changes, **more})
        runs[name] = recipe.pretrain(settings, strategy=strategy)
    for name in ("two", "parts", "both"):
        one, other = weights_of(runs["one"]), weights_of(runs[name])
        for weight in one:
            np.testing.assert_allclose(other[weight], one[weight], rtol=0, atol=1e-5)
        for line, expected in zip(lines_of(runs[name]), lines_of(runs["one"]), strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
    # Held-out examples are counted once each, however many replicas get filler examples.
    config = recipe.BertConfig.load(tmp_path / "config.json")
    vocabulary = Manifest.load(directories["shards"]).vocabulary()
    data = recipe.PretrainingDataset(str(directories["held_out"]), vocabulary, config)
    monkeypatch.setattr("bert_tf.pretraining.evaluation.BATCH_EXAMPLES", len(data) // 3 + 1)
    results = []
    none = tf.distribute.get_strategy()
    for strategy, is_compiled in ((none, False), (none, True), (mirrored, False)):
        with strategy.scope():
            tf.keras.utils.set_random_seed(0)
            model = recipe.PretrainingModel(config)
        results.append(recipe.PretrainingEvaluator(model, strategy, data, is_compiled).metrics())
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)


def given(directories, output_dir, init_from, **changes):
    """Return settings of one step from given weights; the rate is 0, so the weights stay."""
    changes = {"num_train_steps": 1, "warmup_steps": 1, **changes}
    return settings_of(directories, output_dir, config=None, init_from=str(init_from), **changes)


@pytest.mark.slow
def test_it_starts_from_given_weights_and_heads(directories, tmp_path):
    first = recipe.pretrain(settings_of(directories, tmp_path / "first"))
    said = []
    second = recipe.pretrain(given(directories, tmp_path / "second", first.path), said.append)
    before, after = weights_of(first), weights_of(second)
    used = [name for name in after if name.startswith(name_map.COMPONENTS) and "adam" not in name]
    assert {name.split("/")[0] for name in used} == set(name_map.COMPONENTS)
    for name in used:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    directory = first.checkpoints.path(8)
    assert second.train["origin"] == f"run {directory}"
    assert f" parameters, run {directory}; uncased" in said[0]
    assert "--warmup_steps=1: the training ends at step 1, at a learning rate of 0" in said[2]


@pytest.mark.slow
def test_an_embedding_table_may_have_more_rows_than_the_vocabulary(directories, tmp_path):
    config = dataclasses.replace(BertConfig.load(directories["config"]), vocab_size=64)
    padded = Vocabulary(ENTRIES).padded(64, "here")
    weights = small.random_weights(config)
    PretrainedWeights(config, padded, weights, "somewhere").save(tmp_path / "first")
    run = recipe.pretrain(given(directories, tmp_path / "second", tmp_path / "first"))
    assert run.vocabulary.sha256 == padded.sha256
    np.testing.assert_array_equal(
        weights_of(run)["bert/embeddings/word_embeddings"],
        weights["bert/embeddings/word_embeddings"],
    )


def dry_settings(directories, tmp_path, **changes):
    values = {
        "shards": (str(directories["shards"]),),
        "output_dir": str(tmp_path / "run"),
        "dry_run": True,
        "device": "a100",
    }
    return PretrainCommandSettings(**{**values, **changes})


def with_counts(directories, directory, **changes):
    """Return directories whose shards record other counts of tokens, or none."""
    shutil.copytree(directories["shards"], directory)
    values = json.loads((directory / "manifest.json").read_text())
    for entry in values["shards"]:
        counts = entry.pop("token_counts")
        if changes:
            entry["token_counts"] = {**counts, **changes}
    (directory / "manifest.json").write_text(json.dumps(values))
    return {**directories, "shards": directory}


def test_shards_of_unknown_tokens_are_refused_before_training(directories, tmp_path):
    directories = with_counts(directories, tmp_path / "shards", tokens=100, unknown=100)
    dry = dry_settings(directories, tmp_path, config=str(directories["config"]))
    for train, settings in (
        (recipe.pretrain, settings_of(directories, tmp_path / "run")),
        (recipe.dry_run, dry),
    ):
        with pytest.raises(UserError, match=r"shards: all 300 tokens are \[UNK\]"):
            train(settings)
    assert not Run.exists(tmp_path / "run")


@pytest.mark.parametrize("unknown", [10, 4, None])
def test_unknown_tokens_of_shards_are_reported_if_recorded(
    directories, tmp_path, monkeypatch, unknown
):
    changes = {"tokens": 100, "unknown": unknown} if unknown else {}
    directories = with_counts(directories, tmp_path / "shards", **changes)
    monkeypatch.setattr(recipe, "PretrainingModel", mock.Mock(side_effect=InterruptedError))
    lines = []
    with pytest.raises(InterruptedError):
        recipe.pretrain(settings_of(directories, tmp_path / "run"), lines.append)
    found = [line for line in lines if "[UNK]" in line]
    assert len(found) == (unknown == 10)
    start = f"warning: {directories['shards']}: 10.0% of 300 tokens are [UNK]"
    assert not found or found[0].startswith(start)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_dry_run_accepts_a_table_with_more_rows(directories, tmp_path, monkeypatch, is_given):
    config = dataclasses.replace(BertConfig.load(directories["config"]), vocab_size=64)
    padded = Vocabulary(ENTRIES).padded(64, "here")
    if is_given:
        weights = small.random_weights(config)
        PretrainedWeights(config, padded, weights, "somewhere").save(tmp_path / "first")
        model = {"init_from": str(tmp_path / "first")}
    else:
        files.atomic_write_json(tmp_path / "config.json", config.to_dict())
        model = {"config": str(tmp_path / "config.json")}
    settings = dry_settings(directories, tmp_path, **model)
    found = [recipe._inputs(settings)]
    monkeypatch.setattr(recipe, "pretrain", lambda toy, log: found.append(recipe._inputs(toy)))
    recipe.dry_run(settings)
    assert [vocabulary.sha256 for _, vocabulary, *_ in found] == [padded.sha256] * 3


@pytest.mark.medium
@pytest.mark.parametrize(
    ("parts", "new"),
    [
        (("bert", "masked_lm"), "; new next_sentence head"),
        pytest.param(("bert",), "; new masked_lm and next_sentence heads", marks=pytest.mark.slow),
    ],
)
def test_it_logs_which_heads_are_new(directories, tmp_path, parts, new):
    config = BertConfig.load(directories["config"])
    weights = small.random_weights(config, parts=parts)
    PretrainedWeights(config, Vocabulary(ENTRIES), weights, "somewhere").save(tmp_path / "first")
    run = recipe.pretrain(given(directories, tmp_path / "second", tmp_path / "first"))
    assert run.train["origin"].endswith(f"first/checkpoints/step-00000000{new}")


@pytest.mark.parametrize(
    ("vocabulary", "changes", "message"),
    [
        # The number of entries is the same, but two of them are swapped.
        (
            [*ENTRIES[:-2], *ENTRIES[:-3:-1]],
            {},
            f"Received: {len(ENTRIES)} entries ({Vocabulary(ENTRIES).sha256[:12]}...). Write the "
            "shards with the vocabulary of --init_from",
        ),
        ([*ENTRIES, "more"], {"vocab_size": len(ENTRIES) + 1}, f": {len(ENTRIES) + 1} entries ("),
        (ENTRIES, {"do_lower_case": False}, "do_lower_case=True; the configuration has False"),
        (
            ENTRIES,
            {"max_position_embeddings": 31},
            "max_seq_length=32 exceeds max_position_embeddings=31",
        ),
    ],
)
def test_weights_that_do_not_fit_the_shards_are_rejected_in_one_line(
    directories, tmp_path, vocabulary, changes, message
):
    config = dataclasses.replace(BertConfig.load(directories["config"]), **changes)
    weights = small.random_weights(config)
    PretrainedWeights(config, Vocabulary(vocabulary), weights, "somewhere").save(tmp_path / "first")
    with pytest.raises(UserError) as caught:
        recipe.pretrain(given(directories, tmp_path / "second", tmp_path / "first"))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("start", [PretrainSettings.check, recipe.pretrain])
def test_a_configuration_with_too_few_entries_is_named(directories, tmp_path, start):
    small = dataclasses.replace(BertConfig.load(directories["config"]), vocab_size=40)
    path = tmp_path / "config.json"
    files.atomic_write_json(path, small.to_dict())
    expected = f"^--config={path}: vocab_size is 40, but .* has {len(ENTRIES)} entries; set it to"
    with pytest.raises(UserError, match=expected):
        start(settings_of({**directories, "config": path}, tmp_path / "run"))


@pytest.mark.parametrize("given", [{}, {"do_lower_case": True}])
@pytest.mark.parametrize("is_foreign", [True, False])
def test_a_configuration_of_google_has_the_case_of_the_shards(tmp_path, given, is_foreign):
    vocabulary = Vocabulary([*ENTRIES, *"ABC"])
    vocabulary.save(tmp_path / "vocab.txt")
    manifest = Manifest.describe(tmp_path, vocabulary, 32, 5, [])
    if not is_foreign:
        tokenizer = {"do_lower_case": False, "strip_accents": None, "max_input_chars_per_word": 100}
        entries = {"entries": len(vocabulary)}
        manifest = Manifest(tmp_path, {"tokenizer": tokenizer, "vocabulary": entries})
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps({"vocab_size": len(vocabulary), **given}))
    settings = PretrainSettings(shards=(str(tmp_path),), output_dir="run", config=str(path))
    config = recipe.config_of(settings, None, manifest, vocabulary)
    assert config.do_lower_case is bool(given)
    assert config.max_input_chars_per_word == (200 if is_foreign else 100)


@pytest.mark.slow
def test_an_impossible_id_stops_training_with_shard_and_record(directories, tmp_path):
    directory = write_shards(tmp_path / "bad")
    path = directory / "examples-00001-of-00003.tfrecord"
    parse = tf_examples.parser(SMALL["max_seq_length"], SMALL["max_predictions_per_seq"])
    _, examples = next(inspection.read_shards([str(path)], parse))
    examples["input_ids"][:, 1] = len(ENTRIES)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in tf_examples.serialize(examples):
            writer.write(record)
    settings = settings_of({**directories, "shards": directory}, tmp_path / "run")
    with pytest.raises(UserError, match="00001-of-00003.tfrecord: "):
        recipe.pretrain(settings)  # The hash of the shard differs from that of the manifest.
    manifest = Manifest.load(directory)
    manifest.shards[1] |= {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
    manifest.save_values()
    with pytest.raises(UserError, match=r"00001-of-00003.tfrecord: record \d+: input_ids is"):
        recipe.pretrain(settings)


@pytest.mark.medium
@pytest.mark.parametrize("steps_per_execution", small.fast([1, 5], 5))
def test_a_value_that_is_not_finite_is_reported_with_step_and_position(
    directories, tmp_path, steps_per_execution
):
    changes = {"learning_rate": 1e30, "warmup_steps": 0, "steps_per_execution": steps_per_execution}
    with pytest.raises(UserError) as caught:
        recipe.pretrain(settings_of(directories, tmp_path / "run", log_every=5, **changes))
    message = str(caught.value)
    # The first update makes the weights overflow, so the second step fails.
    assert message.startswith("step 1 (epoch 0 of"), message
    assert "the loss or its gradient is not finite" in message
    assert "from example 12 in the order of seed 0" in message


@pytest.mark.slow
def test_several_steps_per_execution_equal_single_steps(directories, tmp_path, monkeypatch):
    """Check it where saves, log lines and evaluations shorten the calls, and check the counters."""
    changes = {"eval_shards": str(directories["held_out"]), "eval_every": 7, "log_every": 5}
    changes |= {"num_train_steps": 12}
    one = recipe.pretrain(settings_of(directories, tmp_path / "one", **changes))
    counts, call = [], TrainingLoop._steps

    def counted(loop, iterator, step, asked, count, norm):
        logs = call(loop, iterator, step, asked, count, norm)
        counts.append((step, count, int(logs["examples"])))
        return logs

    monkeypatch.setattr(TrainingLoop, "_steps", counted)
    many = recipe.pretrain(
        settings_of(directories, tmp_path / "many", steps_per_execution=4, **changes)
    )
    starts = [(0, 3), (3, 2), (5, 1), (6, 1), (7, 2), (9, 1), (10, 2)]
    assert counts == [(step, count, 12 * count) for step, count in starts]
    for name, values in weights_of(one).items():
        np.testing.assert_allclose(weights_of(many)[name], values, rtol=0, atol=1e-6)
    for line, expected in zip(lines_of(many), lines_of(one), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.mark.plots
@pytest.mark.slow
def test_a_run_can_be_on_a_file_system_of_tensorflow(directories, tmp_path, monkeypatch):
    """Use ram://, TensorFlow's file system in memory, in place of gs://."""
    local = recipe.pretrain(settings_of(directories, tmp_path / "run"))
    settings = settings_of(directories, "ram://folder/run")
    with monkeypatch.context() as context:
        stop_at(context, 4)
        with pytest.raises(Interrupted, match="stopped and saved at step 4 of 8 in ram://"):
            recipe.pretrain(settings)
    said = []
    remote = recipe.pretrain(settings, said.append)
    assert "resuming at step 4 of 8" in said
    assert_same_bits(weights_of(remote), weights_of(local))
    assert lines_of(remote) == lines_of(local)
    assert files.size("ram://folder/run/loss.png") > 1000
    assert files.listdir("ram://folder/run/checkpoints") == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "--model_size, --config, --init_from: expected exactly one"),
        ({"model_size": "tiny"}, "--model_size, --config, --init_from: expected exactly one"),
        (
            {"phase_steps": ("1", "2")},
            "--phase_steps: received 1,2, expected the steps of each",
        ),
        ({"eval_every": 5}, "--eval_every=5: expected --eval_shards as well"),
        ({"eval_batches": 5}, "--eval_batches=5: expected --eval_shards as well"),
        ({"phase_steps": ("x",)}, "--phase_steps=x: expected integers >= 1"),
        ({"phase_steps": ("5",)}, "--num_train_steps=8: --phase_steps=5 are 5 steps in total"),
        ({"gradient_accumulation_steps": 5}, "expected a multiple of 1 replicas"),
        ({"steps_per_execution": 0}, "--steps_per_execution=0: expected an integer >= 1"),
        ({"seed": 1 << 32}, "--seed=4294967296: expected an integer >= 0 and < 4294967296"),
        ({"save_every": 0}, "--save_every=0: expected an integer >= 1"),
        ({"learning_rate": 0.0}, "--learning_rate=0.0: expected a number > 0"),
        ({"config": "nowhere.json"}, "^nowhere.json: no such file"),
        ({"shards": ("nowhere",)}, "nowhere/manifest.json: no such file"),
    ],
)
def test_impossible_settings_are_rejected_before_a_run_is_created(
    directories, tmp_path, changes, message
):
    with pytest.raises(UserError, match=message):
        recipe.pretrain(settings_of(directories, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_changed_flags_and_other_shards_are_rejected(directories, tmp_path):
    held_out = str(directories["held_out"])
    settings = settings_of(directories, tmp_path / "run", num_train_steps=1, eval_shards=held_out)
    recipe.pretrain(settings)
    with pytest.raises(UserError, match="--seed: was 0 when .* was created, is now 1"):
        recipe.pretrain(dataclasses.replace(settings, seed=1, num_train_steps=2))
    other = write_shards(tmp_path / "other", seed=5)
    for changes in ({"shards": (str(other),)}, {"eval_shards": str(other)}):
        with pytest.raises(UserError, match=f"^{other}: differs from the shards .*run was started"):
            recipe.pretrain(dataclasses.replace(settings, num_train_steps=2, **changes))
    moved = shutil.copytree(settings.shards[0], tmp_path / "moved")
    said = []
    recipe.pretrain(
        dataclasses.replace(settings, shards=(str(moved),), num_train_steps=2), said.append
    )
    assert "resuming at step 1 of 2" in said


def start_run(settings, **record):
    """Create a run that has the checkpoint of a variable, which is no model."""
    config, record = BertConfig.load(settings.config), {"settings": settings.recorded(), **record}
    run = Run.create(settings.output_dir, config, Vocabulary(ENTRIES), record)
    run.checkpoints.save(3, {"a": tf.Variable(1.0)})
    return run


def test_a_changed_configuration_is_rejected(directories, tmp_path):
    path = pathlib.Path(shutil.copy(directories["config"], tmp_path))
    settings = settings_of({**directories, "config": path}, tmp_path / "run", precision="float32")
    run = start_run(settings)
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu"}))
    with pytest.raises(UserError, match=f"--config={path}: has changed since {run.path} was"):
        recipe.pretrain(settings)


def test_other_masks_of_the_same_records_are_rejected(directories, tmp_path):
    directory = write_shards(tmp_path / "words", masking="dynamic", whole_word_mask=True)
    given, other = map(Manifest.load, (directories["dynamic"], directory))
    assert given.sha256 == other.sha256 and given.masks == {**other.masks, "whole_word_mask": False}
    assert Manifest.load(directories["shards"]).masks is None
    settings = settings_of(directories, tmp_path / "run", ("dynamic",), precision="float32")
    run = start_run(settings, data=[given.sha256], masks=[given.masks])
    with pytest.raises(UserError, match=f"^{directory}: differs from the shards .*run was started"):
        recipe.pretrain(dataclasses.replace(settings, shards=(str(directory),)))
    # Runs without a record of the masks are resumed, up to the variables of the checkpoint.
    del run.train["masks"]
    files.atomic_write_json(run.file("train.json"), run.train)
    with pytest.raises(UserError, match="none of the 1 checkpoints"):
        recipe.pretrain(settings)


def test_missing_shards_are_reported_before_tensorflow_is_imported(directories, tmp_path):
    copy = pathlib.Path(shutil.copytree(directories["shards"], tmp_path / "copy"))
    settings = settings_of({**directories, "shards": copy}, tmp_path / "run")
    settings.check()
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
    with pytest.raises(UserError, match="manifest.json: not complete"):
        settings.check()


def test_the_files_that_a_run_was_started_from_are_not_checked(directories, tmp_path):
    path = pathlib.Path(shutil.copy(directories["config"], tmp_path))
    settings = settings_of({**directories, "config": path}, tmp_path / "run")
    start_run(settings)
    path.unlink()
    settings.check()
    dataclasses.replace(settings, output_dir="ram://started/run").check()
    for new in (
        dataclasses.replace(settings, output_dir=str(tmp_path / "new")),
        dataclasses.replace(settings, dry_run=True),
    ):
        with pytest.raises(UserError, match=f"^{path}: no such file"):
            new.check()


@pytest.mark.parametrize("strategy", ["none", "multi_worker"])
def test_a_dry_run_checks_the_output_directory(directories, tmp_path, strategy):
    settings = settings_of(directories, tmp_path / "run", dry_run=True, strategy=strategy)
    run = start_run(dataclasses.replace(settings, dry_run=False))
    settings.check()
    with pytest.raises(UserError, match="--learning_rate: was"):
        dataclasses.replace(settings, learning_rate=0.5).check()
    with pytest.raises(UserError, match="contains other files"):
        dataclasses.replace(settings, output_dir=run.file("checkpoints")).check()


@pytest.mark.slow
def test_a_run_resumes_without_the_weights_that_it_was_started_from(directories, tmp_path):
    first = recipe.pretrain(settings_of(directories, tmp_path / "first", num_train_steps=1))
    settings = given(directories, tmp_path / "second", first.path)
    recipe.pretrain(settings)
    shutil.rmtree(first.path)
    settings.check()
    recipe.pretrain(settings)
    run = recipe.pretrain(dataclasses.replace(settings, num_train_steps=2))
    assert run.checkpoints.steps()[-1] == 2


def test_another_number_of_steps_is_logged_with_its_rates_and_recorded_once(directories, tmp_path):
    settings = settings_of(directories, tmp_path / "run", num_train_steps=4)
    run = start_run(settings)
    assert recipe._change_steps(run, settings, 4) is None
    longer = dataclasses.replace(settings, num_train_steps=8)
    logged = recipe._change_steps(run, longer, 8)
    assert logged.startswith("--num_train_steps: changed from 4 to 8; the learning rate at step 3")
    assert "changes from 0.00025 to 0.000625" in logged  # 1 - 3/4 and 1 - 3/8 of the peak.
    run = Run.open(run.path)
    assert run.train["settings"]["num_train_steps"] == 8
    (change,) = run.train["changes"]
    assert (change["step"], change["num_train_steps"]) == (3, [4, 8])
    assert change["learning_rate"] == pytest.approx([2.5e-4, 6.25e-4])
    # The next resume changes nothing, and other settings are still compared.
    assert recipe._change_steps(run, longer, 8) is None
    with pytest.raises(UserError, match="--seed: was 0"):
        run.check_resumable(dataclasses.replace(longer, seed=1).recorded(), None)


@pytest.mark.parametrize(("parts", "examples"), [(1, 16), (2, 8)])
def test_the_estimate_is_that_of_a_part_of_the_batch(directories, tmp_path, parts, examples):
    changes = {"global_batch_size": 16, "gradient_accumulation_steps": parts}
    settings = settings_of(directories, tmp_path / "run", **changes)
    manifests = [Manifest.load(directories["shards"])]
    sizes = recipe._step_sizes(settings, BertConfig.load(settings.config), manifests, replicas=1)
    assert (sizes.examples, sizes.accumulates) == (examples, parts > 1)


def test_a_training_that_ends_in_the_warmup_is_reported(directories, tmp_path, monkeypatch):
    settings = dry_settings(directories, tmp_path, model_size="tiny", num_train_steps=800)
    toys, said = [], []
    monkeypatch.setattr(recipe, "pretrain", lambda settings, log: toys.append(settings))
    recipe.dry_run(settings, said.append)
    (warning,) = (line for line in said if line.startswith("warning"))
    assert "--warmup_steps=10000: the training ends at step 800, at a learning" in warning
    assert "rate of 7.99e-06 instead of 0.0001" in warning  # 799 / 10,000 of the peak.
    others = [dataclasses.replace(settings, warmup_steps=799), *toys]
    assert [recipe.warmup_warning(other) for other in others] == [[]] * 3


@pytest.mark.slow
def test_a_longer_run_resumes_at_the_logged_rate(directories, tmp_path):
    settings = settings_of(directories, tmp_path / "run", num_train_steps=3)
    recipe.pretrain(settings)
    said = []
    run = recipe.pretrain(dataclasses.replace(settings, num_train_steps=6), said.append)
    (logged,) = [line for line in said if line.startswith("--num_train_steps")]
    assert "at step 3 changes from 0 to 0.0005" in logged
    assert lines_of(run)[3]["step"] == 4
    assert lines_of(run)[3]["learning_rate"] == pytest.approx(5e-4)


@pytest.mark.slow
def test_a_dry_run_covers_every_stage_and_leaves_nothing(directories, tmp_path, run_command):
    done = run_command(
        "bert_tf.pretrain",
        f"--shards={directories['shards']},{directories['longer']}",
        "--phase_steps=10,10",
        f"--eval_shards={directories['held_out']}",
        "--model_size=base",
        f"--output_dir={tmp_path / 'run'}",
        "--dry_run",
        "--device=a100",
    )
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stderr and "eval_perplexity" in done.stderr
    assert "all stages completed" in done.stderr
    # The complete estimate of both phases.
    assert done.stderr.count("  steps             10 of 256 examples") == 2
    # In the precision that auto selects on this device.
    assert "312,000 GFLOP/s in bfloat16" in done.stderr and "in float32" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_finds_shards_that_do_not_fit_the_model(directories, tmp_path, monkeypatch):
    long = write_shards(tmp_path / "long", max_seq_length=48)
    said, longest = [], write_shards(tmp_path / "longest", max_seq_length=600)
    for changes in ({"shards": (str(longest),)}, {"eval_shards": str(longest)}):
        settings = dry_settings(directories, tmp_path, model_size="tiny", **changes)
        with pytest.raises(UserError, match="max_seq_length=600 .*512"):
            recipe.dry_run(settings)
    # Held-out examples may be longer.
    monkeypatch.setattr(recipe, "pretrain", lambda toy, log: recipe._inputs(toy))
    recipe.dry_run(dataclasses.replace(settings, eval_shards=str(long)), said.append)
    assert "all stages completed" in said[0]


def test_a_dry_run_that_is_stopped_keeps_nothing(directories, tmp_path, monkeypatch):
    def stop(settings, log):
        raise Interrupted(f"stopped and saved in {settings.output_dir}", signal.SIGTERM)

    monkeypatch.setattr(recipe, "pretrain", stop)
    with pytest.raises(Interrupted, match="^dry run: stopped; nothing was kept$") as caught:
        recipe.dry_run(dry_settings(directories, tmp_path, model_size="tiny"))
    assert caught.value.signum == signal.SIGTERM


@pytest.mark.parametrize(("strategy", "device"), [("tpu", "tpu-v4"), ("multi_worker", "a100")])
def test_a_dry_run_needs_none_of_the_devices_of_its_estimate(
    directories, tmp_path, monkeypatch, strategy, device
):
    toys, said = [], []
    monkeypatch.setattr(recipe, "pretrain", lambda settings, log: toys.append(settings))
    changes = {"strategy": strategy, "device": device, "devices": 16, "global_batch_size": 48}
    settings = dry_settings(directories, tmp_path, model_size="tiny", **changes)
    recipe.dry_run(settings, said.append)
    assert [(toy.strategy, toy.global_batch_size) for toy in toys] == [("none", 8)] * 2
    assert "all stages completed" in said[0] and any("device-hours" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"compile": "kernels"}, 1),
        ({"compile": "step"}, 20),
        ({"compile": "step", "steps_per_execution": 3}, 3),
    ],
)
def test_a_call_of_a_compiled_step_has_20_steps(directories, tmp_path, monkeypatch, changes, steps):
    settings = settings_of(directories, tmp_path / "run", **changes)
    assert prepared(monkeypatch, lambda: recipe.pretrain(settings)).steps_per_execution == steps


def test_the_precision_that_auto_selects_is_logged_and_recorded(directories, tmp_path, monkeypatch):
    said = []
    settings = settings_of(directories, tmp_path / "run", precision="auto")
    run = prepared(monkeypatch, lambda: recipe.pretrain(settings, said.append)).run
    assert "precision float32; XLA compiles kernels" in said
    assert run.train["settings"]["precision"] == "float32"
