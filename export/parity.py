"""Parity check of an exported SavedModel against the trained model.

The SavedModel runs in a clean Python process with TensorFlow and TensorFlow Text only. If its
token ids or predictions differ from the trained model's, it is not published.
"""

from __future__ import annotations

import base64
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from export import isolated_runner, warmup

if TYPE_CHECKING:
    from tasks.trained_model import TrainedModel

# In bfloat16 a prediction may differ if a competing one was less probable by at most this much.
MARGIN = 0.04
# These outputs are unbounded differences of logits. Where they are large, a difference between two
# of them hardly changes the probability, so in bfloat16 the probabilities are compared.
LOG_ODDS = ("no_answer_score",)

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
# Long texts are split into many windows; with 20,000 bytes the check stays fast.
LONGEST_OF_WINDOWS = 20_000
ROWS_PER_BATCH = 8
WORDS_PER_BATCH = 4096


class Tolerance(NamedTuple):
    """Maximum difference between the outputs of the SavedModel and of the trained model.

    Attributes:
        probability: Absolute tolerance for rows whose values are all at most 1.
        number: Tolerance for all other rows and for vectors, relative to the row's largest value.
        margin: See `MARGIN`. If it is set, `LOG_ODDS` are compared as probabilities. `None` if all
            predictions must be equal.
    """

    probability: float
    number: float
    margin: float | None


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, None),
    "bfloat16": Tolerance(0.02, 0.05, MARGIN),
}


def check(
    directory: pathlib.Path,
    trained: TrainedModel,
    precision: str = "float32",
    questions: Sequence[tuple[str, Mapping[str, Sequence]]] = (),
) -> dict[str, dict[str, np.ndarray]]:
    """Compare a SavedModel with the trained model that it was exported from.

    The SavedModel is copied, made read-only and run in a clean Python process without this
    project's code. The requests are `ADVERSARIAL_TEXTS` for every signature, the words of the
    vocabulary for the tokenizer, `questions`, and the warm-up records, which only have to succeed.

    Args:
        directory: The SavedModel.
        trained: The trained model, which computes the expected outputs.
        precision: Key of `TOLERANCES`, "float32" or "bfloat16".
        questions: Additional requests: signature names with strings, or lists of strings, per
            input.

    Returns:
        The SavedModel's outputs for `questions`, as signature name to output name to array.

    Raises:
        UserError: If the SavedModel does not run, if token ids or predictions differ, or if numbers
            differ by more than the tolerance. The message names the first such string.
    """
    functions, tolerance = trained.pipeline.signatures(), TOLERANCES[precision]
    cases = [*questions, *_cases(trained, functions)]
    predictions = _served(directory, cases)
    for number, (signature, inputs) in enumerate(cases):
        function, margins = functions[signature], None
        tensors = {
            spec.name: tf.constant(inputs[spec.name], tf.string)
            for spec in function.input_signature
        }
        expected = function(*tensors.values())
        if tolerance.margin and signature in ("serving_default", "masked_lm"):
            margins = trained.pipeline.margin(**tensors).numpy()
        for name, tensor in expected.items():
            _compare(
                _Case(signature, inputs, name, tolerance, margins),
                tensor.numpy(),
                predictions.get(f"{number}/{name}"),
            )
    return {
        signature: {
            name.partition("/")[2]: prediction
            for name, prediction in predictions.items()
            if name.startswith(f"{number}/")
        }
        for number, (signature, _) in enumerate(questions)
    }


