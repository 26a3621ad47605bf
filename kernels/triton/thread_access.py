"""Loads and stores of the first of each thread's eight values, where the others hold nothing (NVIDIA).

Triton gives a load or store a layout of its own, in which neighbours lie in neighbouring threads, and brings what it
moves there and back through shared memory.  Here each thread reads and writes for itself.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_first(pointers):
    """What the first of each thread's eight pointers [.., values] to 16 bits points at, as fp32; 0 for the rest."""
    bits = tl.inline_asm_elementwise(
        """{
        .reg .b16 found;
        ld.global.b16 found, [$8];
        cvt.u32.u16 $0, found;
        mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; mov.u32 $4, 0; mov.u32 $5, 0; mov.u32 $6, 0; mov.u32 $7, 0;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l",
        [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip
    return bits.to(tl.int16).to(pointers.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def store_first(pointers, values, inside):
    """Store the first of each thread's eight values at its pointer to 16 bits, rounded, where `inside`."""
    bits = values.to(pointers.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        .reg .b16 value;
        setp.ne.u32 some, $24, 0;
        cvt.u16.u32 value, $16;
        @some st.global.b16 [$8], value;
        mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
        mov.u32 $4, 0; mov.u32 $5, 0; mov.u32 $6, 0; mov.u32 $7, 0;
        }""",
        "=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [pointers.to(tl.int64), bits, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip
