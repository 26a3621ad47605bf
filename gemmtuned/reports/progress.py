"""How far work is: a bar on stderr where a person waits, else now and then a line where it does not get on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gemmtuned.configs.human_units import duration
from gemmtuned.reports.render import clean, complain, terminal

Tell = Callable[[int, int, str], None]  # (done, total, what is at work now)
SILENT_S: Final = 30.0  # after this long without an end of anything, a line says what is being done


@contextmanager
def progress(*, quiet: bool = False, lines: bool = False, steady: bool = False) -> Iterator[Tell]:
    """Yield a function to call with how far the work is; `quiet` (as with --json) shows nothing.

    lines: when stderr is no terminal, and nothing has come to an end for SILENT_S, say what is being done.  steady:
    say how far it is each SILENT_S there, whatever came to an end.
    """
    if quiet or not sys.stderr.isatty():
        yield _Lines(steady=steady) if (lines or steady) and not quiet else lambda done, total, doing: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal(stderr=True), transient=True) as bar:
        task, left = bar.add_task("", total=None), Left()
        yield lambda done, total, doing: bar.update(
            task, completed=done, total=total, description=clean(f"{left(done, total)}{doing}")
        )


class Left:
    """How long the rest may take, from how long what was done took: as text, "" while nothing is known.

    Between two ends it counts down, by half of what one takes at most: it never counts up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None  # when it was first called, and how much was done then
        self._last = 0.0, 0  # when what is done now was, and how much that is

    def __call__(self, done: int, total: int) -> str:
        now_s = self._clock()
        if self._first is None:
            self._first = self._last = now_s, done
        since_s, before = self._first
        if done != self._last[1]:
            self._last = now_s, done
        if done <= before or done >= total:
            return ""
        ended_s, _ = self._last
        each_s = (ended_s - since_s) / (done - before)
        left_s = each_s * (total - done) - min(now_s - ended_s, each_s / 2)
        return f"about {duration(left_s * 1e6)} left, "


class _Lines:
    def __init__(self, *, steady: bool) -> None:
        self._steady = steady
        self._done, self._said = -1, ""
        self._since_s = time.monotonic()
        self._left = Left()

    def __call__(self, done: int, total: int, doing: str) -> None:
        now_s, left = time.monotonic(), self._left(done, total)
        if done != self._done:
            self._done = done
            if not self._steady:
                self._since_s = now_s
        if now_s - self._since_s >= SILENT_S and doing != self._said:
            self._said, self._since_s = doing, now_s
            complain(f"{done} of {total} done, {left}now: {doing or 'nothing'}")
