"""JSON of TF Serving: what its util/json_tensor.cc accepts, rejects and returns."""

import base64
import binascii
import json
import math

import numpy as np

from tests.export.c_engine import EngineError


def predicted(engine, body):
    """Return the JSON response to a JSON request, both as bytes."""
    try:
        request = json.loads(body.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise EngineError(f"JSON Parse error: {error}") from None
    if not isinstance(request, dict):
        raise EngineError(f"JSON Value: {json.dumps(request)} Is not object")
    signature = request.get("signature_name", "")
    if not isinstance(signature, str):
        raise EngineError("'signature_name' key must be a string value.")
    signature = signature or "serving_default"
    if signature not in engine.signatures:
        raise EngineError(f'Serving signature name: "{signature}" not found in signature def')
    specs = engine.signatures[signature]["inputs"]
    if "instances" in request and "inputs" in request:
        raise EngineError("expecting only one of 'inputs' or 'instances' keys to exist")
    if "instances" in request:
        prediction = engine.predict(_of_rows(request["instances"], specs), signature)
        text = _rows(prediction)
    elif "inputs" in request:
        prediction = engine.predict(_of_columns(request["inputs"], specs), signature)
        columns = {name: _written(values, name) for name, values in prediction.items()}
        text = '{"outputs": ' + _one_or_object(columns) + "}"
    else:
        raise EngineError("Missing 'inputs' or 'instances' key")
    return text.encode("utf-8", "surrogateescape")


def _of_rows(instances, specs):
    """Parse the row format: each instance is a value, or an object with a value for every input."""
    if not isinstance(instances, list):
        raise EngineError("Excepting 'instances' to be an list/array")
    if not instances:
        raise EngineError("No values in 'instances' array")
    are_objects = _is_object(instances[0])
    if not are_objects and len(specs) > 1:
        raise EngineError("instances is a plain list, but expecting list of objects")
    rows = {name: [] for name in specs}
    for number, instance in enumerate(instances):
        where = f"Failed to process element: {number} of 'instances' list."
        if _is_object(instance) != are_objects:
            raise EngineError(f"{where} Objects and values are mixed")
        if not are_objects:
            instance = {next(iter(specs)): instance}
        if set(instance) != set(specs):
            raise EngineError(f"{where} JSON object: keys must be equal to: {','.join(specs)}")
        for name, value in instance.items():
            row = _tensor(value, specs[name].dtype)
            first = rows[name][0] if rows[name] else row
            if row.size != first.size:
                raise EngineError(
                    f"{where} Error: Expecting tensor size: {first.size} but got: {row.size}"
                )
            if row.shape != first.shape:
                raise EngineError(
                    f"{where} Error: Expecting shape {first.shape} but got: {row.shape}"
                )
            rows[name].append(row)
    return {name: np.stack(values) for name, values in rows.items()}


def _of_columns(inputs, specs):
    """Parse the columnar format: an object with all inputs; other keys are ignored."""
    if not _is_object(inputs):
        if len(specs) > 1:
            raise EngineError("inputs is a plain value/list, but expecting an object")
        inputs = {next(iter(specs)): inputs}
    for name in specs:
        if name not in inputs:
            raise EngineError(f"Missing named input: {name} in 'inputs' object.")
    return {name: _tensor(inputs[name], spec.dtype) for name, spec in specs.items()}


def _is_object(value):
    return isinstance(value, dict) and not _is_base64(value)


def _is_base64(value):
    return list(value) == ["b64"] and isinstance(value["b64"], str)


def _tensor(value, dtype):
    """Convert a JSON value to an array, whose shape is that of the first elements."""
    shape, first = [], value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    leaves = []

    def fill(value, level):
        if not isinstance(value, list):
            if level != len(shape):
                raise EngineError(
                    f"JSON Value: {json.dumps(value)} found at incorrect level: {level + 1} in the "
                    f"JSON DOM. Expected at level: {len(shape)}"
                )
            leaves.append(_leaf(value, dtype))
            return
        if level >= len(shape):
            raise EngineError(f"Encountered list at unexpected level: {level}")
        if len(value) != shape[level]:
            raise EngineError(
                f"Encountered list at unexpected size: {len(value)} at level: {level} expected "
                f"size: {shape[level]}"
            )
        for entry in value:
            fill(entry, level + 1)

    fill(value, 0)
    return np.array(leaves, object if dtype == "string" else dtype).reshape(shape)


def _leaf(value, dtype):
    if dtype == "string" and isinstance(value, dict) and _is_base64(value):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error:
            raise EngineError("Unable to base64 decode") from None
    kinds = {"string": str, "bool": bool, "float32": (int, float), "float64": (int, float)}
    is_bool = isinstance(value, bool)
    if not isinstance(value, kinds.get(dtype, int)) or (is_bool and dtype != "bool"):
        raise EngineError(
            f"JSON Value: {json.dumps(value)} Type: {type(value).__name__} is not of expected "
            f"type: {dtype}"
        )
    return value.encode("utf-8", "surrogateescape") if dtype == "string" else value


def _rows(prediction):
    """Return the row format: as many predictions as every output has rows."""
    sizes = {name: values.shape[:1] for name, values in prediction.items()}
    for name, size in sizes.items():
        if not size:
            raise EngineError(f"Tensor name: {name} has no shape information ")
        if size != next(iter(sizes.values())):
            raise EngineError(f"Tensor name: {name} has inconsistent batch size: {size[0]}")
    rows = [
        _one_or_object({name: _written(values[row], name) for name, values in prediction.items()})
        for row in range(next(iter(sizes.values()))[0])
    ]
    return '{"predictions": [' + ", ".join(rows) + "]}"


def _one_or_object(texts):
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}"


def _written(value, name):
    """Return an array, or an element of one, as JSON; bytes that are no UTF-8 are kept."""
    if isinstance(value, np.ndarray) and value.ndim:
        return "[" + ", ".join(_written(entry, name) for entry in value) + "]"
    value = value[()] if isinstance(value, np.ndarray) else value
    if isinstance(value, bytes):
        if name.endswith("_bytes"):
            return json.dumps({"b64": base64.b64encode(value).decode()})
        return json.dumps(value.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    if not isinstance(value, np.floating):
        return json.dumps(value.item())
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    text = f"{value:.6g}"
    if type(value)(text) != value:
        text = f"{value:.{9 if value.dtype == np.float32 else 17}g}"
    return text if "." in text or "e" in text else text + ".0"
