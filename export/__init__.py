"""Export of trained models as SavedModels, and clients for them.

A SavedModel is published only if its predictions match the trained model's. Names are imported
lazily: TensorFlow is loaded with the first name that needs it.
"""

import importlib
from typing import Any

_HOME = {
    "GrpcClient": "export.grpc_client",
    "LocalClient": "export.local_client",
    "RestClient": "export.rest_client",
    "publish": "export.publishing",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
