// A fused mixture of experts for up to some 64 tokens, on sm_90 and later, in two launches:
//
//   moe_up    H[pair] = act(X[token] Wg[e]^T, X[token] Wu[e]^T)      for each pair (token, one of its TOPK experts e)
//   moe_down  Y[token] = sum over its pairs of weight[pair] H[pair] W2[e]^T
//
// Reading the weights of the experts that are really used is all the work there is. Both kernels read each of them once,
// in pieces of 128 bytes of each row, into a ring of DEPTH pieces that every warp has for itself in shared memory
// (cp.async), with the same part of K of the tokens and the scales beside them, and multiply them by the tensor core
// (mma.m16n8k16): rows of W are its rows, tokens its columns. Which k stands where in it does not matter as long as both
// operands agree: lane 4 g + t takes bytes 32 t to 32 t + 31 of W's rows g and g + 8, and the same part of K of token g.
// (moe_products.cuh; MXFP4 is mostly multiplied as int8, as moe_columns.cuh says.)
//
// Nothing is sorted beforehand: each thread block counts and orders the pairs by expert itself. Up to OF_TILE pairs of one
// expert are a tile. In moe_up all (tile, 16 TILES columns of H) are dealt out among the warps (PARTS 1), or, where there
// are few, among the thread blocks, whose warps cut K (PARTS as many as them). In moe_down the PARTS thread blocks of a cluster own their rows of W2 for all tokens, and their warps
// deal out the tiles; sums are kept apart and added up in order, over warps and then over the cluster. So no two add to
// one number, nothing has to be zeroed, and results are bitwise equal from run to run.
//
// moe_decode.py defines STAGE (1: moe_up, 2: moe_down), D, INTER, EXPERTS, TOPK, MOST_PAIRS, WARPS, DEPTH, TILES, PARTS,
// OF_TILE (at most 8), DTYPE, WEIGHTS, SCALES, GROUP, ACT, BIAS, WEIGHT_FIRST, EARLY, NAME, CLUSTER, and ID, the type of expert numbers. NVRTC
// compiles this without any header but the parts of this file. PTX ISA 7.8.
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
constexpr int EACH = STAGE == 1 ? (STEPS + PARTS - 1) / PARTS : STEPS;  // steps of a warp, some of which do not exist
// X as columns (moe_columns.cuh): in moe_up those of a tile are kept, where its warps share K; in moe_down each warp makes
// them for each step, which two pairs are worth.
constexpr bool KEPT = WEIGHTS == MXFP4 && DTYPE == BF16 && STAGE == 1 && PARTS > 1;
constexpr bool IN_COLUMNS = KEPT || (WEIGHTS == MXFP4 && DTYPE == BF16 && STAGE == 2 && OF_TILE <= 2);
constexpr int X_QUADS = PER_QUAD / 8;                            // of X, for one quad of W
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_TILES = MOST_PAIRS;

#include "sixteen_bit.cuh"  // moe_decode.py puts the text of all here
#include "moe_weights.cuh"
#include "moe_routing.cuh"
#include "moe_ring.cuh"
#include "moe_products.cuh"
#include "moe_columns.cuh"
#include "cluster_sums.cuh"

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

