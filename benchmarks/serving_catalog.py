"""Backends of benchmarks/serving.py: what they need, and why one is skipped.

A further backend needs an entry here, an entry in `BACKENDS` of serving_backends.py or
serving_baselines.py that loads it, and a function of serving_models.py or serving_conversions.py
that writes its model.
"""

import subprocess
import sys
from typing import NamedTuple

PRECISIONS = ("float32", "bfloat16", "int8")
NO_BFLOAT16 = "no bfloat16 on processors"
QUANTIZED = {"float32": "none", "int8": "dynamic"}  # LiteRT files by precision.


class Backend(NamedTuple):
    """Requirements of a backend.

    Attributes:
        packages: Packages that it needs in addition to ours and numpy.
        is_baseline: Whether it runs in the environment of --baselines.
        unsupported: Reason per precision that it does not have.
    """

    packages: tuple[str, ...] = ()
    is_baseline: bool = True
    unsupported: dict[str, str] = {}


BACKENDS = {
    "ours": Backend((), False),
    "litert": Backend(
        ("ai_edge_litert",), False, unsupported={"bfloat16": "export_litert has no bfloat16"}
    ),
    "keras-nlp": Backend(("keras_nlp",), False),
    "transformers": Backend(("torch", "transformers")),
    "onnxruntime": Backend(
        ("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
        unsupported={"bfloat16": NO_BFLOAT16},
    ),
    "openvino": Backend(("torch", "transformers", "tokenizers", "openvino", "nncf")),
    "ctranslate2": Backend(
        ("torch", "transformers", "tokenizers", "ctranslate2"),
        unsupported={"bfloat16": NO_BFLOAT16},
    ),
}


def present(names, precision, baselines):
    """Return the available backends of `names`, and print a reason for each other one.

    Args:
        names: Keys of `BACKENDS`.
        precision: One of `PRECISIONS`.
        baselines: Interpreter of the baselines, or `None`.
    """
    available = []
    for name in names:
        backend = BACKENDS[name]
        if reason := backend.unsupported.get(precision):
            pass
        elif backend.is_baseline and not baselines:
            reason = "--baselines is not set"
        elif missing := not_installed(python_of(name, baselines), backend.packages):
            reason = f"{', '.join(missing)} not installed"
        else:
            available.append(name)
            continue
        print(f"{name} skipped: {reason}")
    if not available:
        sys.exit("--backends: none is available")
    return available


def not_installed(python, packages):
    """Return the packages that an interpreter cannot import."""
    code = (
        "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
    )
    done = subprocess.run([python, "-c", code, *packages], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


def python_of(name, baselines):
    """Return the interpreter of a backend."""
    return baselines if BACKENDS[name].is_baseline else sys.executable
