"""tf_model.h5: converted to the names and orientation of PyTorch, and checked before reading."""

import h5py
import numpy as np
import pytest
import safetensors.numpy

from bert_tf import UserError, read_pretrained
from bert_tf.weights import huggingface, tensor_files
from tests import small
from tests.huggingface_files import tensorflow_name, write_json, write_tensorflow_h5


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


HEADS = {
    "cls.predictions.transform.dense.weight": random(12, 12),
    "cls.predictions.transform.dense.bias": random(12),
    "cls.predictions.transform.LayerNorm.weight": random(12),
    "cls.predictions.transform.LayerNorm.bias": random(12),
    "cls.predictions.bias": random(29),
    "cls.seq_relationship.weight": random(2, 12),
    "cls.seq_relationship.bias": random(2),
    "classifier.weight": random(5, 12),
    "classifier.bias": random(5),
    "qa_outputs.weight": random(2, 12),
    "qa_outputs.bias": random(2),
}


@pytest.fixture
def tensors(huggingface_dir):
    """Return the tensors of a directory, without "bert.", and remove its file."""
    path = huggingface_dir / "model.safetensors"
    stored = safetensors.numpy.load_file(path)
    path.unlink()
    return {name.removeprefix("bert."): array for name, array in stored.items()} | HEADS


@pytest.mark.parametrize("num_heads", [None, 3])
def test_all_tensors_get_the_names_and_the_orientation_of_pytorch(
    huggingface_dir, config, tensors, num_heads
):
    write_tensorflow_h5(huggingface_dir / "tf_model.h5", tensors, num_heads)
    read = huggingface.read(huggingface_dir).tensors
    assert set(read) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    # A model has one task head.
    one = {name: array for name, array in tensors.items() if not name.startswith("qa_outputs")}
    write_tensorflow_h5(huggingface_dir / "tf_model.h5", one, num_heads)
    pretrained = read_pretrained(huggingface_dir)
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(pretrained.weights[name], array, err_msg=name)
    assert {"masked_lm", "next_sentence"} <= set(pretrained.heads)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_safetensors_of_tensorflow_models_have_the_same_names(
    huggingface_dir, config, tensors, is_sharded
):
    stored = {}
    for name, array in tensors.items():
        if not name.startswith("qa_outputs"):
            theirs, is_kernel = tensorflow_name(name)
            stored[f"{theirs}:0"] = np.ascontiguousarray(array.T if is_kernel else array)
    if is_sharded:
        parts = [dict(list(stored.items())[number::2]) for number in range(2)]
        files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for file, part in zip(files, parts, strict=True):
            safetensors.numpy.save_file(part, huggingface_dir / file, {"format": "tf"})
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        write_json(huggingface_dir / "model.safetensors.index.json", {"weight_map": weight_map})
    else:
        path = huggingface_dir / "model.safetensors"
        safetensors.numpy.save_file(stored, path, {"format": "tf"})
    pretrained = read_pretrained(huggingface_dir)
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(pretrained.weights[name], array, err_msg=name)
    assert {"masked_lm", "next_sentence"} <= set(pretrained.heads)


PATH = "bert/tf_bert_model/bert/pooler/dense/bias:0"


def replace(file, name=PATH, **options):
    del file[name]
    return file.create_dataset(name, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.create_dataset("x/y:0", data=[1.0]), "unknown tensor x/y:0"),
        (lambda f: f.create_dataset("bert/pooler/dense/x:0", data=[1.0]), "unknown tensor bert"),
        (lambda f: f.create_dataset("bert/pooler/dense/bias:0", data=[1.0]), "twice, with differ"),
        (lambda f: replace(f, data=["text"]), "has the dtype object"),
        (lambda f: replace(f, data=[1 + 2j]), "has the dtype complex128"),
        (lambda f: replace(f, data=np.zeros(12), compression="gzip"), "or a compressed, virtual"),
        (lambda f: replace(f, shape=(10**11,), chunks=(1,), dtype="f4"), "or a compressed, virt"),
        (lambda f: replace(f, shape=(10**11,), dtype="f4"), "of which 0 are stored"),
        (
            lambda f: replace(f, shape=(12,), dtype="f4", external=[("/etc/passwd", 0, 48)]),
            "or external layout",
        ),
        (
            lambda f: f.create_virtual_dataset(
                "bert/x:0", h5py.VirtualLayout((12,), "f4"), fillvalue=0
            ),
            "or external layout",
        ),
    ],
    ids=range(10),
)
def test_unknown_and_unusual_tensors_are_rejected(tmp_path, change, message):
    path = tmp_path / "tf_model.h5"
    with h5py.File(path, "w") as file:
        file[PATH] = np.zeros(12, np.float32)
        change(file)
    with pytest.raises(UserError, match=rf"tf_model.h5: .*{message}") as raised:
        huggingface.to_pytorch(tensor_files.read(path), str(path))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_links_out_of_the_file_are_not_followed(tmp_path):
    path = tmp_path / "tf_model.h5"
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file[PATH] = np.zeros(12, np.float32)
    with h5py.File(path, "w") as file:
        file["bert/soft"] = h5py.SoftLink("/bert")
        file["bert/pooler"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/bert")
        file["bert/again"] = file["/bert"]
    assert tensor_files.read(path) == {}


def test_a_file_that_is_no_hdf5_file_is_rejected(tmp_path):
    (tmp_path / "tf_model.h5").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="tf_model.h5: not a readable HDF5 file"):
        tensor_files.read(tmp_path / "tf_model.h5")
