"""A job for workers, in a module of its own, since they import what it imports."""

import sys

PACKAGES = ("keras", "matplotlib", "pandas", "scipy", "sklearn")


def open_writer():
    """Return a function that lists the packages that its worker has imported."""
    return lambda: [name for name in PACKAGES if name in sys.modules]
