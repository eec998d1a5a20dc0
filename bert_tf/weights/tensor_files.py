"""Readers of files of tensors: .safetensors, HDF5 and, in `torch_file`, those of PyTorch."""

import os
import pathlib

import ml_dtypes  # Registers bfloat16 with numpy, which safetensors needs.
import numpy as np
import safetensors

from bert_tf.errors import UserError
from bert_tf.weights import torch_file

_FLOATS = ("F64", "F32", "F16", "BF16")


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read all tensors of a local .safetensors, .bin or .h5 file; raises UserError if damaged."""
    readers = {".safetensors": read_safetensors, ".bin": torch_file.read, ".h5": read_h5}
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
