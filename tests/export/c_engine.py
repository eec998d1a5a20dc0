"""Engine for SavedModels without TensorFlow's Python: the C API of its library, by ctypes.

    python -I c_engine.py MODEL CASES RESULTS [SITE_PACKAGES]

It loads and runs models with LoadSavedModel and a Session, like TF Serving. The command answers
the same cases as export/checks/isolated_runner.py. Only shared libraries of SITE_PACKAGES are used,
by default those of the interpreter, so that they may be of another version.
"""

import base64
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys

import numpy as np

# From tensorflow/core/framework/types.proto.
DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    9: "int64",
    10: "bool",
}
NUMBERS = {name: number for number, name in DTYPES.items()}
STRING_BYTES = 24  # sizeof(TF_TString).
INVALID_ARGUMENT = 3  # A TF_Code, like the codes of EngineError.
_POINTER = ctypes.c_void_p


class EngineError(Exception):
    """Error of TensorFlow, or of a request that did not reach it; `code` is a TF_Code."""

    def __init__(self, message, code=INVALID_ARGUMENT):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Spec:
    """Tensor of a signature; in `shape`, any size is -1 and any rank is None."""

    dtype: str
    shape: tuple | None
    tensor: str  # The name in the graph.


class Engine:
    """A SavedModel in a Session, safe for concurrent requests.

    signatures: {name: {"inputs": {name: Spec}, "outputs": {name: Spec}}}.
    """

    def __init__(self, path, site_packages=None):
        self._library = library(site_packages)
        self._graph = self._library.TF_NewGraph()
        options = self._library.TF_NewSessionOptions()
        # The library fills it with a MetaGraphDef; this process has to free it.
        buffer = self._library.TF_NewBuffer()
        try:
            self._session = self._checked(
                self._library.TF_LoadSessionFromSavedModel,
                options,
                None,
                os.fsencode(path),
                (ctypes.c_char_p * 1)(b"serve"),
                1,
                self._graph,
                buffer,
            )
            meta_graph = ctypes.string_at(buffer.contents.data, buffer.contents.length)
        finally:
            self._library.TF_DeleteBuffer(buffer)
            self._library.TF_DeleteSessionOptions(options)
        self.signatures = signatures_of(meta_graph)

    def predict(self, inputs, signature="serving_default"):
        """Run one request.

        Args:
            inputs: {input: nested lists, or array}; strings are bytes.
            signature: Name of the signature.

        Returns:
            {output: array}; strings are bytes in object arrays.

        Raises:
            EngineError: For wrong names and for whatever TensorFlow rejects.
        """
        if signature not in self.signatures:
            raise EngineError(f'Serving signature name: "{signature}" not found in signature def')
        expected = self.signatures[signature]
        if set(inputs) != set(expected["inputs"]):
            raise EngineError(
                f"{signature} takes {', '.join(sorted(expected['inputs']))}, "
                f"not {', '.join(sorted(inputs)) or 'nothing'}"
            )
        with contextlib.ExitStack() as stack:
            fed = [
                stack.enter_context(self._tensor(name, values, expected["inputs"][name].dtype))
                for name, values in inputs.items()
            ]
            predictions = (_POINTER * len(expected["outputs"]))()
            self._checked(
                self._library.TF_SessionRun,
                self._session,
                None,
                self._positions(expected["inputs"][name] for name in inputs),
                (_POINTER * len(fed))(*fed),
                len(fed),
                self._positions(expected["outputs"].values()),
                predictions,
                len(predictions),
                None,
                0,
                None,
            )
            for prediction in predictions:
                stack.callback(self._library.TF_DeleteTensor, prediction)
            # Copy before anything is freed: an output may share memory with an input.
            return {
                name: self._array(prediction)
                for name, prediction in zip(expected["outputs"], predictions, strict=True)
            }

    def close(self):
        """Free the session. No request may be running."""
        self._checked(self._library.TF_CloseSession, self._session)
        self._checked(self._library.TF_DeleteSession, self._session)
        self._library.TF_DeleteGraph(self._graph)

    def _checked(self, function, *arguments):
        return checked(self._library, function, *arguments)

    def _positions(self, specs):
        """Return the TF_Outputs of tensors "operation:index"."""
        positions = []
        for spec in specs:
            operation, _, index = spec.tensor.rpartition(":")
            found = self._library.TF_GraphOperationByName(self._graph, operation.encode())
            if not found:
                raise EngineError(f"the graph has no operation {spec.tensor!r}")
            positions.append(_Place(found, int(index)))
        return (_Place * len(positions))(*positions)

    @contextlib.contextmanager
    def _tensor(self, name, values, dtype):
        """Yield a TF_Tensor of the values, which is freed at the end."""
        try:
            array = np.asarray(values, object if dtype == "string" else dtype, order="C")
        except (TypeError, ValueError) as error:
            raise EngineError(f"{name}: no {dtype}: {error}") from None
        texts = [_as_bytes(name, value) for value in array.flat] if dtype == "string" else []
        size = len(texts) * STRING_BYTES if dtype == "string" else array.nbytes
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        tensor = self._library.TF_AllocateTensor(NUMBERS[dtype], shape, array.ndim, size)
        start = self._library.TF_TensorData(tensor)
        if dtype != "string":
            ctypes.memmove(start, array.ctypes.data, size)
        for number, text in enumerate(texts):
            self._library.TF_StringInit(start + number * STRING_BYTES)
            self._library.TF_StringCopy(start + number * STRING_BYTES, text, len(text))
        try:
            yield tensor
        finally:
            for number in range(len(texts)):
                self._library.TF_StringDealloc(start + number * STRING_BYTES)
            self._library.TF_DeleteTensor(tensor)

    def _array(self, tensor):
        """Return a copy of the values of a TF_Tensor."""
        library = self._library
        shape = [library.TF_Dim(tensor, axis) for axis in range(library.TF_NumDims(tensor))]
        number = library.TF_TensorType(tensor)
        if number not in DTYPES:
            raise EngineError(f"an output of TF_DataType {number}, which this engine does not read")
        start, size = library.TF_TensorData(tensor), library.TF_TensorByteSize(tensor)
        if DTYPES[number] != "string":
            data = ctypes.string_at(start, size) if size else b""
            return np.frombuffer(data, DTYPES[number]).reshape(shape).copy()
        array = np.empty(int(np.prod(shape)), object)
        for position in range(array.size):
            string = start + position * STRING_BYTES
            array[position] = ctypes.string_at(
                library.TF_StringGetDataPointer(string), library.TF_StringGetSize(string)
            )
        return array.reshape(shape)


