// Part of moe_decode.cu, whose constants it uses: weights as they lie in memory become what the tensor core takes.

// ---- numbers of 16 bits

__device__ __forceinline__ float value(u16 bits) {
  float f;
  if (DTYPE == BF16) f = __uint_as_float((u32)bits << 16);
  else asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 pair;
  if (DTYPE == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // of pairs
  u32 product;
  if (DTYPE == BF16) asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  else asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ u32 picked(u32 low, u32 high, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
__device__ __forceinline__ void multiply(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (DTYPE == BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- weights: 16 bytes of a row become pairs for PER_QUAD / 4 products, in the order that `pair_of_x` gives X

// Two e4m3 at bits 0 to 15 become a pair. Through fp32, for a NaN has to stay one.
__device__ __forceinline__ u32 from_fp8(u32 bytes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)bytes));
  if (DTYPE == F16) return halves;
  float low, high;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(low), "=f"(high) : "r"(halves));
  return pair_of(low, high);
}
// Codes at bits 0 to 3 and 16 to 19 become a pair of code - 8: the code in the last bits of 128 (bf16) or 1024 (f16).
__device__ __forceinline__ u32 from_int4(u32 codes) {
  const u32 base = DTYPE == BF16 ? 0x43004300 : 0x64006400, minus = DTYPE == BF16 ? 0xc308c308 : 0xe408e408;
  u32 pair, sum = (codes & 0x000f000f) | base;
  if (DTYPE == BF16) asm("{.reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 %0, %1, one, %2;}" : "=r"(pair) : "r"(sum), "r"(minus));
  else asm("add.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(sum), "r"(minus));
  return pair;
}
// Codes i and i + 4 of a word of e2m1 become a pair: sign, two bits of exponent and one of mantissa go where they are in 16
// bits, which is 2^-126 (bf16) or 2^-14 (f16) of the value; the scale makes up for it. In bf16 one product puts a code to
// both places, 64 and 4096 times as large, which a mask then tidies: a code has four bits, so they do not overlap. (To the
// left only, so of codes 2 and 3 the bytes change places first.)
__device__ __forceinline__ u32 from_fp4(u32 word, int i) {
  if (DTYPE == BF16) {
    const u32 code = (i < 2 ? word : picked(word, 0, 0x2301)) & (i % 2 ? 0x00f000f0 : 0x000f000f);
    return code * (i % 2 ? 0x0104u : 0x1040u) & 0x81c081c0;
  }
  const u32 sign = word << (12 - 4 * i), magnitude = 9 >= 4 * i ? word << (9 - 4 * i) : word >> (4 * i - 9);
  return (sign & 0x80008000) | (magnitude & 0x0e000e00);
}
__device__ __forceinline__ u32 pair_of_w(const Quad& w, int i) {
  if (WEIGHTS == FP8) return from_fp8(w.v[i / 2] >> (16 * (i % 2)));
  if (WEIGHTS >= INT4) {
    if (WEIGHTS == MXFP4) return from_fp4(w.v[i / 4], i % 4);
    return from_int4(w.v[i / 4] >> (4 * (i % 4)));
  }
  return w.v[i];
}
__device__ __forceinline__ u32 pair_of_x(const Quad* x, int i) {
  if (WEIGHTS < INT4) return x[i / 4].v[i % 4];
  const Quad& eight = x[i / 4];  // values 0 and 4, 1 and 5, ... of eight stand together in a word of codes
  const int of = i % 4;
  return picked(eight.v[of / 2], eight.v[2 + of / 2], of % 2 ? 0x7632 : 0x5410);
}

// ---- scales

#if SCALES == GROUPS && WEIGHTS == MXFP4
typedef u8 Scale;
#elif SCALES == GROUPS
typedef u16 Scale;
#else
typedef float Scale;
#endif
// Twice the same 16 bits, of GROUPS. For e8m0 (2^(scale - 127), 255 is NaN) times what from_fp4 leaves out; where that is
// no normal number of the type (`is_beyond`), `rest` is what it has to be multiplied by once more.
__device__ __forceinline__ bool is_beyond(Scale scale) {
  return WEIGHTS == MXFP4 && (DTYPE == BF16 ? scale > 128 : scale < 99 || scale > 128);
}
__device__ __forceinline__ u32 pair_of_scale(Scale scale) {
  if (SCALES != GROUPS) return 0;
  if (WEIGHTS != MXFP4) return (u32)scale * 0x10001;
  return (DTYPE == BF16 ? ((u32)scale + 126) << 7 : ((u32)scale - 98) << 10) * 0x10001;
}
__device__ __forceinline__ u32 pair_of_scale_beyond(Scale scale, u32& rest) {
  const int power = (int)scale - (DTYPE == BF16 ? 1 : 113), most = DTYPE == BF16 ? 127 : 15, least = DTYPE == BF16 ? -1 : -14;
  const int over = power > most ? power - most : power < least ? power - least : 0;
  const float f = __uint_as_float(scale == 255 ? 0x7fc00000 : (u32)(power - over + 127) << 23);
  const float g = DTYPE == F16 && over < -24 ? 0.0f : DTYPE == F16 && over > 15 ? __uint_as_float(0x7f800000)
                                                                              : __uint_as_float((u32)(over + 127) << 23);
  rest = pair_of(g, g);
  return pair_of(f, f);
}
constexpr int SCALES_K = SCALES == GROUPS ? K / GROUP : (K + 127) / 128;  // of a row, or of 128 rows
// Of a row of an expert, at k.
__device__ __forceinline__ const Scale* scale_at(const Scale* scales, int expert, int row, int k) {
  if (SCALES == GROUPS) return scales + ((long long)expert * ROWS_OF_EXPERT + row) * SCALES_K + k / GROUP;
  if (SCALES == BLOCK) return scales + ((long long)expert * ((ROWS_OF_EXPERT + 127) / 128) + row / 128) * SCALES_K + k / 128;
  if (SCALES == ROW) return scales + (long long)expert * ROWS_OF_EXPERT + row;
  return scales + expert;
}

// The row of an expert's W that row r of a piece is of, whose first column of the result is `column`. Past the last column
// the last one is read again; it is not stored.
__device__ __forceinline__ int row_of_w(int column, int r) {
  if (STAGE == 2) return D % ROWS == 0 ? column + r : min(column + r, D - 1);
  int of = column + r / 32 * 16 + r % 16;
  if (INTER % (16 * TILES) != 0) of = min(of, INTER - 1);
  const int side = r / 16 % 2;
  return ACT == SWIGLU_CLAMPED ? 2 * of + side : of + side * INTER;
}
