// Y = (X sx) (W sw)^T + bias with 8-bit X and W, for up to 256 tokens, on sm_90.
//
// The design is that of one_shot.cu. A thread block takes ROWS rows of W, up to TOKENS tokens, and a part of K; the PARTS
// thread blocks of a cluster take all of K. It asks at once for all that shared memory has room for, DEPTH steps of 128
// of K, and multiplies each step as it comes (wgmma). Its warp groups share the tokens, 64 each, and, where HALVES is 2,
// the rows. The sums go to those thread blocks of the cluster that add them up, in the order of the parts, so results are
// bitwise equal from run to run.
//
// Two things differ from one_shot.cu. The tensor core adds products of e4m3 with fewer bits than fp32 has: where PROMOTED
// is 1, a step's sums are added up in fp32 while the next step is multiplied. (int8 adds up in int32, exactly, over the
// cluster as well, and sums become fp32 where scales meet them.) And the operands have scales:
//   TENSOR  sx[0] and sw[0]
//   ROW     sx[token] and sw[row of W]
//   BLOCK   sx[step * ldsx + token] and sw[row of W / 128 * ldsw + step]; where BY_TOKEN is 1, sx[token * ldsx + step].
//           PROMOTED is 1
//   W_ROW   sx[0] and sw[row of W]
// Of int8, zero points are subtracted from whole sums, before the scales: where ZERO is 2, zx[token] * sums[row of W];
// where it is 1, sums[row of W], which one zero point is multiplied into.
//
// scaled_one_shot.py defines N, K (a multiple of 16; where W is shuffled 32, and N of 16), ROWS, PARTS, DEPTH, TOKENS (a
// multiple of 16), GROUPS (of 64 tokens), HALVES, SCALES (no BLOCK of int8), BY_TOKEN, PROMOTED (0 of int8), INT8, ZERO,
// SHUFFLED (W lies in AITER's order), BIAS, NAME, CLUSTER, OF_ZERO and ITS_ZERO (its parameters, and what passes them on)
// and, in place of OF_THIS_TYPE, `mma`, `pair_of` and `value`.
// NVRTC compiles this without any header but its parts. PTX ISA 8.1; operands and sums lie as wgmma.mma_async wants them:
// both operands K-major, rows of 128 bytes, swizzled by 128.
#include "scaled_sums.cuh"  // scaled_one_shot.py puts its text here

constexpr int STEPS = (K + 127) / 128, MOST = (STEPS + PARTS - 1) / PARTS;  // in all; of a thread block, or one less
constexpr int TAIL = K % 128;                                              // of K in the last step; 0 when it is whole
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;                // of a step
constexpr int W_STEP = SHUFFLED ? 16 * 128 : 128;                          // bytes of W from one to the next
constexpr int S_BYTES = SCALES == BLOCK ? TOKENS * 4 + 16 : 0;             // a scale for each token, then two of W
constexpr int WARP_GROUPS = GROUPS * HALVES, THREADS = 128 * WARP_GROUPS, WARPS = 4 * WARP_GROUPS;
constexpr int MINE = ROWS / HALVES;                                        // rows of W that a warp group multiplies
constexpr int ROUND = 16 * WARP_GROUPS, ROUND_BYTES = ROUND * 128;         // rows that the threads copy at a time
constexpr int W_ROW_BYTES = SHUFFLED ? 16 : 128;                           // from one to the next in shared memory
constexpr int W_ROUNDS = (ROWS + ROUND - 1) / ROUND, X_ROUNDS = (TOKENS + ROUND - 1) / ROUND;
constexpr int UNITS = TOKENS / 16 * (ROWS / 8);                            // of sums, that a thread block sends
constexpr int EACH = (UNITS + PARTS - 1) / PARTS;                          // units that a thread block adds up
constexpr int UNIT_BYTES = 512;                                            // 128 sums, in the order of their lanes

