// Part of scaled_tiles.cu, whose constants it uses: from sums to results in global memory.
// The sums of a warp go to those thread blocks of the cluster that add them up: unit by unit, in the order of the parts.
__device__ __forceinline__ void send(const Sum* sums, const Place& me, u32 received, u32 all_sums, int token_warp, int half,
                                     int lane) {
  const int part = me.part();
#pragma unroll
  for (int i = 0; i < MINE / 8; i++) {
    const int unit = token_warp * (ROWS / 8) + half * (MINE / 8) + i, owner = unit / EACH;
    const u32 at = received + (part * EACH + unit - owner * EACH) * UNIT_BYTES + lane * 16;
    if (owner == part) {  // its own sums do not take the way over the cluster
      asm volatile("st.shared::cta." FOUR_SUMS " [%0], {%1, %2, %3, %4};"
                   ::"r"(at), OF_SUM(sums[i * 4]), OF_SUM(sums[i * 4 + 1]), OF_SUM(sums[i * 4 + 2]), OF_SUM(sums[i * 4 + 3])
                   : "memory");
    } else {
      const int there = me.rank + (owner - part) * SHARING;
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes." FOUR_SUMS " [%0], {%1, %2, %3, %4}, [%5];"
                   ::"r"(in_block(at, there)), OF_SUM(sums[i * 4]), OF_SUM(sums[i * 4 + 1]), OF_SUM(sums[i * 4 + 2]),
                   OF_SUM(sums[i * 4 + 3]), "r"(in_block(all_sums, there)) : "memory");
    }
  }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(all_sums) : "memory");
}

struct Operands {  // of the epilogue, in global memory
  const char* bias;
  const float *sx, *sw;
#if ZERO
  const int *zx, *zero_sums;
#endif
};

// What a tile's results need but sums. Rows past the last one have what that has, and so have tokens.
struct Epilogue {
#if SCALES != BLOCK
  float sw[ROWS], sx[TOKENS];
#endif
#if ZERO
  int zero_sums[ROWS], zx[TOKENS];
#endif
#if BIAS
  float bias[ROWS];
#endif
  __device__ __forceinline__ void read(const Operands& of, int token, int row, int m, int lane) {  // by one warp
#pragma unroll 4
    for (int i = lane; i < ROWS; i += 32) {
      const int at = min(row + i, N - 1);
#if SCALES != BLOCK
      sw[i] = __ldg(of.sw + (SCALES == TENSOR ? 0 : at));
#endif
#if ZERO
      zero_sums[i] = __ldg(of.zero_sums + at);
#endif
#if BIAS
      bias[i] = value(__ldg((const unsigned short*)of.bias + at));
#endif
    }
#pragma unroll
    for (int i = lane; i < TOKENS; i += 32) {
      const int at = min(token + i, m - 1);
#if SCALES != BLOCK
      sx[i] = __ldg(of.sx + (SCALES == ROW ? at : 0));
#endif
#if ZERO
      zx[i] = ZERO == 2 ? __ldg(of.zx + at) : 1;
#endif
    }
  }
};

struct Results {
  char* y;
  const Epilogue* epilogue;
  int tile_token, tile_row;  // the tile's first ones
  int token, m;  // the first of a thread's two tokens, the other is eight further; how many there are

