# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""How fast W can be read in the order in which a kernel with tensor cores needs it, on one GPU.

    python -m lab read_order --out FOLDER [--shapes eight|NxK,...]

A dot product of all of a row (M = 1) lets a thread block read whole rows; tiles of the matrix instruction are 8 or 16
rows high and a few dozen values wide.  Kernels that only read W, all of it once and in tiles of `rows` x `block_k`,
with 8 or 16 loads of 16 bytes in flight a thread and as many thread blocks as run at once at most, take turns with the
streaming floor of dense.py; cold weights, CUDA graphs.  The fastest for each width of a tile is reported.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import record
import torch
import triton
import triton.language as tl
from dense import EIGHT
from timing import CudaTimer, floor_launches

LAUNCHES, ROUNDS = 30, 15
COLD_BYTES = 200 << 20  # of weights read before one is read again: four times an H200's L2


@triton.jit
def read_tiles(w, out, K, steps, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr):
    """Sum of ROWS rows of W over steps * UNROLL * BLOCK_K of K; program_id(1) says which part of K."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ks = tl.program_id(1) * (steps * UNROLL * BLOCK_K) + tl.arange(0, BLOCK_K)
    at = w + rows[:, None] * K + ks[None, :]
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for step in range(steps):
        for i in tl.static_range(UNROLL):
            acc += tl.load(at + (step * UNROLL + i) * BLOCK_K, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(acc, 1), 0))


def settings(n: int, k: int, units: int) -> Iterator[dict[str, int]]:
    """Tiles, warps and parts of K that read all of W exactly once."""
    for block_k in (32, 64, 128, 256, 512, 1024):
        for rows in (1, 2, 4, 8, 16, 32):
            for warps in (2, 4, 8):
                each = rows * block_k // (warps * 32 * 8)  # loads of a thread for one tile
                if not 1 <= each <= 8 or n % rows:
                    continue
                for split in (1, 2, 4, 7, 8, 14):
                    blocks = n // rows * split
                    for loads in (8, 16):
                        unroll = loads // each
                        if units * 0.6 <= blocks <= units * 64 // warps and k % (split * block_k * unroll) == 0:
                            yield {"rows": rows, "block_k": block_k, "warps": warps, "split": split, "unroll": unroll}


@torch.inference_mode()
def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--shapes", default="eight", help="eight or NxK,NxK,...")
    args = parser.parse_args()
    units = torch.cuda.get_device_properties(0).multi_processor_count
    timer, out, result = CudaTimer(), torch.empty(1 << 20, device="cuda"), []
    for n, k in EIGHT if args.shapes == "eight" else record.sizes(args.shapes):
        copies = -(-COLD_BYTES // (n * k * 2))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        launches = copies * -(-LAUNCHES // copies)
        best: dict[int, tuple[float, Any, dict[str, int]]] = {}
        for s in settings(n, k, units):

            def call(i: int, s: dict[str, int] = s, k: int = k, n: int = n, weights: Any = weights) -> None:
                steps = k // (s["split"] * s["block_k"] * s["unroll"])
                read_tiles[(n // s["rows"], s["split"])](
                    weights[i % len(weights)], out, k, steps, s["rows"], s["block_k"], s["unroll"],
                    num_warps=s["warps"], num_stages=1,
                )  # fmt: skip

            graph = timer.prepare(call, launches)
            us = min(timer.measure([graph], 3)[0])
            if s["block_k"] not in best or us < best[s["block_k"]][0]:
                best[s["block_k"]] = (us, graph, s)
        floors = floor_launches(timer, weights, launches)
        times = timer.measure([*(graph for _, graph, _ in best.values()), *floors], ROUNDS + 2)
        us = [statistics.median(series[2:]) / launches for series in times]
        line: dict[str, Any] = {"n": n, "k": k, "floor_us": round(min(us[len(best) :]), 3)}
        line["tiles"] = [
            {"us": round(t, 3), "over_floor": round(t / line["floor_us"], 3), **s}
            for t, (_, _, s) in zip(us, best.values(), strict=False)
        ]
        result.append(line)
        print(n, k, line["floor_us"], {t["block_k"]: t["over_floor"] for t in line["tiles"]}, flush=True)
        print("   ", json.dumps(line["tiles"]), flush=True)
    print("saved", record.save("read_order", {"benchmark": "read_order", "rows": result}, args.out))


if __name__ == "__main__":
    main()
