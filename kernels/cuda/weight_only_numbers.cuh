// Part of weight_only.cu, whose constants it uses: W and its scales as they lie in memory become numbers.

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
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 product;
  if (DTYPE == BF16) asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  else asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 rest;
  if (DTYPE == BF16) asm("sub.bf16x2 %0, %1, %2;" : "=r"(rest) : "r"(a), "r"(b));
  else asm("sub.f16x2 %0, %1, %2;" : "=r"(rest) : "r"(a), "r"(b));
  return rest;
}
__device__ __forceinline__ u32 picked(u32 low, u32 high, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
__device__ __forceinline__ u32 masked_or(u32 a, u32 mask, u32 b) {  // as one instruction, which the compiler does not see
  u32 c;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(c) : "r"(a), "r"(mask), "r"(b));
  return c;
}
__device__ __forceinline__ void multiply(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define PRODUCT(TYPE)                                                                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if (DTYPE == BF16) PRODUCT("bf16");
  else PRODUCT("f16");
}

// ---- W: number i of the pairs of a word. Of 8 bits 0 and 2, 1 and 3 make a pair (of fp8 0 and 1, 2 and 3), of 4 bits i
// and i + 4.

__device__ __forceinline__ u32 from_int8(u32 word, int i) {
  const u32 two = i ? word >> 8 : word;
  if (DTYPE == F16) return minus((two & 0x00ff00ff) ^ 0x64806480, 0x64806480);  // 1024 + 128 + number
  return minus(masked_or(two, 0x007f007f, 0x43004300), masked_or(two, 0x00800080, 0x43004300));  // 128 + lower bits - (128 or 256)
}
__device__ __forceinline__ u32 from_fp8(u32 word, int i) {  // through fp32, for a NaN has to stay one
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(word >> (16 * i))));
  if (DTYPE == F16) return halves;
  float low, high;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(low), "=f"(high) : "r"(halves));
  return pair_of(low, high);
}
__device__ __forceinline__ u32 from_int4(u32 word, int i) {  // the code in the last bits of 128 (bf16) or 1024 (f16)
  const u32 base = DTYPE == BF16 ? 0x43004300 : 0x64006400;
  return minus(masked_or(word >> (4 * i), 0x000f000f, base), DTYPE == BF16 ? 0x43084308 : 0x64086408);
}
// Sign, two bits of exponent and one of mantissa where they are in 16 bits are 2^-126 (bf16) or 2^-14 (f16) of the value. In
// bf16 one product puts a code to both places, 64 and 4096 times as large, which a mask then tidies: a code has four bits,
// so they do not overlap. (To the left only, so of codes 2 and 3 the bytes change places first.)
__device__ __forceinline__ u32 small_from_fp4(u32 word, int i) {
  if (DTYPE == BF16) {
    const u32 code = (i < 2 ? word : picked(word, 0, 0x2301)) & (i % 2 ? 0x00f000f0 : 0x000f000f);
    return code * (i % 2 ? 0x0104u : 0x1040u) & 0x81c081c0;
  }
  const u32 sign = word << (12 - 4 * i), magnitude = 9 >= 4 * i ? word << (9 - 4 * i) : word >> (4 * i - 9);
  return masked_or(magnitude, 0x0e000e00, sign & 0x80008000);
}
__device__ __forceinline__ u32 from_fp4(u32 word, int i) {
  return times(small_from_fp4(word, i), DTYPE == BF16 ? 0x7e807e80 : 0x74007400);
}
__device__ __forceinline__ u32 pair_of_w(u32 word, int i) {
  return WEIGHTS == INT8 ? from_int8(word, i) : WEIGHTS == FP8 ? from_fp8(word, i) : WEIGHTS == INT4 ? from_int4(word, i) : from_fp4(word, i);
}
__device__ __forceinline__ u32 pair_of_x(const u32* x, int i) {  // x: numbers that lie side by side, two a word
  if (WEIGHTS == FP8) return x[i];
  return picked(x[i / 2], x[PRODUCTS + i / 2], i % 2 ? 0x7632 : 0x5410);
}
// With bf16 a number of MXFP4 takes its scale along with what small_from_fp4 leaves out, as one factor, and sums need none:
// exact where the factor is a number of bf16. It is for e8m0 up to 128, a scale of 2; others, and NaN, are not `FOLDED`.
constexpr bool MAY_FOLD = WEIGHTS == MXFP4 && DTYPE == BF16;
__device__ __forceinline__ u32 beyond(u32 four) { return ((four & 0x7f7f7f7f) + 0x7f7f7f7f) & four & 0x80808080; }  // any
__device__ __forceinline__ u32 factor_of(const u32* words, int i) {  // twice 2^(scale - 127 + 126)
  return picked(words[i / 4], 0, 0x4040 | i % 4 << 8 | i % 4) * 128 + 126 * 128 * 0x10001;
}
__device__ __forceinline__ float scale_of(const u32* words, int i) {  // scale i of these words
  const u32 bits = words[i * SCALE_BYTES / 4] >> (i * SCALE_BYTES % 4 * 8);
  if (OF_SCALE == E8M0) {  // 2^(bits - 127); 0 is a subnormal, 255 is NaN
    const u32 b = bits & 0xff;
    return __uint_as_float(b - 1 < 254 ? b << 23 : b ? 0x7fc00000 : 0x00400000);
  }
  if (OF_SCALE == FP32) return __uint_as_float(bits);
  if (OF_SCALE == BF16) return __uint_as_float(bits << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
  return f;
}
