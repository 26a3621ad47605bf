// Y = X W^T + bias for up to 256 tokens: a thread block's part of W and X on its way at once, sums over a cluster.
//
// A thread block takes ROWS rows of W, any multiple of 8, up to TOKENS tokens, and a part of K; the PARTS thread
// blocks of a cluster take all of K. It asks for all that shared memory has room for before anything else, and
// multiplies steps of 64 of K as they come (wgmma, each of GROUPS warp groups 64 tokens x ROWS; what it reads of
// tokens past TOKENS makes no sum that is used). Sums go to the thread blocks of the cluster that add them up, each
// some units of 16 tokens x 8 rows, in the order of the parts: results are bitwise equal from run to run.
//
// one_shot.py defines N, K, ROWS, PARTS, DEPTH (steps that shared memory holds), TOKENS (a multiple of 16), GROUPS,
// BIAS, NAME, CLUSTER, and, for the type of the operands, `mma`, `pair_of` and `value`, in place of OF_THIS_TYPE below.
// NVRTC compiles it without any header, and takes no names for operands of inline PTX. sm_90, PTX ISA 8.1; the layouts
// of operands and sums are those of wgmma.mma_async for 16-bit types: both K-major, rows of 128 bytes, swizzled by 128.
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int STEPS = K / 64, MOST = (STEPS + PARTS - 1) / PARTS;    // in all; of a thread block, or one less
constexpr bool ONCE = MOST <= DEPTH;                                 // shared memory has room for all of them
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;          // of a step
constexpr int THREADS = 128 * GROUPS, WARPS = 4 * GROUPS;
constexpr int ROUND = 16 * GROUPS, ROUND_BYTES = ROUND * 128;        // rows of a step that the threads copy at a time
constexpr int W_ROUNDS = (ROWS + ROUND - 1) / ROUND, X_ROUNDS = (TOKENS + ROUND - 1) / ROUND;
constexpr int UNITS = TOKENS / 16 * (ROWS / 8);                      // of sums, that a thread block sends
constexpr int EACH = (UNITS + PARTS - 1) / PARTS;                    // units that a thread block adds up
constexpr int UNIT_BYTES = 512;                                      // 128 sums, in the order of their lanes

OF_THIS_TYPE

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {  // the same address in another block of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void copy16_if(bool there, u32 to, const char* from) {
  asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; @there cp.async.cg.shared.global [%0], [%1], 16;}"
               ::"r"(to), "l"(from), "r"((u32)there) : "memory");
}
__device__ __forceinline__ void all_here() { asm volatile("bar.sync 0;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_when_loaded(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
               ::"r"(barrier), "r"(phase) : "memory");
}
// A matrix in shared memory as wgmma describes it: address / 16, and above it the bits for "rows of eight are 1024
// bytes apart" (64 << 32), "the leading dimension is not used" (1 << 16), "swizzled by 128" (1 << 62).
__device__ __forceinline__ u64 operand(u32 at) { return (u64)((at >> 4) & 0x3fff) | 0x4000004000010000ull; }
// sums += a step of X and W: four products of 16 of K, 32 bytes of a row each.
__device__ __forceinline__ void multiply(float* sums, u32 x, u32 w) {
  u64 a = operand(x), b = operand(w);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) mma(sums, a + 2 * i, b + 2 * i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

struct Copies {  // of one thread, 16 bytes each: where they begin in a step, and where in its place in shared memory
  u64 w[W_ROUNDS], x[X_ROUNDS];
  u32 to;
  int rows, tokens;  // that there are from its first one on: no more are read, the sums of others are never stored
};
__device__ __forceinline__ void load(const Copies& my, const char* w, const char* x, u32 w_slot, u32 x_slot, int step) {
  w += step * 128, x += step * 128;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++)
    if (ROWS % ROUND == 0 || i < W_ROUNDS - 1 || threadIdx.x < ROWS % ROUND * 8)
      copy16_if(N % ROWS == 0 || i * ROUND < my.rows, w_slot + my.to + i * ROUND_BYTES, w + my.w[i]);
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++)
    if (TOKENS % ROUND == 0 || i < X_ROUNDS - 1 || threadIdx.x < TOKENS % ROUND * 8)
      copy16_if(i < X_ROUNDS - 1 || i * ROUND < my.tokens, x_slot + my.to + i * ROUND_BYTES, x + my.x[i]);
}

// With room for all: each thread waits for its own copies, step after step. No fence between the proxies: neither
// Triton nor CUTLASS has one between cp.async and wgmma, and it waits for the copies under way.
template <int STEP> __device__ __forceinline__ void multiply_from(float* sums, u32 xs, u32 ws, int steps) {
  if constexpr (STEP < MOST) {
    if (STEP < MOST - 1 || STEP < steps) {
      wait_for_all_but<MOST - 1 - STEP>();
      all_here();
      multiply(sums, xs + STEP * X_BYTES, ws + STEP * W_BYTES);
    }
    multiply_from<STEP + 1>(sums, xs, ws, steps);
  }
}

