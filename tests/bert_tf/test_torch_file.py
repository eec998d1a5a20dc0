"""pytorch_model.bin: both formats, and pickles that are refused without being executed."""

import contextlib
import os
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from bert_tf import UserError, read_pretrained
from bert_tf.weights.tensor_files import read_torch
from tests import small
from tests.huggingface_files import (
    state_dict,
    tensor,
    text,
    write_torch_old,
    write_torch_zip,
)

WRITERS = [write_torch_zip, write_torch_old]


@pytest.fixture(params=WRITERS, ids=["zip", "old"])
def write(request):
    return request.param


def test_both_formats_hold_the_same_weights_as_safetensors(huggingface_dir, config, write):
    path = huggingface_dir / "model.safetensors"
    write(huggingface_dir / "pytorch_model.bin", safetensors.numpy.load_file(path))
    path.unlink()
    weights = read_pretrained(huggingface_dir).weights
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(weights[name], array)


def test_dtypes_strides_offsets_and_shared_storages_are_read(tmp_path, write):
    values = {"a": np.arange(12, dtype=np.float64), "b": np.arange(5)}
    half = np.arange(4, dtype=np.float16)
    views = {
        "transposed": tensor("0", "float64", 12, 0, (4, 3), (1, 4)),
        "part": tensor("0", "float64", 12, 5, (2, 2), (2, 1)),
        "ids": tensor("1", "int64", 5, 0, (1, 5), (5, 1)),
        "half": tensor("2", "float16", 4, 0, (4,), (1,)),
        "scalar": tensor("2", "float16", 4, 3, (), ()),
    }
    pickled = b"\x80\x02}(" + b"".join(text(name) + of for name, of in views.items()) + b"u."
    write(tmp_path / "x.bin", {**values, "c": half}, pickled)
    tensors = read_torch(tmp_path / "x.bin")
    np.testing.assert_array_equal(tensors["transposed"], np.arange(12).reshape(3, 4).T)
    np.testing.assert_array_equal(tensors["part"], [[5, 6], [7, 8]])
    np.testing.assert_array_equal(tensors["ids"], [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(tensors["half"], half.astype(np.float32))
    assert tensors["scalar"] == 3
    dtypes = {name: array.dtype for name, array in tensors.items()}
    assert dtypes.pop("ids") == np.int64 and set(dtypes.values()) == {np.dtype(np.float32)}


def test_bfloat16_and_parameters_are_read(tmp_path, write):
    array = np.array([1.5, -2, 3], ml_dtypes.bfloat16)
    pickled = tensor("0", "float16", 3, 0, (3,), (1,)).replace(b"HalfSt", b"BFloat16St")
    pickled = b"ctorch._utils\n_rebuild_parameter\n(" + pickled + b"\x88ccollections\nOrderedDict\n"
    write(tmp_path / "x.bin", {"w": array}, b"\x80\x02}" + text("w") + pickled + b")RtRs.")
    np.testing.assert_array_equal(read_torch(tmp_path / "x.bin")["w"], [1.5, -2, 3])


class Call:
    """Object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def marker(function):
    return lambda mark: pickle.dumps({"w": Call(*function(mark))}, 2)


# Pickles that create the file `mark` when they are unpickled.
EXECUTING = {
    "os.system": marker(lambda mark: (os.system, f"touch {mark}")),
    "eval": marker(lambda mark: (eval, f"open({mark!r}, 'w')")),
    "exec": marker(lambda mark: (exec, f"open({mark!r}, 'w')")),
    "open": marker(lambda mark: (open, mark, "w")),
    "protocol 4": lambda mark: pickle.dumps({"w": Call(os.mkdir, mark)}, 4),
    "protocol 0": lambda mark: pickle.dumps({"w": Call(os.mkdir, mark)}, 0),
    "inst": lambda mark: b"(" + text(f"touch {mark}") + b"ios\nsystem\n.",
    "obj": lambda mark: b"(cos\nsystem\n" + text(f"touch {mark}") + b"o.",
    "direct call": lambda mark: (
        b"\x80\x02}" + text("w") + b"cos\nmkdir\n" + text(mark) + b"\x85Rs."
    ),
    "state": lambda mark: (
        b"\x80\x02ccollections\nOrderedDict\n)R}"
        + text("x")
        + (b"cos\nmkdir\n" + text(mark) + b"\x85Rsb.")
    ),
}


@pytest.mark.parametrize("kind", EXECUTING)
def test_the_pickles_below_do_run_code_in_an_ordinary_reader(tmp_path, kind):
    with contextlib.suppress(TypeError):  # Some fail, but only after the call.
        pickle.loads(EXECUTING[kind](str(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", EXECUTING)
def test_a_pickle_that_runs_code_is_refused_without_running_it(tmp_path, write, kind):
    mark = tmp_path / "mark"
    write(tmp_path / "x.bin", {"w": np.zeros(1, np.float32)}, EXECUTING[kind](str(mark)))
    with pytest.raises(
        UserError, match="which is not allowed; nothing in it was executed"
    ) as raised:
        read_torch(tmp_path / "x.bin")
    assert "\n" not in str(raised.value) and not mark.exists()


def one(**changes):
    """Return the pickle of one tensor of 4 values, with changes."""
    values = {
        "key": "0",
        "dtype": "float32",
        "size": 4,
        "offset": 0,
        "shape": (4,),
        "strides": (1,),
    }
    return b"\x80\x02}" + text("w") + tensor(**{**values, **changes}) + b"s."


DEEP = b")" + b"\x85" * 200_000
HOSTILE = {
    "offset outside": (one(offset=1), "outside of its storage"),
    "negative offset": (one(offset=-1), "a size that is no integer from 0"),
    "shape outside": (one(shape=(5,)), "outside of its storage"),
    "stride outside": (one(shape=(2, 2), strides=(3, 1)), "outside of its storage"),
    "negative stride": (one(offset=3, strides=(-1,)), "a size that is no integer from 0"),
    "expanded": (one(shape=(10**9, 10**9), strides=(0, 0)), "outside of its storage"),
    "rank": (one(shape=(4,), strides=(1, 1)), "1 sizes and 2 strides"),
    "many axes": (one(shape=(1,) * 99, strides=(1,) * 99), "99 sizes"),
    "storage larger": (one(size=10**9), "values in place of 1000000000|truncated"),
    "other file": (one(key="../version"), "no item named|do not belong"),
    "no tensor": (b"\x80\x02}" + text("w") + b"K\x01s.", "something else than a dict of tensors"),
    "no dict": (b"\x80\x02K\x01.", "something else than a dict of tensors"),
    "deep key": (b"\x80\x02}" + DEEP + b"K\x01s.", "a key of type tuple"),
    "long string": (b"\x80\x02\x8e" + struct.pack("<Q", 2**40) + b"x.", "expected 1099511627776"),
    "large index": (b"\x80\x02K\x01r\xff\xff\xff\xff.", "something else than a dict"),
    "endless list": (b"\x80\x02]q\x00h\x00a.", "something else than a dict"),
    "empty stack": (b"\x80\x02R.", "pop from empty list"),
    "no end": (b"\x80\x02}", "before seeing STOP|something else than a dict"),
    "storage as a function": (b"\x80\x02ctorch\nFloatStorage\n)R.", "no allowed function"),
    "function as a storage": (
        b"\x80\x02(" + text("storage") + b"ccollections\nOrderedDict\n))K\x01tQ.",
        "something else than a storage",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_tensors_outside_of_their_storage_and_malformed_pickles_are_refused(tmp_path, write, kind):
    pickled, message = HOSTILE[kind]
    write(tmp_path / "x.bin", {"w": np.zeros(4, np.float32)}, pickled)
    with pytest.raises(
        UserError, match=rf"x\.bin: not a readable PyTorch file.*({message})"
    ) as raised:
        read_torch(tmp_path / "x.bin")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_compressed_overlapping_and_repeated_members_are_refused(tmp_path):
    path, tensors = tmp_path / "x.bin", {"w": np.zeros(1_000, np.float32)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", state_dict(tensors))
        archive.writestr("a/data/0", bytes(4_000))
    with pytest.raises(UserError, match="compressed members"):
        read_torch(path)
    write_torch_zip(path, tensors)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b/data.pkl", state_dict(tensors))
    with pytest.raises(UserError, match=r"2 members named data.pkl"):
        read_torch(path)
    write_torch_zip(path, tensors)
    data = path.read_bytes()
    # The directory at the end claims that the member has 100 times as many bytes.
    begin = data.rindex(b"PK\1\2", 0, data.rindex(b"archive/data/0"))
    sizes = struct.pack("<II", 4_000, 4_000)
    end = data.index(sizes, begin)
    path.write_bytes(data[:end] + struct.pack("<II", 400_000, 400_000) + data[end + 8 :])
    with pytest.raises(UserError, match="members that overlap"):
        read_torch(path)


def test_values_in_big_endian_order_are_refused(tmp_path):
    tensors = {"w": np.zeros(1, np.float32)}
    with zipfile.ZipFile(tmp_path / "big.bin", "w") as archive:
        archive.writestr("a/data.pkl", state_dict(tensors))
        archive.writestr("a/byteorder", "big")
        archive.writestr("a/data/0", bytes(4))
    with pytest.raises(UserError, match="values in big-endian order"):
        read_torch(tmp_path / "big.bin")
    write_torch_old(tmp_path / "old.bin", tensors)
    data = (tmp_path / "old.bin").read_bytes()
    (tmp_path / "old.bin").write_bytes(data.replace(b"little_endian\x88", b"little_endian\x89"))
    with pytest.raises(UserError, match="values in big-endian order"):
        read_torch(tmp_path / "old.bin")
