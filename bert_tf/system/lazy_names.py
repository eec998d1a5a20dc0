"""Public names of a package, imported at first use.

TensorFlow is loaded with the first name that needs it, so that commands can check their flags
before.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bert_tf.system.processes import check_backend


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, given the module of each name."""
    names = sorted(modules)

    def attribute(name):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(modules[name])
        except ImportError:
            check_backend()
            raise
        if "keras" in sys.modules:
            check_backend()
        return getattr(module, name)

    return names, attribute, lambda: names