__device__ __forceinline__ void store(u16* h, int pair, int at, float gate, float up) {
  if (at < INTER) h[(long long)pair * INTER + at] = (u16)pair_of(activated(gate, up), 0.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const u16* x, const ID* ids, const float* weights, const u8* w,
                                                           const Scale* scales, const u16* bias, u16* h, int pairs, int ldx) {
  __shared__ Routing r;
  extern __shared__ __align__(128) u8 ring[];  // [warp][DEPTH] slots; [2][WARPS][SIDES][16][8] sums, where warps share K
  float(*sent)[WARPS][SIDES][16][8] = (float(*)[WARPS][SIDES][16][8])(ring + WARPS * RING);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  route(r, ids, pairs);
  const u32 mine = in_shared(ring) + warp * RING, columns = mine + DEPTH * SLOT;
  const int items = r.tiles * COLUMNS;
  const int part = PARTS == 1 ? 0 : warp;                            // of K
  // Items of a thread block: each takers-th, or, where columns are kept, those that follow its first.
  const int first = KEPT ? (u64)items * blockIdx.x / gridDim.x : PARTS == 1 ? blockIdx.x * WARPS + warp : blockIdx.x;
  const int takers = KEPT ? 1 : PARTS == 1 ? gridDim.x * WARPS : gridDim.x, end = KEPT ? (u64)items * (blockIdx.x + 1) / gridDim.x : items;
  int next = first, next_step = 0;                                   // what is copied next
  Source of = {};
  const auto copy_next = [&](int slot) {
    const int step = next_step * PARTS + part;
    if (next < end) {
      if (next_step == 0) of = source_of(r, next / COLUMNS, next % COLUMNS * 16 * TILES, w, scales, ldx);
      if (step < STEPS) {
        copy_weights(mine + slot * SLOT, of, step);
        if (!KEPT) copy_tokens(mine + slot * SLOT, of, x, step);
      }
    }
    close_group();
    if (++next_step == EACH) next_step = 0, next += takers;
  };
  for (int i = 0; i < DEPTH; i++) copy_next(i);
  int slot = 0, parity = 0, kept = -1;
  u32 right = 0;  // a bit for each step
  for (int item = first; item < end; item += takers, parity ^= 1) {
    const int tile = item / COLUMNS, expert = r.expert[tile], many = r.many[tile], column = item % COLUMNS * 16 * TILES;
    // Biases are asked for before they are needed: of the lane's rows, or where warps share K of what a thread adds up.
    constexpr int OF_THREAD = PARTS == 1 ? SIDES : (TILES * 128 + THREADS - 1) / THREADS;
    float start[OF_THREAD][2] = {};
    if (BIAS)
#pragma unroll
      for (int i = 0; i < 2 * OF_THREAD; i++) {
        const int one = threadIdx.x + i / 2 * THREADS;
        const int at = PARTS == 1 ? 8 * i + g : (2 * (one / 128) + i % 2) * 16 + one % 16;
        if (at < ROWS) start[i / 2][i % 2] = value(bias[(long long)expert * ROWS_OF_EXPERT + row_of_w(column, at)]);
      }
    float sums[SIDES][4] = {}, of_columns[EIGHTS][SIDES][2] = {};
    if (KEPT && tile != kept) right = make_all_columns(columns, source_of(r, tile, column, w, scales, ldx), x, part), kept = tile;
    for (int i = 0; i < EACH; i++) {
      const int step = i * PARTS + part;
      wait_for_oldest();
      __syncwarp();
      if (step < STEPS && IN_COLUMNS)
        add_step_of_columns(of_columns, mine + slot * SLOT, columns + i * OF_STEP, column, step, many,
                            right >> i & 1);
      else if (step < STEPS) add_step(sums, mine + slot * SLOT, column, step, many);
      __syncwarp();
      copy_next(slot);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    if (IN_COLUMNS) add_up(sums, of_columns);
    if (PARTS == 1) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int place = 2 * t + j % 2, row = 8 * (j / 2) + g;
        if (place >= many) continue;
        const int pair = r.order[r.first[tile] + place];
        const float weight = WEIGHT_FIRST ? weights[pair] : 1.0f;
#pragma unroll
        for (int of = 0; of < TILES; of++) {
          float both[2];
#pragma unroll
          for (int side = 0; side < 2; side++)
            both[side] = sums[2 * of + side][j] * whole_scale(scales, expert, row_of_w(column, (2 * of + side) * 16 + row)) * weight + start[2 * of + side][j / 2];
          store(h, pair, column + of * 16 + row, both[0], both[1]);
        }
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sent[parity][warp][i][g + j / 2 * 8][2 * t + j % 2] = sums[i][j];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < (TILES * 128 + THREADS - 1) / THREADS; i++) {
      const int one = threadIdx.x + i * THREADS, of = one / 128, row = one % 16, place = one % 128 / 16;
      if (one >= TILES * 128 || place >= many) continue;
      const int pair = r.order[r.first[tile] + place];
      float both[2];
#pragma unroll
      for (int side = 0; side < 2; side++) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < WARPS; v++) sum += sent[parity][v][2 * of + side][row][place];
        sum *= whole_scale(scales, expert, row_of_w(column, (2 * of + side) * 16 + row));
        if (WEIGHT_FIRST) sum *= weights[pair];
        both[side] = sum + start[i][side];
      }
      store(h, pair, column + of * 16 + row, both[0], both[1]);
    }
  }
}
#else
__device__ __forceinline__ void store(u16* y, int i, int column, int ldy, float sum) {
  const int token = i / ROWS, at = column + i % ROWS;
  if (at < D) y[(long long)token * ldy + at] = (u16)pair_of(sum, 0.0f);
}
// Along x of the grid 16 TILES columns of Y. A warp takes whole tiles of pairs, or, where there are fewer of them than
// warps, a part of K of one.
constexpr int TAKERS = WARPS * PARTS;
// In how many parts of K a tile is cut, so that the last warp is done as early as can be.
__device__ __forceinline__ int parts_of_k(int tiles) {
  int best = 1, least = 1 << 30;
  for (int cut = 1; cut <= STEPS && (cut == 1 || tiles * cut < 2 * TAKERS); cut++) {
    const int steps = (tiles * cut + TAKERS - 1) / TAKERS * ((STEPS + cut - 1) / cut);
    if (steps < least) least = steps, best = cut;
  }
  return best;
}
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    NAME(const u16* h, const ID* ids, const float* weights, const u8* w, const Scale* scales, const u16* bias, u16* y, int pairs, int ldy) {
  __shared__ Routing r;
  extern __shared__ __align__(128) u8 ring[];  // [warp][DEPTH] slots, [warp][token][row] sums, those of each part, a barrier
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tokens = pairs / TOPK, column = blockIdx.x / PARTS * ROWS, rank = blockIdx.x % PARTS;
  const int values = tokens * ROWS, each = (values + PARTS - 1) / PARTS;  // of them a thread block of the cluster owns
  float* partial = (float*)(ring + WARPS * RING);
  float* received = partial + WARPS * values;
  float* own = partial + warp * values;
  const u32 others = in_shared(received), all_sums = others + (PARTS * each + 1) / 2 * 8;
  for (int i = lane; i < values; i += 32) own[i] = 0.0f;
  if (PARTS > 1) {
    if (threadIdx.x == 0) {
      const int mine = min(max(values - rank * each, 0), each);
      expect_sums(all_sums, mine * (PARTS - 1) * 4);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  }
  route(r, ids, pairs);
  const int cut = parts_of_k(r.tiles);
  const u32 mine = in_shared(ring) + warp * RING, columns = mine + DEPTH * SLOT;
  const int first = rank * WARPS + warp, items = r.tiles * cut, steps = (STEPS + cut - 1) / cut;
  int next = first, next_step = 0;
  Source of = {};
  const auto copy_next = [&](int slot, bool weights_too, bool tokens_too) {
    const int step = next_step * cut + next % cut;
    if (next < items) {
      if (next_step == 0) of = source_of(r, next / cut, column, w, scales, INTER);
      if (step < STEPS && weights_too) copy_weights(mine + slot * SLOT, of, step);
      if (step < STEPS && tokens_too) copy_tokens(mine + slot * SLOT, of, h, step);
    }
    if (tokens_too) close_group();
    if (++next_step == steps) next_step = 0, next += TAKERS;
  };
  for (int i = 0; i < DEPTH; i++) copy_next(i, true, false);
  if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");  // H is there from here on
  next = first, next_step = 0;
  for (int i = 0; i < DEPTH; i++) copy_next(i, false, true);
  int slot = 0;
  for (int item = first; item < items; item += TAKERS) {
    const int part = item % cut, tile = item / cut, expert = r.expert[tile], many = r.many[tile];
    float start[SIDES][2] = {}, weight[2] = {1.0f, 1.0f};  // biases, weights of pairs 2 t and 2 t + 1
    if (BIAS && part == 0)
#pragma unroll
      for (int i = 0; i < 2 * SIDES; i++) start[i / 2][i % 2] = value(bias[(long long)expert * D + row_of_w(column, 8 * i + g)]);
    if (!WEIGHT_FIRST)
#pragma unroll
      for (int i = 0; i < 2; i++) weight[i] = weights[r.order[r.first[tile] + min(2 * t + i, many - 1)]];
    float sums[SIDES][4] = {}, of_columns[EIGHTS][SIDES][2] = {};
    for (int i = 0; i < steps; i++) {
      const int step = i * cut + part;
      wait_for_oldest();
      __syncwarp();
      if (step < STEPS && IN_COLUMNS)
        add_step_of_columns(of_columns, mine + slot * SLOT, columns, column, step, many, make_columns_of(mine + slot * SLOT, columns, many));
      else if (step < STEPS) add_step(sums, mine + slot * SLOT, column, step, many);
      __syncwarp();
      copy_next(slot, true, true);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    if (IN_COLUMNS) add_up(sums, of_columns);
    // A lane has the sums of pairs 2 t and 2 t + 1. One pair after another, for two of them may be of one token.
#pragma unroll
    for (int place = 0; place < OF_TILE; place++) {
      if (place && place >= many) break;
      __syncwarp();
      if (t != place / 2) continue;
      const int token = r.order[r.first[tile] + place] / TOPK;
#pragma unroll
      for (int i = 0; i < SIDES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = 16 * i + 8 * half + g;
          const float sum = sums[i][2 * half + place % 2] * whole_scale(scales, expert, row_of_w(column, at)) + start[i][half];
          own[token * ROWS + at] += weight[place % 2] * sum;
        }
    }
  }
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
  __syncthreads();
  for (int i = threadIdx.x; i < values; i += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < WARPS; v++) sum += partial[v * values + i];
    const int owner = i / each, place = rank * each + i - owner * each;
    if (PARTS == 1) {
      store(y, i, column, ldy, sum);
    } else if (owner == rank) {
      received[place] = sum;
    } else {
      send_sum(others, all_sums, owner, place, __float_as_uint(sum));
    }
  }
  if (PARTS == 1) return;
  wait_for_sums(all_sums);
  for (int i = threadIdx.x; i < each && rank * each + i < values; i += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += received[p * each + i];
    store(y, rank * each + i, column, ldy, sum);
  }
}
#endif
