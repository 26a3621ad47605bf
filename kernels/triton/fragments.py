"""M = 2 to 16: W and X go from memory straight into the registers that the tensor core multiplies (sm_80 and later).

Y[M, N] = X[M, K] @ W[N, K].T + bias.  In mma.m16n8k16 (PTX ISA 7.0) lane 4 g + t holds values of rows g and g + 8 of A
and of column g of B.  Which k stands where is free as long as A and B agree, so that 16 bytes of a row, eight k side by
side, can be a lane's share of two instructions as they come.  But then a load takes 64 bytes of each of eight rows, and
memory gives such pieces slowly.  So two lanes' groups share a row: g is row g / 2 and part g % 2 of K, for W and for X
alike, and a load takes 128 bytes of four rows.  Of the result only what is of one part in both counts: two of a lane's
four sums, which is half of what the tensor core does, and it has time.  A lane swaps one of the two for the other part
of the other, so that each has one sum of a warp to send.

No operand goes through shared memory, no thread waits for another's loads before the final sum, and a thread block
needs no more than eight rows.  The loads of `ahead` steps are kept on their way together (load_barrier.py), those of X
in front: they come from nearer, and loads return in order.  Each warp takes its own share of K; from sm_90 on `split`
> 1 cuts K over the thread blocks of a cluster, too (cluster.py).  An instruction waits for the one that adds to the
same sums: there are `chains` sets of sums, which take turns.

Loads are the first thing that a thread block does.  Rows of X past M read the last one again, for a masked load needs
zeros in its registers first; the cluster's barrier is set up behind the loads, and the addresses of the sums are made
while they are on their way.  `registers` holds the compiler to what lets all thread blocks of an SM be there at once,
0 does not; then, or with more than eight rows of X, a barrier holds the loads of every group together.  Else only those
of the first in a cluster, and of thread blocks that have no other: with a limit the compiler has little to move loads
behind.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
# ruff: noqa: RUF005  (Triton knows no unpacking)

from __future__ import annotations

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
    place_of,
)
from gemmtuned.kernels.triton.diagonal import has_diagonal
from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, Exchange, LaunchRecord, make_record
from gemmtuned.kernels.triton.load_barrier import issued, issued_after
from gemmtuned.kernels.triton.thread_access import load_first, store_first
from gemmtuned.kernels.triton.to_registers import STEP_K, Fit, begun, check_registers, load_steps, rows_of_w, send_first

MAX_M: Final = 16
ROWS: Final = (8, 16, 32)
_FEW: Final = 8  # rows of X
FITS: Final = fits(__file__, Fit)
_STEP_K = tl.constexpr(STEP_K)

_TWO_PRODUCTS: Final = """{
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32
        {$new0, $new1, $new2, $new3}, {$even0, $odd0, $even1, $odd1}, {$x0, $x1}, {$sum0, $sum1, $sum2, $sum3};
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32
        {$new4, $new5, $new6, $new7}, {$even2, $odd2, $even3, $odd3}, {$x2, $x3}, {$sum4, $sum5, $sum6, $sum7};
    }"""
_OF_BF16, _OF_FP16, _PRODUCTS_OPERANDS = inline_ptx(
    "=&f new<8>, r even<4>, r odd<4>, r x<4>, f sum<8>",
    _TWO_PRODUCTS.replace("TYPE", "bf16"),
    _TWO_PRODUCTS.replace("TYPE", "f16"),
)
_OF_LANE, _OF_LANE_OPERANDS = inline_ptx(
    "=&f total<8>, f sum<8>",
    f"""{{
    .reg .pred second;
    .reg .b32 part;
    .reg .f32 none, even, odd;
    mov.u32 part, %laneid;
    and.b32 part, part, 4;
    setp.ne.u32 second, part, 0;
    add.f32 none, $sum0, $sum4;
    add.f32 even, $sum1, $sum5;
    selp.f32 even, even, none, second;
    add.f32 none, $sum2, $sum6;
    add.f32 odd, $sum3, $sum7;
    selp.f32 odd, odd, none, second;
    selp.f32 none, even, odd, second;
    selp.f32 odd, odd, even, second;
    shfl.sync.bfly.b32 none, none, 4, 31, -1;
    add.f32 $total0, odd, none;
    {moves("total", range(1, 8), "0f00000000", "f32")}
    }}""",
)


@triton.jit
def _products(even, odd, x, sums):
    """sums + products of four even and four odd rows of W and four rows of X, all of 16 bits, for `_of_lane`."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _OF_BF16, _PRODUCTS_OPERANDS, [even, odd, x, sums],
            dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _OF_FP16, _PRODUCTS_OPERANDS, [even, odd, x, sums],
            dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip


