"""Loads and stores of the first of each thread's eight values, where the others hold nothing (NVIDIA).

Triton gives a load or store a layout of its own, in which neighbours lie in neighbouring threads, and brings what it
moves there and back through shared memory.  Here each thread reads and writes for itself.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves

_LOAD_FIRST, _LOAD_FIRST_OPERANDS = inline_ptx(
    "=&r bits<8>, l pointer<8>",
    f"""{{
    .reg .b16 found;
    ld.global.b16 found, [$pointer0];
    cvt.u32.u16 $bits0, found;
    {moves("bits", range(1, 8), "0")}
    }}""",
)
_STORE_FIRST, _STORE_FIRST_OPERANDS = inline_ptx(
    "=r none<8>, l pointer<8>, r bits<8>, r inside<8>",
    f"""{{
    .reg .pred some;
    .reg .b16 value;
    setp.ne.u32 some, $inside0, 0;
    cvt.u16.u32 value, $bits0;
    @some st.global.b16 [$pointer0], value;
    {moves("none", range(8), "0")}
    }}""",
)


@triton.jit
def load_first(pointers):
    """What the first of each thread's eight pointers [.., values] to 16 bits points at, as fp32; 0 for the rest."""
    bits = tl.inline_asm_elementwise(
        _LOAD_FIRST, _LOAD_FIRST_OPERANDS, [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip
    return bits.to(tl.int16).to(pointers.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def store_first(pointers, values, inside):
    """Store the first of each thread's eight values at its pointer to 16 bits, rounded, where `inside`."""
    bits = values.to(pointers.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    tl.inline_asm_elementwise(
        _STORE_FIRST, _STORE_FIRST_OPERANDS, [pointers.to(tl.int64), bits, inside.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip
