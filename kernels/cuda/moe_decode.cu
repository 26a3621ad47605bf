// A fused mixture of experts for up to some 64 tokens, on sm_90 and later, in two launches:
//
//   moe_up    H[pair] = act(X[token] Wg[e]^T, X[token] Wu[e]^T)      for each pair (token, one of its TOPK experts e)
//   moe_down  Y[token] = sum over its pairs of weight[pair] H[pair] W2[e]^T
//
// Reading the weights of the experts that are really used is all the work there is. Both kernels read each of them once,
// in pieces of 128 bytes of each row, into a ring of DEPTH pieces that every warp has for itself in shared memory
// (cp.async), and multiply them by the tensor core (mma.m16n8k16): rows of W are its rows, tokens its columns. Which k
// stands where in it does not matter as long as both operands agree: lane 4 g + t takes bytes 32 t to 32 t + 31 of W's
// rows g and g + 8, and the same part of K of token g.
//
// Nothing is sorted beforehand: each thread block counts and orders the pairs by expert itself. Up to 8 pairs of one
// expert are a tile. In moe_up the thread blocks deal out all (tile, 16 TILES columns of H) among themselves, and the warps
// of a block cut K. In moe_down a thread block owns its rows of W2 for all tokens, and its warps deal out the tiles; their
// sums are kept apart and added up in order. So no two blocks add to one number, nothing has to be zeroed, and results are
// bitwise equal from run to run.
//
// moe_decode.py defines STAGE (1: moe_up, 2: moe_down), D, INTER, EXPERTS, TOPK, MOST_PAIRS, WARPS, DEPTH, TILES, DTYPE,
// WEIGHTS, SCALES, GROUP, ACT, BIAS, WEIGHT_FIRST, EARLY, NAME, and ID, the type of expert numbers. NVRTC compiles this
// without any header but the two parts of this file. PTX ISA 7.8.
#define BF16 0
#define F16 1
#define FP8 2     // e4m3
#define INT4 3    // two a byte, the lower first; value = code - 8
#define MXFP4 4   // two e2m1 a byte, the lower first, and a power of two (e8m0) for each 32
#define NONE 0
#define TENSOR 1  // one an expert
#define ROW 2     // one a row of W
#define BLOCK 3   // one for 128 rows by 128 of K
#define GROUPS 4  // one for GROUP of K of each row
#define SILU 0
#define GELU 1
#define SWIGLU_CLAMPED 2  // gpt-oss: rows of gate and up take turns, limit 7, alpha 1.702
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(16) Quad { u32 v[4]; };

constexpr int K = STAGE == 1 ? D : INTER;                        // along which this stage adds up
constexpr int ROWS_OF_EXPERT = STAGE == 1 ? 2 * INTER : D;       // of W
constexpr int SIDES = STAGE == 1 ? 2 * TILES : TILES;            // tiles of 16 rows of W: gate and up, or of W2
constexpr int ROWS = 16 * SIDES;
constexpr int PER_QUAD = WEIGHTS == FP8 ? 16 : WEIGHTS >= INT4 ? 32 : 8;  // values of K in 16 bytes of W
constexpr int STEP = 8 * PER_QUAD;                               // of K in a piece
constexpr int STEPS = (K + STEP - 1) / STEP;
constexpr bool TAIL = K % STEP != 0;
constexpr int X_QUADS = PER_QUAD / 8;                            // of X, for one quad of W
constexpr int THREADS = 32 * WARPS;
constexpr long long ROW_BYTES = (long long)K * 16 / PER_QUAD;
constexpr int PIECE_BYTES = ROWS * 128;
constexpr int MOST_TILES = MOST_PAIRS;

#include "moe_weights.cuh"  // moe_decode.py puts its text here
#include "moe_routing.cuh"

