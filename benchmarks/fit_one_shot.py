"""Fit the estimate of kernels/cuda/one_shot.py (estimate_us) to timings, and say what lists by it would lose.

    python benchmarks/fit_one_shot.py benchmarks/results/screen-one_shot-h200-*.json [...]

Takes the `screened` configurations of these files.  Within a shape it is what comes into a program that makes the
difference: W, X and sums of others (OneShot.takes_kb).  Those three are fitted to differences from the shape's mean,
where configurations far from the best weigh a fifth; then a start and the bytes of W to what is left.  Needs numpy.
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
NEAR, FAR_WEIGHT = 1.15, 0.2
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
                    found[shape].append((OneShot(m, n, k, False, row["dtype"], c["rows"], c["parts"]), us))
    return {shape: timed for shape, timed in found.items() if timed}


def fit(found: dict[Shape, list[tuple[OneShot, float]]]) -> Any:
    """us a KB of W, X and sums; then the start in us, and us a byte of W."""
    inside, apart = [], []
    for timed in found.values():
        us = np.array([us for _, us in timed])
        takes = np.array([one.takes_kb for one, _ in timed])
        weight = np.where(us < NEAR * us.min(), 1, FAR_WEIGHT) / us
        mean = weight**2 / (weight**2).sum()
        inside.append((takes - mean @ takes) * weight[:, None])
        apart.append((us - mean @ us) * weight)
    a_kb = np.linalg.lstsq(np.concatenate(inside), np.concatenate(apart), rcond=None)[0]
    flat = [(one, us) for timed in found.values() for one, us in timed]
    us = np.array([us for _, us in flat])
    rest = us - np.array([one.takes_kb for one, _ in flat]) @ a_kb
    shared = np.array([(1.0, 2 * one.n * one.k) for one, _ in flat])
    return a_kb, np.linalg.lstsq(shared / us[:, None], rest / us, rcond=None)[0]


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
    a_kb, shared = fit(found)
    print(f"us a KB of W, X, sums: {a_kb.round(5).tolist()}; start {shared[0]:.3f} us; {shared[1]:.3e} us a byte of W")
    for m in sorted({shape[0] for shape in found}):
        for limit in (4, 6, 8, 12):
            print(lost(found, m, limit), "at the worst")


if __name__ == "__main__":
    main()
