"""Directories of sentence-transformers: what is read, refused and written."""

import dataclasses
import json
import re
import shlex

import numpy as np
import pytest

from bert_tf import UserError, read_pretrained
from bert_tf.conversion import checked_conversion, exported_model
from bert_tf.convert import ConvertSettings
from bert_tf.system import command
from bert_tf.weights import sources
from tasks.finetuning.settings import FinetuneSettings
from tests import sentence_transformers_files as st_files
from tests import small
from tests.bert_tf.test_task_heads import write_head
from tests.huggingface_files import tokenizer_json

ALL = ("Transformer", "Pooling", "Dense", "Normalize")
SIGMOID = "torch.nn.modules.activation.Sigmoid"
OLD = {
    "Transformer": "sentence_transformers.models.BERT",
    **{kind: f"sentence_transformers.models.{kind}" for kind in ALL[1:]},
    "Dropout": "sentence_transformers.models.Dropout",
}


def test_all_settings_of_an_embedder_are_read(tmp_path, config, vocabulary):
    path = st_files.write(
        tmp_path / "model",
        config,
        vocabulary,
        kinds=ALL,
        pooling={**st_files.POOLING, "pooling_mode": ["max", "cls", "mean_sqrt_len_tokens"]},
        dense={**st_files.DENSE, "in_features": 36},
        tensors=st_files.dense_tensors(36),
        encoder={"max_seq_length": 7, "do_lower_case": False},
        model={**st_files.MODEL, "default_prompt_name": "query", "similarity_fn_name": "dot"},
    )
    pretrained = read_pretrained(path)
    assert pretrained.embedder == {
        "kind": "similarity",
        "layers": "last",
        "max_seq_length": 7,
        "pooling": "max+cls+mean_sqrt_len",
        "dense_units": [5],
        "dense_activations": ["tanh"],
        "normalize": True,
        "prompts": {"query": "the bill ", "document": ""},
        "default_prompt": "query",
        "similarity": "dot",
    }
    expected = st_files.dense_tensors(36)
    np.testing.assert_array_equal(pretrained.weights["dense_0/kernel"], expected["linear.weight"].T)
    np.testing.assert_array_equal(pretrained.weights["dense_0/bias"], expected["linear.bias"])
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(pretrained.weights[name], array)
    assert pretrained.task is None and pretrained.run_task == pretrained.embedder
    assert pretrained.source == "sentence-transformers directory model"


