// Part of moe_decode.cu, whose constants it uses: bf16 times MXFP4 as products of int8, which takes two thirds of the
// instructions of decoding to 16 bits.
//
// Of each 32 values of a token's K, which share a scale in W, the largest has the exponent E: a value becomes a whole
// number of units of 2^(E - 13), which is 256 high + low, and each of these is a column of the product. So a token is two
// columns, and their sums of 32 are exact. What is lost of X is at most half a unit, and nothing of a value that is at
// least 2^-6 of the largest. Infinite values of X become NaN.
// Of W the number is twice e2m1's value. prmt reads eight of them from a table, and gives copies of the sign where a
// code's highest bit is set: for a positive code one table has 1 more than the number and the other -1 (0 and 0 for 0),
// for a negative one 0 and the number. So both are multiplied, one after the other.
//
// mma.m16n8k32 takes a chunk (16 bytes) of 16 rows of W: lane 4 g + t has word t of rows g and g + 8 and of X the same
// eight values of column g. The warps of moe_up make once what they need of a tile's tokens, whose items follow each
// other; those of moe_down make it for each step.

constexpr int EIGHTS = X_ROWS > 4 ? 2 : 1;      // products side by side, of four tokens each
constexpr int OF_EIGHT = 8 * 256 + 4 * 8 * 4;   // bytes of columns of a step, of each token's and chunk's units
constexpr int OF_STEP = EIGHTS * OF_EIGHT;
constexpr int RING = DEPTH * SLOT + (IN_COLUMNS ? OF_STEP * (KEPT ? EACH : 1) : 0);
constexpr int LEAST = 78, BELOW = 187;          // exponents of X, biased, whose units are multiplied by scales' of 64 to 191
constexpr int NO_NUMBER = 255;                  // the exponent of what is infinite or none

