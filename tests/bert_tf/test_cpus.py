"""Counting processors, also where the operating system binds no process to them."""

import os

import pytest

from bert_tf.data.jobs import RunnerSettings
from bert_tf.planning.devices import typical_processor
from bert_tf.system import command
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