// ---- a warp's ring

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// One piece: 128 bytes of each row. A warp's copy takes four rows at a time, 16 bytes a lane; chunk c of row r lies at
// c ^ r % 8, so that lanes of different rows read from different banks.
__device__ __forceinline__ void copy_piece(u32 to, const u8* w, int expert, int column, int step) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const bool is_there = !TAIL || step * STEP + chunk * PER_QUAD < K;
  const u8* from = w + (long long)expert * ROWS_OF_EXPERT * ROW_BYTES + step * 128 + chunk * 16;
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const int r = 4 * i + lane / 8, at = r * 128 + (chunk ^ r % 8) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to + at), "l"(from + row_of_w(column, r) * ROW_BYTES), "r"(is_there ? 16 : 0) : "memory");
  }
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }
__device__ __forceinline__ Quad quad_at(u32 address) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "r"(address));
  return q;
}
__device__ __forceinline__ Quad quad_of_x(const u16* from, bool is_there) {
  Quad q;
  if (is_there) asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(from));
  else q.v[0] = q.v[1] = q.v[2] = q.v[3] = 0;
  return q;
}

struct Tokens {  // of one step: what a lane needs besides the piece
  Quad x[2][X_QUADS];
  Scale scale[SIDES][2][SCALES == GROUPS ? 2 : 1];
};
__device__ __forceinline__ void load_tokens(Tokens& t, const u16* x, const Scale* scales, int expert, int column, int step) {
  const int part = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const int k = step * STEP + (part + q) * PER_QUAD;
    const bool is_there = !TAIL || k < K;
#pragma unroll
    for (int i = 0; i < X_QUADS; i++) t.x[q][i] = quad_of_x(x + k + 8 * i, is_there);
    if (SCALES == GROUPS)
#pragma unroll
      for (int i = 0; i < SIDES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          t.scale[i][half][SCALES == GROUPS ? q : 0] = is_there ? *scale_at(scales, expert, row_of_w(column, 16 * i + 8 * half + g), k) : (Scale)0;
  }
  if (SCALES == BLOCK)
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        t.scale[i][half][0] = *scale_at(scales, expert, row_of_w(column, 16 * i + 8 * half + g), step * STEP);
}
template <bool BEYOND>
__device__ __forceinline__ void add_products(float (*sums)[4], u32 piece, const Tokens& of) {
  const int part = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
  float block[SIDES][4];
#pragma unroll
  for (int i = 0; i < SIDES; i++) block[i][0] = block[i][1] = block[i][2] = block[i][3] = 0.0f;
#pragma unroll
  for (int q = 0; q < 2; q++)
#pragma unroll
    for (int i = 0; i < SIDES; i++) {
      Quad w[2];
      u32 factor[2], rest[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        w[half] = quad_at(piece + (16 * i + 8 * half + g) * 128 + ((part + q) ^ g) * 16);
        const Scale scale = of.scale[i][half][SCALES == GROUPS ? q : 0];
        factor[half] = BEYOND ? pair_of_scale_beyond(scale, rest[half]) : pair_of_scale(scale);
      }
#pragma unroll
      for (int p = 0; p < PER_QUAD / 4; p++) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          a[j] = pair_of_w(w[j % 2], 2 * p + j / 2);
          if (SCALES == GROUPS) a[j] = times(a[j], factor[j % 2]);
          if (BEYOND) a[j] = times(a[j], rest[j % 2]);
        }
        multiply(SCALES == BLOCK ? block[i] : sums[i], a[0], a[1], a[2], a[3], pair_of_x(of.x[q], 2 * p), pair_of_x(of.x[q], 2 * p + 1));
      }
    }
  if (SCALES == BLOCK)
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] += block[i][j] * (float)of.scale[i][j / 2][0];
}
__device__ __forceinline__ void add_piece(float (*sums)[4], u32 piece, const Tokens& of) {
  bool beyond = false;
  if (WEIGHTS == MXFP4)
#pragma unroll
    for (int i = 0; i < 4 * SIDES; i++) beyond |= is_beyond(of.scale[i / 4][i / 2 % 2][SCALES == GROUPS ? i % 2 : 0]);
  if (WEIGHTS == MXFP4 && __any_sync(~0u, beyond)) add_products<WEIGHTS == MXFP4>(sums, piece, of);
  else add_products<false>(sums, piece, of);
}
__device__ __forceinline__ float whole_scale(const Scale* scales, int expert, int row) {
  if (SCALES == TENSOR || SCALES == ROW) return (float)*scale_at(scales, expert, row, 0);
  return 1.0f;
}

