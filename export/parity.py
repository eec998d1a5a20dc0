"""The parity gate: does a SavedModel, on its own, answer as the trained model does?"""

import base64
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from export import probe, warmup

TOLERANCE = 1e-5  # Of probabilities and vectors, float32.

NASTY = (
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
    b"don't stop-me: $100, 50% (ok?)",
    b"\xff\xfe\x00 bad \xc3\x28 bytes \xe2\x82",
    "zero\u200bwidth soft\u00adhyphen \ufeffbom \ufffd".encode(),
    b"x" * 250,
    b"word " * 600,
    "\u00e9".encode() * 300,
    b"a" * (1 << 20),
    b"one megabyte of words " * ((1 << 20) // 22),
)
ROWS_AT_A_TIME = 8
WORDS_AT_A_TIME = 4096


def check(directory, trained, questions=()):
    """Compares the SavedModel in `directory` with the trained run it was made from.

    It is copied elsewhere, made read-only, and asked in a fresh, isolated Python that has none of
    our code: strings of every unpleasant kind through each signature, the words of the vocabulary
    through the tokenizer, `questions` [(signature, {input: strings})], and its warm-up records,
    which only have to be answered. Raises UserError naming the first string on which ids or labels
    differ, or a probability by more than TOLERANCE; else returns what was answered to `questions`,
    {signature: {output: array}}.
    """
    cases = [*questions, *_cases(trained)]
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
            _run_probe(moved, scratch)
        finally:
            _set_writable(moved, True)
        answers = probe.load(scratch / "results.npz")

    functions = trained.pipeline.signatures()
    for number, (signature, inputs) in enumerate(cases):
        function = functions[signature]
        wanted = function(
            *(tf.constant(inputs[spec.name], tf.string) for spec in function.input_signature)
        )
        for name, tensor in wanted.items():
            _compare(signature, inputs, name, tensor.numpy(), answers.get(f"{number}/{name}"))
    return {
        signature: {
            name.partition("/")[2]: answer
            for name, answer in answers.items()
            if name.startswith(f"{number}/")
        }
        for number, (signature, _) in enumerate(questions)
    }


def _cases(trained):
    """[(signature, {input: [bytes], or lists of bytes})], in batches."""
    task = trained.task
    words = _vocabulary_words(trained.run.vocabulary)
    nasty, of_words = (
        {
            name: _in_lists(values) if task.INPUT_RANKS.get(name) == 2 else values
            for name, values in zip(task.input_names, orders, strict=False)
        }
        for orders in ((NASTY, NASTY[::-1]), (words, words))
    )
    cases = []
    for signature, inputs, size in (
        ("serving_default", nasty, ROWS_AT_A_TIME),
        ("tokenize", nasty, ROWS_AT_A_TIME),
        ("embed", {"text": NASTY}, ROWS_AT_A_TIME),
        ("tokenize", of_words, WORDS_AT_A_TIME),
    ):
        for start in range(0, len(next(iter(inputs.values()))), size):
            cases.append(
                (signature, {name: values[start : start + size] for name, values in inputs.items()})
            )
    return cases


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


def _run_probe(moved, scratch):
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            probe.__file__,
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


def _compare(signature, inputs, name, wanted, served):
    if served is None:
        raise UserError(f"not published: signature {signature} has no output {name!r}")
    if wanted.shape != served.shape:
        # Rows are padded to the longest of the batch: the texts whose own length differs are found
        # below.
        shape = np.maximum(wanted.shape, served.shape)
        wanted, served = (
            np.pad(
                array,
                [(0, size - own) for size, own in zip(shape, array.shape, strict=True)],
                constant_values=b"\xff" if array.dtype == object else -2,
            )
            for array in (wanted, served)
        )
    for row in range(len(wanted)):
        want, got = wanted[row : row + 1], served[row : row + 1]
        if np.issubdtype(wanted.dtype, np.floating):
            same = np.allclose(want, got, rtol=0, atol=TOLERANCE)
        else:
            same = np.array_equal(want, got)
        if not same:
            texts = ", ".join(f"{key}={_shown(values[row])}" for key, values in inputs.items())
            raise UserError(
                f"not published: {signature} of {texts}: {name} is {_shown(got[0])}, the trained "
                f"model gives {_shown(want[0])}"
            )


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
