"""Hugging Face directories of any age: file formats, prefixes, shards and tied weights."""

import json
import re
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from bert_tf import UserError, read_pretrained
from bert_tf.runs.run import Run
from bert_tf.weights import huggingface, name_map, sources
from tests import small
from tests.huggingface_files import write_json, write_torch_old, write_torch_zip

DECODER, TABLE = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
INDEX = "model.safetensors.index.json"


def tensors_of(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def save(directory, tensors, name="model.safetensors"):
    safetensors.numpy.save_file(tensors, directory / name)


def assert_same(directory, config):
    weights = read_pretrained(directory).weights
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


def add_config(directory, **values):
    path = directory / "config.json"
    write_json(path, {**json.loads(path.read_text()), **values})


PREFIXES = """
    bert. module.bert. module. _orig_mod.bert. model. model.bert. bert.bert. 0.auto_model.
    module._orig_mod.bert.
""".split()


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
@pytest.mark.parametrize("is_old", [False, True])
def test_prefixes_and_old_names_are_removed(huggingface_dir, config, prefix, is_old):
    tensors = {}
    for name, array in tensors_of(huggingface_dir).items():
        if is_old:
            name = re.sub("LayerNorm.weight$", "LayerNorm.gamma", name)
            name = re.sub("LayerNorm.bias$", "LayerNorm.beta", name)
        tensors[prefix + name.removeprefix("bert.")] = array
    save(huggingface_dir, tensors)
    assert_same(huggingface_dir, config)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "model."])
def test_a_head_has_the_prefix_of_the_wrapper(huggingface_dir, wrapper):
    head = {"classifier.weight": np.ones((3, 12)), "classifier.bias": np.ones(3)}
    tensors = {**tensors_of(huggingface_dir), **head}
    save(
        huggingface_dir,
        {wrapper + name: np.float32(array) for name, array in tensors.items()},
    )
    add_config(
        huggingface_dir,
        architectures=["BertForSequenceClassification"],
        id2label={"0": "a", "1": "b", "2": "c"},
    )
    assert read_pretrained(huggingface_dir).heads == ("classifier",)


def test_two_encoders_are_not_one(huggingface_dir):
    tensors = tensors_of(huggingface_dir)
    save(huggingface_dir, {f"{of}.{name}": tensors[name] for of in "ab" for name in tensors})
    with pytest.raises(UserError, match="holds 2 encoders, 'a.bert.' and 'b.bert.'; expected one"):
        read_pretrained(huggingface_dir)


UP = "bert.encoder.layer.0.intermediate.dense"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            [f"bert.encoder.layer.{layer}.x" for layer in (2, 11)],
            "2 unknown tensors, .*; num_hidden_layers is 2 in the configuration, which does not "
            "belong to these weights, with 12 layers",
        ),
        ([f"{UP}.lora_A.weight", f"{UP}.lora_B.weight"], "an adapter is not merged; merge it"),
        ([f"{UP}.SCB"], "the weights are quantized; expected the model in floating-point"),
        ([f"{UP}.weight_scale"], "the weights are quantized"),
        (["lstm.weight"], "expected the names of a BERT model, such as embeddings.word_embeddin"),
        (["bert.encoder.layer.0.x", "bert.encoder.layer.2.x"], "expected the names of a BERT mo"),
    ],
)
def test_unknown_tensors_are_reported_by_what_they_are(huggingface_dir, names, message):
    extra = dict.fromkeys(names, np.ones(1, np.float32))
    save(huggingface_dir, {**tensors_of(huggingface_dir), **extra})
    with pytest.raises(UserError, match=message) as raised:
        read_pretrained(huggingface_dir)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.gguf", "no model found, only model.gguf, a GGUF file"),
        ("model.onnx", "no model found, only model.onnx, an ONNX graph"),
        ("onnx/model.onnx", "no model found, only model.onnx, an ONNX graph"),
        ("adapter_config.json", "holds adapter_config.json, an adapter, which .*; merge it"),
        ("flax_model.msgpack", "only flax_model.msgpack, a Flax model"),
    ],
)
def test_other_formats_are_refused_by_what_they_are(huggingface_dir, name, message):
    (huggingface_dir / name).parent.mkdir(exist_ok=True)
    (huggingface_dir / name).write_bytes(b"{}")
    if "adapter" in name:  # transformers adds it to the weights beside it.
        with pytest.raises(UserError, match=message):
            sources.check(huggingface_dir)
    else:
        sources.check(huggingface_dir)
    (huggingface_dir / "model.safetensors").unlink()
    with pytest.raises(UserError, match=message):
        sources.check(huggingface_dir)


def test_a_file_is_no_directory_of_a_model(huggingface_dir):
    (huggingface_dir / "model.gguf").write_bytes(b"GGUF")
    for name, what in (("model.safetensors", "a file"), ("model.gguf", "a GGUF file of llama.cpp")):
        with pytest.raises(UserError, match=f"{name}: is {what}; expected the directory of a mod"):
            sources.check(huggingface_dir / name)


