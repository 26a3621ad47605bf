// Y = (X sx) (W sw)^T + bias with 8-bit X and W, for up to 16 tokens, on sm_90 and later.
//
// W and X go from memory straight into the registers that the tensor core multiplies; only sums pass through shared
// memory. The tensor core's 8-bit products add with few bits and want 64 rows at least, so e4m3 numbers become f16 on
// the way, which is exact, and mma.m16n8k16 adds them up in fp32. int8 stays as it is: mma.m16n8k32 adds it up in int32,
// exactly, and sums become fp32 when K is done.
//
// Lane 4 g + t of a warp holds values of rows g and g + 8 of mma's A and of column g of its B. Which k stands where is
// free as long as both agree, so that 16 bytes of a row are a lane's share of four products (two of int8). Two groups of
// lanes share a row: g is row g / 2 and part g % 2 of 128 bytes of K, for W and X alike. Of the result only what is of one
// part in both counts: half of what the tensor core does, and it has time.
//
// A thread block takes ROWS rows of W and TOKENS tokens. Its warps take turns at steps of 128 of K, and the PARTS thread
// blocks of a cluster cut K. Each warp keeps the loads of AHEAD steps on their way. Sums are added up over warps in shared
// memory, then over the cluster by those thread blocks that own them, in the order of the parts, so results are bitwise
// equal from run to run.
//
// Scales are those of scaled_one_shot.cu:
//   TENSOR  sx[0] and sw[0]
//   ROW     sx[token] and sw[row of W]
//   BLOCK   sx[step * ldsx + token] and sw[row of W / 128 * ldsw + step]; where BY_TOKEN is 1, sx[token * ldsx + step]
//   W_ROW   sx[0] and sw[row of W]
// Of int8, zero points are subtracted from whole sums, before the scales: where ZERO is 2, zx[token] * sums[row of W];
// where it is 1, sums[row of W], which one zero point is multiplied into.
//
// Where SHUFFLED is 1, W lies in AITER's order: tiles of 16 rows by 32 of K, one row of tiles after another; in a tile first
// the 16 bytes of each row for the lower half of K, then those for the upper half. There a lane holds both parts of W's row g,
// as rows g and g + 8 of mma's A, so that a load of the warp is of 128 bytes that lie together, eight rows of each.
//
// scaled_fragments.py defines N, K (a multiple of 16; where W is shuffled 32, and N of 16), ROWS (8, 16 or 32), TOKENS (a
// multiple of 4), PARTS, WARPS, AHEAD, RESIDENT (thread blocks of a multiprocessor at least), SCALES (no BLOCK of int8),
// BY_TOKEN, INT8, ZERO, SHUFFLED, BIAS, NAME, CLUSTER, OF_ZERO and ITS_ZERO (its parameters, and what passes them on) and, in
// place of OF_THIS_TYPE, `pair_of` and `value`. NVRTC compiles this without any header but its part. PTX ISA 7.8.
#define TENSOR 0
#define ROW 1
#define BLOCK 2
#define W_ROW 3
typedef unsigned int u32;
typedef unsigned long long u64;
#if INT8
typedef int Sum;
#else
typedef float Sum;
#endif
struct Quad { u32 v[4]; };

constexpr int STEPS = (K + 127) / 128;                             // of K, 128 bytes of a row each
constexpr int MOST = ((STEPS + PARTS - 1) / PARTS + WARPS - 1) / WARPS;  // of a warp
constexpr bool EVEN = STEPS % (PARTS * WARPS) == 0;                // every warp has as many
constexpr int TAIL = K % 128;                                      // of K in the last step; 0 when it is whole
constexpr int BLOCKS = ROWS / 8, SIDES = TOKENS / 4;               // of eight rows of W, of four tokens
constexpr int WORDS = INT8 ? 4 : 8;                                 // that 16 bytes are for the tensor core
constexpr int CHAINS = BLOCKS * SIDES <= 2 && SCALES != BLOCK ? 2 : 1;  // sums that products take turns at
constexpr int THREADS = 32 * WARPS;
constexpr int VALUES = ROWS * TOKENS;                              // that a thread block sums up, row after row of a token
constexpr int EACH = (VALUES + PARTS - 1) / PARTS;                 // of them that a thread block owns
constexpr int OWN = (EACH + THREADS - 1) / THREADS;                // of a thread

