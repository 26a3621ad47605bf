"""Do kernels keep their gain between other kernels, as in a model? One GPU, bf16, CUDA graphs.

    python benchmarks/in_context.py --out FOLDER

Each arm is a graph of 200 GEMMs with cold weights of their own, alone or each after a small element-wise kernel, as in
a decode step.  Ours also with the driver told how to split L1 and shared memory (carve-out, percent).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.compile import compile_kernel
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.python_launch import new_workspace
from gemmtuned.kernels.triton.shortlist import MODULES, shortlist

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
LAUNCHES = 200


def graph_of(work: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@torch.inference_mode()
def measure(m: int, n: int, k: int) -> dict[str, Any]:
    device = cuda_device(0)
    copies = min(max(int(400e6 / (2 * n * k)), 4), LAUNCHES)
    ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    problem = Problem(m=m, n=n, k=k)
    kernel, config = shortlist(m, n, k, device.units, arch=device.arch)[0]
    launch = MODULES[kernel].launch_record(config, problem)
    space = new_workspace(launch, "cuda")
    driver = ctypes.CDLL("libcuda.so.1")

    def ours(carveout: int | None) -> Any:
        compiled = compile_kernel(launch, device.arch)
        compiled._init_handles()
        if carveout is not None:
            rc = driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, carveout)
            assert rc == 0, rc
        names = MODULES[kernel].KERNEL.arg_names
        grid = launch.grid_size(m)

        def run(w: torch.Tensor) -> None:
            values = {"x": x, "w": w, "y": y, "m": m, "ldx": k, "ldw": k}
            if space is not None:
                values["counters"] = space[: launch.counters_bytes].view(torch.int32)
                values["partials"] = space[launch.partials_offset :].view(torch.float32)
            compiled[grid](*[values.get(a, launch.constants.get(a)) for a in names])

        return run

    arms = {"torch": lambda w: torch.mm(x, w.t(), out=y), "ours": ours(None)}
    for percent in (0, 50, 100):
        arms[f"ours carveout {percent}"] = ours(percent)
    out: dict[str, Any] = {"shape": f"{m}x{n}x{k}", "kernel": kernel, "config": config}
    for context in (False, True):
        graphs = {}
        for arm, run in arms.items():

            def work(run: Any = run, context: bool = context) -> None:
                for i in range(LAUNCHES):
                    if context:
                        x.mul_(1.0)
                    run(ws[i % copies])

            graphs[arm] = graph_of(work)
        times: dict[str, list[float]] = {a: [] for a in graphs}
        for _ in range(12):
            for arm, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times[arm].append(start.elapsed_time(end) * 1000 / LAUNCHES)
        out["between others" if context else "alone"] = {a: round(statistics.median(t), 2) for a, t in times.items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = []
    for m in (1, 8):
        for n, k in ((1024, 1024), (3072, 1024), (1024, 3072), (1024, 2048), (4096, 4096)):
            try:
                rows.append(measure(m, n, k))
                print(rows[-1], flush=True)
            except Exception as err:  # noqa: PERF203
                print(m, n, k, "failed:", type(err).__name__, err, flush=True)
    print("saved", record.save("in_context", {"benchmark": "in_context", "rows": rows}, args.out))


if __name__ == "__main__":
    main()
