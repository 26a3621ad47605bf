"""One leased problem, from the lease to its end: ordered, measured, and a verdict, a failure or given back.

    LEASED --begin--> TUNING --verdict, failure, put off--> OVER
       ^                |  |
       +--worker died---+  +--give_back, lease lost------> OVER        (from LEASED too)

What is to be written to the store goes to the seat's outbox in order, so nothing is lost where the store is busy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import PieceFailed, StoreError, WorkerFailed, WorkerHung, WorkerKilled
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Solution
from gemmtuned.daemon.device.idle import Mean
from gemmtuned.daemon.protocol.wire import PASSING, RACING, Failed, Found, Message, Trial
from gemmtuned.daemon.seats.outbox import Outbox
from gemmtuned.daemon.seats.view import PUT_OFF_S
from gemmtuned.daemon.seats.work_queue import WorkQueue, mismatch
from gemmtuned.daemon.seats.worker import Tuner

if TYPE_CHECKING:
    from gemmtuned.db.store import Work

logger = logging.getLogger("gemmtuned.daemon")

MAX_DEATHS: Final = 8  # workers one attempt may cost before it counts as failed
Installed = Callable[[bool, float, float], object]  # whether it is faster than torch, when it was begun, now
# At what a worker was killed, in which attempt: one that is given back uncounted comes again with its number
Killed = tuple[Problem, int, tuple[Problem, Candidate] | None]


class State(Enum):
    """Where a job is, as the head of this file draws it."""

    LEASED = auto()
    TUNING = auto()
    OVER = auto()


class Job:
    """One leased problem, from the lease to its end.

    killed_at: of all jobs of the seat. installed: called when the verdict is in the store. always: who asked waits at
    a terminal, so what the worker puts off is reported at once instead of tried again.
    """

    def __init__(
        self,
        queue: WorkQueue,
        outbox: Outbox,
        work: Work,
        *,
        device_id: str,
        killed_at: set[Killed],
        installed: Installed,
        always: bool,
    ) -> None:
        self.work = work
        self.state = State.LEASED
        self.meanwhile = Mean()  # what others used since the worker has the order
        self.trying: Trial | None = None  # started and not finished: to blame if the worker dies
        self.put_off = False  # the worker said: not now
        self._queue, self._outbox, self._device_id = queue, outbox, device_id
        self._killed_at, self._installed, self._always = killed_at, installed, always
        self._began_s = 0.0  # when the worker got its order
        self._deaths = 0
        self._passing: dict[Candidate, str] = {}  # could not be tried, for want of something that may be there again
        self._torchs_alone = False  # since a worker died in a race of two candidates

    @property
    def is_tuning(self) -> bool:
        """Whether a worker is at it."""
        return self.state is State.TUNING

    def begin(self, worker: Tuner, now_s: float) -> None:
        """Give the order. Raises StoreError where it cannot be drawn up, and WorkerFailed where it cannot be given."""
        order = self._queue.order(self.work)
        if self._torchs_alone:
            order = replace(order, options=replace(order.options, torchs_alone=True))
        self.state, self.meanwhile, self._began_s = State.TUNING, Mean(), now_s
        worker.tune(order)
        logger.debug("tuning problem=%s covers=%s members=%d", order.target, order.covers, len(order.members))

    def keep(self, now_s: float) -> bool:
        """Renew the lease; False when another has it by now."""
        try:
            held = self._queue.keep(self.work, now_s)
        except StoreError as err:  # it holds for most of a minute yet
            logger.warning("lease not renewed problem=%s reason=%r", self.work.problem, str(err))
            return True
        if not held:
            logger.warning("lease lost problem=%s", self.work.problem)
        return held

    def hear(self, message: Message) -> None:
        """What the worker says while it is at it; the rest is of an order before."""
        if not self.is_tuning:
            return
        if isinstance(message, Trial):
            self.trying = message if message.phase == "start" else None
            if message.phase != "start":
                self._note(message)
        elif isinstance(message, Found):
            found = (message.solution, *message.others)
            wrong = mismatch(self.work, found)
            self._end(self._giving_up(wrong) if wrong else partial(self._install, found, self.meanwhile.share))
        elif isinstance(message, Failed) and message.later:
            self.put_off = not self._always
            if self.put_off:
                logger.info("put off problem=%s for_s=%g reason=%r", self.work.problem, PUT_OFF_S, message.reason)
            self._end(partial(self._queue.put_off, self.work, message.reason, for_good=not self.put_off))
        elif isinstance(message, Failed):
            self._end(self._giving_up(message.reason))

    def died(self, err: WorkerFailed, pid: int) -> None:
        """The worker crashed or hung: the candidate it was at is to blame, and the work goes on without that one.

        Not so at first where it was killed: it is the first to go when memory runs out, whoever took it.  Nor where two
        candidates raced: then each is tried again without the other.
        """
        self.state, trying, self.trying = State.LEASED, self.trying, None
        if isinstance(err, PieceFailed):  # no candidate's fault: a new worker goes on without that piece
            return
        self._deaths += 1
        work = self.work
        at = work.problem, work.attempt, (trying.problem, trying.candidate) if trying is not None else None
        if isinstance(err, WorkerKilled) and at not in self._killed_at and self._deaths < MAX_DEATHS:
            self._killed_at.add(at)
            self._tell_death(pid, err, "a new worker tries it again")
            return
        if trying is not None and trying.note == RACING and not self._torchs_alone and self._deaths < MAX_DEATHS:
            self._torchs_alone = True
            self._tell_death(pid, err, "a new worker races each candidate with torch's own kernel alone")
            return
        if trying is not None:
            outcome = "hang" if isinstance(err, WorkerHung) else "killed" if isinstance(err, WorkerKilled) else "crash"
            self._note(
                Trial(trying.problem, trying.candidate, "screen", None, None, outcome, str(err), trying.started_us)
            )
        if trying is None or trying.candidate.backend == DEFAULT_BACKEND or self._deaths >= MAX_DEATHS:
            self._tell_death(pid, err, "this attempt has failed")
            self._end(self._giving_up(str(err)))
        else:
            self._tell_death(pid, err, f"a new worker goes on without {trying.candidate}")

    def give_back(self) -> None:
        """The attempt does not count, and another may have it."""
        self._end(partial(self._queue.give_back, self.work))

    def _end(self, write: Callable[[float], object]) -> None:
        self.state, self.trying = State.OVER, None
        self._outbox.append(write)

    def _note(self, trial: Trial) -> None:
        """Keep what a trial gave."""
        self._passing.pop(trial.candidate, None)
        if trial.outcome in (*PASSING, "killed"):
            self._passing[trial.candidate] = trial.note
        self._outbox.append(lambda now_s: self._queue.record(self.work, trial))

    def _lacks(self, found: tuple[Solution, ...]) -> str:
        """Why it is not known that torch's own is best, where that was found; else ""."""
        if not self._passing or any(s.backend != DEFAULT_BACKEND for s in found):
            return ""
        candidate, why = next(iter(self._passing.items()))
        return f"{len(self._passing)} of the candidates could not be tried, such as {candidate}: {why}"

    def _giving_up(self, reason: str) -> Callable[[float], None]:
        return partial(self._queue.give_up, self.work, reason)

    def _install(self, found: tuple[Solution, ...], others: float | None, now_s: float) -> None:
        lacks = self._lacks(found)
        if lacks and self._queue.hinder(self.work, lacks, now_s):
            return
        self._queue.install(self.work, found, now_s, others=others)
        self._installed(any(one.backend != DEFAULT_BACKEND for one in found), self._began_s, now_s)

    def _tell_death(self, pid: int, err: WorkerFailed, then: str) -> None:
        tell_death(self._device_id, pid, str(self.work.problem), err, then)


def tell_death(device_id: str, pid: int, problem: str, err: WorkerFailed, then: str) -> None:
    """A warning that a worker died."""
    logger.warning("worker died device=%s pid=%d problem=%s reason=%r then=%r", device_id, pid, problem, str(err), then)
