"""Masked language modeling without next sentences: examples, training, heads, transformers."""

import json
import subprocess

import numpy as np
import pytest

import tasks
from bert_tf import BertConfig, UserError, Vocabulary, read_pretrained
from bert_tf.data import inspection, jobs, tf_examples, writing
from bert_tf.data.batches import PretrainingDataset, pad_examples
from bert_tf.data.instances import make_texts
from bert_tf.data.manifest import Manifest
from bert_tf.pretraining import recipe
from bert_tf.pretraining.settings import PretrainSettings
from bert_tf.train.signals import Interrupted
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights
from tests import small
from tests.bert_tf.test_conversion import converted
from tests.bert_tf.test_instances import TWENTY, tokenized
from tests.conftest import ROOT
from tests.corpus import ENTRIES, run_here, write_shards
from tests.corpus import settings_of as shard_settings
from tests.pretraining import (
    assert_same_bits,
    lines_of,
    make_config,
    settings_of,
    stop_at,
    weights_of,
)

# Not in the order of their hashes, one longer than an example of 8 tokens, one twice.
TEXTS = ["a b c", "d e f g h i j k l m n o p", "q", "a b c"]


def written(tmp_path, monkeypatch, text, **changes):
    """Write shards of static masks; return {tokens without masks: number}, and the log."""
    monkeypatch.setattr(jobs, "run", run_here)
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    (tmp_path / "text.txt").write_text(text)
    corpus = {"input": str(tmp_path / "text.txt"), "vocab": str(tmp_path / "vocab.txt")}
    values = {"max_seq_length": 8, "max_predictions_per_seq": 3, "dupe_factor": 1}
    values |= {"next_sentence": False, **changes}
    settings = shard_settings(corpus, tmp_path / "plain", **values)
    log = []
    manifest = writing.write_shards(settings, log.append)
    found = {}
    for example in inspection.first_examples(manifest, 99):
        ids = example["input_ids"]
        used = example["masked_lm_weights"] > 0
        ids[example["masked_lm_positions"][used]] = example["masked_lm_ids"][used]
        assert set(example) == {*tf_examples.INPUTS, *tf_examples.MASKS}
        assert not example["segment_ids"].any() and used.any()
        length = example["input_mask"].sum()
        assert not ids[length:].any()
        tokens = " ".join(ENTRIES[token] for token in ids[:length])
        found[tokens] = found.get(tokens, 0) + 1
    return found, log


PIECES = {
    "[CLS] a b c [SEP]": 2,
    "[CLS] d e f g h i [SEP]": 1,
    "[CLS] j k l m n o [SEP]": 1,
    "[CLS] p [SEP]": 1,
    "[CLS] q [SEP]": 1,
}


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_lines_without_blank_lines_are_texts(tmp_path, monkeypatch, whole_word_mask):
    # More shards than texts: some are empty.
    text = "\n" + "\n".join(TEXTS) + "\n\n"
    changes = {"num_shards": 5, "whole_word_mask": whole_word_mask}
    found, log = written(tmp_path, monkeypatch, text, **changes)
    assert found == PIECES
    assert "input: one text per line, since no blank line separates documents" in log
    assert "4 documents, " in log[2]
    manifest = Manifest.load(tmp_path / "plain")
    assert [entry["records"] for entry in manifest.shards].count(0) == 1
    vocabulary = Vocabulary(ENTRIES)
    config = BertConfig(vocab_size=len(ENTRIES), max_position_embeddings=8, type_vocab_size=1)
    data = PretrainingDataset(str(tmp_path / "plain"), vocabulary, config)
    (batch,) = data.training_batches(data.position(0, 0), 6, pad_examples).take(1)
    assert np.sort(batch["input_mask"].numpy().sum(axis=1)).tolist() == [3, 3, 5, 5, 8, 8]


def test_objects_are_texts(tmp_path, monkeypatch):
    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).replace(
        "h i j", "h\\n\\ni j"
    )
    found, log = written(tmp_path, monkeypatch, text, input_format="jsonl", num_shards=1)
    assert found == PIECES and "input: one text per object" in log


