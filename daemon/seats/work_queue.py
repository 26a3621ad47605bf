"""What to tune next, and its outcome: a thin layer over the store, whose SQL computes what each problem is worth.

An attempt is counted when the lease is taken, before anything runs: a problem that kills its worker, or the machine,
fails for good in that environment after three attempts.  An attempt that ended because somebody else wanted the device
does not count.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from gemmtuned.configs.engine_races import installed
from gemmtuned.configs.numbers import whole
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.solution import CROWDED, DEFAULT_BACKEND, Candidate, Environment, Solution
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Order, Trial
from gemmtuned.daemon.seats.fleet_check import Check
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.timer import Timer
from gemmtuned.db.leases import MAX_ATTEMPTS

if TYPE_CHECKING:
    from gemmtuned.db.store import Store, Work

logger = logging.getLogger("gemmtuned.daemon")
ASKED: Final = ("asked",)
FIRST: Final = ("reported", "conditions", *ASKED)  # reasons to race again that come before problems never tuned
LAST: Final = ("drift",)  # reasons that come after them
HOLD_S: Final = 60.0  # a lease that nobody renews is free again after so long
TURN_OF_OTHERS: Final = 4  # every fourth lease prefers the families that have had less device time
WANTED_S: Final = 60.0  # how often calls of engines' operators are looked for that no solution may serve
INSTALLED_S: Final = 10.0  # how often it is asked which engines are installed: it reads all folders of packages
SAMPLE_S: Final = 3600.0  # how often one old solution is raced again
OLD_S: Final = 7 * 86400.0  # the age from which a solution is old


class WorkQueue:
    """One owner's leases. Every method is one transaction at most and may raise StoreBusy: call it again later.

    request: tune only what it asks for.  conditions: those of the device, stored with each measurement.  recheck: also
    race solutions in use again, when their conditions have changed, when somebody asked, or now and then; only_asked:
    only when somebody asked, or a program calls an engine's operator that waits for it.
    """

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        request: Request | None = None,
        conditions: str = "",
        recheck: bool = False,
        only_asked: bool = False,
    ) -> None:
        self._store = store
        self._owner = owner
        self._request = request
        self._shared: Work | None = None  # the lease, if no request asked for it: another host may have a result
        self._check: Check | None = None  # another host's result that the worker is to check
        self._conditions = conditions
        self._recheck = recheck and request is None
        self._only_asked = only_asked
        self._marked: Environment | None = None  # where solutions of other conditions have been looked for
        self._sample, self._renew, self._wanted = Timer(SAMPLE_S), Timer(HOLD_S), Timer(WANTED_S)
        self._installed = Timer(INSTALLED_S)
        self._engines: dict[str, str] = {}  # versions of the engines that are installed
        self._leased_s = 0.0
        self._leases = 0
        self._spent_s: dict[str, float] = {}  # on each family

    def is_waited_for(self, now_s: float, device: str) -> bool:
        """Whether any work waits for a device of this key, whatever versions its worker has."""
        if self._request is not None:
            return bool(self._request.open())
        if self._recheck and self._wants_recheck(device, now_s):
            return True
        return any(row["device"] == device for row in self._store.resume.waiting(now_s=now_s))

    def _wants_recheck(self, device: str, now_s: float) -> bool:
        if self._installed.is_due(now_s):
            self._engines = installed()
            self._installed.wait_until(now_s + INSTALLED_S)
        engines = self._engines
        if self._only_asked:
            return self._store.recheck.count_asked(device) > 0 or self._store.wanted.is_unasked(device, engines)
        return self._store.recheck.has_recheck(self._conditions) or self._store.wanted.is_any(device, engines)

    def lease(self, environment: Environment, now_s: float) -> Work | None:
        """Lease the free work worth most that a worker of this environment can do.

        Solutions measured under other conditions come first, a sample of the old ones last.  Every fourth time the
        family that took most of the time so far comes after all others, so that their small problems have a turn, too.
        """
        asked = self._request
        problems, again = (None, False) if asked is None else (asked.open(), asked.again)
        self._leases += 1
        had_most = max(self._spent_s, key=lambda family: self._spent_s[family], default="")
        family_last = had_most if self._leases % TURN_OF_OTHERS == 0 else ""
        first = ASKED if self._only_asked else FIRST
        work = self._again(environment, first, now_s) if self._recheck else None
        if work is None:
            gate = self._store.fleet.gate(environment, now_s=now_s) if asked is None else None
            work = self._store.leases.lease_next(
                self._owner, environment, now_s=now_s, hold_s=HOLD_S, problems=problems, again=again,
                family_last=family_last, gate=gate,
            )  # fmt: skip
            self._shared = work if asked is None else None
            if gate is not None and gate.only is not None:
                self._store.fleet.ask(environment, now_s=now_s)
        if work is None and self._recheck and not self._only_asked:
            work = self._again(environment, LAST, now_s)
        self._leased_s = now_s
        self._renew.wait_until(now_s + HOLD_S / 6)
        return work

    def _again(self, environment: Environment, kinds: Sequence[str], now_s: float) -> Work | None:
        if self._marked != environment and not self._only_asked:
            marked = self._store.recheck.mark_changed(environment, self._conditions, now_s=now_s)
            self._marked = environment
            if marked:
                logger.info("raced again solutions=%d reason='measured under another %s'", marked, self._conditions)
        if self._wanted.is_due(now_s):
            mark = self._store.wanted.ask if self._only_asked else self._store.wanted.mark
            wanted = mark(environment, now_s=now_s)
            self._wanted.wait_until(now_s + WANTED_S)
            if wanted:
                logger.info("raced again solutions=%d reason='an engine calls its own kernel for them'", wanted)
        if kinds == LAST and self._sample.is_due(now_s):
            self._store.recheck.mark_sample(environment, before_s=now_s - OLD_S, now_s=now_s)
            self._sample.wait_until(now_s + SAMPLE_S)
        return self._store.recheck.lease_recheck(self._owner, environment, kinds, now_s=now_s, hold_s=HOLD_S)

    def order(self, work: Work) -> Order:
        """The worker's order: the work, and candidates to skip since they failed at one of its sizes."""
        skip: set[Candidate] = set()
        for problem in {work.problem, *work.members}:
            skip |= self._store.trials.failed_candidates(problem, work.environment)
        options = SearchOptions()
        if self._request is not None:
            options = self._request.options
            skip |= {candidate for problem, candidate in self._request.too_slow if problem in work.members}
        options = replace(options, seeds=self._store.hints.seeds(work))
        if work is self._shared:
            self._check = Check.of(work, self._store.fleet.results(work))
        if self._check is not None and self._check.work is work:
            options = self._check.options(options)
        skip.discard(Candidate(DEFAULT_BACKEND))  # never skipped: the others are judged against it
        return Order(work.members, work.covers, work.problem, work.mode, tuple(sorted(skip, key=str)), options)

    def keep(self, work: Work, now_s: float) -> bool:
        """Renew the lease when it is time to. False: it lapsed, and another owner has it now."""
        if not self._renew.is_due(now_s):
            return True
        held = self._store.leases.renew(work, now_s=now_s, hold_s=HOLD_S)
        self._renew.wait_until(now_s + HOLD_S / 6)
        return held

    def record(self, work: Work, trial: Trial) -> None:
        """Store a finished trial at once, so that it stays whatever happens next."""
        asked = self._request
        if asked is not None and asked.timeout_s is not None and trial.outcome == "hang":
            asked.too_slow.add((trial.problem, trial.candidate))
            trial = replace(trial, outcome="timeout")
        self._store.trials.add(
            work, trial.problem, trial.candidate, phase=trial.phase, us=trial.us, err=trial.err,
            outcome=trial.outcome, note=trial.note, started_us=trial.started_us,
        )  # fmt: skip
        if self._check is not None and self._check.work is work:
            self._check.note(trial)
        level = logging.DEBUG if trial.outcome in ("ok", "slower") else logging.INFO
        logger.log(
            level, "trial phase=%s problem=%s candidate=%s outcome=%s us=%s err=%s note=%r",
            trial.phase, trial.problem, trial.candidate, trial.outcome, trial.us, trial.err, trial.note,
        )  # fmt: skip
        if asked is not None:
            if trial.outcome == "rejected":
                asked.rejected.add(trial.problem)
            asked.on_trial(trial, work.environment.device)

    def install(self, work: Work, found: Sequence[Solution], now_s: float, *, others: float | None = None) -> int:
        """Store these verdicts, one per mode, and end the lease. Returns the generation that holds them.

        If only a few candidates were asked for and the default is the best of them, that is reported and not stored:
        the other candidates are still to try.  others: the share of the device that other programs used meanwhile.  A
        verdict measured beside a busy program is raced again by the next daemon that finds the device idle.
        """
        solution, asked = found[0], self._request
        check = self._check if self._check is not None and self._check.work is work else None
        if check is not None and (refusal := check.refusal(found)):
            self._refuse(check, refusal, now_s)
            return self._store.solutions.generation()
        final = asked is None or solution.backend != DEFAULT_BACKEND or not asked.left_out(work.members)
        if not final:
            self._store.leases.release(work, now_s=now_s, counted=False)
            generation = self._store.solutions.generation()
        else:
            generation = self._store.solutions.install(
                work, found, environment=work.environment, now_s=now_s, conditions=self._conditions,
                others=others, again=asked is not None,
            )  # fmt: skip
        if check is not None:
            self._store.fleet.judge(check.result.path, "")
            logger.info("checked here problem=%s host=%s", work.problem, check.result.host)
        family = work.problem.family
        self._spent_s[family] = self._spent_s.get(family, 0.0) + min(max(now_s - self._leased_s, 0.0), 3600.0)
        logger.info(
            "solved generation=%d problem=%s covers=%s backend=%s state=%s was_us=%.2f now_us=%.2f gain=%.1f%%",
            generation, solution.problem, solution.covers, solution.candidate, solution.state,
            solution.baseline_us, solution.us, 100 * (solution.baseline_us / solution.us - 1),
        )  # fmt: skip
        if asked is not None:
            asked.settle(work.problem, work.covers, solution, published=final)
            if final and others is not None and others > CROWDED:
                asked.crowded.add(work.problem)
            asked.on_found(found, work.environment.device)
        return generation

    def give_back(self, work: Work, now_s: float) -> None:
        """Give the lease back; the attempt does not count."""
        self._store.leases.release(work, now_s=now_s, counted=False)

    def put_off(self, work: Work, reason: str, now_s: float, *, for_good: bool) -> None:
        """As give_back, with a reason; for_good: this run does not lease it again."""
        self._store.leases.release(work, now_s=now_s, counted=False, put_off=reason)
        if for_good and self._request is not None:
            self._request.settle(work.problem, work.covers, None, put_off=reason)

    def hinder(self, work: Work, reason: str, now_s: float) -> bool:
        """Candidates could not be tried, and no other won: it is tried again later, with all of them.

        False at the last attempt: what is missing by then may never come.  The verdict holds, and is raced again after
        a day (db/recheck.py).  A solution in use is not replaced by such a verdict: it stays, and is raced after a day.
        """
        if work.attempt >= MAX_ATTEMPTS and not self._store.recheck.is_served(work):
            return False
        self._store.trials.free_killed(work)
        retry_s = self._store.leases.fail(work, reason, now_s=now_s, passing=True)
        if self._request is not None:
            self._request.settle(work.problem, work.covers, None, put_off=reason)
        logger.warning(
            "no verdict problem=%s attempt=%d retry_s=%s reason=%r",
            work.problem, work.attempt, "never" if retry_s is None else f"{retry_s:g}", reason,
        )  # fmt: skip
        return True

    def give_up(self, work: Work, reason: str, now_s: float) -> None:
        """The attempt failed: it is tried again later, or never; a result of another host is refused instead."""
        if self._check is not None and self._check.work is work:
            self._refuse(self._check, reason, now_s)
            return
        retry_s = self._store.leases.fail(work, reason, now_s=now_s)
        if self._request is not None:
            self._request.settle(work.problem, work.covers, None)
        logger.warning(
            "tuning failed problem=%s attempt=%d retry_s=%s reason=%r",
            work.problem, work.attempt, "never" if retry_s is None else f"{retry_s:g}", reason,
        )  # fmt: skip

    def _refuse(self, check: Check, reason: str, now_s: float) -> None:
        """Another host's result does not hold here: free the unit for a search of our own."""
        self._store.fleet.judge(check.result.path, reason)
        self._store.leases.release(check.work, now_s=now_s, counted=False)
        logger.warning(
            "refused a result problem=%s host=%s reason=%r", check.work.problem, check.result.host, reason
        )  # fmt: skip


