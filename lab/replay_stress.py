"""Do the reductions inside one launch stay right under many graph replays on two streams at once?

Each stream has a graph of its own with several split-K kernels, each followed by a check that compares every value with
the first, verified result bit by bit, counts differences on the device, and poisons the output for the next
replay.  The two streams run at the same time with a workspace each.

    python -m lab replay_stress --out FOLDER [--replays 100000]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import record
import torch
import triton
import triton.language as tl

from gemmtuned.kernels.triton import gemv, python_launch, tiles, warp_split_k

_WARP = {"rows": 16, "tokens": 8, "block_k": 64, "split": 14, "warps": 2}
_TILE = {"rows": 32, "tokens": 16, "block_k": 64, "split": 8, "group": 2, "swap": 0, "warps": 4, "stages": 3}
CASES = [  # small tiles and many slices: many thread blocks meet at each counter
    (gemv, 1, 520, 4096, {"rows": 4, "block_k": 512, "split": 8, "warps": 2, "unroll": 1}),
    (warp_split_k, 8, 528, 4096, {**_WARP, "stages": 3}),
    (tiles, 33, 200, 2048, _TILE),
]


@triton.jit
def check(y, want, wrong, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    got = tl.load(y + at, mask=inside, other=0)
    differs = (got != tl.load(want + at, mask=inside, other=0)) & inside
    bad = tl.sum(differs.to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(wrong, bad)
    tl.store(y + at, tl.full((BLOCK,), 0x7FC0, tl.int16), mask=inside)  # NaN in bf16 and fp16


def launches_of_one_stream(device: str) -> tuple[list[Any], torch.Tensor, list[torch.Tensor]]:
    """Closures that launch kernel and check, the count of wrong values, and the workspaces."""
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    calls, spaces = [], []
    for module, m, n, k, config in CASES:
        if device == "cpu":
            n, k = 32, 256
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        x = torch.randn(m, k, device=device, dtype=dtype)
        w = torch.randn(n, k, device=device, dtype=dtype)
        record = module.launch_record(config, python_launch.problem_of(x, w, None))
        launch = python_launch.launcher(module.KERNEL.function, record)
        space = python_launch.new_workspace(record, device)
        assert space is not None
        y = torch.empty(m, n, device=device, dtype=dtype)
        launch({"x": x, "w": w, "bias": None, "y": y}, space)
        exact = x.double() @ w.double().t()
        error = ((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()
        if not error < 1e-2:
            print(f"{module.KERNEL.name} is wrong before any stress, so it is left out: error {error:.1e}", flush=True)
            continue
        want = y.clone()
        spaces.append(space[: record.counters_bytes])

        def call(
            launch: Any = launch, x: Any = x, w: Any = w, y: Any = y, space: Any = space, want: Any = want
        ) -> None:
            launch({"x": x, "w": w, "bias": None, "y": y}, space)
            size = y.numel()
            grid = (triton.cdiv(size, 1024),)
            check[grid](y.view(torch.int16), want.view(torch.int16), wrong, SIZE=size, BLOCK=1024)

        calls.append(call)
    return calls, wrong, spaces


def stress(replays: int, device: str, *, seconds: float = 90.0) -> dict[str, Any]:
    """Replay both graphs `replays` times (or for `seconds`); how many values were wrong, which must be none."""
    torch.manual_seed(7)
    sides = [launches_of_one_stream(device) for _ in range(2)]
    began = time.monotonic()
    done = 0
    if device == "cpu":
        for calls, _, _ in sides:
            for call in calls:
                call()
        done = 1
    else:
        streams = [torch.cuda.Stream() for _ in sides]
        graphs = []
        torch.cuda.synchronize()
        for (calls, _, _), stream in zip(sides, streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                for call in calls:
                    call()
                graph.capture_begin(capture_error_mode="thread_local")
                for call in calls:
                    call()
                graph.capture_end()
            graphs.append(graph)
        torch.cuda.synchronize()
        while done < replays and time.monotonic() - began < seconds:
            for _ in range(500):  # a bounded queue
                for graph, stream in zip(graphs, streams, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            done += 500
    result = {
        "replays_each": done,
        "kernels": len(sides[0][0]),
        "wrong": sum(int(wrong.item()) for _, wrong, _ in sides),
        "counters_left": sum(int(space.any()) for _, _, spaces in sides for space in spaces),
        "seconds": round(time.monotonic() - began, 2),
    }
    print(f"replay stress: {result}", flush=True)
    return result


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--replays", type=int, default=100_000)
    args = parser.parse_args()
    seen = stress(args.replays, "cuda" if torch.cuda.is_available() else "cpu")
    print("saved", record.save("replay_stress", {"benchmark": "replay_stress", **seen}, args.out))


if __name__ == "__main__":
    main()
