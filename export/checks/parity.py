"""Parity check of an exported SavedModel against the trained model.

The SavedModel runs in a clean Python process with TensorFlow and TensorFlow Text only. Its requests
include texts that are hard to tokenize, and words with all entries of the vocabulary. If its token
ids or predictions differ from the trained model's, it is not published.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from export.checks import isolated_runner
from export.package import warmup
from tasks.base.task import OutputSpec
from tasks.data.readers.memory import jsonable

if TYPE_CHECKING:
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.graph.pipeline import Pipeline
    from tasks.model.task_model import TaskModel

# Name of a signature, and strings or lists of strings per input.
Request = tuple[str, Mapping[str, Sequence]]

ADVERSARIAL_TEXTS = (
    b"",
    b" ",
    b" \t\r\n ",
    b"a",
    b"The quick brown fox jumps over the lazy dog.",
    b"UPPER lower MiXeD",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m".encode(),
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m".encode(),  # The same, decomposed (NFD).
    "\u6211\u7231\u5317\u4eac ok \u65e5\u672c\u8a9e".encode(),
    "\ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439".encode(),
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629".encode(),
    "\U0001f600 \U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea".encode(),
    "\u1e9e \u00df \u0130 \u03a3\u03a3".encode(),
    b"[MASK] [CLS] [SEP] [PAD] [UNK]",
    b"The [MASK] of France is [MASK].",
    b"don't stop-me: $100, 50% (ok?)",
    b"\xff\xfe\x00 bad \xc3\x28 bytes \xe2\x82",
    "zero\u200bwidth soft\u00adhyphen \ufeffbom \ufffd".encode(),
    b"x" * 250,
    b"word " * 600,
    "\u00e9".encode() * 300,
    b"a" * (1 << 20),
    b"one megabyte of words " * ((1 << 20) // 22),
)
# Each is sent alone: a single short text has a branch of its own in the graph.
SHORT_TEXTS = (b"The quick brown fox jumps over the lazy dog.", b"a")
# Long texts are split into many windows; with 20,000 bytes the check stays fast.
LONGEST_OF_WINDOWS = 20_000
ROWS_PER_BATCH = 8
WORDS_PER_BATCH = 4096

# In bfloat16 a prediction may differ if a competing one was less probable by at most this much.
MARGIN = 0.04


class Tolerance(NamedTuple):
    """Maximum difference between the outputs of the SavedModel and of the trained model.

    Attributes:
        probability: Absolute tolerance for rows whose values are all at most 1.
        number: Tolerance for all other rows and for vectors, relative to the row's largest value.
        margin: See `MARGIN`. `None` if all predictions must be equal. If it is set, outputs are
            compared as their `OutputSpec` allows in a lower precision.
    """

    probability: float
    number: float
    margin: float | None


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, None),
    "bfloat16": Tolerance(0.02, 0.05, MARGIN),
    "float16": Tolerance(0.005, 0.0125, MARGIN / 4),  # It has 3 bits more.
    "int8": Tolerance(0.02, 0.05, MARGIN),
}


def check(
    directory: pathlib.Path,
    model: TaskModel,
    precision: str = "float32",
    questions: Sequence[Request] = (),
    pipeline: Pipeline | None = None,
    device: str = "cpu",
) -> dict[str, dict[str, np.ndarray]]:
    """Compare a SavedModel with the trained model that it was exported from.

    The SavedModel is copied, made read-only and run in a clean Python process without this
    project's code. The requests are those of `requests`, `questions`, and the warm-up records,
    which only have to succeed.

    Args:
        directory: The SavedModel.
        model: The trained model.
        precision: Key of `TOLERANCES`.
        questions: Additional requests.
        pipeline: Computes the expected outputs; by default that of the trained model.
        device: "cpu"; or "gpu" to show the other process the GPUs of this machine. Without one,
            TensorFlow runs a graph for GPUs on the CPU.

    Returns:
        The SavedModel's outputs for `questions`, as signature name to output name to array.

    Raises:
        UserError: If the SavedModel does not run, if token ids or predictions differ, or if numbers
            differ by more than the tolerance. The message names the first such string.
    """
    pipeline = pipeline or model.serving.pipeline
    cases = [*questions, *requests(model, pipeline.signatures)]
    with concurrent.futures.ThreadPoolExecutor(1) as background:
        running = background.submit(_served, directory, cases, device)
        # The trace of the trained model takes about as long as the other process to load.
        for function in pipeline.signatures.values():
            function.get_concrete_function()
        served = running.result()
    outputs = [served[number] for number in range(len(cases))]
    for differing in differences(pipeline, cases, outputs, TOLERANCES[precision]):
        for message in differing.values():
            raise UserError(f"not published: {message}")
    return {signature: served[number] for number, (signature, _) in enumerate(questions)}


def differences(
    pipeline: Pipeline,
    cases: Sequence[Request],
    outputs: Sequence[Mapping[str, np.ndarray]],
    tolerance: Tolerance,
) -> Iterator[dict[int, str]]:
    """Compare the outputs of an exported model with those that a pipeline computes.

    Yields:
        Per request, a message by the number of each row that differs.

    Raises:
        UserError: If an output is missing.
    """
    specs = pipeline.signature_specs()
    for (signature, inputs), received in zip(cases, outputs, strict=True):
        margins = None
        if tolerance.margin and specs[signature].has_margin:
            margins = pipeline.margin(**_tensors(pipeline.signatures[signature], inputs)).numpy()
        differing: dict[int, str] = {}
        for name, expected in called(pipeline.signatures[signature], inputs).items():
            spec = specs[signature].outputs[name]
            case = _Case(signature, inputs, name, spec, tolerance, margins)
            differing = {**_compare(case, expected, received.get(name)), **differing}
        yield differing


def called(
    function: tf.types.experimental.GenericFunction, inputs: Mapping[str, Sequence]
) -> dict[str, np.ndarray]:
    """Return the outputs of a pipeline's signature for the inputs of a request, by name."""
    outputs = function(*_tensors(function, inputs).values())
    return {name: values.numpy() for name, values in outputs.items()}


