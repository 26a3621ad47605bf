"""How much of the traffic is tuned: covered now (today's table against a window's calls) and observed (at the call)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gemmtuned.configs.human_units import duration, span
from gemmtuned.hooks.compiled_notes import CPP_WRAPPER
from gemmtuned.reports.own_time import COLUMNS, crowded_notes
from gemmtuned.reports.render import Column, Report, Row, Table, count, factor, flops, more, percent, several

WEIGHTS: Final = ("time", "calls", "flops")
SHOWN: Final = 50  # rows, unless told otherwise
_LEFT: Final = ("untunable", "unserved")  # why calls have no verdict that they are served by
GROUPS: Final = ("family", "device", "run", "problem")
# weight: (all of it, what is covered of it, how its amount is spelled, what it is called)
_WEIGHED: Final = {
    "time": ("time_us", "covered_time_us", duration, "GEMM time"),
    "calls": ("calls", "covered_calls", count, "calls"),
    "flops": ("flops", "covered_flops", flops, "FLOPs"),
}


def report(
    rows: Sequence[Row],
    *,
    by: str,
    weight: str,
    since_s: float,
    limit: int | None = None,
    compiled: Sequence[Row] = (),
    frozen: Sequence[Row] = (),
    warnings: Sequence[str] = (),
) -> Report:
    """rows: of db.queries.coverage for `by`, over the window `since_s`, heaviest first in the result.

    limit: how many to show; the sums are of all.
    compiled: of the view `compiled`, GEMMs that nobody can count.  frozen: of the view `frozen`.  warnings: why today's
    tables are not what programs use.
    """
    amount, covered, *_ = _WEIGHED[weight]
    shown: list[dict[str, Any]] = [
        {**row, "covered_share": share(row[covered], row[amount]), "hit_share": share(_hits(row), row["calls"])}
        for row in sorted(rows, key=lambda row: -row[amount])[:limit]
    ]
    notes = more(shown, rows)
    calls, hits = sum(row["calls"] for row in rows), sum(_hits(row) for row in rows)
    time_us = sum(row["time_us"] for row in rows)
    faster_us, now_us = sum(row["faster_time_us"] for row in rows), sum(row["now_time_us"] for row in rows)
    total = {
        "faster_share": share(faster_us, time_us),
        "best_share": share(sum(row["covered_time_us"] for row in rows) - faster_us, time_us),
        "gain": share(time_us, now_us),
        "covered_share": share(sum(row[covered] for row in rows), sum(row[amount] for row in rows)),
        "hit_share": share(hits, calls),
        "calls": calls,
        "exact_calls": sum(row["exact_calls"] for row in rows),
        "padded_calls": sum(row["padded_calls"] for row in rows),
        "missed_calls": sum(row["missed_calls"] for row in rows),
        **{f"{why}_{of}": sum(r.get(f"{why}_{of}", 0) for r in rows) for why in _LEFT for of in ("problems", "calls")},
        "estimated_share": share(sum(row["estimated_time_us"] for row in rows), sum(row["time_us"] for row in rows)),
    }
    notes += _of_runs(shown) if by == "run" else []
    window = span(since_s)
    wrapped = [row for row in compiled if row["kernel"] == CPP_WRAPPER]
    compiled = [row for row in compiled if row["kernel"] != CPP_WRAPPER]
    inside = len({row["problem"] for row in compiled})
    return Report(
        "coverage",
        [Table("rows", _columns(by, weight), shown, empty=f"No GEMM was recorded in the last {window}.")],
        facts={
            "by": by,
            "weight": weight,
            "since_s": since_s,
            "total": total,
            "compiled_problems": inside,
            "compiled_cpp_problems": len({row["problem"] for row in wrapped}),
            "frozen_problems": len({row["problem"] for row in frozen}),
        },
        lines=_lines(total, weight, window) if rows else [],
        notes=[*notes, *warnings, *frozen_notes(frozen), *_compiled(compiled), *_wrapped(wrapped)],
    )


def _of_runs(shown: Sequence[Row]) -> list[str]:
    """What the columns of runs' own time mean."""
    if not shown:
        return []
    found = [
        "of it GEMM: of the time on stock torch; program's gain: 1 / (1 - s + s/g) with that share s and gain g of its "
        "GEMMs; if all were free: 1 / (1 - s), the most that any kernel could give. All three are estimates, "
        "from races, timed calls or sizes"
    ]
    found += crowded_notes(shown)
    bounded = ", ".join(row["run"] for row in shown if row.get("bounded"))
    return found + (
        [f"{bounded}: the estimated GEMM time is more than the time it ran, so all of that"] if bounded else []
    )


