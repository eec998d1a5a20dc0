"""Readers of files of tensors: .safetensors, HDF5 and pytorch_model.bin.

Those of PyTorch, in the zip format and in the one before PyTorch 1.6, are pickles, which can run
any code. Nothing is unpickled here: a small interpreter knows the few operations of a dict of
tensors, and refuses every other operation and name. Sizes are checked against the file before
anything of that size is allocated.
"""

import collections
import io
import os
import pathlib
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes  # Registers bfloat16 with numpy, which safetensors needs.
import numpy as np
import safetensors

from bert_tf.errors import UserError

_FLOATS = ("F64", "F32", "F16", "BF16")
MAX_PICKLE_BYTES = 64 << 20  # The pickle of a large model has less than 100 KB.
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_MAX_RANK = 8
_COUNT = struct.Struct("<q")


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read all tensors of a local .safetensors, .bin or .h5 file; raises UserError if damaged."""
    readers = {".safetensors": read_safetensors, ".bin": read_torch, ".h5": read_h5}
    return readers[path.suffix](path)


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all tensors of a local .safetensors file; floating-point tensors become float32.

    The library checks shapes, offsets and the size of the file before it allocates a tensor.
    Tensors are read and converted one by one, so memory holds the result and a single unconverted
    tensor.

    Raises:
        UserError: The file is damaged or has a tensor of an unsupported dtype.
    """
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as stored:
            for name in stored.keys():
                dtype = stored.get_slice(name).get_dtype()
                if dtype not in (*_FLOATS, "I64"):
                    raise UserError(
                        f"{path}: holds a tensor of dtype {dtype}, as quantized models do; "
                        f"expected the model in one of {', '.join(_FLOATS)}"
                    )
                array = stored.get_tensor(name)
                tensors[name] = array.astype(np.float32, copy=False) if dtype in _FLOATS else array
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    return tensors


def read_h5(path: str | os.PathLike[str], kinds: str = "f") -> dict[str, np.ndarray]:
    """Read all tensors of a local HDF5 file, by their paths in it.

    `kinds` are the accepted kinds of dtypes, as in `numpy.dtype.kind`.

    Raises:
        UserError: The file is damaged, or holds a tensor that is not stored as plain numbers in the
            file.
    """
    import h5py  # Slow to import, and rarely needed.

    names: list[str] = []
    try:
        with h5py.File(path, "r") as file:
            # Visits each object once and follows neither soft nor external links.
            file.visit(names.append)
            datasets = {name: file[name] for name in names if isinstance(file[name], h5py.Dataset)}
            _check_storage(datasets, path, kinds)
            return {
                name: dataset[()].view(ml_dtypes.bfloat16) if _is_bfloat16(dataset) else dataset[()]
                for name, dataset in datasets.items()
            }
    # HDF5 reports a damaged file by any of these.
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable HDF5 file: {error!s:.300}") from None


def _is_bfloat16(dataset):
    """Return True for opaque pairs of bytes, as which Keras stores bfloat16."""
    return dataset.dtype == "V2" and dataset.attrs.get("dtype") == "bfloat16"


def _check_storage(datasets, path, kinds):
    """Check that all tensors are in the file as plain numbers, before any of them is read."""
    file_size = os.path.getsize(path)
    for name, dataset in datasets.items():
        is_plain = not (dataset.chunks or dataset.external or dataset.is_virtual)
        is_number = dataset.dtype.kind in kinds or _is_bfloat16(dataset)
        if not (is_number and is_plain):
            raise UserError(
                f"{path}: {name:.200} has the dtype {dataset.dtype!s:.80} or a compressed, virtual "
                "or external layout; expected plain floating-point numbers"
            )
        if dataset.nbytes != dataset.id.get_storage_size():
            raise UserError(
                f"{path}: {name:.200} has {dataset.nbytes} bytes, of which "
                f"{dataset.id.get_storage_size()} are stored; the file is incomplete"
            )
    total = sum(dataset.nbytes for dataset in datasets.values())
    if total > file_size:
        raise UserError(
            f"{path}: tensors of {total} bytes in a file of {file_size}; expected no overlaps"
        )


def read_torch(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all tensors of a local pytorch_model.bin; floating-point tensors become float32.

    Raises:
        UserError: The file is damaged, or contains anything but a dict of tensors.
    """
    with open(path, "rb") as stream:
        try:
            read_format = _read_zip if stream.read(4) == b"PK\3\4" else _read_old
            stream.seek(0)
            tensors, storages = read_format(stream, os.path.getsize(path))
            return {name: _array(tensor, storages) for name, tensor in tensors.items()}
        # Malformed pickles, zip directories and sizes end in any of these.
        except (
            *(ValueError, LookupError, TypeError, OverflowError, RuntimeError, EOFError, OSError),
            *(struct.error, zipfile.BadZipFile),
        ) as error:
            raise UserError(
                f"{path}: not a readable PyTorch file of tensors: {error!s:.300}; nothing in it "
                "was executed"
            ) from None


class _Storage(NamedTuple):
    """Values that tensors share: their key in the file, their dtype and their number."""

    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    """View of a storage; offset and strides count values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage, offset, shape, strides, *_):
    """Return a `_Tensor` within its storage."""
    if type(storage) is not _Storage:
        raise ValueError("a tensor without a storage")
    _check_sizes([offset, *shape, *strides])
    if len(shape) != len(strides) or len(shape) > _MAX_RANK:
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    size = 1
    for length in shape:
        size *= length
    last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
    # An expanded tensor has more values than its storage: it would need memory without bounds.
    if size and (last >= storage.size or size > storage.size):
        raise ValueError(f"a tensor outside of its storage of {storage.size} values")
    return _Tensor(storage, offset, shape, strides)


