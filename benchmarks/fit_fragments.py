"""Fit the estimate of `fragments` or `selected` to timings, and say what lists by it would lose.

    python benchmarks/fit_fragments.py fragments lab/results/screen-fragments-registers-h200-*.json

Takes the `screened` configurations of these files that have the kernel's keys: name files that were measured with the
kernel as it is (FITTED says which).  The best weigh most: it is their order that counts.  Needs numpy and scipy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]

from gemmtuned.kernels.triton import fragments, selected
from gemmtuned.kernels.triton.to_registers import MOST_TOKENS, STEP_K, Fit, busiest, room

UNITS = 132
START = np.array([4.3e6, 0.9, 1.3, 0.1, 0.1, 0.5, 0.07, 0.02])
NAMES = tuple(field.name for field in dataclasses.fields(Fit))
MODULES: dict[str, Any] = {module.NAME: module for module in (fragments, selected)}
SHARPNESS = 12.0  # weight of a timing: (best of its problem / it) to this power
Shape = tuple[int, int, int]


def timings(kernel: Any, paths: list[Path], ms: set[int]) -> dict[Shape, dict[tuple[int, ...], float]]:
    """{(m, n, k): {values of its KEYS: us}}; where several files have one, the least counts."""
    found: dict[Shape, dict[tuple[int, ...], float]] = defaultdict(dict)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if row["m"] not in ms:
                continue
            for text, us, *_ in row.get("screened", ()):
                config = json.loads(text[text.index("{") :]) if "{" in text else {}
                if config.get("kernel") != kernel.NAME:
                    continue
                if set(config) != {"kernel", *kernel.KEYS}:  # of the kernel as it was
                    continue
                if config["rows"] not in kernel.ROWS:
                    continue
                key = tuple(config[name] for name in kernel.KEYS)
                timed = found[row["m"], row["n"], row["k"]]
                timed[key] = min(us, timed.get(key, math.inf))
    return found


def columns(kernel: Any, found: dict[Shape, dict[tuple[int, ...], float]]) -> dict[str, Any]:
    """Arrays of all that the estimate needs to know of each timing."""
    rows = []
    for (_, n, k), timed in found.items():
        best = min(timed.values())
        for key, us in timed.items():
            config = dict(zip(kernel.KEYS, key, strict=True))
            at_once = room(config["registers"] or kernel.registers_of(k, config), config["warps"])
            here = (n, k, busiest(n, UNITS, config), at_once)
            rows.append((*here, *key, us, (best / us) ** SHARPNESS))
    names = ("n", "k", "busiest", "room", *kernel.KEYS, "us", "weight")
    return dict(zip(names, np.array(rows, float).T, strict=True))


def estimates_us(c: dict[str, Any], p: Any) -> Any:
    """As to_registers.estimate_us, for arrays."""
    bandwidth, latency, start, wait, another, beyond, token, load = p
    step_k = STEP_K * c["warps"] * c["split"]
    steps = np.ceil(c["k"] / step_k)
    groups = np.ceil(steps / c["ahead"])
    rounds = np.ceil(c["busiest"] / c["room"])
    memory = c["n"] * c["k"] * 2 / bandwidth
    in_flight = np.minimum(c["busiest"], c["room"]) * c["rows"] * c["warps"] * STEP_K * 2
    in_flight = in_flight * np.minimum(c["ahead"], steps)
    each = steps * c["warps"] * STEP_K * 2
    loads = c["busiest"] * c["rows"] * each / np.minimum(1.15 * bandwidth / UNITS, in_flight / latency)
    waits = wait * rounds * groups + another * (rounds - 1)
    computed = groups * c["ahead"] * step_k / c["k"] - 1
    tokens = c.get("tokens", MOST_TOKENS)
    issue = token * tokens + load * np.minimum(c["ahead"], steps) * (c["rows"] + tokens) / 4
    return start + (memory**4 + loads**4) ** 0.25 + waits + beyond * computed + issue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=tuple(MODULES))
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--m", default="4,8,16", help="rows of X whose timings count")
    args = parser.parse_args()
    kernel = MODULES[args.kernel]
    found = timings(kernel, args.results, set(map(int, args.m.split(","))))
    c = columns(kernel, found)
    begun = START.copy()
    if "tokens" not in c:  # always as many: part of start_us
        begun[NAMES.index("token_us")] = 0.0

    def loss(scale: Any) -> float:
        off = np.log(np.maximum(estimates_us(c, scale * begun), 0.1) / c["us"])
        return float((c["weight"] * off * off).sum() / c["weight"].sum())

    p = np.ones(len(begun))
    for _ in range(6):
        p = minimize(loss, p, method="Nelder-Mead", options={"maxiter": 6000, "adaptive": True}).x
    print(f"{len(c['us'])} timings of {len(found)} problems, off by {loss(p) ** 0.5:.3f}")
    for name, value in zip(NAMES, p * begun, strict=True):
        print(f"{name}={value:.4g},", end=" ")
    print()
    guessed = estimates_us(c, p * begun)
    # among what was timed, which is a part of what is offered, and what was fitted
    begin, lost = 0, defaultdict(list)
    for timed in found.values():
        us = c["us"][begin : begin + len(timed)]
        order = np.argsort(guessed[begin : begin + len(timed)], kind="stable")
        for limit in (4, 8, 12, 16):
            lost[limit].append(us[order[:limit]].min() / us.min())
        begin += len(timed)
    for limit, ratios in lost.items():
        print(f"the first {limit}: {np.exp(np.log(ratios).mean()):.4f} of the best, {max(ratios):.4f} at the worst")


if __name__ == "__main__":
    main()
