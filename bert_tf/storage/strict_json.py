"""Strict JSON: a parser for untrusted files, with one-line errors, and results for other programs.

`json.loads` accepts NaN and Infinity, silently keeps the last of two equal keys, and raises other
exceptions than `JSONDecodeError` on long numbers and deep nesting. TensorFlow is not imported.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from bert_tf.errors import UserError

# What is wrong with weights that give NaN or infinite numbers.
NOT_FINITE = "the model returned a number that is not finite; did its training diverge?"
MAX_DEPTH = 100  # Far below Python's recursion limit, so that a value can be written again.
_TOO_DEEP = f"over {MAX_DEPTH} levels of lists and objects"
_KINDS = {
    str: "a string",
    list: "a list",
    dict: "an object",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def parse(text: str, **parsers: Callable[[str], Any]) -> Any:
    """Return the value of a JSON text; `parsers` are `parse_int` and the like of `json.loads`.

    Integers of more than 64 bits become floats, as in most parsers. Strings may contain half of a
    surrogate pair.

    Raises:
        json.JSONDecodeError: If the syntax is invalid.
        ValueError: If there is NaN, an infinite number, a repeated key or nesting of more than
            `MAX_DEPTH` levels.
    """
    try:
        value = _decoder(**parsers).decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Counting brackets is a cheap upper bound of the depth, so most texts are not traversed.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def parse_object(text: str, **parsers: Callable[[str], Any]) -> dict[str, Any]:
    """Return the JSON object in a text. All of its strings can be encoded as UTF-8.

    Raises:
        ValueError: As in `parse`, and if the value is not an object or not encodable.
    """
    values = parse(text, **parsers)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, received {type(values).__name__}")
    if "\\ud" in text.lower():  # Only an escape sequence can encode half of a pair.
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair; expected valid Unicode") from None
    return values


def dumps_result(value: Any, what: str, **options: Any) -> str:
    """Return a result as JSON, which has neither NaN nor infinite numbers.

    `what` names the result in the UserError about such a number; `options` are of `json.dumps`.
    """
    check_finite(value, what)
    return json.dumps(value, ensure_ascii=False, **options)


def check_finite(value: Any, what: str) -> None:
    """Raise UserError unless all numbers of a result are finite; arguments as `dumps_result`."""
    if not is_finite(value):
        raise UserError(f"{what}: {NOT_FINITE}")


def is_finite(value: Any) -> bool:
    """Return whether all numbers of a value of JSON types are finite."""
    if isinstance(value, list):
        return all(map(is_finite, value))
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def field(node: Any, key: str, kind: type, location: str) -> Any:
    """Return node[key] of a parsed JSON text.

    `kind` is str, list, dict, int, bool or float; an integer is also a float. `location` is the
    file and the position of `node` in it, for messages.

    Raises:
        UserError: If `node` is no object, the key is missing or its value is of another type.
    """
    if not isinstance(node, dict):
        raise UserError(f"{location}: expected a JSON object, received {type(node).__name__}")
    if key not in node:
        raise UserError(f'{location}: no "{key}"')
    if type(node[key]) is not kind and not (kind is float and type(node[key]) is int):
        raise UserError(f'{location}: "{key}" is {node[key]!r:.40}; expected {_KINDS[kind]}')
    return node[key]


@functools.lru_cache
def _decoder(**parsers):
    """Return a decoder, cached since building one takes longer than parsing a short line."""
    return json.JSONDecoder(
        **{
            "parse_int": _integer,
            "parse_float": _finite,
            "parse_constant": _refuse_constant,
            **parsers,
        },
        object_pairs_hook=_object,
    )


def _integer(digits):
    # Converting to float first avoids int() of thousands of digits, which Python refuses.
    number = _finite(digits)
    return int(digits) if abs(number) < 2**63 else number


def _finite(digits):
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.20}{'...' * (len(digits) > 20)} is too large")
    return number


def _refuse_constant(name):
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs):
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"an object has the key {key!r:.80} twice")
    return values


def _check_depth(value):
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [
            child for node in level for child in (node.values() if type(node) is dict else node)
        ]
