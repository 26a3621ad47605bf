"""Draw what dense.py measured: the gain over F.linear by M, and the times against the streaming floor.

    python -m benchmarks plot_dense {benchmarks,lab}/results/dense-*-h200-*.json --out docs/images/dense-h200.svg

Needs matplotlib (`pip install '.[bench]'`).  Several result files of one device are put together; a problem measured
twice counts as it was measured last.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plots


def rows(paths: list[Path]) -> tuple[str, list[dict[str, Any]]]:
    """(device and versions, rows of problems that were measured)."""
    found: dict[tuple[int, int, int, str], dict[str, Any]] = {}
    devices, dates = set(), []
    for path in sorted(paths, key=lambda path: json.loads(path.read_text())["date"]):
        raw = json.loads(path.read_text())
        devices.add(f"{raw['device']}, torch {raw['versions']['torch'].split('+')[0]}")
        dates.append(raw["date"][:10])
        found |= {(r["m"], r["n"], r["k"], r["dtype"]): r for r in raw["rows"] if "failed" not in r}
    return f"{'; '.join(sorted(devices))}, {dates[0]} to {dates[-1]}", list(found.values())


def draw(title: str, found: list[dict[str, Any]], out: Path) -> None:
    from matplotlib import pyplot

    ms = sorted({row["m"] for row in found})
    shapes = sorted({(row["n"], row["k"]) for row in found}, key=lambda shape: shape[0] * shape[1])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.4), layout="constrained")
    for index, (n, k) in enumerate(shapes):
        mine = sorted((row for row in found if (row["n"], row["k"]) == (n, k)), key=lambda row: row["m"])
        colour = pyplot.get_cmap("viridis")(index / max(len(shapes) - 1, 1))
        left.plot([ms.index(r["m"]) for r in mine], [r["counts"] for r in mine], "o-", color=colour, label=f"{n} x {k}")
    everywhere = [shape for shape in shapes if sum((row["n"], row["k"]) == shape for row in found) == len(ms)]
    left.plot(
        range(len(ms)),
        [
            statistics.geometric_mean(
                [row["counts"] for row in found if row["m"] == m and (row["n"], row["k"]) in everywhere]
            )
            for m in ms
        ],
        "k--",
        linewidth=2,
        label=f"geometric mean of the {len(everywhere)} at every M",
    )
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xlabel="M (rows of X)", ylabel="gain over F.linear (where torch's own stays: 1)", xticks=range(len(ms)))
    left.set_xticklabels(ms)
    figure.legend(*left.get_legend_handles_labels(), title="N x K", fontsize=7, ncols=7, loc="outside lower center")
    floors = [row["floor_us"] for row in found]
    plots.against_floor(right, floors, what="time (us)", ticks=[3, 5, 10, 20, 50])
    right.scatter(floors, [r["torch_us"] for r in found], marker="x", s=18, color="tab:red", label="F.linear")
    right.scatter(floors, [r["us"] for r in found], marker="o", s=14, color="tab:blue", label="chosen by the search")
    right.legend(fontsize=8)
    figure.suptitle(f"Dense {' and '.join(sorted({row['dtype'] for row in found}))}, cold weights, CUDA graph: {title}")
    plots.save(figure, out)


if __name__ == "__main__":
    plots.main(__doc__, rows, draw)
