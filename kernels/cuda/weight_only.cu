// Y = X W^T + bias with W of 8 or 4 bits and X of 16, for up to 16 tokens, on sm_90 and later.
//
// Numbers of W become exact numbers of X's type in registers, the tensor core multiplies (mma.m16n8k16: rows of W are its
// rows, tokens its columns) and sums are of fp32; a scale multiplies sums, in fp32, so that nothing is rounded but those.
// (A power of two may multiply numbers, which is exact as well.)
//
// A thread block takes ROWS rows of W. Its warps take turns at steps of 128 bytes of each row, and the PARTS thread blocks
// of a cluster cut K. Each warp keeps DEPTH steps of W, X and the scales on their way into a ring of its own in shared
// memory (cp.async). Four lanes share 16 bytes of a row, a word each, and the same part of K of a token: which k stands
// where in a product does not matter as long as both agree. So the lanes of a product are never of two scales: 16 bytes
// are 32 numbers of 4 bits, the smallest group. Sums are added up over warps in shared memory, then over the cluster by
// those thread blocks that own them, in the order of the parts, so results are bitwise equal from run to run.
//
// weight_only.py defines N, K (a multiple of what 16 bytes of W hold), ROWS (a multiple of 16), TOKENS (8 or 16), M (of
// them, at most), PARTS, WARPS, DEPTH, DTYPE (of X and Y), WEIGHTS, SCALES, OF_SCALE (type), GROUP, BIAS, NAME and CLUSTER.
// NVRTC compiles this without any header but the parts of this file. PTX ISA 7.8.
#define BF16 0
#define F16 1
#define FP32 2
#define E8M0 3
#define INT8 0
#define FP8 1     // e4m3
#define INT4 2    // two a byte, the lower first; value = code - 8
#define MXFP4 3   // two e2m1 a byte, the lower first
#define TENSOR 0  // sw[0]
#define ROW 1     // sw[row]
#define BLOCK 2   // sw[row / 128 * ldsw + k / 128]
#define GROUPS 3  // sw[row * ldsw + k / GROUP]
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr bool FOUR = WEIGHTS >= INT4;
constexpr int PER_WORD = FOUR ? 8 : 4;                          // numbers of W in 32 bits
constexpr int STEP = 32 * PER_WORD;                             // of K
constexpr int STEPS = (K + STEP - 1) / STEP;
constexpr int MOST = ((STEPS + PARTS - 1) / PARTS + WARPS - 1) / WARPS;  // of a warp; some have one less
constexpr bool TAIL = K % STEP != 0;
constexpr int PRODUCTS = PER_WORD / 4;                          // of the tensor core, for a word
constexpr int BLOCKS = ROWS / 16, SIDES = TOKENS / 8;           // of 16 rows of W, of 8 tokens
constexpr int THREADS = 32 * WARPS;
constexpr int VALUES = ROWS * TOKENS;                           // that a thread block sums up, row after row of a token
constexpr int EACH = (VALUES + PARTS - 1) / PARTS;              // of them that a thread block owns
constexpr int OWN = (EACH + THREADS - 1) / THREADS;             // of a thread
constexpr int SCALE_BYTES = OF_SCALE == E8M0 ? 1 : OF_SCALE == FP32 ? 4 : 2;
constexpr int GROUPS_OF_STEP = SCALES == GROUPS ? STEP / GROUP : 1;
constexpr int CHUNKS = 8 / GROUPS_OF_STEP;                      // 16 bytes of a row that have one scale
constexpr int S_ROW = SCALES == GROUPS ? GROUPS_OF_STEP * SCALE_BYTES : 0;  // bytes of the scales of a row in a step
constexpr int S_COPY = S_ROW % 16 == 0 && (K / GROUP * SCALE_BYTES) % 16 == 0 ? 16
                     : S_ROW % 8 == 0 && (K / GROUP * SCALE_BYTES) % 8 == 0   ? 8 : 4;  // bytes of them at a time
