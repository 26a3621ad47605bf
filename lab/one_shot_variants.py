"""Other ways to write kernels/cuda/one_shot.cu, raced against it on one GPU of sm_90.

    python -m lab one_shot_variants --out FOLDER [--m 64 --shapes eight|all|NxK,... --tiles 5 --only VARIANT]

A variant is the source with some of its text replaced (VARIANTS).  Each takes turns with the kernel as it is and with
the streaming floor, in as many tiles of a shape as the estimate likes best; cold weights, CUDA graphs, one X and one
set of weights for all.  Without its loads of X, or without the exchange of sums, it is wrong, and shows what they cost.
"""

from __future__ import annotations

import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import dense
import record
import torch
from timing import CudaTimer, floor_launches

from gemmtuned.configs.launch import KernelLaunch
from gemmtuned.configs.launch_values import arguments_of, grid_of
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.measure import Bench
from gemmtuned.kernels.cuda import nvrtc, one_shot
from gemmtuned.kernels.cuda.driver import Kernel
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.torch_flags import as_called

ROUNDS, LAUNCHES, RIGHT = 12, 30, 4e-3
_PLAIN: Final = "as it is"
_W_ROUND: Final = "copy16_if(N % ROWS == 0 || i * ROUND < my.rows, w_slot + my.to + i * ROUND_BYTES, w + my.w[i]);"
_X_ROUND: Final = "copy16_if(i < X_ROUNDS - 1 || i * ROUND < my.tokens, "
# Rows past the last one, of W and of X, are that one again
_AGAIN: Final = (
    (_W_ROUND, "copy16_if(true, w_slot + my.to + i * ROUND_BYTES, w + my.w[i]);"),
    (_X_ROUND, "copy16_if(true, "),
    ("my.w[i] = (u64)(from + i * ROUND)", "my.w[i] = (u64)min(from + i * ROUND, N - 1 - tile * ROWS)"),
)
# Thread blocks of a cluster read neighbouring steps at a time, not each a part of K of its own
_INTERLEAVED: Final = (
    ("first_step = part * STEPS / PARTS, steps = (part + 1) * STEPS / PARTS - first_step;",
     "first_step = part, steps = (STEPS - part + PARTS - 1) / PARTS;"),
    ("w += step * 128, x += step * 128;", "w += step * (128 * PARTS), x += step * (128 * PARTS);"),
)  # fmt: skip
VARIANTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    _PLAIN: (),
    "as many blocks as fit": (),
    "last row again": _AGAIN,
    "last row again, as many blocks as fit": _AGAIN,
    "every row of X asked for": ((_X_ROUND, "copy16_if(i * ROUND < my.tokens, "),),
    "interleaved": _INTERLEAVED,
    "interleaved, wider fetches": (
        *_INTERLEAVED,
        ("cp.async.cg.shared.global [", "cp.async.cg.shared.global.L2::256B ["),
    ),
    # Of each row of W 256 bytes, two steps, one after the other; where all fits
    "in pairs": (
        ("const char* x, u32 w_slot, u32 x_slot, int step) {",
         "const char* x, u32 w_slot, u32 x_slot, int step, int pair = 1) {"),
        (_W_ROUND,
         f"{{ if (pair > 0) {_W_ROUND} if (pair > 1) copy16_if(N % ROWS == 0 || i * ROUND < my.rows, "
         "w_slot + W_BYTES + my.to + i * ROUND_BYTES, w + 128 + my.w[i]); }"),
        ("load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, i);\n      asm",
         "load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, i, i % 2 ? 0 : i + 1 < MOST - 1 ? 2 : i + 1 < MOST && "
         "i + 1 < steps ? 2 : 1);\n      asm"),
    ),
    "without X": (
        (_X_ROUND, f"if (x == nullptr) {_X_ROUND}"),
    ),
    "without the exchange": (
        ("const int units = min(max(UNITS - part * EACH, 0), EACH);", "const int units = 0;"),
        ("if (warp < TOKENS / 16) {", "if (warp < (m == 12345 ? TOKENS / 16 : 0)) {"),
    ),
}  # fmt: skip


class Filled(one_shot.OneShot):
    """With all blocks that fit."""

    @property
    def depth(self) -> int:
        return self.fitting


def tile_of(one: one_shot.OneShot) -> str:
    """Rows, parts, tokens."""
    return f"{one.rows}x{one.parts}x{one.tokens}"


