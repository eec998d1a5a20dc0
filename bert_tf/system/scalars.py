"""Python's own scalars in place of those of NumPy, for values that users give in Python.

NumPy's integers are no `int`, and JSON has none of its types. NumPy is not imported.
"""

from typing import Any


def to_python(value: Any) -> Any:
    """Return a value with Python's scalars in place of NumPy's, also in lists, tuples and dicts.

    Bytes, which NumPy and TensorFlow hold strings as, become text; invalid UTF-8 becomes U+FFFD.
    Anything else is returned unchanged.
    """
    if isinstance(value, bytes):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, dict):
        return {to_python(name): to_python(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_python, value))
    if isinstance(value, int) and type(value) is not bool:  # Also members of an IntEnum.
        return int(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return to_python(value.item())
    return value
