"""Batched products with few rows of X each, in one launch: the heads of an attention whose keys are compressed (MLA).

Y[b] = X[b] @ W[b].T for every b.  W is [B, N, K], K or N lying without gaps; rows of X and Y lie without gaps, and
their matrices anywhere, so that views [B, M, K] of [M, B, K] need no copy.  Such products are small: what counts is
that every thread block asks for all that it reads at once, so up to four steps of K are on their way, mostly all there
are.  `swap` puts rows of W on the long side of the matrix instruction and tokens on the short one, as in tiles.py.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import INT32_MAX, Condition
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.kernels.own_kernel import OUR_TYPES, POINTER_ALIGN, Config, Parameter, Scored
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import MAX_GRID_YZ, Axis, LaunchRecord
from gemmtuned.kernels.triton.row_products import in_order, row_products

MAX_M: Final = 1024
_ALIGNED: Final = 8  # values of 16 bits: a load of 16 bytes
_WORDS: Final = {
    "x": "x.ptr", "w": "w.ptr", "y": "y.ptr", "m": "x.size1", "ldbx": "x.stride0", "ldx": "x.stride1",
    "ldbw": "w.stride0", "ldby": "y.stride0", "ldy": "y.stride1",
}  # fmt: skip
_ROWS: Final = {"t": {"ldw": "w.stride1"}, "n": {"ldw": "w.stride2"}}  # by layout of W: what lies apart
_RING: Final = 5  # stages at most: up to four steps of K are on their way
# (rows, tokens, K of a step, warps, swap), the fastest first, for up to 32 rows of X, up to 64, and more; tokens 0: 16
# or 32, as the problem has. What won of 815 configurations on an H200: lab/results/batched-h200-2026-11-29.json
_FEW: Final = (
    (64, 0, 64, 4, 1), (64, 0, 128, 4, 1), (32, 0, 128, 4, 1), (64, 0, 128, 8, 1), (64, 0, 64, 4, 0), (32, 0, 64, 4, 0),
    (32, 0, 64, 2, 1), (16, 0, 256, 2, 0), (16, 0, 128, 4, 0), (64, 0, 128, 8, 0), (16, 0, 128, 2, 0),
)  # fmt: skip
_SOME: Final = (
    (64, 64, 64, 4, 0), (64, 64, 64, 4, 1), (64, 32, 128, 4, 1), (64, 32, 64, 4, 1), (16, 64, 128, 4, 0),
    (32, 64, 64, 4, 0), (64, 64, 128, 8, 0), (64, 64, 64, 8, 1), (32, 64, 128, 4, 0),
)  # fmt: skip
_MANY: Final = (
    (64, 64, 64, 4, 1), (128, 64, 128, 8, 0), (64, 128, 64, 4, 1), (64, 64, 64, 4, 0), (64, 128, 64, 8, 1),
    (128, 128, 64, 8, 1), (64, 64, 64, 8, 1), (128, 64, 64, 4, 1), (64, 128, 128, 8, 0), (64, 64, 128, 4, 1),
)  # fmt: skip


@triton.jit
def batched(
    x, w, y, m, ldbx, ldx, ldbw, ldby, ldy, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_M
    if first < m:
        b = tl.program_id(2).to(tl.int64)
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tokens = first + tl.arange(0, BLOCK_M)
        # past the end the last row is read again: no mask but for K, and those sums are never stored
        ws = tl.minimum(rows, N - 1).to(tl.int64) if N % BLOCK_N != 0 else rows.to(tl.int64)
        x_rows = x + b * ldbx + tl.minimum(tokens, m - 1).to(tl.int64) * ldx
        w_rows = w + b * ldbw + (ws * ldw if TURNED else ws)
        acc = row_products(x_rows, w_rows, ldw, K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TURNED)
        if SWAP:
            rows = rows[:, None]
            tokens = tokens[None, :]
        else:
            rows = rows[None, :]
            tokens = tokens[:, None]
        at = b * ldby + tokens.to(tl.int64) * ldy + rows
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=(rows < N) & (tokens < m))


def check(problem: Problem) -> None:
    """Raise CandidateFailed when the kernel is not written for this problem."""
    p = problem
    if p.family != "batched" or p.dtype not in OUR_TYPES or not p.dtype == p.wdtype == p.out_dtype or p.scale != "none":
        raise CandidateFailed(f"{p}: kernel batched runs batched products of {' and '.join(OUR_TYPES)}, all alike")
    if p.layout not in ("nt", "nn") or p.weight_state != "plain":
        raise CandidateFailed(f"{p}: kernel batched runs layouts nt and nn with plain weights")
    if p.n % _ALIGNED or p.k % _ALIGNED or p.m > MAX_M or p.batch > MAX_GRID_YZ:
        raise CandidateFailed(f"{p}: N and K are multiples of {_ALIGNED}, M is at most {MAX_M}")
    if p.m * p.n > INT32_MAX:
        raise CandidateFailed(f"{p}: matrices of Y lie further apart than 32 bits say")


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    check(problem)
    p = problem
    tiles = -(-p.n // config["rows"])
    if tiles > MAX_GRID_YZ:
        raise CandidateFailed(f"{p}: {tiles} tiles of N are more than a launch record can have")
    words = {**_WORDS, **_ROWS[p.layout[1]]}
    return LaunchRecord(
        kernel=KERNEL.name,
        dtype=p.dtype,
        grid=(Axis("", -(-p.n // config["rows"])), Axis("", -(-p.m // config["tokens"])), Axis("", p.batch)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "N": p.n,
            "K": p.k,
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "SWAP": config["swap"],
            "TURNED": int(p.layout[1] == "t"),
        },
        arguments=tuple(words),
        words=words,
        conditions=_conditions(p, words["ldw"]),
        ld_multiple=_ALIGNED,
        max_m=p.m,
    )


def _conditions(problem: Problem, row: str) -> tuple[Condition, ...]:
    """That the operands are this problem's, and lie as the kernel reads them."""
    dense = "w.stride2" if row == "w.stride1" else "w.stride1"
    return (
        Condition("x.size1", "<=", problem.m), Condition("x.size0", "==", problem.batch),
        Condition("w.size0", "==", problem.batch),
        *(Condition(word, "==", 1) for word in ("x.stride2", dense, "y.stride2")),
        *(
            Condition(word, "%", _ALIGNED)
            for word in ("x.stride0", "x.stride1", "w.stride0", row, "y.stride0", "y.stride1")
        ),
        *(Condition(f"{name}.ptr", "%", POINTER_ALIGN) for name in ("x", "w")),
    )  # fmt: skip