def form_of(variant: str) -> type[one_shot.OneShot]:
    """What has the configuration's depth."""
    return Filled if variant.endswith("as many blocks as fit") else one_shot.OneShot


def binary(one: one_shot.OneShot, variant: str) -> bytes:
    """Raises AssertionError where the source has no such text any more."""
    source = one.source()
    for old, new in VARIANTS[variant]:
        assert old in source, f"{old!r} is not in {one_shot.SOURCE}"
        source = source.replace(old, new)
    made = nvrtc.compiled(source, one_shot.KERNEL.target)
    assert not made.spill_bytes, f"{one} spills"
    return made.data


@torch.inference_mode()
def measure(problem: Problem, built: dict[tuple[one_shot.OneShot, str], bytes]) -> dict[str, Any]:
    """All tiles and variants of one shape, taking turns."""
    m, n, k = problem.m, problem.n, problem.k
    timer, runs, names, wrong = CudaTimer(), [], [], []
    with as_called(problem):
        weights = [w.t() for (w,) in Bench(problem, torch.device("cuda")).weights]
        launches = len(weights) * math.ceil(LAUNCHES / len(weights))
        x = torch.randn(m, k, device="cuda").bfloat16()
        exact = x.double() @ weights[0].double().T
        for (one, variant), data in built.items():
            launch = Kernel(data, one_shot.NAME, threads=32 * one.warps, shared=one.shared, cluster=one.parts)
            how = one.launch
            y = torch.full((m, n), math.nan, device="cuda").bfloat16()

            def call(i: int, launch: Kernel = launch, how: KernelLaunch = how, y: torch.Tensor = y) -> None:
                operands = {"x": x, "w": weights[i % len(weights)], "y": y}
                stream = torch.cuda.current_stream().cuda_stream
                launch(stream, how.arguments, arguments_of(how, operands), grid_of(how.grid, operands))

            call(0)
            error = float((y.double() - exact).norm() / exact.norm())
            if not variant.startswith("without") and not error < RIGHT:
                wrong.append((tile_of(one), variant, error))
                continue
            runs.append(timer.prepare(call, launches))
            names.append((tile_of(one), variant))
        times = timer.measure([*runs, *floor_launches(timer, weights, launches)], ROUNDS + 2)
    us = [statistics.median(series[2:]) / launches for series in times]
    floor = min(us[len(names) :])
    tiles: dict[str, dict[str, float]] = {}
    for (tile, variant), taken in zip(names, us, strict=False):
        tiles.setdefault(tile, {})[variant] = round(taken / floor, 4)
    return {"m": m, "n": n, "k": k, "floor_us": round(floor, 3), "over_floor": tiles, "wrong": wrong}


def told(rows: list[dict[str, Any]], variant: str) -> str:
    """The geometric mean of the best tile over the floor, and of all tiles over the kernel as it is."""
    best = [min(tile[variant] for tile in row["over_floor"].values() if variant in tile) for row in rows]
    beside = [t[variant] / t[_PLAIN] for row in rows for t in row["over_floor"].values() if {variant, _PLAIN} <= {*t}]
    return f"{variant}: {dense.geomean(best):.4f} of the floor, {dense.geomean(beside):.4f} of the time as it is"


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", type=int, default=64, help="rows of X")
    parser.add_argument("--shapes", default="eight", help="eight, all or NxK,NxK,...")
    parser.add_argument("--tiles", type=int, default=5, help="of each shape")
    parser.add_argument(
        "--only", action="append", default=[], choices=VARIANTS, help="these variants beside the plain one"
    )
    args = parser.parse_args()
    units = cuda_device(0).units
    variants = [_PLAIN, *(args.only or [name for name in VARIANTS if name != _PLAIN])]
    rows = []
    for n, k in dense.shapes_of(args.shapes):
        tiles = [config for _, config in one_shot.scored(args.m, n, k, units)[: args.tiles]]
        wanted = [
            (form_of(variant)(args.m, n, k, False, "bf16", **config), variant)
            for config in tiles
            for variant in variants
        ]
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda want: binary(*want), wanted)
            built = dict(zip(wanted, made, strict=True))
        row = measure(Problem(m=args.m, n=n, k=k, dtype="bf16", math_mode="reduced"), built)
        rows.append(row)
        print(row, flush=True)
        record.save("one_shot_variants", {"benchmark": "one_shot_variants", "rows": rows}, args.out)
    for variant in variants:
        print(told(rows, variant), flush=True)


if __name__ == "__main__":
    main()
