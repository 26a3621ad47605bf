// Y = (X sx) (W sw)^T + bias with 8-bit X and W, for many tokens, on sm_90.
//
// A thread block multiplies tiles of TOKENS tokens by ROWS rows of W. One of its warp groups copies: a warp asks for X, one
// for W (the tensor memory accelerator, by maps of both that the launch brings), one for scales of blocks, and one reads what
// results need but sums. The others multiply a step of 128 of K as it comes (wgmma), 64 tokens each, and share the rows where
// HALVES is 2. DEPTH steps are on their way.
//
// X and W are read from the L2 cache many times. So the thread blocks of a cluster can share what they read: SHARE_W of them
// have the same rows of W, other tokens, and each reads a part of those rows for all of them; SHARE_X of them have the same
// tokens, in the same way. Where tiles are few, PARTS of them take a part of K each; their sums go to those that add them up,
// in the order of the parts, so results are bitwise equal from run to run. Else the clusters go on from tile to tile.
//
// Where PROMOTED is 1, a step's sums are added up in fp32, for the tensor core adds products of e4m3 with fewer bits than that
// (int8 adds up in int32, exactly). Scales, SCALES, and zero points, ZERO, are those of scaled_one_shot.cu.
//
// scaled_tiles.py defines N (a multiple of 2), K (of 16), ROWS, TOKENS (a multiple of 64), GROUPS (of 64 tokens), HALVES,
// SHARE_W, SHARE_X, PARTS, DEPTH, SCALES (no BLOCK of int8), BY_TOKEN, PROMOTED (0 of int8), INT8, ZERO, BIAS, NAME,
// CLUSTER, OF_ZERO and ITS_ZERO (its parameters, and what passes them on) and, in place of OF_THIS_TYPE, `mma`, `pair_of`,
// `value`.
// NVRTC compiles this without any header but its parts. PTX ISA 8.0; operands and sums lie as wgmma.mma_async wants them:
// both operands K-major, rows of 128 bytes, swizzled by 128.
#include "scaled_sums.cuh"  // scaled_tiles.py puts its text here

constexpr int STEPS = (K + 127) / 128;
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;       // of a step
constexpr int S_BYTES = SCALES == BLOCK ? TOKENS * 4 + 16 : 0;    // a scale for each token, then two of W
constexpr int MATH = GROUPS * HALVES, MATH_THREADS = 128 * MATH;  // warp groups that multiply; one more copies
constexpr int MINE = ROWS / HALVES;                               // rows of W that a warp group multiplies
constexpr int SHARING = SHARE_W * SHARE_X, BLOCKS = SHARING * PARTS;  // thread blocks of a cluster
constexpr int READERS = 4 * MATH * (SHARE_W + SHARE_X - 1);       // warps that read what a thread block has asked for
constexpr int UNITS = TOKENS / 16 * (ROWS / 8);                   // of sums, that a thread block sends
constexpr int EACH = (UNITS + PARTS - 1) / PARTS;                 // units that a thread block adds up
constexpr int UNIT_BYTES = 512;                                   // 128 sums, in the order of their lanes
constexpr bool HAS_EPILOGUE = SCALES != BLOCK || BIAS;            // results need more than sums

