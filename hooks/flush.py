"""Takes counts to the store: the hook's one thread drains the counters about once a second and writes the sums.

Nothing here runs on the call path, and between two flushes the process holds no descriptor, mapping or lock of the
store.  Counts that the store cannot take now (locked, full, unreachable) stay in memory, summed up and bounded, until
a later flush; the program reports that once.

A problem that is new is written with the next flush.  More calls of a problem that the store has from this process
wait for the fifth flush, or for the beat (pending.py).  A killed process loses at most one interval of new problems
and five of the others.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmtuned.configs import clock
from gemmtuned.configs.errors import GemmtunedError, StoreBusy
from gemmtuned.configs.frame_lock import FrameLock, Running
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.processes import pid_namespace
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.configs.stderr_lines import Once, tell
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.hooks import phase
from gemmtuned.hooks.as_guest import root, stay_out, streams_kept
from gemmtuned.hooks.crowd import Crowd
from gemmtuned.hooks.imports import importing, require_standard
from gemmtuned.hooks.native import HOW
from gemmtuned.hooks.pace import about, in_slices
from gemmtuned.hooks.pending import Notes, Pending, PutOff, sightings

if TYPE_CHECKING:
    from gemmtuned.db.guest import GuestStore

__builtins__ = builtins

log = logging.getLogger("gemmtuned.hooks")
WARNING: Final = logging.WARNING
BUSY_S: Final = 0.25  # how long a flush waits for the store's lock; the next flush tries again
BUSY_TOLD_S: Final = 10.0  # a store that is locked for longer is reported
BEAT_S: Final = 5.0
MIN_FLUSH_S: Final = 0.02
CHILD: Final = 0.4  # intervals until the first flush of a forked child: many end early, and without a word to us
EXIT_S: Final = 0.5  # the last flush reads counters for so long at most, and mostly takes no longer
EXIT_BUSY_S: Final = 2.0  # its limit where other programs hold the store, or there is much to write
_LATE: Final = f"the end of a program waits {EXIT_BUSY_S:g} s at most"
FORK_S: Final = 2.0  # how long a fork waits for a flush: the first one of a process creates a database
STUCK_S: Final = 0.05  # how long later forks wait for the same flush: its disk, or file server, does not answer

T = TypeVar("T")
_root = root()  # as the hook began
_no_store = ""  # why this process, and all that it forks, must never touch SQLite


class Flusher:
    """Takes sightings from `drain` to the store.

    drain: yields what was counted since its last call.  set_aside: takes the name of a phase that ends now, for
    what was counted until now; an exception that ends it loses nothing.  environment: of a place (`cpu`, `cuda:0`);
    where it raises, the counts of that place are dropped.  session: a fresh snapshot for `gemmtuned status`.  tick:
    housekeeping, called before each flush.  compiled: yields (problem, kernel, place) of GEMMs that torch.compile has
    turned into kernels since its last call.  unserved: yields (problem, engine's operator, place, generation of the
    table) of calls that wait for a race beside the engine's kernel.  is_child: of a forked process.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        drain: Callable[[], Iterable[Sighting]],
        set_aside: Callable[[str], None],
        environment: Callable[[str], Environment],
        session: Callable[[], Session],
        tick: Callable[[], None],
        keep: bool,
        compiled: Callable[[], Iterable[tuple[Problem, str, str]]] = tuple,
        unserved: Callable[[], Iterable[tuple[Problem, str, str, int]]] = tuple,
        is_child: bool = False,
    ) -> None:
        self._settings, self._environment, self._session = settings, environment, session
        self._drain, self._set_aside = drain, set_aside
        self.run = settings.run  # the label under which calls are counted
        self._tick, self._keep = tick, keep
        self._store: GuestStore | None = None
        self._pending, self._compiled, self._unserved = Pending(settings.flush_s), Notes(compiled), Notes(unserved)
        self._quarantine: list[tuple[Solution, str, str]] = []
        self._unsaid: Session | None = None  # our row, to be written with the next batch of counts
        self._draining = FrameLock()  # held by a drain or a phase change; a signal handler may start a second one
        self.hurried = False  # a thread of the program is waiting for the current drain to end
        self._lock = FrameLock()  # one flush at a time: of our thread, or of a program's where ours does not run
        self._due_s = clock.monotonic() + _pause_s(settings) * (CHILD if is_child else 1.0)
        self._has_session = self.in_store = False  # our row is there; a flush is inside SQLite, not before an import
        self._next_beat_s = self._busy_since_s = 0.0  # times of clock.monotonic()
        self.calls = self.dropped = 0
        self._write_until_s = math.inf  # when the last flush must stop writing, of clock.monotonic()
        self._is_stuck = False  # a `pause` gave up on the flush that still runs
        self._is_unread = False  # the last flush had no time to read all counters
        self._crowd, self._logged = Crowd(), Once()
        self.complaint = _no_store  # why the store does not take our counts; "" when it does

    @property
    def waited_us(self) -> int:
        """How much longer this process had run, at the last beat, than it would have with the CPUs to itself."""
        return round(self._crowd.longer_s * 1e6)

    def due_s(self) -> float:
        """When the next turn is."""
        return self._due_s

    def turn(self) -> None:
        """Housekeeping and a flush, in our thread."""
        self._due_s = clock.monotonic() + _pause_s(self._settings)
        for step in (self._tick, lambda: self.flush(whole=False)):
            try:
                step()
            except Exception as err:  # noqa: PERF203  a bug of ours: the program goes on and its counts are kept
                self._complain(err)

    def stop(self, began_s: float | None = None) -> None:
        """Flush for the last time, within EXIT_S of began_s (None: now), or EXIT_BUSY_S while others hold the store.

        Counts that cannot be read and written by then are lost and reported: it takes tens of thousands of problems
        that are new at the end.
        """
        self._due_s = math.inf
        began_s = clock.monotonic() if began_s is None else began_s
        self._write_until_s = began_s + EXIT_BUSY_S
        if not self._lock.enter(max(began_s + EXIT_S - clock.monotonic(), 0.05)):
            # Another flush is running. One inside the store is worth waiting for: many programs may end together
            until_s = began_s + EXIT_BUSY_S if self.in_store else 0.0
            if not until_s or not self._lock.enter(max(until_s - clock.monotonic(), 0.0)):
                say_cut_off(EXIT_BUSY_S if until_s else EXIT_S)
                return
        try:
            while not self._flush(last=True) and clock.monotonic() + BUSY_S <= began_s + EXIT_BUSY_S:
                pass  # the store was busy: other programs end at the same moment
        except Exception as err:
            self._complain(err, aloud=False)
        finally:
            _say_lost(self._pending.calls, self._is_unread, self.complaint or _LATE)
            self._lock.leave()

    def flush(self, *, whole: bool = True) -> None:
        """Take everything counted so far to the store now, or keep it and remember why.

        whole: write more calls of known problems too, instead of waiting until they are due.
        """
        with self._lock:
            self._flush(whole=whole)

    def between_phases(self, change: Callable[[], None]) -> None:
        """Call `change`, which begins another phase, after setting aside what was counted in the one that ends."""
        self.hurried = True
        with self._draining:
            try:
                self._set_aside(phase.current())  # quick: this is the program's own thread
            finally:
                change()

    def _drained(self) -> Iterator[Sighting]:
        """What was counted since the last call, each count with its phase."""
        return self._crowd.usable(self._drain())

    def pause(self, fork: Running) -> bool:
        """Wait until no flush is going on and let none begin until the fork is over; False when that took too long.

        It is enough that no flush is inside SQLite, whose locks a child would hold for ever; a flush that is importing
        may be waiting for the very thread that forks.
        """
        until_s, looks = clock.monotonic() + (STUCK_S if self._is_stuck else FORK_S), 0
        while not self._lock.hold(fork, 0.01):
            looks = 0 if self.in_store else looks + 1
            self._is_stuck = clock.monotonic() >= until_s
            if self._is_stuck or looks > 10:
                return False
        self._is_stuck = False
        return True

    @property
    def is_at_rest(self) -> bool:
        """Whether no thread flushes, or waits to."""
        return not self._lock.is_taken

    def beat_soon(self) -> None:
        """Write the session row with the next flush: something in it has changed that people look for."""
        self._next_beat_s = 0.0

    def report_failure(self, solution: Solution, reason: str, how: str = HOW[0]) -> None:
        """Tell the daemon, with the next flush, that a published solution failed here. how: one of native.HOW."""
        self._quarantine.append((solution, reason, how))

    def _flush(self, *, last: bool = False, whole: bool = True) -> bool:
        """Flush once; False when the store was busy, so that the last flush of all should try again."""
        late = PutOff()
        with self._draining:
            if _no_store:
                self.dropped += sum(s.calls for s in self._drained())
                return True
            until_s = clock.monotonic() + (EXIT_S if last else math.inf)
            self.hurried = last
            with late:
                for s in in_slices(self._drained(), lambda: self.hurried):
                    self._remember(s)
                    self._is_unread = clock.monotonic() > until_s
                    if self._is_unread:
                        break
        for notes in (self._compiled, self._unserved):
            with late:
                notes.collect(keep=self._keep)
        beat = self._has_session if last else clock.monotonic() >= self._next_beat_s
        counts = len(self._pending) and (whole or beat or self._pending.is_due)
        is_due = self._keep and (counts or len(self._compiled) or len(self._unserved) or beat)
        try:
            if is_due or self._quarantine:
                self._write(late, beat=beat, last=last)
            late.now()
        except (GemmtunedError, OSError) as err:
            self._complain(err, aloud=not last)
            return not isinstance(err, StoreBusy)
        return True

    @streams_kept()
    def _write(self, late: PutOff, *, beat: bool, last: bool) -> None:
        now_s = clock.now_s()
        try:
            store = self._open()
            if last:
                store.at_end()
            self._unsaid = None
            with late:
                self._unsaid = self._beat() if beat and not last else None
            has_session = self._has_session or self._unsaid is not None
            is_given = _give(self, store, late, now_s)
            while self._quarantine:
                solution, reason, how = self._quarantine[0]
                self._at(store.sightings.add_quarantine, solution, reason, how=how, run=self.run, now_s=now_s)
                self._quarantine.pop(0)
            if last:
                self._at(store.sightings.end_session, self._beat(), now_s=now_s)
            elif self._unsaid is not None:
                self._at(store.sightings.beat, self._unsaid, now_s=now_s)
            if beat or last:
                self._next_beat_s, self._has_session = clock.monotonic() + BEAT_S, has_session
            self.complaint, self._busy_since_s = "" if is_given else _LATE, 0.0
        finally:
            if self._store is not None:
                self._at(self._store.close_between_uses)

    def _beat(self) -> Session:
        self._crowd.is_crowded()  # else it looks with timed calls only, which may be rare
        return self._session()

    def _open(self) -> GuestStore:
        path, locks = self._settings.counts
        stay_out(path, _root)
        if self._store is None:
            self._store = self._at(_guest_store(), path, locks=locks, timeout_s=BUSY_S)
        return self._store

    def _at(self, method: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call the store; meanwhile `in_store` tells a fork that SQLite is at work."""
        self.in_store = True
        try:
            return method(*args, **options)
        finally:
            self.in_store = False

    def _remember(self, s: Sighting) -> None:
        self.calls += s.calls
        is_kept = False
        try:
            is_kept = self._pending.add(s, self.run, keep=self._keep)
        finally:
            self.dropped += s.calls if self._keep and not is_kept else 0

    def _complain(self, err: Exception, *, aloud: bool = True) -> None:
        text = str(err) if isinstance(err, GemmtunedError) else f"{type(err).__name__}: {err}"
        self._busy_since_s = self._busy_since_s or clock.monotonic()
        if isinstance(err, StoreBusy) and clock.monotonic() - self._busy_since_s < BUSY_TOLD_S:
            aloud = False  # the next flush tries again
        if aloud and self._logged.is_new(text):
            what = "counts stay in memory" if len(self._pending) else "not all about this process is stored"
            tell(log, WARNING, "%s reason=%s", what, text)
        self.complaint = text


def _give(of: Flusher, store: GuestStore, late: PutOff, now_s: float) -> bool:
    """Write all counts and notes, and forget each batch once the store has it. False: time ran out.

    Those of a CPU that cannot be asked now wait for the next flush; what ran elsewhere does not wait for them.
    """
    is_all = True
    for place, run, counts in of._pending.batches():
        if clock.monotonic() > of._write_until_s:
            return False
        try:
            environment = _environment_of(of, place)
        except Exception as err:
            is_all = late.note(err)
            continue
        if environment is None:
            of.dropped += int(sum(sums[0] for sums in counts.values()))
        else:
            batch = sightings(counts)
            of._at(store.sightings.add, run, environment, batch, now_s=now_s, session=of._unsaid)
            of._unsaid = None
        of._pending.forget(counts, written=environment is not None)
    if is_all:
        of._pending.all_given()
    for notes, put in (
        (of._compiled, partial(store.sightings.add_compiled, of.run)),
        (of._unserved, store.sightings.add_wanted),
    ):
        notes.give(partial(_environment_of, of), partial(of._at, put, now_s=now_s), late)
    return True


def _environment_of(of: Flusher, place: str) -> Environment | None:
    """The environment of a place; None, reported once, for an unknown device or CUDA in a forked child.

    Raises what it is that a CPU cannot be asked by: it has one, and the next flush asks again.
    """
    try:
        return of._environment(place)
    except Exception as err:
        if place == "cpu":
            raise
        if of._logged.is_new(place):
            tell(log, WARNING, "counts dropped place=%s reason=%s", place, err)
        return None


def _guest_store() -> type[GuestStore]:
    with importing():
        require_standard("sqlite3")  # the only module we need that torch has not imported already
        from gemmtuned.db.guest import GuestStore

        return GuestStore


def _pause_s(settings: Settings) -> float:
    return about(max(settings.flush_s, MIN_FLUSH_S))


def say_cut_off(waited_s: float) -> None:
    """Report that the program ends before a flush has."""
    tell(log, WARNING, "counts of the last interval were lost reason=a flush did not end within %g s", waited_s)


def _say_lost(calls: int, is_unread: bool, reason: str) -> None:
    """Report lost counts. is_unread: more were lost, in counters that the last flush did not read."""
    if calls or is_unread:
        tell(log, WARNING, "counts were lost calls=%d%s reason=%s", calls, " and more" if is_unread else "", reason)


def never_again(why: str) -> None:
    """Keep this process from any store: it was forked while SQLite held locks, which nobody here can release."""
    global _no_store
    _no_store = why
    tell(log, WARNING, "counts of this process are not kept reason=%s", why)


def new_session(settings: Settings, *, path: str, started_us: int, **facts: int | str | None) -> Session:
    """The session row of this process."""
    return Session(
        host=socket.gethostname(),
        pid=os.getpid(),
        started_us=started_us,
        run=settings.run,
        path=path,
        namespace=pid_namespace(),
        **facts,  # type: ignore[arg-type]
    )
