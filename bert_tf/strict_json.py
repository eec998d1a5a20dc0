"""JSON of any origin: what Python's reader accepts beyond the standard is an error in one line.

Python accepts NaN and Infinity, keeps the last of two equal keys, and fails with other errors than
its own on long numbers and deep nesting. TensorFlow is not imported.
"""

import functools
import json
import math

from bert_tf.errors import UserError

MAX_DEPTH = 100  # Levels. Far below Python's recursion limit, so that a value can be written again.
_TOO_DEEP = f"over {MAX_DEPTH} levels of lists and objects"
_KINDS = {
    str: "text",
    list: "a list",
    dict: "an object",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def parse(text, **parsers):
    """Return the value of a JSON text.

    Integers of over 64 bits are floats, as in most readers. Strings may hold half a surrogate pair.

    Args:
        text: JSON as a string.
        **parsers: `parse_int`, `parse_float` and `parse_constant` of `json.loads`.

    Raises:
        ValueError: In one line; `json.JSONDecodeError`, which knows the position, at a syntax
            error; else at NaN, an infinite number, a repeated key or over `MAX_DEPTH` levels.
    """
    try:
        value = _decoder(**parsers).decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def parse_object(text, **parsers):
    """Return the JSON object in a text, all of whose strings can be written as UTF-8.

    Raises:
        ValueError: As `parse`, and if the text holds something else.
    """
    values = parse(text, **parsers)
    if not isinstance(values, dict):
        raise ValueError(f"holds a JSON {type(values).__name__}, wanted an object")
    if "\\ud" in text.lower():  # Only an escape can stand for half a pair.
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no character") from None
    return values


def field(node, key, kind, location):
    """Return node[key] of a parsed JSON text.

    Args:
        node: What stands at `location`, by right an object.
        key: One of its keys.
        kind: str, list, dict, int, bool, or float, which an integer is, too.
        location: Where in which file, for the message.

    Raises:
        UserError: If there is no such key, or a value of another kind.
    """
    if not isinstance(node, dict):
        raise UserError(f"{location}: holds a JSON {type(node).__name__}, wanted an object")
    if key not in node:
        raise UserError(f'{location}: no "{key}"')
    if type(node[key]) is not kind and not (kind is float and type(node[key]) is int):
        raise UserError(f'{location}: "{key}" holds {node[key]!r:.40}, wanted {_KINDS[kind]}')
    return node[key]


@functools.lru_cache
def _decoder(**parsers):
    """A decoder, kept since making one takes longer than to read a short line."""
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
    number = _finite(digits)
    return int(digits) if abs(number) < 2**63 else number


def _finite(digits):
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.20}{'...' * (len(digits) > 20)} is too large")
    return number


def _refuse_constant(name):
    raise ValueError(f"{name} is no number")


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