@pytest.mark.parametrize(
    ("input_format", "text", "last"),
    [
        (
            "lines",
            "a b\nc\nd\n\ne f g h i\nj\nk l\n",
            {"[CLS] e f g h i j [SEP]": 1, "[CLS] k l [SEP]": 1},
        ),
        ("text", "a b\n\nc. d\n", {}),
    ],
)
def test_running_text_fills_the_examples_within_documents(
    tmp_path, monkeypatch, input_format, text, last
):
    changes = {"input_format": input_format, "num_shards": 1, "dupe_factor": 2}
    found, log = written(tmp_path, monkeypatch, text, **changes)
    first = "[CLS] a b c . d [SEP]" if input_format == "text" else "[CLS] a b c d [SEP]"
    assert found == {key: 2 * value for key, value in {first: 1, **last}.items()}
    assert "input: running text, filled up to 8 tokens within documents" in log
    assert "random next" not in log[-1]


def test_each_pass_has_all_tokens_once_in_random_order():
    documents = tokenized(TWENTY)  # Twelve tokens each.
    made = make_texts(documents, max_seq_length=7, dupe_factor=3, seed=1)
    assert len(made) == 5 * 3 * 3 and (np.diff(made.a_begin) < 0).any()
    assert sorted(made.num_tokens) == [4] * 15 + [7] * 30
    tokens = [documents.ids[a:b] for a, b in zip(made.a_begin, made.a_end, strict=True)]
    assert sorted(np.concatenate(tokens)) == sorted([*documents.ids] * 3)
    assert all(len(set(of // 100)) == 1 for of in tokens)


@pytest.mark.parametrize("change", [{"short_seq_prob": 0.2}, {"same_document_next": True}])
def test_settings_of_pairs_are_refused(corpus, tmp_path, change):
    with pytest.raises(UserError, match=f"--{next(iter(change))}=.*: only for pairs of segments; "):
        shard_settings(corpus, tmp_path, next_sentence=False, **change)


def test_errors_of_pairs_name_the_flag_for_single_texts(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="1 documents, .* with --next_sentence=false$"):
        written(tmp_path, monkeypatch, "\n".join(TEXTS), next_sentence=True)
    values = {"settings": {}, "shards": [{"records": 10, "random_next": 10}]}
    warning = Manifest("shards", values).next_sentence_warning()
    assert warning.endswith("for texts of one sentence use --next_sentence=false of write_shards")


def test_inspection_shows_texts_without_segments(tmp_path):
    directory = write_shards(tmp_path, next_sentence=False)
    manifest, vocabulary = Manifest.load(directory), Vocabulary(ENTRIES)
    lines = list(inspection.inspect(manifest, vocabulary).lines(32))
    assert not any("segment" in line or "next" in line for line in lines)
    (example,) = inspection.first_examples(manifest, 1)
    first, second, _ = inspection.format_example(example, vocabulary)
    assert first == f"{example['input_mask'].sum()} tokens" and second.startswith("  A  [CLS] ")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    make_config(directory)
    plain = {"next_sentence": False}
    return {
        "pairs": write_shards(directory / "pairs"),
        "shards": write_shards(directory / "train", **plain),
        "held_out": write_shards(directory / "held_out", seed=1, **plain),
        "dynamic": write_shards(directory / "dynamic", masking="dynamic", **plain),
        "config": directory / "config.json",
    }


@pytest.mark.parametrize("start", [PretrainSettings.check, recipe.pretrain])
@pytest.mark.parametrize("name", ["shards", "eval_shards"])
def test_shards_of_both_kinds_are_refused_in_one_line(directories, tmp_path, start, name):
    changes = {"eval_shards": str(directories["pairs"])}
    if name == "shards":
        changes = {"shards": ("shards", "pairs"), "phase_steps": ("4", "4")}
    with pytest.raises(UserError) as caught:
        start(settings_of(directories, tmp_path / "run", **changes))
    pairs, plain = directories["pairs"], directories["shards"]
    expected = f"--shards, --eval_shards: {pairs} has next sentences, {plain} has not"
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def start_of(directories, path, parts, trained=True):
    """Write weights to start from; return {name: array}."""
    config = BertConfig.load(directories["config"])
    weights = small.random_weights(config, parts=parts)
    start = PretrainedWeights(
        config, Vocabulary(ENTRIES), weights, "random", has_trained_pooler=trained
    )
    start.save(path)
    return weights


FROZEN = (
    "bert/pooler/kernel",
    "bert/pooler/bias",
    *name_map.weight_shapes(BertConfig(vocab_size=9), "next_sentence"),
)


def given(directories, path, start, **changes):
    changes = {"num_train_steps": 4, "save_every": 2, **changes}
    return settings_of(directories, path, config=None, init_from=str(start), **changes)


@pytest.mark.medium
@pytest.mark.parametrize("compile", small.fast(["none", "step"], "none"))
def test_pooler_and_next_sentence_head_keep_their_bits(directories, tmp_path, monkeypatch, compile):
    before = start_of(directories, tmp_path / "start", name_map.COMPONENTS)
    more = {"eval_shards": str(directories["held_out"]), "compile": compile, "shards": ("dynamic",)}
    complete = recipe.pretrain(given(directories, tmp_path / "run", tmp_path / "start", **more))
    after = weights_of(complete)
    for name, array in before.items():
        assert np.array_equal(array, after[name]) == (name in FROZEN), name
    assert not [name for name in after if name.startswith(FROZEN) and name.endswith("adam_m")]
    steps, evaluation = lines_of(complete)[0], lines_of(complete)[-1]
    assert steps["masked_lm_accuracy"] >= 0 and evaluation["eval_perplexity"] > 1
    assert not any("next_sentence" in name for name in {*steps, *evaluation})
    assert complete.train["has_trained_pooler"] is True
    stopped = given(directories, tmp_path / "stopped", tmp_path / "start", **more)
    stop_at(monkeypatch, 3)
    with pytest.raises(Interrupted):
        recipe.pretrain(stopped)
    assert_same_bits(weights_of(recipe.pretrain(stopped)), after)
    path = converted(complete.path, tmp_path / "out", format="huggingface")
    assert json.loads((path / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    assert "next_sentence" in tasks.load_model(complete.path).serving.signatures


@pytest.mark.medium
@pytest.mark.parametrize("parts", [None, ("bert", "masked_lm")])
def test_a_run_has_no_next_sentence_head_unless_its_start_has_one(directories, tmp_path, parts):
    settings = settings_of(directories, tmp_path / "run", num_train_steps=2)
    if parts:
        start_of(directories, tmp_path / "start", parts, trained=False)
        settings = given(directories, tmp_path / "run", tmp_path / "start", num_train_steps=2)
    said = []
    run = recipe.pretrain(settings, said.append)
    assert read_pretrained(run.path).heads == ("masked_lm",)
    assert "head" not in run.train["origin"] and run.train["has_trained_pooler"] is False
    assert not read_pretrained(run.path).has_trained_pooler
    path = converted(run.path, tmp_path / "out", format="huggingface")
    assert json.loads((path / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    model = tasks.load_model(run.path)
    assert set(model.serving.signatures) == {"serving_default", "masked_lm", "tokenize", "embed"}
    assert model.fill_masks("a [MASK] c", top_k=2)[0]["token"]
    # With pairs, such a run gets a new head, and trains its pooler.
    if parts:
        settings = given(
            {**directories, "shards": directories["pairs"]}, tmp_path / "pairs", run.path
        )
        pairs = recipe.pretrain(settings)
        assert pairs.train["origin"].endswith("; new next_sentence head")
        assert pairs.train["has_trained_pooler"] is True


@pytest.mark.slow
def test_replicas_and_accumulated_batches_equal_one_large_batch(directories, tmp_path, mirrored):
    still = json.loads(directories["config"].read_text())
    still |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(still))
    changes = {"config": str(tmp_path / "config.json"), "eval_shards": str(directories["held_out"])}
    runs = {}
    for name, more, strategy in (
        ("one", {}, None),
        ("two", {"compile": "step"}, mirrored),
        ("parts", {"gradient_accumulation_steps": 2}, mirrored),
    ):
        settings = settings_of(directories, tmp_path / name, **{**changes, **more})
        runs[name] = recipe.pretrain(settings, strategy=strategy)
    one = weights_of(runs["one"])
    for name in ("two", "parts"):
        other = weights_of(runs[name])
        for weight in one:
            np.testing.assert_allclose(other[weight], one[weight], rtol=0, atol=1e-5)
        for line, expected in zip(lines_of(runs[name]), lines_of(runs["one"]), strict=True):
            assert line == pytest.approx(expected, rel=1e-4)


TRAINER = ROOT / "tests" / "bert_tf" / "transformers_masked_lm.py"


@pytest.mark.slow
@pytest.mark.parametrize("parts", [name_map.COMPONENTS, ("bert", "masked_lm")])
def test_losses_of_20_steps_equal_transformers(
    tmp_path, data_dir, monkeypatch, transformers_python, parts
):
    """Train on lines of real text; ids, losses and weights are those of a plain loop of PyTorch."""
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_input_chars_per_word=100,
    )
    weights = small.random_weights(config, scale=0.05, parts=parts)
    PretrainedWeights(config, vocabulary, weights, "random").save(tmp_path / "start")
    converted(tmp_path / "start", tmp_path / "hf", format="huggingface")
    lines = (data_dir / "text" / "books.txt").read_text()[:200_000].split("\n")
    texts = [line for line in lines if line.strip()][:400]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    monkeypatch.setattr(jobs, "run", run_here)
    corpus = {"input": str(tmp_path / "texts.txt"), "vocab": str(tmp_path / "start" / "vocab.txt")}
    settings = shard_settings(
        corpus,
        tmp_path / "shards",
        next_sentence=False,
        max_seq_length=24,
        max_input_chars_per_word=100,
        dupe_factor=1,
    )
    manifest = writing.write_shards(settings)
    steps, size, rate, warmup, decay = 20, 16, 1e-3, 4, 0.01
    run = recipe.pretrain(
        PretrainSettings(
            shards=(str(tmp_path / "shards"),),
            init_from=str(tmp_path / "start"),
            output_dir=str(tmp_path / "run"),
            num_train_steps=steps,
            global_batch_size=size,
            learning_rate=rate,
            warmup_steps=warmup,
            schedule="continuous",
            bias_correction=True,
            weight_decay_rate=decay,
            log_every=1,
        )
    )
    data = PretrainingDataset(str(tmp_path / "shards"), vocabulary, config)
    batches = data.training_batches(data.position(0, 0), size, pad_examples).take(steps)
    found = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
    arrays = {name: np.stack([batch[name] for batch in found]) for name in found[0]}
    options = {"rate": rate, "warmup": warmup, "decay": decay, "length": 24}
    np.savez(tmp_path / "batches.npz", **arrays)
    command = [transformers_python, "-I", TRAINER, tmp_path, json.dumps(options)]
    subprocess.run(command, check=True)
    theirs = np.load(tmp_path / "transformers.npz")

    # Ids: those of all texts, cut where transformers cuts them.
    examples = list(inspection.first_examples(manifest, manifest.num_examples))
    for example in examples:
        used = example["masked_lm_weights"] > 0
        positions = example["masked_lm_positions"][used]
        example["input_ids"][positions] = example["masked_lm_ids"][used]
    ours = sorted(example["input_ids"].tolist() for example in examples)
    assert len(ours) > len(texts) and ours == sorted(theirs["input_ids"].tolist())

    losses = [line["loss"] for line in lines_of(run)]
    np.testing.assert_allclose(losses, theirs["losses"], rtol=1e-4)
    assert losses[-1] < losses[0] - 0.1
    after = weights_of(run)
    for row in name_map.table(config):
        if row.ours not in name_map.POOLER:
            expected = theirs["bert." + row.huggingface]
            expected = expected.T if row.ours.endswith("/kernel") else expected
            np.testing.assert_allclose(
                after[row.ours], expected, rtol=0, atol=1e-4, err_msg=row.ours
            )
    for name in {*FROZEN} & set(weights):
        np.testing.assert_array_equal(after[name], weights[name], err_msg=name)
