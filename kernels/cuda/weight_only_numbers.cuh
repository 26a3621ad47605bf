// Part of weight_only.cu, whose constants it uses: W and its scales as they lie in memory become numbers.

// ---- W: number i of the pairs of a word. Of 8 bits 0 and 2, 1 and 3 make a pair (of fp8 0 and 1, 2 and 3), of 4 bits i
// and i + 4.

__device__ __forceinline__ u32 from_int8(u32 word, int i) {
  const u32 two = i ? word >> 8 : word;
  if (DTYPE == F16) return minus((two & 0x00ff00ff) ^ 0x64806480, 0x64806480);  // 1024 + 128 + number
  return minus(masked_or(two, 0x007f007f, 0x43004300), masked_or(two, 0x00800080, 0x43004300));  // 128 + lower bits - (128 or 256)
}
__device__ __forceinline__ u32 from_fp4(u32 word, int i) {
  return times(small_from_fp4(word, i), DTYPE == BF16 ? 0x7e807e80 : 0x74007400);
}
__device__ __forceinline__ u32 pair_of_w(u32 word, int i) {
  return WEIGHTS == INT8 ? from_int8(word, i) : WEIGHTS == FP8 ? from_fp8(word >> (16 * i)) : WEIGHTS == INT4 ? from_int4(word, i) : from_fp4(word, i);
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
