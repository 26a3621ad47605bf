"""The one thread that the hook has in a process: it flushes counts, watches for tables and loads them.

`threading` does not know the thread, so a program may join every thread that it finds.  The thread blocks all signals
except those that its own faults raise, so signals that the program waits for reach the program.  A fork waits until
the thread sleeps, and the thread sleeps until the fork is over; that costs the program no thread switch.  A forked
child has no such thread until it counts something.

The last flush is the thread's, too: signals' handlers run in the main thread, and what they raise would cut it off.

Python 3.12 and later warn a program that forks while it has more than one thread.  If ours is the only other one, it
ends before the fork and begins again after it.
"""

from __future__ import annotations

import ctypes
import sys
from _thread import get_native_id
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_long, c_short, c_uint64, c_ulong, c_void_p
from itertools import count
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.frame_lock import FrameLock, Running
from gemmtuned.configs.stderr_lines import Once, our_thread, our_thread_ends, our_thread_is_nobody, say
from gemmtuned.configs.unpatched import allocate_lock, builtins, os, signal, sleep

if TYPE_CHECKING:
    from typing import Protocol

    from gemmtuned.hooks.native import Native

    class Part(Protocol):
        """A piece of the thread's work."""

        def due_s(self) -> float:
            """When its next turn is, of clock.monotonic()."""

        def turn(self) -> None:
            """Do what is due."""


__builtins__ = builtins

FAULTS: Final = tuple(
    getattr(signal, name) for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGABRT")
)
_LONGEST_S: Final = 3600.0
_LOOK_S: Final = 0.0005  # between two looks whether it has ended
_GONE_S: Final = 0.5  # for Linux to forget a thread that has ended
AFTER_ERROR_S: Final = 1.0  # the least time between a part's failed turn and its next one
_WARNS_OF_THREADS: Final = sys.version_info >= (3, 12)  # at a fork
_POLLIN: Final = 1
_SIGSET_BYTES: Final = 128  # in glibc and musl
_libc = ctypes.CDLL(None, use_errno=True)
_Body = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_libc.pthread_self.restype = c_ulong
_clockjoin = getattr(_libc, "pthread_clockjoin_np", None)  # glibc from 2.31 on
clock.take_from(_libc)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", c_int), ("events", c_short), ("revents", c_short))


class Sleeper:
    """Waits until it is woken or the time is over; the watcher has one that sees file events as well.

    native: the library, once it is there.  Forks by C code know whether we sleep if it is the library that we sleep in.
    """

    def __init__(self, native: Callable[[], Native | None] = lambda: None) -> None:
        self.native = native
        self.sleeps_in: Native | None = None  # once our thread has slept there, C knows whether it does
        self._seen = c_uint64()
        self._lock = allocate_lock()
        self._lock.acquire()

    def wait(self, timeout_s: float) -> None:
        """Return after timeout_s, or after `wake`."""
        self._sleep(-1, timeout_s)

    def _sleep(self, descriptor: int, timeout_s: float) -> bool:
        """As `wait`; True at once when there is something to read from the descriptor, -1 for none."""
        native = self.native()
        if native is not None:
            if native is not self.sleeps_in:
                native.thread(_BODY)  # it may have come after this thread; a forked child has C begin one
                self.sleeps_in = native
            return native.sleep(descriptor, timeout_s, self._seen)
        if descriptor >= 0:
            entry = _PollFd(descriptor, _POLLIN, 0)
            return bool(_libc.poll(byref(entry), 1, int(max(timeout_s, 0.0) * 1000) + 1) > 0)
        self._lock.acquire(True, max(timeout_s, 0.0))
        return False

    def wake(self) -> None:
        """End the current wait, or the next one if nobody waits now."""
        with suppress(RuntimeError):  # it was woken already
            self._lock.release()
        native = self.native()
        if native is not None:
            native.wake()

    def close(self) -> None:
        """Close descriptors, if the sleeper has any."""


class Fork:
    """What a fork has done to the thread. No Enum: to make one takes each program 150 us."""

    HELD: Final = "it sleeps until the fork is over"
    ENDED: Final = "it is gone, and is to begin again after the fork"
    BESIDE: Final = "it is in the middle of a turn that takes too long"


