"""A new table is on probation: when programs die soon after taking it up, the next one starts without it.

A routed kernel can kill its process (an illegal access, a driver's fault) where no exception can be caught.  So a
process leaves a mark, `probation/GENERATION-PID-PARENT-TIME`, before it uses a table and holds a lock on it, which
the kernel frees when it dies.  The time (ns) tells the starts of a container apart, in which all ids come again.  The
process takes the mark away when it ends in good order, or after TRIAL_S: then the table has proved itself, and earlier
deaths under it are forgotten.  A mark that nobody holds is a death; after DEATHS of one run the generation is refused
to that run.  The next generation starts anew.

A program that ends in good order also takes away the marks of processes it started: it has ended those itself.
Killed from outside within TRIAL_S, twice, looks like two deaths and costs the gain until the next publish.
Nothing here raises: a folder that cannot be written means no probation.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger("gemmtuned.hooks")
TRIAL_S: Final = 60.0
DEATHS: Final = 2
_MARK: Final = re.compile(r"(\d{1,18})-\d+-(\d+)-\d+")
_LONGEST: Final = 256  # bytes of a run's label that count


class _Mark(NamedTuple):
    path: Path
    fd: int  # open, and locked for as long as this process lives
    since_s: float


class Probation:
    """What this process knows of the marks in a folder; `run` is the label under which deaths are counted."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run.encode()[:_LONGEST]
        self._mark: _Mark | None = None  # ours
        self._lock = threading.Lock()  # around every change of it: each descriptor is closed once

    def refuses(self, generation: int) -> bool:
        """Whether processes of this run died of it, DEATHS of them."""
        return len(self._deaths(generation)) >= DEATHS

    def note(self, generation: int) -> str:
        """What to tell the user about a refused generation."""
        return (
            f"generation {generation} is not used: {DEATHS} processes of this run died within {TRIAL_S:g} s of taking "
            f"it up. The next publish is tried again; to try this one: rm {self._folder}/{generation}-*"
        )

    def begin(self, generation: int, now_s: float) -> None:
        """This process is about to use the table of this generation. now_s: of a clock that only grows."""
        mark = None
        with suppress(OSError):
            mark = _leave_mark(self._folder, generation, self._run, now_s)
        self._replace(mark)
        self._forget(older_than=generation)

    def turn(self, now_s: float) -> None:
        """Called now and then: after TRIAL_S the table has proved itself."""
        mark = self._mark
        if mark is not None and now_s - mark.since_s >= TRIAL_S and self._replace(None, only=mark):
            for path in self._deaths(_generation(mark.path)):
                with suppress(OSError):
                    path.unlink()

    def leave(self) -> None:
        """This process ends. In good order it takes away its mark, and those of processes that it started."""
        error = getattr(sys, "last_value", None)  # of what ends it; set once the traceback is out, before exit handlers
        self._replace(None, died=error is not None and _is_of_device(error))
        if error is None or isinstance(error, KeyboardInterrupt):
            for path in self._marks():
                if _parent(path) == os.getpid():
                    with suppress(OSError):
                        path.unlink()

    def _replace(self, new: _Mark | None, *, only: _Mark | None = None, died: bool = False) -> bool:
        """Take our mark away or, after a death, leave it to be counted. False when it is no longer `only`."""
        with self._lock:
            old = self._mark
            if only is not None and old is not only:
                return False
            self._mark = new
        if old is not None:
            if not died:
                with suppress(OSError):
                    old.path.unlink()
            os.close(old.fd)
        return True

    def after_fork(self) -> None:
        """In a forked child: the mark is the parent's; our copy of its descriptor would outlive the parent."""
        self._lock = threading.Lock()
        mark, self._mark = self._mark, None
        if mark is not None:
            os.close(mark.fd)

    def _deaths(self, generation: int) -> list[Path]:
        """Marks of this generation and run that nobody holds."""
        mark = self._mark
        mine = mark.path if mark is not None else None
        return [p for p in self._marks() if p != mine and _generation(p) == generation and _died(p) == self._run]

    def _marks(self) -> list[Path]:
        return _marks(self._folder)

    def _forget(self, *, older_than: int) -> None:
        for path in self._marks():
            if _generation(path) < older_than:
                with suppress(OSError):
                    path.unlink()


def deaths(folder: Path) -> Counter[tuple[int, str]]:
    """(generation, run) -> processes that died within TRIAL_S of taking it up, as far as the marks can be read."""
    found = ((_generation(path), _died(path)) for path in _marks(folder))
    return Counter((generation, run.decode(errors="replace")) for generation, run in found if run is not None)


def _leave_mark(folder: Path, generation: int, run: bytes, now_s: float) -> _Mark:
    """Raises OSError, and leaves nothing behind, where files cannot be written or locked."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{generation}-{os.getpid()}-{os.getppid()}-{time.time_ns()}"
    unseen = path.with_name(f".{path.name}")  # a mark must be held when others see it: who reads it locks it
    fd = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, run)
        unseen.rename(path)
    except OSError:
        with suppress(OSError):
            unseen.unlink()
        os.close(fd)
        raise
    return _Mark(path, fd, now_s)


def _marks(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _MARK.fullmatch(path.name)]
    except OSError:
        return []


def _died(path: Path) -> bytes | None:
    """The run whose process died and left this mark; None while somebody lives with it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.read(fd, _LONGEST + 1)
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_of_device(error: BaseException) -> bool:
    """An illegal access on the device comes as an exception, and nothing works after it."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _generation(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _parent(path: Path) -> int:
    found = _MARK.fullmatch(path.name)
    return int(found[2]) if found else -1