def test_old_layouts_have_the_encoder_and_its_settings_in_a_directory(tmp_path, config, vocabulary):
    path = st_files.write(
        tmp_path / "model",
        config,
        vocabulary,
        kinds=("Transformer", "Pooling", "Dropout", "Dense"),
        pooling={**st_files.OLD_POOLING, "pooling_mode_cls_token": True},
        dense={
            **st_files.DENSE,
            "in_features": 24,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        tensors={"linear.weight": st_files.dense_tensors(24)["linear.weight"]},
        encoder={
            "max_seq_length": 9,
            "do_lower_case": True,
            "model_args": {"attn_implementation": "eager", "low_cpu_mem_usage": True},
        },
        model=None,
        names=OLD,
        first="0_BERT",
        is_pickle=True,
    )
    (path / "0_BERT" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    pretrained = read_pretrained(path)
    assert pretrained.embedder == {
        "kind": "similarity",
        "layers": "last",
        "max_seq_length": 9,
        "pooling": "cls+mean",
        "dense_units": [5],
        "dense_activations": ["identity"],
        "normalize": False,
        "prompts": {},
        "default_prompt": None,
        "similarity": "cosine",
    }
    np.testing.assert_array_equal(pretrained.weights["dense_0/bias"], np.zeros(5))
    # The text is lower-cased before the tokenizer, which keeps accents.
    assert (pretrained.config.do_lower_case, pretrained.config.strip_accents) == (True, False)
    assert sources.check(path, as_embedder=True) == pretrained.config


def test_lower_casing_before_the_normalizer_is_one_normalizer(tmp_path, config, vocabulary):
    path = st_files.write(tmp_path / "model", config, vocabulary)
    values = tokenizer_json(vocabulary, lowercase=False)
    normalizers = [{"type": "Lowercase"}, values["normalizer"]]
    values["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    st_files.write_json(path / "tokenizer.json", values)
    for kind, lower in (("PreTrainedTokenizerFast", True), ("BertTokenizer", False)):
        settings = {"tokenizer_class": kind, "do_lower_case": False}
        st_files.write_json(path / "tokenizer_config.json", settings)
        found = read_pretrained(path).config
        assert (found.do_lower_case, bool(found.strip_accents)) == (lower, False)
    normalizers.reverse()
    st_files.write_json(path / "tokenizer.json", values)
    with pytest.raises(UserError, match="normalizer.type='Sequence' is not supported"):
        read_pretrained(path)


def test_the_length_is_that_of_the_tokenizer_if_there_is_no_other(tmp_path, config, vocabulary):
    path = st_files.write(tmp_path / "model", config, vocabulary, encoder={})
    assert read_pretrained(path).embedder["max_seq_length"] == config.max_position_embeddings
    st_files.write_json(path / "tokenizer_config.json", {"model_max_length": 6})
    assert read_pretrained(path).embedder["max_seq_length"] == 6


REFUSED = {
    "pooling": (
        {"pooling": {"embedding_dimension": 12, "pooling_mode": "lasttoken"}},
        r"1_Pooling/config.json: pooling \['lasttoken'\] is not supported; expected cls, max, mean",
    ),
    "old_pooling": (
        {"pooling": {**st_files.OLD_POOLING, "pooling_mode_weightedmean_tokens": True}},
        r"pooling \['mean', 'weightedmean'\] is not supported",
    ),
    "prompt": (
        {"pooling": {**st_files.POOLING, "include_prompt": False}},
        "1_Pooling/config.json: include_prompt=False is not supported",
    ),
    "activation": (
        {"kinds": ALL, "dense": {**st_files.DENSE, "activation_function": "torch.nn.ReLU"}},
        "2_Dense/config.json: activation_function 'ReLU' is not supported; expected one of Tanh",
    ),
    "residual": (
        {"kinds": ALL, "dense": {**st_files.DENSE, "use_residual": True}},
        "2_Dense/config.json: use_residual=True is not supported",
    ),
    "dense": (
        {"kinds": ALL, "tensors": st_files.dense_tensors(11)},
        r"2_Dense: tensors do not match config.json. Expected: .*\(5, 12\).* Received: .*\(5, 11\)",
    ),
    "module": (
        {
            "kinds": ("Transformer", "Pooling", "LayerNorm"),
            "names": {**st_files.LONG, "LayerNorm": "sentence_transformers.models.LayerNorm"},
        },
        "modules.json: module LayerNorm is not supported; expected Transformer, Pooling",
    ),
    "order": (
        {"kinds": ("Transformer", "Pooling", "Normalize", "Dense")},
        "modules.json: modules are Transformer, Pooling, Normalize, Dense; expected Transformer",
    ),
    "code": (
        {"names": {**st_files.LONG, "Pooling": "custom.Pooling"}},
        "modules.json: module 'custom.Pooling' is code of the model, which is not run",
    ),
    "kind": (
        {"model": {"model_type": "SparseEncoder"}},
        "config_sentence_transformers.json: model_type is 'SparseEncoder'; expected Sentence",
    ),
    "truncated": (
        {"model": {**st_files.MODEL, "truncate_dim": 8}},
        "config_sentence_transformers.json: truncate_dim=8 is not supported",
    ),
    "similarity": (
        {"model": {**st_files.MODEL, "similarity_fn_name": "hamming"}},
        "similarity_fn_name='hamming': expected one of cosine, dot, euclidean, manhattan",
    ),
    "default": (
        {"model": {**st_files.MODEL, "default_prompt_name": "x"}},
        "default_prompt_name='x': expected one of prompts",
    ),
    "length": ({"encoder": {"max_seq_length": 3}}, "max_seq_length=3: expected an integer >= 4"),
    "task": ({"encoder": {"transformer_task": "fill-mask"}}, "transformer_task='fill-mask' is not"),
    "arguments": (
        {"encoder": {"tokenizer_args": {"model_max_length": 8, "trust_remote_code": True}}},
        "sentence_bert_config.json: tokenizer_args={'model_max_length': 8} is not supported",
    ),
    "query": ({"encoder": {"query_length": 32}}, "query_length=32 is not supported, because it"),
    "tokens": (
        {"kinds": ALL, "normalize": {"module_input_name": "token_embeddings"}},
        "3_Normalize/config.json: module_input_name='token_embeddings' is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_vectors_is_refused_by_name_and_the_encoder_is_read(
    tmp_path, config, vocabulary, name
):
    options, message = REFUSED[name]
    path = st_files.write(tmp_path / "model", config, vocabulary, **options)
    pretrained = read_pretrained(path)
    assert pretrained.embedder is None and pretrained.run_task is None
    assert pretrained.origin.startswith("sentence-transformers directory model (not used: embedder")
    with pytest.raises(UserError, match=message):
        raise UserError(pretrained.unsupported_embedder)
    if name != "dense":  # Weights are not read.
        with pytest.raises(UserError, match=message):
            sources.check(path, as_embedder=True)
    assert sources.check(path) == pretrained.config


def test_a_directory_without_an_encoder_is_refused(tmp_path, config, vocabulary):
    names = {**st_files.LONG, "Transformer": "sentence_transformers.models.WordEmbeddings"}
    path = st_files.write(tmp_path / "model", config, vocabulary, names=names, first="0_Words")
    with pytest.raises(UserError, match="the first module is WordEmbeddings; expected Transformer"):
        read_pretrained(path)
    modules = [{"path": "../other", "type": st_files.LONG["Transformer"]}]
    st_files.write_json(path / "modules.json", modules)
    with pytest.raises(UserError, match="path '../other': expected one inside of"):
        read_pretrained(path)


@pytest.mark.parametrize(
    ("values", "file", "expected"),
    [
        ({}, None, ("identity", ["text"])),
        (
            {"sbert_ce_default_activation_function": SIGMOID},
            None,
            ("sigmoid", ["text_a", "text_b"]),
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            None,
            ("identity", ["text_a", "text_b"]),
        ),
        (
            {},
            {"model_type": "CrossEncoder", "activation_fn": SIGMOID},
            ("sigmoid", ["text_a", "text_b"]),
        ),
    ],
)
def test_a_cross_encoder_reads_pairs_and_has_its_activation(
    tmp_path, config, vocabulary, values, file, expected
):
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "SequenceClassification", 1, **values)
    if file:
        st_files.write_json(path / "config_sentence_transformers.json", file)
        modules = [{"path": "", "type": st_files.LONG["Transformer"]}]
        st_files.write_json(path / "modules.json", modules)
    pretrained = read_pretrained(path)
    assert pretrained.task["kind"] == "regression" and pretrained.embedder is None
    assert (pretrained.task["activation"], pretrained.task["text_columns"]) == expected


@pytest.mark.parametrize("count", [2, 3])
def test_several_outputs_with_a_sigmoid_are_labels_of_their_own(
    tmp_path, config, vocabulary, count
):
    activation = {"sbert_ce_default_activation_function": SIGMOID}
    kernel, _ = write_head(
        tmp_path / "model", config, vocabulary, "SequenceClassification", count, **activation
    )
    pretrained = read_pretrained(tmp_path / "model")
    assert pretrained.task["kind"] == "classification" and pretrained.task["multi_label"]
    np.testing.assert_array_equal(pretrained.weights["classifier/kernel"], kernel)


@pytest.mark.parametrize("count", [1, 3])
def test_another_activation_of_a_cross_encoder_is_named(tmp_path, config, vocabulary, count):
    activation = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "SequenceClassification", count, **activation)
    pretrained = read_pretrained(path)
    assert pretrained.task is None
    assert "activation tanh: expected one of identity, sigmoid" in pretrained.origin


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 8}}}),
        ("sentence_bert_config.json", {"config_args": {"num_hidden_layers": 1}}),
    ],
)
def test_what_changes_scores_is_refused_by_name(tmp_path, config, vocabulary, file, values):
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "SequenceClassification", 1)
    model = {"model_type": "CrossEncoder", "prompts": {"query": "the "}}
    st_files.write_json(path / "config_sentence_transformers.json", model)
    st_files.write_json(path / file, {**model, **values})
    pretrained = read_pretrained(path)
    assert pretrained.task is None
    (name,) = values
    assert f"{file}: {name}=" in pretrained.unused_tensors[0]
    assert "is not supported, because it changes scores" in pretrained.unused_tensors[0]


