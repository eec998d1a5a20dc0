"""The last line of a run of the tests, on what was not covered."""

import types

from tests.conftest import not_covered


def reports(reason, count):
    longrepr = ("tests/x.py", 7, f"Skipped: {reason}")
    return [types.SimpleNamespace(longrepr=longrepr) for _ in range(count)]


def test_skips_are_counted_by_reason_and_deselected_tests_are_counted():
    stats = {
        "skipped": [*reports("no AVX-512", 1), *reports("no data", 2)],
        "deselected": [1, 2, 3],
    }
    assert not_covered({**stats, "passed": [1]}) == (
        "not covered: 2 (no data); 1 (no AVX-512); 3 (deselected; `make test-medium` "
        "and `make test-slow` run them)"
    )


def test_a_run_of_all_tests_says_so():
    assert not_covered({"passed": [1]}) == "not covered: nothing, all tests ran"