OF_THIS_TYPE

#include "cluster_sums.cuh"  // scaled_fragments.py puts its text here

// 16 bytes, or zeros where they are not there. Those of X stay in the first cache, for other thread blocks read them too.
#define READER(NAME_OF_IT, LOAD)                                                                                           \
  __device__ __forceinline__ Quad NAME_OF_IT(const char* from, bool there) {                                               \
    Quad q;                                                                                                                \
    if (EVEN && TAIL == 0)                                                                                                 \
      asm volatile(LOAD " {%0, %1, %2, %3}, [%4];"                                                                         \
                   : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(from));                                  \
    else                                                                                                                   \
      asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; "            \
                   "mov.u32 %3, 0; @there " LOAD " {%0, %1, %2, %3}, [%4];}"                                               \
                   : "=&r"(q.v[0]), "=&r"(q.v[1]), "=&r"(q.v[2]), "=&r"(q.v[3]) : "l"(from), "r"((u32)there));             \
    return q;                                                                                                              \
  }
READER(read_w, "ld.global.nc.L1::no_allocate.v4.u32")
READER(read_x, "ld.global.nc.v4.u32")
__device__ __forceinline__ float read_scale(const float* from, bool there) {
  float f;
  asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; mov.f32 %0, 0f00000000; @there ld.global.nc.f32 %0, [%1];}"
               : "=&f"(f) : "l"(from), "r"((u32)there));
  return f;
}
#if INT8
__device__ __forceinline__ void widen(const Quad& q, u32* words) {
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = q.v[i];
}
__device__ __forceinline__ void multiply(Sum* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 bits_of(Sum sum) { return (u32)sum; }
#else
__device__ __forceinline__ void widen(const Quad& q, u32* words) {  // 16 e4m3 become eight pairs of f16
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(words[2 * i]), "=r"(words[2 * i + 1]) : "r"(q.v[i]));
}
__device__ __forceinline__ void multiply(Sum* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 bits_of(Sum sum) { return __float_as_uint(sum); }
#endif

// What a lane reads, and the steps of its warp: number i is step `first + i WARPS` of the thread block's part of K.
struct Loads {
  const char *w, *x;
  const float *sw, *sx;
  u64 w_rows[2 * BLOCKS], x_rows[SIDES];
  int token[SIDES];  // where its scale is
  int many, last;  // steps of this warp; which of them ends K, if any
  int next_step;   // how far its scales of X are
  bool in_tail;    // this lane's bytes of the step that ends K are there
#if SHUFFLED
  bool w_in_tail[2];  // those of W, of either part, since a lane has both
#endif
};
struct Step {
  Quad w[2 * BLOCKS], x[SIDES];
  float sw, sx[SIDES];
};
__device__ __forceinline__ void load(Step& to, const Loads& my, int i) {
  const bool mine = EVEN || i < my.many, there = mine && (TAIL == 0 || i != my.last || my.in_tail);
  const int at = i * WARPS * 128;
#pragma unroll
  for (int side = 0; side < SIDES; side++) to.x[side] = read_x(my.x + my.x_rows[side] + at, there);
#pragma unroll
  for (int row = 0; row < 2 * BLOCKS; row++)
#if SHUFFLED
    to.w[row] = read_w(my.w + my.w_rows[row] + i * WARPS * 2048, mine && (TAIL == 0 || i != my.last || my.w_in_tail[row % 2]));
#else
    to.w[row] = read_w(my.w + my.w_rows[row] + at, there);
#endif
  if (SCALES == BLOCK) {
    to.sw = read_scale(my.sw + i * WARPS, mine);
#pragma unroll
    for (int side = 0; side < SIDES; side++)
      to.sx[side] = read_scale(my.sx + (long long)i * WARPS * my.next_step + my.token[side], mine);
  }
}
// sums += a step. Of a pair of sums the first is of part 0 of K, the second of part 1: `value_of` takes what counts.
__device__ __forceinline__ void grow(Sum (&sums)[CHAINS][BLOCKS][SIDES][4], const Step& step) {
  u32 w[2 * BLOCKS][WORDS];
#pragma unroll
  for (int row = 0; row < 2 * BLOCKS; row++) widen(step.w[row], w[row]);
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    u32 x[WORDS];
    widen(step.x[side], x);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const u32 *even = w[2 * b], *odd = w[2 * b + 1];
      if (SCALES == BLOCK) {
        Sum of_step[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) multiply(of_step, even[i], odd[i], even[i + 1], odd[i + 1], x[i], x[i + 1]);
        const float scale = step.sx[side] * step.sw;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[0][b][side][i] += of_step[i] * scale;
      } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2)
          multiply(sums[i / 2 % CHAINS][b][side], even[i], odd[i], even[i + 1], odd[i + 1], x[i], x[i + 1]);
      }
    }
  }
}

