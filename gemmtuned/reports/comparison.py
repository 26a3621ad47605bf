"""What `gemmtuned compare` makes of its rounds: medians, ratios to "off", and whether that is more than noise.

Arms run alternated, so each round gives one ratio between neighbours in time and a slow drift of the machine
cancels.  The interval is that of the sign test on the median: it assumes nothing about how the noise is spread, and
its true confidence is printed, since with few rounds there is no 95 % to be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, Final

from gemmtuned.reports.render import Column, Report, Table, factor, percent, several

ARMS: Final = ("off", "capture", "on")
MEANING: Final = {"off": "off", "capture": "capture only", "on": "on"}
DISTURBED: Final = 0.25  # share of the machine's CPUs that others used in one run of a round
FEWEST: Final = 5  # rounds that must be left
ENOUGH: Final = 0.9  # below this confidence no verdict is given: fewer than 5 rounds
TOO_FEW: Final = "too few rounds"
TOO_BUSY: Final = "too busy to tell"  # the verdict where most rounds were disturbed


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better than "off": median over rounds, its interval, the interval's confidence."""

    median: float
    low: float
    high: float
    confidence: float

    @property
    def verdict(self) -> str:
        """better, worse, within noise, or too few rounds."""
        if self.confidence < ENOUGH:
            return TOO_FEW
        return "better" if self.low > 1 else "worse" if self.high < 1 else "within noise"


def ratio(off: Sequence[float], arm: Sequence[float], *, higher_is_better: bool) -> Ratio:
    """Compare two arms of equal length, round by round; above 1 the arm is better than off."""
    pairs = zip(off, arm, strict=True)
    ratios = sorted(b / a if higher_is_better else a / b for a, b in pairs)
    rounds = len(ratios)
    # leave out as many extremes on each side as keep 95 %, or none
    cut = 0
    while cut + 1 < (rounds + 1) // 2 and _confidence(rounds, cut + 1) >= 0.95:
        cut += 1
    return Ratio(median(ratios), ratios[cut], ratios[-1 - cut], _confidence(rounds, cut))


def _confidence(rounds: int, cut: int) -> float:
    """Chance that the median lies between the values left when `cut` are taken off each end."""
    outside = sum(comb(rounds, i) for i in range(cut + 1))
    return 1 - 2 * outside / float(2**rounds)


def undisturbed(others: Sequence[float]) -> list[int]:
    """The rounds in which others used little of the CPU; all of them where fewer than FEWEST are left."""
    quiet = [i for i, share in enumerate(others) if share <= DISTURBED]
    return quiet if len(quiet) >= FEWEST else list(range(len(others)))


def report(
    command: Sequence[str],
    figures: Mapping[str, Sequence[float]],
    *,
    unit: str,
    higher_is_better: bool,
    others: Sequence[float] = (),
    hits: tuple[int, int] | None = None,
) -> Report:
    """The report for figures[arm][round]. others: of each round, the share of the CPU that other programs used.

    hits: of all calls that were counted in the runs "on", (those that ran a solution, all); None where nobody looked.
    """
    kept = undisturbed(others) if others else list(range(len(figures["off"])))
    busy = bool(others) and median(others[i] for i in kept) > DISTURBED
    figures = {arm: [figures[arm][i] for i in kept] for arm in ARMS}
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        values = figures[arm]
        row: dict[str, Any] = {"arm": arm, "median": median(values), "low": min(values), "high": max(values)}
        row["figures"] = list(values)
        if arm != "off":
            r = ratio(figures["off"], values, higher_is_better=higher_is_better)
            row |= {"ratio": r.median, "ratio_low": r.low, "ratio_high": r.high}
            row |= {"confidence": r.confidence, "verdict": TOO_BUSY if busy and r.verdict != TOO_FEW else r.verdict}
        rows.append(row)
    rounds = len(figures["off"])
    better = "higher" if higher_is_better else "lower"
    on = rows[-1]
    columns = (
        Column("arm", "arm", lambda arm: MEANING[arm], right=False),
        Column("median", f"median {unit}", _figure),
        Column("low", "lowest", _figure),
        Column("high", "highest", _figure),
        Column("ratio", "gain", factor),
        Column("ratio_low", "from", factor),
        Column("ratio_high", "to", factor),
        Column("verdict", "verdict", right=False),
    )
    return Report(
        "compare",
        [Table("arms", columns, rows)],
        facts={
            "command": list(command),
            "rounds": rounds,
            "unit": unit,
            "higher_is_better": higher_is_better,
            "others": list(others),
            "left_out": len(others) - rounds if others else 0,
            "hits": hits and {"solution_calls": hits[0], "calls": hits[1]},
        },
        lines=[f"{rounds} rounds of {' '.join(command)}; {better} {unit} is better"],
        notes=[_sentence(on, rounds), *_routed(hits), *_busy(others, rounds)],
    )


def _routed(hits: tuple[int, int] | None) -> list[str]:
    """What ran in the runs that were "on": without a solution they are runs of stock torch."""
    if hits is None:
        return []
    served, calls = hits
    if not calls:
        return ["no GEMM of it was counted: gemmtuned changes nothing in it"]
    if served:
        return [f'in the runs "on" {percent(served / calls)} of {several(calls, "call")} ran a solution']
    return [
        f'in the runs "on" none of {several(calls, "call")} ran a solution: they are runs of stock torch, too. '
        "gemmtuned coverage says what is tuned for it"
    ]


def _busy(others: Sequence[float], rounds: int) -> list[str]:
    if not others:
        return []
    said = [f"other programs used {percent(median(others))} of the CPU meanwhile, {percent(max(others))} at most"]
    left_out = len(others) - rounds
    if left_out:
        said.append(f"{left_out} of {len(others)} rounds left out: others used more than {DISTURBED:.0%} in them")
    elif max(others) > DISTURBED:
        said.append(f"others used more than {DISTURBED:.0%} in too many rounds to leave them out: try a quieter time")
    return said


def _sentence(on: Mapping[str, Any], rounds: int) -> str:
    gain = f"{(on['ratio'] - 1) * 100:+.1f} %"
    span = f"from {(on['ratio_low'] - 1) * 100:+.1f} to {(on['ratio_high'] - 1) * 100:+.1f} %"
    sure = f"{on['confidence'] * 100:.0f} % interval"
    if on["verdict"] == TOO_FEW:
        return f"{rounds} rounds cannot tell a gain from noise: median {gain}, {span}. Use --rounds 5 or more."
    if on["verdict"] == TOO_BUSY:
        return f"Too busy to tell: median {gain}, {sure} {span}."
    if on["verdict"] == "within noise":
        return f"Within noise: median {gain}, {sure} {span}."
    return f"gemmtuned makes it {on['verdict']}: median {gain}, {sure} {span}."


def _figure(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
