"""Loads in flight before anything waits for one of them (NVIDIA).

ptxas moves loads behind the products that need earlier ones, to save registers: of eight loads of a thread four are
then on their way at a time, and the time is two or three round trips to memory instead of one.  No hint of PTX tells it
not to.  But memory operations stay on their side of a barrier, and what is made of its result comes after it.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def issued():
    """0.0, which a program knows only when all its threads have issued their loads up to here; none has waited for one.

    To be added to what the products are added to.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 none;
        mov.u32 none, %laneid;
        setp.gt.u32 never, none, 99;
        bar.red.popc.u32 none, 0, never;
        cvt.rn.f32.u32 $0, none;
        }""",
        "=f", [], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip
