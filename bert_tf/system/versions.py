"""Installed versions, which are recorded in run directories and manifests."""

import platform
from collections.abc import Iterable
from importlib import metadata


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of packages by name."""
    installed = {package: metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **installed}