def test_checkpoints_of_the_training_beside_a_model_make_no_run_of_it(huggingface_dir, config):
    (huggingface_dir / "checkpoints" / "checkpoint-500").mkdir(parents=True)
    assert not Run.exists(huggingface_dir)
    assert sources.check(huggingface_dir) == config
    assert_same(huggingface_dir, config)
    (huggingface_dir / "checkpoints" / "step-00000500").mkdir()
    assert Run.exists(huggingface_dir)  # Without train.json, it is a damaged run.


def test_an_unknown_key_of_the_configuration_is_a_warning(huggingface_dir, config):
    add_config(huggingface_dir, invented_by_someone=3, pretraining_tp=1)
    with pytest.warns(UserWarning, match="ignored the unknown key invented_by_someone; if"):
        assert read_pretrained(huggingface_dir).config == config


def test_marks_in_the_files_of_a_directory_are_ignored(huggingface_dir, config):
    for name in ("config.json", "tokenizer_config.json", "vocab.txt"):
        path = huggingface_dir / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert_same(huggingface_dir, config)


def test_two_tensors_of_the_same_name_are_rejected(huggingface_dir):
    tensors = tensors_of(huggingface_dir)
    save(huggingface_dir, {**tensors, "pooler.dense.bias": tensors["bert.pooler.dense.bias"]})
    with pytest.raises(UserError, match="and another tensor both are pooler.dense.bias"):
        read_pretrained(huggingface_dir)


def test_raw_values_of_the_configuration_and_heads_are_kept(huggingface_dir):
    tensors = tensors_of(huggingface_dir)
    for name in [name for name in tensors if "pooler" in name]:
        del tensors[name]
    head = np.arange(36, dtype=np.float32).reshape(3, 12)
    save(huggingface_dir, {**tensors, "classifier.weight": head})
    labels = {"10": "b", "2": "a"}
    add_config(huggingface_dir, id2label=labels, architectures=["BertForTokenClassification"])
    stored = huggingface.read(huggingface_dir)
    assert stored.values["id2label"] == labels
    assert stored.values["architectures"] == ["BertForTokenClassification"]
    np.testing.assert_array_equal(stored.tensors["classifier.weight"], head)
    assert not [name for name in stored.tensors if "pooler" in name]


def test_mixed_dtypes_become_float32(huggingface_dir, config):
    dtypes = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
    tensors = tensors_of(huggingface_dir)
    rounded = {
        name: array.astype(dtypes[number % 4])
        for number, (name, array) in enumerate(tensors.items())
    }
    save(huggingface_dir, rounded)
    weights = read_pretrained(huggingface_dir).weights
    for row in name_map.table(config):
        expected = rounded["bert." + row.huggingface].astype(np.float32)
        expected = expected.T if row.ours.endswith("/kernel") else expected
        np.testing.assert_array_equal(weights[row.ours], expected, err_msg=row.ours)


def test_a_dtype_that_is_no_weight_is_rejected(huggingface_dir):
    save(huggingface_dir, {**tensors_of(huggingface_dir), "x": np.zeros(2, np.int8)})
    with pytest.raises(UserError, match="holds a tensor of dtype I8, as quantized models do"):
        read_pretrained(huggingface_dir)


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def shards(request, huggingface_dir):
    """Return the index of a model in three files."""
    tensors = tensors_of(huggingface_dir)
    (huggingface_dir / "model.safetensors").unlink()
    stem, _, suffix = request.param.partition(".")
    parts: dict[str, dict] = {}
    for number, (name, array) in enumerate(tensors.items()):
        parts.setdefault(f"{stem}-0000{number % 3 + 1}-of-00003.{suffix}", {})[name] = array
    for file, part in parts.items():
        if suffix == "bin":
            write_torch_zip(huggingface_dir / file, part)
        else:
            save(huggingface_dir, part, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    return write_json(
        huggingface_dir / f"{request.param}.index.json",
        {"metadata": {"total_size": 1}, "weight_map": weight_map},
    )


def test_a_model_in_three_files_is_read(shards, config):
    assert_same(shards.parent, config)


def change_map(shards, change):
    values = json.loads(shards.read_text())
    change(values["weight_map"])
    write_json(shards, values)


def test_a_missing_file_of_the_index_is_named(shards):
    name = sorted(json.loads(shards.read_text())["weight_map"].values())[-1]
    (shards.parent / name).unlink()
    with pytest.raises(UserError, match=f"index.json: names the file {name}, which is missing"):
        read_pretrained(shards.parent)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.bin", "..\\x.bin", "..", "", 3, "x.txt"]
)
def test_an_index_names_only_files_beside_it(shards, name):
    change_map(shards, lambda values: values.update({TABLE: name}))
    with pytest.raises(UserError, match="index.json: names the file .*; expected NAME."):
        read_pretrained(shards.parent)