constexpr int W_BYTES = ROWS * 128, X_BYTES = (M * STEP * 2 + 511) / 512 * 512, S_BYTES = (ROWS * S_ROW + 511) / 512 * 512;
constexpr int SLOT = W_BYTES + X_BYTES + S_BYTES;               // of the ring
constexpr bool OF_SUMS = SCALES == BLOCK || SCALES == GROUPS;   // a scale holds for a part of K

#include "sixteen_bit.cuh"  // weight_only.py puts the text of all here
#include "weight_only_numbers.cuh"
#include "cluster_sums.cuh"

// ---- a warp's ring. Of W chunk c of row r lies at c ^ r % 8, so that lanes of different rows read from different banks;
// of X a run of what four lanes read, at run ^ token modulo how many runs are 128 bytes.

constexpr int RUN = 8 * PER_WORD, RUNS = 128 / RUN;  // bytes of X that four lanes read; runs in 128 bytes

template <int BYTES> __device__ __forceinline__ void copy_few(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(is_there ? BYTES : 0) : "memory");
}
// What a lane copies: rows 4 i + lane / 8 of W, of every turn one or two tokens, some scales.
struct Sources {
  const u8 *w, *x, *scales;  // from the tile's first row on; the lane's bytes of its first token and row
  u32 w_from, ldw;           // bytes from w on
  u32 w_to, x_to, s_to;      // in a slot
  int last, m, token;        // row of the tile; tokens, the lane's first
  u64 x_turn;                // bytes from turn to turn
};
constexpr int X_CHUNKS = STEP / 8, X_TOKENS = 32 / X_CHUNKS;  // of 16 bytes of a token, of tokens in a turn
constexpr int S_PER_ROW = S_ROW / S_COPY > 0 ? S_ROW / S_COPY : 1, S_ROWS = 32 / S_PER_ROW;  // in a turn
constexpr int S_OF_ROW = K / GROUP * SCALE_BYTES;
__device__ __forceinline__ int there(const Sources& of, int r) {  // past the last row the last one is read again
  return N % ROWS == 0 ? r : min(r, of.last);
}
__device__ __forceinline__ Sources sources_of(const u8* x, const u8* w, const u8* sw, int tile, int m, int ldx, int ldw) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, r = lane / 8, c = lane % X_CHUNKS, part = lane % S_PER_ROW * S_COPY;
  Sources of;
  of.w = w + (u64)tile * ROWS * ldw, of.w_from = chunk * 16, of.ldw = ldw;
  of.w_to = r * 128 + (chunk ^ r) * 16;
  of.last = N - 1 - tile * ROWS, of.m = m;
  of.token = lane / X_CHUNKS, of.x_turn = (u64)X_TOKENS * ldx * 2;
  of.x = x + ((u64)of.token * ldx + c * 8) * 2;
  of.x_to = W_BYTES + of.token * STEP * 2 + (c * 16 ^ of.token % RUNS * RUN);
  of.scales = sw + (u64)tile * ROWS * S_OF_ROW + part, of.s_to = W_BYTES + X_BYTES + lane / S_PER_ROW * S_ROW + part;
  return of;
}
__device__ __forceinline__ void copy_step(u32 slot, const Sources& of, int step) {
  const int lane = threadIdx.x % 32;
  const bool w_there = !TAIL || step * STEP + lane % 8 * 4 * PER_WORD < K, x_there = !TAIL || step * STEP + lane % X_CHUNKS * 8 < K;
  const u32 even = slot + of.w_to, odd = slot + (of.w_to ^ 64), at = of.w_from + step * 128;
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++)
    copy16((i % 2 ? odd : even) + i * 512, of.w + (u32)(there(of, 4 * i + lane / 8) * of.ldw + at), w_there);
  const u8* x = of.x + step * STEP * 2;
  const u32 to = slot + of.x_to;
#pragma unroll
  for (int i = 0; i < (M + X_TOKENS - 1) / X_TOKENS; i++, x += of.x_turn)
    if (of.token + i * X_TOKENS < of.m) copy16((to ^ i * X_TOKENS % RUNS * RUN) + i * X_TOKENS * STEP * 2, x, x_there);
  if (SCALES == GROUPS)