class Background:
    """The thread: each of `parts` has a turn when it is due, and `sleeper` waits in between."""

    def __init__(self, parts: Sequence[Part], sleeper: Sleeper) -> None:
        self._parts, self._sleeper = tuple(parts), sleeper
        self._state = FrameLock()  # around what follows, for moments
        self._awake = FrameLock()  # held by the thread while it does not sleep, and by a fork until it is over
        self._lives = allocate_lock()  # held from the thread's first step to its last
        self._ending = False
        self._last: Callable[[], None] | None = None  # what it does before it ends
        self._thread: int | None = None  # a pthread_t, until it is joined
        self._running = False
        self._beginning = False  # `start` has made a thread, and none has begun yet
        self._coming = False  # C begins it, or has, and it has not said so
        self._logged = Once()
        self._not_before_s: dict[Part, float] = {}  # for parts that have failed

    def start(self) -> None:
        """Start the thread, or have one that is ending go on. Raises OSError when the system gives us none."""
        with self._state:
            self._ending, self._last = False, None
            if self._running:
                return
            self._running = self._beginning = True
        try:
            self._join(1.0)  # the previous thread is about to end
            thread = _start(self.run, self._sleeper.native())
        except BaseException:
            if self._beginning:
                self._running = self._beginning = False
            raise
        with self._state:
            if self._beginning:
                self._thread = thread

    def before_fork(self, fork: Running, timeout_s: float) -> str:
        """Keep the thread asleep until the fork is over, or end it; unless its turn takes longer than we wait."""
        native = self._sleeper.native()
        if self._is_to_end and native is not None:
            native.release_gate()
        if _WARNS_OF_THREADS and self._coming:
            self._see_it_come(timeout_s)
        if _WARNS_OF_THREADS and self._running and _is_the_only_other():
            self.end(timeout_s)
            _see_it_go()
            return Fork.ENDED
        return Fork.HELD if self._awake.hold(fork, timeout_s) else Fork.BESIDE

    def _see_it_come(self, timeout_s: float) -> None:
        """Wait for the first moment of a thread that C begins: until then nobody can end it, but Python counts it."""
        until_s = clock.monotonic() + timeout_s
        while not self._running and _threads() > 1 and clock.monotonic() < until_s:
            sleep(_LOOK_S)
        self._coming = False

    def begin_again(self, native: Native | None) -> None:
        """Begin the thread that `before_fork` has ended. Raises OSError when the system gives us none."""
        if native is None or get_native_id() != os.getpid():  # C has Python's main thread begin it
            self.start()
            return
        with self._state:
            self._ending, self._last = False, None
        self._coming = True
        at_first_count(native, self.run)
        native.begin_soon()

    def end(self, timeout_s: float, last: Callable[[], None] | None = None) -> bool:
        """End the thread after its current turn, and after `last`; True when it has ended within the time."""
        with self._state:
            self._ending, self._last = True, last
        self._sleeper.wake()
        return self.has_ended(timeout_s)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, so that a signal's handler may come in between; True when it has ended."""
        until_s = clock.monotonic() + timeout_s
        while self._running and clock.monotonic() < until_s:
            if self._lives.acquire(timeout=max(until_s - clock.monotonic(), 0.0)):
                with suppress(RuntimeError):  # the thread, which began meanwhile, has ended and let go of it
                    self._lives.release()
                if self._running:  # it has not begun yet
                    sleep(_LOOK_S)
        return self._join(max(until_s - clock.monotonic(), _LOOK_S)) if not self._running else False

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._running

    @property
    def _is_to_end(self) -> bool:
        """Whether a fork may have to end it."""
        return _WARNS_OF_THREADS and (self._running or self._coming)

    def is_held(self, native: Native) -> bool:
        """Whether C has seen to it that it sleeps until the fork that this thread makes is over, and that is enough."""
        return native is self._sleeper.sleeps_in and not self._is_to_end and native.is_held()

    def _join(self, timeout_s: float) -> bool:
        thread, self._thread = self._thread, None  # a handler's exception must not have it joined a second time
        if thread is None:
            return not self._running
        now_ns = round(clock.monotonic() * 1e9) if _clockjoin is not None else clock.now_ns()
        until = byref(_Timespec(*divmod(now_ns + int(timeout_s * 1e9), 10**9)))
        if _clockjoin is not None:  # a wall clock that is set back would have us wait for as long
            code = _clockjoin(c_ulong(thread), None, c_int(clock.MONOTONIC), until)
        else:
            code = _libc.pthread_timedjoin_np(c_ulong(thread), None, until)
        if code:
            self._thread = thread
        return not code

    def run(self) -> None:
        """The body of the thread, whether Python or C has started it."""
        with self._state:
            if self._running and not self._beginning:  # `start` and C have both made one: the first has begun
                _libc.pthread_detach(c_ulong(_libc.pthread_self()))
                return
            self._thread, self._running, self._beginning = _libc.pthread_self(), True, False
            self._lives.acquire(blocking=False)  # a handler's exception may have left it held by who waited
            self._coming = False
        our_thread()
        try:
            while True:
                try:
                    if self._ended():
                        return
                except BaseException as err:  # noqa: PERF203  a tracer's may come before the first step of any function
                    sleep(AFTER_ERROR_S)
                    with suppress(BaseException):
                        self._failed(err)
        finally:
            our_thread_ends()

    def _ended(self) -> bool:
        """One round: turns, and a sleep. True when the thread is to end. What fails here must not end it."""
        try:
            with self._awake:
                due_s = clock.monotonic() + _LONGEST_S
                for part in self._parts:
                    if self._due_s(part) <= clock.monotonic() and not self._ending:
                        self._turn(part)
                    due_s = min(due_s, self._due_s(part))
                if self._ends():
                    return True
            self._sleeper.wait(due_s - clock.monotonic())
        except BaseException as err:
            self._failed(err)
            sleep(AFTER_ERROR_S)
        return not self._running

    def _ends(self) -> bool:
        """Whether it is to end now; if so, after what it was to do last."""
        last, self._last = self._last, None
        if self._ending and last is not None:
            try:
                last()
            except BaseException as err:
                self._failed(err)
        with self._state:
            if self._ending and self._last is None:
                self._sleeper.close()
                self._running = False
                with suppress(RuntimeError):
                    self._lives.release()
            return not self._running

    def _due_s(self, part: Part) -> float:
        return max(part.due_s(), self._not_before_s.get(part, 0.0))

    def _turn(self, part: Part) -> None:
        try:
            part.turn()
            our_thread_is_nobody()
        except BaseException as err:  # also SystemExit: it would end the thread, and nobody would know
            self._not_before_s[part] = clock.monotonic() + AFTER_ERROR_S
            self._failed(err)

    def _failed(self, err: BaseException) -> None:
        with suppress(Exception):  # where memory is short, for its words as well
            text = f"{type(err).__name__}: {err}"
            if self._logged.is_new(text):
                say(f"an error of ours, the program runs on: {text}")


