// Part of moe_decode.cu, whose constants it uses: a warp's ring in shared memory, and what it copies there.
//
// A slot holds a step of K: 128 bytes of each row of W, the same part of K of the tile's tokens, and its scales. Of W chunk c
// (16 bytes) of row r lies at c ^ r % 8, of a token the chunks are exchanged likewise (`tokens_of`), so that the lanes that
// read at once read from different banks.

constexpr long long ROW_BYTES = (long long)K * 16 / PER_QUAD;
constexpr int X_ROWS = MOST_PAIRS < OF_TILE ? MOST_PAIRS : OF_TILE;  // tokens of a tile, at most
constexpr int X_ROW = STEP * 2, X_CHUNKS = X_ROW / 16;           // bytes of one, chunks
constexpr int SCALE_BYTES = sizeof(Scale);
constexpr int SCALES_OF_STEP = SCALES != GROUPS ? 1 : STEP % GROUP == 0 ? STEP / GROUP : GROUP % STEP == 0 ? 1 : STEP / GROUP + 2;
constexpr int S_OF_ROW = SCALES_K * SCALE_BYTES;                 // bytes, of GROUPS
// They are copied in words of 4 bytes, from the one that the first byte is in.
constexpr bool IN_WORDS = S_OF_ROW % 4 == 0 && STEP % GROUP == 0 && STEP / GROUP * SCALE_BYTES % 4 == 0;
constexpr int S_WORDS = SCALES != GROUPS ? 1 : (SCALES_OF_STEP * SCALE_BYTES + (IN_WORDS ? 3 : 6)) / 4;
constexpr int W_BYTES = ROWS * 128, X_BYTES = X_ROWS * X_ROW;
constexpr int S_BYTES = SCALES == GROUPS ? ROWS * S_WORDS * 4 : SCALES == BLOCK ? SIDES * 4 : 0;
constexpr int SLOT = W_BYTES + X_BYTES + (S_BYTES + 127) / 128 * 128;

__device__ __forceinline__ void copy4(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}
__device__ __forceinline__ Quad quad_at(u32 address) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "r"(address));
  return q;
}

// W and its scales, of an expert from a column of the result on. Four rows of W at a time, 16 bytes a lane.
__device__ __forceinline__ void copy_weights(u32 slot, const u8* w, const Scale* scales, int expert, int column, int step) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const bool is_there = !TAIL || step * STEP + chunk * PER_QUAD < K;
  const u8* from = w + (long long)expert * ROWS_OF_EXPERT * ROW_BYTES + step * 128 + chunk * 16;
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const int r = 4 * i + lane / 8;
    copy16(slot + r * 128 + (chunk ^ r % 8) * 16, from + row_of_w(column, r) * ROW_BYTES, is_there);
  }
  const u32 to = slot + W_BYTES + X_BYTES;
  if (SCALES == BLOCK && lane < SIDES) copy4(to + lane * 4, scale_at(scales, expert, row_of_w(column, 16 * lane), step * STEP), true);
  if (SCALES == GROUPS)
#pragma unroll
    for (int r = lane; r < ROWS; r += 32) {
      const u8* row = (const u8*)scale_at(scales, expert, row_of_w(column, r), 0);
      const u8* first = (const u8*)((u64)(row + step * STEP / GROUP * SCALE_BYTES) & ~3ull);
#pragma unroll
      for (int word = 0; word < S_WORDS; word++)
        copy4(to + (r * S_WORDS + word) * 4, first + word * 4, first + word * 4 < row + S_OF_ROW);
    }
}
// The tokens of a tile: rows of X, or of H in moe_down.
__device__ __forceinline__ void copy_tokens(u32 slot, const Routing& r, const u16* x, long long ld, int tile, int step) {
  const int lane = threadIdx.x % 32, c = lane % X_CHUNKS, many = r.many[tile], first = r.first[tile];
  const bool is_there = !TAIL || step * STEP + c * 8 < K;
#pragma unroll
  for (int i = 0; i < X_ROWS; i += 32 / X_CHUNKS) {
    const int g = i + lane / X_CHUNKS;
    if (g >= many) continue;
    const int pair = r.order[first + g], of = STAGE == 1 ? pair / TOPK : pair;
    const int turned = c ^ (c / 8 | g % 2 * X_QUADS);
    copy16(slot + W_BYTES + g * X_ROW + turned * 16, x + of * ld + step * STEP + c * 8, is_there);
  }
}

// Where a lane's part of its token begins; chunk i of it is at this address ^ 16 i. Past the last token the last one.
__device__ __forceinline__ u32 tokens_of(u32 slot, int many) {
  const int t = threadIdx.x % 4, g = min(threadIdx.x % 32 / 4, many - 1), c = t * 2 * X_QUADS;
  return slot + W_BYTES + g * X_ROW + (c ^ (c / 8 | g % 2 * X_QUADS)) * 16;
}
struct Scales { Scale of[SIDES][2][SCALES == GROUPS ? 2 : 1]; };  // of a lane's rows g and g + 8, and of its two quads
__device__ __forceinline__ Scales scales_of(u32 slot, int column, int step) {
  const int part = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4, first = step * STEP / GROUP;
  const u32 from = slot + W_BYTES + X_BYTES;
  Scales found = {};
#if SCALES == BLOCK
#pragma unroll
  for (int i = 0; i < SIDES; i++) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found.of[i][0][0]) : "r"(from + i * 4));
    found.of[i][1][0] = found.of[i][0][0];
  }
#elif SCALES == GROUPS
#pragma unroll
  for (int i = 0; i < 2 * SIDES; i++) {
    const int r = 8 * i + g;
    const u32 at = from + r * S_WORDS * 4 + (IN_WORDS ? 0 : (row_of_w(column, r) * S_OF_ROW + first * SCALE_BYTES) % 4);
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const int k = step * STEP + (part + q) * PER_QUAD;
      u16 scale;
      if (SCALE_BYTES == 1) asm volatile("ld.shared.u8 %0, [%1];" : "=h"(scale) : "r"(at + k / GROUP - first));
      else asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scale) : "r"(at + (k / GROUP - first) * 2));
      found.of[i / 2][i % 2][q] = !TAIL || k < K ? (Scale)scale : (Scale)0;
    }
  }
#endif
  return found;
}
