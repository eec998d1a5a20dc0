"""Text files of a published model, from the templates in templates/."""

import os
from typing import Any

import jinja2


def render(file_name: str, **values: Any) -> str:
    """Return the content of a file from the template `templates/{file_name}.j2`."""
    return _ENVIRONMENT.get_template(f"{file_name}.j2").render(values)


def _printable(name):
    """Return a name with "?" for every character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _plain(value):
    """Return a value of a JSON file as text: numbers with 6 digits, lists without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def base_name(path: str) -> str:
    """Return the last part of a path, also if the path ends with a slash."""
    return os.path.basename(path.rstrip("/"))


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("export.package"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters.update(printable=_printable, plain=_plain, base_name=base_name)
