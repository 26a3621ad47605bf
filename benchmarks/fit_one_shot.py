"""Fit the estimate of kernels/cuda/one_shot.py (estimate_us) to timings, and say what lists by it would lose.

    python benchmarks/fit_one_shot.py lab/results/screen-one_shot-h200-*.json [...]

Takes the `screened` configurations of these files that are within a third of their shape's best.  The estimate is a
start, and so much for each byte of W, for what comes into a program of W and of sums (OneShot.takes_kb), and for the
cycles of its shared memory (OneShot.shared_kcycles); least squares of what it is off by, in per cent.  Needs numpy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from gemmtuned.kernels.cuda.one_shot import OneShot, estimate_us

UNITS = 132
NEAR = 1.3
Shape = tuple[int, int, int]


def timings(paths: list[Path]) -> dict[Shape, list[tuple[OneShot, float]]]:
    """The configurations of each shape with their times in us."""
    found: dict[Shape, list[tuple[OneShot, float]]] = defaultdict(list)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            shape = m, n, k = row["m"], row["n"], row["k"]
            for config, us, *_ in row["screened"]:
                if config.startswith("cuda "):
                    c = json.loads(config.removeprefix("cuda "))
                    found[shape].append(
                        (
                            OneShot(
                                m, n, k, False, row["dtype"], c["rows"], c["parts"], c.get("tokens", -(-m // 16) * 16)
                            ),
                            us,
                        )
                    )
    return {shape: timed for shape, timed in found.items() if timed}


def fit(found: dict[Shape, list[tuple[OneShot, float]]]) -> Any:
    """(the start in us; us a byte of W, a KB of W and of sums that comes in, 1000 cycles), what it is off by."""
    near = [(one, us) for timed in found.values() for one, us in timed if us < NEAR * min(best for _, best in timed)]
    us = np.array([us for _, us in near])
    known = np.array([(1.0, 2 * one.n * one.k, *one.takes_kb, one.shared_kcycles) for one, _ in near]) / us[:, None]
    costs = np.linalg.lstsq(known, np.ones(len(us)), rcond=None)[0]
    return costs, float(np.sqrt(np.mean((known @ costs - 1) ** 2)))


def lost(found: dict[Shape, list[tuple[OneShot, float]]], m: int, limit: int) -> str:
    """The best of as many as the estimate likes best, over the best of all."""
    over = []
    for shape, timed in found.items():
        if shape[0] == m:
            liked = sorted(timed, key=lambda item: estimate_us(item[0], UNITS))[:limit]
            over.append(min(us for _, us in liked) / min(us for _, us in timed))
    mean = math.exp(sum(map(math.log, over)) / len(over))
    return f"M {m}, the first {limit}: {mean:.4f} times the best, geometric mean of {len(over)} shapes; {max(over):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    found = timings(parser.parse_args().results)
    (start, byte, w, sums, cycles), rms = fit(found)
    print(f"start {start:.3f} us; {byte:.3e} us a byte of W; a KB of W {w:.5f}, of sums {sums:.5f}", end="; ")
    print(f"{cycles:.4f} us for 1000 cycles of shared memory; off by {100 * rms:.1f} %")
    for m in sorted({shape[0] for shape in found}):
        for limit in (4, 6, 8, 12):
            print(lost(found, m, limit), "at the worst")


if __name__ == "__main__":
    main()