def test_modules_after_the_encoder_of_a_cross_encoder_are_named(tmp_path, config, vocabulary):
    kinds, model = ("Transformer", "Pooling", "Dense"), {"model_type": "CrossEncoder"}
    path = st_files.write(tmp_path / "model", config, vocabulary, kinds=kinds, model=model)
    pretrained = read_pretrained(path)
    assert (pretrained.task, pretrained.heads) == (None, ())
    assert "modules.json: module Pooling, Dense is not supported" in pretrained.origin


def write_converted(pretrained, tmp_path):
    """Save a run, and write it for sentence-transformers; return both."""
    run = tmp_path / "run"
    checked_conversion.save_run(pretrained, str(run))
    model = exported_model.from_pretrained(read_pretrained(run), run)
    report = checked_conversion.convert(model, str(tmp_path / "out"), "sentence-transformers")
    return tmp_path / "out", report


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({"query": "q: "}, "query", {"query": "q: ", "document": ""}),
        ({"document": "d: "}, "document", {"query": "", "document": "d: "}),
        ({"query": "q: ", "passage": "p: "}, "query", {"query": "q: ", "passage": "p: "}),
        ({"query": "q: "}, None, {"query": "q: "}),
    ],
)
def test_the_default_prompt_is_none_of_documents_or_queries(
    tmp_path, config, vocabulary, prompts, default, expected
):
    """Those of encode_query and encode_document without a prompt are empty, not the default."""
    model = {**st_files.MODEL, "prompts": prompts, "default_prompt_name": default}
    path = st_files.write(tmp_path / "model", config, vocabulary, model=model)
    embedder = read_pretrained(path).embedder
    assert (embedder["prompts"], embedder["default_prompt"]) == (expected, default)