  // The scaled pair of this row of W and the next one, for the token `on` further.
  __device__ __forceinline__ u32 pair(int row, int on, Sum sum, Sum of_next) const {
    const int r = row - tile_row, t = token + on - tile_token;
#if ZERO  // in bits of 32, for what a product has beyond them the sum lacks as well
    const u32 zero = (u32)epilogue->zx[t];
    const int2 of_zero = *(const int2*)(epilogue->zero_sums + r);
    sum = (Sum)((u32)sum - zero * (u32)of_zero.x);
    of_next = (Sum)((u32)of_next - zero * (u32)of_zero.y);
#endif
    float first = (float)sum, second = (float)of_next;
#if SCALES != BLOCK
    const float2 of_w = *(const float2*)(epilogue->sw + r);
    const float of_x = epilogue->sx[t];
    first = first * of_w.x * of_x, second = second * of_w.y * of_x;
#endif
#if BIAS
    const float2 added = *(const float2*)(epilogue->bias + r);
    first += added.x, second += added.y;
#endif
    return pair_of(first, second);
  }
  __device__ __forceinline__ char* at(int row, int on) const { return y + ((u64)(token + on) * N + row) * 2; }
  __device__ __forceinline__ void store(int row, int on, Sum sum, Sum of_next) const {  // the pair
    if (row < N && token + on < m) *(u32*)at(row, on) = pair(row, on, sum, of_next);
  }

  // A warp's sums, from this row of W on. Of four units the four lanes of a token exchange their pairs, so that each has eight
  // rows of one unit, and 64 bytes of a token are stored together.
  __device__ __forceinline__ void store(const Sum* sums, int row, int lane) const {
    constexpr int UNITS_AT_ONCE = 8;
    const bool whole = N % 8 == 0 && ((u64)y & 15) == 0;
#pragma unroll
    for (int u = 0; u < MINE / 8; u += UNITS_AT_ONCE) {
      u32 pairs[2][UNITS_AT_ONCE];  // of the token and of the one eight further
#pragma unroll
      for (int i = 0; i < UNITS_AT_ONCE && u + i < MINE / 8; i++) {
        const int at = row + (u + i) * 8 + lane % 4 * 2;
        const Sum* one = sums + (u + i) * 4;
        pairs[0][i] = pair(at, 0, one[0], one[1]), pairs[1][i] = pair(at, 8, one[2], one[3]);
      }
#pragma unroll
      for (int i = 0; i < UNITS_AT_ONCE && u + i < MINE / 8; i += 4)
        store_four(pairs[0] + i, pairs[1] + i, row + (u + i) * 8, min(4, MINE / 8 - u - i), whole, lane % 4);
    }
  }
  __device__ __forceinline__ void store_four(u32* low, u32* high, int row, int units, bool whole, int q) const {
#pragma unroll
    for (int on = 0; on < 16; on += 8) {
      u32* pairs = on ? high : low;
      const bool there = token + on < m;
      if (whole && units == 4) {
        exchange(pairs, q);
        if (row + q * 8 < N && there)
          *(uint4*)at(row + q * 8, on) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (i < units && row + i * 8 + q * 2 < N && there) *(u32*)at(row + i * 8 + q * 2, on) = pairs[i];
      }
    }
  }
  // Lane q of four has pair q of each of four units, and then the four pairs of unit q.
  static __device__ __forceinline__ void exchange(u32* pairs, int q) {
#pragma unroll
    for (int far = 1; far < 4; far *= 2)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (!(i & far)) {
          const bool upper = q & far;
          const u32 got = __shfl_xor_sync(0xffffffff, upper ? pairs[i] : pairs[i + far], far);
          (upper ? pairs[i] : pairs[i + far]) = got;
        }
  }

  // The units of sums that this thread block adds up; token: of unit 0. row: of the tile.
  __device__ __forceinline__ void add(const char* received, int row, int part, int warp, int lane) const {
    const FourSums* sums = (const FourSums*)received + lane;
    for (int i = warp; i < EACH && part * EACH + i < UNITS; i += 4 * MATH) {
      FourSums sum = {0, 0, 0, 0};
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const FourSums one = sums[(p * EACH + i) * (UNIT_BYTES / 16)];
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      const int unit = part * EACH + i, on = unit / (ROWS / 8) * 16, rows = row + unit % (ROWS / 8) * 8 + lane % 4 * 2;
      store(rows, on, sum.x, sum.y), store(rows, on + 8, sum.z, sum.w);
    }
  }
};
