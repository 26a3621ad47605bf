"""The configurations of one of our kernels, timed on one GPU: what a fit of its estimate needs, and where it wins.

    python -m lab screen KERNEL --out FOLDER [--m 4,8 --shapes eight|all|NxK,... --most 100 --also chains=1
        --before lab/results/dense-all-h200-*.json --seconds 480 --resume FOLDER/screen-KERNEL.jsonl --scales row,block]

For each problem the kernel's space (`scored`) is screened as the search does it, half of `most` from the head of the
estimates and the rest at random; `also` adds each once more with another value of a parameter.  Then the fastest five,
as far as the numeric gate lets them through, take turns with torch, with what an earlier result of dense.py found
(`before`) and with kernels that only read the weight.  The kernel needs no share in kernels/budget.json.  `scales`: of
8-bit problems (kinds of benchmarks/families.py) instead of bf16 ones.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import dense
import families
import record
import torch

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.child.verify import Checked, verify
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.torch_flags import as_called

RACED = 5
KERNELS = {name: (backend, one) for backend in catalog.FOLDERS for name, one in catalog.kernels(backend).items()}


def offered(
    kernel: str, problem: Problem, units: int, arch: str, most: int, also: list[tuple[str, int]]
) -> list[Candidate]:
    """At most `most` of the kernel's configurations, before those that `also` adds."""
    backend, one = KERNELS[kernel]
    configs = [config for _, config in one.scored(problem, Device("", "cuda", "", arch, units))]
    head, rest = configs[: most // 2], configs[most // 2 :]
    chosen = head + random.Random(1).sample(rest, min(len(rest), most - len(head)))
    chosen += [config | {name: value} for name, value in also for config in chosen]
    return list(dict.fromkeys(Candidate.of(backend, kernel=kernel, **config) for config in chosen))


def winners(paths: list[Path], device: str) -> dict[tuple[int, int, int], Candidate]:
    """{(m, n, k): what these results of dense.py found}, where several have one the last."""
    found = {}
    for path in paths:
        result = json.loads(path.read_text())
        if result["device"] != device:
            raise SystemExit(f"{path}: measured on {result['device']}, this is {device}")
        for row in result["rows"]:
            if "failed" not in row and row["dtype"] == "bf16":
                found[row["m"], row["n"], row["k"]] = Candidate(row["backend"], row["config"])
    return found


def measure(problem: Problem, here: Any, candidates: list[Candidate], before: Candidate | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "dtype": problem.dtype,
        "scale": problem.scale,
    }
    try:
        found = dense.tune(problem, here, SearchOptions(only=tuple(candidates)))
        screened = {t.candidate: t.us for t in found["trials"] if t.phase == "screen" and t.us}
        fastest = sorted((c for c in screened if c != dense.DEFAULT), key=lambda c: screened[c])[:RACED]
        verdicts = checked(problem, fastest)
        best = [c for c in fastest if verdicts[c].outcome == "ok"]
        against = [dense.DEFAULT, before or dense.DEFAULT]
        if problem.family == "dense":
            times = dense.take_turns(problem, (*against, *best), floor=True)
        else:
            series, floor_us = families.turns_on_gpu(problem, (*against, *best))
            times = [*series, [floor_us] * len(series[0])]
    except GemmtunedError as err:
        return {**row, "failed": str(err)}
    raced = times[2 : 2 + len(best)]
    # chosen by every other round, told by those between: else the luckiest would be
    chosen = min(range(len(best)), key=lambda i: statistics.median(raced[i][::2]), default=None)
    return row | {
        "torch_us": round(statistics.median(times[0]), 3), "before": str(before) if before else "",
        "before_us": round(statistics.median(times[1][1::2]), 3) if before else None,
        "floor_us": round(min(statistics.median(us[1::2]) for us in times[2 + len(best) :]), 3),
        "best": [str(c) for c in best], "best_us": [round(statistics.median(us), 3) for us in raced],
        "chosen_us": None if chosen is None else round(statistics.median(raced[chosen][1::2]), 3),
        "errors": [verdicts[c].err for c in best], "timed": len(screened) - 1,
        "wrong": [f"{c}: {verdicts[c].note}" for c in fastest if verdicts[c].outcome != "ok"],
        "not_timed": [f"{t.candidate}: {t.note}" for t in found["trials"] if not t.us and t.outcome != "ok"][:5],
        "screened": [(str(c), round(us, 3)) for c, us in screened.items()],
    }  # fmt: skip


@torch.inference_mode()
def checked(problem: Problem, candidates: list[Candidate]) -> dict[Candidate, Checked]:
    """The numeric gate's verdicts."""
    with as_called(problem):
        kernels = {c: BACKENDS[c.backend].prepare(c, problem) for c in candidates}
        default = BACKENDS["torch"].prepare(dense.DEFAULT, problem)
        return verify(problem, kernels, default, device=torch.device("cuda"))


def told(rows: list[dict[str, Any]]) -> None:
    """For each M the geometric means of the fastest over `before` and over the floor, and what was wrong."""
    for m in sorted({row["m"] for row in rows}):
        mine = [row for row in rows if row["m"] == m and row.get("chosen_us")]
        for name, group in (("eight", [r for r in mine if (r["n"], r["k"]) in dense.EIGHT]), ("all", mine)):
            for of in ("before_us", "floor_us"):
                ratios = [r["chosen_us"] / r[of] for r in group if r[of]]
                if ratios:
                    worst = f"{min(ratios):.3f} to {max(ratios):.3f}"
                    print(f"M {m}, {name} ({len(ratios)}): {dense.geomean(ratios):.4f} of {of}, {worst}", flush=True)
    for row in rows:
        if row.get("failed") or row.get("wrong"):
            print(f"{row['m']}x{row['n']}x{row['k']}: {row.get('failed') or row['wrong']}", flush=True)


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("kernel", choices=tuple(KERNELS))
    parser.add_argument("--m", default="4,8", help="rows of X, in this order")
    parser.add_argument("--shapes", default="eight", help="eight, all, or NxK,NxK,...")
    parser.add_argument("--scales", default="", help=f"of {','.join(families.KINDS)}: 8-bit problems")
    parser.add_argument("--most", type=int, default=100, help="configurations of a problem")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=VALUE", help="another value, too")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="results of dense.py on the same device")
    parser.add_argument("--seconds", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--resume", type=Path, help="the .jsonl of an earlier run on the same device")
    args = parser.parse_args()
    began = time.monotonic()
    also = [(name, int(value)) for name, _, value in (one.partition("=") for one in args.also)]
    here = environment(cuda_device(0))
    units, arch = here.device.units, here.device.arch
    before = winners(args.before, here.device.name)
    rows = dense.read_lines(args.resume)
    sizes = dense.shapes_of(args.shapes)
    problems = dense.left_to_do(rows, args.m, sizes, "bf16")
    if args.scales:
        done = {(row["m"], row["n"], row["k"], row["scale"]) for row in rows}
        problems = [
            families.problem_of(kind, m, n, k)
            for m in map(int, args.m.split(","))
            for n, k in sizes
            for kind in args.scales.split(",")
            if (m, n, k, families.KINDS[kind]["scale"]) not in done
        ]
    table = {p: offered(args.kernel, p, units, arch, args.most, also) for p in problems}
    ahead = dense.Ahead(problems, here, lambda problem: table[problem])

    def one(problem: Problem) -> dict[str, Any]:
        ahead.wait(problem)
        return measure(problem, here, table[problem], before.get((problem.m, problem.n, problem.k)))

    name = f"screen-{args.kernel}"
    dense.work_through(problems, rows, one, path=args.out / f"{name}.jsonl", until_s=began + args.seconds)
    told(rows)
    path = record.save(name, {"benchmark": "screen", "stamps": here.stamps, "rows": rows}, args.out)
    print("saved", path, flush=True)
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