def checked(library, function, *arguments):
    """Call a function whose last argument is a TF_Status; raise EngineError if it is not OK."""
    status = library.TF_NewStatus()  # One status per call, so that threads share none.
    try:
        result = function(*arguments, status)
        if code := library.TF_GetCode(status):
            raise EngineError(library.TF_Message(status).decode("utf-8", "replace"), code)
        return result
    finally:
        library.TF_DeleteStatus(status)


class _Place(ctypes.Structure):
    """TF_Output."""

    _fields_ = [("operation", _POINTER), ("index", ctypes.c_int)]


class _Buffer(ctypes.Structure):
    """TF_Buffer."""

    _fields_ = [("data", _POINTER), ("length", ctypes.c_size_t), ("deallocate", _POINTER)]


_INT, _SIZE, _TEXT = ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_BUFFER, _POSITIONS, _POINTERS = (ctypes.POINTER(kind) for kind in (_Buffer, _Place, _POINTER))
# Result and argument types from tensorflow/c/: c_api.h, tf_status.h, tf_tensor.h, tf_tstring.h.
_FUNCTIONS = {
    "TF_NewStatus": (_POINTER,),
    "TF_DeleteStatus": (None, _POINTER),
    "TF_GetCode": (_INT, _POINTER),
    "TF_Message": (_TEXT, _POINTER),
    "TF_NewBuffer": (_BUFFER,),
    "TF_DeleteBuffer": (None, _BUFFER),
    "TF_NewGraph": (_POINTER,),
    "TF_DeleteGraph": (None, _POINTER),
    "TF_NewSessionOptions": (_POINTER,),
    "TF_DeleteSessionOptions": (None, _POINTER),
    "TF_LoadLibrary": (_POINTER, _TEXT, _POINTER),
    "TF_LoadSessionFromSavedModel": (
        *(_POINTER, _POINTER, _POINTER, _TEXT, ctypes.POINTER(_TEXT)),
        *(_INT, _POINTER, _BUFFER, _POINTER),
    ),
    "TF_GraphOperationByName": (_POINTER, _POINTER, _TEXT),
    "TF_SessionRun": (
        *(None, _POINTER, _POINTER, _POSITIONS, _POINTERS, _INT, _POSITIONS, _POINTERS, _INT),
        *(_POINTER, _INT, _POINTER, _POINTER),
    ),
    "TF_CloseSession": (None, _POINTER, _POINTER),
    "TF_DeleteSession": (None, _POINTER, _POINTER),
    "TF_AllocateTensor": (_POINTER, _INT, ctypes.POINTER(ctypes.c_int64), _INT, _SIZE),
    "TF_DeleteTensor": (None, _POINTER),
    "TF_TensorType": (_INT, _POINTER),
    "TF_NumDims": (_INT, _POINTER),
    "TF_Dim": (ctypes.c_int64, _POINTER, _INT),
    "TF_TensorByteSize": (_SIZE, _POINTER),
    "TF_TensorData": (_POINTER, _POINTER),
    "TF_StringInit": (None, _POINTER),
    "TF_StringCopy": (None, _POINTER, _TEXT, _SIZE),
    "TF_StringGetDataPointer": (_POINTER, _POINTER),
    "TF_StringGetSize": (_SIZE, _POINTER),
    "TF_StringDealloc": (None, _POINTER),
    "TF_Version": (_TEXT,),
}