OF_THIS_TYPE

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {  // the same address in another block of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void expect(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
               ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(u32 barrier, u32 phase) {  // what other thread blocks did before is seen
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; "
               "@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}
// Relaxed, for what threads have read before has come to their registers; a release waits for all of the device's memory.
__device__ __forceinline__ void cluster_meets() {
  if (BLOCKS > 1)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
  else
    asm volatile("bar.sync 0;" ::: "memory");
}
// A matrix in shared memory as wgmma describes it: address / 16, and above it the bits for "rows of eight are 1024 bytes
// apart" (64 << 32), "the leading dimension is not used" (1 << 16), "swizzled by 128" (1 << 62).
__device__ __forceinline__ u64 operand(u32 at) { return (u64)((at >> 4) & 0x3fff) | 0x4000004000010000ull; }

// sums (+)= a step of X and W: four products of 32 of K. afresh: what the sums were does not count.
__device__ __forceinline__ void multiply(Sum* sums, u32 x, u32 w, bool afresh) {
  u64 a = operand(x), b = operand(w);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) mma(sums, a + 2 * i, b + 2 * i, i > 0 || !afresh);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// The compiler must not move reads of sums that a product writes to before the wait for it.
__device__ __forceinline__ void settle(Sum* sums) {
#pragma unroll
  for (int i = 0; i < MINE / 2; i++) asm volatile("" : "+" OF_SUM(sums[i])::"memory");
}

#include "scaled_tiles_copies.cuh"   // scaled_tiles.py puts its text here
#include "scaled_tiles_results.cuh"  // and its

struct Scales {  // of X and W together, of a thread's two tokens; after an edge of blocks of W those of the next one
  float low, high, low_next, high_next;
  __device__ __forceinline__ void read(const char* at, int token) {
    if (SCALES != BLOCK) return;
    const float* scale = (const float*)at;
    low = scale[token], high = scale[token + 8];
    low_next = low * scale[TOKENS + 1], high_next = high * scale[TOKENS + 1];
    low *= scale[TOKENS], high *= scale[TOKENS];
  }
};
// sums += step, scaled. Of eight rows a thread has two sums of one token, and two of the token eight further; from unit `edge`
// of rows on the next scale of W holds.
__device__ __forceinline__ void promote(Sum* sums, Sum* step, const Scales& by, int edge) {
  settle(step);
#pragma unroll
  for (int u = 0; u < MINE / 8; u++) {
    const bool now = 128 % ROWS == 0 || u < edge;
    const float a = SCALES != BLOCK ? 1.f : now ? by.low : by.low_next, b = SCALES != BLOCK ? 1.f : now ? by.high : by.high_next;
    sums[u * 4] += step[u * 4] * a, sums[u * 4 + 1] += step[u * 4 + 1] * a;
    sums[u * 4 + 2] += step[u * 4 + 2] * b, sums[u * 4 + 3] += step[u * 4 + 3] * b;
  }
}

// What a warp group adds up of a tile; slot and phase: of the next step, where it is and how often the ring went round.
struct Ring {
  u32 loaded, ready;  // the barriers; of `ready` the one in the thread block that this lane tells
  bool tells;
  int slot, phase;
  // This warp has read the slot. (Of the scope of the cluster, which nothing here needs, each would take a step's time.)
  __device__ __forceinline__ void release(int of) {
    if (tells) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ready + 8 * of) : "memory");
  }
  __device__ __forceinline__ void next() {
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
};
__device__ __forceinline__ void add_up(Sum* sums, Ring& ring, u32 x, u32 w, const char* scales, int token, int edge, int steps) {
#pragma unroll
  for (int i = 0; i < MINE / 2; i++) sums[i] = 0;
  if constexpr (!PROMOTED) {
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_for(ring.loaded + 8 * ring.slot, ring.phase);
      multiply(sums, x + ring.slot * X_BYTES, w + ring.slot * W_BYTES, false);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0) ring.release(before);
      before = ring.slot, ring.next();
    }
    settle(sums);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(sums);
    ring.release(before);
  } else {
    Sum one[MINE / 2], two[MINE / 2];  // the sums of a step, by turns: one is added up while the next is multiplied
#pragma unroll
    for (int i = 0; i < MINE / 2; i++) one[i] = two[i] = 0;
    Scales of_one, of_two;
    int before = 0;
    auto turn = [&](int i, Sum* now, Sum* last, Scales& of_now, const Scales& of_last) {
      wait_for(ring.loaded + 8 * ring.slot, ring.phase);
      multiply(now, x + ring.slot * X_BYTES, w + ring.slot * W_BYTES, true);
      of_now.read(scales + ring.slot * S_BYTES, token);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0) ring.release(before), promote(sums, last, of_last, edge);
      before = ring.slot, ring.next();
    };
    int i = 0;
#pragma unroll 1
    for (; i + 1 < steps; i += 2) {
      turn(i, one, two, of_one, of_two);
      turn(i + 1, two, one, of_two, of_one);
    }
    if (i < steps) {
      turn(i, one, two, of_one, of_two);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      promote(sums, one, of_one, edge);
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      promote(sums, two, of_two, edge);
    }
    ring.release(before);
  }
}

struct __align__(64) Map {  // CUtensorMap of cuda.h: of a matrix of bytes, for boxes of 128 bytes of so many rows
  char opaque[128];
};

