"""One device and the worker that sits at it: from clear to idle to leased to measured, and away when others come.

A seat never waits.  Each turn it looks at its device, takes what the worker said since, and makes at most one step.
What has to be written to the store is put in a row first and taken off only once written: a busy store delays it
and loses nothing, and never keeps a worker on a device that others want.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import StoreError, WorkerFailed, WorkerHung, WorkerKilled
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Environment, Solution
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.device.idle import Idleness, Mean, Reading, idleness_of, must_yield
from gemmtuned.daemon.notice import SeatNotice
from gemmtuned.daemon.protocol.wire import Failed, Found, Message, Trial
from gemmtuned.daemon.seats.keeper import Keeper
from gemmtuned.daemon.seats.outbox import Outbox
from gemmtuned.daemon.seats.work_queue import WorkQueue, mismatch
from gemmtuned.daemon.seats.worker import Tuner

if TYPE_CHECKING:
    from gemmtuned.db.store import Work

logger = logging.getLogger("gemmtuned.daemon")

PUT_OFF_S: Final = 30.0  # after an answer that says: not now
ASK_S: Final = 1.0  # how often an empty queue is asked again
MAX_DEATHS: Final = 8  # workers one attempt may cost before it counts as failed
MAX_STARTS: Final = 3  # workers in a row that never said hello, before a foreground run gives up
LONGEST_WAIT_S: Final = 600.0  # after yields that gained nothing


@dataclass(frozen=True, slots=True)
class Solved:
    """A verdict that was installed: on which device, whether something beat torch, seconds since the order."""

    device: str
    faster: bool
    took_s: float


class Seat:
    """See the module.

    always: the person at the keyboard wants it now, whatever others do.  lock: shared with the daemons of others.
    """

    def __init__(
        self,
        monitor: Monitor,
        queue: WorkQueue,
        make_worker: Callable[[str], Tuner],
        *,
        window_s: float,
        always: bool = False,
        lock: DeviceLock | None = None,
    ) -> None:
        self.monitor = monitor
        self.environment: Environment | None = None
        self.work: Work | None = None  # leased
        self.in_use = False  # became idle and nobody came since: no new window between two problems
        self.out_of_work = False
        self._solved: list[Solved] = []
        self._began_s = 0.0  # when the worker got its order
        self._published_s: float | None = None
        self.trouble = ""  # why nothing can be leased
        self.keeper = Keeper(monitor.id, make_worker, lock=lock, always=always)
        self._queue = queue
        self._window_s = window_s
        self._always = always
        self._readings: deque[Reading] = deque()
        self._to_write = Outbox()
        self._idleness = Idleness("busy", 0.0, "no reading yet")
        self._tuning = False  # the worker has the order
        self._meanwhile = Mean()  # what others used since it has
        self._trying: Trial | None = None  # started and not finished: to blame if the worker dies
        self._deaths = 0
        # At what workers were killed, in which attempt: one that is given back uncounted comes again with its number
        self._killed_at: set[tuple[Problem, int, tuple[Problem, Candidate] | None]] = set()
        self._away = ""  # why the device must be left now
        self._forbidden = ""  # why the operator wants nothing tuned
        self._fruitless = 0  # yields in a row without a verdict between them
        self._wait_until_s = float("-inf")
        self._put_off = False  # the worker has just said: not now
        self._ask_at_s = float("-inf")

    def look(self, now_s: float, *, forbidden: str = "") -> None:
        """See what goes on, and tell a worker that must leave to go, without waiting: others may have to go as well.

        forbidden: why the operator wants nothing tuned now.
        """
        self._look(now_s)
        self._listen(now_s)
        if self._put_off:
            self._put_off, self._wait_until_s = False, now_s + PUT_OFF_S
        self._forbidden = forbidden = "" if self._always else forbidden
        if forbidden:
            self.trouble = ""  # nothing is asked for now, so what was in the way of it may be gone
        self._away = forbidden or self._must_yield(now_s)
        if self._away:
            if self.in_use and not forbidden:
                self._back_off(now_s)
            self.keeper.hurry()

    def act(self, now_s: float) -> None:
        """Leave the device, or do one thing. Once after each look."""
        if self._away:
            self._vacate(self._away)
        if not self._write(now_s) or self.keeper.is_stuck(now_s) or self._away:
            return
        self._keep_lease(now_s)
        self.keeper.retire(now_s, needed=self.work is not None)
        if self._tuning:
            return
        idleness = self._idleness
        if self._wait_until_s - LONGEST_WAIT_S <= now_s < self._wait_until_s:
            return
        if self.in_use or idleness.state == "idle":
            self.in_use = True
            if self._prepare(now_s):
                self._begin(now_s)
        elif idleness.state == "clearing" and idleness.clear_s >= self._window_s / 2:
            self._prepare(now_s)  # starting a worker takes seconds, niced; it is ready when the window is over
        elif idleness.state == "busy" and self.work is not None:
            self._give_back()

    def stop(self, now_s: float) -> None:
        """End the worker and give the lease back. What cannot be written now is not waited for."""
        self._listen(now_s)
        self._vacate("stopping")
        self._write(now_s)

    @property
    def worker(self) -> Tuner | None:
        """The one that sits here now."""
        return self.keeper.worker

    @property
    def busy(self) -> bool:
        """True while there is a worker to listen to or something to write."""
        return self.worker is not None or bool(self._to_write)

    @property
    def tuning(self) -> bool:
        """True while the worker is at an order: device time is used."""
        return self._tuning

    @property
    def at_rest(self) -> bool:
        """True when nothing is held, running or waiting to be written."""
        return self.work is None and not self._tuning and not self._to_write

    def take_solved(self) -> list[Solved]:
        """The verdicts that were installed since this was last asked."""
        solved, self._solved = self._solved, []
        return solved

    @property
    def store_trouble(self) -> str:
        """Why the store cannot be read or written; "" when it can."""
        return self._to_write.trouble or self.trouble

    def notice(self) -> SeatNotice:
        """For `gemmtuned status`."""
        idleness = self._idleness
        state, reason = "waiting", idleness.reason
        trouble = self.store_trouble or self.keeper.trouble
        if trouble:
            state, reason = "stuck", trouble
        elif self._tuning:
            state, reason = "tuning", ""
        elif self._forbidden:
            reason = self._forbidden
        elif self.out_of_work and (self.in_use or idleness.state == "idle"):
            state, reason = "ready", "nothing to tune"
        elif self.keeper.taken:
            reason = self.keeper.taken
        elif self.in_use:
            reason = "the worker is starting"
        elif self._fruitless > 1 and idleness.state == "idle":
            reason = f"gave way {self._fruitless} times in a row without a result: waits longer"
        return SeatNotice(
            id=self.monitor.id,
            name=self.monitor.name,
            device=self.monitor.device.key,
            state=state,
            reason=reason,
            others=self._readings[-1].others if self._readings else None,
            clear_s=round(idleness.clear_s, 2),
            problem=str(self.work.problem) if self.work else "",
            candidate=str(self._trying.candidate) if self._trying else "",
            worker_pid=self.worker.pid if self.worker else None,
            pids=list(self.monitor.pids),
        )

    # --- the device

    def _look(self, now_s: float) -> None:
        worker = self.worker
        own = None
        if worker is not None:
            own = OwnUse(worker.pid, worker.memory_bytes, self._tuning, self._published_s)
        reading = self.monitor.read(now_s, own)
        if not self._readings or self._readings[-1] is not reading:
            self._readings.append(reading)
            if self._tuning:
                self._meanwhile.add(reading)
        while len(self._readings) > 1 and not now_s - self._window_s - 5 <= self._readings[0].at_s <= now_s + 5:
            self._readings.popleft()  # too old to matter, or from before the clock was set back
        if self._always:
            self._idleness = Idleness("idle", self._window_s)
        else:
            limits = self.monitor.limits
            self._idleness = idleness_of(self._readings, now_s=now_s, window_s=self._window_s, limits=limits)

    def _must_yield(self, now_s: float) -> str:
        if self._always or not (self.in_use or self.worker or self.work):
            return ""
        return must_yield(self._readings, now_s=now_s, limits=self.monitor.limits)

    def _back_off(self, now_s: float) -> None:
        """A device that others take back again and again before anything is done is asked for less and less often."""
        if self._fruitless > 1:  # once or twice is chance
            wait_s = min(self._window_s * 2.0 ** (self._fruitless - 1), LONGEST_WAIT_S, 60 * self._window_s)
            self._wait_until_s = now_s + wait_s
        self._fruitless = min(self._fruitless + 1, 16)

    def _vacate(self, why: str) -> None:
        """Leave the device at once; the attempt does not count."""
        if self.worker is not None:
            level = logging.INFO if self.work is not None else logging.DEBUG
            problem = self.work.problem if self.work is not None else "none"
            logger.log(level, "yielding device=%s problem=%s reason=%r", self.monitor.id, problem, why)
        self._end_worker()
        if self.work is not None:
            self._give_back()
        self.in_use = False

    # --- the worker

    def _prepare(self, now_s: float) -> bool:
        """One step towards a leased problem and a worker that knows its environment; True when both are there."""
        if self.work is None and not self._lease_or_ask(now_s):
            return False
        if self.worker is None:
            self.keeper.start(now_s)
            self.in_use = self.in_use and (self._always or not self.keeper.taken)
            return False
        return self.work is not None and self.worker.environment is not None

    def _lease_or_ask(self, now_s: float) -> bool:
        """Lease what is worth most; while no worker has said what it can do, whether anything waits at all."""
        if self._ask_at_s - 30.0 <= now_s < self._ask_at_s:
            return self.environment is None and not self.out_of_work
        began_s = time.monotonic()
        try:
            if self.environment is None:
                self.out_of_work = not self._queue.is_waited_for(now_s, self.monitor.device.key)
            else:
                self.work = self._queue.lease(self.environment, now_s)
                self.out_of_work = self.work is None
                self._deaths = 0
            self.trouble = ""
        except StoreError as err:
            self.out_of_work = True  # nothing that can be begun
            self.trouble = str(err)
        if self.work is None:  # else the next one is asked for as soon as this one is done
            took_s = time.monotonic() - began_s
            self._ask_at_s = now_s + min(max(ASK_S, 50 * took_s), 30.0)  # 2 % of a core, however long the queue
        return self.work is not None or (self.environment is None and not self.out_of_work)

    def _begin(self, now_s: float) -> None:
        assert self.worker is not None and self.work is not None
        try:
            order = self._queue.order(self.work)
        except StoreError as err:
            self.trouble = str(err)
            return
        self._tuning, self._meanwhile, self._began_s = True, Mean(), now_s
        try:
            self.worker.tune(order)
        except WorkerFailed as err:
            self._worker_failed(err, now_s)
        logger.debug("tuning problem=%s covers=%s members=%d", order.target, order.covers, len(order.members))

    def _end_worker(self) -> None:
        self._tuning = False
        self.keeper.end()

    def _listen(self, now_s: float) -> None:
        if self.worker is None:
            return
        try:
            messages = self.worker.poll()
        except WorkerFailed as err:
            if self.worker.environment is None:
                self._tuning = False
                self.keeper.failed(str(err), now_s)
            else:
                self._worker_failed(err, now_s)
            return
        for message in messages:
            self._hear(message)
        if self.worker.environment is not None:
            self.keeper.said_hello()
            if self.environment != self.worker.environment:
                self._settle(self.worker.environment)

    def _settle(self, environment: Environment) -> None:
        """The worker said what it can reproduce; a lease taken for another environment goes back."""
        self.environment = environment
        self._ask_at_s = float("-inf")
        if self.work is not None and self.work.environment.key != environment.key:
            self._give_back()

    def _hear(self, message: Message) -> None:
        if self.work is None or not self._tuning:
            return
        if isinstance(message, Trial):
            self._trying = message if message.phase == "start" else None
            if message.phase != "start":
                self._to_write.append(partial(self._record, self.work, message))
        elif isinstance(message, Found):
            found = (message.solution, *message.others)
            wrong = mismatch(self.work, found)
            if wrong:
                self._to_write.append(partial(self._queue.give_up, self.work, wrong))
            else:
                self._to_write.append(partial(self._install, self.work, found, self._meanwhile.share))
            self._forget_work()
        elif isinstance(message, Failed) and message.later:
            self._put_off = not self._always  # who waits at a terminal is told instead
            if self._put_off:
                logger.info("put off problem=%s for_s=%g reason=%r", self.work.problem, PUT_OFF_S, message.reason)
            put_off = partial(self._queue.put_off, for_good=not self._put_off)
            self._to_write.append(partial(put_off, self.work, message.reason))
            self._forget_work()
        elif isinstance(message, Failed):
            self._to_write.append(partial(self._queue.give_up, self.work, message.reason))
            self._forget_work()

    def _worker_failed(self, err: WorkerFailed, now_s: float) -> None:
        """It crashed or hung: the candidate it was at is to blame, and the work goes on without that one.

        Not so at first where it was killed: it is the first to go when memory runs out, whoever took it.
        """
        self._tuning = False
        pid = self.worker.pid if self.worker is not None else 0
        self.keeper.lost(now_s)
        work, trying = self.work, self._trying
        self._trying = None
        if work is None:
            logger.warning(
                "worker died device=%s pid=%d problem=none reason=%r then='a new worker starts when there is work'",
                self.monitor.id, pid, str(err),
            )  # fmt: skip
            return
        self._deaths += 1
        at = work.problem, work.attempt, (trying.problem, trying.candidate) if trying is not None else None
        if isinstance(err, WorkerKilled) and at not in self._killed_at and self._deaths < MAX_DEATHS:
            self._killed_at.add(at)
            self._tell_death(pid, work, err, "a new worker tries it again")
            return
        if trying is not None:
            outcome = "hang" if isinstance(err, WorkerHung) else "killed" if isinstance(err, WorkerKilled) else "crash"
            blamed = Trial(trying.problem, trying.candidate, "screen", None, None, outcome, str(err), trying.started_us)
            self._to_write.append(partial(self._record, work, blamed))
        if trying is None or trying.candidate.backend == DEFAULT_BACKEND or self._deaths >= MAX_DEATHS:
            self._tell_death(pid, work, err, "this attempt has failed")
            self._to_write.append(partial(self._queue.give_up, work, str(err)))
            self._forget_work()
        else:
            self._tell_death(pid, work, err, f"a new worker goes on without {trying.candidate}")

    def _tell_death(self, pid: int, work: Work, err: WorkerFailed, then: str) -> None:
        logger.warning(
            "worker died device=%s pid=%d problem=%s reason=%r then=%r",
            self.monitor.id, pid, work.problem, str(err), then,
        )  # fmt: skip

    # --- the store

    def _record(self, work: Work, trial: Trial, now_s: float) -> None:
        self._queue.record(work, trial)

    def _install(self, work: Work, found: tuple[Solution, ...], others: float | None, now_s: float) -> None:
        self._queue.install(work, found, now_s, others=others)
        faster = any(one.backend != DEFAULT_BACKEND for one in found)
        self._solved.append(Solved(self.monitor.name, faster, max(now_s - self._began_s, 0.0)))
        self._published_s = now_s  # within this turn
        self._fruitless = 0

    def _write(self, now_s: float) -> bool:
        """Write what waits, in order; False when the store cannot take it now."""
        written = self._to_write.write(now_s)
        if self._to_write.overdue:
            self._vacate("the store cannot be written")
        return written

    def _keep_lease(self, now_s: float) -> None:
        if self.work is None:
            return
        try:
            held = self._queue.keep(self.work, now_s)
        except StoreError as err:  # it holds for most of a minute yet
            logger.warning("lease not renewed problem=%s reason=%r", self.work.problem, str(err))
            return
        if not held:
            logger.warning("lease lost problem=%s", self.work.problem)
            if self._tuning:
                self._end_worker()
            self._forget_work()

    def _give_back(self) -> None:
        assert self.work is not None
        self._to_write.append(partial(self._queue.give_back, self.work))
        self._forget_work()

    def _forget_work(self) -> None:
        self.work, self._tuning, self._trying = None, False, None
