"""Dot products by the tensor core, straight from the registers that loads have filled (NVIDIA, sm_80 and later).

mma.m16n8k16 (PTX ISA 7.0) wants W's and x's values in a certain order, which loads of 16 bytes along K do not give.
But any order does for a dot product, as long as both sides have the same: the four registers that one load of W fills
are taken for A as they are, which puts a lane's first and third register into row g and the others into row g + 8
(g: lane / 4), and the registers of x with the same values of K into column g of B.  What then stands on the diagonal
of the result are dot products; the rest is products of values that do not belong together.  Of 16 x 8 sums 8 count,
but no value is converted and nothing goes through shared memory: 2 instructions for 256 values of W where the ordinary
units need 24.

Each lane must hold 8 values of K that lie together, those of the same row of W as the rest of its warp: blocks of a
multiple of 256 values along K for each warp.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.kernels.arch import at_least_sm
from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves

VALUES: Final = 256  # values of W that a warp multiplies at once
WARPS_ADDED_UP: Final = (2, 4, 8)  # per thread block, that `over_warps` is written for

_TWO_PRODUCTS: Final = """{
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32
        {$new0, $new1, $new2, $new3}, {$w0, $w1, $w2, $w3}, {$x0, $x2}, {$sum0, $sum1, $sum2, $sum3};
    mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32
        {$new4, $new5, $new6, $new7}, {$w0, $w1, $w2, $w3}, {$x1, $x3}, {$sum4, $sum5, $sum6, $sum7};
    }"""
_OF_BF16, _OF_FP16, _PRODUCTS_OPERANDS = inline_ptx(
    "=&f new<8>, r w<4>, r x<4>, f sum<8>",
    _TWO_PRODUCTS.replace("TYPE", "bf16"),
    _TWO_PRODUCTS.replace("TYPE", "f16"),
)


@triton.jit
def add_products(w, x, sums):
    """sums + the products of w [rows, values] and x [1, values], both bf16 or both fp16, for `on_diagonal`."""
    if w.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _OF_BF16, _PRODUCTS_OPERANDS, [w, x, sums], dtype=tl.float32, is_pure=True, pack=8
        )
    else:
        return tl.inline_asm_elementwise(
            _OF_FP16, _PRODUCTS_OPERANDS, [w, x, sums], dtype=tl.float32, is_pure=True, pack=8
        )


# g is lane / 4, t is lane % 4; even: the lane's column 2 t is g, odd: its column 2 t + 1 is
_LANES: Final = """
        .reg .pred even, odd;
        .reg .b32 lane, g, column;
        mov.u32 lane, %laneid;
        shr.u32 g, lane, 2;
        and.b32 column, lane, 3;
        shl.b32 column, column, 1;
        setp.eq.u32 even, g, column;
        add.u32 column, column, 1;
        setp.eq.u32 odd, g, column;"""
_ZEROS: Final = moves("total", range(1, 8), "0f00000000", "f32")  # all but the first of eight
_OPERANDS: Final = "=&f total<8>, f sum<8>"
_ON_DIAGONAL, _ON_DIAGONAL_OPERANDS = inline_ptx(
    _OPERANDS,
    f"""{{{_LANES}
    .reg .f32 first, second;
    add.f32 first, $sum0, $sum6;
    add.f32 second, $sum1, $sum7;
    selp.f32 first, first, 0f00000000, even;
    selp.f32 $total0, second, first, odd;
    {_ZEROS}
    }}""",
)


@triton.jit
def on_diagonal(sums):
    """The sums of `add_products` that lie on the diagonal, which are dot products, added up; zero everywhere else.

    A lane has columns 2 t and 2 t + 1 (t: lane % 4) of row g in its first two sums, of row g + 8 in its last two.
    """
    return tl.inline_asm_elementwise(
        _ON_DIAGONAL, _ON_DIAGONAL_OPERANDS, [sums], dtype=tl.float32, is_pure=True, pack=8
    )


def _added_up(warps: int) -> str:
    """PTX that adds up $sum0 of the eight lanes of each warp in which `on_diagonal` left one; all threads get $total0.

    Those lanes put their sums into shared memory, in an order in which a thread then reads the sums of lane g of all
    warps at once.
    """
    names = [f"part{i}" for i in range(warps)]
    many = f"v{min(4, warps)}"
    got = [f"ld.shared.{many}.f32 {{{', '.join(names[i : i + 4])}}}, [at + {4 * i}];" for i in range(0, warps, 4)]
    while len(names) > 1:
        got += [f"add.f32 {one}, {one}, {other};" for one, other in zip(names[::2], names[1::2], strict=True)]
        names = names[::2]
    for lane in (4, 2, 1):
        got += [f"shfl.sync.bfly.b32 other, part0, {lane}, 31, -1;", "add.f32 part0, part0, other;"]
    return f"""{{{_LANES}
    .shared .align 16 .b32 parts[{8 * warps}];
    .reg .b32 all, at;
    .reg .f32 other, {", ".join(f"part{i}" for i in range(warps))};
    mov.u32 all, parts;
    mov.u32 at, %tid.x;
    shr.u32 at, at, 5;
    or.pred even, even, odd;
    mad.lo.u32 at, g, {warps}, at;
    shl.b32 at, at, 2;
    add.u32 at, all, at;
    @even st.shared.f32 [at], $sum0;
    bar.sync 0;
    and.b32 g, lane, 7;
    mad.lo.u32 at, g, {4 * warps}, all;
    {" ".join(got)}
    mov.f32 $total0, part0;
    {_ZEROS}
    }}"""


_ADDED_UP, _ADDED_UP_OPERANDS = inline_ptx(_OPERANDS, {warps: _added_up(warps) for warps in WARPS_ADDED_UP})


@triton.jit
def over_warps(sums, WARPS: tl.constexpr):
    """The sum of all that `on_diagonal` left for one row, as the first of each thread's values.

    It is what tl.sum gives, but goes through shared memory once instead of twice, and with three shuffles instead of up
    to eight.
    """
    return tl.inline_asm_elementwise(
        _ADDED_UP[WARPS], _ADDED_UP_OPERANDS, [sums], dtype=tl.float32, is_pure=False, pack=8
    )


def has_diagonal(arch: str) -> bool:
    """Whether this architecture has the instruction: NVIDIA's from sm_80 on."""
    return at_least_sm(arch, 80)
