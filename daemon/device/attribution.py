"""Who uses a GPU: our own worker or somebody else? A pure function of what the driver and our worker report.

The driver's list of processes is a hint and no proof: in a container it is empty, or has pids of the host.  Memory
cannot be hidden.  So there are two questions:

Is somebody else there?  Yes, if a process that is not ours is listed that was not listed before our worker came, or if
more memory is used than before plus our worker's: the larger of what the worker reports plus its context, and what the
driver reports for it.

Do they compute?  While no worker of ours is working, the GPU's utilisation is theirs.  While one is, the driver's
utilisation by process says so, if it knows processes.  A loaded program shows its first work soonest in its CPU time
(neighbours.py), because utilisation is an average and rounds a few short kernels to zero.  If neither is available, use
is not known, and unknown counts as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from gemmtuned.daemon.device.process_use import named
from gemmtuned.daemon.device.sampler import Facts

CONTEXT_BYTES: Final = 1 << 30  # the most that a CUDA context with torch's libraries takes (seen: 0.5 GiB on an H200)
LEAST_CONTEXT_BYTES: Final = 256 << 20  # a smaller growth is not our context alone: somebody freed memory meanwhile
SLACK_BYTES: Final = 384 << 20  # for late modules and graphs, which torch does not count. A foreign context takes more
SETTLE_S: Final = 2.0  # after our worker's end: utilisation is averaged over up to a second, memory takes a moment
PEAK_S: Final = 3.5  # after our worker's end until a second of samples has nothing of it
GOING_S: Final = 1.0  # until the memory of a dead process is free: a kernel that hung must be stopped first
REST_S: Final = 1.2  # after our worker's last work, while utilisation may still be its
HELLO_S: Final = 3.0  # more than the making of a context takes
# A quiet program that loads a new table uses the GPU a little (seen: 1 to 2 %; 5 % after five tables in five seconds)
TOUCH: Final = 0.05  # the share of the GPU that does not count as work
PUBLISH_TOUCH: Final = 0.1  # the same just after we have published
TOUCH_S: Final = 2.5  # for how long it does not count: the driver's figure is an average that decays
TOUCHES_S: Final = 10.0  # the same just after we have published
UNWATCHED: Final = "a loaded program is there, and nobody here can say when it starts to work while we do"
TICKING: Final = 0.15  # cores over 0.2 s; less are a quiet server's timers, a tick of 10 ms now and then
LAUNCHING: Final = 0.5  # cores; a program that launches kernels uses more, one that loads a new table less
REPORT_S: Final = 0.15  # the driver counts our worker's new memory so much earlier than its report arrives


Watch = Callable[[float, Collection[str]], "str | None"]  # Neighbours.busy


@dataclass(frozen=True, slots=True)
class OwnUse:
    """Our worker here. memory_bytes: what it reports, None before its first message. working: it has an order.

    published_s: when its findings were last published, which programs then load.
    """

    pid: int
    memory_bytes: int | None = None
    working: bool = False
    published_s: float | None = None


class Attribution:
    """The attribution of one GPU.

    neighbours(least, elsewhere): which process that holds a GPU open uses so much of a core now; "" for none, None if
    unknown.  elsewhere: processes that the driver lists only on other GPUs.
    """

    def __init__(self, *, share_resident: bool = False, neighbours: Watch = lambda least, elsewhere: None) -> None:
        self._share = share_resident
        self._neighbours = neighbours
        self._before: Facts | None = None  # the GPU's last facts without a worker of ours
        self._pid: int | None = None
        self._ours: set[str] = set()  # pids of our worker
        self._gone: set[str] = set()  # pids of the previous one: the driver lists a dead process for a second
        self._context_bytes: int | None = None
        self._usual_bytes = CONTEXT_BYTES  # the smallest context that a worker of ours had here
        self._grew_s: float | None = None  # when memory grew before the worker's first message
        self._left_s = float("-inf")
        self._worked_s = float("-inf")
        self._own_bytes: list[tuple[float, int]] = []
        self._touched_s: float | None = None  # since when somebody else uses the GPU a little
        self._sunk_s: float | None = None  # since when less memory is used than before we came
        self._over_s: float | None = None  # since when more memory is used than we can explain

    def others(
        self, facts: Facts, own: OwnUse | None, now_s: float, *, elsewhere: Collection[str] = ()
    ) -> tuple[float | None, str]:
        """(share of the GPU that others use, None if unknown; who or why).

        elsewhere: processes that the driver lists on other GPUs.
        """
        if facts["util"] is None or facts["used_bytes"] is None:
            self._neighbour(facts, TICKING, elsewhere)  # so that the next look has something to compare with
            return None, "the driver does not say how much the GPU is used"
        if self._pid is not None and (own is None or own.pid != self._pid):
            self._pid, self._left_s = None, now_s
        if own is None:
            return self._alone(facts, self._neighbour(facts, TICKING, elsewhere), now_s)
        if self._pid is None:
            self._begin(own, facts)
        if own.working:
            self._worked_s = now_s
        self._recognise(facts, own)
        busy = self._neighbour(facts, LAUNCHING if self._is_named(facts) else TICKING, elsewhere)
        return self._presence(facts, own, now_s) or self._activity(facts, own, busy, now_s)

    def _neighbour(self, facts: Facts, least: float, elsewhere: Collection[str]) -> str | None:
        """The neighbour that works; asked at every look at which it may matter, so that each span is short."""
        if not self._share and not (self._pid is not None and self._was_resident()):
            return None
        return self._neighbours(least, set(elsewhere) - pids(facts))

    def _is_named(self, facts: Facts) -> bool:
        """Whether the driver reports our worker's use apart from that of others."""
        return bool(self._ours & pids(facts)) and facts["by_pid"] is not None

    def _was_resident(self) -> bool:
        return self._before is not None and _is_resident(self._before)

    def _alone(self, facts: Facts, busy: str | None, now_s: float) -> tuple[float | None, str]:
        before = self._before
        if before is not None and 0 <= now_s - self._left_s < SETTLE_S:
            new = pids(facts) - pids(before) - self._ours
            if new:
                return None, _named(new)
            if facts["used_bytes"] <= before["used_bytes"] + SLACK_BYTES or now_s - self._left_s < GOING_S:
                return 0.0, ""
            return None, "the memory of our own worker is not back yet"
        self._before = facts
        if _is_resident(facts):
            if not self._share:
                held = facts["used_bytes"] >> 20
                who = f", {', '.join(map(named, sorted(pids(facts))[:3]))}" if pids(facts) else ""
                return (
                    None,
                    f"others hold {held} MiB of its memory{who} (--share-resident tunes beside a quiet program)",
                )
            if busy:
                return 1.0, busy
            if busy is None and not (pids(facts) and facts["by_pid"] is not None):
                return None, UNWATCHED
        return self._peak(facts, now_s)

    def _peak(self, facts: Facts, now_s: float) -> tuple[float, str]:
        """The highest utilisation in the last second, since a burst may fall between two looks half a second apart."""
        used = [
            facts["util"],
            *(share / 100 for pid, share in (facts["by_pid"] or {}).items() if pid not in self._ours | self._gone),
        ]
        if not 0 <= now_s - self._left_s < PEAK_S:
            used.append(facts["peak"] or 0.0)
        return max(used), f"utilisation {max(used):.0%}" if max(used) else ""

    def _begin(self, own: OwnUse, facts: Facts) -> None:
        self._gone = self._ours
        self._pid = own.pid
        self._ours = {str(own.pid)}
        self._context_bytes = self._grew_s = self._over_s = self._sunk_s = None
        self._own_bytes.clear()
        if self._before is None:
            self._before = facts

    def _recognise(self, facts: Facts, own: OwnUse) -> None:
        """Find our worker's pid in a container, where the driver lists the host's: the one process that came with it.

        This is done only after its first message: a process that comes while it imports torch may be somebody else.
        """
        assert self._before is not None
        here = pids(facts)
        if str(own.pid) in here:
            self._ours = {str(own.pid)}
        elif own.memory_bytes is not None and not self._ours & here:
            new = here - pids(self._before)
            if len(new) == 1 and facts["used_bytes"] - self._before["used_bytes"] <= CONTEXT_BYTES:
                self._ours |= new

    def _presence(self, facts: Facts, own: OwnUse, now_s: float) -> tuple[None, str] | None:
        assert self._before is not None
        new = pids(facts) - pids(self._before) - self._ours
        unnamed = own.memory_bytes is None and not self._ours & pids(facts)  # one of these may be our worker
        if len(new) > unnamed:
            return None, _named(new)
        grown = facts["used_bytes"] - self._before["used_bytes"]
        if own.memory_bytes is None:
            allowed = CONTEXT_BYTES
        else:
            ours = self._own(facts, own.memory_bytes, grown, now_s)
            allowed = ours + SLACK_BYTES
            self._sink(grown - ours, now_s)
        if grown <= allowed:
            self._over_s = None
            return None
        if self._over_s is None or now_s < self._over_s:
            self._over_s = now_s
        if now_s - self._over_s >= REPORT_S or not own.working:
            return None, f"others took {(grown - allowed) >> 20} MiB of its memory since our worker started"
        return None

    def _own(self, facts: Facts, held: int, grown: int, now_s: float) -> int:
        """Our worker's memory: what it reports plus its context, or what the driver counts, if that is more.

        The size of the context is measured at the worker's first message, before which it waits for longer than the
        driver's answer can be old (worker_cuda.py).
        """
        if self._context_bytes is None:
            self._worked_s = now_s  # it has worked: made a context and checked the device
            self._context_bytes = self._usual_bytes
            if grown - held >= LEAST_CONTEXT_BYTES:
                self._context_bytes = min(grown - held, self._usual_bytes + (64 << 20))
                self._usual_bytes = min(self._usual_bytes, self._context_bytes)
        self._own_bytes = [(at, old) for at, old in self._own_bytes if 0 <= now_s - at < 1.0]
        self._own_bytes.append((now_s, held))
        counted = sum(int(facts["held_by_pid"].get(pid, 0)) for pid in self._ours)
        # the driver may still count memory that it has just freed
        return max(counted, self._context_bytes + max(old for _, old in self._own_bytes))

    def _sink(self, beyond: int, now_s: float) -> None:
        """If programs from before us have freed memory, lower what we expect, so that a newcomer cannot hide in it.

        beyond: used memory beyond that before us and our own; far below 0 when others have freed some.
        """
        assert self._before is not None
        if beyond > -SLACK_BYTES:
            self._sunk_s = None
        elif self._sunk_s is None or now_s < self._sunk_s:
            self._sunk_s = now_s
        elif now_s - self._sunk_s >= SETTLE_S:
            self._before = {**self._before, "used_bytes": max(self._before["used_bytes"] + beyond, 0)}
            self._sunk_s = None

    def _activity(self, facts: Facts, own: OwnUse, busy: str | None, now_s: float) -> tuple[float | None, str]:
        assert self._before is not None
        if own.memory_bytes is None:  # it is still importing, or just making its context
            if facts["used_bytes"] - self._before["used_bytes"] <= 16 << 20:
                self._grew_s = None
                return self._peak(facts, now_s)
            if self._grew_s is None or now_s < self._grew_s:
                self._grew_s = now_s
            if now_s - self._grew_s < HELLO_S:
                return 0.0, ""
        if not self._was_resident():
            busy = ""
        if busy:
            return 1.0, busy
        by_pid = facts["by_pid"] or {}
        if by_pid and self._is_named(facts):
            percent, pid = max(((used, pid) for pid, used in by_pid.items() if pid not in self._ours), default=(0, ""))
            share = percent / 100
            about_us = own.published_s is not None and 0 <= now_s - own.published_s < TOUCH_S
            if not share:
                self._touched_s = None
            elif share < (PUBLISH_TOUCH if about_us else TOUCH):
                if self._touched_s is None or now_s < self._touched_s:
                    self._touched_s = now_s
                if now_s - self._touched_s < (TOUCHES_S if about_us else TOUCH_S):
                    return 0.0, f"{named(pid)} touches it"
            return share, f"{named(pid)} computes, {share:.0%}" if share else ""
        if not facts["util"] or not 0 <= now_s - self._worked_s < REST_S:
            return facts["util"], f"utilisation {facts['util']:.0%}" if facts["util"] else ""
        if sum(used > 0 for used in by_pid.values()) > 1:
            return 1.0, "two processes compute, and we are one"
        if busy is None:
            return None, UNWATCHED
        return 0.0, ""  # nobody else is there, or only quiet programs: all use is ours


def pids(facts: Facts) -> set[str]:
    """The pids of all processes that the driver lists on the GPU, as text."""
    return {str(pid) for pid in facts["pids"] or ()} | set(facts["by_pid"] or ())


def _is_resident(facts: Facts) -> bool:
    """Whether somebody holds the GPU, quiet or not; for facts from before our own worker."""
    return bool(pids(facts)) or facts["used_bytes"] > facts["baseline_bytes"]


def _named(new: set[str]) -> str:
    return f"{', '.join(map(named, sorted(new)))} came to the GPU"