@functools.cache
def library(site_packages=None):
    """Load libtensorflow with the operations of TF Text; a process can hold only one."""
    tensorflow, text = (
        pathlib.Path(site_packages, name)
        if site_packages
        else pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])
        for name in ("tensorflow", "tensorflow_text")
    )
    # With RTLD_GLOBAL, importing TensorFlow's Python afterwards would crash.
    loaded = ctypes.CDLL(str(tensorflow / "libtensorflow_cc.so.2"))
    for name, (returns, *takes) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = returns, takes
    operations = sorted((text / "python" / "ops").glob("_*.so"))
    if not operations:
        raise EngineError(f"{text}: no operations of TF Text there")
    for path in operations:
        checked(loaded, loaded.TF_LoadLibrary, os.fsencode(path))
    return loaded


def signatures_of(meta_graph):
    """Return the signatures of a serialized MetaGraphDef, as in Engine, without the init op."""
    signatures = {}
    for name, definition in _map(_fields(meta_graph).get(5, ())):
        if name.startswith("__saved_model_"):
            continue
        parts = _fields(definition)
        signatures[name] = {
            key: {tensor: _spec(info) for tensor, info in sorted(_map(parts.get(number, ())))}
            for key, number in (("inputs", 1), ("outputs", 2))
        }
    return signatures


def _spec(info):
    """Parse a serialized TensorInfo."""
    parts = _fields(info)
    number = parts[2][0]
    shape = _fields(parts.get(3, [b""])[0])
    sizes = [_fields(dimension).get(1, [0])[0] for dimension in shape.get(2, ())]
    return Spec(
        DTYPES.get(number, f"TF_DataType {number}"),
        # Two's complement: -1 is stored as 2 ** 64 - 1.
        None if any(shape.get(3, ())) else tuple(-1 if size >> 63 else size for size in sizes),
        parts[1][0].decode(),
    )


def _map(entries):
    """Yield the (key, value) pairs of a protobuf map."""
    for entry in entries:
        parts = _fields(entry)
        yield parts.get(1, [b""])[0].decode(), parts.get(2, [b""])[0]


def _fields(data):
    """Parse a protobuf message to {field number: [integers, or bytes], in order}."""
    fields, position = {}, 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
        else:
            if kind == 2:
                size, position = _varint(data, position)
            else:
                size = {1: 8, 5: 4}[kind]
            value, position = data[position : position + size], position + size
        fields.setdefault(number, []).append(value)
    return fields


def _varint(data, position):
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _as_bytes(name, value):
    if isinstance(value, str):
        return value.encode("utf-8")
    if not isinstance(value, bytes):
        raise EngineError(f"{name}: {type(value).__name__} where a string is expected")
    return value


def main(model_path, cases_path, results_path, site_packages=None):
    engine = Engine(model_path, site_packages)
    cases = json.loads(pathlib.Path(cases_path).read_text(encoding="ascii"))
    results = {}
    for number, case in enumerate(cases):
        inputs = {name: _decoded(values) for name, values in case["inputs"].items()}
        for name, output in engine.predict(inputs, case["signature"]).items():
            results[f"{number}/{name}"] = output
    foreign = {"tensorflow", "bert_tf", "tasks", "export"} & set(sys.modules)
    assert not foreign, f"the engine has imported {foreign}"
    _save(results_path, results)


def _decoded(value):
    return base64.b64decode(value) if isinstance(value, str) else [_decoded(v) for v in value]


def _save(path, results):
    """Save results like export/checks/isolated_runner.py."""
    arrays = {}
    for name, array in results.items():
        if array.dtype == object:
            arrays[f"{name}/bytes"] = np.frombuffer(b"".join(array.flat), np.uint8)
            array = np.vectorize(len, otypes=[np.int64])(array)
        arrays[name] = array
    np.savez(path, **arrays)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(*sys.argv[1:])
