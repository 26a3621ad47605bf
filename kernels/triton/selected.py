"""M = 9 to 16: as `fragments`, but no product is in vain (sm_80 and later).

Y[M, N] = X[M, K] @ W[N, K].T + bias.  A load takes 128 bytes of each of four rows (fragments.py says why), so that lane
4 g + t has row g / 2 and part g % 2 of K.  `fragments` multiplies such parts of W with such parts of X and throws away
what is not of one part in both: half of the products, and half of the registers for sums.

Here X's parts are two rows of a matrix of which half is zero: mma.sp.m16n8k32 (PTX ISA 8.5) takes 32 values of K at
once, of which A, here X, has two of each four, and may choose for each row which two they are.  All rows of a part
choose alike, so that K is put in this order: two values of part 0, two of part 1, and so on.  For that a lane needs 64
bytes of one row of W: of its own row and its neighbour's it loads one half each, and lanes 4 g + t and 4 (g ^ 1) + t
then give each other what is not theirs.

The rest is as in `fragments`: no operand in shared memory, the loads of `ahead` steps on their way together, those of X
in front, a share of K for each warp, `split` > 1 thread blocks of a cluster that cut K (sm_90), a limit on `registers`.
But warps add up their sums in the thread block's own memory, where they have enough of them, before they send them to
others.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
# ruff: noqa: RUF005  (Triton knows no unpacking)

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import Config, Parameter, by_size
from gemmtuned.kernels.triton import to_registers
from gemmtuned.kernels.triton.cluster import (
    all_have_begun,
    barrier_of,
    begin,
    collect_and_store,
    own_place,
    place_of,
)
from gemmtuned.kernels.triton.diagonal import has_diagonal
from gemmtuned.kernels.triton.inline_ptx import inline_ptx
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, Exchange, LaunchRecord, make_record
from gemmtuned.kernels.triton.load_barrier import issued, issued_after
from gemmtuned.kernels.triton.to_registers import (
    STEP_K,
    Fit,
    begun,
    check_registers,
    keep_first,
    load_steps,
    rows_of_w,
    send_first,
    send_kept,
)

MIN_M: Final = 9
MAX_M: Final = 16
ROWS: Final = (8, 16)
_MANY: Final = 4  # steps ahead: from here on a barrier holds the loads of every group together
FITS: Final = fits(__file__, Fit)
_STEP_K = tl.constexpr(STEP_K)
_TOKENS = tl.constexpr(MAX_M)


def _products(dtype: str) -> str:
    """PTX of the products of eight rows of W and 16 rows of X, over 64 values of K, added to sums.

    Four sums belong to the first eight rows of X, four to the last.  W comes from two loads, of rows 2 (g / 2) (even)
    and 2 (g / 2) + 1 (odd); X from two loads like these for its first eight rows, and from two for its last.
    """
    lines = [
        ".reg .pred second;",
        ".reg .b32 part, chosen, other<4>, own<4>;",
        "mov.u32 part, %laneid;",
        "and.b32 part, part, 4;",
        "setp.ne.u32 second, part, 0;",
        "selp.b32 chosen, 0xeeeeeeee, 0x44444444, second;",  # the third and fourth of four values, or the first two
    ]
    for i in range(4):
        lines += [
            f"selp.b32 other{i}, $w_even{i}, $w_odd{i}, second;",
            f"shfl.sync.bfly.b32 other{i}, other{i}, 4, 31, -1;",
            f"selp.b32 own{i}, $w_odd{i}, $w_even{i}, second;",
        ]
    for piece, half in itertools.product((0, 2), ("first", "last")):
        sums = [f"${half}_new{i}" for i in range(4)]
        before = sums if piece else [f"${half}_sum{i}" for i in range(4)]
        x = [f"${half}_{row}{piece + i}" for i in (0, 1) for row in ("even", "odd")]
        w = [f"{of}{piece + i}" for i in (0, 1) for of in ("own", "other")]
        lines.append(
            f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{dtype}.{dtype}.f32 "
            f"{{{', '.join(sums)}}}, {{{', '.join(x)}}}, {{{', '.join(w)}}}, {{{', '.join(before)}}}, chosen, 0x0;"
        )
    return "{" + "\n".join(lines) + "}"


_OF_BF16, _OF_FP16, _PRODUCTS_OPERANDS = inline_ptx(
    "=&f first_new<4>, =&f last_new<4>, r w_even<4>, r w_odd<4>, r first_even<4>, r first_odd<4>, r last_even<4>, "
    "r last_odd<4>, f first_sum<4>, f last_sum<4>",
    _products("bf16"),
    _products("f16"),
)


@triton.jit
def _grown_by(even, odd, x, at: tl.constexpr, sums):
    """sums + products of eight rows of W and 16 of X (four loads from `at` on)."""
    if even.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _OF_BF16, _PRODUCTS_OPERANDS,
            [even, odd, x[at], x[at + 1], x[at + 2], x[at + 3], sums], dtype=tl.float32, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _OF_FP16, _PRODUCTS_OPERANDS,
            [even, odd, x[at], x[at + 1], x[at + 2], x[at + 3], sums], dtype=tl.float32, is_pure=False, pack=8,
        )  # fmt: skip


def _over_parts() -> str:
    """PTX that leaves a lane eight of its 16 sums, of rows g and 8 + g of X, added up over both parts of K.

    A lane has sums of row 2 (g / 2) and of the row after it, of part g % 2 of K: it gives its neighbour the sums of the
    neighbour's row, and gets those of its own.
    """
    lines = [
        ".reg .pred second;",
        ".reg .b32 part;",
        ".reg .f32 given;",
        "mov.u32 part, %laneid;",
        "and.b32 part, part, 4;",
        "setp.ne.u32 second, part, 0;",
    ]
    for i in range(8):
        even = i // 2 * 4 + i % 2
        lines += [
            f"selp.f32 given, $sum{even}, $sum{even + 2}, second;",
            "shfl.sync.bfly.b32 given, given, 4, 31, -1;",
            f"selp.f32 $total{i}, $sum{even + 2}, $sum{even}, second;",
            f"add.f32 $total{i}, $total{i}, given;",
        ]
    return "{" + "\n".join(lines) + "}"


_OVER_PARTS, _OVER_PARTS_OPERANDS = inline_ptx("=&f total<8>, f sum<16>", _over_parts())


@triton.jit
def _of_lane(a, b):
    """A lane's eight sums: for `a`, then for `b`, tokens g and 8 + g with rows 2 t and 2 t + 1 of W."""
    return tl.inline_asm_elementwise(_OVER_PARTS, _OVER_PARTS_OPERANDS, [a, b], dtype=tl.float32, is_pure=False, pack=8)


