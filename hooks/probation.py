"""A new table is on probation: when programs die in its kernels soon after taking it up, others start without it.

A routed kernel can kill its process where no exception can be caught.  So a process leaves a mark before it uses a
table, `probation/GENERATION-PID-PARENT-TIME`, a page of a file that it maps; as long as a routed call is going on, a
number in that page says so (hooks/native/trial.h), and the kernel keeps the page when the process dies.  The process
takes the mark away when it ends in good order, or after TRIAL_S: then the table has proved itself, and earlier deaths
under it are forgotten.

Only evidence counts: a mark of a dead process that was in a routed call, or that ran kernels of the table on a GPU and
left it with a fault that a broken kernel makes (an illegal address or instruction; the driver says so at the end, and
at every launch).  A program that ends by an exception of its own, os._exit, an assertion in its own kernel or a signal
that comes while no routed call is going on has died of something else.  After DEATHS of one run its next starts go
without the generation, for STEPS_S: then one tries it again, and if that dies too, the next wait is longer.  The next
generation starts anew.

Nothing here raises: a folder that cannot be written means no probation.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.moment import moment
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.real import allocate_lock

TRIAL_S: Final = 60.0
DEATHS: Final = 2
STEPS_S: Final = (600.0, 3600.0, 86400.0)  # how long a run goes without, after so many deaths more
_MARK: Final = re.compile(r"(\d{1,18})-(\d+)-(\d+)-(\d{1,19})")
_PAGE: Final = 4096
_FACTS_AT: Final = 16  # before it: _State
_LONGEST: Final = 256  # bytes of a run's label that count
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_MAP_FIXED: Final = 0x10


class _State(ctypes.Structure):
    """The beginning of the page: `TrialPage` of native/trial.h."""

    _fields_ = (("going_on", ctypes.c_uint32), ("launched", ctypes.c_uint32), ("fault", ctypes.c_uint32))


class _Mark(NamedTuple):
    path: Path
    generation: int
    since_s: float


class Probation:
    """What this process knows of the marks in a folder; `run` is the label under which deaths are counted.

    watch: given the address of a page, in which routed calls are noted (native/trial.h); None: no longer.
    """

    def __init__(self, folder: Path, run: str, watch: Callable[[int | None], None] | None = None) -> None:
        self._folder, self._run = folder, run.encode(errors="replace")[:_LONGEST].decode(errors="replace")
        self.watch = watch
        self._mark: _Mark | None = None  # ours
        self._address: int | None = None  # of its page, which stays ours for ever: a call may hold it
        self._lock = allocate_lock()  # around every change of them

    def refuses(self, generation: int) -> bool:
        """Whether processes of this run died of it, DEATHS of them, and it is not yet time to try it again."""
        until_s = self.until_s(generation)
        return until_s is not None and time.time() < until_s

    def until_s(self, generation: int) -> float | None:
        """Until when (Unix seconds) this run goes without the generation; None when too few have died of it."""
        return _until_s([d for d in _deaths(self._folder) if d.generation == generation and d.run == self._run])

    def note(self, generation: int) -> str:
        """What to tell the user about a refused generation."""
        until = moment(self.until_s(generation) or 0, time.time())
        return (
            f"generation {generation} is not used before {until}: processes of this run died in its kernels within "
            f"{TRIAL_S:g} s of taking it up. The next publish is tried at once; to try this one now: "
            f"rm {self._folder}/{generation}-*"
        )

    def begin(self, generation: int, now_s: float) -> None:
        """This process is about to use the table of this generation. now_s: of a clock that only grows."""
        with self._lock:
            self._end()
            with suppress(OSError):
                self._mark = _Mark(self._leave_mark(generation), generation, now_s)
            if self.watch is not None and self._mark is not None:
                self.watch(self._address)
        for path in _marks(self._folder):
            if _generation(path) < generation:
                with suppress(OSError):
                    path.unlink()

    def turn(self, now_s: float) -> None:
        """Called now and then: after TRIAL_S the table has proved itself."""
        with self._lock:
            mark = self._mark
            if mark is None or now_s - mark.since_s < TRIAL_S:
                return
            self._end()
        for death in _deaths(self._folder):
            if death.generation == mark.generation and death.run == self._run:
                with suppress(OSError):
                    death.path.unlink()

    def has_launched(self) -> bool:
        """Whether the table on trial has run a kernel on a GPU."""
        with self._lock:
            state = self._state()
            return state is not None and bool(state.launched)

    def note_fault(self, code: int) -> None:
        """The GPU has a fault, a CUresult."""
        with self._lock:
            state = self._state()
            if state is not None:
                state.fault = code

    def leave(self) -> None:
        """This process ends, and not by a signal. A fault of the GPU leaves the mark to be counted."""
        error = getattr(sys, "last_value", None)  # of what ends it; set once the traceback is out, before exit handlers
        with self._lock:
            state = self._state()
            if state is not None and state.launched and state.fault:
                self._mark = None
            self._end()
        if error is None or isinstance(error, KeyboardInterrupt):  # it has ended itself the workers that it started
            for path in _marks(self._folder):
                if _parent(path) == os.getpid():
                    with suppress(OSError):
                        path.unlink()

    def after_fork(self) -> None:
        """In a forked child: the mark is the parent's."""
        self._lock = allocate_lock()
        self._mark = None
        self._unmap()

    def _state(self) -> _State | None:
        """What our page says; None without a mark. The lock is held."""
        if self._mark is None or self._address is None:
            return None
        return _State.from_address(self._address)

    def _end(self) -> None:
        """Take our mark away. The lock is held."""
        mark, self._mark = self._mark, None
        self._unmap()
        if mark is not None:
            with suppress(OSError):
                mark.path.unlink()

    def _unmap(self) -> None:
        """Let nothing of the file be mapped. Calls that are going on still write to the page: it stays, and is ours."""
        if self._address is not None:
            if self.watch is not None:
                self.watch(None)
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _libc.mmap(self._address, _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
            self._address = None  # the next mark has another: what ends there began there

    def _leave_mark(self, generation: int) -> Path:
        """Raises OSError, and leaves nothing behind, where files cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{generation}-{os.getpid()}-{os.getppid()}-{time.time_ns()}"
        unseen = path.with_name(f".{path.name}")
        facts = json.dumps({"run": self._run, "namespace": pid_namespace(), "start": _start_of(os.getpid())}).encode()
        failpoints.point("probation.open")
        fd = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            failpoints.point("probation.write")
            os.write(fd, (bytes(_FACTS_AT) + facts).ljust(_PAGE, b"\0"))
            address = _libc.mmap(None, _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
            if address in (None, _FAILED):
                raise OSError(ctypes.get_errno(), "mmap")
            self._address = address
            failpoints.point("probation.rename")
            unseen.rename(path)
        except OSError:
            with suppress(OSError):
                unseen.unlink()
            raise
        finally:
            os.close(fd)
        return path


class _Death(NamedTuple):
    path: Path
    generation: int
    run: str
    began_s: float


def deaths(folder: Path) -> Counter[tuple[int, str]]:
    """(generation, run) -> processes that died in its kernels within TRIAL_S of taking it up."""
    return Counter((death.generation, death.run) for death in _deaths(folder))


def without(folder: Path) -> dict[tuple[int, str], float]:
    """(generation, run) -> until when, Unix seconds, for the runs that go without a generation now."""
    by_run: dict[tuple[int, str], list[_Death]] = {}
    for death in _deaths(folder):
        by_run.setdefault((death.generation, death.run), []).append(death)
    found = {key: _until_s(died) for key, died in by_run.items()}
    return {key: until_s for key, until_s in found.items() if until_s is not None and until_s > time.time()}


def _until_s(died: list[_Death]) -> float | None:
    if len(died) < DEATHS:
        return None
    step_s = STEPS_S[min(len(died) - DEATHS, len(STEPS_S) - 1)]
    return max(death.began_s for death in died) + step_s


def _deaths(folder: Path) -> list[_Death]:
    """Marks that are evidence: their processes are gone, and were in a routed call or left a GPU with a fault."""
    found = []
    for path in _marks(folder):
        try:
            page = path.read_bytes()
            state = _State.from_buffer_copy(page)
            facts = json.loads(page[_FACTS_AT:].rstrip(b"\0"))
            run = str(facts["run"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if (state.going_on or (state.launched and state.fault)) and _is_gone(path, facts):
            found.append(_Death(path, _generation(path), run, _began_s(path)))
    return found


def _is_gone(path: Path, facts: dict[str, Any]) -> bool:
    """Whether the process of a mark is no more. One that lives takes its mark away after TRIAL_S."""
    if time.time() - _began_s(path) > 2 * TRIAL_S:
        return True
    namespace = pid_namespace()
    if namespace is None or facts.get("namespace") != namespace:
        return False  # of another container or machine: only time tells
    try:
        over, start = life_of(_pid(path))
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False
    return over or start != facts.get("start")


def _start_of(pid: int) -> str:
    try:
        return life_of(pid)[1]
    except (OSError, IndexError):
        return ""


def _marks(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _MARK.fullmatch(path.name)]
    except OSError:
        return []


def _generation(path: Path) -> int:
    return _part(path, 1)


def _pid(path: Path) -> int:
    return _part(path, 2)


def _parent(path: Path) -> int:
    return _part(path, 3)


def _began_s(path: Path) -> float:
    return _part(path, 4) / 1e9


def _part(path: Path, number: int) -> int:
    found = _MARK.fullmatch(path.name)
    return int(found[number]) if found else -1
