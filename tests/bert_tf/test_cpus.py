"""Counting processors, also where the operating system binds no process to them."""

import os

import pytest

from bert_tf.data.jobs import RunnerSettings
from bert_tf.planning.devices import typical_processor
from bert_tf.system import command, environment, processes
from bert_tf.system.processes import count_processors


@pytest.fixture
def without_affinity(monkeypatch):
    """Remove the function that macOS does not have."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)


def test_without_affinity_all_processors_count(without_affinity, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert count_processors() == RunnerSettings().workers == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)  # Unknown.
    assert count_processors() == 1


def test_commands_and_plans_need_no_affinity(without_affinity, monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    command._limit_arenas()
    assert typical_processor().flops["float32"] > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_process_bound_to_one_processor_counts_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert count_processors() == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("200000 100000\n", None, None), 2),
        (("250000 100000\n", None, None), 3),
        (("1000 100000\n", None, None), 1),
        (("6400000 100000\n", None, None), 7),
        (("max 100000\n", None, None), None),
        ((None, "150000\n", "100000\n"), 2),
        ((None, "-1\n", "100000\n"), None),
        ((None, None, None), None),
    ],
)
def test_the_quota_of_a_container_limits_workers_and_threads(
    without_affinity, tmp_path, monkeypatch, texts, expected
):
    paths = [tmp_path / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    for path, text in zip(paths, texts, strict=True):
        if text:
            path.write_text(text)
    monkeypatch.setattr(processes, "_QUOTAS", (paths[:1], paths[1:]))
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert count_processors() == RunnerSettings().workers == (expected or 7)
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "5")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "")  # Restored after the test.
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")
    environment.set_defaults()
    assert os.environ["TF_NUM_INTEROP_THREADS"] == "5"
    assert os.environ.get("TF_NUM_INTRAOP_THREADS") == (expected and str(expected))