def _tensors(function, inputs):
    return {
        spec.name: tf.constant(inputs[spec.name], tf.string) for spec in function.input_signature
    }


def _served(directory, cases, device):
    """Return the outputs of a moved copy of the SavedModel as {case: {output: array}}."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        moved = scratch / "moved"
        shutil.copytree(directory, moved)
        # A server may run as another user, so that loading must not depend on write access.
        _set_writable(moved, False)
        try:
            records = [
                {"signature": signature, "inputs": isolated_runner.encoded(inputs)}
                for signature, inputs in [*cases, *warmup.read(moved)]
            ]
            (scratch / "cases.json").write_text(json.dumps(records), encoding="ascii")
            _run_isolated(moved, scratch, device)
        finally:
            _set_writable(moved, True)
        results = isolated_runner.load(scratch / "results.npz")
    outputs = collections.defaultdict(dict)
    for key, array in results.items():
        number, _, name = key.partition("/")
        outputs[int(number)][name] = array
    return outputs


def _run_isolated(moved, scratch, device):
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    done = subprocess.run(
        [
            sys.executable,
            # Nothing of this project is beside the packages. Unlike -I, this finds those that
            # pip has installed for the user, and those of PYTHONPATH.
            "-P",
            isolated_runner.__file__,
            str(moved),
            str(scratch / "cases.json"),
            str(scratch / "results.npz"),
        ],
        capture_output=True,
        text=True,
        errors="backslashreplace",
        cwd=scratch,
        env=environment,
    )
    if done.returncode:
        raise UserError(
            "not published: the SavedModel does not run in a clean Python process: "
            + _failure(done.returncode, done.stderr)
        )


def _failure(status, stderr):
    """Return in one line why a Python process has failed."""
    if status < 0:
        return f"{signal.Signals(-status).name} ended it (out of memory?)"
    _, has_traceback, rest = stderr.rpartition("Traceback (most recent call last):\n")
    lines = rest.splitlines()
    if has_traceback:  # Calls, which are indented, and then the exception, often of several lines.
        lines = list(itertools.dropwhile(lambda line: line.startswith(" "), lines))
    else:  # Such as messages of TensorFlow's start, and then that of Python.
        lines = lines[-1:]
    return textwrap.shorten(" ".join(lines), 400) or f"exit status {status}"


class _Case(NamedTuple):
    """One output of a request, with its tolerance and the margins of the predictions."""

    signature: str
    inputs: Mapping[str, Sequence]
    name: str
    spec: OutputSpec
    tolerance: Tolerance = TOLERANCES["float32"]
    margins: np.ndarray | None = None


def _compare(case, expected, served):
    """Return a message by the number of each row that differs."""
    if served is None:
        raise UserError(
            f"not published: signature {case.signature}: output {case.name!r} is missing"
        )
    if expected.shape != served.shape:
        expected, served = _of_equal_shape(expected, served, case.margins is not None)
    differing = {}
    for row in range(len(expected)):
        expected_row, served_row = expected[row : row + 1], served[row : row + 1]
        if not _may_differ(case, row) and not _is_same(case, expected_row, served_row):
            texts = ", ".join(f"{key}={_shown(values[row])}" for key, values in case.inputs.items())
            differing[row] = (
                f"{case.signature}: {texts}: {case.name} differs from the trained model. "
                f"Expected: {_shown(expected_row[0])}. Received: {_shown(served_row[0])}."
            )
    return differing


def _of_equal_shape(expected, served, may_be_longer):
    """Pad both arrays to the larger of their sizes.

    Outputs are padded to the longest row of the batch. In bfloat16 that row itself may differ
    within the margin: pad like the graph (texts "", numbers -1), so that the other rows still
    compare equal. In float32 pad with values that no graph returns, so that rows differ.
    """
    of_text, of_number = (b"", -1) if may_be_longer else (b"\xff", -2)
    shape = np.maximum(expected.shape, served.shape)
    return (
        np.pad(
            array,
            [(0, size - own) for size, own in zip(shape, array.shape, strict=True)],
            constant_values=of_text if array.dtype == object else of_number,
        )
        for array in (expected, served)
    )


def _may_differ(case, row):
    """Return whether any value of the row is accepted, as for near ties in bfloat16."""
    if case.spec.is_derived:
        return True
    if case.margins is None:
        return False
    if case.spec.compared == "none":
        return True
    return case.margins[row] <= case.tolerance.margin and not case.spec.in_near_ties


def _is_same(case, expected, served):
    """Compare one row of an output, `(1, ...)`."""
    has_margin = case.tolerance.margin is not None
    if not np.issubdtype(expected.dtype, np.floating):
        if case.spec.compared == "first" and has_margin:
            expected, served = expected[:, :1], served[:, :1]
        return np.array_equal(expected, served)
    if case.spec.is_log_odds and has_margin:
        expected, served = ((1 + np.tanh(log_odds / 2)) / 2 for log_odds in (expected, served))
    return np.allclose(expected, served, rtol=0, atol=_allowed_difference(case, expected))


def _allowed_difference(case, expected):
    largest = np.max(np.abs(expected), initial=0.0)
    if largest <= 1 and not case.spec.is_vector:
        return case.tolerance.probability
    return case.tolerance.number * largest


def _shown(value):
    if not isinstance(value, np.ndarray | np.generic):
        value = np.array(value, object)  # As fixed-width bytes, strings would lose final NULs.
    text = repr(jsonable(value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _set_writable(directory, writable):
    for path in (directory, *directory.rglob("*")):
        path.chmod(
            (0o755 if path.is_dir() else 0o644) if writable else (0o555 if path.is_dir() else 0o444)
        )


def requests(
    model: TaskModel, functions: Mapping[str, tf.types.experimental.GenericFunction]
) -> list[Request]:
    """Return the requests that a SavedModel has to answer as the trained model does.

    Those of `text_requests`, and batches of the words of the vocabulary for the tokenizer.
    """
    words = vocabulary_words(model.vocabulary)
    columns = _columns(model.task, model.task.input_names, (words, words))
    tokenized = _batches("tokenize", columns, WORDS_PER_BATCH)
    return text_requests(model, functions) + tokenized


def text_requests(
    model: TaskModel, functions: Mapping[str, tf.types.experimental.GenericFunction]
) -> list[Request]:
    """Return batches of `ADVERSARIAL_TEXTS`, and single `SHORT_TEXTS`, for each function."""
    cases: list[Request] = []
    specs = model.serving.pipeline.signature_specs()
    for signature, function in functions.items():
        inputs = [spec.name for spec in function.input_signature]
        limit = LONGEST_OF_WINDOWS if specs[signature].splits_texts else None
        texts = [text[:limit] for text in ADVERSARIAL_TEXTS]
        for values, size in ((texts, ROWS_PER_BATCH), (SHORT_TEXTS, 1)):
            # If there are two inputs, the second one receives the texts in reverse order.
            columns = _columns(model.task, inputs, (values, values[::-1]))
            cases += _batches(signature, columns, size)
    return cases


def _columns(task, names, orders):
    """Return {input: values}, with one of `orders` for each of the input `names`."""
    return {
        name: in_lists(values) if task.INPUT_RANKS.get(name) == 2 else values
        for name, values in zip(names, orders, strict=False)
    }


def _batches(signature, columns, size):
    return [
        (signature, {name: values[start : start + size] for name, values in columns.items()})
        for start in range(0, len(next(iter(columns.values()))), size)
    ]


def in_lists(values: Sequence[bytes]) -> list[list[bytes]]:
    """Return one list per value, of it and up to two following values, padded with "" to three."""
    lists = (values[first : first + 1 + first % 3] for first in range(len(values)))
    return [[*texts, *[b""] * (3 - len(texts))] for texts in lists]


def vocabulary_words(vocabulary: Vocabulary) -> list[bytes]:
    """Return words that contain every entry: "##" entries follow several first characters."""
    beginnings = [entry for entry in vocabulary.entries if not entry.startswith("##")]
    continuations = [entry[2:] for entry in vocabulary.entries if entry.startswith("##")]
    words = beginnings + [
        first + entry for first in ("a", "q", "7", "zx") for entry in continuations
    ]
    return [word.encode("utf-8") for word in words]
