"""A job for workers, in a module of its own, since they import what it imports."""

import dataclasses
import sys

PACKAGES = ("keras", "matplotlib", "pandas", "scipy", "sklearn")


@dataclasses.dataclass(frozen=True)
class ImportJob:
    """A job whose entries are the packages that its worker has imported."""

    directory: str = "shards"

    def open(self):
        """Return the function that lists the packages."""
        return lambda: [name for name in PACKAGES if name in sys.modules]
