"""Grouped products: rows of X, dealt out to several weights, in one launch; the experts of a mixture in a program.

Y[r] = X[r] @ W[g].T for the rows r of group g, which are those from offs[g - 1] up to offs[g].  W is [G, N, K], K or N
lying without gaps.  How many rows a group has is known on the device alone, so the grid has a block for every tile
there can be, and each thread block finds its tile from offs: which group, and which of its rows; those that are too
many end at once.  At decode sizes a group has one row or two, and reading the weights that were chosen is the work.
`swap` puts rows of W on the long side of the matrix instruction and tokens on the short one, as in tiles.py.
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
from gemmtuned.kernels.own_kernel import OUR_TYPES, POINTER_ALIGN, Config, Parameter, Scored
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import MAX_GRID_YZ, Axis, LaunchRecord
from gemmtuned.kernels.triton.row_products import in_order, row_products

MAX_GROUPS: Final = 1024  # offs is held in registers
_ALIGNED: Final = 8  # values of 16 bits: torch asks for as many of its own
_WORDS: Final = {
    "x": "x.ptr", "w": "w.ptr", "offs": "offs.ptr", "y": "y.ptr", "m": "x.size0", "ldx": "x.stride0",
    "ldg": "w.stride0",
}  # fmt: skip
_ROWS: Final = {"t": {"ldw": "w.stride1"}, "n": {"ldw": "w.stride2"}}  # by layout of W: what lies apart
# (rows of W, K of a step, warps, stages, swap) for few rows of X a group, and (rows, tokens, K, warps, stages, swap)
_FEW: Final = (
    (64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (32, 128, 4, 5, 0), (64, 64, 4, 6, 1), (128, 64, 4, 4, 1),
    (32, 256, 4, 3, 0), (128, 128, 8, 3, 1), (16, 256, 4, 4, 0),
)  # fmt: skip
_MANY: Final = (
    (128, 128, 64, 8, 4, 1), (128, 64, 64, 4, 4, 1), (64, 64, 64, 4, 5, 1), (128, 128, 64, 8, 3, 0),
    (256, 128, 64, 8, 3, 1), (256, 64, 64, 8, 4, 1), (64, 32, 128, 4, 4, 1), (128, 32, 64, 4, 5, 1),
)  # fmt: skip
_FEW_ROWS: Final = 24  # rows of X per group, on average


@triton.jit
def grouped(
    x, w, offs, y, m, ldx, ldg, ldw, N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    g = tl.arange(0, PLACES)
    ends = tl.minimum(tl.load(offs + g, mask=g < GROUPS, other=0), m)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    if place < tl.sum(tiles, 0):
        here = (place < upto) & (place >= upto - tiles)
        group = tl.sum(tl.where(here, g, 0), 0)
        first = tl.sum(tl.where(here, starts + (place - upto + tiles) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tokens = first + tl.arange(0, BLOCK_M)
        # past the end the last row is read again: no mask but for K, and those sums are never stored
        ws = tl.minimum(rows, N - 1).to(tl.int64) if N % BLOCK_N != 0 else rows.to(tl.int64)
        x_rows = x + tl.minimum(tokens, end - 1).to(tl.int64) * ldx
        w_rows = w + group.to(tl.int64) * ldg + (ws * ldw if TURNED else ws)
        acc = row_products(x_rows, w_rows, ldw, K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TURNED)
        if SWAP:
            rows = rows[:, None]
            tokens = tokens[None, :]
        else:
            rows = rows[None, :]
            tokens = tokens[:, None]
        tl.store(y + tokens.to(tl.int64) * N + rows, acc.to(y.dtype.element_ty), mask=(rows < N) & (tokens < end))


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    p = problem
    if p.family != "grouped" or p.dtype not in OUR_TYPES or not p.dtype == p.wdtype == p.out_dtype or p.bias:
        raise CandidateFailed(f"{p}: kernel grouped runs grouped products of {' and '.join(OUR_TYPES)}, all alike")
    if p.layout not in ("nt", "nn") or p.weight_state != "plain" or p.scale != "none":
        raise CandidateFailed(f"{p}: kernel grouped runs layouts nt and nn with plain weights")
    if p.n % _ALIGNED or p.k % _ALIGNED or p.batch > MAX_GROUPS:
        raise CandidateFailed(f"{p}: N and K are multiples of {_ALIGNED}, with up to {MAX_GROUPS} groups")
    tiles = most_tiles(p.m, p.batch, config["tokens"])
    if tiles > MAX_GRID_YZ:
        raise CandidateFailed(f"{p}: {tiles} tiles are more than a grid has")
    words = {**_WORDS, **_ROWS[p.layout[1]]}
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
            "TURNED": int(p.layout[1] == "t"),
        },
        arguments=tuple(words),
        words=words,
        conditions=_conditions(p, words["ldw"]),
        ld_multiple=_ALIGNED,
        max_m=p.m,
    )


def most_tiles(m: int, groups: int, tokens: int) -> int:
    """The most tiles of `tokens` rows that m rows can make in `groups` groups, however they are dealt out."""
    alone = min(m, groups)  # a tile for each group's first row, and then one for each `tokens` more
    return alone + (m - alone) // tokens


def _conditions(problem: Problem, row: str) -> tuple[Condition, ...]:
    """The conditions of torch's own kernel, and those that make the operands this problem's."""
    dense = "w.stride2" if row == "w.stride1" else "w.stride1"
    return (
        Condition("x.size0", "<=", problem.m), Condition("w.size0", "==", problem.batch),
        Condition("offs.size0", "==", problem.batch), Condition("offs.stride0", "==", 1),
        Condition("x.stride1", "==", 1), Condition(dense, "==", 1),
        *(Condition(word, "%", _ALIGNED) for word in ("x.stride0", "w.stride0", row)),
        *(Condition(f"{name}.ptr", "%", POINTER_ALIGN) for name in ("x", "w")),
    )  # fmt: skip


def scored(problem: Problem, device: Device) -> Scored:
    """What is worth trying, in the order in which it is likely to be the fastest; it is not estimated in us."""
    p = problem
    if p.dtype not in OUR_TYPES or p.batch > MAX_GROUPS:
        return []
    rows_each = p.m / p.batch
    found = []
    if rows_each <= _FEW_ROWS:
        tokens = 32 if rows_each > 12 else 16
        found = [(rows, tokens, block_k, warps, stages, swap) for rows, block_k, warps, stages, swap in _FEW]
    if rows_each > _FEW_ROWS // 3:
        found = [*_MANY, *found] if rows_each > _FEW_ROWS else [*found, *_MANY[-4:]]
    names = ("rows", "tokens", "block_k", "warps", "stages", "swap")
    return in_order((dict(zip(names, values, strict=True)) for values in found), p.n, device.arch)


KERNEL: Final = TritonKernel(
    name="grouped",
    function=grouped,
    families=("grouped",),
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