extern "C" __global__ void CLUSTER __launch_bounds__(MATH_THREADS + 128, 1)
    NAME(const __grid_constant__ Map x, const __grid_constant__ Map w,
#if BIAS
         const char* bias,
#endif
         const float* sx, const float* sw OF_ZERO, char* y, int m, int ldsx, int ldsw) {
#if !BIAS
  const char* bias = nullptr;
#endif
  extern __shared__ __align__(1024) char memory[];
  const u32 ws = (u32)__cvta_generic_to_shared(memory), xs = ws + DEPTH * W_BYTES, ss = xs + DEPTH * X_BYTES;
  const u32 my_epilogue = ss + (DEPTH * S_BYTES + 127) / 128 * 128;
  Epilogue* const epilogue = (Epilogue*)(memory + (my_epilogue - ws));
  const u32 loaded = my_epilogue + (HAS_EPILOGUE ? (u32)sizeof(Epilogue) : 0), free = loaded + 8 * DEPTH;  // barriers
  const u32 all_sums = free + 8 * DEPTH, epilogue_there = all_sums + 8, epilogue_free = epilogue_there + 8;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = thread / 128;
  const Place me = place();
  const int part = me.part();
  const Work mine = {me, m};

  if (thread == MATH_THREADS) ask_for_map(&x), ask_for_map(&w);
  if (thread == 0) {
    for (int i = 0; i < DEPTH; i++) expect(loaded + 8 * i, 2 + (SCALES == BLOCK ? 32 : 0)), expect(free + 8 * i, READERS);
    if (HAS_EPILOGUE) expect(epilogue_there, 32), expect(epilogue_free, MATH_THREADS);
    if (PARTS > 1) {
      const int units = min(max(UNITS - part * EACH, 0), EACH);
      expect(all_sums, 1 + MATH_THREADS);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   ::"r"(all_sums), "r"(units * (PARTS - 1) * UNIT_BYTES) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  cluster_meets();

  if (group == MATH) {
    if (MATH == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 4 * MATH && lane == 0)
      each_step(mine, free, loaded, [&](int i, int token, int, int slot, u32 barrier) {
        copy_x(me, xs + slot * X_BYTES, &x, i * 128, token, barrier);
      });
    if (warp == 4 * MATH + 1 && lane == 0)
      each_step(mine, free, loaded, [&](int i, int, int row, int slot, u32 barrier) {
        copy_w(me, ws + slot * W_BYTES, &w, i * 128, row, barrier);
      });
    if (SCALES == BLOCK && warp == 4 * MATH + 2)
      each_step(mine, free, loaded, [&](int i, int token, int row, int slot, u32 barrier) {
        copy_scales(ss + slot * S_BYTES, sx, sw, i, token, row, m, ldsx, ldsw, lane, barrier);
      });
    if (HAS_EPILOGUE && warp == 4 * MATH + 3)
      each_tile(mine, epilogue_free, [&](int token, int row) {
        epilogue->read({bias, sx, sw ITS_ZERO}, token, row, m, lane);
        arrive(epilogue_there);
      });
    __syncwarp();
  } else {
    if (MATH == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = group % HALVES, token_warp = group / HALVES * 4 + warp % 4;  // a warp has 16 of the tokens
    const int reader = me.reader(lane);
    Ring ring = {loaded, in_block(free, reader < 0 ? 0 : reader), reader >= 0, 0, 0};
    const u32 x_mine = xs + group / HALVES * 64 * 128, w_mine = ws + half * MINE * 128;
#pragma unroll 1
    for (int tile = blockIdx.x / BLOCKS; tile < mine.tiles; tile += mine.clusters) {
      const int row = mine.row_of(tile), edge = (128 - row % 128) / 8 - half * (MINE / 8);  // units before the next scale of W
      Sum sums[MINE / 2];
      add_up(sums, ring, x_mine, w_mine, memory + (ss - ws), token_warp * 16 + lane / 4, edge, mine.steps);
      // Which thread this is, and where, is asked anew: no register has room for that while products are added up.
      const int thread = thread_index(), lane = thread % 32, warp = thread / 32, group = thread / 128;
      const int half = group % HALVES, token_warp = group / HALVES * 4 + warp % 4;
      if (HAS_EPILOGUE) wait_for(epilogue_there, tile / mine.clusters & 1);
      if (PARTS == 1) {
        const int token = mine.token_of(tile), row = mine.row_of(tile);
        Results to = {y, epilogue, token, row, token + token_warp * 16 + lane / 4, m};
        to.store(sums, row + half * MINE, lane);
        if (HAS_EPILOGUE) arrive(epilogue_free);
      } else {  // this is the only tile; the ring is free for sums when everybody in the cluster is done with it
        const Place me = place();
        cluster_meets();
        send(sums, me, ws, all_sums, token_warp, half, lane);
        wait_for_cluster(all_sums, 0);
        const int token = mine.token_of(tile), row = mine.row_of(tile);
        Results to = {y, epilogue, token, row, token + lane / 4, m};
        to.add(memory, row, me.part(), warp, lane);
      }
    }
  }
  if (PARTS > 1 && (group == MATH || blockIdx.x / BLOCKS >= mine.tiles)) cluster_meets();  // the one before sums are sent
}