@triton.jit
def _grown(sums, of_w, of_x, AHEAD: tl.constexpr, BLOCKS: tl.constexpr):
    """sums + the products of a group of steps."""
    for u in tl.static_range(AHEAD):
        grown = ()
        for b in tl.static_range(BLOCKS):
            even = of_w[2 * (u * BLOCKS + b)]
            odd = of_w[2 * (u * BLOCKS + b) + 1]
            grown = grown + (_grown_by(even, odd, of_x, 4 * u, sums[b]),)
        sums = grown
    return sums


@triton.jit
def selected(
    x, w, bias, y, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, CLUSTER: tl.constexpr,
    COPIES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = _STEP_K * WARPS
    STEPS: tl.constexpr = (K + STEP * SPLIT - 1) // (STEP * SPLIT)
    WHOLE: tl.constexpr = K == STEP * STEPS * SPLIT and STEPS % AHEAD == 0
    BLOCKS: tl.constexpr = BLOCK_N // 8  # blocks of eight rows of W
    VALUES: tl.constexpr = 4 * BLOCKS  # sums of a lane
    SIZE: tl.constexpr = _TOKENS * BLOCK_N  # per thread block, EACH per thread
    EACH: tl.constexpr = SIZE // (32 * WARPS)
    tile = tl.program_id(0) // CLUSTER
    part = tl.program_id(0) % CLUSTER
    place = tl.arange(0, 4 * WARPS)
    line = place % 4
    warp = (place // 4)[:, None]
    c = tl.arange(0, _STEP_K)[None, :]
    t = c // 8 % 4
    xs = part * (STEPS * STEP) + warp * _STEP_K + c
    end = tl.minimum((part + 1) * (STEPS * STEP), K)
    w_rows = rows_of_w(w, ldw, tile, line, N, BLOCK_N)
    x_rows = ()
    for i in tl.static_range(4):
        token = (i // 2) * 8 + 2 * line + i % 2
        x_rows = x_rows + (x + tl.minimum(token, m - 1).to(tl.int64)[:, None] * ldx,)
    # Of part t % 2 of row g of W, lane 4 g + t multiplies the groups t / 2 and t / 2 + 2 of eight values.  It loads the
    # first of them, and of its neighbour's row the second: the two then give each other what is theirs
    ws = xs - c + t % 2 * 32 + t // 2 * 8 + c % 8
    w_even = ws + c // 32 * 16
    w_odd = ws + (1 - c // 32) * 16
    sums = (tl.zeros((4 * WARPS, _STEP_K), tl.float32),) * BLOCKS
    first = 0
    if CLUSTER > 1:
        of_x = load_steps(x_rows, xs, xs, end, 0, STEP, AHEAD, WHOLE, "")
        of_w = load_steps(w_rows, w_even, w_odd, end, 0, STEP, AHEAD, WHOLE, "evict_first")
        begin(part, _TOKENS, BLOCK_N, CLUSTER, COPIES, True)
        g = 2 * line[:, None] + c // 32
        # of a lane's sums: pairs of rows 2 t and 2 t + 1, of tokens g and 8 + g, of eight rows, then of eight more
        i = c % VALUES
        token = g + i // 2 % 2 * 8
        row = i // 4 * 8 + 2 * t + i % 2
        if COPIES < WARPS:
            own = own_place(WARPS * SIZE, _TOKENS, BLOCK_N, CLUSTER, True)
            to_own = own + (warp * SIZE + token * BLOCK_N + row) * 4
            at = (place[:, None] * 8 + c // 8) * EACH
            kept = own + at * 4
            token = at // BLOCK_N
            row = at % BLOCK_N
        barrier = barrier_of(token, _TOKENS, CLUSTER, True)
        to = place_of(token, row, warp if COPIES == WARPS else 0, part, _TOKENS, BLOCK_N, CLUSTER, COPIES, True)
        all_have_begun(True)
        sums = begun(sums, issued_after(to | barrier, of_x[0], VALUES // 2 if COPIES == WARPS else 1), BLOCKS)
        sums = _grown(sums, of_w, of_x, AHEAD, BLOCKS)
        first = 1
    for group in tl.range(first, (STEPS + AHEAD - 1) // AHEAD):
        of_x = load_steps(x_rows, xs, xs, end, group, STEP, AHEAD, WHOLE, "")
        of_w = load_steps(w_rows, w_even, w_odd, end, group, STEP, AHEAD, WHOLE, "evict_first")
        if HELD or STEPS <= AHEAD:
            sums = begun(sums, issued(), BLOCKS)
        sums = _grown(sums, of_w, of_x, AHEAD, BLOCKS)
    total = _of_lane(sums[0], sums[BLOCKS - 1])
    if CLUSTER > 1:
        if COPIES < WARPS:
            keep_first(to_own, total, VALUES)
            send_kept(kept, to, barrier, total, WARPS, EACH)
        else:
            send_first(to, barrier, total, VALUES)
        collect_and_store(
            False, tile * BLOCK_N, 0, part, bias, y, m, N, _TOKENS, BLOCK_N, CLUSTER, COPIES, True
        )  # fmt: skip
    else:
        inner = tl.arange(0, 16)[None, :]
        row = tile * BLOCK_N + inner
        token = tl.arange(0, 16)[:, None]
        values = _tile_of(total, WARPS)
        inside = (inner < BLOCK_N) & (row < N) & (token < m)
        if bias is not None:
            values += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + token.to(tl.int64) * N + row, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tile_of(sums, WARPS: tl.constexpr):
    """What `_of_lane` gives, added up over warps, as [16 tokens, 16 rows]; a single block of eight rows comes twice."""
    # Axes: (warp, g, t, block of rows, half of the tokens, row of the pair) become (half, g, block, t, row of the pair)
    return tl.reshape(tl.permute(tl.sum(tl.reshape(sums, (WARPS, 8, 4, 2, 2, 2)), 0), (3, 0, 2, 1, 4)), (16, 16))


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    rows, split, warps, ahead, registers = (config[p.name] for p in KERNEL.parameters)
    if problem.m > MAX_M:
        raise CandidateFailed(f"{problem} {KERNEL.name}: holds {MAX_M} rows of X")
    if problem.k % 8:
        raise CandidateFailed(f"{problem} {KERNEL.name}: reads 8 values at a time, K is no multiple")
    check_registers(KERNEL.name, config)
    copies = 1 if 32 * warps <= MAX_M * rows <= 64 * warps else warps  # one: each thread then has one sum, or a pair
    own = warps * MAX_M * rows if copies < warps else 0
    held = int(not registers or ahead >= _MANY)
    return make_record(
        KERNEL.name,
        problem,
        grid=(Axis("n", rows), Axis("", 1), Axis("", 1)),
        num_warps=warps,
        num_stages=1,
        constants={"BLOCK_N": rows, "WARPS": warps, "AHEAD": ahead, "COPIES": copies, "HELD": held},
        exchange=Exchange(MAX_M, rows, copies, own) if split > 1 else None,
        own_ptx=True,
        max_registers=registers,
        split=split,
        tile_values=rows * MAX_M,
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if not MIN_M <= m <= MAX_M or k % 8 or not has_diagonal(arch):
        return []
    return to_registers.scored(
        n, k, units, arch=arch, rows=ROWS, config_of=_config, registers_of=registers_of, fit=FITS["all"]
    )


def _config(rows: int, split: int, warps: int, ahead: int) -> dict[str, int]:
    return {"rows": rows, "split": split, "warps": warps, "ahead": ahead}


def registers_of(_k: int, config: Mapping[str, int]) -> int:
    """An estimate of the registers that a thread needs for loads on their way and for sums."""
    return 28 + (config["rows"] + MAX_M) * config["ahead"] + config["rows"]


def fit_of(config: Mapping[str, int]) -> str:
    """As estimates.py says."""
    return "all"


def estimate(fit: Fit, m: int, n: int, k: int, units: int, config: Mapping[str, int], *, arch: str = "sm_90") -> float:
    """As estimates.py says."""
    return to_registers.estimate_us(n, k, units, config, config["registers"] or registers_of(k, config), fit)


KERNEL: Final = TritonKernel(
    name="selected",
    function=selected,
    families=("dense",),
    archs=("sm_80+",),
    parameters=(
        Parameter("rows", 8, 16, multiple=8),
        Parameter("split"),
        Parameter("warps", most=32, power=True),
        Parameter("ahead"),
        Parameter("registers", 0, 255),
    ),
    scored=by_size(scored),
    tokens=MAX_M,
    record=launch_record,
)
