"""Files of Hugging Face directories, written without torch, transformers and keras."""

import json
import struct
import zipfile

import numpy as np

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
STORAGES = {"float32": "Float", "float16": "Half", "float64": "Double", "int64": "Long"}


def tokenizer_json(vocabulary, lowercase=True):
    """Return the values of a tokenizer.json as transformers 5 saves it."""
    cls, sep = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("[CLS]", "[SEP]"))
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    last = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[special], "content": special, "special": True, "normalized": False}
            for special in SPECIALS
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [cls, first, sep],
            "pair": [cls, first, sep, second, last],
            "special_tokens": {},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {entry: index for index, entry in enumerate(vocabulary.entries)},
        },
    }


def text(string):
    """Return the operation that pushes a string."""
    data = string.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integers(*numbers):
    """Return the operations that push a tuple of integers."""
    return b"(" + b"".join(b"J" + struct.pack("<i", number) for number in numbers) + b"t"


def tensor(key, dtype, size, offset, shape, strides):
    """Return the operations that push a tensor, in values of the storage `key`."""
    storage = b"ctorch\n%sStorage\n" % STORAGES[dtype].encode()
    size, offset = (b"J" + struct.pack("<i", number) for number in (size, offset))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + (text("storage") + storage + text(key) + text("cpu") + size)
        + (b"tQ" + offset + integers(*shape) + integers(*strides))
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def state_dict(tensors):
    """Return the pickle of a dict of arrays; their position is the key of their storage."""
    parts = [
        text(name)
        + tensor(
            str(key),
            str(array.dtype),
            array.size,
            0,
            array.shape,
            [by // array.itemsize for by in np.ascontiguousarray(array).strides],
        )
        for key, (name, array) in enumerate(tensors.items())
    ]
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + b"".join(parts) + b"u."


def write_torch_zip(path, tensors, pickled=None):
    """Write a pytorch_model.bin of PyTorch 1.6 or later; `pickled` replaces its pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", state_dict(tensors) if pickled is None else pickled)
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{key}", np.ascontiguousarray(array).tobytes())
        archive.writestr("archive/version", "3\n")


def write_torch_old(path, tensors, pickled=None):
    """Write a pytorch_model.bin from before PyTorch 1.6; `pickled` replaces its pickle."""
    magic = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
    keys = b"".join(text(str(key)) for key in range(len(tensors)))
    parts = [
        b"\x80\x02\x8a\x0a" + magic + b".",
        b"\x80\x02M\xe9\x03.",
        b"\x80\x02}(" + text("little_endian") + b"\x88u.",
        state_dict(tensors) if pickled is None else pickled,
        b"\x80\x02](" + keys + b"e.",
    ]
    for array in tensors.values():
        parts += [struct.pack("<q", array.size), np.ascontiguousarray(array).tobytes()]
    path.write_bytes(b"".join(parts))


def write_tensorflow_h5(path, tensors, num_heads=None):
    """Write a tf_model.h5 from tensors by PyTorch's names without "bert.".

    With `num_heads`, the heads of the attention are an axis of their own.
    """
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in tensors.items():
            theirs, kernel = tensorflow_name(name)
            array = array.T if kernel else array
            if num_heads and "/attention/" in theirs and "LayerNorm" not in theirs:
                array = _with_heads(array, "/attention/output/" in theirs, num_heads)
            layer = theirs.split("/")[0]
            file[f"{layer}/tf_bert_for_pre_training_1/{theirs}:0"] = np.ascontiguousarray(array)
        if "mlm___cls" in file:  # Keras saves the shared table below both layers.
            table = tensors["embeddings.word_embeddings.weight"]
            inner = "mlm___cls/tf_bert_for_pre_training_1/bert/embeddings/word_embeddings/weight:0"
            file[inner] = table
        file.create_group("dropout_37")
        file.attrs["layer_names"] = [name.encode() for name in file]


def tensorflow_name(name):
    """Return the TensorFlow name of a tensor, and whether it is a kernel."""
    *owners, kind = name.split(".")
    kernel = kind == "weight"
    if owners[-1] == "LayerNorm":
        kind, kernel = {"weight": "gamma", "bias": "beta"}[kind], False
    elif owners[-1].endswith("_embeddings"):
        kind = "weight" if owners[-1] == "word_embeddings" else "embeddings"
        kernel = False
    elif kernel:
        kind = "kernel"
    if owners[0] == "cls":
        owners[0] = "nsp___cls" if owners[1] == "seq_relationship" else "mlm___cls"
    elif owners[0] not in ("classifier", "qa_outputs"):
        owners.insert(0, "bert")
    return "/".join([*owners, kind]).replace("layer/", "layer_._"), kernel


def _with_heads(array, is_output, num_heads):
    if is_output:
        return array.reshape(num_heads, -1, array.shape[-1]) if array.ndim == 2 else array
    return array.reshape(*array.shape[:-1], num_heads, -1)


def write_json(path, values):
    path.write_text(json.dumps(values), encoding="utf-8")
    return path
