"""What the shortlist leaves out, raced against what is in it: clusters of every size, two chains of products a warp.

python benchmarks/explore.py --out FOLDER [--m 8,16,64 --shapes eight --most 90]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record

from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon import search
from gemmtuned.daemon.options import SearchOptions
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import tiles
from gemmtuned.kernels.triton.limits import shared_limit
from gemmtuned.kernels.triton.space import Tile, estimate_us

DEEP = "--deep" in sys.argv
KNOWN = Path(__file__).parent / "results/dense-all-h200-2026-11-22.json"
RINGS = (24 << 10, 36 << 10, 48 << 10, 64 << 10, 96 << 10)


def low(m: int, n: int, k: int, units: int, arch: str) -> list[tuple[str, dict[str, int]]]:
    """M > 64: split-K in clusters, by the estimate of M = 64."""
    found = []
    for rows, tokens, swap, warps in (
        (64, 64, 0, 4), (64, 64, 1, 4), (32, 64, 0, 4), (128, 64, 0, 4), (128, 64, 1, 4), (128, 64, 1, 8), (64, 128, 1, 4), (64, 128, 0, 8),
        (128, 128, 0, 8), (128, 128, 1, 8), (256, 64, 1, 8), (64, 256, 0, 8), (128, 256, 0, 8), (256, 128, 1, 8), (32, 128, 0, 8), (32, 128, 0, 4),
    ):  # fmt: skip
        if tokens > m:
            continue
        tiles_mn = -(-n // rows) * -(-m // tokens)
        for split in range(1, 9):
            programs = tiles_mn * split
            if not 0.45 * units <= programs <= 2.2 * units:
                continue
            for block_k in (64, 128):
                steps = -(-k // (block_k * split))
                shared_bytes = (rows + tokens) * block_k * 2
                if steps < 2 or steps * block_k * split > 1.15 * k:
                    continue
                for stages in (3, 4, 5, 7):
                    shared = stages * shared_bytes
                    if stages > steps + 1 or shared + (rows * tokens * 5 if split > 1 else 0) > shared_limit(arch):
                        continue
                    tile = Tile(
                        rows=rows, tokens=tokens, block_k=block_k, groups=1, split=split, warps=warps, stages=stages,
                        steps=steps, shared=shared, wide=True, cluster=split > 1,
                    )  # fmt: skip
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "group": 1}
                    config |= {"swap": swap, "warps": warps, "stages": stages, "cluster": int(split > 1)}
                    found.append((estimate_us(m, n, k, units, tile, tiles._FITTED_64, arch=arch), config))
    found.sort(key=lambda item: item[0])
    taken: Counter[Any] = Counter()
    chosen = []
    for _, config in found:
        group = (config["rows"], config["tokens"], config["swap"], config["warps"])
        if taken[group] < 5 and len(chosen) < 64:
            taken[group] += 1
            chosen.append(("tiles", config))
    return chosen


def offered(p: Any, units: int, arch: str, most: int) -> list[Candidate]:
    chosen = low(p.m, p.n, p.k, units, arch)
    known = [Candidate("cublaslt", c.config) for c in ()]
    for row in json.loads(KNOWN.read_text())["rows"]:
        if (row["m"], row["n"], row["k"]) == (p.m, p.n, p.k) and row.get("backend") == "triton":
            known.append(Candidate("triton", row["config"]))
    return list(
        dict.fromkeys([*known, *(Candidate.of("triton", kernel=kernel, **config) for kernel, config in chosen)])
    )


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="8,64,16")
    parser.add_argument("--shapes", default="eight")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--most", type=int, default=90, help="candidates of a problem")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    here = environment(cuda_device(0))
    shapes = {"eight": dense.EIGHT, "all": dense.EIGHT + dense.TWELVE}.get(args.shapes) or record.sizes(args.shapes)
    problems = dense.left_to_do([], args.m, shapes, "bf16")
    tables = {p: offered(p, here.device.units, here.device.arch, args.most) for p in problems}
    ahead = dense.Ahead(problems, here, tables.__getitem__)

    def measure(problem: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
        row["compile_s"] = round(ahead.wait(problem), 2)
        options = SearchOptions(only=tuple(tables[problem]))
        with patch.object(search, "FINALISTS", 5):
            found = dense.tune(problem, here, options)
        row["gpu_s"], row["wall_s"] = round(found["gpu_s"], 2), round(found["wall_s"], 2)
        best: dict[str, tuple[float, str]] = {}
        for t in found["trials"]:
            if t.phase == "screen" and t.us:
                config = json.loads(t.candidate.config or "{}")
                kind = "/".join(
                    [
                        config.get("kernel", str(t.candidate)),
                        "cluster" * config.get("cluster", 0),
                        str(config.get("chains", "")),
                    ]
                )
                best[kind] = min(best.get(kind, (1e9, "")), (round(t.us, 3), str(t.candidate)))
        row["best"] = best
        row["solution"] = str(found["solution"].candidate), found["solution"].gain_low
        row["failed_trials"] = [(str(t.candidate), t.phase, t.note[:160]) for t in found["trials"] if t.us is None][:40]
        row["screened"] = [
            (str(t.candidate), round(t.us, 3), t.note) for t in found["trials"] if t.phase == "screen" and t.us
        ]
        return row

    rows: list[dict[str, Any]] = []
    dense.work_through(
        problems, rows, measure, path=args.out / "explore.jsonl", until_s=time.monotonic() + args.seconds
    )
    print("saved", record.save("explore", {"benchmark": "explore", "stamps": here.stamps, "rows": rows}, args.out))
    os._exit(0)


if __name__ == "__main__":
    main()
