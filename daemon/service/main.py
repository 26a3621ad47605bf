"""The loops around `Daemon.turn`: the service with its lock and signals, and tuning in the foreground.

A daemon that is told to stop ends within two seconds, whatever its worker is doing, but where its disk takes long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import (
    GemmtunedError,
    StoreBusy,
    StoreError,
    StoreInterrupted,
    TryLater,
    WorkerFailed,
)
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings, unknown_variables
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.daemon.device.devices import Monitor, find_monitors
from gemmtuned.daemon.seats.left_out import Pieces
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.seat import MAX_STARTS
from gemmtuned.daemon.seats.worker import Deadlines, Tuner, Worker
from gemmtuned.daemon.service.ahead import Ahead
from gemmtuned.daemon.service.lookout import Lookout
from gemmtuned.daemon.service.only_one import AnotherRuns, OnlyDaemon, only_daemon
from gemmtuned.daemon.service.rules import Rules
from gemmtuned.daemon.service.sd_notify import ServiceManager
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.daemon.service.signals import StopSignal, signals
from gemmtuned.daemon.watch.server import Watch

if TYPE_CHECKING:
    from gemmtuned.daemon.service.metrics import Metrics
    from gemmtuned.db.store import State, Store

logger = logging.getLogger("gemmtuned.daemon")
STORE_WAIT_S: Final = 0.5  # the longest wait for the store in a turn, which must leave a device in time
REMEMBERED: Final = 500  # problems kept in memory: more would keep what a publication used from being freed
WAIT_S: Final = 30.0  # how long a foreground run waits for others who hold the database
OPEN_WAIT_S: Final = 30.0  # how long a start waits for somebody who may be migrating the database
UNTRIED: Final = "interrupted before it was tried"
MakeWorker = Callable[[str], Tuner]


def run_daemon(
    settings: Settings,
    *,
    once: bool = False,
    wait_s: float | None = None,
    monitors: Sequence[Monitor] | None = None,
    make_worker: MakeWorker = Worker,
    rules: Rules | None = None,
    metrics: Metrics | None = None,
    compile_ahead: bool = True,
) -> int:
    """Tune on idle devices until told to stop; returns the exit code (0, 129, 130 or 143).

    once: end when every captured problem has a verdict or has failed for good, and all that somebody asked for was
    raced again.  wait_s: raise TryLater when no device was idle for so long while there was work.  rules: what the
    operator allows.  metrics: updated at each turn.  compile_ahead: compile kernels for GPUs that others use.

    With `once` it raises TryLater when another daemon is running, when the budget is spent before the work is done, or
    when nothing could be published for WAIT_S with nothing else to do; and WorkerFailed when no worker can be started.
    Without `once` another running daemon is reported and is no failure.
    """
    with signals() as stop:
        try:
            manager = ServiceManager()
            with only_daemon(settings) as lock, _store(settings, stop, manager) as store:
                seats = find_monitors() if monitors is None else monitors
                daemon = Daemon(
                    settings,
                    store,
                    seats,
                    make_worker,
                    now_s=time.time(),
                    rules=rules,
                    recheck=True,
                    only_asked=once,
                    ahead=Ahead(without=settings.without) if compile_ahead else None,
                )
                for name, meant in unknown_variables().items():
                    logger.warning("unknown variable name=%s meant=%s", name, meant or "unknown")
                manager.ready("looking for an idle device")
                _patiently(daemon.resume, stop)
                logger.info("started pid=%d home=%s idle_s=%g", os.getpid(), settings.home, settings.idle_s)
                listeners = _Listeners(settings, manager, metrics)
                with Lookout(daemon, stop, lambda: listeners.alive(daemon)) as lookout:
                    return _loop(daemon, lock, stop, listeners, lookout, once=once, wait_s=wait_s)
        except AnotherRuns as err:
            if once:
                raise TryLater(str(err)) from err
            logger.warning("nothing to do reason=%r", str(err))
            manager.not_started(str(err))
            return 0


@dataclass(frozen=True)
class Tuned:
    """The outcome of a foreground run: for each problem asked for a solution in use, or why there is none."""

    solutions: dict[Problem, Solution] = field(default_factory=dict)
    failed: dict[Problem, str] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)  # the devices it ran on, by key
    earlier: frozenset[Problem] = frozenset()  # problems whose solution was found by an earlier run
    unpublished: frozenset[Problem] = frozenset()  # torch was best of the few candidates asked for: no verdict
    put_off: dict[Problem, str] = field(default_factory=dict)  # problem -> why no times could be taken now
    code: int = 0  # 129, 130 or 143 when it was interrupted
    others: float = 0.0  # the largest share of a device that other programs used meanwhile
    crowded: int = 0  # verdicts measured beside so many others that a daemon measures them again
    trouble: str = ""  # why the tables or the database could not be written, so that programs use older ones

    @property
    def untried(self) -> frozenset[Problem]:
        """The problems in `failed` that were never begun."""
        return frozenset(problem for problem, why in self.failed.items() if why == UNTRIED)

    def and_then(self, other: Tuned) -> Tuned:
        """The outcome of this run and a later one together."""
        return Tuned(
            {**self.solutions, **other.solutions}, {**self.failed, **other.failed}, {**self.devices, **other.devices},
            self.earlier | other.earlier, self.unpublished | other.unpublished, {**self.put_off, **other.put_off},
            self.code or other.code, max(self.others, other.others), self.crowded + other.crowded,
            other.trouble or self.trouble,
        )  # fmt: skip


def tune_now(
    request: Request,
    settings: Settings,
    *,
    idle: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    monitors: Sequence[Monitor] | None = None,
    make_worker: MakeWorker | None = None,
) -> Tuned:
    """Tune what is asked for now and publish it, including problems that no program has called yet.

    Each verdict is stored, published and reported through the request at once, so that an interrupt loses none.
    idle: wait for an idle device as the daemon does.  progress(done, total, doing) is called as the run goes on.
    Raises WorkerFailed when no worker can be started.  A running daemon sees the device busy and gives way.
    """
    wanted = list(dict.fromkeys(request.problems))
    if not request.open():
        return Tuned(failed=request.refused)
    if make_worker is None:
        deadlines = None if request.timeout_s is None else Deadlines(timeout_s=request.timeout_s)
        make_worker = partial(Worker, nice=19 if idle else 0, deadlines=deadlines, pieces=Pieces.of(settings))
    with signals() as stop, _store(settings, stop) as store:
        began_s = time.time()
        daemon = Daemon(
            settings, store, monitors or find_monitors(), make_worker, now_s=began_s, request=request,
            always=not idle, quiet=True,
        )  # fmt: skip
        _patiently(daemon.resume, stop, WAIT_S)
        _patiently(lambda now_s: store.resume.retry_now(wanted), stop, WAIT_S)
        try:
            with Lookout(daemon, stop) as lookout:
                states, others = _until_done(daemon, request, wanted, stop, lookout, progress)
        finally:
            daemon.stop(time.time())
            with contextlib.suppress(StoreError):  # the daemon shall not tune what an interrupt left untried
                store.leases.unask(request.open(), since_s=began_s)
        environment = next((seat.environment for seat in daemon.seats if seat.environment is not None), None)
        return replace(
            _results(store, request, wanted, environment, states, stop.code),
            others=others,
            crowded=len(request.crowded),
            trouble=daemon.trouble,
        )


def _loop(
    daemon: Daemon,
    lock: OnlyDaemon,
    stop: StopSignal,
    listeners: _Listeners,
    lookout: Lookout,
    *,
    once: bool,
    wait_s: float | None,
) -> int:
    code = 1
    try:
        while not stop.code:
            now_s = time.time()
            lock.mind()
            with lookout.turn():
                daemon.turn(now_s)
            listeners.tell(daemon, now_s)
            if once:
                if daemon.is_finished(now_s):
                    logger.info("finished solved=%d", daemon.solved)
                    break
                _raise_if_hopeless(daemon)
                if daemon.held_up_s(now_s) > WAIT_S:
                    raise TryLater(daemon.trouble)
                if daemon.rules.is_spent(now_s):
                    raise TryLater(f"{daemon.rules.why_not(now_s, daemon.settings.home)}, and problems still wait")
            if wait_s is not None and now_s - daemon.last_used_s > wait_s:
                raise TryLater(
                    f"no device was idle for {wait_s:g} s ({daemon.busiest()}). Wait for quieter times with --wait-s, "
                    "or lower GEMMTUNED_IDLE_S where they are short"
                )
            stop.wait(daemon.pause_s, daemon.sockets())
        code = stop.code
        return code
    except AnotherRuns:
        code = TryLater.exit_code if once else 0
        raise
    except GemmtunedError as err:
        code = err.exit_code
        raise
    finally:
        listeners.stopping()
        daemon.stop(time.time())
        logger.info("stopped exit_code=%d solved=%d", code, daemon.solved)


class _Listeners:
    """What is notified after each turn: systemd, Prometheus, `gemmtuned top`."""

    def __init__(self, settings: Settings, manager: ServiceManager, metrics: Metrics | None) -> None:
        self._manager = manager
        self._metrics = metrics
        self._watch = Watch(settings.home, settings.db)

    def tell(self, daemon: Daemon, now_s: float) -> None:
        notice, solved = daemon.last_notice, daemon.take_solved()
        if notice is None:
            return
        self.alive(daemon)
        self._watch.tell(notice, used_today_s=daemon.rules.used_s(now_s))
        if self._metrics is not None:
            self._metrics.tell(notice, used_today_s=daemon.rules.used_s(now_s))
            self._metrics.solved(solved)

    def alive(self, daemon: Daemon) -> None:
        """The sign of life alone, from any thread."""
        if (notice := daemon.last_notice) is not None:
            self._manager.alive(time.monotonic(), f"{notice.state}: {notice.reason}" if notice.reason else notice.state)

    def stopping(self) -> None:
        self._manager.stopping()
        self._watch.close()


def _until_done(
    daemon: Daemon,
    request: Request,
    wanted: list[Problem],
    stop: StopSignal,
    lookout: Lookout,
    progress: Callable[[int, int, str], None] | None,
) -> tuple[dict[Problem, State], float]:
    """(state of each problem, the largest share of the device that others used while we did)."""
    states: dict[Problem, State] = {}
    others = 0.0
    until_s = time.monotonic() + WAIT_S
    while not stop.code:
        now_s = time.time()
        with lookout.turn():
            daemon.turn(now_s)
        _raise_if_hopeless(daemon)
        seat = daemon.seats[0]
        if not seat.store_trouble:
            until_s = time.monotonic() + WAIT_S
        elif time.monotonic() > until_s:
            raise TryLater(seat.store_trouble)
        if seat.environment is not None:
            with contextlib.suppress(StoreError):  # asked again at the next turn
                states = daemon.store.resume.states(wanted, seat.environment, now_s=now_s)
        ended = {"failed", "waiting", "untunable"} | (set() if request.again else {"solved"})
        done = sum(1 for p in wanted if p in request.settled or (p in states and states[p].state in ended))
        notice = seat.notice()
        if notice.state == "tuning":
            others = max(others, notice.others or 0.0)
        if progress is not None:
            progress(done, len(wanted), " ".join(filter(None, (notice.problem, notice.candidate))) or notice.reason)
        if done == len(wanted) and seat.at_rest:
            break
        stop.wait(daemon.pause_s, daemon.sockets())
    return states, others


def _results(
    store: Store,
    request: Request,
    wanted: list[Problem],
    environment: Environment | None,
    states: dict[Problem, State],
    code: int,
) -> Tuned:
    failed = {}
    solutions = {}
    live: dict[tuple[Problem, str], Solution] = {}
    if environment is not None:
        for solution in store.solutions.published([environment.device.key])[1]:
            if environment.accepts(solution.backend, solution.stamp):
                live[solution.problem, solution.covers] = solution
    for problem in wanted:
        keys = ((problem.filed(covers), covers) for covers in COVERS)
        if problem in request.put_off:
            continue
        found = request.found.get(problem) or next((live[key] for key in keys if key in live), None)
        if found is not None and (problem in request.settled or not request.again):
            solutions[problem] = found
        else:
            failed[problem] = request.refused.get(problem) or _why_none(states.get(problem))
    devices = {} if environment is None else {environment.device.key: environment.device}
    earlier = frozenset(problem for problem in solutions if problem not in request.settled)
    return Tuned(solutions, failed, devices, earlier, frozenset(request.unpublished), dict(request.put_off), code)


def _why_none(state: State | None) -> str:
    """Why a problem has no verdict at the end of a run."""
    if state is not None and state.state == "leased":
        return "interrupted while it was being tuned"
    if state is None or (state.state == "queued" and not state.reason):
        return UNTRIED
    return state.reason or state.state


def _raise_if_hopeless(daemon: Daemon) -> None:
    for seat in daemon.seats:
        if seat.keeper.failed_starts >= MAX_STARTS:
            raise WorkerFailed(
                f"no worker can be started on {seat.monitor.name}: {seat.keeper.trouble}. Try: gemmtuned doctor"
            )


def _patiently(action: Callable[[float], object], stop: StopSignal, wait_s: float = float("inf")) -> None:
    """Call `action` until the store lets it succeed, or a signal comes; raises its StoreError after wait_s."""
    until_s = time.monotonic() + wait_s
    said = ""
    while not stop.code:
        try:
            action(time.time())
            return
        except StoreError as err:
            if time.monotonic() > until_s:
                raise
            if str(err) != said:
                logger.warning("store not ready, tried again reason=%r", str(err))
            said = str(err)
        stop.wait(1.0, [])


@contextlib.contextmanager
def _store(settings: Settings, stop: StopSignal, manager: ServiceManager | None = None) -> Iterator[Store]:
    from gemmtuned.db.store import Store

    def beat() -> None:
        """Called while a damaged database is rebuilt, which takes a minute for a year of counts."""
        if manager is not None:
            manager.busy(time.monotonic(), "salvaging the database")
        if stop.code:
            raise StoreInterrupted(f"{settings.db}: stopped by a signal; the file is as it was, the next start goes on")

    until_s = time.monotonic() + OPEN_WAIT_S
    while True:
        try:
            store = Store(settings.db, locks=settings.locks, timeout_s=STORE_WAIT_S, beat=beat, remembered=REMEMBERED)
            break
        except StoreBusy:
            if stop.code or time.monotonic() > until_s:
                raise
    try:
        yield store
    finally:
        store.close()
