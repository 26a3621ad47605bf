"""Would the GEMV be faster with other hints on its loads of W?  Its PTX, changed before it is assembled.

    python benchmarks/gemv_loads.py --out FOLDER [--shapes all]

The winners at M = 1 of results/dense-all-h200-*.json take turns with the same kernel under other names, whose loads are
what HINTS says, and with the streaming floor.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
from triton.backends.nvidia.compiler import CUDABackend

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import gemv
from gemmtuned.kernels.triton.shortlist import MODULES

PLAIN = "ld.global.L1::evict_first.L2::cache_hint.v4.b32"
HINTS = {
    "prefetch": "ld.global.L1::evict_first.L2::cache_hint.L2::256B.v4.b32",
    "noalloc": "ld.global.L1::no_allocate.L2::cache_hint.v4.b32",
    "noallocprefetch": "ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32",
    "nc": "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32",
    "ncprefetch": "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32",
}


def variants() -> None:
    """A kernel gemv_HINT for each, and an assembler that gives them their loads."""
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-gemv-"))
    source = Path(gemv.__file__).read_text()
    for hint in HINTS:
        name = f"gemv_{hint}"
        text = source.replace('NAME: Final = "gemv"', f'NAME: Final = "{name}"').replace("def gemv(", f"def {name}(")
        text = text.replace("KERNEL: Final = gemv", f"KERNEL: Final = {name}")
        path = folder / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        made: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[name] = made
        spec.loader.exec_module(made)  # type: ignore[union-attr]
        MODULES[name] = made
    assemble = CUDABackend.make_cubin

    def make_cubin(self: Any, src: str, *rest: Any) -> Any:
        found = re.search(r"\.entry gemv_(\w+)\(", src)
        if found and found[1] in HINTS:
            assert PLAIN in src, "Triton writes another load"
            src = src.replace(PLAIN, HINTS[found[1]])
        return assemble(self, src, *rest)

    CUDABackend.make_cubin = make_cubin


def main() -> None:
    parser = record.arguments(__doc__)
    args = parser.parse_args()
    here = environment(cuda_device(0))
    variants()
    known = sorted((Path(__file__).parent / "results").glob("dense-all-h200-*.json"))[-1]
    logs: dict[str, list[float]] = {hint: [] for hint in HINTS}
    rows = []
    for row in json.loads(known.read_text())["rows"]:
        if row["m"] != 1 or row["backend"] != "triton":
            continue
        problem = Problem(m=1, n=row["n"], k=row["k"], dtype="bf16", math_mode="reduced")
        config = json.loads(row["config"])
        kernels = ["gemv", *(f"gemv_{hint}" for hint in HINTS)]
        candidates = [Candidate.of("triton", **{**config, "kernel": kernel}) for kernel in kernels]
        us = [statistics.median(series) for series in dense.take_turns(problem, candidates, floor=True)]
        for hint, time_us in zip(HINTS, us[1:], strict=False):
            logs[hint].append(math.log(us[0] / time_us))
        rows.append(
            {"n": problem.n, "k": problem.k, "us": dict(zip(kernels, us, strict=False)), "floor_us": min(us[6:])}
        )
        print(rows[-1], flush=True)
    summary = {hint: round(math.exp(statistics.fmean(gains)), 4) for hint, gains in logs.items()}
    print(summary)
    result = {"benchmark": "gemv_loads", "stamps": here.stamps, "summary": summary, "rows": rows}
    print("saved", record.save("gemv_loads", result, args.out))


if __name__ == "__main__":
    main()
