"""Progress of long work: a live bar on a terminal, lines in a log file."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import tqdm

SECONDS_BETWEEN_LINES = 5.0


def log(line: str) -> None:
    """Print a line of progress to stderr, above the bar if there is one. Results go to stdout."""
    tqdm.tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Progress of a loop, as a context manager.

    If `log` is the function of this module and stderr is a terminal, a bar shows count, total,
    rate and ETA until the loop ends. Otherwise lines go to `log`.

    Args:
        log: Callable that takes log lines.
        unit: What is counted, such as "rows".
        total: Number of units, or None if unknown.
        done: Number of units that an earlier process has done.
    """

    def __init__(
        self, log: Callable[[str], None], unit: str, total: int | None = None, done: int = 0
    ) -> None:
        self.log, self.unit, self.total = log, unit, total
        self.first = self.done = done
        self.began = self.logged = time.monotonic()
        self.bar = None
        if log is globals()["log"] and sys.stderr.isatty():
            self.bar = tqdm.tqdm(
                total=total,
                initial=done,
                unit=unit,
                leave=False,
                file=sys.stderr,
                dynamic_ncols=True,
            )
            if self.bar.disable:  # By TQDM_DISABLE=1.
                self.bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, done: int) -> None:
        """Move the bar to the units that are done; without a bar, log a line every 5 s."""
        self.move(done)
        now = time.monotonic()
        if self.bar is None and now - self.logged >= SECONDS_BETWEEN_LINES:
            self.logged = now
            self.log(self._line(now))

    def move(self, done: int) -> None:
        """Move the bar, if there is one, to the units that are done."""
        self.done = done
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def show(self, line: str, **figures: Any) -> None:
        """Show figures by name beside the bar; without a bar, log a line."""
        if self.bar is None:
            self.log(line)
        else:
            self.bar.set_postfix(figures)

    def _line(self, now):
        rate = (self.done - self.first) / max(now - self.began, 1e-3)
        speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
        parts = [f"{self.done:,} {self.unit}", f"{speed} {self.unit}/s"]
        if self.total is not None:
            parts[0] = f"{self.done:,}/{self.total:,} {self.unit}"
            if rate:
                left = round((self.total - self.done) / rate)
                parts.append(f"ETA {datetime.timedelta(seconds=left)}")
        return "  ".join(parts)