__device__ __forceinline__ void store(char* y, const char* bias, int token, int row, int m, float first, float second) {
  if (row >= N || token >= m) return;
#if BIAS
  first += value(((const unsigned short*)bias)[row]), second += value(((const unsigned short*)bias)[row + 1]);
#endif
  *(u32*)(y + ((u64)token * N + row) * 2) = pair_of(first, second);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    NAME(const char* x, const char* w,
#if BIAS
         const char* bias,
#endif
         char* y, int m, int ldx, int ldw) {
#if !BIAS
  const char* bias = nullptr;
#endif
  extern __shared__ __align__(1024) char memory[];
  const u32 ws = (u32)__cvta_generic_to_shared(memory), xs = ws + DEPTH * W_BYTES;
  const u32 others = xs + DEPTH * X_BYTES;                                   // the sums that come to this thread block
  const u32 all_sums = others + (PARTS > 1 ? PARTS * EACH * UNIT_BYTES : 0), loaded = all_sums + 8;  // barriers
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, x_of_group = thread / 128 * 64 * 128;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first_step = part * STEPS / PARTS, steps = (part + 1) * STEPS / PARTS - first_step;

  const int first_token = blockIdx.y * TOKENS;
  w += ((u64)tile * ROWS * ldw + first_step * 64) * 2, x += ((u64)first_token * ldx + first_step * 64) * 2;
  y += (u64)first_token * N * 2, m = min(m - first_token, TOKENS);  // from here on the rows of X of this tile alone
  const int from = thread / 8, chunk = thread % 8;
  Copies my;
  my.to = from * 128 + ((chunk ^ (from & 7)) << 4);
  my.rows = N - tile * ROWS - from, my.tokens = m - from;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++) my.w[i] = (u64)(from + i * ROUND) * ldw * 2 + chunk * 16;
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++) my.x[i] = (u64)min(from + i * ROUND, m - 1) * ldx * 2 + chunk * 16;  // m may be small

  if constexpr (ONCE) {
#pragma unroll
    for (int i = 0; i < MOST; i++) {
      if (i < MOST - 1 || i < steps) load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, i);
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  } else {
    load(my, w, x, ws, xs, 0);
  }
  if (thread == 0) {
    if (!ONCE)
      for (int i = 0; i < DEPTH; i++) expect(loaded + 8 * i, THREADS);
    if (PARTS > 1) {
      const int units = min(max(UNITS - part * EACH, 0), EACH);
      expect(all_sums, 1 + THREADS);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   ::"r"(all_sums), "r"(units * (PARTS - 1) * UNIT_BYTES) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (PARTS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  if (!ONCE) {
    all_here();
    arrive_when_loaded(loaded);
#pragma unroll 1
    for (int i = 1; i < DEPTH; i++) {
      load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, i);
      arrive_when_loaded(loaded + 8 * i);
    }
  }
  u32 owners[ROWS / 8], places[ROWS / 8];  // whose units this thread's sums are of, and their addresses there
  if (PARTS > 1) {
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
      int unit = warp * (ROWS / 8) + i, owner = unit / EACH;
      owners[i] = in_block(others, owner);
      places[i] = owners[i] + (part * EACH + unit - owner * EACH) * UNIT_BYTES + lane * 16;
      asm volatile("" : "+r"(owners[i]), "+r"(places[i]));  // now, while nothing is there to be multiplied
    }
  }

  float sums[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.f;
  if constexpr (ONCE) {
    multiply_from<0>(sums, xs + x_of_group, ws, steps);
  } else {
    // `slot` has the next step. `free` is two slots behind: the product of what was there has ended, as one product
    // alone is on its way when the next step is waited for
    int slot = 0, phase = 0, free = DEPTH - 2;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_for(loaded + 8 * slot, phase);
      multiply(sums, xs + x_of_group + slot * X_BYTES, ws + slot * W_BYTES);
      if (i >= 2 && i - 2 + DEPTH < steps) {
        all_here();  // and done with that step
        load(my, w, x, ws + free * W_BYTES, xs + free * X_BYTES, i - 2 + DEPTH);
        arrive_when_loaded(loaded + 8 * free);
      }
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (++slot == DEPTH) slot = 0, phase ^= 1;
      if (++free == DEPTH) free = 0;
    }
  }
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");

  // A thread's four sums of a unit: two neighbouring rows of a token, and of the token eight further
  const int token = lane / 4, row = tile * ROWS + lane % 4 * 2;
  if (PARTS == 1) {
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++)
      store(y, bias, warp * 16 + i % 2 * 8 + token, row + i / 2 * 8, m, sums[i * 2], sums[i * 2 + 1]);
    return;
  }
  if (warp < TOKENS / 16) {
    // Its own sums do not take the way over the cluster: `here` is the cluster's name for what is `others` in this block
    const u32 here = in_block(others, part);
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
      if (owners[i] == here)
        asm volatile("st.shared::cta.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(places[i] - here + others), "f"(sums[i * 4]),
                     "f"(sums[i * 4 + 1]), "f"(sums[i * 4 + 2]), "f"(sums[i * 4 + 3]) : "memory");
      else
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(places[i]), "f"(sums[i * 4]), "f"(sums[i * 4 + 1]), "f"(sums[i * 4 + 2]),
                     "f"(sums[i * 4 + 3]), "r"(owners[i] + (all_sums - others)) : "memory");
  }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(all_sums) : "memory");
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
               "@!done bra again;}" ::"r"(all_sums) : "memory");
  const float4* received = (const float4*)(memory + (others - ws)) + lane;
  for (int i = warp; i < EACH && part * EACH + i < UNITS; i += WARPS) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      float4 one = received[(p * EACH + i) * (UNIT_BYTES / 16)];
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const int unit = part * EACH + i, tokens = unit / (ROWS / 8) * 16 + token, rows = row + unit % (ROWS / 8) * 8;
    store(y, bias, tokens, rows, m, sum.x, sum.y);
    store(y, bias, tokens + 8, rows, m, sum.z, sum.w);
  }
}
