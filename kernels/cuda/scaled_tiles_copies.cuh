// Part of scaled_tiles.cu, whose constants it uses: how X, W and scales come to shared memory.
struct Place {  // of a thread block in its cluster: which part of what is shared it reads
  int rank, w_part, x_part;
  __device__ __forceinline__ int part() const { return rank / SHARING; }  // of K
  // The thread block that this lane tells what its warp has read; -1 for none. All are told that share W or X with it.
  __device__ __forceinline__ int reader(int lane) const {
    const int of_w = rank - w_part;
    if (lane < SHARE_W) return of_w + lane;
    int other = lane - SHARE_W;
    if (other >= SHARE_X - 1) return -1;
    other += other >= x_part;
    return rank + (other - x_part) * SHARE_W;
  }
};
__device__ __forceinline__ Place place() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  const int rank = block % BLOCKS;
  return {rank, rank % SHARE_W, rank / SHARE_W % SHARE_X};
}
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
struct Work {  // what a thread block does: steps of K, from the first to before the last, of every so manieth tile
  Place me;
  int first, last, steps, token_tiles, tiles, clusters;
  __device__ __forceinline__ Work(const Place& me, int m) : me(me) {
    first = me.part() * STEPS / PARTS, last = (me.part() + 1) * STEPS / PARTS, steps = last - first;
    asm volatile("" : "+r"(steps));  // with a known number of them the compiler has each product wait for the one before
    token_tiles = (m + TOKENS * SHARE_W - 1) / (TOKENS * SHARE_W);
    tiles = token_tiles * ((N + ROWS * SHARE_X - 1) / (ROWS * SHARE_X)), clusters = gridDim.x / BLOCKS;
  }
  __device__ __forceinline__ int token_of(int tile) const { return (tile % token_tiles * SHARE_W + me.w_part) * TOKENS; }
  __device__ __forceinline__ int row_of(int tile) const { return (tile / token_tiles * SHARE_X + me.x_part) * ROWS; }
};
// copy(step, first token, first row, slot, its barrier of `loaded`), of all tiles, each when its slot is free.
template <class Copy>
__device__ __forceinline__ void each_step(const Work& mine, u32 free, u32 loaded, Copy copy) {
  int slot = 0, phase = 1;  // of `free`, which is so at first
#pragma unroll 1
  for (int tile = blockIdx.x / BLOCKS; tile < mine.tiles; tile += mine.clusters) {
    const int token = mine.token_of(tile), row = mine.row_of(tile);
#pragma unroll 1
    for (int i = mine.first; i < mine.last; i++) {
      wait_for(free + 8 * slot, phase);
      copy(i, token, row, slot, loaded + 8 * slot);
      if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
  }
  // All that others tell this thread block is there before it leaves.
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++) {
    wait_for(free + 8 * slot, phase);
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
}
// read(first token, first row), of each tile when what was read of the tile before is free.
template <class Read>
__device__ __forceinline__ void each_tile(const Work& mine, u32 free, Read read) {
  int phase = 1;
#pragma unroll 1
  for (int tile = blockIdx.x / BLOCKS; tile < mine.tiles; tile += mine.clusters, phase ^= 1) {
    wait_for(free, phase);
    read(mine.token_of(tile), mine.row_of(tile));
  }
}
__device__ __forceinline__ void ask_for_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void announce(u32 barrier, u32 bytes) {  // that come, from whoever reads them
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A box of a map, from this row and k on, to this thread block, or to all in `blocks`, a bit each.
__device__ __forceinline__ void copy_box(u32 to, const void* map, int k, int row, u32 barrier, bool shared, u32 blocks) {
  if (shared)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((unsigned short)blocks) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_w(const Place& me, u32 to, const void* map, int k, int row, u32 barrier) {
  constexpr int PART = ROWS / SHARE_W;
  announce(barrier, W_BYTES);
  copy_box(to + me.w_part * PART * 128, map, k, row + me.w_part * PART, barrier, SHARE_W > 1,
           ((1u << SHARE_W) - 1) << (me.rank - me.w_part));
}
__device__ __forceinline__ void copy_x(const Place& me, u32 to, const void* map, int k, int token, u32 barrier) {
  constexpr int PART = TOKENS / SHARE_X;
  u32 blocks = 0;
#pragma unroll
  for (int i = 0; i < SHARE_X; i++) blocks |= 1u << (i * SHARE_W);
  announce(barrier, X_BYTES);
  copy_box(to + me.x_part * PART * 128, map, k, token + me.x_part * PART, barrier, SHARE_X > 1,
           blocks << (me.rank - me.x_part * SHARE_W));
}
// One warp: the scales of a step; of tokens past the last those of the last.
__device__ __forceinline__ void copy_scales(u32 to, const float* sx, const float* sw, int step, int token, int row, int m,
                                            int ldsx, int ldsw, int lane, u32 barrier) {
  auto copy = [](u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  };
  const int next_token = BY_TOKEN ? ldsx : 1, next_step = BY_TOKEN ? 1 : ldsx;  // how far their scales of X are
  const float* of_x = sx + (long long)step * next_step;
#pragma unroll
  for (int i = 0; i < TOKENS; i += 32)
    copy(to + (i + lane) * 4, of_x + (long long)min(token + i + lane, m - 1) * next_token);
  if (lane < 2) copy(to + (TOKENS + lane) * 4, sw + (long long)min(row / 128 + lane, (N - 1) / 128) * ldsw + step);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
