"""A device on a node of somebody's cluster, lent to us: units come one at a time, and nothing stays behind.

The same seat, worker and search as the daemon's, with a store of its own in a folder that goes when the bench is
closed.  A candidate that hangs or kills its worker therefore costs here what it costs a daemon: one candidate.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.configs.shipped import shipped
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.daemon.device.device_lock import Lock
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.seat import MAX_STARTS, Seat
from gemmtuned.daemon.seats.work_queue import WorkQueue, owner_name
from gemmtuned.daemon.seats.worker import Tuner
from gemmtuned.daemon.service.check import ready
from gemmtuned.db.store import Store
from gemmtuned.fleet.demand import Wanted

TURN_S: Final = 0.1
ENDED: Final = {"failed", "waiting", "untunable", "solved"}


@dataclass(frozen=True)
class Answer:
    """What became of a unit. state: solved, failed, put off (its times cannot be taken now).

    reason: why it is not solved.  measured, trials: as fleet/record.py keeps them.  took_s: device time.
    """

    name: str
    state: str
    reason: str = ""
    environment: Environment | None = None
    solutions: tuple[Solution, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    trials: tuple[Mapping[str, Any], ...] = ()
    took_s: float = 0.0


class Bench:
    """See the module. folder: for its store. Raises WorkerFailed when no worker can be started.

    lock: tells daemons on this node that the device is in use.
    """

    def __init__(
        self, monitor: Monitor, folder: Path, make_worker: Callable[[str], Tuner], *, lock: Lock | None = None
    ) -> None:
        self._monitor = monitor
        self._make_worker = make_worker
        self._lock = lock
        if lock is not None:
            lock.take()
        self._spare: Tuner | None = ready(partial(make_worker, monitor.id))
        assert self._spare.environment is not None
        self.environment = self._spare.environment
        self._owner = owner_name()
        self._store = Store(folder / "bench.db", locks=folder)
        hints = shipped(monitor.device.arch)
        if hints:
            self._store.hints.add(hints, source="shipped with gemmtuned", now_s=time.time())

    def tune(self, wanted: Wanted) -> Answer:
        """Search one unit. Raises WorkerFailed when no worker can be started any more."""
        began_s = time.monotonic()
        called = [Sighting(problem, "miss", calls) for problem, calls in wanted.sizes.items()]
        self._store.sightings.add("fleet", self.environment, called, now_s=time.time())
        request = Request(problems=list(wanted.sizes))
        queue = WorkQueue(self._store, self._owner, request=request, conditions=self._monitor.conditions)
        seat = Seat(self._monitor, queue, self._worker, window_s=0.0, always=True)
        try:
            reason = self._until_over(seat, request)
            self._spare, seat.keeper.worker = seat.keeper.worker, None  # it stays for the next unit
        finally:
            seat.stop(time.time())
        answer = self._answer(wanted, request, reason, time.monotonic() - began_s)
        self._store.curation.forget([*wanted.sizes, wanted.unit.problem], now_s=time.time())
        return answer

    def close(self) -> None:
        """End the worker and let the device go."""
        if self._spare is not None:
            self._spare.stop()
        self._store.close()
        if self._lock is not None:
            self._lock.drop()

    def _worker(self, device: str) -> Tuner:
        spare, self._spare = self._spare, None
        return spare if spare is not None else self._make_worker(device)

    def _until_over(self, seat: Seat, request: Request) -> str:
        """Take turns until the unit is settled; why it has no verdict, if that is known."""
        while True:
            now_s = time.time()
            seat.look(now_s)
            seat.act(now_s)
            if seat.keeper.failed_starts >= MAX_STARTS:
                raise WorkerFailed(f"no worker can be started on {seat.monitor.name}: {seat.keeper.trouble}")
            if seat.at_rest:
                states = self._store.resume.states(request.problems, self.environment, now_s=now_s)
                open_ = [p for p in request.open() if p not in states or states[p].state not in ENDED]
                if not open_:
                    return next((one.reason or one.state for one in states.values() if one.state != "solved"), "")
            worker = seat.worker
            with suppress(OSError, ValueError):  # a socket that was just closed
                select.select([worker.fileno()] if worker is not None else [], [], [], TURN_S)

    def _answer(self, wanted: Wanted, request: Request, reason: str, took_s: float) -> Answer:
        problem, covers = wanted.unit.problem, wanted.unit.covers
        for one in self._store.fleet_sync.unshared(self.environment):
            if one.solutions[0].problem == problem and one.solutions[0].covers == covers:
                return Answer(
                    wanted.name, "solved", "", self.environment, one.solutions, one.measured, tuple(one.trials), took_s
                )
        reason = reason or next(iter(request.refused.values()), "")
        put_off = next(iter(request.put_off.values()), "")
        if put_off:
            return Answer(wanted.name, "put off", put_off, self.environment, took_s=took_s)
        return Answer(wanted.name, "failed", reason or "no verdict", self.environment, took_s=took_s)
