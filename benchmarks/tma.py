# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""Would persistent programs that load by TMA win where ours do not, at M >= 128?

    python benchmarks/tma.py --out FOLDER [--m 256,2048 --shapes NxK,... --seconds 200]

Each problem: torch, the best of what the search offers today (cuBLASLt's algorithms and our tiles), and the kernel
below in a small space, screened in CUDA graphs with cold weights and the best of each raced again.  A kernel that wins
nowhere here is not worth a place among the others (split-K by TMA at M = 64 was not: results/tma-h200-*.json).
`python benchmarks/tma.py --check` runs it in Triton's interpreter at small sizes (TRITON_INTERPRET=1) against an exact
product.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch
import triton
import triton.language as tl
from timing import CudaTimer
from triton.tools.tensor_descriptor import TensorDescriptor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.measure import Bench
from gemmtuned.kernels.backends import BACKENDS

SHAPES = (
    (576, 7168), (2112, 7168), (1280, 8192), (256, 7168), (7168, 2048), (4096, 4096), (1536, 7168), (512, 16384),
    (5120, 5120), (10240, 8192),
)  # fmt: skip
ROUNDS = 15
LAUNCHES = 16
Launch = Callable[[int], object]


@triton.jit
def persistent_tma(
    xd, wd, yd, m, n, steps, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """One program a unit walks over the tiles of Y, in groups of rows of X that share W in L2.

    WS: warps of their own for loading; Triton 3.6 does not compile that for tiles of 128 x 128 and more.
    """
    tiles_m = tl.cdiv(m, TOKENS)
    tiles_n = tl.cdiv(n, ROWS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, warp_specialize=WS):
        group = tile // (GROUP * tiles_n)
        high = tl.minimum(tiles_m - group * GROUP, GROUP)
        at_m = (group * GROUP + (tile % (GROUP * tiles_n)) % high) * TOKENS
        at_n = (tile % (GROUP * tiles_n)) // high * ROWS
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
        for step in range(0, steps):
            acc = tl.dot(xd.load([at_m, step * BLOCK_K]), wd.load([at_n, step * BLOCK_K]).T, acc)
        yd.store([at_m, at_n], acc.to(yd.dtype))


def tiles(m: int, n: int, units: int) -> Iterator[tuple[Any, ...]]:
    """Configs of persistent_tma: (tokens, rows, block_k, group, stages, warps, ws)."""
    for tokens, rows, warps, ws in (
        (128, 128, 8, False), (128, 256, 8, False), (256, 128, 8, False), (64, 128, 4, False),
    ):  # fmt: skip
        if tokens > max(64, 2 * m):
            continue
        for stages in (3, 4):
            if stages * (rows + tokens) * 64 * 2 + tokens * rows * 2 <= 220 << 10:
                for group in (1, 8) if m > 4 * tokens else (1,):
                    yield tokens, rows, 64, group, stages, warps, ws


def arms(x: torch.Tensor, weights: list[torch.Tensor], units: int) -> dict[str, Launch]:
    """Every config as a function of the launch's number."""
    (m, k), n = x.shape, weights[0].shape[0]
    y = torch.empty(m, n, device=x.device, dtype=x.dtype)
    found: dict[str, Launch] = {}
    for tokens, rows, block_k, group, stages, warps, ws in tiles(m, n, units):
        xd = TensorDescriptor.from_tensor(x, [tokens, block_k])
        yd = TensorDescriptor.from_tensor(y, [tokens, rows])
        wds = [TensorDescriptor.from_tensor(w, [rows, block_k]) for w in weights]
        programs = min(units, -(-m // tokens) * -(-n // rows))

        def walk(
            i: int, xd: Any = xd, yd: Any = yd, wds: Any = wds,
            config: Any = (programs, tokens, rows, block_k, group, ws),
            stages: int = stages, warps: int = warps,
        ) -> None:  # fmt: skip
            persistent_tma[(config[0],)](
                xd, wds[i % len(wds)], yd, m, n, -(-k // config[3]), *config, num_warps=warps, num_stages=stages
            )

        name = f"persistent_tma {tokens}x{rows}x{block_k} group={group} stages={stages} warps={warps} ws={int(ws)}"
        found[name] = walk
    for call in found.values():
        call.result = y  # type: ignore[attr-defined]
    return found


def offered(problem: Problem, weights: list[torch.Tensor], x: torch.Tensor) -> dict[str, Launch]:
    """Torch and all that the search would try today."""
    found: dict[str, Launch] = {"torch": lambda i: torch.nn.functional.linear(x, weights[i % len(weights)])}
    for backend in ("cublaslt", "triton"):
        for candidate in BACKENDS[backend].candidates(problem):
            try:
                kernel = BACKENDS[backend].prepare(candidate, problem)
            except GemmtunedError:
                continue
            runs = [kernel.bind(w.t()) for w in weights]
            found[str(candidate)] = lambda i, runs=runs: runs[i % len(runs)](x, None)
    return found


@torch.inference_mode()
def measure(m: int, n: int, k: int, timer: CudaTimer, units: int) -> dict[str, Any]:
    problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
    weights = [b.t() for b in Bench(problem, torch.device("cuda")).weights]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    exact = (x.float() @ weights[0].float().t()).bfloat16().float()
    count = len(weights) * -(-LAUNCHES // len(weights))
    ours, theirs = arms(x, weights, units), offered(problem, weights, x)
    print(f"{len(ours)} kernels of ours to compile", flush=True)
    with ThreadPoolExecutor(
        12, initializer=torch.cuda.synchronize
    ) as pool:  # compiling leaves Python's lock alone most of the time
        refused = {name for name, err in zip(ours, pool.map(_fails, ours.values()), strict=True) if err}
    torch.cuda.synchronize()
    print(f"{len(refused)} refused", flush=True)
    wrong: dict[str, str] = {}
    for name, call in ours.items():
        if name not in refused:
            call.result.fill_(float("nan"))  # type: ignore[attr-defined]
            call(0)
            off = float((call.result.float() - exact).abs().max() / exact.abs().max())  # type: ignore[attr-defined]
            if not off < 2e-2:
                wrong[name] = f"off by {off:.1e}"
    good = {name: call for name, call in ours.items() if name not in refused and name not in wrong}
    graphs = {name: timer.prepare(call, count) for name, call in (theirs | good).items()}
    first = {n: min(t) / count for n, t in zip(graphs, timer.measure(list(graphs.values()), 4), strict=True)}

    def best(names: Any) -> str:
        return str(min(names, key=first.__getitem__))

    finals = {"torch": "torch", "today": best(theirs)}
    if good:
        finals["persistent_tma"] = best(good)
    times = timer.measure([graphs[name] for name in finals.values()], ROUNDS + 2)
    us = {arm: round(statistics.median(t[2:]) / count, 3) for arm, t in zip(finals, times, strict=True)}
    return {
        "m": m, "n": n, "k": k, "us": us, "picked": finals, "refused": len(refused), "wrong": wrong,
        "screened": {name: round(value, 3) for name, value in first.items() if name in good},
    }  # fmt: skip


def _fails(call: Launch) -> str:
    try:
        call(0)
    except Exception as err:  # a compiler's reasons are many
        return f"{type(err).__name__}: {str(err)[:200]}"
    return ""


def check() -> None:
    """In the interpreter, tails of all sizes included."""
    for m, n, k in ((13, 72, 200), (64, 128, 512), (70, 136, 328)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        for name, call in arms(x, [w], 2).items():
            call.result.fill_(float("nan"))  # type: ignore[attr-defined]
            call(0)
            off = float((call.result - x @ w.t()).abs().max())  # type: ignore[attr-defined]
            assert off < 1e-2, f"{name} at {m}x{n}x{k}: off by {off}"
        print(f"{m}x{n}x{k}: {len(arms(x, [w], 2))} configs right")


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="256,2048")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--seconds", type=float, default=200, help="start no new problem after this long")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
        check()
        return
    began = time.monotonic()
    faulthandler.dump_traceback_later(60, repeat=True)
    args.out.mkdir(parents=True, exist_ok=True)
    timer, units = CudaTimer(), torch.cuda.get_device_properties(0).multi_processor_count
    rows: list[dict[str, Any]] = []
    for m in map(int, args.m.split(",")):
        for n, k in record.sizes(args.shapes):
            if time.monotonic() - began > args.seconds:
                print("time is up", flush=True)
                break
            rows.append(measure(m, n, k, timer, units))
            (args.out / "tma.partial.json").write_text(json.dumps(rows))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "screened"}), flush=True)
    print("saved", record.save("tma", {"benchmark": "tma", "rows": rows}, args.out))


if __name__ == "__main__":
    main()