#if STAGE == 1
__device__ __forceinline__ float activated(float gate, float up) {
  if (ACT == SWIGLU_CLAMPED) {
    gate = gate > 7.0f ? 7.0f : gate, up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;  // a NaN stays one
    return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
  }
  if (ACT == GELU) return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
  return gate / (1.0f + __expf(-gate)) * up;
}
constexpr int COLUMNS = (INTER + 16 * TILES - 1) / (16 * TILES);  // of items, for each tile

extern "C" __global__ void __launch_bounds__(THREADS) NAME(const u16* x, const ID* ids, const float* weights, const u8* w,
                                                           const Scale* scales, const u16* bias, u16* h, int pairs, int ldx) {
  __shared__ Routing r;
  __shared__ float sent[2][WARPS][SIDES][16][8];
  extern __shared__ __align__(128) u8 ring[];  // [warp][DEPTH] pieces
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  route(r, ids, pairs);
  const u32 mine = in_shared(ring) + warp * DEPTH * PIECE_BYTES;
  const int items = r.tiles * COLUMNS;
  constexpr int EACH = (STEPS + WARPS - 1) / WARPS;  // steps of a warp, some of which do not exist
  int next = blockIdx.x, next_step = 0;              // what is copied next
  const auto copy_next = [&](int slot) {
    const int step = next_step * WARPS + warp;
    if (next < items && step < STEPS)
      copy_piece(mine + slot * PIECE_BYTES, w, r.expert[next / COLUMNS], next % COLUMNS * 16 * TILES, step);
    close_group();
    if (++next_step == EACH) next_step = 0, next += gridDim.x;
  };
  for (int i = 0; i < DEPTH; i++) copy_next(i);
  int slot = 0, parity = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, parity ^= 1) {
    const int tile = item / COLUMNS, expert = r.expert[tile], many = r.many[tile], column = item % COLUMNS * 16 * TILES;
    const u16* of_token = x + (long long)(r.order[r.first[tile] + min(g, many - 1)] / TOPK) * ldx;
    float sums[SIDES][4] = {};
    Tokens now, later;
    if (warp < STEPS) load_tokens(now, of_token, scales, expert, column, warp);
    for (int i = 0; i < EACH; i++) {
      const int step = i * WARPS + warp;
      if (step + WARPS < STEPS) load_tokens(later, of_token, scales, expert, column, step + WARPS);
      wait_for_oldest();
      __syncwarp();
      if (step < STEPS) add_piece(sums, mine + slot * PIECE_BYTES, now);
      __syncwarp();
      copy_next(slot);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      now = later;
    }
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sent[parity][warp][i][g + j / 2 * 8][lane % 4 * 2 + j % 2] = sums[i][j];
    __syncthreads();
    for (int one = threadIdx.x; one < TILES * 128; one += THREADS) {
      const int of = one / 128, row = one % 16, place = one % 128 / 16, at = column + of * 16 + row;
      if (place >= many || at >= INTER) continue;
      const int pair = r.order[r.first[tile] + place];
      float both[2];
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int of_w = row_of_w(column, (2 * of + side) * 16 + row);
        float sum = 0.0f;
        for (int v = 0; v < WARPS; v++) sum += sent[parity][v][2 * of + side][row][place];
        sum *= whole_scale(scales, expert, of_w);
        if (WEIGHT_FIRST) sum *= weights[pair];
        if (BIAS) sum += value(bias[(long long)expert * ROWS_OF_EXPERT + of_w]);
        both[side] = sum;
      }
      h[(long long)pair * INTER + at] = (u16)pair_of(activated(both[0], both[1]), 0.0f);
    }
  }
}
#else
// Along x of the grid 16 TILES columns of Y. A warp takes whole tiles of pairs, or, where there are fewer of them than
// warps, a part of K of one.
extern "C" __global__ void __launch_bounds__(THREADS) NAME(const u16* h, const ID* ids, const float* weights, const u8* w,
                                                           const Scale* scales, const u16* bias, u16* y, int pairs, int ldy) {
  __shared__ Routing r;
  extern __shared__ __align__(128) u8 ring[];  // [warp][DEPTH] pieces, then [warp][token][row] sums
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tokens = pairs / TOPK, column = blockIdx.x * ROWS;
  float* partial = (float*)(ring + WARPS * DEPTH * PIECE_BYTES);
  float* own = partial + (long long)warp * tokens * ROWS;
  for (int i = lane; i < tokens * ROWS; i += 32) own[i] = 0.0f;
  route(r, ids, pairs);
  int cut = 1;  // parts of K
  while (r.tiles * cut < WARPS && 2 * cut <= STEPS) cut *= 2;
  const u32 mine = in_shared(ring) + warp * DEPTH * PIECE_BYTES;
  const int items = r.tiles * cut, each = (STEPS + cut - 1) / cut;
  int next = warp, next_step = 0;
  const auto copy_next = [&](int slot) {
    const int step = next_step * cut + next % cut;
    if (next < items && step < STEPS) copy_piece(mine + slot * PIECE_BYTES, w, r.expert[next / cut], column, step);
    close_group();
    if (++next_step == each) next_step = 0, next += WARPS;
  };
  for (int i = 0; i < DEPTH; i++) copy_next(i);
  if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");  // H is there from here on
  int slot = 0;
  for (int item = warp; item < items; item += WARPS) {
    const int part = item % cut, tile = item / cut, expert = r.expert[tile], many = r.many[tile];
    const u16* of_pair = h + (long long)r.order[r.first[tile] + min(g, many - 1)] * INTER;
    float sums[SIDES][4] = {};
    Tokens now, later;
    load_tokens(now, of_pair, scales, expert, column, part);
    for (int i = 0; i < each; i++) {
      const int step = i * cut + part;
      if (step + cut < STEPS) load_tokens(later, of_pair, scales, expert, column, step + cut);
      wait_for_oldest();
      __syncwarp();
      if (step < STEPS) add_piece(sums, mine + slot * PIECE_BYTES, now);
      __syncwarp();
      copy_next(slot);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      now = later;
    }
    // A lane has the sums of pairs 2 t and 2 t + 1. One pair after another, for two of them may be of one token.
#pragma unroll
    for (int place = 0; place < 8; place++) {
      if (place && place >= many) break;
      __syncwarp();
      if (t != place / 2) continue;
      const int pair = r.order[r.first[tile] + place];
      const float weight = WEIGHT_FIRST ? 1.0f : weights[pair];
#pragma unroll
      for (int i = 0; i < SIDES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = 16 * i + 8 * half + g, of_w = row_of_w(column, at);
          float sum = sums[i][2 * half + place % 2] * whole_scale(scales, expert, of_w);
          if (BIAS && part == 0) sum += value(bias[(long long)expert * D + of_w]);
          own[pair / TOPK * ROWS + at] += weight * sum;
        }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tokens * ROWS; i += THREADS) {
    float sum = 0.0f;
    for (int v = 0; v < WARPS; v++) sum += partial[(long long)v * tokens * ROWS + i];
    const int token = i / ROWS, at = column + i % ROWS;
    if (at < D) y[(long long)token * ldy + at] = (u16)pair_of(sum, 0.0f);
  }
}
#endif
