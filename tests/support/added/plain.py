"""M up to 64: each thread block multiplies a block of rows of W with all rows of X, and nothing is clever about it."""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.own_kernel import Config, Parameter, Scored, by_size
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, LaunchRecord, make_record

MAX_M: Final = 64


@triton.jit
def plain(
    x, w, bias, y, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    inside = (tokens < m)[:, None] & (rows < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        of_x = x + tokens.to(tl.int64)[:, None] * ldx + k[None, :]
        of_w = w + rows.to(tl.int64)[None, :] * ldw + k[:, None]
        xt = tl.load(of_x, mask=(tokens < m)[:, None] & (k < K)[None, :], other=0.0)
        wt = tl.load(of_w, mask=(k < K)[:, None] & (rows < N)[None, :], other=0.0)
        acc = tl.dot(xt, wt, acc)
    if bias is not None:
        acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + tokens.to(tl.int64)[:, None] * N + rows[None, :], acc.to(y.dtype.element_ty), mask=inside)


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {KERNEL.name}: holds {config['tokens']} rows of X (at most {MAX_M})")
    return make_record(
        KERNEL.name,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", 1), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={"BLOCK_N": config["rows"], "BLOCK_M": config["tokens"], "BLOCK_K": config["block_k"]},
        split=1,
        tile_values=config["rows"] * config["tokens"],
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> Scored:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if m > MAX_M:
        return []
    tokens = max(16, 1 << (m - 1).bit_length())
    found = []
    for rows in (16, 32, 64, 128):
        waves = math.ceil(math.ceil(n / rows) / units)  # rounds of thread blocks
        for stages in (3, 4):
            config = {"rows": rows, "tokens": tokens, "block_k": 64, "warps": 4, "stages": stages}
            found.append((2.0 + waves * rows * k * 2 / 3e4 + 0.01 * stages, config))
    return sorted(found, key=lambda item: item[0])


KERNEL: Final = TritonKernel(
    name="plain",
    function=plain,
    families=("dense",),
    archs=("sm_80+",),
    parameters=(
        Parameter("rows", 16, power=True),
        Parameter("tokens", 16, 64, power=True),
        Parameter("block_k", 16, power=True),
        Parameter("warps", most=32, power=True),
        Parameter("stages", most=8),
    ),
    scored=by_size(scored),
    record=launch_record,
)