__device__ __forceinline__ u32 larger(u32 a, u32 b) {  // of both halves
  u32 c;
  asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ Quad quad_of(const u16* from) {
  Quad q;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(from));
  return q;
}
// The columns of a token in a step, of which each lane has eight values. False where its scale is beyond.
__device__ __forceinline__ bool make_columns(u32 columns, int token, const Quad& x) {
  const int lane = threadIdx.x % 32, chunk = lane / 4;
  u32 most = larger(larger(x.v[0] & 0x7fff7fff, x.v[1] & 0x7fff7fff), larger(x.v[2] & 0x7fff7fff, x.v[3] & 0x7fff7fff));
  most = larger(most, __shfl_xor_sync(~0u, most, 1));
  most = larger(most, __shfl_xor_sync(~0u, most, 2));
  most = max(most & 0xffff, most >> 16);
  const int exponent = most == 0 ? LEAST : max((int)(most >> 7), 13);
  const float units = __uint_as_float((u32)(267 - exponent) << 23);
  u32 whole[8], low[2], high[2];  // in the last 16 bits of a float, 128 more
#pragma unroll
  for (int i = 0; i < 8; i++) whole[i] = __float_as_uint(fmaf(value((u16)(x.v[i / 2] >> (16 * (i % 2)))), units, 12583040.0f));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 a = picked(whole[4 * i], whole[4 * i + 1], 0x5410), b = picked(whole[4 * i + 2], whole[4 * i + 3], 0x5410);
    low[i] = picked(a, b, 0x6420) ^ 0x80808080, high[i] = picked(a, b, 0x7531);
  }
  const u32 eight = columns + token / 4 * OF_EIGHT, at = eight + chunk * 256 + lane % 4 * 8, column = token % 4 * 2;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + (column ^ chunk) * 32), "r"(low[0]), "r"(low[1]) : "memory");
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + ((column + 1) ^ chunk) * 32), "r"(high[0]), "r"(high[1]) : "memory");
  // what is added to the exponent of W's scale: a unit, and half of it for twice e2m1
  if (lane % 4 == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(eight + 2048 + (token % 4 * 8 + chunk) * 4), "r"((exponent - 141) << 23) : "memory");
  return exponent >= LEAST && exponent < BELOW;
}
// Of the tokens that a slot has, in moe_down.
__device__ __forceinline__ bool make_columns_of(u32 slot, u32 columns, int many) {
  const int lane = threadIdx.x % 32;
  bool is_right = true;
  for (int token = 0; token < many; token++) {
    const u32 at = slot + W_BYTES + token * X_ROW + (lane ^ (lane / 8 | token % 2 * X_QUADS)) * 16;
    is_right &= make_columns(columns, token, quad_at(at));
  }
  return is_right;
}
// Of all steps of a warp, in moe_up: bit i is set where step i PARTS + part is right.
__device__ __forceinline__ u32 make_all_columns(u32 columns, const Source& of, const u16* x, int part) {
  const int lane = threadIdx.x % 32;
  constexpr int ASKED = EACH < 4 ? EACH : 4;  // steps, at once
  u32 right = 0;
  for (int token = 0; token < of.many; token++) {
    const u16* row = x + __shfl_sync(~0u, of.row, token) + lane * 8;
#pragma unroll 1
    for (int from = 0; from < EACH; from += ASKED) {
      Quad asked[ASKED] = {};
#pragma unroll
      for (int i = 0; i < ASKED; i++) {
        const int k = ((from + i) * PARTS + part) * STEP;
        if (k + lane * 8 < K) asked[i] = quad_of(row + k);
      }
#pragma unroll
      for (int i = 0; i < ASKED; i++) {
        if (from + i >= EACH) break;
        const bool is_right = __all_sync(~0u, make_columns(columns + (from + i) * OF_STEP, token, asked[i]));
        if (token == 0 && is_right) right |= 1u << (from + i);
        if (!is_right) right &= ~(1u << (from + i));
      }
    }
  }
  return right;
}
// Whether the scales of W in a slot are of a size that can be added to that of X.
__device__ __forceinline__ bool are_scales_right(u32 slot, int column, int step) {
  const int lane = threadIdx.x % 32, first = step * STEP / GROUP;
  bool is_right = true;
#pragma unroll
  for (int i = 0; i < (ROWS + 31) / 32; i++) {
    const int r = 32 * i + lane;
    if (ROWS % 32 != 0 && r >= ROWS) break;
    const int before = IN_WORDS ? 0 : row_of_w(column, r) * S_OF_ROW % 4, from = ((before + first) & ~3) - before;  // in its row
#pragma unroll
    for (int word = 0; word < S_WORDS; word++) {
      u32 four;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(four) : "r"(slot + W_BYTES + X_BYTES + (r * S_WORDS + word) * 4));
      // 64 to 191, or behind the row's last
      is_right &= (((four & 0x7f7f7f7f) + 0x40404040 ^ four) & 0x80808080) == 0x80808080 || from + 4 * word >= S_OF_ROW;
    }
  }
  return is_right;
}
__device__ __forceinline__ void multiply_whole(u32* sums, const u32* a, const u32* b, const u32* start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}
// What the tables begin with. The compiler must not know it, or it writes it to a register before each use.
struct Tables { u32 positive, negative; };
__device__ __forceinline__ Tables tables() { return {__shfl_sync(~0u, 0x04030200, 0), __shfl_sync(~0u, 0xfdfeff00, 0)}; }
__device__ __forceinline__ void looked_up(u32* a, u32 first, u32 second, u32 low, u32 high) {
  a[0] = picked(low, high, first), a[1] = picked(low, high, second), a[2] = picked(low, high, first >> 16), a[3] = picked(low, high, second >> 16);
}
// sums = the products of a chunk of 16 rows.
__device__ __forceinline__ void multiply_chunk(u32* sums, const u32* w, const u32* x, const Tables& tables) {
  u32 a[4], positive[4];
  const u32 zeros[4] = {};
  looked_up(a, w[0], w[1], tables.positive, 0x0d090705);
  multiply_whole(positive, a, x, zeros);
  looked_up(a, w[0] ^ 0x88888888, w[1] ^ 0x88888888, tables.negative, 0xf4f8fafc);
  multiply_whole(sums, a, x, positive);
}
// Word t of a chunk of 16 rows of W, of rows g and g + 8; of two tiles where their number is even.
__device__ __forceinline__ void words_of(u32* w, u32 slot, int i, int chunk) {
  const int row = 16 * i + threadIdx.x % (SIDES % 2 ? 16 : 32);
  const u32 at = slot + row * 128 + (chunk ^ row % 8) * 16;
  if (SIDES % 2) asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at));
  else asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
}
template <bool BEYOND>
__device__ __forceinline__ float scaled(int sum, u32 scale, u32 units) {
  if (!BEYOND) return (float)sum * __uint_as_float((scale << 23) + units);
  const int exponent = ((int)units >> 23) + 141;
  const float none = scale == 255 || exponent == NO_NUMBER ? __uint_as_float(0x7fc00000) : 0.0f;
  return ldexpf((float)sum, (int)scale + exponent - 127 - 141) + none;
}
// sums += the products of a chunk: of a lane its rows g and g + 8 and token t of each of EIGHT products.
template <int EIGHT, bool BEYOND>
__device__ __forceinline__ void add_chunk(float (*sums)[SIDES][2], u32 slot, u32 columns, const u32 (*scales)[2], int chunk, const Tables& tables) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  constexpr int PAIR = SIDES % 2 ? 1 : 2;
  u32 x[EIGHT][2], units[EIGHT];
