// y = x w^T for 64 tokens, N x K weights in bf16: a program's part of W and X on its way at once, sums over a cluster.
// one_shot.py defines N, K, ROWS (of W a program, a multiple of 8), PARTS (of K, the programs of a cluster), DEPTH
// (blocks of 64 of K in shared memory), LOADERS (warps that do nothing but load W; 0: all load) and READ_X (0: to see
// what X costs; the result is wrong), and writes `mma`, the instruction for ROWS rows, in place of MMA below.
#include <cuda_bf16.h>
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TOKENS = 64, BLOCKS = K / 64, MOST = (BLOCKS + PARTS - 1) / PARTS;
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;        // of a block
constexpr int THREADS = 128 + 32 * LOADERS;
constexpr int ROUND = LOADERS ? LOADERS * 4 : 16;                  // rows of W that one round of loads brings
constexpr int ROUNDS = (ROWS + ROUND - 1) / ROUND;
constexpr int EACH = (ROWS + PARTS - 1) / PARTS;                   // units of 64 sums that a program adds up; ROWS in all
constexpr bool ONCE = MOST <= DEPTH;

MMA

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 of_program(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
               ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void arrive_when_loaded(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
template <int LEFT> __device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void seen_by_tensor_core() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// K-major, rows of 128 bytes swizzled by 128: groups of 8 rows are 1024 bytes apart
__device__ __forceinline__ u64 operand(u32 at) { return (u64)((at >> 4) & 0x3fff) | 0x4000004000010000ull; }

struct Copies {  // what one thread loads of each block
  const char* from[ROUNDS > 4 ? ROUNDS : 4];
  u32 to[ROUNDS > 4 ? ROUNDS : 4];
};
__device__ __forceinline__ void load_w(const Copies& w, int first, u32 slot, int block) {
#pragma unroll
  for (int i = 0; i < ROUNDS; i++)
    if (ROWS % ROUND == 0 || first + i * ROUND < ROWS) copy16(slot + w.to[i], w.from[i] + block * 128);
}
__device__ __forceinline__ void load_x(const Copies& x, u32 slot, int block) {
#pragma unroll
  for (int i = 0; i < 4; i++) copy16(slot + x.to[i], x.from[i] + block * 128);
}
__device__ __forceinline__ void multiply(float* sums, u32 x, u32 w) {
  u64 a = operand(x), b = operand(w);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) mma(sums, a + 2 * i, b + 2 * i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int STEP> __device__ __forceinline__ void multiply_from(float* sums, u32 xs, u32 ws, int steps) {
  if constexpr (STEP < MOST) {
    if (STEP < MOST - 1 || STEP < steps) {
      wait_for_all_but<MOST - 1 - STEP>();
      seen_by_tensor_core();
      asm volatile("bar.sync 1, 128;" ::: "memory");
      multiply(sums, xs + STEP * X_BYTES, ws + STEP * W_BYTES);
    }
    multiply_from<STEP + 1>(sums, xs, ws, steps);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) one_shot(const char* x, const char* w, __nv_bfloat16* y) {
  extern __shared__ __align__(1024) char memory[];
  const u32 ws = shared_address(memory), xs = ws + DEPTH * W_BYTES, slots = xs + DEPTH * X_BYTES;
  const u32 barriers = slots + (PARTS > 1 ? PARTS * EACH * 256 : 0), all_sums = barriers + 8 * DEPTH;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first_block = part * BLOCKS / PARTS, steps = (part + 1) * BLOCKS / PARTS - first_block;

  // where this thread's copies come from and go to; rows past N read the last one
  const int mine = LOADERS ? thread - 128 : thread, first_row = mine / 8;
  Copies my_w, my_x;
  if (!LOADERS || warp >= 4) {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      int row = first_row + i * ROUND, there = min(tile * ROWS + row, N - 1);
      my_w.from[i] = w + ((size_t)there * K + first_block * 64 + (mine % 8) * 8) * 2;
      my_w.to[i] = row * 128 + (((mine % 8) ^ (row & 7)) << 4);
    }
  }
  if (warp < 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = thread / 8 + i * 16;
      my_x.from[i] = x + ((size_t)token * K + first_block * 64 + (thread % 8) * 8) * 2;
      my_x.to[i] = token * 128 + (((thread % 8) ^ (token & 7)) << 4);
    }
  }

#if LOADERS
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + 8 * i), "r"(READ_X ? THREADS : 32 * LOADERS));
  }
