"""One device and its worker: the device becomes idle, a problem is leased and measured; the worker leaves for others.

A seat never waits.  Each turn it looks at its device (view.py), reads the worker's messages, and makes at most one step
with the leased problem (job.py).  What has to be written to the store is queued (outbox.py) and leaves the queue only
once it is written: a busy store delays a result but loses none, and never keeps a worker on a device that others want.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gemmtuned.configs.errors import PieceFailed, StoreError, WorkerFailed
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.device_lock import Lock
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.seats.asking import Asking
from gemmtuned.daemon.seats.job import Job, State, tell_death
from gemmtuned.daemon.seats.keeper import Keeper
from gemmtuned.daemon.seats.left_out import Announced
from gemmtuned.daemon.seats.outbox import Outbox
from gemmtuned.daemon.seats.view import Patience, View
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.daemon.seats.worker import Tuner
from gemmtuned.daemon.status_file import SeatNotice

logger = logging.getLogger("gemmtuned.daemon")

MAX_STARTS: Final = 3  # a foreground run gives up after so many workers in a row that never said hello


@dataclass(frozen=True, slots=True)
class Solved:
    """A verdict that was installed: its device, whether something beat torch, and seconds since the order."""

    device: str
    faster: bool
    took_s: float


class Seat:
    """One device and its worker, see the module.

    always: tune even while others use the device (a person waits for it).  lock: shared with other users' daemons.
    """

    def __init__(
        self,
        monitor: Monitor,
        queue: WorkQueue,
        make_worker: Callable[[str], Tuner],
        *,
        window_s: float,
        always: bool = False,
        lock: Lock | None = None,
    ) -> None:
        self.monitor = monitor
        self.environment: Environment | None = None
        self.in_use = False  # the device was idle and nobody has come since: the next problem may begin at once
        self.keeper = Keeper(monitor.id, make_worker, lock=lock, always=always)
        self._job: Job | None = None  # the work on the leased problem
        self._view = View(monitor, window_s=window_s, always=always)
        self._patience = Patience(window_s)
        self._asking = Asking(queue, monitor.device.key)
        self._window_s = window_s
        self._always = always
        self._to_write = Outbox()
        self._job_of = partial(
            Job, queue, self._to_write, device_id=monitor.id, killed_at=set(), installed=self._installed, always=always
        )
        self._solved: list[Solved] = []
        self._left_out = Announced(monitor.id)
        self._published_s: float | None = None
        self._away = ""  # why the worker must leave the device now
        self._sent_away = ""  # the same, where that was seen during a turn, in another thread
        self._forbidden = ""  # why the operator wants nothing tuned now

    def look(self, now_s: float, *, forbidden: str = "") -> None:
        """Look at the device, and tell a worker to end if it must; do not wait for that, since others may have to end.

        forbidden: why the operator wants nothing tuned now.
        """
        self._view_device(now_s)
        self._listen(now_s)
        self._forbidden = forbidden = "" if self._always else forbidden
        if forbidden:
            self._asking.trouble = ""  # nothing is asked of the store now, so its last trouble may be over
        sits_here = self.in_use or self.worker is not None or self._job is not None
        wanted = (self._sent_away or self._view.must_yield(now_s)) if sits_here else ""
        self._sent_away = ""
        self._away = forbidden or wanted or self.keeper.lost_lock(now_s)
        if self._away:
            if self.in_use and not forbidden:
                self._patience.gave_way(now_s)
            self.keeper.hurry()

    def mind(self, now_s: float, *, leave: bool) -> None:
        """As look, from another thread and for nothing but the worker's leave; leave: it must, whatever others do."""
        if self.worker is None:
            return
        self._view_device(now_s)
        self._sent_away = ("stopping" if leave else self._view.must_yield(now_s)) or self._sent_away
        if self._sent_away:
            self.keeper.hurry()

    def _view_device(self, now_s: float) -> None:
        own, worker, job = None, self.worker, self._job
        if worker is not None:
            own = OwnUse(worker.pid, worker.memory_bytes, self.tuning, self._published_s)
        self._view.look(now_s, own, job.meanwhile if job is not None and job.is_tuning else None)

    def act(self, now_s: float) -> None:
        """Leave the device, or do one thing. Once after each look."""
        if self._away:
            self._vacate(self._away)
        if not self._write(now_s) or self.keeper.is_stuck(now_s) or self._away or self._sent_away:
            return
        self._keep_lease(now_s)
        self.keeper.retire(now_s, needed=self._job is not None)
        if self.tuning or self._patience.waits(now_s):
            return
        idleness = self._view.idleness
        if self.in_use or idleness.state == "idle":
            self.in_use = True
            if self._prepare(now_s):
                self._begin(now_s)
        elif idleness.state == "clearing" and idleness.clear_s >= self._window_s / 2:
            self._prepare(now_s)  # a worker takes seconds to start; it shall be ready once the device counts as idle
        elif idleness.state == "busy":
            self._give_back()

    def stop(self, now_s: float) -> None:
        """End the worker and give the lease back, without waiting for a busy store."""
        self._listen(now_s)
        self._vacate("stopping")
        self._write(now_s)

    @property
    def worker(self) -> Tuner | None:
        """The worker at this device now."""
        return self.keeper.worker

    @property
    def busy(self) -> bool:
        """True while there is a worker to listen to or something to write."""
        return self.worker is not None or bool(self._to_write)

    @property
    def tuning(self) -> bool:
        """True while the worker works on an order, and so uses the device."""
        return self._job is not None and self._job.is_tuning

    @property
    def at_rest(self) -> bool:
        """True when nothing is held, running or waiting to be written."""
        return self._job is None and not self._to_write

    @property
    def out_of_work(self) -> bool:
        """True when no problem waits that could be begun here now."""
        return self._asking.out_of_work

    def take_solved(self) -> list[Solved]:
        """The verdicts installed since the last call."""
        solved, self._solved = self._solved, []
        return solved

    @property
    def store_trouble(self) -> str:
        """Why the store cannot be read or written; "" when it can."""
        return self._to_write.trouble or self._asking.trouble

    def notice(self) -> SeatNotice:
        """This seat's part of `daemon.json`, for `gemmtuned status`."""
        job, (state, reason) = self._job, _standing(self)
        return SeatNotice(
            id=self.monitor.id,
            name=self.monitor.name,
            device=self.monitor.device.key,
            state=state,
            reason=reason,
            others=self._view.others,
            clear_s=round(self._view.idleness.clear_s, 2),
            problem=str(job.work.problem) if job else "",
            candidate=str(job.trying.candidate) if job and job.trying else "",
            worker_pid=self.worker.pid if self.worker else None,
            pids=list(self.monitor.pids),
            left_out=self._left_out.lines(),
        )

    def _vacate(self, why: str) -> None:
        """Leave the device at once; the attempt does not count."""
        if self.worker is not None:
            level = logging.INFO if self._job is not None else logging.DEBUG
            problem = self._job.work.problem if self._job is not None else "none"
            logger.log(level, "yielding device=%s problem=%s reason=%r", self.monitor.id, problem, why)
        self.keeper.end()
        self._give_back()
        self.in_use = False

    # --- the worker

    def _prepare(self, now_s: float) -> bool:
        """Make one step towards a leased problem and a worker that knows its environment; True when both are there."""
        if self._job is None:
            self.environment = self.keeper.known(self.environment)
            if (work := self._asking.lease(self.environment, now_s)) is not None:
                self._job = self._job_of(work)
            elif self.environment is not None or self.out_of_work:
                return False
        if self.worker is None:
            self.keeper.start(now_s)
            self.in_use = self.in_use and (self._always or not self.keeper.taken)
            return False
        return self._job is not None and self.worker.environment is not None

    def _begin(self, now_s: float) -> None:
        assert self.worker is not None and self._job is not None
        try:
            self._job.begin(self.worker, now_s)
        except StoreError as err:
            self._asking.trouble = str(err)
        except WorkerFailed as err:
            self._worker_failed(err, now_s)

    def _listen(self, now_s: float) -> None:
        if self.worker is None:
            return
        try:
            messages = self.worker.poll()
        except WorkerFailed as err:
            return self._worker_failed(err, now_s)
        for message in messages:
            self._left_out.hear(message, self.worker.pid)
            if self._job is not None:
                self._job.hear(message)
        self._forget_if_over(now_s)
        if self.worker.environment is not None:
            self.keeper.said_hello()
            if self.environment != self.worker.environment:
                self._settle(self.worker.environment)

    def _settle(self, environment: Environment) -> None:
        """The worker has said which environment it has; a lease taken for another one is given back."""
        self.environment = environment
        self._asking.hurry()
        if self._job is not None and self._job.work.environment.key != environment.key:
            self._give_back()

    def _worker_failed(self, err: WorkerFailed, now_s: float) -> None:
        """The worker crashed or hung."""
        if self.worker is not None and self.worker.environment is None and not isinstance(err, PieceFailed):
            return self.keeper.failed(str(err), now_s)
        pid = self.worker.pid if self.worker is not None else 0
        self.keeper.lost(now_s)
        if self._job is not None:
            self._job.died(err, pid)
            self._forget_if_over(now_s)
        elif not isinstance(err, PieceFailed):
            tell_death(self.monitor.id, pid, "none", err, "a new worker starts when there is work")

    def _installed(self, faster: bool, began_s: float, now_s: float) -> None:
        self._solved.append(Solved(self.monitor.name, faster, max(now_s - began_s, 0.0)))
        self._published_s = now_s  # within this turn
        self._patience.gained()

    def _write(self, now_s: float) -> bool:
        """Write the queue in order; False when the store cannot take it now."""
        written = self._to_write.write(now_s)
        if self._to_write.overdue:
            self._vacate("the store cannot be written")
        return written

    def _keep_lease(self, now_s: float) -> None:
        if self._job is not None and not self._job.keep(now_s):
            if self.tuning:
                self.keeper.end()
            self._job = None

    def _give_back(self) -> None:
        if self._job is not None:
            self._job.give_back()
            self._job = None

    def _forget_if_over(self, now_s: float) -> None:
        if self._job is not None and self._job.state is State.OVER:
            if self._job.put_off:
                self._patience.put_off(now_s)
            self._job = None


def _standing(seat: Seat) -> tuple[str, str]:
    """(state, reason) as a SeatNotice has them."""
    idleness = seat._view.idleness
    state, reason = "waiting", idleness.reason
    trouble = seat.store_trouble or seat.keeper.trouble
    if trouble:
        state, reason = "stuck", trouble
    elif seat.tuning:
        state, reason = "tuning", ""
    elif seat._forbidden:
        reason = seat._forbidden
    elif seat.out_of_work and (seat.in_use or idleness.state == "idle"):
        state, reason = "ready", "nothing to tune"
    elif seat.keeper.taken:
        reason = seat.keeper.taken
    elif seat.in_use:
        reason = "the worker is starting"
    elif seat._patience.fruitless > 1 and idleness.state == "idle":
        reason = f"gave way {seat._patience.fruitless} times in a row without a result: waits longer"
    return state, reason