_FIRST: Final = 0
_tickets = count(_FIRST + 1)
_to_run: dict[int, Callable[[], None]] = {}  # by ticket, in threads that have not begun yet
_notice: list[Callable[[], object]] = []  # see `notices_forks`


def notices_forks(notice: Callable[[], object]) -> None:
    """Have the thread that C begins with the first count of a forked child call this first: Python may not know yet."""
    _notice[:] = [notice]


def in_late_child(run: Callable[[], None]) -> None:
    """As `at_first_count`, for a forked child that has counted already, or not: C knows."""
    _to_run[_FIRST] = run


def at_first_count(native: Native, run: Callable[[], None] | None) -> bool:
    """Run this in a thread of its own with the next problem that is new; None: do not.

    True when an earlier one has not run: no problem was new since.
    """
    if run is None:
        not_yet = native.at_first_count(None)
        _to_run.pop(_FIRST, None)
        return not_yet
    _to_run[_FIRST] = run
    return native.at_first_count(_BODY)


def _begin(ticket: int | None) -> int:
    for notice in _notice if not ticket else ():  # first: what is in `_to_run` may be the parent's
        notice()
    run = _to_run.pop(ticket or _FIRST, None)
    if run is None:  # its hook was switched off before it came to run
        with suppress(Exception):  # an audit hook of the program's may forbid it; Python would print a traceback
            _libc.pthread_detach(c_ulong(_libc.pthread_self()))
    else:
        run()
    return 0


_BODY: Final = _Body(_begin)  # for the life of the process: threads return through it when their hook is long gone


def _is_the_only_other() -> bool:
    """Whether this process has no thread but the calling one and ours."""
    return _threads() <= 2


def _see_it_go() -> None:
    """Wait until Linux counts our thread no more, which is a moment after whoever joins it goes on."""
    until_s = clock.monotonic() + _GONE_S
    while _threads() > 1 and clock.monotonic() < until_s:
        sleep(_LOOK_S / 5)


def _threads() -> int:
    """How many this process has; 0 where /proc does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _start(run: Callable[[], None], native: Native | None) -> int:
    """A thread that calls `run`, with the host's signals blocked from its first moment."""
    ticket = next(_tickets)
    _to_run[ticket] = run
    body = _BODY if native is None else c_void_p(native.thread(_BODY))
    blocked, before = (ctypes.create_string_buffer(_SIGSET_BYTES) for _ in range(2))
    _libc.sigfillset(blocked)
    for number in FAULTS:
        _libc.sigdelset(blocked, c_int(number))
    thread = c_ulong()
    _libc.pthread_sigmask(signal.SIG_SETMASK, blocked, before)
    try:
        code = _libc.pthread_create(byref(thread), None, body, c_void_p(ticket))
    finally:
        _libc.pthread_sigmask(signal.SIG_SETMASK, before, None)
    if code:
        _to_run.pop(ticket, None)
        raise OSError(code, f"no thread to be had: {os.strerror(code)}")
    return thread.value
