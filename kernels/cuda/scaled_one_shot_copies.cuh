// Part of scaled_one_shot.cu, whose constants it uses: how the threads of a thread block copy a step of W, X and scales into
// shared memory. Rows past the last are not read. Nothing waits here.
//
// Where SHUFFLED is 1, W lies in AITER's order: tiles of 16 rows by 32 of K, one row of tiles after another; in a tile first
// the 16 bytes of each row for the lower half of K, then those for the upper half. A step of W then lies in shared memory as 16
// bytes of each row, one row after another, then the next 16 of each: what lies together there lies together in W, 256 bytes
// at least. (To rows of 128 bytes each of these 16 would go by itself, which takes twice the time.)
__device__ __forceinline__ void copy16_if(bool there, u32 to, const char* from, u32 bytes) {  // the rest becomes zero
  asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; @there cp.async.cg.shared.global [%0], [%1], 16, %3;}"
               ::"r"(to), "l"(from), "r"((u32)there), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4_if(bool there, u32 to, const float* from) {
  asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; @there cp.async.ca.shared.global [%0], [%1], 4;}"
               ::"r"(to), "l"(from), "r"((u32)there) : "memory");
}

struct Copies {  // what one thread copies of a step, 16 bytes each: where that begins, and its place in shared memory
  u64 w[W_ROUNDS], x[X_ROUNDS];
  u32 w_to, to;
  int w_from;          // row of a round of W
  int rows, tokens;    // that there are from its first one on: no others are read, and their sums are never stored
  int w_chunk, chunk;  // of eight in a row of a step
  const float* scale;  // of the first step, and
  int next_scale;      // how far the next step's is
};
// step: counted from the thread block's first one. last: it is the last of K.
__device__ __forceinline__ void load(const Copies& my, const char* w, const char* x, u32 w_slot, u32 x_slot, u32 s_slot,
                                     int step, bool last) {
  const u32 bytes = TAIL == 0 || !last || my.chunk * 16 < TAIL ? 16 : 0;
  const u32 w_bytes = TAIL == 0 || !last || my.w_chunk * 16 < TAIL ? 16 : 0;
  w += step * W_STEP, x += step * 128;
#pragma unroll
  for (int i = 0; i < W_ROUNDS; i++)
    if (ROWS % ROUND == 0 || i < W_ROUNDS - 1 || my.w_from < ROWS % ROUND)
      copy16_if(N % ROWS == 0 || i * ROUND < my.rows, w_slot + my.w_to + i * ROUND * W_ROW_BYTES, w + my.w[i], w_bytes);
#pragma unroll
  for (int i = 0; i < X_ROUNDS; i++)
    if (TOKENS % ROUND == 0 || i < X_ROUNDS - 1 || threadIdx.x < TOKENS % ROUND * 8)
      copy16_if(i < X_ROUNDS - 1 || i * ROUND < my.tokens, x_slot + my.to + i * ROUND_BYTES, x + my.x[i], bytes);
  if (SCALES == BLOCK) {
    const int of = threadIdx.x;
    const float* scale = my.scale + (long long)step * my.next_scale;
    copy4_if(of < TOKENS, s_slot + of * 4, scale);  // of X
    copy4_if(of >= TOKENS && of < TOKENS + 2, s_slot + of * 4, scale);  // of W
  }
}
