"""Grouped products of fp8 with a scale for each row of X and of every W, in one launch; a mixture's experts in fp8.

Y[r] = (X[r] * scale_x[r]) @ (W[g] * scale_w[g]).T for the rows r of group g.  Tiles are dealt out to thread blocks as
in grouped.py; sums are multiplied with their scales at the end, in fp32 and in torch's order.

The tensor core of sm_90 adds up products of fp8 in numbers of fewer bits than fp32 has.  A problem that does not allow
such sums over all of K (math_mode is not `reduced`; use_fast_accum=False) has them added to fp32 after every PROMOTED
of K: its own say, and no choice of a config.  Small tiles run on another instruction, whose sums are fp32.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.configs.tunable import is_scaled_grouped
from gemmtuned.kernels.own_kernel import POINTER_ALIGN, Config, Parameter, Scored
from gemmtuned.kernels.triton.grouped import MAX_GROUPS, most_tiles
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import MAX_GRID_YZ, Axis, LaunchRecord
from gemmtuned.kernels.triton.row_products import in_order

_ALIGNED: Final = 16  # values of 8 bits: torch asks for as many of its own
PROMOTED: Final = 128  # values of K, as in torch's own kernel
_WORDS: Final = {
    "x": "x.ptr", "w": "w.ptr", "scale_x": "scale_x.ptr", "scale_w": "scale_w.ptr", "offs": "offs.ptr", "y": "y.ptr",
    "m": "x.size0", "ldx": "x.stride0", "ldg": "w.stride0", "ldw": "w.stride1", "apart": "scale_b.stride0",
}  # fmt: skip
# (rows of W, K of a step, warps, stages, swap) for few rows of X a group, and (rows, tokens, K, warps, stages, swap)
_FEW: Final = (
    (64, 256, 4, 4, 1), (64, 256, 4, 3, 1), (32, 256, 4, 5, 0), (64, 128, 4, 6, 1), (128, 128, 4, 4, 1),
    (32, 512, 4, 3, 0), (128, 256, 8, 3, 1), (16, 512, 4, 4, 0), (64, 512, 4, 3, 1), (32, 128, 4, 8, 0),
    (128, 128, 4, 6, 1), (64, 512, 8, 3, 1),
)  # fmt: skip
_MANY: Final = (
    (128, 64, 128, 4, 4, 1), (64, 64, 128, 4, 5, 1), (128, 128, 128, 8, 4, 1), (128, 128, 128, 8, 3, 0),
    (256, 64, 128, 8, 4, 1), (64, 32, 256, 4, 4, 1), (128, 32, 128, 4, 5, 1), (256, 128, 128, 8, 3, 1),
)  # fmt: skip
_FEW_ROWS: Final = 24  # rows of X per group, on average


@triton.jit
def tile_at(place, offs, m, GROUPS: tl.constexpr, PLACES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, its first row of the tile, its end) of the tile of this thread block; all 0 where there is none."""
    g = tl.arange(0, PLACES)
    ends = tl.minimum(tl.load(offs + g, mask=g < GROUPS, other=0), m)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    here = (place < upto) & (place >= upto - tiles)
    group = tl.sum(tl.where(here, g, 0), 0)
    first = tl.sum(tl.where(here, starts + (place - upto + tiles) * BLOCK_M, 0), 0)
    return group, first, tl.sum(tl.where(here, ends, 0), 0)


