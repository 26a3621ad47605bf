"""Would the GEMV be faster with other hints on its loads of W, or with the tensor core's instruction for its products?

    python benchmarks/gemv_loads.py --out FOLDER

The winners at M = 1 of results/dense-all-h200-*.json take turns with the same kernel under other names, whose loads are
what HINTS says (its PTX is changed before it is assembled), with the best of MMA_CONFIGS configs of the same kernel with
its products by the tensor core, and with the streaming floor.

Products by the tensor core: a thread's 8 values of W, as they come from one load, are taken for the four registers of A
of mma.m16n8k16 (rows g and g + 8 of lanes 4 g + t), its 8 values of x for B.  What belongs together then stands on the
diagonal of the result: D[g][g] = sum over t of W's and x's products of lanes 4 g + t.  No value is converted.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
import torch
from triton.backends.nvidia.compiler import CUDABackend

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.switches import as_called
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


MMA_CONFIGS = 30
_MASKED = "tl.load(x + k, mask=k < K, other=0.0)"
_FIRST = (
    (
        """            wt = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
            xt = tl.load(x + k)
""",
        """            xt = tl.load(x + k)
            wt = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
""",
    ),
    (
        """            wt = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            xt = tl.load(x + k, mask=k < K, other=0.0)
""",
        """            xt = tl.load(x + k, mask=k < K, other=0.0)
            wt = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
