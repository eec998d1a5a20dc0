"""TensorFlow checkpoints of google-research/bert: found by directory or prefix, V1 and V2."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary, convert, read_pretrained
from bert_tf.config import TOKENIZER_SETTINGS
from bert_tf.text.vocabulary import SPECIALS
from bert_tf.weights import name_map
from tests import sentence_transformers_files as st_files
from tests import small
from tests.bert_tf import test_keras_preset
from tests.bert_tf.test_head_weights import assert_holds

ADAM = ("adam_m", "adam_v", "Adam", "Adam_1", "AdamWeightDecayOptimizer_1")


def write_files(directory, config, vocabulary):
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        key: value for key, value in config.to_dict().items() if key not in TOKENIZER_SETTINGS
    }
    (directory / "bert_config.json").write_text(json.dumps({**values, "hidden_act": "gelu"}))
    vocabulary.save(directory / "vocab.txt")


def tensors_of(config, units=None, parts=()):
    """Return weights by our names, and tensors of a checkpoint with optimizer slots."""
    weights = small.random_weights(config, parts=("bert", *name_map.HEADS[: 2 * (not units)]))
    if units:
        shapes = name_map.weight_shapes(config, "classifier", units)
        rng = np.random.default_rng(units)
        weights |= {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    parts = parts or ("bert", *(("classifier",) if units else name_map.HEADS))
    tensors = name_map.export_tensors(config, "google", weights, parts)
    slots = {
        f"{name}/{slot}": np.zeros_like(array) for name, array in tensors.items() for slot in ADAM
    }
    counters = {"global_step": np.int64(9), "beta1_power": np.float32(0.9)}
    return weights, {**tensors, **slots, **counters}


def save(prefix, tensors, version=2):
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if version == 1:
        tf.raw_ops.Save(
            filename=str(prefix), tensor_names=list(tensors), data=list(tensors.values())
        )
        return
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )


@pytest.mark.parametrize("version", [1, 2])
def test_both_formats_are_read_by_directory_and_by_prefix(tmp_path, config, vocabulary, version):
    weights, tensors = tensors_of(config)
    write_files(tmp_path, config, vocabulary)
    save(tmp_path / "bert_model.ckpt", tensors, version)
    for path in (tmp_path, tmp_path / "bert_model.ckpt"):
        pretrained = read_pretrained(path)
        assert set(pretrained.weights) == set(weights)
        assert_holds(pretrained.weights, weights)
        assert pretrained.config.hidden_act == "gelu_new"
        assert len(pretrained.unused_tensors) == 5 * len(weights) + 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_a_checkpoint_means_the_checkpoint(tmp_path, config, vocabulary, version):
    weights, tensors = tensors_of(config)
    write_files(tmp_path, config, vocabulary)
    save(tmp_path / "model.ckpt-9", tensors, version)
    (tmp_path / "model.ckpt-9.meta").touch()
    paths = [*tmp_path.glob("model.ckpt-9*"), tmp_path / "model.ckpt-9."]
    assert len(paths) == 2 + version
    for path in paths:
        assert_holds(read_pretrained(path).weights, weights)
    (tmp_path / "other.meta").touch()
    with pytest.raises(UserError, match="other.meta: is a file; expected the directory of a mod"):
        read_pretrained(tmp_path / "other.meta")


@pytest.mark.parametrize("version", [1, 2])
def test_a_path_is_no_pattern(tmp_path, config, vocabulary, version):
    weights, tensors = tensors_of(config)
    directory = tmp_path / "d [1]"
    write_files(directory, config, vocabulary)
    for name in ("model[1].ckpt", "other.ckpt"):
        save(directory / name, tensors, version)
    assert_holds(read_pretrained(directory / "model[1].ckpt").weights, weights)
    assert_holds(read_pretrained(directory / "other.ckpt").weights, weights)


def test_a_fine_tuned_checkpoint_is_found_by_the_file_of_its_directory(
    tmp_path, config, vocabulary, monkeypatch
):
    """The configuration is one level up; the file names a path of another machine."""
    write_files(tmp_path, config, vocabulary)
    weights, tensors = tensors_of(config, 3)
    save(tmp_path / "output" / "model.ckpt-9", tensors)
    save(tmp_path / "output" / "model.ckpt-5", tensors_of(config, 4)[1])
    with pytest.raises(UserError, match="2 checkpoints; name one of them, such as .*ckpt-9"):
        read_pretrained(tmp_path / "output")
    (tmp_path / "output" / "checkpoint").write_text(
        'model_checkpoint_path: "gs://bucket/output/model.ckpt-9"\n'
        'all_model_checkpoint_paths: "gs://bucket/output/model.ckpt-5"\n'
    )
    for path in (tmp_path / "output", tmp_path / "output" / "model.ckpt-9"):
        pretrained = read_pretrained(path)
        assert_holds(pretrained.weights, weights)
        assert pretrained.heads == ("classifier",)
        assert pretrained.task["kind"] == "classification"
        assert pretrained.task["labels"] == ["0", "1", "2"]
    task = read_pretrained(tmp_path / "output", labels=("a", "b", "c"), pairs=True).task
    assert (task["labels"], task["text_columns"]) == (["a", "b", "c"], ["text_a", "text_b"])
    # Forks for entities have the same tensors; the labels tell.
    tags = ("O", "B-X", "I-X")
    tagging = read_pretrained(tmp_path / "output", labels=tags)
    assert (tagging.task["kind"], tagging.task["labels"]) == ("tagging", list(tags))
    assert_holds(tagging.weights, weights)
    (tmp_path / "output" / "eval").mkdir()
    for here, path in (
        ("", "."),
        ("", "model.ckpt-9"),
        ("eval", ".."),
        ("eval", "../model.ckpt-9"),
    ):
        monkeypatch.chdir(tmp_path / "output" / here)
        assert_holds(read_pretrained(path).weights, weights)


@pytest.mark.parametrize(
    ("model", "units", "part", "kind"),
    [
        ("MaskedLM", 3, "classifier", "classification"),
        ("QuestionAnswering", 3, "classifier", "classification"),
        ("SequenceClassification", 2, "span_classifier", "span_qa"),
    ],
)
def test_the_tensors_of_a_head_count_more_than_a_copied_configuration(
    tmp_path, config, vocabulary, model, units, part, kind
):
    write_files(tmp_path, config, vocabulary)
    save(tmp_path / "model.ckpt-9", tensors_of(config, units, ("bert", part))[1])
    path = tmp_path / "bert_config.json"
    names = {"architectures": [f"BertFor{model}"], "id2label": {"0": "a", "1": "b"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    task = read_pretrained(tmp_path / "model.ckpt-9").task
    assert task["kind"] == kind and task.get("labels") in (["0", "1", "2"], None)


@pytest.mark.parametrize(
    ("steps", "prefix", "read"),
    [
        ((500,), "ckpt", 500),
        ((500,), "encoder", 500),
        ((900, 1000), "model.ckpt", None),
        ((99, 900, 1000), "ckpt", None),
    ],
)
def test_a_checkpoint_is_found_by_its_step(tmp_path, config, vocabulary, steps, prefix, read):
    """Without the file "checkpoint", as TensorFlow, the Model Garden and Keras name them."""
    write_files(tmp_path, config, vocabulary)
    weights, tensors = tensors_of(config)
    for step in steps:
        save(tmp_path / f"{prefix}-{step}", tensors)
    for path in ("", prefix, f"{prefix}-"):  # The last one is as a shell completes it.
        if read:
            assert_holds(read_pretrained(tmp_path / path).weights, weights)
        else:
            message = f"{len(steps)} checkpoints; name one of them, such as .*/{prefix}-1000$"
            with pytest.raises(UserError, match=message):
                read_pretrained(tmp_path / path)
    with pytest.raises(UserError, match=f"{prefix}-1: no such directory"):
        read_pretrained(tmp_path / f"{prefix}-1")


def test_a_squad_checkpoint_becomes_a_span_qa_run(tmp_path, config, vocabulary, capsys):
    """Configuration and vocabulary are given by flags."""
    weights, tensors = tensors_of(config, 2, ("bert", "span_classifier"))
    assert tensors["cls/squad/output_weights"].shape == (2, config.hidden_size)
    save(tmp_path / "squad" / "model.ckpt-9", tensors)
    write_files(tmp_path / "files" / "uncased", config, vocabulary)
    path, run = str(tmp_path / "squad" / "model.ckpt-9"), str(tmp_path / "run")
    with pytest.raises(UserError, match="bert_config.json: no such file; .* --config_file=FILE"):
        convert.ConvertSettings(path, run).check()
    files = {
        "config_file": str(tmp_path / "files" / "uncased" / "bert_config.json"),
        "vocab_file": str(tmp_path / "files" / "uncased" / "vocab.txt"),
    }
    settings = convert.ConvertSettings(path, run, **files)
    settings.check()
    convert.main(settings)
    assert "heads: classifier; task span_qa" in capsys.readouterr().err
    assert_holds(read_pretrained(run).weights, weights)
    with pytest.raises(UserError, match="--config_file: only for TensorFlow checkpoints"):
        read_pretrained(run + "/..", config_file="x")


def test_marks_that_the_vocabulary_has_are_kept(tmp_path, config):
    words = [chr(code) + mark for code in range(0x915, 0x92E) for mark in "\u093f\u0941"]
    vocabulary = Vocabulary([*SPECIALS, *words])
    config = dataclasses.replace(config, vocab_size=len(vocabulary))
    write_files(tmp_path, config, vocabulary)
    save(tmp_path / "bert_model.ckpt", tensors_of(config)[1])
    read = read_pretrained(tmp_path).config
    assert (read.do_lower_case, read.strip_accents) == (True, False)
    ids = Tokenizer.from_config(read, vocabulary).tokenize(tf.constant([" ".join(words)])).ids
    assert ids.to_list() == [list(range(len(SPECIALS), len(vocabulary)))]


def test_an_explicit_case_wins_over_the_vocabulary(tmp_path, config, vocabulary):
    write_files(tmp_path, config, vocabulary)
    save(tmp_path / "bert_model.ckpt", tensors_of(config)[1])
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_lower_case": False}))
    assert not read_pretrained(tmp_path).config.do_lower_case


def test_an_unknown_tensor_and_a_wrong_path_are_rejected(tmp_path, config, vocabulary):
    write_files(tmp_path, config, vocabulary)
    _, tensors = tensors_of(config)
    save(tmp_path / "model.ckpt-1", {**tensors, "cls/other/kernel": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match="1 unknown tensors, the first cls/other/kernel"):
        read_pretrained(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        read_pretrained(tmp_path / "x" / "model.ckpt-2")
    del tensors["bert/pooler/dense/bias"]
    save(tmp_path / "model.ckpt-1", tensors)
    with pytest.raises(UserError, match="1 weights are missing, the first bert/pooler/dense/bias"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize("names", [("bert_model.ckpt",), ("ckpt",), ("a.ckpt-1", "a.ckpt-2")])
def test_weights_of_another_format_beside_a_checkpoint_without_its_files_are_read(
    tmp_path, huggingface_dir, config, vocabulary, names
):
    _, tensors = tensors_of(config)
    for name in names:
        save(huggingface_dir / name, tensors)
    if "ckpt" in names:  # As Keras saves it.
        (huggingface_dir / "checkpoint").write_text('model_checkpoint_path: "ckpt"\n')
    assert read_pretrained(huggingface_dir).origin == "Hugging Face directory huggingface"
    # The checkpoint is meant by its prefix, or if its files are there or given.
    prefix = huggingface_dir / names[0]
    with pytest.raises(UserError, match="bert_config.json: no such file; .* bert-tf convert "):
        read_pretrained(prefix)
    write_files(tmp_path / "files", config, vocabulary)
    config_file = str(tmp_path / "files" / "bert_config.json")
    assert read_pretrained(prefix, config_file=config_file).origin.startswith("Google release")
    if len(names) == 1:
        given = read_pretrained(huggingface_dir, config_file=config_file)
        write_files(huggingface_dir, config, vocabulary)
        there = read_pretrained(huggingface_dir)
        assert given.source == there.source == "Google release huggingface"


def test_embedders_and_presets_beside_a_checkpoint_are_read(tmp_path, config, vocabulary):
    weights, tensors = tensors_of(config)
    st_files.write(tmp_path / "embedder", config, vocabulary, first="0_Transformer")
    test_keras_preset.write(tmp_path / "preset", config, weights)
    for name in ("embedder", "preset"):
        save(tmp_path / name / "bert_model.ckpt", tensors)
        assert_holds(read_pretrained(tmp_path / name).weights, small.random_weights(config))