OF_THIS_TYPE

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {  // the same address in another block of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void all_here() { asm volatile("bar.sync 0;" ::: "memory"); }
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
// A matrix in shared memory as wgmma describes it: address / 16, and above it the bits for "rows of eight are 1024 bytes
// apart" (64 << 32), "the leading dimension is not used" (1 << 16), "swizzled by 128" (1 << 62). A shuffled W is not
// swizzled: rows of eight are 128 bytes apart, and 16 bytes of K are as far from the next ones as all rows take.
constexpr u64 OF_X = 0x4000004000010000ull, OF_W = SHUFFLED ? 8ull << 32 | (u64)ROWS << 16 : OF_X;
__device__ __forceinline__ u64 operand(u32 at, u64 how) { return (u64)((at >> 4) & 0x3fff) | how; }

// sums (+)= a step of X and W: four products of 32 of K. afresh: what the sums were does not count.
__device__ __forceinline__ void multiply(Sum* sums, u32 x, u32 w, bool afresh) {
  u64 a = operand(x, OF_X), b = operand(w, OF_W);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) mma(sums, a + 2 * i, b + (SHUFFLED ? 2 * ROWS : 2) * i, i > 0 || !afresh);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// The compiler must not move reads of sums that a product writes to before the wait for it.
__device__ __forceinline__ void settle(Sum* sums) {
#pragma unroll
  for (int i = 0; i < MINE / 2; i++) asm volatile("" : "+" OF_SUM(sums[i])::"memory");
}
// sums += step, scaled. Of eight rows a thread has two sums of one token, and two of the token eight further, whose scales
// are `low` and `high`; from unit `edge` of rows on the next scale of W holds, and `low_next` and `high_next`.
__device__ __forceinline__ void promote(Sum* sums, Sum* step, float low, float high, float low_next, float high_next, int edge) {
  settle(step);
#pragma unroll
  for (int i = 0; i < MINE / 8; i++) {
    const float a = i < edge ? low : low_next, b = i < edge ? high : high_next;
    sums[i * 4] += step[i * 4] * a, sums[i * 4 + 1] += step[i * 4 + 1] * a;
    sums[i * 4 + 2] += step[i * 4 + 2] * b, sums[i * 4 + 3] += step[i * 4 + 3] * b;
  }
}

#include "scaled_one_shot_copies.cuh"  // scaled_one_shot.py puts its text here

__device__ __forceinline__ void ask_for(const void* at) {  // what is read at the very end
  asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}
__device__ __forceinline__ void store(char* y, const char* bias, const float* sx, const float* sw OF_ZERO, int token, int row,
                                      int m, Sum sum, Sum of_next) {  // of this row and the next one
  if (row >= N || token >= m) return;
#if ZERO  // in bits of 32, for what a product has beyond them the sum lacks as well
  const u32 zero = ZERO == 2 ? (u32)zx[token] : 1;
  sum = (Sum)((u32)sum - zero * (u32)zero_sums[row]), of_next = (Sum)((u32)of_next - zero * (u32)zero_sums[row + 1]);
#endif
  float first = (float)sum, second = (float)of_next;
  if (SCALES == TENSOR) first = first * sw[0] * sx[0], second = second * sw[0] * sx[0];
  if (SCALES == ROW) first = first * sw[row] * sx[token], second = second * sw[row + 1] * sx[token];
  if (SCALES == W_ROW) first = first * sw[row] * sx[0], second = second * sw[row + 1] * sx[0];
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
         const float* sx, const float* sw OF_ZERO, char* y, int m, int ldx, int ldw, int ldsx, int ldsw) {
#if !BIAS
  const char* bias = nullptr;
#endif
  extern __shared__ __align__(1024) char memory[];
  const u32 ws = (u32)__cvta_generic_to_shared(memory), xs = ws + DEPTH * W_BYTES, ss = xs + DEPTH * X_BYTES;
  const u32 others = ss + DEPTH * S_BYTES;                                   // the sums that come to this thread block
  const u32 all_sums = others + (PARTS > 1 ? PARTS * EACH * UNIT_BYTES : 0), loaded = all_sums + 8;  // barriers
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = thread / 128;
  const int half = group % HALVES, token_warp = group / HALVES * 4 + warp % 4;  // a warp has 16 of the tokens
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int first_step = part * STEPS / PARTS, steps = (part + 1) * STEPS / PARTS - first_step;
  const int last_step = STEPS - 1 - first_step;

  const int first_token = blockIdx.y * TOKENS;
  w += SHUFFLED ? (u64)first_step * W_STEP : (u64)tile * ROWS * ldw + first_step * W_STEP;
  x += (u64)first_token * ldx + first_step * 128;
  const int next_token = BY_TOKEN ? ldsx : 1, next_step = BY_TOKEN ? 1 : ldsx;  // how far their scales of X are
  sx += SCALES == TENSOR || SCALES == W_ROW ? 0 : (long long)first_token * next_token;
#if ZERO == 2
  zx += first_token;
#endif
  y += (u64)first_token * N * 2, m = min(m - first_token, TOKENS);
  const int from = thread / 8;
  Copies my;
  my.chunk = thread % 8, my.to = from * 128 + ((my.chunk ^ (from & 7)) << 4);
  my.w_from = SHUFFLED ? thread / 128 * 16 + thread % 16 : from, my.w_chunk = SHUFFLED ? thread / 16 % 8 : my.chunk;
  my.w_to = SHUFFLED ? (my.w_chunk * ROWS + my.w_from) * 16 : my.w_from * 128 + ((my.w_chunk ^ (my.w_from & 7)) << 4);
  my.rows = N - tile * ROWS - my.w_from, my.tokens = m - from;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++) {
    const int row = my.w_from + i * ROUND, in_w = tile * ROWS + row;
    my.w[i] = SHUFFLED ? (u64)(in_w / 16 * 16) * ldw + my.w_chunk * 256 + in_w % 16 * 16 : (u64)row * ldw + my.chunk * 16;
  }
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++) my.x[i] = (u64)min(from + i * ROUND, m - 1) * ldx + my.chunk * 16;
  if (SCALES == BLOCK) {
    const int of_w = min(tile * ROWS / 128 + max(thread - TOKENS, 0), (N - 1) / 128);
    my.scale = thread < TOKENS ? sx + (long long)first_step * next_step + min(thread, m - 1) * next_token
                               : sw + (long long)of_w * ldsw + first_step;
    my.next_scale = thread < TOKENS ? next_step : 1;
  }
  const int edge = (128 - tile * ROWS % 128) / 8 - half * (MINE / 8);  // units of this half before the next scale of W

  load(my, w, x, ws, xs, ss, 0, last_step == 0);
  if (SCALES != BLOCK || BIAS) {  // lines of 128 bytes, while the first step comes in
    const int row = min(tile * ROWS + thread * 32, N - 1);
    if (SCALES == TENSOR && thread == 0) ask_for(sw), ask_for(sx);
    if (SCALES == W_ROW && thread == 0) ask_for(sx);
    if ((SCALES == ROW || SCALES == W_ROW) && thread <= ROWS / 32) ask_for(sw + row);
    if (SCALES == ROW && thread <= TOKENS / 32) ask_for(sx + min(thread * 32, m - 1));
#if ZERO
    if (thread <= ROWS / 32) ask_for(zero_sums + row);
    if (ZERO == 2 && thread <= TOKENS / 32) ask_for(zx + min(thread * 32, m - 1));
#endif
#if BIAS
    if (thread <= ROWS / 32) ask_for(bias + row * 2);
#endif
  }
  if (thread == 0) {
    for (int i = 0; i < DEPTH && i < steps; i++) expect(loaded + 8 * i, THREADS);
    if (PARTS > 1) {
      const int units = min(max(UNITS - part * EACH, 0), EACH);
      expect(all_sums, 1 + THREADS);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   ::"r"(all_sums), "r"(units * (PARTS - 1) * UNIT_BYTES) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (PARTS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  all_here();
  arrive_when_loaded(loaded);
#pragma unroll 1
  for (int i = 1; i < DEPTH && i < steps; i++) {
    load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, ss + i * S_BYTES, i, i == last_step);
    arrive_when_loaded(loaded + 8 * i);
  }
  u32 owners[MINE / 8], places[MINE / 8];  // whose units this thread's sums are of, and their addresses there
  if (PARTS > 1) {
#pragma unroll
    for (int i = 0; i < MINE / 8; i++) {
      int unit = token_warp * (ROWS / 8) + half * (MINE / 8) + i, owner = unit / EACH;
      owners[i] = in_block(others, owner);
      places[i] = owners[i] + (part * EACH + unit - owner * EACH) * UNIT_BYTES + lane * 16;
      asm volatile("" : "+r"(owners[i]), "+r"(places[i]));  // now, while nothing is there to be multiplied
    }
  }

  Sum sums[MINE / 2];
#pragma unroll
  for (int i = 0; i < MINE / 2; i++) sums[i] = 0;
  const u32 x_mine = xs + group / HALVES * 64 * 128, w_mine = ws + half * MINE * W_ROW_BYTES;
  const int my_token = token_warp * 16 + lane / 4;
  int slot = 0, phase = 0, free = DEPTH - 2;  // where the next step is, and where the one before the last one was
  auto next = [&](int i) {                    // step i is being multiplied: ask for another one
    if (i >= 2 && i - 2 + DEPTH < steps) {
      all_here();  // and done with that step
      load(my, w, x, ws + free * W_BYTES, xs + free * X_BYTES, ss + free * S_BYTES, i - 2 + DEPTH,
           i - 2 + DEPTH == last_step);
      arrive_when_loaded(loaded + 8 * free);
    }
    if (++slot == DEPTH) slot = 0, phase ^= 1;
    if (++free == DEPTH) free = 0;
  };
  if constexpr (!PROMOTED) {
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_for(loaded + 8 * slot, phase);
      multiply(sums, x_mine + slot * X_BYTES, w_mine + slot * W_BYTES, false);
      next(i);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    settle(sums);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(sums);
  } else {
    Sum one[MINE / 2], two[MINE / 2];  // the sums of a step, by turns
    auto add = [&](Sum* step, int at) {
      if (SCALES == BLOCK) {
        const float* scale = (const float*)(memory + DEPTH * (W_BYTES + X_BYTES) + at * S_BYTES);
        const float low = scale[my_token % TOKENS], high = scale[(my_token + 8) % TOKENS];
        const float first = scale[TOKENS], second = scale[TOKENS + 1];
        promote(sums, step, low * first, high * first, low * second, high * second, 128 % ROWS == 0 ? MINE : edge);
      } else {
        promote(sums, step, 1.f, 1.f, 1.f, 1.f, MINE);
      }
    };
    int before_at = 0;
    auto turn = [&](int i, Sum* now, Sum* before) {
      const int at = slot;
      wait_for(loaded + 8 * slot, phase);
      multiply(now, x_mine + slot * X_BYTES, w_mine + slot * W_BYTES, true);
      next(i);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0) add(before, before_at);
      before_at = at;
    };
    int i = 0;
#pragma unroll 1
    for (; i + 1 < steps; i += 2) {
      turn(i, one, two);
      turn(i + 1, two, one);
    }
    if (i < steps) {
      turn(i, one, two);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      add(one, before_at);
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      add(two, before_at);
    }
  }
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the others can be sent to

  const int token = lane / 4, row = tile * ROWS + lane % 4 * 2;
  if (PARTS == 1) {
#pragma unroll
    for (int i = 0; i < MINE / 4; i++)
      store(y, bias, sx, sw ITS_ZERO, token_warp * 16 + i % 2 * 8 + token, row + half * MINE + i / 2 * 8, m, sums[i * 2],
            sums[i * 2 + 1]);
    return;
  }
  if (token_warp < TOKENS / 16) {
    const u32 here = in_block(others, part);  // its own sums do not take the way over the cluster
#pragma unroll
    for (int i = 0; i < MINE / 8; i++)
      if (owners[i] == here)
        asm volatile("st.shared::cta." FOUR_SUMS " [%0], {%1, %2, %3, %4};"
                     ::"r"(places[i] - here + others), OF_SUM(sums[i * 4]), OF_SUM(sums[i * 4 + 1]),
                     OF_SUM(sums[i * 4 + 2]), OF_SUM(sums[i * 4 + 3]) : "memory");
      else
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes." FOUR_SUMS " [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(places[i]), OF_SUM(sums[i * 4]), OF_SUM(sums[i * 4 + 1]), OF_SUM(sums[i * 4 + 2]),
                     OF_SUM(sums[i * 4 + 3]), "r"(owners[i] + (all_sums - others)) : "memory");
  }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(all_sums) : "memory");
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
               "@!done bra again;}" ::"r"(all_sums) : "memory");
  const FourSums* received = (const FourSums*)(memory + (others - ws)) + lane;
  for (int i = warp; i < EACH && part * EACH + i < UNITS; i += WARPS) {
    FourSums sum = {0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      FourSums one = received[(p * EACH + i) * (UNIT_BYTES / 16)];
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const int unit = part * EACH + i, tokens = unit / (ROWS / 8) * 16 + token, rows = row + unit % (ROWS / 8) * 8;
    store(y, bias, sx, sw ITS_ZERO, tokens, rows, m, sum.x, sum.y);
    store(y, bias, sx, sw ITS_ZERO, tokens + 8, rows, m, sum.z, sum.w);
  }
}
