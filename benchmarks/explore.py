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
from gemmtuned.kernels.triton import tiles, warp_split_k
from gemmtuned.kernels.triton.limits import shared_limit
from gemmtuned.kernels.triton.shortlist import shortlist
from gemmtuned.kernels.triton.space import Tile, estimate_us, ring_stages

DEEP = "--deep" in sys.argv
KNOWN = Path(__file__).parent / "results/dense-all-h200-2026-11-22.json"
RINGS = (24 << 10, 36 << 10, 48 << 10, 64 << 10, 96 << 10)


def clusters(m: int, n: int, k: int, units: int, arch: str) -> list[tuple[float, str, dict[str, int]]]:
    """(estimate, kernel, config) of clusters of 2 to 8 programs a tile."""
    tokens = max(8, 1 << (m - 1).bit_length())
    found = []
    if tokens < 64:
        kinds = [
            ("warp_split_k", rows, block_k, warps, chains, 0)
            for rows in (16, 32, 64)
            for block_k in (64, 128, 256)
            for warps in (2, 4)
            for chains in (1, 2)
            if block_k >= 64 * chains
        ]
    else:
        kinds = []
    if tokens >= 16:
        kinds += [
            ("tiles", rows, block_k, warps, 0, swap)
            for rows, swap, warps in ((16, 0, 4), (32, 0, 4), (64, 1, 4), (128, 1, 8))
            for block_k in (64, 128, 256)
            if tokens >= 64 or rows >= 32
        ]
    for name, rows, block_k, warps, chains, swap in kinds:
        tiles_n = -(-n // rows)
        groups = warps if chains else 1
        if (rows + tokens) * block_k > 1 << 14:
            continue
        for split in range(2, 9):
            steps = -(-k // (block_k * groups * split))
            programs = tiles_n * split
            if steps < 2 or steps * block_k * groups * split > 1.15 * k or not 0.6 * units <= programs <= 3 * units:
                continue
            w_bytes, shared_bytes = groups * rows * block_k * 2, groups * (rows + tokens) * block_k * 2
            for stages in ring_stages(
                RINGS, w_bytes=w_bytes, shared_bytes=shared_bytes, steps=steps, programs=programs, units=units,
                arch=arch, most=12,
            ):  # fmt: skip
                shared = (stages - 1) * shared_bytes
                if shared > shared_limit(arch):
                    continue
                tile = Tile(
                    rows=rows, tokens=tokens, block_k=block_k, groups=groups, split=split, warps=warps, stages=stages,
                    steps=steps, shared=shared, wide=swap == 1,
                )  # fmt: skip
                c = warp_split_k._FITTED if chains else tiles.FITTED
                config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
                config |= {"stages": stages, "cluster": 1}
                config |= {"chains": chains} if chains else {"group": 1, "swap": swap}
                found.append((estimate_us(m, n, k, units, tile, c, arch=arch), name, config))
    return sorted(found, key=lambda item: item[0])


def deep(m: int, n: int, k: int, units: int, arch: str) -> list[tuple[str, dict[str, int]]]:
    """One or two programs a unit: many warps and chains, wide steps, deep rings."""
    tokens = max(8, 1 << (m - 1).bit_length())
    found = []
    for rows in (16, 32):
        tiles_n = -(-n // rows)
        for split in range(1, 9):
            programs = tiles_n * split
            lowest = min((s for s in range(1, 9) if tiles_n * s >= 90), default=8)
            if not (split == lowest or 124 <= programs <= 132) or programs > 264:
                continue
            for block_k in (128, 256, 512):
                for warps in (2, 4, 8):
                    for chains in (1, 2, 4):
                        steps = -(-k // (block_k * warps * split))
                        shared_bytes = warps * (rows + tokens) * block_k * 2
                        if steps < 2 or steps * block_k * warps * split > 1.15 * k or block_k // chains < 32:
                            continue
                        if rows * tokens * chains > 32 * 16:
                            continue
                        here = 2 if programs > units else 1
                        for ring in (64 << 10, 110 << 10, 180 << 10):
                            stages = min(ring // here // shared_bytes, steps) + 1
                            if stages < 3 or (stages - 1) * shared_bytes > shared_limit(arch):
                                continue
                            config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split}
                            config |= {"warps": warps, "stages": stages, "cluster": int(split > 1), "chains": chains}
                            if ("warp_split_k", config) not in found:
                                found.append(("warp_split_k", config))
    return found


def low(m: int, n: int, k: int, units: int, arch: str) -> list[tuple[str, dict[str, int]]]:
    """M = 64: low tiles, clusters or not."""
    found = []
    for rows, swap, warps in ((16, 0, 4), (32, 0, 4), (64, 1, 4)):
        tiles_n = -(-n // rows)
        for split in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16):
            programs = tiles_n * split
            if not 90 <= programs <= 2.2 * units:
                continue
            for block_k in (64, 128, 256):
                steps = -(-k // (block_k * split))
                shared_bytes = (rows + 64) * block_k * 2
                if steps < 2 or steps * block_k * split > 1.15 * k:
                    continue
                here = -(-programs // units)
                for ring in (100 << 10, 200 << 10):
                    stages = min(ring // here // shared_bytes, steps) + 1
                    if stages < 3 or (stages - 1) * shared_bytes > shared_limit(arch):
                        continue
                    for cluster in (0, 1) if 1 < split <= 8 else (0,):
                        config = {"rows": rows, "tokens": 64, "block_k": block_k, "split": split, "group": 1}
                        config |= {"swap": swap, "warps": warps, "stages": stages, "cluster": cluster}
                        if ("tiles", config) not in found:
                            found.append(("tiles", config))
    return found


def offered(p: Any, units: int, arch: str, most: int) -> list[Candidate]:
    if DEEP:
        chosen = (low if p.m == 64 else deep)(p.m, p.n, p.k, units, arch)
    else:
        chosen = [(kernel, config) for kernel, config in shortlist(p.m, p.n, p.k, units, arch=arch)]
        for kernel, config in list(chosen)[:8]:
            if kernel == "warp_split_k" and config["block_k"] >= 64:
                chosen.append((kernel, {**config, "chains": 2}))
    taken: Counter[Any] = Counter()
    for _, kernel, config in clusters(p.m, p.n, p.k, units, arch) if not DEEP else ():
        group = (kernel, config["rows"], config["split"], config.get("chains"))
        if taken[group] < 4 and len(chosen) < most:
            taken[group] += 1
            chosen.append((kernel, config))
    known = []
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