def test_an_embedder_is_written_as_it_was_read(tmp_path, config, vocabulary):
    path = st_files.write(
        tmp_path / "model",
        config,
        vocabulary,
        kinds=ALL,
        encoder={"max_seq_length": 7},
        model={**st_files.MODEL, "default_prompt_name": "query"},
    )
    pretrained = read_pretrained(path)
    written, report = write_converted(pretrained, tmp_path)
    assert report["dropped"] == []
    modes = {file.stat().st_mode for file in written.rglob("*") if file.is_file()}
    assert modes == {(tmp_path / "run" / "config.json").stat().st_mode}
    again = read_pretrained(written)
    assert again.embedder == pretrained.embedder
    for name, array in pretrained.weights.items():
        np.testing.assert_array_equal(again.weights[name], array)
    modules = json.loads((written / "modules.json").read_text())
    kinds = [module["type"].removeprefix("sentence_transformers.models.") for module in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    paths = [module["path"] for module in modules]
    assert paths == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    assert json.loads((written / "1_Pooling" / "config.json").read_text()) == st_files.OLD_POOLING
    assert json.loads((written / "2_Dense" / "config.json").read_text()) == st_files.DENSE


def test_a_cross_encoder_is_written_as_it_was_read(tmp_path, config, vocabulary):
    activation = {"sbert_ce_default_activation_function": SIGMOID}
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "SequenceClassification", 1, **activation)
    pretrained = read_pretrained(path)
    written, report = write_converted(pretrained, tmp_path)
    assert report["dropped"] == []
    again = read_pretrained(written)
    assert again.task == pretrained.task and again.task["activation"] == "sigmoid"
    # Versions before 4 read the second entry only.
    values = json.loads((written / "config.json").read_text())
    assert values["sentence_transformers"]["activation_fn"] == SIGMOID
    assert values["sbert_ce_default_activation_function"] == SIGMOID
    np.testing.assert_array_equal(
        again.weights["classifier/kernel"], pretrained.weights["classifier/kernel"]
    )


@pytest.mark.parametrize("columns", [["text_a", "text_b"], ["text"]])
def test_two_labels_become_one_output_with_a_sigmoid(tmp_path, config, vocabulary, columns):
    path = tmp_path / "model"
    labels = {"id2label": {"0": "no", "1": "yes"}}
    kernel, bias = write_head(path, config, vocabulary, "SequenceClassification", 2, **labels)
    written, report = write_converted(read_pretrained(path, pairs=len(columns) > 1), tmp_path)
    assert report["dropped"] == ["the labels no, yes"]
    again = read_pretrained(written)
    assert (again.task["kind"], again.task["activation"]) == ("regression", "sigmoid")
    assert again.task["text_columns"] == columns
    expected = kernel[:, 1:] - kernel[:, :1]
    np.testing.assert_array_equal(again.weights["classifier/kernel"], expected)
    np.testing.assert_array_equal(again.weights["classifier/bias"], bias[1:] - bias[:1])


def test_a_model_without_a_place_there_is_refused(
    tmp_path, config, vocabulary, huggingface_dir, monkeypatch
):
    pretrained = read_pretrained(st_files.write(tmp_path / "model", config, vocabulary))
    for change, message in (
        ({"layers": "second_to_last"}, "layers=second_to_last: sentence-transformers has 'last'"),
        ({"text_columns": ["text_a", "text_b"]}, "text_columns: sentence-transformers has no vec"),
    ):
        changed = dataclasses.replace(pretrained, embedder={**pretrained.embedder, **change})
        model = exported_model.from_pretrained(changed, "model")
        with pytest.raises(UserError, match=message):
            checked_conversion.convert(model, str(tmp_path / "out"), "sentence-transformers")
    model = exported_model.from_pretrained(read_pretrained(huggingface_dir), huggingface_dir)
    with pytest.raises(UserError, match="has no such model; expected the task simila") as refused:
        checked_conversion.convert(model, str(tmp_path / "out"), "sentence-transformers")
    words = re.findall(r"bert-tf (.+?)(?:, then: |$)", str(refused.value))
    train, convert = map(shlex.split, words)
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    assert command.parse(FinetuneSettings, train)[0].output_dir == "RUN"
    settings, _ = command.parse(ConvertSettings, convert)
    assert (settings.from_, settings.format) == ("RUN", "sentence-transformers")