@triton.jit
def _of_lane(sums):
    """The one sum that a lane keeps, over both parts of K, and seven zeros.

    A lane whose rows are of part 0 keeps the sum of its even row, one of part 1 that of its odd row; a lane's rows are
    of part g % 2.  Column 2 t of the result is part 0 of token t, and column 2 t + 1 is part 1 of it.
    """
    return tl.inline_asm_elementwise(_OF_LANE, _OF_LANE_OPERANDS, [sums], dtype=tl.float32, is_pure=False, pack=8)


@triton.jit
def _grown(sums, of_w, of_x, AHEAD: tl.constexpr, CHAINS: tl.constexpr, BLOCKS: tl.constexpr, SIDES: tl.constexpr):
    """sums + the products of a group of steps."""
    for u in tl.static_range(AHEAD):
        grown = ()
        for i in tl.static_range(CHAINS * BLOCKS * SIDES):
            if i // (BLOCKS * SIDES) == u % CHAINS:
                even = of_w[2 * (u * BLOCKS + i // SIDES % BLOCKS)]
                odd = of_w[2 * (u * BLOCKS + i // SIDES % BLOCKS) + 1]
                grown = grown + (_products(even, odd, of_x[u * SIDES + i % SIDES], sums[i]),)
            else:
                grown = grown + (sums[i],)
        sums = grown
    return sums


@triton.jit
def fragments(
    x, w, bias, y, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    CHAINS: tl.constexpr, CLUSTER: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = _STEP_K * WARPS
    STEPS: tl.constexpr = (K + STEP * SPLIT - 1) // (STEP * SPLIT)
    WHOLE: tl.constexpr = K == STEP * STEPS * SPLIT and STEPS % AHEAD == 0
    BLOCKS: tl.constexpr = BLOCK_N // 8  # blocks of eight rows of W: four even, four odd ones
    SIDES: tl.constexpr = BLOCK_M // 4  # groups of four rows of X
    tile = tl.program_id(0) // CLUSTER
    part = tl.program_id(0) % CLUSTER
    place = tl.arange(0, 4 * WARPS)
    line = place % 4
    ks = part * (STEPS * STEP) + (place // 4)[:, None] * _STEP_K + tl.arange(0, _STEP_K)[None, :]
    end = tl.minimum((part + 1) * (STEPS * STEP), K)
    w_rows = rows_of_w(w, ldw, tile, line, N, BLOCK_N)
    x_rows = ()
    for side in tl.static_range(SIDES):
        x_rows = x_rows + (x + tl.minimum(side * 4 + line, m - 1).to(tl.int64)[:, None] * ldx,)
    lane = (tl.arange(0, _STEP_K) // 8)[None, :]
    sums = (tl.zeros((4 * WARPS, _STEP_K), tl.float32),) * (CHAINS * BLOCKS * SIDES)
    first = 0
    if CLUSTER > 1:
        of_x = load_steps(x_rows, ks, ks, end, 0, STEP, AHEAD, WHOLE, "")
        of_w = load_steps(w_rows, ks, ks, end, 0, STEP, AHEAD, WHOLE, "evict_first")
        begin(part, BLOCK_M, BLOCK_N, CLUSTER, WARPS, True)
        to = ()
        barriers = ()
        known = tl.zeros((4 * WARPS, _STEP_K), tl.int32)
        at = lane + place[:, None] * 0
        for side in tl.static_range(SIDES):
            token = side * 4 + at % 4
            barriers = barriers + (barrier_of(token, BLOCK_M, CLUSTER, True),)
            known |= barriers[side]
            for b in tl.static_range(BLOCKS):
                row = (b * 8 + 2 * line)[:, None] + at // 4
                sent = place_of(token, row, (place // 4)[:, None], part, BLOCK_M, BLOCK_N, CLUSTER, WARPS, True)
                to = to + (sent,)
                known |= sent
        all_have_begun(True)
        sums = begun(sums, issued_after(known, of_x[0], 1), CHAINS * BLOCKS * SIDES)
        sums = _grown(sums, of_w, of_x, AHEAD, CHAINS, BLOCKS, SIDES)
        first = 1
    for group in tl.range(first, (STEPS + AHEAD - 1) // AHEAD):
        of_x = load_steps(x_rows, ks, ks, end, group, STEP, AHEAD, WHOLE, "")
        of_w = load_steps(w_rows, ks, ks, end, group, STEP, AHEAD, WHOLE, "evict_first")
        if HELD or STEPS <= AHEAD:
            sums = begun(sums, issued(), CHAINS * BLOCKS * SIDES)
        sums = _grown(sums, of_w, of_x, AHEAD, CHAINS, BLOCKS, SIDES)
    for b in tl.static_range(BLOCKS):
        for side in tl.static_range(SIDES):
            total = sums[b * SIDES + side]
            for chain in tl.static_range(1, CHAINS):
                total += sums[(chain * BLOCKS + b) * SIDES + side]
            total = _of_lane(total)
            if CLUSTER > 1:
                send_first(to[side * BLOCKS + b], barriers[side], total, 1)
            elif WARPS == 1:
                token = side * 4 + lane % 4 + place[:, None] * 0
                row = tile * BLOCK_N + (b * 8 + 2 * line)[:, None] + lane // 4
                if bias is not None:
                    total += load_first(bias + tl.minimum(row, N - 1))
                store_first(y + token.to(tl.int64) * N + row, total, (row < N) & (token < m))
            else:
                row = (tile * BLOCK_N + b * 8 + tl.arange(0, 8))[:, None]
                token = side * 4 + tl.arange(0, 4)[None, :]
                values = _tile_of(total, WARPS)
                if bias is not None:
                    values += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
                inside = (row < N) & (token < m)
                tl.store(y + token.to(tl.int64) * N + row, values.to(y.dtype.element_ty), mask=inside)
    if CLUSTER > 1:
        collect_and_store(
            False, tile * BLOCK_N, 0, part, bias, y, m, N, BLOCK_M, BLOCK_N, CLUSTER, WARPS, True
        )  # fmt: skip


@triton.jit
def _tile_of(sums, WARPS: tl.constexpr):
    """What `_of_lane` gives, added up over warps, as [8 rows, 4 tokens]."""
    # The axes: warp, pair of rows, row of the pair, token, and eight values of which only the first is not zero
    return tl.reshape(tl.sum(tl.sum(tl.reshape(sums, (WARPS, 4, 2, 4, 8)), 4), 0), (8, 4))


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {KERNEL.name}: holds {config['tokens']} rows of X (at most {MAX_M})")
    if problem.k % 8:
        raise CandidateFailed(f"{problem} {KERNEL.name}: reads 8 values at a time, K is no multiple")
    if not 1 <= config["chains"] <= config["ahead"]:
        raise CandidateFailed(
            f"{KERNEL.name}: chains is {config['chains']}, expected 1 to the {config['ahead']} steps ahead"
        )
    check_registers(KERNEL.name, config)
    exchange = Exchange(config["tokens"], config["rows"], config["warps"]) if config["split"] > 1 else None
    return make_record(
        KERNEL.name,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", 1), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "WARPS": config["warps"],
            "AHEAD": config["ahead"],
            "CHAINS": config["chains"],
            "HELD": int(not config["registers"] or config["tokens"] > _FEW),
        },
        exchange=exchange,
        own_ptx=True,
        max_registers=config["registers"],
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if not 1 < m <= MAX_M or k % 8 or not has_diagonal(arch):
        return []
    tokens = -(-m // 4) * 4

    def config_of(rows: int, split: int, warps: int, ahead: int) -> dict[str, int]:
        chains = 2 if rows * tokens <= 64 and ahead >= 4 else 1
        return {"rows": rows, "tokens": tokens, "split": split, "warps": warps, "ahead": ahead, "chains": chains}

    return to_registers.scored(
        n, k, units, arch=arch, rows=ROWS, config_of=config_of, registers_of=registers_of, fit=FITS["all"]
    )


def registers_of(k: int, config: Mapping[str, int]) -> int:
    """Registers that a thread needs for loads on their way and for sums: an estimate, fitted to 144 compilations."""
    rows, tokens, ahead = config["rows"], config["tokens"], config["ahead"]
    steps = -(-k // (STEP_K * config["warps"] * config["split"]))
    sums = rows * tokens // 4 * config["chains"]
    return 22 + (rows + tokens) * ahead + rows // 2 + (sums if steps > ahead else sums // 2)


def fit_of(config: Mapping[str, int]) -> str:
    """As estimates.py says."""
    return "all"


def estimate(fit: Fit, m: int, n: int, k: int, units: int, config: Mapping[str, int], *, arch: str = "sm_90") -> float:
    """As estimates.py says."""
    return to_registers.estimate_us(n, k, units, config, config["registers"] or registers_of(k, config), fit)


KERNEL: Final = TritonKernel(
    name="fragments",
    function=fragments,
    families=("dense",),
    archs=("sm_80+",),
    parameters=(
        Parameter("rows", 8, multiple=8),
        Parameter("tokens", 4, multiple=4),
        Parameter("split"),
        Parameter("warps", most=32, power=True),
        Parameter("ahead"),
        Parameter("chains"),
        Parameter("registers", 0, 255, default=0),
    ),
    scored=by_size(scored),
    record=launch_record,
)