struct Factors {  // of one value of Y
  float sx, sw, bias;
#if ZERO
  u32 less;  // zero point by sum of W's row, whose bits beyond 32 are those that the sum lacks
#endif
};
__device__ __forceinline__ Factors factors_of(int value, const char* bias, const float* sx, const float* sw OF_ZERO, int tile,
                                              int m) {
  Factors f = {1.f, 1.f, 0.f};
  const int token = min(value / ROWS, m - 1), row = min(tile * ROWS + value % ROWS, N - 1);
  if (SCALES == TENSOR) f.sx = sx[0], f.sw = sw[0];
  if (SCALES == ROW) f.sx = sx[token], f.sw = sw[row];
  if (SCALES == W_ROW) f.sx = sx[0], f.sw = sw[row];
#if ZERO
  f.less = (u32)zero_sums[row];
  if (ZERO == 2) f.less *= (u32)zx[token];
#endif
#if BIAS
  f.bias = ::value(((const unsigned short*)bias)[row]);
#endif
  return f;
}
__device__ __forceinline__ void store(char* y, int i, int tile, int m, Sum whole, const Factors& f) {
  const int token = i / ROWS, row = tile * ROWS + i % ROWS;
  if (row >= N || token >= m) return;
#if ZERO
  whole = (Sum)((u32)whole - f.less);
#endif
  float sum = (float)whole * f.sw * f.sx;
#if BIAS
  sum += f.bias;
#endif
  ((unsigned short*)y)[(u64)token * N + row] = (unsigned short)pair_of(sum, 0.f);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, RESIDENT)
    NAME(const char* x, const char* w,
#if BIAS
         const char* bias,
#endif
         const float* sx, const float* sw OF_ZERO, char* y, int m, int ldx, int ldw, int ldsx, int ldsw) {
#if !BIAS
  const char* bias = nullptr;
#endif
  extern __shared__ __align__(16) char memory[];
  Sum* partial = (Sum*)memory;                       // [warp][value]
  Sum* received = partial + WARPS * VALUES;            // [part][value of its own]
  const u32 others = (u32)__cvta_generic_to_shared(received), all_sums = others + (PARTS * EACH + 1) / 2 * 8;  // a barrier
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first_step = part * STEPS / PARTS, steps = (part + 1) * STEPS / PARTS - first_step;
  const int from = first_step + warp, byte = g % 2 * 64 + t * 16;

  Loads my;
#if SHUFFLED
  my.w = w + (u64)from * 2048 + t / 2 * 512 + t % 2 * 256, my.x = x + (u64)from * 128 + byte;
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) {
    const int row = min(tile * ROWS + i / 2 * 8 + g, N - 1);
    my.w_rows[i] = (u64)(row / 16) * 16 * ldw + row % 16 * 16 + i % 2 * 1024;
  }
  my.w_in_tail[0] = t * 16 < TAIL, my.w_in_tail[1] = 64 + t * 16 < TAIL;
#else
  my.w = w + (u64)from * 128 + byte, my.x = x + (u64)from * 128 + byte;
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) {
    const int row = tile * ROWS + i / 2 * 8 + i % 2 * 4 + g / 2;  // past the last row the last one is read again
    my.w_rows[i] = (u64)(N % ROWS == 0 ? row : min(row, N - 1)) * ldw;
  }
