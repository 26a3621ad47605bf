"""A progress bar on stderr where a person waits; nothing at all when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmtuned.reports.render import clean, terminal

Tell = Callable[[int, int, str], None]  # (done, total, what is at work now)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Tell]:
    """Yield a function that is told how far the work is; `quiet` (as with --json) shows nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, doing: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, doing: bar.update(task, completed=done, total=total, description=clean(doing))
