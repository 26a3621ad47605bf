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
constexpr bool IN_QUADS = IN_WORDS && STEP / GROUP * SCALE_BYTES == 16 && S_OF_ROW % 16 == 0;  // 16 bytes
constexpr int W_BYTES = ROWS * 128, X_BYTES = KEPT ? 0 : X_ROWS * X_ROW;
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

// What a lane needs to know of the item that its warp copies next, found out once for all of its steps.
struct Source {
  const u8* w;       // the expert's; where rows lie evenly, the lane's first row and chunk of it
  const u8* scales;  // the expert's
  int column, many;
  u32 row;           // of lane g: where token g begins in X, or in H
};
// Rows of W lie evenly: none is read for another one that does not exist.
constexpr bool EVEN = STAGE == 2 ? D % ROWS == 0 : INTER % (16 * TILES) == 0;

__device__ __forceinline__ Source source_of(const Routing& r, int tile, int column, const u8* w, const Scale* scales, int ld) {
  const int lane = threadIdx.x % 32, expert = r.expert[tile], g = min(lane, r.many[tile] - 1);
  const int pair = r.order[r.first[tile] + g];
  Source of = {w + (long long)expert * ROWS_OF_EXPERT * ROW_BYTES, (const u8*)scale_at(scales, expert, 0, 0), column, r.many[tile],
               (u32)((STAGE == 1 ? pair / TOPK : pair) * ld)};
  if (EVEN) of.w += row_of_w(column, lane / 8) * ROW_BYTES + lane % 8 * 16;
  return of;
}
// W of a step: four rows at a time, 16 bytes a lane. And its scales.
__device__ __forceinline__ void copy_weights(u32 slot, const Source& of, int step) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const bool is_there = !TAIL || step * STEP + chunk * PER_QUAD < K;
  const u8* from = of.w + step * 128;
  const u32 even = slot + lane / 8 * 128 + (chunk ^ lane / 8) * 16, odd = slot + lane / 8 * 128 + (chunk ^ lane / 8 ^ 4) * 16;
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const long long row = EVEN ? row_of_w(0, 4 * i) * ROW_BYTES : row_of_w(of.column, 4 * i + lane / 8) * ROW_BYTES + chunk * 16;
    copy16((i % 2 ? odd : even) + i * 512, from + row, is_there);
  }
  const u32 to = slot + W_BYTES + X_BYTES;
  if (SCALES == BLOCK && lane < SIDES) {
    const int at = row_of_w(of.column, 16 * lane) / 128 * SCALES_K + step * STEP / 128;
    copy4(to + lane * 4, of.scales + at * SCALE_BYTES, true);
  }
  if (SCALES == GROUPS)
#pragma unroll
    for (int r = lane; r < ROWS; r += 32) {
      const u32 row = row_of_w(of.column, r) * S_OF_ROW, first = row + step * STEP / GROUP * SCALE_BYTES;
      if (IN_QUADS) {
        copy16(to + r * 16, of.scales + first, first < row + S_OF_ROW);
        continue;
      }
      const u8* from = of.scales + (first & ~3u);
#pragma unroll
      for (int word = 0; word < S_WORDS; word++)
        copy4(to + (r * S_WORDS + word) * 4, from + word * 4, (first & ~3u) + word * 4 < row + S_OF_ROW);
    }
}
// The tokens of a tile: rows of X, or of H in moe_down.
__device__ __forceinline__ void copy_tokens(u32 slot, const Source& of, const u16* x, int step) {
  const int lane = threadIdx.x % 32, c = lane % X_CHUNKS;
  const bool is_there = !TAIL || step * STEP + c * 8 < K;
  const u16* from = x + step * STEP + c * 8;
#pragma unroll
  for (int i = 0; i < X_ROWS; i += 32 / X_CHUNKS) {
    if (i >= of.many) break;
    const int g = i + lane / X_CHUNKS, turned = c ^ (c / 8 | g % 2 * X_QUADS);
    const u32 row = __shfl_sync(~0u, of.row, g);
    if (g < of.many) copy16(slot + W_BYTES + g * X_ROW + turned * 16, from + row, is_there);
  }
}

// Where a lane's part of its token begins; chunk i of it is at this address ^ 16 i. Past the last token the last one.
__device__ __forceinline__ u32 tokens_of(u32 slot, int many) {
  const int t = threadIdx.x % 4, g = min(threadIdx.x % 32 / 4, many - 1), c = t * 2 * X_QUADS;
  return slot + W_BYTES + g * X_ROW + (c ^ (c / 8 | g % 2 * X_QUADS)) * 16;
}
struct Scales { Scale of[SIDES][2][SCALES == GROUPS ? 2 : 1]; };  // of a lane's rows g and g + 8, and of its two quads
// Where those of row r of a piece of W begin in its slot, of GROUPS.
__device__ __forceinline__ u32 scales_in(u32 slot, int column, int r, int step) {
  const int first = step * STEP / GROUP;
  return slot + W_BYTES + X_BYTES + r * S_WORDS * 4 + (IN_WORDS ? 0 : (row_of_w(column, r) * S_OF_ROW + first * SCALE_BYTES) % 4);
}
__device__ __forceinline__ Scales scales_of(u32 slot, int column, int step) {
  const int part = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4, first = step * STEP / GROUP;
  Scales found = {};
#if SCALES == BLOCK
#pragma unroll
  for (int i = 0; i < SIDES; i++) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found.of[i][0][0]) : "r"(slot + W_BYTES + X_BYTES + i * 4));
    found.of[i][1][0] = found.of[i][0][0];
  }
#elif SCALES == GROUPS
#pragma unroll
  for (int i = 0; i < 2 * SIDES; i++) {
    const u32 at = scales_in(slot, column, 8 * i + g, step);
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