#endif
#pragma unroll
  for (int i = 0; i < SIDES; i++) {
    my.x_rows[i] = (u64)min(i * 4 + g / 2, m - 1) * ldx;
    my.token[i] = min(i * 4 + t, m - 1) * (BY_TOKEN ? ldsx : 1);
  }
  my.many = (steps - warp + WARPS - 1) / WARPS;
  my.last = (STEPS - 1 - from) % WARPS == 0 ? (STEPS - 1 - from) / WARPS : -1;
  my.in_tail = byte < TAIL, my.next_step = BY_TOKEN ? 1 : ldsx;
  if (SCALES == BLOCK) my.sx = sx + (long long)from * my.next_step, my.sw = sw + (long long)(tile * ROWS / 128) * ldsw + from;

  Step coming[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD && u < MOST; u++) load(coming[u], my, u);
  Factors mine[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++)
    mine[i] = factors_of(min(part * EACH + thread + i * THREADS, VALUES - 1), bias, sx, sw ITS_ZERO, tile, m);
  if (PARTS > 1) {
    if (thread == 0) {
      const int own = min(max(VALUES - part * EACH, 0), EACH);
      expect_sums(all_sums, own * (PARTS - 1) * 4);
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  }
  // Zero, known only when all threads have issued their loads up to here; none has waited for one. Without it the compiler
  // moves loads behind products that wait for earlier ones.
  u32 nothing;
  asm volatile("{.reg .pred never; setp.gt.u32 never, %1, 99; bar.red.popc.u32 %0, 0, never;}"
               : "=r"(nothing) : "r"(lane) : "memory");
  Sum sums[CHAINS][BLOCKS][SIDES][4];
#pragma unroll
  for (int i = 0; i < CHAINS * BLOCKS * SIDES * 4; i++) (&sums[0][0][0][0])[i] = (Sum)nothing;

#pragma unroll 1
  for (int base = 0; base < MOST; base += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (MOST % AHEAD == 0 || base + u < MOST) {
        if (EVEN || base + u < my.many) grow(sums, coming[u]);
        if (base + u + AHEAD < MOST) load(coming[u], my, base + u + AHEAD);
      }
    }
  }

  // A lane keeps one sum of each eight rows and four tokens, over both parts of K: groups of lanes with part 0 that of
  // their even row, those with part 1 that of the odd one. SHUFFLED: that of its row, whose parts it has.
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      Sum* all = sums[0][b][side];
#pragma unroll
      for (int chain = 1; chain < CHAINS; chain++)
        for (int i = 0; i < 4; i++) all[i] += sums[chain][b][side][i];
#if SHUFFLED
      partial[warp * VALUES + (side * 4 + t) * ROWS + b * 8 + g] = all[0] + all[3];
#else
      const bool second = g % 2;
      const Sum even = second ? all[1] : all[0], odd = second ? all[3] : all[2];
      const Sum of_other = __shfl_xor_sync(~0u, second ? even : odd, 4);
      partial[warp * VALUES + (side * 4 + t) * ROWS + b * 8 + (second ? 4 : 0) + g / 2] = (second ? odd : even) + of_other;
#endif
    }
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
  __syncthreads();

#pragma unroll
  for (int i = 0; i < (VALUES + THREADS - 1) / THREADS; i++) {
    const int at = thread + i * THREADS;
    if (VALUES % THREADS != 0 && at >= VALUES) break;
    Sum sum = partial[at];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum += partial[other * VALUES + at];
    if (PARTS == 1) {
      store(y, at, tile, m, sum, mine[i]);
    } else {
      const int owner = at / EACH, place = part * EACH + at - owner * EACH;
      if (owner == part) {
        received[place] = sum;
      } else {
        send_sum(others, all_sums, owner, place, bits_of(sum));
      }
    }
  }
  if (PARTS == 1) return;
  wait_for_sums(all_sums);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int at = thread + i * THREADS;
    if (at >= EACH || part * EACH + at >= VALUES) break;
    Sum sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += received[p * EACH + at];
    store(y, part * EACH + at, tile, m, sum, mine[i]);
  }
}
