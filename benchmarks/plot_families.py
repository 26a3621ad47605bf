"""Draw what families.py and weight_only.py measured: the gain by M for each kind, and times against the floor.

    cd benchmarks/results
    python -m benchmarks plot_families {families-,weight_only-}*h200-*.json --out docs/images/families-h200.svg

Needs matplotlib (`pip install '.[bench]'`).  Of a problem measured twice the later row counts.  The gain is over the
fastest that torch has beside it: its own call; for int8 `_int_mm` with one compiled kernel for scales behind it; where
torch refuses the scales of blocks, its product of copies made ahead; for weights of 8 and 4 bits beside X of 16,
F.linear of a weight that was dequantised before.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plots

KINDS: Final = {
    "row": "fp8, one scale a row", "tensor": "fp8, one scale a tensor", "block_row": "fp8, scales of blocks of 128",
    "int8": "int8, one scale a row", "weight_only fp8": "fp8 weight, bf16 X", "weight_only int8": "int8 weight, bf16 X",
    "weight_only int4_128": "int4 weight, groups of 128, bf16 X", "weight_only mxfp4": "MXFP4 weight, bf16 X",
}  # fmt: skip
MOST_OF_FLOOR: Final = 64  # rows of X: with more, reading W is not the work
OVER: Final = ("kept_us", "copied_us", "int_mm_fused_us", "torch_us")  # the first that a row has


def rows(paths: Iterable[Path]) -> tuple[str, list[dict[str, Any]]]:
    """(device and versions, rows of problems that were measured)."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    devices, dates = set(), []
    for raw in sorted((json.loads(path.read_text()) for path in paths), key=lambda raw: raw["date"]):
        devices.add(f"{raw['device']}, torch {raw['versions']['torch'].split('+')[0]}")
        dates.append(raw["date"][:10])
        of = "weight_only " if raw["benchmark"] == "weight_only" else ""  # both have a kind called int8
        for row in raw["rows"]:
            kind = of + row["kind"]
            if kind in KINDS and "failed" not in row:
                found[kind, row["problem"]] = {**row, "kind": kind}
    return f"{'; '.join(sorted(devices))}, {dates[0]} to {dates[-1]}", list(found.values())


def gain(row: dict[str, Any]) -> float:
    """What torch takes over what is published; 1 where nothing is."""
    if not row["published"]:
        return 1.0
    over = next(row[name] for name in OVER if name in row)
    return float(over / row["published_us"])


def draw(title: str, found: list[dict[str, Any]], out: Path) -> None:
    """Two pictures side by side, in one file."""
    from matplotlib import pyplot

    ms = sorted({row["m"] for row in found})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.4), layout="constrained")
    for index, (kind, name) in enumerate(KINDS.items()):
        mine = [row for row in found if row["kind"] == kind]
        at = sorted({row["m"] for row in mine})
        gains = [[gain(row) for row in mine if row["m"] == m] for m in at]
        positions = [ms.index(m) + 0.05 * (index - len(KINDS) / 2) for m in at]
        means = [statistics.geometric_mean(some) for some in gains]
        colour = pyplot.get_cmap("tab10")(index)
        left.plot(positions, means, "o-", color=colour, markersize=4, label=name)
        left.vlines(
            positions, [min(some) for some in gains], [max(some) for some in gains], color=colour, linewidth=0.8
        )
        ours = [row for row in mine if row["published"] and row["m"] <= MOST_OF_FLOOR]
        right.scatter(
            [row["floor_us"] for row in ours], [row["published_us"] for row in ours], s=9, color=colour, label=name
        )
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xlabel="M (rows of X)", ylabel="gain over torch (where torch's own stays: 1)", xticks=range(len(ms)))
    left.set_xticklabels(ms)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    floors = [row["floor_us"] for row in found]
    what = f"published, M up to {MOST_OF_FLOOR} (us)"
    plots.against_floor(right, floors, what=what, ticks=[3, 5, 10, 20, 50, 100])
    figure.suptitle(
        f"Weights of 8 and 4 bits, cold, CUDA graph; means, and the lowest and highest: {title}", fontsize=10
    )
    plots.save(figure, out)


if __name__ == "__main__":
    plots.main(__doc__, rows, draw)
