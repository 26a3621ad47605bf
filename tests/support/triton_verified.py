"""Run with TRITON_INTERPRET=1 and a number: that case through the daemon's numeric gate; one JSON line."""

import json
import sys

import torch
from interpreted_types import teach_fp8_and_bf16

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends.triton_ import Triton
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.kernel import StatelessKernel

DEVICE = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
GEMV = {"kernel": "gemv", "rows": 2, "block_k": 64, "warps": 2, "unroll": 1}
WARPS = {"kernel": "warp_split_k", "rows": 16, "tokens": 8, "block_k": 16, "warps": 2, "stages": 3}
TILES = {"kernel": "tiles", "rows": 16, "tokens": 16, "block_k": 32, "group": 1, "swap": 1, "warps": 4, "stages": 3}
INTS = {"kernel": "int_tiles", "rows": 16, "tokens": 32, "block_k": 32, "warps": 4, "stages": 3}
GROUPED = {"kernel": "grouped", "rows": 16, "tokens": 16, "block_k": 32, "warps": 4, "stages": 3}
SCALED = GROUPED | {"kernel": "scaled_grouped"}
FP8 = {"dtype": "fp8_e4m3", "out_dtype": "bf16", "scale": "row"}
CASES = (
    (Problem(m=1, n=20, k=208, dtype="fp16", bias=True), Candidate.of("triton", **GEMV, split=2)),
    (Problem(m=5, n=24, k=200, dtype="fp16"), Candidate.of("triton", **WARPS, split=3)),
    (Problem(m=17, n=40, k=136, dtype="fp16", bias=True), Candidate.of("triton", **TILES, split=2)),
    (Problem(family="grouped", batch=5, m=23, n=24, k=40, dtype="fp16"), Candidate.of("triton", **GROUPED, swap=1)),
    (
        Problem(family="grouped", batch=9, m=5, n=40, k=72, dtype="fp16", layout="nn"),
        Candidate.of("triton", **GROUPED, swap=0),
    ),
    (Problem(m=17, n=24, k=136, dtype="i8", out_dtype="i32"), Candidate.of("triton", **INTS, split=2, swap=1)),
    (Problem(m=21, n=40, k=200, dtype="i8", out_dtype="i32"), Candidate.of("triton", **INTS, split=1, swap=0)),
    (Problem(family="grouped", batch=4, m=13, n=32, k=48, **FP8), Candidate.of("triton", **SCALED, swap=1)),
    (
        Problem(family="grouped", batch=9, m=5, n=32, k=48, **FP8, math_mode="reduced"),
        Candidate.of("triton", **SCALED, swap=0),
    ),
)


def scaled_groups(x, w, scale_x, scale_w, offs):
    """What torch has on GPUs alone."""
    y = torch.empty(x.shape[0], w.shape[-1])
    ends = offs.tolist()
    for g, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        y[first:end] = x[first:end].float() @ w[g].float() * scale_x[first:end, None] * scale_w[g]
    return y.bfloat16()


def main() -> None:
    problem, candidate = CASES[int(sys.argv[1])]
    scaled = problem.scale != "none"
    if scaled:
        teach_fp8_and_bf16()
    default = StatelessKernel(scaled_groups) if scaled else family_of(problem).default(problem)
    kernel = Triton(device=DEVICE).prepare(candidate, problem)
    with torch.inference_mode():
        verdict = verify(problem, {candidate: kernel}, default, device=torch.device("cpu"))[candidate]
    sys.stdout.write(json.dumps([str(problem), verdict.outcome, verdict.note]) + "\n")


if __name__ == "__main__":
    main()