""",
    ),
)
_CONSTANT = (("tl.load(x + k)", "tl.full((BLOCK_K,), 1.5, x.dtype.element_ty)"), (_MASKED, "tl.full((BLOCK_K,), 1.5, x.dtype.element_ty)"))
# what is other in the kernel's text; nox: no x is read
TEXTS: dict[str, tuple[tuple[str, str], ...]] = {"nox": _CONSTANT, "xfirst": _FIRST, "mma_nox": _CONSTANT, "mma_xfirst": _FIRST}
# $0-$7 the sums, $8-$11 W, $12-$15 x, $16-$23 the sums so far
PRODUCT = """{
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$14}, {$16,$17,$18,$19};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$4,$5,$6,$7}, {$9,$8,$11,$10}, {$13,$15}, {$20,$21,$22,$23};
}"""
# $0-$7 what counts of $8-$15: columns 2 t and 2 t + 1 of row g, where one of them is g
DIAGONAL = """{
.reg .pred even, odd; .reg .b32 lane, row, col; .reg .f32 e, o;
mov.u32 lane, %laneid;
shr.u32 row, lane, 2;
and.b32 col, lane, 3;
shl.b32 col, col, 1;
sub.u32 row, row, col;
setp.eq.u32 even, row, 0;
setp.eq.u32 odd, row, 1;
add.f32 e, $8, $12;
add.f32 o, $9, $13;
selp.f32 e, e, 0f00000000, even;
selp.f32 $0, o, e, odd;
mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000;
mov.f32 $4, 0f00000000; mov.f32 $5, 0f00000000; mov.f32 $6, 0f00000000; mov.f32 $7, 0f00000000;
}"""
ASM = f'''
PRODUCT = tl.constexpr("""{PRODUCT}""")
DIAGONAL = tl.constexpr("""{DIAGONAL}""")


@triton.jit
def products(wt, xt, acc):
    return tl.inline_asm_elementwise(
        PRODUCT, "{",".join(["=&f"] * 8 + ["r"] * 8 + ["f"] * 8)}", [wt, xt, acc], dtype=tl.float32, is_pure=True, pack=8
    )


@triton.jit
def diagonal(acc):
    return tl.inline_asm_elementwise(
        DIAGONAL, "{",".join(["=&f"] * 8 + ["f"] * 8)}", [acc], dtype=tl.float32, is_pure=True, pack=8
    )


@triton.jit
def gemv('''


def variants() -> None:
    """A kernel gemv_HINT for each, and an assembler that gives them their loads; gemv_mma."""
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-gemv-"))
    source = Path(gemv.__file__).read_text()
    for hint in (*HINTS, "mma", *TEXTS):
        name = f"gemv_{hint}"
        text = source
        for old, new in TEXTS.get(hint, ()):
            assert old in text, hint
            text = text.replace(old, new)
        if "mma" in hint:
            text = text.replace("@triton.jit\ndef gemv(", ASM.strip())
            text = text.replace(
                "acc += wt.to(tl.float32) * xt.to(tl.float32)[None, :]", "acc = products(wt, xt[None, :], acc)"
            )
            text = text.replace("tl.sum(acc, 1)", "tl.sum(diagonal(acc), 1)")
        text = text.replace('NAME: Final = "gemv"', f'NAME: Final = "{name}"').replace("def gemv(", f"def {name}(")
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


def compiles(job: tuple[Candidate, Problem]) -> str:
    """In another process: why it does not compile, or nothing."""
    candidate, problem = job
    config = json.loads(candidate.config)
    try:
        record = MODULES[config.pop("kernel")].launch_record(config, problem)
        compile_record(record, "sm_90")
    except CandidateFailed as err:
        return str(err)
    return ""


def jobs_of(row: dict[str, Any]) -> tuple[Problem, list[Candidate], list[Candidate]]:
    """The winner and its variants; configs of the kernel with the tensor core."""
    problem = Problem(m=1, n=row["n"], k=row["k"], dtype="bf16", math_mode="reduced")
    config = json.loads(row["config"])
    same = [
        Candidate.of("triton", **{**config, "kernel": kernel}) for kernel in ("gemv", *(f"gemv_{h}" for h in HINTS))
    ]
    offered = [config for _, config in gemv.scored(1, problem.n, problem.k, 132)]
    few = [c for c in offered if c["rows"] * c["block_k"] == 256 * c["warps"]]
    picked = {json.dumps(c, sort_keys=True): c for c in (*offered[: 2 * MMA_CONFIGS // 3], *few[: MMA_CONFIGS // 3])}
    return problem, same, [Candidate.of("triton", kernel="gemv_mma", **c) for c in picked.values()]


def error(problem: Problem, candidate: Candidate) -> float:
    """Largest error over the largest value, against fp64."""
    with as_called(problem):
        x = torch.randn(1, problem.k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(problem.n, problem.k, device="cuda", dtype=torch.bfloat16)
        y = BACKENDS["triton"].prepare(candidate, problem).bind(w.t())(x, None)
        exact = x.double() @ w.double().t()
    return float((y - exact).abs().max() / exact.abs().max())


def main() -> None:
    parser = record.arguments(__doc__)
    args = parser.parse_args()
    variants()
    known = sorted((Path(__file__).parent / "results").glob("dense-all-h200-*.json"))[-1]
    winners = [row for row in json.loads(known.read_text())["rows"] if row["m"] == 1 and row["backend"] == "triton"]
    todo = [jobs_of(row) for row in winners]
    jobs = [(candidate, problem) for problem, same, mma in todo for candidate in (*same, *mma)]
    with multiprocessing.get_context("fork").Pool(14) as pool:
        refused = {job: why for job, why in zip(jobs, pool.map(compiles, jobs, chunksize=4), strict=True) if why}
    print(f"{len(jobs)} compiled, {len(refused)} refused: {list(refused.values())[:1]}", flush=True)
    here = environment(cuda_device(0))
    logs: dict[str, list[float]] = {}
    rows = []
    for problem, same, mma in todo:
        mma = [candidate for candidate in mma if (candidate, problem) not in refused]
        dense.ROUNDS = 5
        first = [statistics.median(series) for series in dense.take_turns(problem, mma, floor=False)]
        order = sorted(range(len(mma)), key=first.__getitem__)[:3]
        dense.ROUNDS = 21
        arms = [*same, *(mma[i] for i in order)]
        us = [statistics.median(series) for series in dense.take_turns(problem, arms, floor=True)]
        names = ["gemv", *HINTS, "mma", "mma2", "mma3"]
        for name, time_us in zip(names, us, strict=False):
            logs.setdefault(name, []).append(math.log(us[0] / time_us))
        floor_us = min(us[len(arms) :])
        logs.setdefault("best mma", []).append(math.log(us[0] / min(us[-6:-3])))
        logs.setdefault("floor", []).append(math.log(us[0] / floor_us))
        rows.append(
            {
                "n": problem.n, "k": problem.k, "us": dict(zip(names, us, strict=False)), "floor_us": floor_us,
                "gemv": same[0].config, "mma": [mma[i].config for i in order],
                "error": [error(problem, same[0]), error(problem, mma[order[0]])],
                "screened": [(c.config, t) for c, t in zip(mma, first, strict=True)],
            }
        )  # fmt: skip
        print({key: value for key, value in rows[-1].items() if key != "screened"}, flush=True)
    summary = {name: round(math.exp(statistics.fmean(gains)), 4) for name, gains in logs.items()}
    print(summary)
    result = {"benchmark": "gemv_loads", "stamps": here.stamps, "summary": summary, "rows": rows}
    print("saved", record.save("gemv_loads", result, args.out))


if __name__ == "__main__":
    main()
