"""Fit the constants of a kernel's estimate to timings, and say what lists of candidates by it would lose.

    python -m lab fit KERNEL lab/results/screen-KERNEL-*.json [--m 4,8,16 --sharpness 12 --write]

Takes the `screened` configurations of these results that have all of the kernel's parameters.  The best weigh most: it
is their order that counts.  Begins at the constants of today; those that are 0, and the `fixed` ones of the kernel's
JSON file, stay as they are.  With --write that file is written anew.  Needs numpy and scipy, and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from gemmtuned.kernels import catalog

UNITS = 132  # of an H100 or H200, where all of these results are from
Shape = tuple[int, int, int]
Timed = dict[Shape, dict[str, float]]  # us by config, as JSON


def timings(kernel: Any, paths: Iterable[Path], ms: set[int]) -> Timed:
    """Where several files have a configuration, the least of its times counts."""
    found: Timed = defaultdict(dict)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            for text, us, *_ in row.get("screened", ()) if not ms or row.get("m", 1) in ms else ():
                values = json.loads(text[text.index("{") :]) if "{" in text else {}
                if values.pop("kernel", None) != kernel.name:
                    continue
                known = {p.name: p.default for p in kernel.parameters if p.default is not None}
                config = known | values
                if set(config) != {p.name for p in kernel.parameters}:  # of the kernel as it was
                    continue
                timed = found[row.get("m", 1), row["n"], row["k"]]
                key = json.dumps(config, sort_keys=True)
                timed[key] = min(us, timed.get(key, math.inf))
    return found


def fitted(module: Any, found: Timed, name: str, fixed: set[str], sharpness: float) -> tuple[Any, int, float]:
    """(the constants of this name, how many timings they go by, what they are off by: RMS of the logarithm)."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]  # --help needs none

    points = []
    for (m, n, k), timed in found.items():
        best = min(timed.values())
        for text, us in timed.items():
            config = json.loads(text)
            if module.fit_of(config) == name:
                points.append((m, n, k, config, math.log(us), (best / us) ** sharpness))
    start = module.FITS[name]
    free = [field.name for field in dataclasses.fields(start) if field.name not in fixed and getattr(start, field.name)]
    if len(points) <= len(free):
        return start, len(points), math.nan
    whole = sum(weight for *_, weight in points)

    def at(scale: Any) -> Any:
        return dataclasses.replace(start, **{n: getattr(start, n) * float(s) for n, s in zip(free, scale, strict=True)})

    def loss(scale: Any) -> float:
        fit = at(scale)
        off = ((math.log(max(module.estimate(fit, m, n, k, UNITS, c), 0.1)) - us, w) for m, n, k, c, us, w in points)
        return sum(weight * by * by for by, weight in off) / whole

    scale = np.ones(len(free))
    for _ in range(4):
        scale = minimize(loss, scale, method="Nelder-Mead", options={"maxiter": 2000, "adaptive": True}).x
    return at(scale), len(points), loss(scale) ** 0.5


def lost(module: Any, found: Timed, fits: dict[str, Any], limit: int) -> tuple[float, float]:
    """The best of as many as the estimate likes best over the best of all: (geometric mean, worst) of the shapes."""
    over = []
    for (m, n, k), timed in found.items():
        by_estimate = {
            text: module.estimate(fits[module.fit_of(config)], m, n, k, UNITS, config)
            for text, config in ((text, json.loads(text)) for text in timed)
        }
        liked = sorted(by_estimate, key=by_estimate.__getitem__)[:limit]
        over.append(min(timed[text] for text in liked) / min(timed.values()))
    return math.exp(sum(map(math.log, over)) / len(over)), max(over)


def main() -> None:
    kernels = {
        name: (one, import_module(one.record.__module__))
        for backend in catalog.FOLDERS
        for name, one in catalog.kernels(backend).items()
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=tuple(kernels))
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--m", default="", help="rows of X whose timings count; all without")
    parser.add_argument("--sharpness", type=float, default=12.0, help="weight: (best of its shape / it) to this power")
    parser.add_argument("--write", action="store_true", help="into the JSON file beside the kernel")
    args = parser.parse_args()
    kernel, module = kernels[args.kernel]
    path = Path(module.__file__).with_suffix(".json")
    table = json.loads(path.read_text())
    found = timings(kernel, args.results, {int(m) for m in args.m.split(",") if m})
    if not found:
        raise SystemExit(f"no timing of {args.kernel} with its present parameters in these files")
    fits = {}
    for name in module.FITS:
        fit, count, off = fitted(module, found, name, set(table["fixed"]), args.sharpness)
        fits[name] = type(fit)(**{n: float(f"{value:.4g}") for n, value in dataclasses.asdict(fit).items()})
        print(f"{name}: {count} timings of {len(found)} shapes, off by {off:.3f}: {fits[name]}")
    for limit in (4, 8, 12, 16, 24):
        for which, constants in (("today's", module.FITS), ("these", fits)):
            mean, worst = lost(module, found, constants, limit)
            print(f"the first {limit} by {which}: {mean:.4f} of the best, {worst:.4f} at the worst")
    if args.write:
        table["about"] = f"{sum(map(len, found.values()))} timings: {', '.join(map(str, args.results))}"
        lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(dataclasses.asdict(f))}" for n, f in fits.items())
        head = {name: table[name] for name in ("about", "fixed")}
        text = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
        path.write_text("{\n" + text + ' "fits": {\n' + lines + "\n }\n}\n")
        print("written", path)


if __name__ == "__main__":
    main()