def scored(problem: Problem, device: Device) -> Scored:
    """What is worth trying, in the order in which it is likely to be the fastest; it is not estimated in us."""
    p = problem
    try:
        check(p)
    except CandidateFailed:
        return []
    forms = _FEW if p.m <= 32 else _SOME if p.m <= 64 else _MANY
    configs = (_config(p, *form) for form in forms)
    return in_order((c for c in configs if p.n <= MAX_GRID_YZ * c["rows"]), p.n, device.arch)


def _config(problem: Problem, rows: int, tokens: int, block_k: int, warps: int, swap: int) -> dict[str, int]:
    """A form of the lists above for a problem: a step is no longer than K, and as many as fit are on their way."""
    step = min(block_k, max(1 << (problem.k - 1).bit_length(), 16))
    steps = -(-problem.k // step)
    return {
        "rows": rows, "tokens": tokens or (16 if problem.m <= 16 else 32), "block_k": step, "warps": warps,
        "stages": min(steps + 1, _RING) if steps > 1 else 1, "swap": swap,
    }  # fmt: skip


KERNEL: Final = TritonKernel(
    name="batched",
    function=batched,
    families=("batched",),
    archs=("sm_80+", "gfx9*"),
    parameters=(
        Parameter("rows", 16, power=True),
        Parameter("tokens", 16, power=True),
        Parameter("block_k", 16, power=True),
        Parameter("warps", most=32, power=True),
        Parameter("stages"),
        Parameter("swap", 0, 1),
    ),
    scored=scored,
    record=launch_record,
    alike=lambda config: None,
)
