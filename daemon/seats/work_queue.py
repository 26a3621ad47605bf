"""What to tune next, and what becomes of it: thin over the store, where SQL knows what each problem is worth.

Attempts are counted when the lease is taken, before anything runs, so that a problem which kills its worker, or the
machine, converges: after three attempts it has failed for good, in that environment.  An attempt that ended because
somebody else wanted the device is given back uncounted.
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

from gemmtuned.configs.numbers import whole
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.solution import CROWDED, DEFAULT_BACKEND, Candidate, Environment, Solution
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Order, Trial
from gemmtuned.daemon.seats.fleet_check import Check
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.timer import Timer

if TYPE_CHECKING:
    from gemmtuned.db.store import Store, Work

logger = logging.getLogger("gemmtuned.daemon")
ASKED: Final = ("asked",)
FIRST: Final = ("reported", "conditions", *ASKED)  # reasons to race again that go before what was never tuned
LAST: Final = ("drift",)  # and after it
HOLD_S: Final = 60.0  # a lease nobody renews is free again after this long
FAIR_TURN: Final = 4
SAMPLE_S: Final = 3600.0  # how often one old solution is raced again
OLD_S: Final = 7 * 86400.0  # and what is old


class WorkQueue:
    """One owner's leases. Every method is one transaction at most and may raise StoreBusy: call it again later.

    request: tune what it asks for, and nothing else.  conditions: of the device, kept with what is measured.
    recheck: also race again what is in use, when its conditions have changed, somebody asked, or now and then;
    only_asked: of these, when somebody asked and not else.
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
        self._shared: Work | None = None  # leased for no request: another host may have a result for it
        self._check: Check | None = None  # the worker is to check a result of another host
        self._conditions = conditions
        self._recheck = recheck and request is None
        self._only_asked = only_asked
        self._marked: Environment | None = None  # looked through for solutions of other conditions
        self._sample, self._renew = Timer(SAMPLE_S), Timer(HOLD_S)
        self._leased_s = 0.0
        self._leases = 0
        self._spent_s: dict[str, float] = {}  # on each family

    def is_waited_for(self, now_s: float, device: str) -> bool:
        """Whether there is anything to do on a device of this key, for a worker of whatever versions."""
        if self._request is not None:
            return bool(self._request.open())
        if self._recheck and self._wants_recheck(device):
            return True
        return any(row["device"] == device for row in self._store.waiting(now_s=now_s))

    def _wants_recheck(self, device: str) -> bool:
        return self._store.count_asked(device) > 0 if self._only_asked else self._store.has_recheck(self._conditions)

    def lease(self, environment: Environment, now_s: float) -> Work | None:
        """Hold the free work worth most that a worker of this environment can do.

        Solutions measured under other conditions come first, a sample of the old ones last.  Every fourth time the
        family that had most of the time so far stands back: many small problems of another are not put off for ever.
        """
        asked = self._request
        problems, again = (None, False) if asked is None else (asked.open(), asked.again)
        self._leases += 1
        had_most = max(self._spent_s, key=lambda family: self._spent_s[family], default="")
        after = had_most if self._leases % FAIR_TURN == 0 else ""
        first = ASKED if self._only_asked else FIRST
        work = self._again(environment, first, now_s) if self._recheck else None
        if work is None:
            gate = self._store.fleet_gate(environment, now_s=now_s) if asked is None else None
            work = self._store.lease_next(
                self._owner, environment, now_s=now_s, hold_s=HOLD_S, problems=problems, again=again, after=after,
                gate=gate,
            )  # fmt: skip
            self._shared = work if asked is None else None
            if gate is not None and gate.only is not None:
                self._store.fleet_ask(environment, now_s=now_s)
        if work is None and self._recheck and not self._only_asked:
            work = self._again(environment, LAST, now_s)
        self._leased_s = now_s
        self._renew.wait_until(now_s + HOLD_S / 6)
        return work

    def _again(self, environment: Environment, kinds: Sequence[str], now_s: float) -> Work | None:
        if self._marked != environment and not self._only_asked:
            marked = self._store.mark_changed(environment, self._conditions, now_s=now_s)
            self._marked = environment
            if marked:
                logger.info("raced again solutions=%d reason='measured under another %s'", marked, self._conditions)
        if kinds == LAST and self._sample.is_due(now_s):
            self._store.mark_sample(environment, before_s=now_s - OLD_S, now_s=now_s)
            self._sample.wait_until(now_s + SAMPLE_S)
        return self._store.lease_recheck(self._owner, environment, kinds, now_s=now_s, hold_s=HOLD_S)

    def order(self, work: Work) -> Order:
        """What the worker gets: the work, and the candidates that already failed at any of its sizes."""
        skip: set[Candidate] = set()
        for problem in {work.problem, *work.members}:
            skip |= self._store.failed_candidates(problem, work.environment)
        options = SearchOptions()
        if self._request is not None:
            options = self._request.options
            skip |= {candidate for problem, candidate in self._request.too_slow if problem in work.members}
        options = replace(options, seeds=self._store.seeds(work))
        if work is self._shared:
            self._check = Check.of(work, self._store.fleet_results(work))
        if self._check is not None and self._check.work is work:
            options = self._check.options(options)
        skip.discard(Candidate(DEFAULT_BACKEND))  # without it nothing can be judged: each attempt tries it anew
        return Order(work.members, work.covers, work.problem, work.mode, tuple(sorted(skip, key=str)), options)

    def keep(self, work: Work, now_s: float) -> bool:
        """Renew the lease when it is time to. False: it lapsed and is another's now."""
        if not self._renew.is_due(now_s):
            return True
        held = self._store.renew(work, now_s=now_s, hold_s=HOLD_S)
        self._renew.wait_until(now_s + HOLD_S / 6)
        return held

    def record(self, work: Work, trial: Trial) -> None:
        """Write a finished trial down at once: what was measured stays, whatever happens next."""
        asked = self._request
        if asked is not None and asked.timeout_s is not None and trial.outcome == "hang":
            asked.too_slow.add((trial.problem, trial.candidate))
            trial = replace(trial, outcome="timeout")
        self._store.add_trial(
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
        """Make these the verdicts, one a mode; the lease ends with them. Returns the generation that holds them.

        That the default is best of a few that were asked for is reported, not installed: the others are still to try.
        others: the share of the device that others used meanwhile.  What somebody had measured beside a busy program
        is raced again by the next daemon that finds the device idle.
        """
        solution, asked = found[0], self._request
        check = self._check if self._check is not None and self._check.work is work else None
        if check is not None and (refusal := check.against(found)):
            self._refuse(check, refusal, now_s)
            return self._store.generation()
        final = asked is None or solution.backend != DEFAULT_BACKEND or not asked.left_out(work.members)
        if not final:
            self._store.release(work, now_s=now_s, counted=False)
            generation = self._store.generation()
        else:
            generation = self._store.install(
                work, found, environment=work.environment, now_s=now_s, conditions=self._conditions,
                others=others, again=asked is not None,
            )  # fmt: skip
        if check is not None:
            self._store.fleet_judge(check.result.path, "")
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
        """Free again at once, and the attempt does not count."""
        self._store.release(work, now_s=now_s, counted=False)

    def put_off(self, work: Work, reason: str, now_s: float, *, for_good: bool) -> None:
        """As give_back, with the reason; for_good: this run does not take it up again."""
        self._store.release(work, now_s=now_s, counted=False, put_off=reason)
        if for_good and self._request is not None:
            self._request.settle(work.problem, work.covers, None, put_off=reason)

    def give_up(self, work: Work, reason: str, now_s: float) -> None:
        """This attempt failed: again after a while, or never; another host's result is refused for it."""
        if self._check is not None and self._check.work is work:
            self._refuse(self._check, reason, now_s)
            return
        retry_s = self._store.fail(work, reason, now_s=now_s)
        if self._request is not None:
            self._request.settle(work.problem, work.covers, None)
        logger.warning(
            "tuning failed problem=%s attempt=%d retry_s=%s reason=%r",
            work.problem, work.attempt, "never" if retry_s is None else f"{retry_s:g}", reason,
        )  # fmt: skip

    def _refuse(self, check: Check, reason: str, now_s: float) -> None:
        """Another host's result does not hold here: the unit is free again, for a search of our own."""
        self._store.fleet_judge(check.result.path, reason)
        self._store.release(check.work, now_s=now_s, counted=False)
        logger.warning(
            "refused a result problem=%s host=%s reason=%r", check.work.problem, check.result.host, reason
        )  # fmt: skip


def mismatch(work: Work, found: tuple[Solution, ...]) -> str:
    """Why this answer is not one to the question asked, or "": the worker ran foreign code, so it is checked."""
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
    """`host:pid:boot.start.namespace`, unique among all processes of all time: tells a dead owner from a living one.

    start counts from boot, so that setting the clock does not make a living owner look dead.  Containers may share host
    name and home, and have numbers of their own: the namespace is that of pid, empty where it cannot be known.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{_boot()}.{_start(os.getpid())}.{_namespace()}"


def is_dead(owner: str) -> bool:
    """True only when the owner ran on this host and is no more; false where it cannot be known.

    So of one in another container, whose pid says nothing here: what it holds is free again once its lease lapses.
    """
    _, pid, boot, start, _ = _parts(owner)
    return is_of_here(owner) and (boot != _boot() or _start(int(pid)) not in (start, None))


def is_of_here(owner: str) -> bool:
    """Whether it can be known that the owner is no more: it ran on this host, before its start or with our pids."""
    host, pid, boot, _, namespace = _parts(owner)
    if host != socket.gethostname() or whole(pid) is None or not boot:
        return False
    return boot != _boot() or namespace == _namespace() != ""


def outlived_boot(owner: str) -> bool:
    """Whether the machine has stayed up since this owner started: then it was killed, and not its work at fault."""
    return _parts(owner)[2] == _boot()


def _parts(owner: str) -> tuple[str, str, str, str, str]:
    host_pid, _, started = owner.rpartition(":")
    host, _, pid = host_pid.rpartition(":")
    boot, _, rest = started.partition(".")
    start, _, namespace = rest.partition(".")  # none in those of versions before it was there
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
    """When this process was started; "" when there is none of that number, None when it cannot be known."""
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
