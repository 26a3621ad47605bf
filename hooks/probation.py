"""A new table is on probation: when programs die in its kernels soon after taking it up, others start without it.

A routed kernel can kill its process where no exception can be caught.  So the first routed call of a process under a
new table makes a page, `GENERATION-PID-PARENT-TIME`, in /dev/shm (native/probation_page.h); as long as a routed call is
going on, a number in that page says so, and the page stays when the process dies.  A forked child makes its own.  The
process takes its page away when it ends in good order, or after TRIAL_S: then the table has proved itself, and earlier
deaths under it are forgotten.

Only evidence counts: a page of a dead process that was in a routed call, or that ran kernels of the table on a GPU and
left it with a fault that a broken kernel makes (an illegal address or instruction; the driver says so at the end, and
at every launch).  A program that ends by an exception of its own, os._exit, an assertion in its own kernel or a signal
that comes while no routed call is going on has died of something else.  Evidence is taken into the home,
`probation/`, by the next who looks: the parent of a worker within a second, of very many within some, else the next
start.  After DEATHS of one run it goes without the generation, for STEPS_S, and so does a parent that would fork the
next worker.  Then a start tries it again, and if that dies too, the next wait is longer.  The next generation starts
anew.

Nothing here raises: where no page can be had there is no probation.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs import clock
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.human_units import moment
from gemmtuned.configs.open_files import make_folders, open_to_owner
from gemmtuned.configs.pattern import Pattern
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.read_file import read_regular
from gemmtuned.configs.temporary import temporary_path
from gemmtuned.configs.unpatched import os

TRIAL_S: Final = 60.0
DEATHS: Final = 2
_LOOK_SHARE: Final = 0.01  # share of time for looks at marks: each reads all, and each of many workers looks
STEPS_S: Final = (600.0, 3600.0, 86400.0)  # how long a run goes without, by how many more deaths there were
_MARK: Final = Pattern(r"(\d{1,18})-(\d+)-(\d+)-(\d{1,19})")
MOST_BYTES: Final = 1 << 20  # per page
_FACTS_AT: Final = 16  # before it: _State
_LONGEST: Final = 256  # bytes of a run's label that count
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  a folder of our own in it, which nobody else may write


class _State(ctypes.Structure):
    """The beginning of the page: `ProbationPage` of native/probation_page.h."""

    _fields_ = (
        ("going_on", ctypes.c_int32),
        ("launched", ctypes.c_uint32),
        ("fault", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class Pages(Protocol):
    """Who makes the page of this process: `Native`."""

    def begin_probation(self, folder: Path, generation: int, facts: bytes, namespace: int) -> None:
        """Have the next routed call make a page."""

    def end_probation(self, *, keep: bool) -> None:
        """Note nothing any more, and take the page away."""

    def probation_page(self, *, make: bool = False) -> int | None:
        """The address of the page; None while there is none."""


class Probation:
    """What this process knows of the marks of a home, `folder`; `run` is the label under which deaths are counted.

    pages: who makes the page; without one, nothing is routed.
    """

    def __init__(self, folder: Path, run: str, pages: Pages | None = None) -> None:
        self._folder, self._run = folder, run.encode(errors="replace")[:_LONGEST].decode(errors="replace")
        self.pages = pages
        self.generation: int | None = None  # that is on probation here
        self._taken_up_s = 0.0  # Unix time
        self._routes_since_s: float | None = None  # by a clock that only grows; None while nothing was routed
        self._look_s = 0.0  # when the marks of others may be looked at again, of that clock
        self._lock = FrameLock()  # around every change of them

    def refuses(self, generation: int) -> bool:
        """Whether processes of this run died of it, DEATHS of them, and it is not yet time to try it again."""
        until_s = self.until_s(generation)
        return until_s is not None and clock.now_s() < until_s

    def until_s(self, generation: int) -> float | None:
        """Until when (Unix seconds) this run goes without the generation; None when too few have died of it."""
        _collect(self._folder)
        return _until_s([d for d in _deaths(self._folder) if d.generation == generation and d.run == self._run])

    def note(self, generation: int) -> str:
        """What to tell the user about a refused generation."""
        until = moment(self.until_s(generation) or 0, clock.now_s())
        return (
            f"generation {generation} is not used before {until}: processes of this run died in its kernels within "
            f"{TRIAL_S:g} s of taking it up. The next publish is tried at once; to try this one now: "
            f"rm {files_of(self._folder, generation)}"
        )

    def begin(self, generation: int) -> None:
        """This process is about to use the table of this generation."""
        with self._lock:
            self._end()
            if self.pages is not None:
                namespace = pid_namespace()
                facts = json.dumps({"run": self._run, "namespace": namespace})[:-1] + ', "start": '
                inode = int(namespace.rpartition(" ")[2]) if namespace is not None else 0
                self.pages.begin_probation(pages_of(self._folder), generation, facts.encode(), inode)
                self.generation, self._taken_up_s, self._routes_since_s = generation, clock.now_s(), None
        for path in _marks(self._folder):
            if _generation(path) < generation:
                with suppress(OSError):
                    path.unlink()

    def give_up(self) -> None:
        """The table on probation is not used any more."""
        with self._lock:
            self._end()

    def turn(self, now_s: float) -> bool:
        """Called now and then: TRIAL_S after its first routed call the table has proved itself. now_s: only grows.

        True where it was time for a look at the marks of others, so that `refuses` may be asked as well.
        """
        with self._lock:
            generation = self.generation
            if generation is None:
                return False
            if self._routes_since_s is None and self._state() is not None:
                self._routes_since_s = now_s
            proved = self._routes_since_s is not None and now_s - self._routes_since_s >= TRIAL_S
            if proved:
                self._end()
        if not proved and now_s < self._look_s:
            return False
        began_s = clock.monotonic()
        _collect(self._folder)
        for death in _deaths(self._folder) if proved else ():
            if death.generation == generation and death.run == self._run and death.began_s < self._taken_up_s:
                with suppress(OSError):
                    death.path.unlink()
        self._look_s = now_s + 3 * (clock.monotonic() - began_s) / _LOOK_SHARE  # `refuses` takes twice as long
        return True

    def has_launched(self) -> bool:
        """Whether the table on probation has run a kernel on a GPU."""
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
        error = getattr(sys, "last_value", None)  # what ends it; set once the traceback is out, before exit handlers
        with self._lock:
            state = self._state()
            self._end(keep=state is not None and bool(state.launched and state.fault))
        if error is None or isinstance(error, KeyboardInterrupt):  # it has ended itself the workers that it started
            here = pid_namespace()
            for path in _marks(pages_of(self._folder)):
                if _parent(path) == os.getpid() and _is_of(path, here):
                    with suppress(OSError):
                        path.unlink()
        with suppress(OSError):  # empty, and so is the one above
            pages_of(self._folder).rmdir()
            pages_of(self._folder).parent.rmdir()

    def after_fork(self) -> None:
        """In a forked child: the page is the parent's, and probation begins anew with the child's first routed call."""
        self._lock = FrameLock()
        self._taken_up_s, self._routes_since_s = clock.now_s(), None

    def _state(self) -> _State | None:
        """What our page says; None without one. The lock is held."""
        address = self.pages.probation_page() if self.pages is not None and self.generation is not None else None
        return _State.from_address(address) if address else None

    def _end(self, *, keep: bool = False) -> None:
        """Take our mark away, unless it is to be kept. The lock is held."""
        if self.generation is not None and self.pages is not None:
            self.pages.end_probation(keep=keep)
        self.generation = None


class _Death(NamedTuple):
    path: Path
    generation: int
    run: str
    began_s: float


def pages_of(folder: Path) -> Path:
    """Where processes make their pages whose marks are taken into `folder`."""
    name = sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    return _MEMORY / f"gemmtuned-{os.geteuid()}" / name


def files_of(folder: Path, generation: int) -> str:
    """The marks of a generation as a shell names them."""
    there = [where for where in (folder, pages_of(folder)) if any(_generation(m) == generation for m in _marks(where))]
    return " ".join(f"{where}/{generation}-*" for where in there or [folder])


def deaths(folder: Path) -> Counter[tuple[int, str]]:
    """(generation, run) -> processes that died in its kernels within TRIAL_S of taking it up."""
    return Counter((death.generation, death.run) for death in _deaths(folder))


def without(folder: Path) -> dict[tuple[int, str], float]:
    """(generation, run) -> until when, Unix seconds, for the runs that go without a generation now."""
    by_run: dict[tuple[int, str], list[_Death]] = {}
    for death in _deaths(folder):
        by_run.setdefault((death.generation, death.run), []).append(death)
    found = {key: _until_s(died) for key, died in by_run.items()}
    return {key: until_s for key, until_s in found.items() if until_s is not None and until_s > clock.now_s()}


def _until_s(died: list[_Death]) -> float | None:
    if len(died) < DEATHS:
        return None
    step_s = STEPS_S[min(len(died) - DEATHS, len(STEPS_S) - 1)]
    return max(death.began_s for death in died) + step_s


def _deaths(folder: Path) -> list[_Death]:
    """What has been taken into the folder, and pages that are evidence and wait for it."""
    found = []
    here = pid_namespace()
    for path in (*_marks(folder), *_marks(pages_of(folder))):
        mark = _read(path)
        if mark is not None and mark.evidence and (path.parent == folder or _is_gone(path, mark.facts, here)):
            found.append(_Death(path, _generation(path), mark.facts["run"], _began_s(path)))
    return found


def _collect(folder: Path) -> None:
    """Take pages of the dead into the folder, as far as they are evidence; the others go."""
    here = pid_namespace()
    for path in _marks(pages_of(folder)):
        mark = _read(path)
        if mark is None or not _is_gone(path, mark.facts, here):
            continue
        with suppress(OSError):
            if mark.evidence:
                make_folders(folder)
                unseen = temporary_path(folder / path.name)
                try:
                    failpoints.point("probation.write")
                    unseen.write_bytes(mark.text)
                    open_to_owner(unseen)
                    failpoints.point("probation.rename")
                    unseen.replace(folder / path.name)
                finally:
                    unseen.unlink(missing_ok=True)
            path.unlink()


class _Mark(NamedTuple):
    """What a process has left: of a page, or of a file that one was made into."""

    evidence: bool  # it was in a routed call, or had left a GPU with a fault
    facts: dict[str, Any]
    text: bytes


def _read(path: Path) -> _Mark | None:
    """None where it cannot be read, or is not ours: others may write in /dev/shm."""
    try:
        if not _is_ours(path.parent):
            return None
        text = read_regular(path, MOST_BYTES).rstrip(b"\0")
        state, facts = _State.from_buffer_copy(text.ljust(_FACTS_AT, b"\0")), json.loads(text[_FACTS_AT:])
        evidence = state.going_on > 0 or bool(state.launched and state.fault)
        return _Mark(evidence, facts, text) if isinstance(facts["run"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_ours(folder: Path) -> bool:
    """Whether the folder is no one's but ours, if it is one of pages."""
    if folder.parent.parent != _MEMORY:
        return True
    facts = folder.parent.lstat()
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _is_gone(path: Path, facts: dict[str, Any], here: str | None) -> bool:
    """Whether the process of a mark is no more. One that lives takes its mark away after TRIAL_S of routed calls.

    here: our own namespace.
    """
    if here is None or facts.get("namespace") != here:  # another container's or machine's: only time tells
        return clock.now_s() - _began_s(path) > 2 * TRIAL_S
    try:
        over, start = life_of(_pid(path))
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False
    return over or start != facts.get("start")


def _is_of(path: Path, namespace: str | None) -> bool:
    """Whether a mark is of this PID namespace, so that the numbers in its name are those of processes here."""
    mark = _read(path)
    return mark is not None and mark.facts.get("namespace") == namespace


def _marks(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        names = os.listdir(folder)
        yield from (folder / name for name in names if _MARK.fullmatch(name))


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
