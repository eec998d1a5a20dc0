"""The parity check: does a SavedModel, on its own, answer as the trained model does?"""

import base64
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from export import isolated_runner, warmup

# In bfloat16 an answer may be another where another one was so little of probability short.
MARGIN = 0.04
# Outputs that are differences of logits: of any size, and next to nothing where they are large.
LOG_ODDS = ("no_answer_score",)

ADVERSARIAL_TEXTS = (
    b"",
    b" ",
    b" \t\r\n ",
    b"a",
    b"The quick brown fox jumps over the lazy dog.",
    b"UPPER lower MiXeD",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m".encode(),
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m".encode(),  # Both normal forms.
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
# What goes through windows: 20,000 characters of a text are work enough.
LONGEST_OF_WINDOWS = 20_000
ROWS_PER_BATCH = 8
WORDS_PER_BATCH = 4096


class Tolerance(NamedTuple):
    """How far a served number may be from the trained model's, in float32.

    `probability` where a row's numbers are at most 1, as probabilities are; else, and for vectors,
    `number`, as a part of the largest of them. `margin`: see MARGIN; None where each answer has to
    be the same; where it is given, LOG_ODDS are compared as the probabilities they are of.
    """

    probability: float
    number: float
    margin: float | None


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, None),
    "bfloat16": Tolerance(0.02, 0.05, MARGIN),
}


def check(directory, trained, precision="float32", questions=()):
    """Compares the SavedModel in `directory` with the trained run it was made from.

    It is copied elsewhere, made read-only, and asked in a fresh, isolated Python that has none of
    our code: strings of every unpleasant kind through each signature, the words of the vocabulary
    through the tokenizer, `questions` [(signature, {input: strings})], and its warm-up records,
    which only have to be answered. Raises UserError naming the first string on which ids or answers
    differ, or a number by more than the precision's Tolerance; else returns what was answered to
    `questions`, {signature: {output: array}}.
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
    """{"case/output": array}, as the SavedModel answers from another place."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        moved = scratch / "moved"
        shutil.copytree(directory, moved)
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
    """[(signature, {input: [bytes], or lists of bytes})], in batches."""
    cases = []
    for signature, function in functions.items():
        inputs = [spec.name for spec in function.input_signature]
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
    """{input: its values}: those of the first order for the first input, and so on."""
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
    """Lists of each value and none to two of those behind it, filled up with "" to three."""
    lists = (values[first : first + 1 + first % 3] for first in range(len(values)))
    return [[*texts, *[b""] * (3 - len(texts))] for texts in lists]


def _encoded(value):
    """Strings, or lists of them, as JSON takes them."""
    if isinstance(value, bytes | str):
        return base64.b64encode(tf.compat.as_bytes(value)).decode("ascii")
    return [_encoded(entry) for entry in value]


def _vocabulary_words(vocabulary):
    """Words to try the entries with: beginnings alone, continuations behind some beginnings."""
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
            "not published: the SavedModel cannot be asked on its own: "
            + (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        )


class _Case(NamedTuple):
    """An output of a signature for some inputs, and how it is compared; see check."""

    signature: str
    inputs: dict
    name: str
    tolerance: Tolerance = TOLERANCES["float32"]
    margins: np.ndarray | None = None


def _compare(case, expected, served):
    if served is None:
        raise UserError(f"not published: signature {case.signature} has no output {case.name!r}")
    if expected.shape != served.shape:
        # Rows are padded to the longest of the batch. Where that may be another row, too close to
        # tell, they are filled up as the graph fills them (texts "", numbers -1), so that none but
        # that one differs; else with what no graph gives.
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
                f"not published: {case.signature} of {texts}: {case.name} is "
                f"{_shown(actual_row[0])}, the trained model gives {_shown(expected_row[0])}"
            )


def _is_same(case, row, expected, actual):
    tolerance = case.tolerance
    if case.margins is not None:
        # Of the next best nothing is said but how probable they are.
        if case.name.startswith("nbest_") and case.name != "nbest_score":
            return True
        if case.margins[row] <= tolerance.margin and case.name != "probabilities":
            return True
    if not np.issubdtype(expected.dtype, np.floating):
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
