"""Look at what is chosen without changing it: time it beside torch's own, verify it, and say how it did.

AITER's tuners call this --run_config.  Nothing is leased, installed or published: a worker is asked one question after
another, each with a single candidate.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gemmtuned.configs.errors import PieceFailed, WorkerFailed, WorkerHung
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Failed, Found, Order, Trial
from gemmtuned.daemon.seats.worker import Tuner

_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Checked:
    """One problem with what is chosen for it.

    state: faster, no faster (than torch beyond noise), default (torch's own is the choice), wrong, rejected, refused,
    crash, hang, not here (this installation lacks the backend), put off (no times can be taken now).  us: None where it
    was not timed.
    """

    problem: Problem
    candidate: Candidate
    state: str
    us: float | None = None
    baseline_us: float | None = None
    err: float | None = None
    err_ratio: float | None = None
    note: str = ""

    @property
    def is_good(self) -> bool:
        """False for what must not be used: its result is not right, or it does not run."""
        return self.state in ("faster", "no faster", "default", "not here", "put off")


def check(
    asked: Sequence[tuple[Problem, Candidate]], options: SearchOptions, make_worker: Callable[[], Tuner]
) -> Iterator[Checked]:
    """Answer for each in order; a worker that dies costs one of them. Raises WorkerFailed when none can be started."""
    worker: Tuner | None = None
    try:
        for problem, candidate in asked:
            if worker is None:
                worker = ready(make_worker)
            assert worker.environment is not None
            if candidate.backend not in worker.environment.backends:
                yield Checked(problem, candidate, "not here", note=f"there is no backend {candidate.backend} here")
                continue
            only = () if candidate.backend == DEFAULT_BACKEND else (candidate,)
            trials: list[Trial] = []
            try:
                worker.tune(Order((problem,), "exact", problem, "eager", (), replace(options, only=only, min_gain=1.0)))
                answer = _answer(worker, trials)
            except WorkerFailed as err:
                worker.stop()
                worker = None
                ended = "hang" if isinstance(err, WorkerHung) else "crash"
                yield _judge(problem, candidate, trials, (ended, str(err)))
                continue
            failed = None
            if isinstance(answer, Failed):
                failed = "put off" if answer.later else "refused", answer.reason
            yield _judge(problem, candidate, trials, failed)
    finally:
        if worker is not None:
            worker.stop()


def ready(make_worker: Callable[[], Tuner]) -> Tuner:
    """A worker that has said what it can do. Raises WorkerFailed when none can be started."""
    while True:
        worker = make_worker()
        try:
            while worker.environment is None:
                worker.poll()
                _wait(worker)
        except PieceFailed:  # the next one does without that
            worker.stop()
        except BaseException:
            worker.stop()
            raise
        else:
            return worker


def _answer(worker: Tuner, trials: list[Trial]) -> Found | Failed:
    while True:
        for message in worker.poll():
            if isinstance(message, (Found, Failed)):
                return message
            if isinstance(message, Trial):
                trials.append(message)
        _wait(worker)


def _wait(worker: Tuner) -> None:
    select.select([worker.fileno()], [], [], _POLL_S)


def _judge(problem: Problem, candidate: Candidate, trials: list[Trial], failed: tuple[str, str] | None) -> Checked:
    ended = [t for t in trials if t.phase != "start"]
    baseline_us = next((t.us for t in ended if t.candidate.backend == DEFAULT_BACKEND), None)
    if candidate.backend == DEFAULT_BACKEND and baseline_us is not None:
        return Checked(problem, candidate, "default", baseline_us, baseline_us)
    its = [t for t in ended if t.candidate == candidate]
    us = next((t.us for t in reversed(its) if t.us is not None), None)
    err = next((t.err for t in its if t.err is not None), None)
    ratio = next((t.err_ratio for t in its if t.err_ratio is not None), None)
    last = its[-1] if its else None
    if failed is not None:
        state, note = failed
    elif last is None:
        state, note = "refused", "it was not tried"
    else:
        state = {"ok": "faster", "slower": "no faster"}.get(last.outcome, last.outcome)
        note = "" if last.outcome in ("ok", "slower") else last.note
    return Checked(problem, candidate, state, us, baseline_us, err, ratio, note)