def mismatch(work: Work, found: tuple[Solution, ...]) -> str:
    """Why this answer does not fit the order; "" when it does. The worker ran foreign code, so we check."""
    environment = work.environment
    modes = [solution.mode for solution in found]
    if modes[0] != work.mode or len(set(modes)) != len(modes):
        return f"worker answered for mode {', '.join(modes)}"
    for solution in found:
        if solution.problem != work.problem or solution.covers != work.covers:
            return f"worker answered for {solution.problem} covering {solution.covers}"
        if solution.device != environment.device.key or not environment.accepts(solution.backend, solution.stamp):
            return f"worker answered with {solution.backend} of {solution.stamp} on {solution.device}"
        if solution.state not in ("published", "default_best"):
            return f"worker answered with state {solution.state}"
    return ""


def owner_name() -> str:
    """`host:pid:boot.start.namespace`: no two processes ever have the same, so that a dead owner is recognised.

    start counts from boot, so that a clock that is set does not make a living owner look dead.  Containers may share
    host name and home but number processes each for itself: namespace is that of pid, "" where it is not known.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{_boot()}.{_start(os.getpid())}.{_namespace()}"


def is_dead(owner: str) -> bool:
    """True only when the owner ran on this host and has ended; False where that cannot be known.

    Of an owner in another container it cannot: its pid means nothing here.  Its leases are free once they lapse.
    """
    _, pid, boot, start, _ = _parts(owner)
    return is_of_here(owner) and (boot != _boot() or _start(int(pid)) not in (start, None))


def is_of_here(owner: str) -> bool:
    """Whether `is_dead` can know: the owner ran on this host, before its last boot or in our PID namespace."""
    host, pid, boot, _, namespace = _parts(owner)
    if host != socket.gethostname() or whole(pid) is None or not boot:
        return False
    return boot != _boot() or namespace == _namespace() != ""


def outlived_boot(owner: str) -> bool:
    """Whether the machine has not booted since this owner started: then its work did not bring the machine down."""
    return _parts(owner)[2] == _boot()


def _parts(owner: str) -> tuple[str, str, str, str, str]:
    host_pid, _, started = owner.rpartition(":")
    host, _, pid = host_pid.rpartition(":")
    boot, _, rest = started.partition(".")
    start, _, namespace = rest.partition(".")  # older versions wrote no namespace
    return host, pid, boot, start, namespace


def _namespace() -> str:
    if sys.platform != "linux":
        return "all"
    return (pid_namespace() or "").rpartition(" ")[2]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return str(round(psutil.boot_time()))


def _start(pid: int) -> str | None:
    """When the process with this pid started; "" when there is no such process, None when it cannot be known."""
    try:
        is_over, ticks = life_of(pid)
        return "" if is_over else ticks
    except FileNotFoundError:
        pass
    except (OSError, IndexError):
        return None
    try:
        return str(round(psutil.Process(pid).create_time() * 100))
    except psutil.NoSuchProcess:
        return ""
    except psutil.Error:
        return None