def _put(target, pairs):
    """Add (key, value) pairs to a dict. Keys are strings: hashing others can crash Python."""
    for key, value in pairs:
        if type(key) is not str:
            raise TypeError(f"a key of type {type(key).__name__}")
        target[key] = value
    return target


def _check_sizes(sizes):
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise ValueError("a size that is no integer from 0 to 2^48")


# The allowed names: functions, and types of storages.
_GLOBALS: dict[str, Callable[..., Any] | np.dtype] = {
    "collections OrderedDict": lambda pairs=(): _put(collections.OrderedDict(), pairs),
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch LongStorage": np.dtype(np.int64),
    "torch IntStorage": np.dtype(np.int32),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _unpickle(stream, storages):
    """Return the value of the pickle at the position of a stream.

    The storages that it refers to are added by key. Raise ValueError, LookupError or TypeError if
    anything in it is malformed or not allowed.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark():
        begin = marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    for operation, argument, _ in pickletools.genops(stream):
        name = operation.name
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"):
            stack.append(argument)
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = [stack.pop() for _ in range(int(name[-1]))]
            stack.append(tuple(reversed(items)))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            _top(stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = _last_two(stack) if name == "SETITEM" else since_mark()
            _put(_top(stack, dict), zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise ValueError(f"the name {argument!r:.80}, which is not allowed")
            stack.append(_GLOBALS[argument])
        elif name == "REDUCE":
            called, arguments = _last_two(stack)
            if not callable(called):  # Only functions of `_GLOBALS` are.
                raise ValueError("a call of a value that is no allowed function")
            stack.append(called(*arguments))
        elif name == "BUILD":
            # Attributes, such as the versions of modules in a state dict, are not needed.
            stack.pop()
            _top(stack, collections.OrderedDict)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop(), storages))
        elif name == "STOP":
            break
        elif name != "PROTO":
            raise ValueError(f"the operation {name}, which is not allowed")
    return stack.pop()


def _storage(reference, storages):
    """Return the storage that a persistent id refers to, and add it to those by key."""
    kind, dtype, key, _, size, *view = reference
    if kind != "storage" or not isinstance(dtype, np.dtype):
        raise ValueError("a reference to something else than a storage")
    if type(key) is not str or view not in ([], [None]):
        raise ValueError("a view of a storage, which is not supported")
    _check_sizes([size])
    storage = _Storage(key, dtype, size)
    if storages.setdefault(key, storage) != storage:
        raise ValueError(f"two storages with the key {key!r:.40}")
    return storage


def _last_two(stack):
    second = stack.pop()
    return [stack.pop(), second]


def _top(stack, kind):
    """Return the last value, which has to be of a type."""
    if not isinstance(stack[-1], kind):
        raise TypeError(f"{type(stack[-1]).__name__} in place of {kind.__name__}")
    return stack[-1]


def _read_zip(stream, file_size):
    """Return `_Tensor`s by name, and the arrays of the storages by key."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        # Members are stored as they are, so that none is larger than the file.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("compressed members")
        if sum(member.file_size for member in members) > file_size:
            raise ValueError("members that overlap")
        names = [member.filename for member in members]
        if len(set(names)) < len(names):
            raise ValueError("two members of the same name")
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} members named data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("values in big-endian order")
        if archive.getinfo(pickles[0]).file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"a pickle of more than {MAX_PICKLE_BYTES} bytes")
        storages: dict[str, _Storage] = {}
        tensors = _checked(_unpickle(io.BytesIO(archive.read(pickles[0])), storages))
        return tensors, {
            key: _values(archive.read(f"{root}data/{key}"), storage)
            for key, storage in storages.items()
        }


def _read_old(stream, file_size):
    """Return `_Tensor`s by name, and the arrays of the storages by key."""
    # A stream in memory, because a false length in a pickle then allocates nothing.
    head = io.BytesIO(stream.read(min(file_size, MAX_PICKLE_BYTES)))
    storages: dict[str, _Storage] = {}
    if _unpickle(head, storages) != _MAGIC or _unpickle(head, storages) != _PROTOCOL:
        raise ValueError("neither of the two formats")
    system = _unpickle(head, storages)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise ValueError("values in big-endian order")
    tensors = _checked(_unpickle(head, storages))
    keys = _unpickle(head, storages)
    if not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise ValueError("storages that do not belong to the tensors")
    stream.seek(head.tell())
    arrays = {}
    for key in keys:
        storage = storages[key]
        num_bytes = storage.size * storage.dtype.itemsize
        (size,) = _COUNT.unpack(stream.read(_COUNT.size))
        if size != storage.size or num_bytes > file_size - stream.tell():
            raise ValueError(f"the storage {key!r:.40} is truncated")
        arrays[key] = _values(stream.read(num_bytes), storage)
    return tensors, arrays


def _checked(tensors):
    """Return a dict of tensors by name."""
    if not isinstance(tensors, dict) or not all(
        type(name) is str and type(tensor) is _Tensor for name, tensor in tensors.items()
    ):
        raise ValueError("something else than a dict of tensors")
    return tensors


def _values(data, storage):
    array = np.frombuffer(data, storage.dtype)
    if array.size != storage.size:
        raise ValueError(f"a storage of {array.size} values in place of {storage.size}")
    return array


def _array(tensor, storages):
    values = storages[tensor.storage.key]
    if not all(tensor.shape):
        return np.zeros(tensor.shape, np.float32)
    strides = [by * values.itemsize for by in tensor.strides]
    view = np.lib.stride_tricks.as_strided(
        values[tensor.offset :], tensor.shape, strides, writeable=False
    )
    is_integer = values.dtype.kind == "i"
    return view if is_integer else view.astype(np.float32, copy=False)
