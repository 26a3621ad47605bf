"""One shot at M = 64, on one GPU of sm_90: all that a program reads on its way at once, sums over a cluster.

    python benchmarks/one_shot.py --out FOLDER --before benchmarks/results/dense-m1-m64-h200-2026-11-23.json
        [--shapes eight|NxK,...]

A program takes a part of K of some rows of W, in any multiple of 8; the programs of a cluster (up to 16) take all of K.
Few bytes a unit decide, X's with W's: so clusters are large, tiles as low as one wave allows.  No ring where all
fits shared memory, no barrier but the group's own, blocks of 64 of K multiplied as they come (one_shot.cu, by NVRTC).
Each configuration takes turns with torch's own, with what an earlier result of dense.py found (`before`) and with the
streaming floor; cold weights, CUDA graphs.  Configurations without X are wrong, and show what X costs.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
import torch
from screen import winners
from timing import CudaTimer, floor_launches

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.measure import Bench
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.switches import as_called

SOURCE = (Path(__file__).resolve().parent / "one_shot.cu").read_text()
M, ROUNDS, LAUNCHES = 64, 12, 30
SHARED_BYTES, RIGHT = 226 << 10, 4e-3
PORTABLE, NON_PORTABLE = 8, 14  # programs of a cluster; CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
# Clusters of so many programs that fit an H200 at once, one program a unit
FITS = {1: 132, 2: 64, 3: 38, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, **dict.fromkeys(range(9, 17), 7)}


@dataclass(frozen=True)
class Config:
    """rows of W and part of K of a program, blocks of 64 of K in shared memory, warps that only load W."""

    n: int
    k: int
    rows: int
    parts: int
    depth: int
    loaders: int = 0
    read_x: bool = True

    @property
    def programs(self) -> int:
        """In all, a whole cluster a tile of W."""
        return -(-self.n // self.rows) * self.parts

    @property
    def threads(self) -> int:
        """Of a program."""
        return 128 + 32 * self.loaders

    def shared_bytes(self, depth: int = 0) -> int:
        """Of a program: blocks of W and X, places for others' sums, barriers."""
        depth = depth or self.depth
        sums = self.parts * -(-self.rows // self.parts) * 256 if self.parts > 1 else 0
        return depth * (self.rows + M) * 128 + sums + 8 * depth + 8

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "PARTS": self.parts, "DEPTH": self.depth,
            "LOADERS": self.loaders, "READ_X": int(self.read_x),
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        text = defines + SOURCE.replace("\nMMA\n", f"\n{_mma(self.rows)}\n")
        cluster = f"__cluster_dims__({self.parts}, 1, 1) " if self.parts > 1 else ""
        return text.replace("__launch_bounds__", f"{cluster}__launch_bounds__")


def _mma(rows: int) -> str:
    """The warp group's product of 64 tokens, 16 of K and these rows."""
    n = rows // 2
    registers = ", ".join(f"%{i}" for i in range(n))
    values = ", ".join(f'"+f"(sums[{i}])' for i in range(n))
    return (
        "__device__ __forceinline__ void mma(float* sums, u64 a, u64 b) {\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, %{n}, %{n + 1}, '
        f'1, 1, 1, 0, 0;"\n               : {values} : "l"(a), "l"(b));\n}}'
    )


def configs(n: int, k: int) -> Iterator[Config]:
    """For each number of parts the lowest two tiles whose clusters fit at once, where they are on 80 units and more."""
    for parts, clusters in FITS.items():
        least = -(-n // clusters)  # rows of a tile
        for rows in range(-(-least // 8) * 8, min(-(-least // 8) * 8 + 9, 257), 8):
            one = Config(n, k, rows, parts, 1)
            most = -(-(k // 64) // parts)
            depth = max((d for d in range(1, most + 1) if one.shared_bytes(d) <= SHARED_BYTES), default=0)
            if depth < min(most, 4) or one.programs < 80:
                continue
            for loaders in (0, 2):
                yield Config(n, k, rows, parts, depth, loaders)
            yield Config(n, k, rows, parts, depth, read_x=False)


def compile_all(wanted: list[Config]) -> dict[Config, Any]:
    """(binary, name) of each."""
    from torch.cuda._utils import _nvrtc_compile

    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(lambda c: _nvrtc_compile(c.source(), "one_shot", "90a"), wanted), strict=True))


def load(config: Config, built: tuple[bytes, str]) -> Any:
    """The function, allowed what it needs."""
    from torch.cuda._utils import _cuda_load_module

    function = _cuda_load_module(built[0], [built[1]])[built[1]]
    if config.parts > PORTABLE:
        error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(function.func, NON_PORTABLE, 1)
        if error:
            raise RuntimeError(f"clusters of {config.parts} refused: CUDA error {error}")
    function.set_shared_memory_config(config.shared_bytes())
    return function


@torch.inference_mode()
def measure(n: int, k: int, before: Any, built: dict[Config, Any]) -> dict[str, Any]:
    """All arms of one weight, taking turns."""
    problem = Problem(m=M, n=n, k=k, dtype="bf16", math_mode="reduced")
    timer, runs, arms, wrong = CudaTimer(), [], [], []
    with as_called(problem):
        bench = Bench(problem, torch.device("cuda"))
        weights = [b.t() for b in bench.weights]
        launches = len(weights) * math.ceil(LAUNCHES / len(weights))
        for name, candidate in (("torch", dense.DEFAULT), ("before", before)):
            calls = bench.arm(name, BACKENDS[candidate.backend].prepare(candidate, problem), problem).calls
            runs.append(timer.prepare(lambda i, calls=calls: calls[i % len(calls)](), launches))
            arms.append({"arm": name, "candidate": str(candidate)})
        x = torch.randn(M, k, device="cuda").bfloat16()
        exact = x.double() @ weights[0].double().T
        for config in built:
            if (config.n, config.k) != (n, k):
                continue
            function, y = load(config, built[config]), torch.full((M, n), math.nan, device="cuda").bfloat16()

            def call(i: int, config: Config = config, function: Any = function, y: torch.Tensor = y) -> None:
                function(
                    grid=(config.programs, 1, 1), block=(config.threads, 1, 1), args=[x, weights[i % len(weights)], y],
                    shared_mem=config.shared_bytes(),
                )  # fmt: skip

            call(0)
            error = float((y.double() - exact).norm() / exact.norm())
            if config.read_x and not error < RIGHT:
                wrong.append({**asdict(config), "error": error})
                continue
            runs.append(timer.prepare(call, launches))
            arms.append({"arm": "one shot" if config.read_x else "without X", **asdict(config), "error": error})
        times = timer.measure([*runs, *floor_launches(timer, weights, launches)], ROUNDS)
    us = [statistics.median(series[2:]) / launches for series in times]
    floor = min(us[len(arms) :])
    rows = [{"us": round(t, 3), "over_floor": round(t / floor, 3), **arm} for t, arm in zip(us, arms, strict=False)]
    spread = [max(series[2:]) / min(series[2:]) - 1 for series in times[: len(arms)]]
    return {
        "m": M, "n": n, "k": k, "floor_us": round(floor, 3), "spread": round(statistics.median(spread), 4),
        "arms": sorted(rows, key=lambda row: row["us"]), "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--shapes", default="eight", help="eight or NxK,NxK,...")
    parser.add_argument("--before", type=Path, required=True, help="a result of dense.py with M = 64")
    args = parser.parse_args()
    shapes = dense.EIGHT if args.shapes == "eight" else record.sizes(args.shapes)
    won = winners([args.before], torch.cuda.get_device_name())
    torch.zeros(1, device="cuda")
    built = compile_all([config for n, k in shapes for config in configs(n, k)])
    rows, logs = [], {"before": 0.0, "one shot": 0.0, "without X": 0.0}
    for n, k in shapes:
        row = measure(n, k, won[M, n, k], built)
        rows.append(row)
        best = {arm: next((one for one in row["arms"] if one["arm"] == arm), None) for arm in logs}
        print(n, k, row["floor_us"], *(best.values()), row["wrong"], sep="\n   ", flush=True)
        for arm, one in best.items():
            logs[arm] += math.log(one["over_floor"] if one else math.nan)
        record.save("one_shot", {"benchmark": "one_shot", "rows": rows}, args.out)
    print("times the floor, geometric means:", {arm: round(math.exp(s / len(rows)), 3) for arm, s in logs.items()})


if __name__ == "__main__":
    main()
