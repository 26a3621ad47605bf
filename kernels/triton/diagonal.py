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

from gemmtuned.kernels.triton.limits import at_least_sm

VALUES: Final = 256  # that a warp multiplies at once


@triton.jit
def add_products(w, x, sums):
    """sums + the products of w [rows, values] and x [1, values], both bf16 or both fp16, as `on_diagonal` reads it.

    $0 to $7 are the sums, $8 to $11 are W, $12 to $15 x, $16 to $23 the sums before.
    """
    if w.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $14}, {$16, $17, $18, $19};
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {$4, $5, $6, $7}, {$8, $9, $10, $11}, {$13, $15}, {$20, $21, $22, $23};
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
            [w, x, sums], dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
                {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $14}, {$16, $17, $18, $19};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
                {$4, $5, $6, $7}, {$8, $9, $10, $11}, {$13, $15}, {$20, $21, $22, $23};
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
            [w, x, sums], dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip


@triton.jit
def on_diagonal(sums):
    """Of the sums [rows, values] of `add_products` those that are of a dot product, added up; zero for the others.

    A lane has columns 2 t and 2 t + 1 (t: lane % 4) of row g in its first two sums, of row g + 8 in its last two.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred even, odd;
        .reg .b32 row, column;
        .reg .f32 first, second;
        mov.u32 row, %laneid;
        and.b32 column, row, 3;
        shl.b32 column, column, 1;
        shr.u32 row, row, 2;
        setp.eq.u32 even, row, column;
        add.u32 column, column, 1;
        setp.eq.u32 odd, row, column;
        add.f32 first, $8, $14;
        add.f32 second, $9, $15;
        selp.f32 first, first, 0f00000000, even;
        selp.f32 $0, second, first, odd;
        mov.f32 $1, 0f00000000;
        mov.f32 $2, 0f00000000;
        mov.f32 $3, 0f00000000;
        mov.f32 $4, 0f00000000;
        mov.f32 $5, 0f00000000;
        mov.f32 $6, 0f00000000;
        mov.f32 $7, 0f00000000;
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [sums], dtype=tl.float32, is_pure=True, pack=8,
    )  # fmt: skip


def has_diagonal(arch: str) -> bool:
    """Whether this architecture has the instruction: NVIDIA's from sm_80 on."""
    return at_least_sm(arch, 80)
