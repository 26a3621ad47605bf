// Y = X W^T + bias for up to 64 tokens, on sm_90: a program's part of W and of X on its way at once, sums over a cluster.
//
// A program takes ROWS rows of W, any multiple of 8, and a part of K; the PARTS programs of a cluster take all of K. It
// asks for all that shared memory has room for before anything else, multiplies blocks of 64 of K as they come
// (wgmma, 64 tokens x ROWS), and sends its sums to the programs of the cluster that add them up, each some units of
// 8 tokens x 8 rows, in the order of the parts: results are bitwise equal from run to run.
//
// one_shot.py defines N, K, ROWS, PARTS, DEPTH (blocks of 64 of K in shared memory), TOKENS (what M is padded to, a
// multiple of 16; the sums of others are never sent), BIAS and HALF (fp16, not bf16), and writes the instruction for
// ROWS rows in place of MMA below. Compiled by NVRTC, without any header. PTX ISA 8.0; the layouts of operands and sums
// in it are those of wgmma.mma_async for 16-bit types, K-major, with 128-byte swizzle.
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCKS = K / 64, MOST = (BLOCKS + PARTS - 1) / PARTS;  // in all; of a program
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;          // of a block
constexpr int W_ROUNDS = (ROWS + 15) / 16, X_ROUNDS = TOKENS / 16;   // of loads: 128 threads bring 16 rows of a block
constexpr int LIVE = TOKENS / 16 * (ROWS / 8);                       // units that a program's sums are sent in
constexpr int EACH = (LIVE + PARTS - 1) / PARTS;                     // units that a program adds up
constexpr int UNIT = 512;                                            // bytes: 128 sums, in the order of the lanes that have them
constexpr bool ONCE = MOST <= DEPTH;
constexpr int FIRST = ONCE ? MOST : DEPTH;

MMA

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 of_program(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
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
__device__ __forceinline__ void all_here() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ u64 operand(u32 at) { return (u64)((at >> 4) & 0x3fff) | 0x4000004000010000ull; }
__device__ __forceinline__ void multiply(float* sums, u32 x, u32 w) {
  u64 a = operand(x), b = operand(w);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) mma(sums, a + 2 * i, b + 2 * i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_done(float* sums) {
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

struct Copies {  // what one thread copies of each block, 16 bytes a time: from bytes behind where all begin, to where
  u32 from[W_ROUNDS > 4 ? W_ROUNDS : 4], to[W_ROUNDS > 4 ? W_ROUNDS : 4];
};
__device__ __forceinline__ void load_w(const Copies& my, const char* w, u32 slot, int block) {
  w += block * 128;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++)
    if (ROWS % 16 == 0 || i < W_ROUNDS - 1 || threadIdx.x < 64) copy16(slot + my.to[0] + i * 2048, w + my.from[i]);
}
__device__ __forceinline__ void load_x(const Copies& my, const char* x, u32 slot, int block) {
  x += block * 128;
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++) copy16(slot + my.to[0] + i * 2048, x + my.from[i]);
}

__device__ __forceinline__ void store(char* y, const char* bias, int token, int row, int m, float first, float second) {
  if (row >= N || token >= m) return;
#if BIAS
  first += value(((const unsigned short*)bias)[row]), second += value(((const unsigned short*)bias)[row + 1]);
#endif
  *(u32*)(y + ((u64)token * N + row) * 2) = pair_of(first, second);
}

extern "C" __global__ void CLUSTER __launch_bounds__(128, 1)
    one_shot(const char* x, const char* w,
#if BIAS
             const char* bias,
#endif
             char* y, int m, int ldx, int ldw) {
#if !BIAS
  const char* bias = nullptr;
#endif
  extern __shared__ __align__(1024) char memory[];
  const u32 ws = shared_address(memory), xs = ws + DEPTH * W_BYTES, slots = xs + DEPTH * X_BYTES;
  const u32 loaded = slots + (PARTS > 1 ? PARTS * EACH * UNIT : 0), all_sums = loaded + 8 * FIRST;  // barriers
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first_block = part * BLOCKS / PARTS, steps = (part + 1) * BLOCKS / PARTS - first_block;

  // rows past the last one read that one again: their sums are never stored
  w += ((u64)tile * ROWS * ldw + first_block * 64) * 2, x += first_block * 128;
  Copies my_w, my_x;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++) {
    int row = thread / 8 + i * 16;
    my_w.from[i] = min(row, N - 1 - tile * ROWS) * ldw * 2 + thread % 8 * 16;
  }
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++) {
    int token = thread / 8 + i * 16;
    my_x.from[i] = min(token, m - 1) * ldx * 2 + thread % 8 * 16;
  }
  my_w.to[0] = my_x.to[0] = thread / 8 * 128 + (((thread % 8) ^ (thread / 8 & 7)) << 4);
