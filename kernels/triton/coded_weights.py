"""Weights in 8 and 4 bits on their way from memory to the tensor core, and the order that they come in.

A thread loads 16 bytes of a row at once, decodes them in registers and hands them to the matrix instruction where they
are: a tile of bytes and the tile that is multiplied are one in registers.  So its rows, and its values of K, are in
another order than in memory, bit by bit of their numbers; the sums do not mind, as long as rows of X have the same
order of K (k_of_fp8, k_of_4_bit) and whoever stores the result knows the rows (row_order).
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.inline_ptx import inline_ptx

# What a thread gets are four bytes; values of 16 bits go two to a register, and `low` are those of the lower codes
_OF_FP8, _OF_FP8_OPERANDS = inline_ptx(
    "=r value<2>, r bytes",
    """{ .reg .b16 a, b; mov.b32 {a, b}, $bytes;
        cvt.rn.f16x2.e4m3x2 $value0, a; cvt.rn.f16x2.e4m3x2 $value1, b; }""",
)
# prmt puts the bytes in the order 0 2 1 3, so that a mask of four bits in each half finds codes of bytes 0 and 1, or of
# 2 and 3 where the word is shifted by 8; by 4 more, the upper codes of the same bytes.  lop3 0xea is (word & mask) |
# base: 0x4300 is 128 in bf16, 0x6400 is 1024 in fp16, and the last bit of both is worth 1.  Then 128 + 8 or 1024 + 8
# (0x6408) is taken away; sm_80 has no subtraction of bf16, so there it is t * 1 + less, with less = -136 (0xc308)
_OF_INT4_TO_BF16, _OF_INT4_TO_FP16, _OF_INT4_OPERANDS = inline_ptx(
    "=r low<2>, =r high<2>, r bytes",
    """{ .reg .b32 w, t, one, less, mask, base; prmt.b32 w, $bytes, 0, 0x3120;
        mov.b32 mask, 0x000f000f; mov.b32 base, 0x43004300;
        mov.b32 one, 0x3f803f80; mov.b32 less, 0xc308c308;
        lop3.b32 t, w, mask, base, 0xea; fma.rn.bf16x2 $low0, t, one, less;
        shr.b32 t, w, 8; lop3.b32 t, t, mask, base, 0xea; fma.rn.bf16x2 $low1, t, one, less;
        shr.b32 t, w, 4; lop3.b32 t, t, mask, base, 0xea; fma.rn.bf16x2 $high0, t, one, less;
        shr.b32 t, w, 12; lop3.b32 t, t, mask, base, 0xea; fma.rn.bf16x2 $high1, t, one, less; }""",
    """{ .reg .b32 w, t, less, mask, base; prmt.b32 w, $bytes, 0, 0x3120;
        mov.b32 mask, 0x000f000f; mov.b32 base, 0x64006400;
        mov.b32 less, 0x64086408;
        lop3.b32 t, w, mask, base, 0xea; sub.f16x2 $low0, t, less;
        shr.b32 t, w, 8; lop3.b32 t, t, mask, base, 0xea; sub.f16x2 $low1, t, less;
        shr.b32 t, w, 4; lop3.b32 t, t, mask, base, 0xea; sub.f16x2 $high0, t, less;
        shr.b32 t, w, 12; lop3.b32 t, t, mask, base, 0xea; sub.f16x2 $high1, t, less; }""",
)
# A code has a sign, two bits of exponent, one of mantissa: in bf16 bits 15, 8, 7 and 6.  The product with 0x1040 puts
# the lower code of a byte 12 bits to the left (its sign is at 15) and 6 (the others are at 8, 7 and 6), with 0x0104 the
# upper one by 8 and 2; 0x81c0 keeps those four bits.  The bytes are in the order 0 2 1 3 (w), or 2 0 3 1 (s)
_OF_E2M1_TO_BF16, _OF_E2M1_OPERANDS = inline_ptx(
    "=r low<2>, =r high<2>, r bytes",
    """{ .reg .b32 w, s, t; prmt.b32 w, $bytes, 0, 0x3120; prmt.b32 s, $bytes, 0, 0x1302;
        and.b32 t, w, 0x000f000f; mul.lo.u32 t, t, 0x1040; and.b32 $low0, t, 0x81c081c0;
        and.b32 t, s, 0x000f000f; mul.lo.u32 t, t, 0x1040; and.b32 $low1, t, 0x81c081c0;
        and.b32 t, w, 0x00f000f0; mul.lo.u32 t, t, 0x0104; and.b32 $high0, t, 0x81c081c0;
        and.b32 t, s, 0x00f000f0; mul.lo.u32 t, t, 0x0104; and.b32 $high1, t, 0x81c081c0; }""",
)


@triton.jit
def k_of_fp8(spot):
    """Which k stands at a position of a tile's row.

    Of the position's bits in a step of 64, 2 and 1 are bits 5 and 4 of k (the thread), and 5 4 3 0 are 3 2 1 0.
    """
    return spot // 64 * 64 + (spot // 2 % 4) * 16 + (spot // 16 % 4) * 4 + (spot // 8 % 2) * 2 + spot % 2


@triton.jit
def k_of_4_bit(spot):
    """The same of codes in pairs: in a step of 128, 2 1 are 6 5, 6 is 0 (which of the pair), 5 4 3 0 are 4 3 2 1."""
    k = spot // 128 * 128 + (spot // 2 % 4) * 32 + (spot // 16 % 4) * 8
    return k + (spot // 8 % 2) * 4 + (spot % 2) * 2 + spot // 64 % 2


@triton.jit
def in_order_of_fp8(x, ROWS: tl.constexpr):
    """[ROWS, 64] of X as it lies, its values of K where k_of_fp8 says: axes of K are bits 5 4, 3 2, 1 and 0."""
    return x.reshape(ROWS, 4, 4, 2, 2).permute(0, 2, 3, 1, 4).reshape(ROWS, 64)


@triton.jit
def in_order_of_4_bit(x, ROWS: tl.constexpr):
    """The same of [ROWS, 128] and k_of_4_bit: bits 6 5, 4 3, 2, 1 and 0."""
    return x.reshape(ROWS, 4, 4, 2, 2, 2).permute(0, 5, 2, 3, 1, 4).reshape(ROWS, 128)


@triton.jit
def of_fp8(w, ASM: tl.constexpr):
    """e4m3 to fp16, four at once."""
    if ASM:
        return tl.inline_asm_elementwise(_OF_FP8, _OF_FP8_OPERANDS, [w], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return w.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def of_int4(w, to: tl.constexpr, ASM: tl.constexpr):
    """(lower, upper) codes of the bytes less 8: each stands in the last bits of 128 (bf16) or 1024 (fp16), as ones."""
    if ASM:
        if to == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                _OF_INT4_TO_BF16, _OF_INT4_OPERANDS, [w],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                _OF_INT4_TO_FP16, _OF_INT4_OPERANDS, [w],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        low = ((w & 15).to(tl.float32) - 8.0).to(to)
        high = ((w >> 4).to(tl.float32) - 8.0).to(to)
    return low, high


@triton.jit
def of_e2m1(w, to: tl.constexpr, ASM: tl.constexpr):
    """(lower, upper) codes of the bytes: sign, two bits of exponent, one of mantissa, put where they are in 16 bits.

    That is the value times 2^-126 in bf16, for the exponent's bias is 127 there and 1 in the code: a product with 2^126
    mends it.  In fp16, which has no such instructions here, it is the value.
    """
    if ASM and to == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _OF_E2M1_TO_BF16, _OF_E2M1_OPERANDS, [w],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        low = low * 8.507059173023462e37
        high = high * 8.507059173023462e37
    else:
        codes = w.to(tl.uint16)
        low = _value_of_e2m1(codes & 15).to(to)
        high = _value_of_e2m1(codes >> 4).to(to)
    return low, high


@triton.jit
def _value_of_e2m1(codes):
    return (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def of_e8m0(codes):
    """2^(code - 127) in fp32: 0 is one below the normal numbers, 255 is NaN."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scaled_values(values, s, to: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Values of 64 bytes a row times their groups' scales [ROWS, GROUPS]. HELD: `to` is bf16 and has all their bits."""
    exact: tl.constexpr = to if HELD else tl.float32
    values = values.to(exact).reshape(ROWS, GROUPS, 64 // GROUPS) * s.to(exact)[:, :, None]
    return values.to(to).reshape(ROWS, 64)


@triton.jit
def row_order(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Which row of a tile of decoded weights the rows of a tile of bytes become.

    In the tile of bytes, rows 8 j to 8 j + 7 are those of warp j % WARPS.  The matrix instruction takes 16 rows of a
    warp: its next eight are 8 * WARPS rows further on.
    """
    i = tl.arange(0, ROWS)
    return (i // (16 * WARPS) * WARPS + i // 8 % WARPS) * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def tile_of_fp8(values, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS, 64], of which a thread has loaded 16 bytes of each of its rows, as the tensor core wants it."""
    # Axes of the rows: 16 * WARPS of them, which eight of a warp's, warp, row.  Of K: thread t of four, product, half
    # of its 16 values, value of a pair.  Of a product thread t has 2 t and 2 t + 1 of each half: so t goes behind that
    values = values.reshape(ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2)
    return values.permute(0, 2, 1, 3, 5, 6, 4, 7).reshape(ROWS, 64)


@triton.jit
def tile_of_4_bit(low, high, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS, 128] of both codes of 64 bytes a row."""
    # Axes as in tile_of_fp8, and a last one for the lower and the upper code, which goes in front of the product
    values = tl.join(low, high).reshape(ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2)
    return values.permute(0, 2, 1, 3, 8, 5, 6, 4, 7).reshape(ROWS, 128)


@triton.jit
def values_of_4_bit(
    w, s, to: tl.constexpr, E2M1: tl.constexpr, OF: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Bytes [ROWS, 64] with scales [ROWS, GROUPS], of type OF in memory, as tile_of_4_bit of their values in `to`."""
    if E2M1:
        low, high = of_e2m1(w, to, ASM)
        s = of_e8m0(s)
    else:
        low, high = of_int4(w, to, ASM)
    HELD: tl.constexpr = to == tl.bfloat16 and tl.float32 != OF  # e8m0 and bf16 have the same exponents
    low = _scaled_values(low, s, to, HELD, ROWS, GROUPS)
    high = _scaled_values(high, s, to, HELD, ROWS, GROUPS)
    return tile_of_4_bit(low, high, ROWS, WARPS)
