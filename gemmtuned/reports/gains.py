"""What tuning has gained: each solution's time beside torch's own, and what its calls have saved since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gemmtuned.configs.engine_races import peers_of
from gemmtuned.configs.human_units import duration
from gemmtuned.configs.solution import CROWDED, LIVE_STATES, Candidate
from gemmtuned.configs.spelling import SPELLED
from gemmtuned.reports.render import (
    TIMES,
    Column,
    Report,
    Row,
    Table,
    count,
    factor,
    more,
    percent,
    several,
    small,
)

# A verdict, not a gain: it is counted below the table, and listed with --all.
_NO_GAIN: Final = "default_best"


EVERY_M: Final = "every M"  # what a batch-invariant solution is for
UNUSED_US: Final = (
    86_400_000_000  # in use for a day, and no program asked for it: its shape is gone, or its key is wrong
)


def report(rows: Sequence[Row], *, every: bool, limit: int, now_us: int, unused: bool = False) -> Report:
    """rows: of the view `solutions`. every: also the default-is-best verdicts and what was withdrawn.

    unused: only those that no program has looked up since they were published, a day ago or more.
    """
    live = [row for row in rows if row["state"] in LIVE_STATES]
    faster = [row for row in live if row["state"] != _NO_GAIN]
    invariant = [row for row in faster if _is_invariant(row)]
    never = [row for row in faster if not row["hit_calls"] and row["published"] < now_us - UNUSED_US]
    chosen = never if unused else rows if every else faster
    ordered = sorted(chosen, key=lambda row: (-(row["saved_us"] or 0), -row["speedup"]))
    shown: list[dict[str, Any]] = [
        # The bound is of pairs of readings, the gain of two medians: where they cross, the lesser one is the promise
        {
            **row,
            "route": str(Candidate(row["backend"], row["config"])),
            "gain_low": min(row["gain_low"], row["speedup"]),
            "serves": EVERY_M if _is_invariant(row) else row["covers"],
        }
        for row in (ordered[:limit] if limit else ordered)
    ]
    crowded = [row for row in shown if (row.get("others") or 0.0) > CROWDED]
    saved_us = sum(row["saved_us"] or 0 for row in rows)
    retired_us = sum(row["saved_us"] or 0 for row in rows if row["state"] not in LIVE_STATES)
    notes = [*_sums(saved_us, retired_us, live, faster, invariant)] if rows else []
    notes += [*_invariant_notes(invariant), *_crowded_notes(crowded), *_beside_notes(shown)]
    if never and not unused:
        notes.append(f"{several(len(never), 'solution')} never looked up in a day or more: --unused lists them")
    notes += more(shown, ordered)
    return Report(
        "gains",
        [Table("rows", _columns(shown, crowded, every=every), shown, empty="No solution is in use yet.")],
        facts={
            "saved_us": saved_us,
            "faster": len(faster) - len(invariant),
            "default_best": len(live) - len(faster),
            "unused": len(never),
        },
        notes=notes,
    )


def _columns(shown: Sequence[Row], crowded: Sequence[Row], *, every: bool) -> tuple[Column, ...]:
    return (
        Column("problem", "problem", right=False),
        Column("serves", "for", right=False),
        Column("route", "runs", right=False),
        *TIMES,
        Column("gain_low", "at least", factor),
        Column("err", "error", small),
        *((Column("others", "others used", percent),) if crowded else ()),
        Column("hit_calls", "calls", count),
        Column("saved_us", "saved", duration),
        *((Column("state", "state", right=False),) if every or any(row["state"] == "pinned" for row in shown) else ()),
    )


def _sums(
    saved_us: float, retired_us: float, live: Sequence[Row], faster: Sequence[Row], invariant: Sequence[Row]
) -> Iterator[str]:
    of_retired = f", {duration(retired_us)} of it by solutions no longer in use (--all)" if retired_us else ""
    yield (
        f"saved so far: {duration(saved_us)} of GEMM time{of_retired}; "
        f"{several(len(faster) - len(invariant), 'problem')} faster, "
        f"{len(live) - len(faster)} best with torch's own"
    )


def _invariant_notes(invariant: Sequence[Row]) -> Iterator[str]:
    if invariant:
        yield (
            f"{several(len(invariant), 'problem')} batch-invariant: chosen for the same bits at every M, at what that "
            "costs; the times are means over M from 1 to 256"
        )


def _beside_notes(shown: Sequence[Row]) -> Iterator[str]:
    """Beside what `saved` is, where programs may have called an engine's operator."""
    raced = [
        r for r in shown if r["saved_us"] and any(p.low is not None for p in peers_of(r.get("beside") or "").values())
    ]
    if raced:
        yield (
            f"{several(len(raced), 'problem was', 'problems were')} raced beside engines' kernels, too: what was saved "
            "is beside torch's own product; of a program that calls the engine's operator it is less, and nothing "
            "where the engine's kernel is as good (gemmtuned explain)"
        )


def _crowded_notes(crowded: Sequence[Row]) -> Iterator[str]:
    """What is to be known of times taken while others used the device."""
    if not crowded:
        return
    yield (
        f"{several(len(crowded), 'problem was', 'problems were')} timed while others used more than {CROWDED:.0%} "
        "of the device: torch's time and the new one are of the same moment, and both too long. What was saved "
        "goes by the programs' own calls where those were timed"
    )
    again = sum(row["recheck"] is not None and row["state"] in LIVE_STATES for row in crowded)
    if again:
        them = f"{again} of them" if len(crowded) > 1 else "it"
        wait = "waits" if again == 1 else "wait"
        yield f"{them} {wait} for a daemon that finds the device idle, to be measured again"


def _is_invariant(row: Row) -> bool:
    return f",{SPELLED['batch_invariant']}=1," in f"{row['problem']},"