def _columns(by: str, weight: str) -> tuple[Column, ...]:
    amount, _, spell, name = _WEIGHED[weight]
    return (
        Column(by, by, right=False),
        *(() if by in ("device", "problem") else (Column("device", "device", right=False),)),
        *(() if by == "problem" else (Column("problems", "problems", count), Column("tuned_problems", "tuned", count))),
        Column("calls", "calls", count),
        *(() if weight == "calls" else (Column(amount, name, spell),)),
        Column("covered_share", "covered now", percent),
        Column("hit_share", "hits at the call", percent),
        *(COLUMNS if by == "run" else ()),
    )


def _lines(total: Row, weight: str, window: str) -> list[str]:
    """The lines above the table. total: sums over all rows."""
    name = _WEIGHED[weight][-1]
    lines = [
        f"covered now: {percent(total['covered_share'] or 0)} of the {name} of the last {window} has a verdict",
        _three_parts(total),
        f"observed: {percent(total['hit_share'] or 0)} of {several(total['calls'], 'call')} hit a solution at the time "
        f"({count(total['exact_calls'])} exact, {count(total['padded_calls'])} padded)",
    ]
    lines += estimated(total["estimated_share"]) if weight == "time" else []
    if total["untunable_calls"]:
        lines.append(
            f"not tunable here: {several(total['untunable_problems'], 'problem')} "
            f"({several(total['untunable_calls'], 'call')}; gemmtuned untuned says which and why)"
        )
    if total["unserved_calls"]:
        lines.append(f"not covered: {several(total['unserved_calls'], 'call')} that solutions may not serve (below)")
    return lines


def estimated(share: float | None) -> list[str]:
    """The line that says which share of a GEMM time is estimated by size alone; no line where none is."""
    if not share:
        return []
    return [
        f"estimated: {percent(share)} of the GEMM time, by size alone: of problems neither tuned nor timed (calls made "
        "while the program waited for a CPU are not timed)"
    ]


def _three_parts(total: Row) -> str:
    """The shares of the GEMM time that run faster, are best with torch's own, have no verdict; and the gain, if any."""
    faster, best = total["faster_share"] or 0.0, total["best_share"] or 0.0
    said = (
        f"of the GEMM time {percent(faster)} runs faster, for {percent(best)} torch's own is best, "
        f"{percent(max(1 - faster - best, 0))} has no verdict"
    )
    return f"{said}; all GEMMs together: {factor(total['gain'] or 1)}" if faster else said


def _hits(row: Row) -> int:
    return int(row["exact_calls"] + row["padded_calls"])


def share(part: float, whole: float) -> float | None:
    """The part of the whole, 0 to 1; None where there is no whole."""
    return part / whole if whole else None


def frozen_notes(rows: Sequence[Row]) -> list[str]:
    """One line for each program that replays graphs captured before their problems were tuned."""
    problems: dict[str, set[str]] = {}
    for row in rows:
        problems.setdefault(row["run"], set()).add(row["problem"])
    return [
        f"{run}: {count(len(names))} {'problem is' if len(names) == 1 else 'problems are'} tuned, frozen in a graph: "
        "it keeps its old kernels until it is captured again (gemmtuned.on_reload tells the program when)."
        for run, names in sorted(problems.items())
    ]


def _compiled(rows: Sequence[Row]) -> list[str]:
    inside = len({row["problem"] for row in rows})
    if not inside:
        return []
    what = "problem is" if inside == 1 else "problems are"
    return [f"{inside} {what} inside kernels that torch.compile made (view compiled): neither counted here nor routed."]


def _wrapped(rows: Sequence[Row]) -> list[str]:
    """For each program, how many products its C++ wrapper or AOTInductor code calls past the dispatcher."""
    problems: dict[str, set[str]] = {}
    for row in rows:
        problems.setdefault(row["run"], set()).add(row["problem"])
    return [
        f"{run}: {count(len(names))} {'product runs' if len(names) == 1 else 'products run'} in compiled C++ and "
        f"{'is' if len(names) == 1 else 'are'} not counted (view compiled): a C++ wrapper or AOTInductor calls them "
        "past the dispatcher."
        for run, names in sorted(problems.items())
    ]