#pragma unroll
  for (int n = 0; n < EIGHT; n++) {
    const u32 at = columns + n * OF_EIGHT;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[n][0]), "=r"(x[n][1]) : "r"(at + chunk * 256 + (g ^ chunk) * 32 + t * 8));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(units[n]) : "r"(at + 2048 + (t * 8 + chunk) * 4));
  }
#pragma unroll
  for (int i = 0; i < SIDES; i += PAIR) {
    u32 w[2 * PAIR];
    words_of(w, slot, i, chunk);
#pragma unroll
    for (int j = 0; j < PAIR; j++) {
      u16 scale[2];
#pragma unroll
      for (int half = 0; half < 2; half++) asm volatile("ld.shared.u8 %0, [%1];" : "=h"(scale[half]) : "r"(scales[i + j][half] + chunk * 32 / GROUP));
#pragma unroll
      for (int n = 0; n < EIGHT; n++) {
        u32 both[4];
        multiply_chunk(both, w + 2 * j, x[n], tables);
#pragma unroll
        for (int half = 0; half < 2; half++) sums[n][i + j][half] += scaled<BEYOND>((int)(256 * both[2 * half + 1] + both[2 * half]), scale[half], units[n]);
      }
    }
  }
}
// sums += the products of a step.
template <int EIGHT, bool BEYOND>
__device__ __forceinline__ void add_columns(float (*sums)[SIDES][2], u32 slot, u32 columns, int column, int step) {
  const Tables codes = tables();
  const int g = threadIdx.x % 32 / 4;
  u32 scales[SIDES][2];  // where those of a row lie
#pragma unroll
  for (int i = 0; i < 2 * SIDES; i++) scales[i / 2][i % 2] = scales_in(slot, column, 8 * i + g, step);
  if (!BEYOND && (!TAIL || step < STEPS - 1)) {
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk++) add_chunk<EIGHT, BEYOND>(sums, slot, columns, scales, chunk, codes);
  } else {
    const int chunks = TAIL && step == STEPS - 1 ? K % STEP / 32 : 8;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) add_chunk<EIGHT, BEYOND>(sums, slot, columns, scales, chunk, codes);
  }
}
// is_right: the columns of X are.
__device__ __forceinline__ void add_step_of_columns(float (*sums)[SIDES][2], u32 slot, u32 columns, int column, int step, int many, bool is_right) {
  is_right = is_right && are_scales_right(slot, column, step);
  __syncwarp();
  const bool plain = __all_sync(~0u, is_right);
  if (plain && (EIGHTS == 1 || many <= 4)) add_columns<1, false>(sums, slot, columns, column, step);
  else if (plain) add_columns<EIGHTS, false>(sums, slot, columns, column, step);
  else add_columns<EIGHTS, true>(sums, slot, columns, column, step);
}
// Adds what lane 4 g + t has of token t to what `multiply` has of tokens 2 t and 2 t + 1.
__device__ __forceinline__ void add_up(float (*sums)[4], const float (*of_columns)[SIDES][2]) {
  const int t = threadIdx.x % 4, from = threadIdx.x % 32 - t + 2 * t % 4;
#pragma unroll
  for (int n = 0; n < EIGHTS; n++)
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float first = __shfl_sync(~0u, of_columns[n][i][half], from), second = __shfl_sync(~0u, of_columns[n][i][half], from + 1);
        if (t / 2 == n) sums[i][2 * half] += first, sums[i][2 * half + 1] += second;
      }
}
