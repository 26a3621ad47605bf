// Part of weight_only.cu and moe_decode.cu, whose constants it uses: numbers of 16 bits, those of 8 and 4 bits as such, the
// tensor core's product, and copies to a ring in shared memory.

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
// Codes i and i + 4 of a word of int4 become a pair of code - 8: a code in the last bits of 128 (bf16) or 1024 (f16).
__device__ __forceinline__ u32 from_int4(u32 word, int i) {
  const u32 base = DTYPE == BF16 ? 0x43004300 : 0x64006400;
  return minus(masked_or(word >> (4 * i), 0x000f000f, base), DTYPE == BF16 ? 0x43084308 : 0x64086408);
}
// Codes i and i + 4 of a word of e2m1 become a pair: sign, two bits of exponent and one of mantissa go where they are in 16
// bits, which is 2^-126 (bf16) or 2^-14 (f16) of the value. In bf16 one product puts a code to both positions, 64 and 4096 times
// as large, which a mask then tidies: a code has four bits, so they do not overlap. (To the left only, so of codes 2 and 3
// the bytes are swapped first.)
__device__ __forceinline__ u32 small_from_fp4(u32 word, int i) {
  if (DTYPE == BF16) {
    const u32 code = (i < 2 ? word : picked(word, 0, 0x2301)) & (i % 2 ? 0x00f000f0 : 0x000f000f);
    return code * (i % 2 ? 0x0104u : 0x1040u) & 0x81c081c0;
  }
  const u32 sign = word << (12 - 4 * i), magnitude = 9 >= 4 * i ? word << (9 - 4 * i) : word >> (4 * i - 9);
  return masked_or(magnitude, 0x0e000e00, sign & 0x80008000);
}

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_there) {  // zeros where it is not
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
