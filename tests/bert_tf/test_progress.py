"""Progress: a bar on a terminal, lines elsewhere."""

import io
import sys

import pytest

from bert_tf.system import progress
from bert_tf.system.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)


def open_terminal(monkeypatch):
    """Replace stderr; a fixture could not, since pytest replaces it after the fixtures."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_lines_have_count_rate_and_eta(at_once, monkeypatch):
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said = []
    with Progress(said.append, "rows", total=1_010, done=10) as shown:
        shown.update(510)
        shown.update(1_010)
    assert said == [
        "510/1,010 rows  250 rows/s  ETA 0:00:02",
        "1,010/1,010 rows  250 rows/s  ETA 0:00:00",
    ]


def test_without_a_total_there_is_no_eta(at_once, monkeypatch):
    clock = iter([0.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said = []
    with Progress(said.append, "MB") as shown:
        shown.update(10)
    assert said == ["10 MB  0.25 MB/s"]


def test_before_the_first_unit_is_done_there_is_no_eta(monkeypatch):
    clock = iter([0.0, 6.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said = []
    with Progress(said.append, "shards", 1) as shown:
        shown.update(0)
    assert said == ["0/1 shards  0 shards/s"]


def test_lines_come_every_five_seconds(monkeypatch):
    clock = iter([0.0, 4.9, 5.0, 9.9, 10.1])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said = []
    with Progress(said.append, "rows", 100) as shown:
        for done in (1, 2, 3, 4):
            shown.update(done)
    assert [line.split("/")[0] for line in said] == ["2", "4"]


def test_a_terminal_shows_a_bar_and_no_lines_of_progress(at_once, monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress(progress.log, "rows", total=4) as shown:
        shown.update(3)
        shown.show("step 3/4  loss 0.5000", loss="0.5000")
        progress.log("a line above the bar")
    text = terminal.getvalue()
    assert "3/4" in text and "loss=0.5000" in text and "\ra line above the bar\n" in text
    assert "step 3/4" not in text and "ETA" not in text
    assert text.endswith("\r")  # The bar is erased in the end.


def test_another_log_gets_lines_on_a_terminal_too(at_once, monkeypatch):
    terminal = open_terminal(monkeypatch)
    said = []
    with Progress(said.append, "rows", total=4) as shown:
        shown.update(3)
        shown.show("a line", loss=1)
    assert len(said) == 2 and terminal.getvalue() == ""
