"""Whether a device is idle, and since when: a pure function of readings, so that a test covers a day in milliseconds.

There are two thresholds.  To start, others must have stayed below `Limits.clear` for the whole window, in one unbroken
chain of readings.  To go on, they must stay below `Limits.busy`, which is higher, so that a device at the edge does not
start and kill workers all day.  Unknown counts as busy: without a reading, or with one that is old or spans a sleep of
the machine, the device is not idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

STALE_S: Final = 5.0  # older readings say nothing about now
LONGEST_S: Final = 5.0  # a reading over a longer interval may hide what happened in it
YIELD_SPAN_S: Final = 0.2  # 20 clock ticks of 10 ms; over a shorter interval CPU time is mostly rounding


@dataclass(frozen=True, slots=True)
class Reading:
    """What others did on one device between `since_s` and `at_s`.

    others: the share of the whole device they used, 0 to 1; None when it is not known.
    free_bytes: memory a worker could take; None where it does not matter.
    note: why `others` is not known, or who uses the device.
    """

    since_s: float
    at_s: float
    others: float | None
    free_bytes: int | None = None
    note: str = ""


@dataclass(slots=True)
class Mean:
    """The average use by others, over readings that are added as they come."""

    used_s: float = 0.0
    watched_s: float = 0.0

    def add(self, reading: Reading) -> None:
        """Add a reading, unless its `others` is not known."""
        span_s = reading.at_s - reading.since_s
        if reading.others is not None and 0 < span_s <= LONGEST_S:
            self.used_s += reading.others * span_s
            self.watched_s += span_s

    @property
    def share(self) -> float | None:
        """The share of the whole device, 0 to 1; None when nothing is known."""
        return min(max(self.used_s / self.watched_s, 0.0), 1.0) if self.watched_s else None  # drivers may say 101 %


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to `clear` the device counts as unused; from `busy` on a running worker gives way (both 0 to 1)."""

    clear: float
    busy: float
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Idleness:
    """state: `busy`, `clearing` (clear, not yet for long enough) or `idle`. reason: for people, empty when idle."""

    state: Literal["busy", "clearing", "idle"]
    clear_s: float
    reason: str = ""


def idleness_of(readings: Sequence[Reading], *, now_s: float, window_s: float, limits: Limits) -> Idleness:
    """Whether tuning may start. readings: in order of time; they may be more than the window needs."""
    if not readings:
        return Idleness("busy", 0.0, "no reading yet")
    newest = readings[-1]
    if not -STALE_S <= now_s - newest.at_s <= STALE_S:
        return Idleness("busy", 0.0, f"no reading for {now_s - newest.at_s:.0f} s")
    trouble = _trouble(newest, limits)
    if trouble:
        return Idleness("busy", 0.0, trouble)
    if newest.free_bytes is not None and newest.free_bytes < limits.free_bytes:
        free, need = newest.free_bytes >> 20, limits.free_bytes >> 20
        return Idleness("busy", 0.0, f"{free} MiB of memory free, {need} MiB are needed")
    start_s = newest.since_s
    for reading in islice(reversed(readings), 1, None):
        if _trouble(reading, limits) or not 0 <= start_s - reading.at_s <= 1e-3 or newest.at_s - start_s >= window_s:
            break  # intervals must join (within 1 ms), else some time was not watched
        start_s = reading.since_s
    clear_s = newest.at_s - start_s
    if clear_s < window_s:
        return Idleness("clearing", clear_s, f"clear for {clear_s:.1f} s of {window_s:g} s")
    return Idleness("idle", clear_s)


def must_yield(readings: Sequence[Reading], *, now_s: float, limits: Limits) -> str:
    """Why a worker must leave this device now; "" when it may stay."""
    if not readings or not -STALE_S <= now_s - readings[-1].at_s <= STALE_S:
        return "no reading"
    if readings[-1].others is None:
        return readings[-1].note or "use of the device is not known"
    span_s = used_s = 0.0
    busiest = readings[-1]
    for reading in reversed(readings):
        if reading.others is None:
            break
        if reading.others > (busiest.others or 0.0):
            busiest = reading
        span_s += reading.at_s - reading.since_s
        used_s += reading.others * (reading.at_s - reading.since_s)
        if span_s >= YIELD_SPAN_S:
            break
    if span_s > 0 and used_s / span_s >= limits.busy:
        return _used(used_s / span_s, busiest.note)
    return ""


def _trouble(reading: Reading, limits: Limits) -> str:
    if reading.others is None:
        return reading.note or "use of the device is not known"
    if not 0 < reading.at_s - reading.since_s <= LONGEST_S:
        return f"not watched for {reading.at_s - reading.since_s:.0f} s"
    if reading.others > limits.clear:
        return _used(reading.others, reading.note)
    return ""


def _used(share: float, note: str) -> str:
    return f"others use {100 * share:.0f} %" + (f" ({note})" if note else "")