def _served(directory, cases):
    """Return the outputs of a moved copy of the SavedModel as {"case/output": array}."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        moved = scratch / "moved"
        shutil.copytree(directory, moved)
        # A server may run as another user, so that loading must not depend on write access.
        _set_writable(moved, False)
        try:
            (scratch / "cases.json").write_text(
                json.dumps(
                    [
                        {
                            "signature": signature,
                            "inputs": {name: _encoded(values) for name, values in inputs.items()},
                        }
                        for signature, inputs in [*cases, *warmup.read(moved)]
                    ]
                ),
                encoding="ascii",
            )
            _run_isolated(moved, scratch)
        finally:
            _set_writable(moved, True)
        return isolated_runner.load(scratch / "results.npz")


def _cases(trained, functions):
    """Return batches of requests as (signature, {input: strings or lists of strings})."""
    cases = []
    for signature, function in functions.items():
        inputs = [spec.name for spec in function.input_signature]
        # If there are two inputs, the second one receives the texts in reverse order.
        adversarial = ADVERSARIAL_TEXTS
        if trained.task.has_windows and signature != "embed":
            adversarial = [text[:LONGEST_OF_WINDOWS] for text in ADVERSARIAL_TEXTS]
        cases += _batches(
            signature, _columns(trained.task, inputs, (adversarial, adversarial[::-1]))
        )
    words = _vocabulary_words(trained.run.vocabulary)
    columns = _columns(trained.task, trained.task.input_names, (words, words))
    return cases + _batches("tokenize", columns, WORDS_PER_BATCH)


def _columns(task, names, orders):
    """Return {input: values}, with one of `orders` for each of the input `names`."""
    return {
        name: _in_lists(values) if task.INPUT_RANKS.get(name) == 2 else values
        for name, values in zip(names, orders, strict=False)
    }


def _batches(signature, columns, size=ROWS_PER_BATCH):
    return [
        (signature, {name: values[start : start + size] for name, values in columns.items()})
        for start in range(0, len(next(iter(columns.values()))), size)
    ]


def _in_lists(values):
    """Return one list per value, of it and up to two following values, padded with "" to three."""
    lists = (values[first : first + 1 + first % 3] for first in range(len(values)))
    return [[*texts, *[b""] * (3 - len(texts))] for texts in lists]


def _encoded(value):
    """Encode a string in base64 for JSON, or the strings of nested lists."""
    if isinstance(value, bytes | str):
        return base64.b64encode(tf.compat.as_bytes(value)).decode("ascii")
    return [_encoded(entry) for entry in value]


def _vocabulary_words(vocabulary):
    """Return words that contain every entry: "##" entries follow several first characters."""
    beginnings = [entry for entry in vocabulary.entries if not entry.startswith("##")]
    continuations = [entry[2:] for entry in vocabulary.entries if entry.startswith("##")]
    words = beginnings + [
        first + entry for first in ("a", "q", "7", "zx") for entry in continuations
    ]
    return [word.encode("utf-8") for word in words]


def _run_isolated(moved, scratch):
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            isolated_runner.__file__,
            str(moved),
            str(scratch / "cases.json"),
            str(scratch / "results.npz"),
        ],
        capture_output=True,
        text=True,
        cwd=scratch,
    )
    if done.returncode:
        raise UserError(
            "not published: the SavedModel does not run in a clean Python process: "
            + (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        )


class _Case(NamedTuple):
    """One output of a request, with its tolerance and the margins of the predictions."""

    signature: str
    inputs: dict
    name: str
    tolerance: Tolerance = TOLERANCES["float32"]
    margins: np.ndarray | None = None


def _compare(case, expected, served):
    if served is None:
        raise UserError(
            f"not published: signature {case.signature}: output {case.name!r} is missing"
        )
    if expected.shape != served.shape:
        # Outputs are padded to the longest row of the batch. In bfloat16 that row itself may differ
        # within the margin: pad like the graph (texts "", numbers -1), so that the other rows still
        # compare equal. In float32 pad with values that no graph returns, so that rows differ.
        may_be_longer = case.margins is not None
        of_text, of_number = (b"", -1) if may_be_longer else (b"\xff", -2)
        shape = np.maximum(expected.shape, served.shape)
        expected, served = (
            np.pad(
                array,
                [(0, size - own) for size, own in zip(shape, array.shape, strict=True)],
                constant_values=of_text if array.dtype == object else of_number,
            )
            for array in (expected, served)
        )
    for row in range(len(expected)):
        expected_row, actual_row = expected[row : row + 1], served[row : row + 1]
        if not _is_same(case, row, expected_row, actual_row):
            texts = ", ".join(f"{key}={_shown(values[row])}" for key, values in case.inputs.items())
            raise UserError(
                f"not published: {case.signature}: {texts}: {case.name} differs from the trained "
                f"model. Expected: {_shown(expected_row[0])}. Received: {_shown(actual_row[0])}."
            )


def _is_same(case, row, expected, actual):
    tolerance = case.tolerance
    if case.margins is not None:
        # Near ties may change the order of the n best spans; only their scores are compared.
        if case.name.startswith("nbest_") and case.name != "nbest_score":
            return True
        if case.margins[row] <= tolerance.margin and case.name != "probabilities":
            return True
    if not np.issubdtype(expected.dtype, np.floating):
        # The margin covers the best token only; the order of the next ones may differ.
        if case.name == "token" and tolerance.margin:
            expected, actual = expected[:, :1], actual[:, :1]
        return np.array_equal(expected, actual)
    if case.name in LOG_ODDS and tolerance.margin:
        expected, actual = ((1 + np.tanh(log_odds / 2)) / 2 for log_odds in (expected, actual))
    largest = np.max(np.abs(expected), initial=0.0)
    is_probability = largest <= 1 and case.signature != "embed"
    allowed = tolerance.probability if is_probability else tolerance.number * largest
    return np.allclose(expected, actual, rtol=0, atol=allowed)


def _shown(value):
    def decoded(value):
        if isinstance(value, list):
            return [decoded(entry) for entry in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    text = repr(decoded(value.tolist() if isinstance(value, np.ndarray | np.generic) else value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _set_writable(directory, writable):
    for path in (directory, *directory.rglob("*")):
        path.chmod(
            (0o755 if path.is_dir() else 0o644) if writable else (0o555 if path.is_dir() else 0o444)
        )