#pragma unroll
    for (int i = 0; i < (ROWS + S_ROWS - 1) / S_ROWS; i++) {
      const int r = i * S_ROWS + lane / S_PER_ROW, at_s = step * S_ROW + lane % S_PER_ROW * S_COPY;
      if (ROWS % S_ROWS == 0 || r < ROWS)
        copy_few<S_COPY>(slot + of.s_to + i * S_ROWS * S_ROW, of.scales + (u32)(there(of, r) * S_OF_ROW + step * S_ROW), !TAIL || at_s < S_OF_ROW);
    }
}
__device__ __forceinline__ u32 word_at(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
template <int WORDS> __device__ __forceinline__ void words_at(u32* to, u32 address) {  // 1, 2, or a multiple of 4
  if (WORDS == 1) to[0] = word_at(address);
  if (WORDS == 2) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address));
#pragma unroll
  for (int i = 0; i < WORDS / 4; i++)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3]) : "r"(address + 16 * i));
}

typedef float Sums[BLOCKS][SIDES][4];
constexpr int S_WORDS = S_ROW / 4 > 0 ? S_ROW / 4 : 1;
typedef u32 Scales[BLOCKS][2][S_WORDS];  // of the lane's rows in a step
// sums += the products of a step. of_block: the scale of all of it, if it has one.
template <bool FOLDED>
__device__ __forceinline__ void grow(Sums& sums, u32 slot, const Scales& scales, float of_block, int m) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 w_at = slot + g * 144 + t * 4;  // chunk 0 of row g: others are where these bits of the address are others
  u32 x_at[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    const int token = min(side * 8 + g, m - 1);
    x_at[side] = slot + W_BYTES + token * STEP * 2 + (token % RUNS * RUN | t * 2 * PER_WORD);
  }
  constexpr bool SCALED = OF_SUMS && !FOLDED;
  float part[BLOCKS][SIDES][4];
#pragma unroll
  for (int group = 0; group < GROUPS_OF_STEP; group++) {
    if (SCALED)
#pragma unroll
      for (int i = 0; i < BLOCKS * SIDES * 4; i++) (&part[0][0][0])[i] = 0.0f;
    u32 factors[BLOCKS][2];
    if (FOLDED)
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; i++) factors[i / 2][i % 2] = factor_of(scales[i / 2][i % 2], group);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int chunk = group * CHUNKS + c;
      u32 x[SIDES][PER_WORD / 2];
#pragma unroll
      for (int side = 0; side < SIDES; side++) words_at<PER_WORD / 2>(x[side], x_at[side] ^ chunk * RUN);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        u32 w[2];
#pragma unroll
        for (int half = 0; half < 2; half++) w[half] = word_at((w_at ^ chunk * 16) + (16 * b + 8 * half) * 128);
#pragma unroll
        for (int p = 0; p < PRODUCTS; p++) {
          u32 a[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (FOLDED) a[j] = times(small_from_fp4(w[j % 2], 2 * p + j / 2), factors[b][j % 2]);
            else a[j] = pair_of_w(w[j % 2], 2 * p + j / 2);
          }
#pragma unroll
          for (int side = 0; side < SIDES; side++)
            multiply(SCALED ? part[b][side] : sums[b][side], a[0], a[1], a[2], a[3], pair_of_x(x[side], 2 * p), pair_of_x(x[side], 2 * p + 1));
        }
      }
    }
    if (SCALED)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        float scale[2] = {of_block, of_block};
        if (SCALES == GROUPS)
#pragma unroll
          for (int half = 0; half < 2; half++) scale[half] = scale_of(scales[b][half], group);
