# mypy: disable-error-code="no-untyped-call,no-untyped-def"
"""FP8 linears at decode sizes: kernels/cuda/scaled_one_shot.cu beside torch._scaled_mm, on one GPU of sm_90.

    python -m benchmarks scaled --out FOLDER [--m 1,16,64 --shapes eight|all|NxK,... --kinds row,row_slow,tensor,block]

Kinds: scales of tensors or of rows with the tensor core's own sums (`tensor`, `row`), of rows with sums in fp32 every
128 of K (`row_slow`, torch's use_fast_accum=False), and of blocks of 128.  Cold weights, CUDA graphs, both and the
streaming floor taking turns; every result is compared with fp64 first.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
import torch
from timing import CudaTimer, floor_launches

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.measure import last_level_cache_bytes
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda import scaled_one_shot as kernel
from gemmtuned.kernels.cuda.driver import Kernel
from gemmtuned.kernels.device import cuda_device

KINDS: Final = {
    "tensor": {"scale": "tensor", "math_mode": "reduced"},
    "row": {"scale": "row", "math_mode": "reduced"},
    "row_slow": {"scale": "row"},
    "block": {"scale": "1x128", "scale_layout": "col"},
}
RIGHT: Final = 5e-3  # relative error that e4m3 by e4m3 into bf16 may have here; sums of the tensor core give 2e-3
ROUNDS, LAUNCHES = 10, 30


def problem_of(m: int, n: int, k: int, kind: str) -> Problem:
    """The problem as the hook keys it."""
    return Problem(family="scaled", m=m, n=n, k=k, dtype="fp8_e4m3", out_dtype="bf16", **KINDS[kind])  # type: ignore[arg-type]


def operands(p: Problem) -> dict[str, Any]:
    """x, copies of w beyond the cache, the scales as torch takes them and as the kernel does, factors for fp64."""
    x = torch.randn(p.m, p.k, device="cuda").to(torch.float8_e4m3fn)
    copies = max(3, -(-3 * last_level_cache_bytes(torch.device("cuda")) // (p.n * p.k)))
    ws = [torch.randn(p.n, p.k, device="cuda").to(torch.float8_e4m3fn) for _ in range(copies)]
    if p.scale == "tensor":
        sx, sw = (torch.rand(1, 1, device="cuda") + 0.5 for _ in range(2))
        return {"x": x, "ws": ws, "sx": sx, "sw": sw, "lds": (0, 0), "of_x": sx.double(), "of_w": sw.double()}
    if p.scale == "row":
        sx, sw = torch.rand(p.m, 1, device="cuda") + 0.5, torch.rand(1, p.n, device="cuda") + 0.5
        return {"x": x, "ws": ws, "sx": sx, "sw": sw, "lds": (0, 0), "of_x": sx.double(), "of_w": sw.t().double()}
    steps, across = -(-p.k // 128), -(-p.n // 128)
    padded = -(-steps // 4) * 4  # as cuBLASLt wants them
    sx = torch.exp2(torch.rand(steps, p.m, device="cuda") * 6 - 4).t()
    sw = torch.exp2(torch.rand(across, padded, device="cuda") * 6 - 4)
    of_x = sx.double().repeat_interleave(128, 1)[:, : p.k]
    of_w = sw[:, :steps].double().repeat_interleave(128, 0)[: p.n].repeat_interleave(128, 1)[:, : p.k]
    return {"x": x, "ws": ws, "sx": sx, "sw": sw.t()[:steps], "lds": (p.m, padded), "of_x": of_x, "of_w": of_w}


@torch.inference_mode()
def measure(p: Problem, many: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Torch's own, the `many` best configurations by estimate and the floor, taking turns."""
    chosen = [kernel.scaled_one_shot(c, p) for _, c in kernel.scored(p, cuda_device(0).units)[:many]]
    built = list(pool.map(lambda one: nvrtc.compiled(one.source(), kernel.SCALED_ONE_SHOT.target), chosen))
    o = operands(p)
    x, ws, fast = o["x"], o["ws"], p.math_mode == "reduced"
    exact = (x.double() * o["of_x"]) @ (ws[0].double() * o["of_w"]).T
    timer = CudaTimer()
    launches = len(ws) * math.ceil(LAUNCHES / len(ws))
    row: dict[str, Any] = {"problem": str(p), "m": p.m, "n": p.n, "k": p.k, "wrong": [], "spills": 0}

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    def stock(i: int) -> torch.Tensor:
        w = ws[i % len(ws)].t()
        return torch._scaled_mm(x, w, o["sx"], o["sw"], out_dtype=torch.bfloat16, use_fast_accum=fast)

    calls: dict[str, Any] = {}
    try:
        row["torch_error"] = error(stock(0))
        calls["torch"] = stock
    except RuntimeError as err:  # M = 1 with block scales
        row["torch_refuses"] = str(err)[:200]
    for one, made in zip(chosen, built, strict=True):
        name = f"{one.rows}x{one.parts}x{one.tokens}/{one.halves}"
        if made.spill_bytes:
            row["spills"] += 1
            continue
        launch = Kernel(
            made.data, kernel.NAME, grid=one.grid, threads=32 * one.warps, shared=one.shared, cluster=one.parts
        )
        y = torch.full((p.m, p.n), math.nan, device="cuda", dtype=torch.bfloat16)

        def call(i: int, launch: Kernel = launch, y: torch.Tensor = y) -> None:
            pointers = [t.data_ptr() for t in (x, ws[i % len(ws)], o["sx"], o["sw"], y)]
            launch(torch.cuda.current_stream().cuda_stream, pointers, (p.m, p.k, p.k, *o["lds"]))

        call(0)
        seen = error(y)
        if seen < RIGHT:
            calls[name] = call
            row["error"] = max(row.get("error", 0.0), seen)
        else:
            row["wrong"].append((name, seen))
    runs = [timer.prepare(call, launches) for call in calls.values()]
    floors = floor_launches(timer, [w.view(torch.bfloat16) for w in ws], launches)
    us = [statistics.median(t[2:]) / launches for t in timer.measure([*runs, *floors], ROUNDS)]
    timed = dict(zip(calls, us, strict=False))
    row["floor_us"] = round(min(us[len(calls) :]), 3)
    row["torch_us"] = round(timed.pop("torch", math.nan), 3)
    row["best"] = min(timed, key=lambda name: timed[name])
    row["us"] = round(timed[row["best"]], 3)
    row["all"] = {name: round(t, 3) for name, t in sorted(timed.items(), key=lambda item: item[1])}
    return row


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="1,16,64", help="rows of X")
    parser.add_argument("--shapes", default="eight", help="eight, all or NxK,NxK,...")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--many", type=int, default=8, help="configurations of each problem")
    parser.add_argument("--seconds", type=float, default=240, help="no problem is begun later")
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(12) as pool:
        for kind in args.kinds.split(","):
            for m in map(int, args.m.split(",")):
                for n, k in dense.shapes_of(args.shapes):
                    if time.monotonic() > until_s:
                        break
                    row = {"kind": kind, **measure(problem_of(m, n, k, kind), args.many, pool)}
                    rows.append(row)
                    print({a: b for a, b in row.items() if a != "all"}, flush=True)
    summary = []
    for kind in args.kinds.split(","):
        for m in sorted({row["m"] for row in rows}):
            some = [row for row in rows if (row["kind"], row["m"]) == (kind, m)]
            both = [row["torch_us"] / row["us"] for row in some if not math.isnan(row["torch_us"])]
            if some:
                line = {"kind": kind, "m": m, "problems": len(some), "gain": dense.geomean(both) if both else None}
                line["over_floor"] = dense.geomean([row["us"] / row["floor_us"] for row in some])
                summary.append(line)
                print(line, flush=True)
    print(record.save("scaled", {"benchmark": "scaled", "summary": summary, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
