"""Damaged headers and truncated files of pretrained weights end in a rejection of one line."""

import random

import pytest

from tests.conftest import READS_PROC
from tests.fuzzed_weights import FORMATS
from tests.fuzzing import attempt, mutate

pytestmark = READS_PROC
FEW, MANY = 36, 500
# Bytes that hold sizes, offsets and names, from the beginning or (negative) from the end.
HEADERS = {
    "safetensors": (2_500, 0),
    "PyTorch zip": (3_000, 3_000),
    "PyTorch before 1.6": (6_000, 0),
    "tf_model.h5": (4_000, 4_000),
}
WEIGHTS = (*HEADERS, "safetensors index")


def damaged_header(rng, data, begin, end):
    """Return a file whose header differs at one to three positions."""
    if end and rng.random() < 0.5:
        return data[:-end] + mutate(rng, data[-end:])
    return mutate(rng, data[:begin]) + data[begin:]


def outcomes(name, directory, damage, count):
    """Read `count` damaged files; return how many were accepted, and what went wrong."""
    path, read = FORMATS[name](directory)
    original = path.read_bytes()
    before = {file.name for file in directory.iterdir()}
    accepted, findings = 0, []
    assert attempt(read, path)[0] == "accepted"
    for number in range(count):
        data = damage(random.Random(f"{name} {number}"), original)
        path.write_bytes(data)
        outcome, detail = attempt(read, path)
        accepted += outcome == "accepted"
        is_named = str(directory) in str(detail) or outcome == "accepted"
        if outcome == "finding" or not is_named:
            findings.append((number, detail))
    assert {file.name for file in directory.iterdir()} == before
    return accepted, findings


def check_headers(name, directory, count):
    size = FORMATS[name](directory)[0].stat().st_size
    begin, end = (min(length, size // 2) for length in HEADERS[name])

    def damage(rng, data):
        return damaged_header(rng, data, begin, end)

    accepted, findings = outcomes(name, directory, damage, count)
    assert findings == [] and accepted < count


def check_truncated(name, directory, count):
    def damage(rng, data):
        return data[: rng.randrange(len(data))]

    assert outcomes(name, directory, damage, count) == (0, [])


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_headers_are_read_or_rejected(tmp_path, name):
    check_headers(name, tmp_path, FEW)


@pytest.mark.parametrize("name", WEIGHTS)
def test_truncated_files_are_rejected_by_name(tmp_path, name):
    check_truncated(name, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADERS)
def test_hundreds_of_damaged_headers_are_read_or_rejected(tmp_path, name):
    check_headers(name, tmp_path, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_hundreds_of_truncated_files_are_rejected_by_name(tmp_path, name):
    check_truncated(name, tmp_path, MANY)