#else
#pragma unroll
  for (int i = 0; i < (ONCE ? MOST : DEPTH); i++) {
    if (i < MOST - 1 || i < steps) {
      load_w(my_w, first_row, ws + i * W_BYTES, i);
      if (READ_X) load_x(my_x, xs + i * X_BYTES, i);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
#endif
  if (thread == 0) {
    if (PARTS > 1) {
      int units = min(max(ROWS - part * EACH, 0), EACH);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(all_sums));
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(all_sums), "r"(units * PARTS * 256) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (LOADERS) __syncthreads();
  if (PARTS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");

#if LOADERS
  if (warp >= 4) {
#pragma unroll
    for (int i = 0; i < (ONCE ? MOST : DEPTH); i++)
      if (i < MOST - 1 || i < steps) {
        load_w(my_w, first_row, ws + i * W_BYTES, i);
        arrive_when_loaded(barriers + 8 * i);
      }
    if (!ONCE) {
      int slot = 0;
      for (int i = DEPTH; i < steps; i++) {
        asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");  // the block in this slot is done with
        load_w(my_w, first_row, ws + slot * W_BYTES, i);
        arrive_when_loaded(barriers + 8 * slot);
        if (++slot == DEPTH) slot = 0;
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
  if (READ_X) {
#pragma unroll
    for (int i = 0; i < (ONCE ? MOST : DEPTH); i++)
      if (i < MOST - 1 || i < steps) {
        load_x(my_x, xs + i * X_BYTES, i);
        arrive_when_loaded(barriers + 8 * i);
      }
  }
#endif
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others are there; data is not yet

  float sums[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.f;
#if !LOADERS
  if constexpr (ONCE) {
    multiply_from<0>(sums, xs, ws, steps);
  } else {
    int slot = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_for_all_but<DEPTH - 2>();
      seen_by_tensor_core();
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      asm volatile("bar.sync 1, 128;" ::: "memory");
      multiply(sums, xs + slot * X_BYTES, ws + slot * W_BYTES);
      if (i > 0) {
        if (i - 1 + DEPTH < steps) {
          int before = slot == 0 ? DEPTH - 1 : slot - 1;
          load_w(my_w, first_row, ws + before * W_BYTES, i - 1 + DEPTH);
          if (READ_X) load_x(my_x, xs + before * X_BYTES, i - 1 + DEPTH);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
      }
      if (++slot == DEPTH) slot = 0;
    }
  }
#else
  int slot = 0, phase = 0;
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    wait_for(barriers + 8 * slot, phase);
    seen_by_tensor_core();
    __syncwarp();
    multiply(sums, xs + slot * X_BYTES, ws + slot * W_BYTES);
    if (i > 0 && i - 1 + DEPTH < steps) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
      if (READ_X) {
        int before = slot == 0 ? DEPTH - 1 : slot - 1;
        load_x(my_x, xs + before * X_BYTES, i - 1 + DEPTH);
        arrive_when_loaded(barriers + 8 * before);
      }
    }
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
#endif
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");

  // a unit is 8 tokens x 8 rows, 64 sums in the order of the lanes that hold them: 256 bytes in a row
  const int group = lane / 4, pair = lane % 4;
  if (PARTS > 1) {
#pragma unroll
    for (int b = 0; b < ROWS / 8; b++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int unit = warp * (ROWS / 4) + b * 2 + h, owner = unit / EACH;
        u32 to = of_program(slots, owner) + (part * EACH + unit - owner * EACH) * 256 + lane * 8;
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                     ::"r"(to), "f"(sums[b * 4 + h * 2]), "f"(sums[b * 4 + h * 2 + 1]), "r"(of_program(all_sums, owner))
                     : "memory");
      }
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; @!done bra again;}"
                 ::"r"(all_sums) : "memory");
    const float* from = (const float*)(memory + (slots - ws));
    for (int i = warp; i < EACH; i += 4) {
      int unit = part * EACH + i;
      if (unit >= ROWS) continue;
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        float2 one = *(const float2*)(from + (p * EACH + i) * 64 + lane * 2);
        sum.x += one.x, sum.y += one.y;
      }
      int of_warp = unit % (ROWS / 4), token = unit / (ROWS / 4) * 16 + (of_warp % 2) * 8 + group;
      int row = tile * ROWS + of_warp / 2 * 8 + 2 * pair;
      if (row < N) *(__nv_bfloat162*)(y + (size_t)token * N + row) = __floats2bfloat162_rn(sum.x, sum.y);
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int b = 0; b < ROWS / 8; b++) {
        int row = tile * ROWS + b * 8 + 2 * pair, token = warp * 16 + h * 8 + group;
        if (row < N) *(__nv_bfloat162*)(y + (size_t)token * N + row) = __floats2bfloat162_rn(sums[b * 4 + h * 2], sums[b * 4 + h * 2 + 1]);
      }
  }
}
