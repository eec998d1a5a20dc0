"""Reader of .safetensors files and of the index of a model in several files."""

import os

import ml_dtypes  # noqa: F401  Registers bfloat16 with numpy, which safetensors needs.
import numpy as np
import safetensors

from bert_tf.errors import UserError

_FLOATS = ("F64", "F32", "F16", "BF16")


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
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
