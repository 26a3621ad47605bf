"""Fit the estimate of the GEMV (kernels/triton/gemv.py: _Costs) to timings, and say what lists by it would lose.

    python benchmarks/fit_gemv.py RESULT.json [...] --floors lab/results/dense-m1-m16-h200-*.json

Takes the `screened` configurations at M = 1 of these files, as fractions of their own run's floor.  Configurations are
of one kind when their products and their loads are made alike (`mma`, and `hold` or not); each kind has its own
constants.  The best weigh most: it is their order that counts.  The list is of what gemv.scored offers where there is
the tensor core's instruction.  Needs numpy and scipy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]

UNITS = 132
BANDWIDTH = 4.76e6
START = np.array([2.2, 0.65, 0.004, 0.0, 0.02, 0.3, -0.3])  # start, latency, load, row, warp, beyond, whole
SHARPNESS = 5.0  # weight of a timing: (best of its shape / it) to this power
Kind = tuple[int, int]
Key = tuple[int, int, int, int, int, int]  # rows, block_k, warps, unroll, mma, hold


def timings(paths: list[Path]) -> dict[tuple[int, int], dict[Key, float]]:
    """{(n, k): {configuration: time over the floor}}; where several files have one, the last counts."""
    found: dict[tuple[int, int], dict[Key, float]] = defaultdict(dict)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if row.get("m", 1) != 1:
                continue
            for config, us, *_ in row["screened"]:
                c = json.loads(config.removeprefix("triton "))
                if c["kernel"] == "gemv" and c["split"] == 1 and c.get("hold", 0) <= 2:
                    key = (c["rows"], c["block_k"], c["warps"], c["unroll"], c.get("mma", 0), c.get("hold", 0))
                    found[row["n"], row["k"]][key] = us / row["floor_us"]
    return found


def estimates_us(n: Any, k: Any, keys: Any, p: Any) -> Any:
    """As gemv._estimate_us, for arrays."""
    rows, block_k, warps, unroll, mma, _ = keys.T
    a_thread = rows * block_k / (warps * 32)
    steps = np.ceil(k / block_k)
    busiest = np.ceil(np.ceil(n / rows) / UNITS)
    registers = 24 + np.where(mma == 1, 8 * rows, a_thread) + (a_thread + a_thread / rows) * unroll / 2
    here = np.minimum(np.minimum(busiest, 32), 64 // warps)
    here = np.minimum(here, np.maximum(1, 2048 // (warps * np.minimum(registers, 255))))
    in_flight = here * rows * np.minimum(block_k, k) * 2 * np.minimum(unroll, steps)
    memory = n * k * 2 / BANDWIDTH
    loads = busiest * rows * k * 2 / np.minimum(1.15 * BANDWIDTH / UNITS, in_flight / p[1])
    beyond = steps * block_k / k - 1
    other = p[2] * a_thread * unroll + p[3] * rows + p[4] * warps + p[5] * beyond + p[6] * (unroll >= steps)
    return p[0] + (memory**4 + loads**4) ** 0.25 + other


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--floors", type=Path, required=True, help="a result of dense.py, for the floors in us")
    args = parser.parse_args()
    found = timings(args.results)
    floors = {
        (row["n"], row["k"]): row["floor_us"] for row in json.loads(args.floors.read_text())["rows"] if row["m"] == 1
    }
    shapes = [shape for shape in found if shape in floors]
    by_kind: dict[Kind, list[tuple[int, int, Key, float, float]]] = defaultdict(list)
    for n, k in shapes:
        best = min(found[n, k].values())
        for key, over in found[n, k].items():
            by_kind[key[4], int(key[5] > 0)].append((n, k, key, over * floors[n, k], (best / over) ** SHARPNESS))
    fitted: dict[Kind, Any] = {}
    for kind, points in sorted(by_kind.items()):
        n, k, us, weight = (np.array([point[i] for point in points], float) for i in (0, 1, 3, 4))
        keys = np.array([point[2] for point in points], float)

        def loss(p: Any, n: Any = n, k: Any = k, keys: Any = keys, us: Any = us, weight: Any = weight) -> float:
            off = np.log(np.maximum(estimates_us(n, k, keys, p), 0.1) / us)
            return float((weight * off * off).sum() / weight.sum())

        p = START
        for _ in range(4):
            p = minimize(loss, p, method="Nelder-Mead", options={"maxiter": 4000, "adaptive": True}).x
        fitted[kind] = p
        print(f"mma {kind[0]} held {kind[1]}: {len(points)} timings, off by {loss(p) ** 0.5:.3f}:", p.round(5).tolist())
    for limit in (16, 24, 10_000):
        lost = []
        for n, k in shapes:
            offered = [key for key in found[n, k] if key[5] == 1 or (key[4] and key[5])]
            order = sorted(
                offered,
                key=lambda key: float(
                    estimates_us(float(n), float(k), np.array([key], float), fitted[key[4], int(key[5] > 0)])[0]
                ),
            )
            lost.append(min(found[n, k][key] for key in order[:limit]))
        print(f"the best of {limit}: {geomean(lost):.4f} of the floor")


if __name__ == "__main__":
    main()