def test_an_index_and_its_files_name_the_same_tensors(shards):
    change_map(shards, lambda values: values.update(x=values[TABLE]))
    with pytest.raises(UserError, match="names 1 tensors that are in no file, the first 'x'"):
        read_pretrained(shards.parent)
    change_map(shards, lambda values: (values.pop("x"), values.pop(TABLE)))
    with pytest.raises(UserError, match=f"holds the tensor '{TABLE}', which"):
        read_pretrained(shards.parent)
    write_json(shards, {"metadata": {}})
    with pytest.raises(UserError, match='index.json: no "weight_map"'):
        read_pretrained(shards.parent)


HEAD = {
    "cls.predictions.transform.dense.weight": np.eye(12, dtype=np.float32),
    "cls.predictions.transform.dense.bias": np.ones(12, np.float32),
    "cls.predictions.transform.LayerNorm.weight": np.ones(12, np.float32),
    "cls.predictions.transform.LayerNorm.bias": np.ones(12, np.float32),
}
BIAS = np.arange(29, dtype=np.float32)


@pytest.mark.parametrize(
    "biases",
    [
        ["cls.predictions.bias"],
        ["cls.predictions.decoder.bias"],
        ["cls.predictions.bias", "cls.predictions.decoder.bias"],
    ],
)
@pytest.mark.parametrize("tables", [[TABLE], [DECODER], [TABLE, DECODER]])
def test_tied_weights_may_be_stored_once_or_twice(huggingface_dir, config, biases, tables):
    tensors = {**tensors_of(huggingface_dir), **HEAD, **dict.fromkeys(biases, BIAS)}
    table = tensors.pop(TABLE)
    save(huggingface_dir, {**tensors, **dict.fromkeys(tables, table)})
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.unused_tensors == ()
    np.testing.assert_array_equal(pretrained.weights["masked_lm/output_bias"], BIAS)
    assert_same(huggingface_dir, config)


def test_an_output_layer_that_is_not_tied_is_rejected(huggingface_dir):
    tensors = {**tensors_of(huggingface_dir), **HEAD, "cls.predictions.bias": BIAS}
    save(huggingface_dir, tensors)
    add_config(huggingface_dir, tie_word_embeddings=False)
    with pytest.raises(UserError, match="decoder.weight is missing; expected it, because tie_"):
        read_pretrained(huggingface_dir)
    save(huggingface_dir, {**tensors, DECODER: tensors[TABLE]})
    assert read_pretrained(huggingface_dir).heads == ("masked_lm",)
    save(huggingface_dir, {**tensors, DECODER: tensors[TABLE] + 1})
    with pytest.raises(UserError, match="decoder.weight differs from embeddings.word_embeddings"):
        read_pretrained(huggingface_dir)


@pytest.mark.parametrize("write", [write_torch_zip, write_torch_old])
def test_safetensors_are_preferred_to_a_pickle(huggingface_dir, config, write):
    write(huggingface_dir / "pytorch_model.bin", {"x": np.zeros(1, np.float32)})
    (huggingface_dir / "tf_model.h5").write_bytes(b"")
    assert_same(huggingface_dir, config)


def test_a_configuration_of_google_beside_the_weights_is_not_a_release(huggingface_dir, config):
    shutil.copy(huggingface_dir / "config.json", huggingface_dir / "bert_config.json")
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.source == "Hugging Face directory huggingface"
    assert pretrained.config.hidden_act == config.hidden_act


def test_a_configuration_of_before_2019_means_the_exact_gelu(huggingface_dir, config):
    values = json.loads((huggingface_dir / "config.json").read_text())
    (huggingface_dir / "config.json").unlink()
    del values["model_type"], values["architectures"]
    write_json(huggingface_dir / "bert_config.json", values)
    assert huggingface.read(huggingface_dir).config.hidden_act == "gelu"


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(offsets=(0, 12))},
        {"a": entry(offsets=(8, 0))},
        {"a": entry(shape=(2**40, 2**40))},
        {"a": entry(shape=(2**32, 2**32), offsets=(0, 0))},
        {"a": entry(shape=(-2,))},
        {"a": entry(shape=(10**12,), offsets=(0, 4 * 10**12))},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(offsets=(4, 12))},
        {"a": entry(), "b": entry(offsets=(16, 24))},
        {"a": entry(dtype="F99")},
        {"a": {"dtype": "F32"}},
        {"a": []},
        [],
    ],
    ids=str,
)
def test_a_header_whose_sizes_or_offsets_are_wrong_is_rejected(huggingface_dir, header):
    data = json.dumps(header).encode()
    content = struct.pack("<Q", len(data)) + data + bytes(8)
    (huggingface_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        read_pretrained(huggingface_dir)
