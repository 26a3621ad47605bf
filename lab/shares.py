"""What the shares of kernels/budget.json lose on timings of whole spaces, and which shares these ask for.

    python -m lab shares lab/results/exhaustive-*-h200-*.json [--near 1.01 --write]

For each shape the best of our kernels' candidates that are admitted is set against the best of all that were timed.
The share that a kernel would need for a row of the table is how far down its own order its first candidate stands that
is within --near of the best, the largest of all shapes of that row; 0 where it never is.  --write puts these shares
into the rows that the timings are about; look at what they lose before you keep them.  Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import budget, catalog
from gemmtuned.kernels.own_kernel import Offer

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
TABLE = Path(budget.__file__).with_suffix(".json")


def timed(row: dict[str, Any]) -> dict[str, float]:
    """us of our kernels' candidates in a result's row, by `key`; of kernels and parameters as they are today."""
    found: dict[str, float] = {}
    for text, us, *_ in row.get("screened", ()):
        backend, _, config = text.partition(" ")
        try:
            found[key(Candidate(backend, config))] = us
        except (CandidateFailed, KeyError, ModuleNotFoundError):
            continue
    return found


def key(candidate: Candidate) -> str:
    """A candidate with all of its kernel's parameters. Raises CandidateFailed where it is none of ours."""
    if candidate.backend not in catalog.FOLDERS:
        raise CandidateFailed(f"{candidate} is none of ours")
    kernel, values = catalog.kernel_of(candidate)
    return f"{kernel.name} {json.dumps(kernel.checked(values), sort_keys=True)}"


def shares_needed(offers: dict[str, list[Offer]], times: dict[str, float], near: float) -> Counter[str]:
    """For each kernel how far down its own order its first candidate stands that is within `near` of the best."""
    alike = json.loads(TABLE.read_text())["alike"]
    free = budget.Shares({}, {}, alike, 1 << 30)
    best = min(times.values())
    needed: Counter[str] = Counter()
    for offered in offers.values():
        for kernel in dict.fromkeys(o.kernel for o in offered):
            mine = budget.chosen_of([o for o in offered if o.kernel == kernel], free, 1 << 30)
            at = (i for i, c in enumerate(mine, 1) if times.get(key(c), math.inf) <= near * best)
            needed[kernel] = next(at, 0)
    return needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--near", type=float, default=1.01)
    parser.add_argument("--write", action="store_true", help="into kernels/budget.json")
    args = parser.parse_args()
    table = json.loads(TABLE.read_text())
    over: dict[int, list[float]] = defaultdict(list)
    needed: dict[int, Counter[str]] = defaultdict(Counter)
    for row in (row for path in args.results for row in json.loads(path.read_text())["rows"]):
        times = timed(row)
        if not times:
            continue
        problem = Problem(m=row["m"], n=row["n"], k=row["k"])
        offers = catalog.offers(problem, H200)
        kernels = {o.kernel for offered in offers.values() for o in offered}
        number = table["rows"].index(budget.row_for(problem, H200, kernels))
        dealt = [key(c) for found in budget.deal(problem, H200, offers).values() for c in found]
        admitted = [times[one] for one in dealt if one in times]
        if admitted:
            over[number].append(min(admitted) / min(times.values()))
        needed[number] |= shares_needed(offers, times, args.near)
    for number in sorted(needed):
        row, ratios = table["rows"][number], over[number] or [math.nan]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"up to M = {row['up_to_m']}: {mean:.4f} of the best timed, {max(ratios):.4f} at the worst of {len(ratios)}"
        )
        for kernel, share in sorted(needed[number].items()):
            print(f"    {kernel}: {row['kernels'].get(kernel, table['unmeasured'])} candidates, {share} asked for")
        row["kernels"] |= needed[number]
    if args.write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print("written", TABLE)


if __name__ == "__main__":
    main()
