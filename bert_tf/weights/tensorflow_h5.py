"""TensorFlow models of Hugging Face before transformers 5: tf_model.h5, and their names of tensors.

Their model.safetensors has the same names, without the prefixes of the file's groups.
"""

import os
from collections.abc import Mapping

import numpy as np

from bert_tf.errors import UserError
from bert_tf.weights import h5_file

# Layers of the model and their names in PyTorch. In the file they are below the names of the
# layers and models that contain them.
_LAYERS = {
    "bert": "",
    "mlm___cls": "cls.",
    "nsp___cls": "cls.",
    "classifier": "classifier.",
    "qa_outputs": "qa_outputs.",
}
_KINDS = {
    "weight": "weight",
    "embeddings": "weight",
    "kernel": "weight",
    "gamma": "weight",
    "bias": "bias",
    "beta": "bias",
}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all tensors of a local tf_model.h5, as `to_pytorch` returns them.

    Raises:
        UserError: As `to_pytorch`, or the file is damaged, or a tensor is not stored as plain
            floating-point numbers in the file.
    """
    return to_pytorch(h5_file.read(path), path)


def to_pytorch(
    tensors: Mapping[str, np.ndarray], path: str | os.PathLike[str]
) -> dict[str, np.ndarray]:
    """Convert the tensors of a TensorFlow model to PyTorch's names and orientation.

    Names such as "bert/pooler/dense/kernel:0" become those of Hugging Face without "bert.".

    Raises:
        UserError: There is a tensor of an unknown layer, or a tensor twice with different values.
    """
    result: dict[str, np.ndarray] = {}
    for name, stored in tensors.items():
        theirs, array = _converted(name, stored, path)
        if not np.array_equal(result.setdefault(theirs, array), array):
            raise UserError(f"{path}: holds {theirs:.200} twice, with different values")
    return result


def _converted(name, array, path):
    """Return the PyTorch name and the float32 array of a dataset."""
    parts = name.removesuffix(":0").split("/")
    begin = max((index for index, part in enumerate(parts) if part in _LAYERS), default=None)
    if begin is None or parts[-1] not in _KINDS:
        raise UserError(
            f"{path}: unknown tensor {name:.200}; expected layers of a BERT model: "
            f"{', '.join(_LAYERS)}"
        )
    *owners, kind = parts[begin + 1 :]
    theirs = _LAYERS[parts[begin]] + ".".join([*owners, _KINDS[kind]]).replace("layer_._", "layer.")
    array = np.asarray(array, np.float32)
    # Versions of about December 2020 have the attention heads as an axis: (H, N, D) or (N, D, H).
    if array.ndim == 3:
        is_output = owners[-3:] == ["attention", "output", "dense"]
        array = array.reshape((-1, array.shape[2]) if is_output else (array.shape[0], -1))
    elif kind == "bias" and array.ndim == 2:
        array = array.reshape(-1)
    # Stored as (in, out).
    return theirs, array.T if kind == "kernel" else array