#pragma unroll
  for (int i = 0; i < BEFORE; i++) {
    load_w(my_w, w, ws + i * W_BYTES, i);
    load_x(my_x, x, xs + i * X_BYTES, i);
  }
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < FIRST; i++) expect(loaded + 8 * i, 128);
    if (PARTS > 1) {
      int units = min(max(LIVE - part * EACH, 0), EACH);
      expect(all_sums, 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(all_sums), "r"(units * PARTS * UNIT)
                   : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  all_here();
  if (PARTS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#pragma unroll
  for (int i = 0; i < BEFORE; i++) arrive_when_loaded(loaded + 8 * i);
#if ROLL
#pragma unroll 1
#else
#pragma unroll
#endif
  for (int i = BEFORE; i < FIRST; i++)
    if (i < MOST - 1 || i < steps) {
      load_w(my_w, w, ws + i * W_BYTES, i);
      load_x(my_x, x, xs + i * X_BYTES, i);
      arrive_when_loaded(loaded + 8 * i);
    }
  u32 owners[ROWS / 8], places[ROWS / 8];
  if (PARTS > 1) {
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
      int unit = warp * (ROWS / 8) + i, owner = unit / EACH;
      owners[i] = of_program(slots, owner);
      places[i] = owners[i] + (part * EACH + unit - owner * EACH) * UNIT + lane * 16;
      asm volatile("" : "+r"(owners[i]), "+r"(places[i]));
    }
  }

  float sums[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.f;
  if constexpr (ONCE) {
#if ROLL
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int i = 0; i < MOST; i++)
      if (i < MOST - 1 || i < steps) {
        wait_for(loaded + 8 * i, 0);
        multiply(sums, xs + i * X_BYTES, ws + i * W_BYTES);
      }
  } else {
    int slot = 0, phase = 0, free = DEPTH - 2;  // into free goes the block that comes next
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_for(loaded + 8 * slot, phase);
      multiply(sums, xs + slot * X_BYTES, ws + slot * W_BYTES);
      if (i >= 2 && i - 2 + DEPTH < steps) {
        all_here();  // and have done with the block before the last one
        load_w(my_w, w, ws + free * W_BYTES, i - 2 + DEPTH);
        load_x(my_x, x, xs + free * X_BYTES, i - 2 + DEPTH);
        arrive_when_loaded(loaded + 8 * free);
      }
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (++slot == DEPTH) slot = 0, phase ^= 1;
      if (++free == DEPTH) free = 0;
    }
  }
#if WAIT
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
#endif
  products_done(sums);

  const int group = lane / 4, pair = lane % 4;  // of lanes with one token's sums; of rows in it
  if (PARTS > 1) {
#if !WAIT
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to
#endif
    if (warp < TOKENS / 16) {
#pragma unroll
      for (int i = 0; i < ROWS / 8; i++) {
#if EXCH == 1
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(places[i]), "f"(sums[i * 4]), "f"(sums[i * 4 + 1]), "f"(sums[i * 4 + 2]), "f"(sums[i * 4 + 3]), "r"(owners[i] + (all_sums - slots)) : "memory");
#else
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(places[i]), "f"(sums[i * 4]), "f"(sums[i * 4 + 1]), "f"(sums[i * 4 + 2]), "f"(sums[i * 4 + 3]) : "memory");
#endif
      }
    }
#if EXCH == 1
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
                 "@!done bra again;}" ::"r"(all_sums) : "memory");
#else
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    const float* from = (const float*)(memory + (slots - ws)) + lane * 4;
    for (int i = warp; i < EACH; i += 4) {
      int unit = part * EACH + i;
      if (unit >= LIVE) break;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        float4 one = *(const float4*)(from + (p * EACH + i) * 128);
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      int token = unit / (ROWS / 8) * 16 + group, row = tile * ROWS + unit % (ROWS / 8) * 8 + 2 * pair;
      store(y, bias, token, row, m, sum.x, sum.y);
      store(y, bias, token + 8, row, m, sum.z, sum.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++)
      store(y, bias, warp * 16 + i % 2 * 8 + group, tile * ROWS + i / 2 * 8 + 2 * pair, m, sums[i * 2], sums[i * 2 + 1]);
  }
}