@triton.jit
def scaled_grouped(
    x, w, scale_x, scale_w, offs, y, m, ldx, ldg, ldw, apart,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    SHORT: tl.constexpr,  # None: as much of K as there is
):  # fmt: skip
    group, first, end = tile_at(tl.program_id(1), offs, m, GROUPS, PLACES, BLOCK_M)
    if first < end:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tokens = first + tl.arange(0, BLOCK_M)
        # past the end the last row is read again: no mask but for K, and those sums are never stored
        ws = tl.minimum(rows, N - 1)
        xs = tl.minimum(tokens, end - 1)
        x_rows = x + xs.to(tl.int64) * ldx
        w_rows = w + group.to(tl.int64) * ldg + ws.to(tl.int64) * ldw
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if SWAP:
                wp = w_rows[:, None] + k[None, :]
                xp = x_rows[None, :] + k[:, None]
                if K % BLOCK_K == 0:
                    acc = tl.dot(tl.load(wp), tl.load(xp), acc, max_num_imprecise_acc=SHORT)
                else:
                    wt = tl.load(wp, mask=(k < K)[None, :], other=0.0)
                    xt = tl.load(xp, mask=(k < K)[:, None], other=0.0)
                    acc = tl.dot(wt, xt, acc, max_num_imprecise_acc=SHORT)
            else:
                wp = w_rows[None, :] + k[:, None]
                xp = x_rows[:, None] + k[None, :]
                if K % BLOCK_K == 0:
                    acc = tl.dot(tl.load(xp), tl.load(wp), acc, max_num_imprecise_acc=SHORT)
                else:
                    xt = tl.load(xp, mask=(k < K)[None, :], other=0.0)
                    wt = tl.load(wp, mask=(k < K)[:, None], other=0.0)
                    acc = tl.dot(xt, wt, acc, max_num_imprecise_acc=SHORT)
        of_x = tl.load(scale_x + xs)
        of_w = tl.load(scale_w + group.to(tl.int64) * apart + ws)
        if SWAP:
            acc = acc * of_x[None, :] * of_w[:, None]
            rows = rows[:, None]
            tokens = tokens[None, :]
        else:
            acc = acc * of_x[:, None] * of_w[None, :]
            rows = rows[None, :]
            tokens = tokens[:, None]
        tl.store(y + tokens.to(tl.int64) * N + rows, acc.to(y.dtype.element_ty), mask=(rows < N) & (tokens < end))


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    p = problem
    if not is_scaled_grouped(p):
        raise CandidateFailed(f"{p}: kernel scaled_grouped runs grouped products of fp8 into bf16 with scales by rows")
    if p.n % _ALIGNED or p.k % _ALIGNED or p.batch > MAX_GROUPS:
        raise CandidateFailed(f"{p}: N and K are multiples of {_ALIGNED}, with up to {MAX_GROUPS} groups")
    tiles = most_tiles(p.m, p.batch, config["tokens"])
    if tiles > MAX_GRID_YZ:
        raise CandidateFailed(f"{p}: {tiles} tiles are more than a grid has")
    return LaunchRecord(
        kernel=KERNEL.name,
        dtype=p.dtype,
        grid=(Axis("", -(-p.n // config["rows"])), Axis("", tiles), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "N": p.n,
            "K": p.k,
            "GROUPS": p.batch,
            "PLACES": 1 << (p.batch - 1).bit_length(),
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "SWAP": config["swap"],
            **({} if p.math_mode == "reduced" else {"SHORT": min(PROMOTED, config["block_k"])}),
        },
        arguments=tuple(_WORDS),
        types={"scale_x": "fp32", "scale_w": "fp32", "y": p.out_dtype},
        words=_WORDS,
        conditions=_conditions(p),
        ld_multiple=_ALIGNED,
        max_m=p.m,
    )


def _conditions(problem: Problem) -> tuple[Condition, ...]:
    """The conditions of torch's own kernel, and those that make the operands this problem's."""
    return (
        Condition("x.size0", "<=", problem.m), Condition("w.size0", "==", problem.batch),
        Condition("offs.size0", "==", problem.batch), Condition("offs.stride0", "==", 1),
        Condition("x.stride1", "==", 1), Condition("w.stride2", "==", 1),
        Condition("scale_x.dim", "==", 1), Condition("scale_x.size0", "==", "x.size0"),
        Condition("scale_x.stride0", "==", 1), Condition("scale_b.dim", "==", 2),
        Condition("scale_b.size0", "==", problem.batch), Condition("scale_b.size1", "==", problem.n),
        Condition("scale_b.stride1", "==", 1),
        *(Condition(word, "%", _ALIGNED) for word in ("x.stride0", "w.stride0", "w.stride1")),
        *(Condition(f"{name}.ptr", "%", POINTER_ALIGN) for name in ("x", "w")),
    )  # fmt: skip


def scored(problem: Problem, device: Device) -> Scored:
    """What is worth trying, in the order in which it is likely to be the fastest; it is not estimated in us."""
    p = problem
    if not is_scaled_grouped(p) or p.batch > MAX_GROUPS:
        return []
    rows_each = p.m / p.batch
    found = []
    if rows_each <= _FEW_ROWS:
        tokens = 32 if rows_each > 12 else 16
        found = [(rows, tokens, block_k, warps, stages, swap) for rows, block_k, warps, stages, swap in _FEW]
    if rows_each > _FEW_ROWS // 3:
        found = [*_MANY, *found] if rows_each > _FEW_ROWS else [*found, *_MANY[-4:]]
    names = ("rows", "tokens", "block_k", "warps", "stages", "swap")
    return in_order((dict(zip(names, values, strict=True)) for values in found), p.n, device.arch, value_bytes=1)


KERNEL: Final = TritonKernel(
    name="scaled_grouped",
    function=scaled_grouped,
    families=("grouped",),
    archs=("sm_90+",),
    parameters=(
        Parameter("rows", 16, power=True),
        Parameter("tokens", 16, power=True),
        Parameter("block_k", 32, power=True),
        Parameter("warps", most=32, power=True),
        Parameter("stages"),
        Parameter("swap", 0, 1),
    ),
    scored=scored,
    record=launch_record,
    alike=lambda config: None,
)
