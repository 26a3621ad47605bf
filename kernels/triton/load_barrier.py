"""Loads in flight before anything waits for one of them (NVIDIA).

ptxas moves loads behind the products that need earlier ones, to save registers: of a thread's eight loads four are
then on their way at a time, and the time is two or three round trips to memory instead of one.  No hint of PTX tells it
not to.  But memory operations stay on their side of a barrier, and what is made of its result comes after it.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves

# A barrier with a count of the threads whose predicate is true.  It is true in none, for a warp has 32 lanes, which the
# compiler does not know: the count is 0, and sums that it is added to are what they were, but wait for the barrier
_ISSUED, _ISSUED_OPERANDS = inline_ptx(
    "=f zero",
    """{
    .reg .pred never;
    .reg .b32 none;
    mov.u32 none, %laneid;
    setp.gt.u32 never, none, 99;
    bar.red.popc.u32 none, 0, never;
    cvt.rn.f32.u32 $zero, none;
    }""",
)


@triton.jit
def issued():
    """0.0, which a thread block has only when all its threads have issued their loads up to here; nobody waits for one.

    Add it to the sums before the first product, which then cannot begin earlier.
    """
    return tl.inline_asm_elementwise(_ISSUED, _ISSUED_OPERANDS, [], dtype=tl.float32, is_pure=False, pack=1)


def _known(count: int) -> str:
    """PTX of a barrier that comes after `count` addresses have been made, every second one of a thread's."""
    lines = [".reg .pred never;", ".reg .b32 none, all;", "mov.b32 all, $address0;"]
    lines += [f"or.b32 all, all, $address{2 * i};" for i in range(1, count)]
    lines += [
        "setp.eq.u32 never, all, 0xffffffff;",
        "bar.red.popc.u32 none, 0, never;",
        "cvt.rn.f32.u32 $zero0, none;",
        moves("zero", range(1, 8), "$zero0", "f32"),
    ]
    return "{" + " ".join(lines) + "}"


_KNOWN, _KNOWN_OPERANDS = inline_ptx(
    "=f zero<8>, r address<8>, r loaded<4>", {count: _known(count) for count in (1, 2, 4)}
)


@triton.jit
def issued_after(known, loaded, COUNT: tl.constexpr):
    """As `issued`, and after the addresses in `known` are made, which the compiler would put off until they are needed.

    Of the eight addresses that a thread holds the first is looked at, for COUNT 2 and 4 also the third and so on.  They
    are multiples of four, so none of them makes the predicate true.  loaded: values of W or X.  They are not waited
    for: the result has the layout of these loads, and without that Triton would make a second barrier for it.
    """
    return tl.inline_asm_elementwise(
        _KNOWN[COUNT], _KNOWN_OPERANDS, [known, loaded], dtype=tl.float32, is_pure=False, pack=8
    )
