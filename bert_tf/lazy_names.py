"""Public names of a package, imported at first use.

TensorFlow is loaded with the first name that needs it, so that commands can check their flags
before.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Name of the package.
        modules: Module by public name.
    """
    names = sorted(modules)

    def attribute(name):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return names, attribute, lambda: names
