"""What capture costs a server that runs: switched on and off within the one process, in turns.

Two servers differ in speed by more than what is sought, so that both sides are the same process here.  A round asks the
same of each arm twice, the second time in the opposite order (on, off, off again, off again, off, on), so that what
changes steadily falls out of the round's ratio; from round to round the arms change their order.  "off again" is the
control: off in the same way as "off", and compared with it as "on" is.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def turns(arms: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, arm) in the order in which they are asked."""
    orders = list(itertools.permutations(arms))
    for number in range(rounds):
        order = orders[number % len(orders)]
        yield from ((number, arm) for arm in (*order, *reversed(order)))


def family(root: int, proc: Path = PROC) -> list[int]:
    """That process and all that come from it."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pids: Sequence[int], proc: Path = PROC) -> float:
    """Seconds of CPU, user and system, that the threads of these have had: the scheduler's own count, in ns."""
    total = 0
    for pid in pids:
        for thread in (proc / str(pid) / "task").glob("*/schedstat"):
            with suppress(OSError):  # ended meanwhile
                total += int(thread.read_text().split()[0])
    return total / 1e9


def measure(
    arms: Mapping[str, Callable[[], Sequence[int]]], work: Callable[[str], None], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds and CPU seconds of each arm by round; an arm's function makes it ready and says whose CPU time counts."""
    taken: dict[str, dict[str, list[float]]] = {
        what: {arm: [0.0] * rounds for arm in arms} for what in ("seconds", "cpu_seconds")
    }
    for number, arm in turns(list(arms), rounds):
        pids = arms[arm]()
        cpu, began_s = cpu_s(pids), time.perf_counter()
        work(arm)
        taken["seconds"][arm][number] += time.perf_counter() - began_s
        taken["cpu_seconds"][arm][number] += cpu_s(pids) - cpu
    return taken


def over(ours: Sequence[float], stock: Sequence[float], resamples: int = 10_000) -> dict[str, Any]:
    """Of the ratios of the rounds: the median, and where it lies in 95 of 100 draws of as many rounds."""
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return {"median": round(statistics.median(ratios), 4), "interval_95": [round(low, 4), round(high, 4)]}


def compared(taken: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """Each arm over "off", by the clock and by CPU time."""
    return {
        what: {f"{arm} / off": over(values, of["off"]) for arm, values in of.items() if arm != "off"}
        for what, of in taken.items()
    }