#pragma unroll
        for (int side = 0; side < SIDES; side++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[b][side][i] = __fmaf_rn(part[b][side][i], scale[i / 2], sums[b][side][i]);
      }
  }
}
__device__ __forceinline__ void take(Sums& sums, u32 slot, const float* sw, int ldsw, int tile, int m, int step) {
  const int g = threadIdx.x % 32 / 4;
  Scales scales;
  if (SCALES == GROUPS)
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) words_at<S_WORDS>(scales[i / 2][i % 2], slot + W_BYTES + X_BYTES + (i * 8 + g) * S_ROW);
  float of_block = 1.0f;
  if (SCALES == BLOCK) of_block = sw[(u64)(tile * ROWS / 128) * ldsw + step];
  u32 any = 0;
  if (MAY_FOLD)
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS * S_WORDS; i++) any |= beyond((&scales[0][0][0])[i]);
  if (MAY_FOLD && __all_sync(~0u, any == 0)) grow<MAY_FOLD>(sums, slot, scales, of_block, m);
  else grow<false>(sums, slot, scales, of_block, m);
}

__device__ __forceinline__ void store(u16* y, int i, int tile, int m, float sum, const float* scales, const u16* bias) {
  const int token = i / ROWS, row = tile * ROWS + i % ROWS;
  if (row >= N || token >= m) return;
  if (SCALES == TENSOR) sum *= scales[0];
  if (SCALES == ROW) sum *= scales[row];
#if BIAS
  sum += value(bias[row]);
#endif
  y[(u64)token * N + row] = (u16)pair_of(sum, 0.f);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS)
    NAME(const u8* x, const u8* w,
#if BIAS
         const u16* bias,
#endif
         const u8* sw, u16* y, int m, int ldx, int ldw, int ldsw) {
#if !BIAS
  const u16* bias = nullptr;
#endif
  extern __shared__ __align__(512) u8 memory[];  // [warp][DEPTH] slots; then sums of each warp, of each part, a barrier
  float* partial = (float*)(memory + WARPS * DEPTH * SLOT);  // [warp][value]
  float* received = partial + WARPS * VALUES;                // [part][value of its own]
  const u32 others = in_shared(received), all_sums = others + (PARTS * EACH + 1) / 2 * 8;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first = part * STEPS / PARTS + warp, end = (part + 1) * STEPS / PARTS;
  const u32 mine = in_shared(memory) + warp * DEPTH * SLOT;
  const Sources of = sources_of(x, w, sw, tile, m, ldx, ldw);
  const float* scales = (const float*)sw;

#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    if (first + i * WARPS < end) copy_step(mine + i * SLOT, of, first + i * WARPS);
    close_group();
  }
  if (PARTS > 1) {
    if (thread == 0) {
      const int own = min(max(VALUES - part * EACH, 0), EACH);
      expect_sums(all_sums, own * (PARTS - 1) * 4);
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  }
  Sums sums = {};
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < MOST; i++) {
    const int step = first + i * WARPS;
    wait_for_oldest();
    __syncwarp();
    if (step < end) take(sums, mine + slot * SLOT, scales, ldsw, tile, m, step);
    __syncwarp();
    if (step + DEPTH * WARPS < end) copy_step(mine + slot * SLOT, of, step + DEPTH * WARPS);
    close_group();
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
  }
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        partial[warp * VALUES + (side * 8 + 2 * t + i % 2) * ROWS + b * 16 + i / 2 * 8 + g] = sums[b][side][i];
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
  __syncthreads();

#pragma unroll
  for (int i = 0; i < (VALUES + THREADS - 1) / THREADS; i++) {
    const int at = thread + i * THREADS;
    if (VALUES % THREADS != 0 && at >= VALUES) break;
    float sum = partial[at];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum += partial[other * VALUES + at];
    if (PARTS == 1) {
      store(y, at, tile, m, sum, scales, bias);
    } else {
      const int owner = at / EACH, place = part * EACH + at - owner * EACH;
      if (owner == part) {
        received[place] = sum;
      } else {
        send_sum(others, all_sums, owner, place, __float_as_uint(sum));
      }
    }
  }
  if (PARTS == 1) return;
  wait_for_sums(all_sums);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int at = thread + i * THREADS;
    if (at >= EACH || part * EACH + at >= VALUES) break;
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += received[p * EACH + at];
    store(y, part * EACH + at, tile, m, sum, scales, bias);
  }
}
