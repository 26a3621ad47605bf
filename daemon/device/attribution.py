"""Who uses a GPU: our own worker or somebody else? A pure rule on what the driver says and what our worker reports.

The driver's list of processes is advice and no proof: in a container it is empty, or has the host's numbers.  Memory
cannot hide.  So there are two questions, each answered from what is known here:

Is somebody else there?  Yes when a process that is not ours is listed which was not listed before our worker came, or
when more memory is used than before it came plus our worker's: what it reports plus its context, or what the driver
counts for it, where that is more.

Do they compute?  Without a worker of ours at work, the GPU's utilisation is theirs.  With one, utilisation by process
tells when the driver knows processes.  A loaded program shows its first work soonest by its CPU time (neighbours.py;
utilisation is an average, and rounds a few short kernels to nothing).  Where neither can be asked, use is not known,
and not known is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from gemmtuned.daemon.device.process_use import named
from gemmtuned.daemon.device.sampler import Facts

CONTEXT_BYTES: Final = 1 << 30  # the most a CUDA context with torch's libraries takes (seen: 0.5 GiB on an H200)
LEAST_CONTEXT_BYTES: Final = 256 << 20  # less was not our context alone: somebody gave memory back meanwhile
SLACK_BYTES: Final = 384 << 20  # modules loaded late, graphs: not in torch's own count. A foreign context takes more
SETTLE_S: Final = 2.0  # after our worker ended: utilisation is an average over up to a second, memory takes a moment
PEAK_S: Final = 3.5  # after that the samples of a second hold nothing of our worker's
GOING_S: Final = 1.0  # what a dead process held goes with it, and a kernel that hung has to be stopped first
REST_S: Final = 1.2  # after our worker's last work utilisation may still be its
HELLO_S: Final = 3.0  # a context is made in less
TOUCH: Final = 0.05  # of the GPU: a quiet program that takes up a publish loads its kernels (seen: 1 to 2 %,
PUBLISH_TOUCH: Final = 0.1  # 5 % after five publishes in five seconds, so more is excused just after one),
TOUCH_S: Final = 2.5  # and the driver's figure is an average that falls off again; who goes on for longer is at work,
TOUCHES_S: Final = 10.0  # or for longer than this where we published so shortly ago that it may be about that
UNWATCHED: Final = "a loaded program is there, and nobody here can say when it starts to work while we do"
TICKING: Final = 0.15  # of a core over 0.2 s: a quiet server's timers take one tick of 10 ms now and then
LAUNCHING: Final = 0.5  # a program that launches kernels takes most of a core, one that takes up a publish less
REPORT_S: Final = 0.15  # at work our worker's growth is in the driver's count before its report is here


Watch = Callable[[float, Collection[str]], "str | None"]  # Neighbours.busy


@dataclass(frozen=True, slots=True)
class OwnUse:
    """Our worker here. memory_bytes: what it says it holds, None before its first word. working: it has an order.

    published_s: when what it found was last published, for programs to take up.
    """

    pid: int
    memory_bytes: int | None = None
    working: bool = False
    published_s: float | None = None


class Attribution:
    """One GPU's.

    neighbours(least, elsewhere): which of those that hold a GPU open uses so much of a core now, "" for none, None: not
    known; elsewhere: processes that the driver names on other GPUs alone.
    """

    def __init__(self, *, share_resident: bool = False, neighbours: Watch = lambda least, elsewhere: None) -> None:
        self._share = share_resident
        self._neighbours = neighbours
        self._before: Facts | None = None  # the GPU as it was last without a worker of ours
        self._pid: int | None = None
        self._ours: set[str] = set()  # process numbers that are our worker's
        self._gone: set[str] = set()  # and that were the last one's: the driver tells of a dead process for a second
        self._context_bytes: int | None = None
        self._usual_bytes = CONTEXT_BYTES  # the smallest context that a worker of ours had here
        self._grew_s: float | None = None  # when memory grew before the worker's first word
        self._left_s = float("-inf")
        self._worked_s = float("-inf")
        self._own_bytes: list[tuple[float, int]] = []
        self._touched_s: float | None = None  # since when somebody else uses a little of it
        self._sunk_s: float | None = None  # since when less is used than before we came
        self._over_s: float | None = None  # since when more memory is used than we can account for

    def others(
        self, facts: Facts, own: OwnUse | None, now_s: float, *, elsewhere: Collection[str] = ()
    ) -> tuple[float | None, str]:
        """(share of the GPU that others use, None when not known; who or why).

        elsewhere: processes that the driver names on other GPUs.
        """
        if facts["util"] is None or facts["used_bytes"] is None:
            self._neighbour(facts, TICKING, elsewhere)  # for the next look's sake
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
        """Which of them works; asked at every look where it may ever matter, so that each look is a short one."""
        if not self._share and not (self._pid is not None and self._was_resident()):
            return None
        return self._neighbours(least, set(elsewhere) - pids(facts))

    def _is_named(self, facts: Facts) -> bool:
        """Whether the driver tells our worker's use from that of others."""
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
        """What was used at most in the last second: a burst may lie between two looks, half a second apart."""
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
        """In a container's view our worker has the host's number: the one process that came with it.

        Not before its first word: who comes while it imports torch may be somebody else.
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
        unnamed = own.memory_bytes is None and not self._ours & pids(facts)  # one of them may be our worker
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
        """Bytes that are our worker's: what it reports and its context, or what the driver counts where that is more.

        How large the context is shows at the worker's first word: it stands still before it for longer than the
        driver's answer can be old (worker_cuda.py).
        """
        if self._context_bytes is None:
            self._worked_s = now_s  # making the context and looking whether the device is well is work, too
            self._context_bytes = self._usual_bytes
            if grown - held >= LEAST_CONTEXT_BYTES:
                self._context_bytes = min(grown - held, self._usual_bytes + (64 << 20))
                self._usual_bytes = min(self._usual_bytes, self._context_bytes)
        self._own_bytes = [(at, old) for at, old in self._own_bytes if 0 <= now_s - at < 1.0]
        self._own_bytes.append((now_s, held))
        counted = sum(int(facts["held_by_pid"].get(pid, 0)) for pid in self._ours)
        # what it gave back a moment ago may not be gone from the driver's count
        return max(counted, self._context_bytes + max(old for _, old in self._own_bytes))

    def _sink(self, beyond: int, now_s: float) -> None:
        """Who was here before us gave memory back: nobody who comes after may hide in it.

        beyond: what is used beyond the use before us and our own, far below 0 when others gave some back.
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
        if own.memory_bytes is None:  # still importing: not on the device, or just making its context
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
        return 0.0, ""  # nobody was there before us and nobody came, or who was there is quiet: all use is ours


def pids(facts: Facts) -> set[str]:
    """All processes the driver lists on the GPU, as text."""
    return {str(pid) for pid in facts["pids"] or ()} | set(facts["by_pid"] or ())


def _is_resident(facts: Facts) -> bool:
    """Whether somebody holds the GPU, quiet or not; asked of facts without our own worker."""
    return bool(pids(facts)) or facts["used_bytes"] > facts["baseline_bytes"]


def _named(new: set[str]) -> str:
    return f"{', '.join(map(named, sorted(new)))} came to the GPU"
