// Part of moe_decode.cu, whose constants it uses: which pairs of a token and an expert make a tile.

// ---- which tile of which expert

struct Routing {
  int pairs[EXPERTS];       // that each expert has
  u16 order[MOST_PAIRS < 256 ? 256 : MOST_PAIRS];  // pairs by expert, in order
  u16 first[MOST_TILES];    // of a tile, in `order`
  u16 expert[MOST_TILES];
  u8 many[MOST_TILES];      // pairs of a tile
  u16 rank[MOST_PAIRS];     // of each pair among those of its expert
  int tiles;
};
constexpr int OF_LANE = (EXPERTS + 31) / 32;  // experts that a lane looks at
// The same for up to 32 pairs, by one warp without counting: tiles stand in the order of their first pairs, and each has
// room for OF_TILE pairs in `order`.
__device__ __forceinline__ void route_few(Routing& r, const ID* ids, int pairs) {
  const int lane = threadIdx.x % 32, e = lane < pairs ? (int)ids[lane] : -1;
  const bool counts = e >= 0 && e < EXPERTS;
  const u32 same = __match_any_sync(~0u, counts ? e : -1);
  const int rank = __popc(same & ((1u << lane) - 1));
  const u32 begins = __ballot_sync(~0u, counts && rank % OF_TILE == 0);
  // the pair that begins this one's tile: the (rank / OF_TILE * OF_TILE)-th of its expert's
  u32 first = same & begins;
  for (int i = 0; i < rank / OF_TILE; i++) first &= first - 1;
  const int tile = __popc(begins & ((first & -first) - 1));
  if (counts) r.order[OF_TILE * tile + rank % OF_TILE] = lane;
  if (counts && rank % OF_TILE == 0) {
    r.first[tile] = OF_TILE * tile, r.expert[tile] = e;
    r.many[tile] = min(__popc(same) - rank, OF_TILE);
  }
  if (lane == 0) r.tiles = __popc(begins);
}
// All threads of the block; they have met when it is done.
__device__ __forceinline__ void route(Routing& r, const ID* ids, int pairs) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (pairs <= 32) {
    if (warp == 0) route_few(r, ids, pairs);
    __syncthreads();
    return;
  }
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) r.pairs[e] = 0;
  __syncthreads();
  if (warp == 0) {
    for (int p = lane; p - lane < pairs; p += 32) {
      const int e = p < pairs ? (int)ids[p] : -1;
      const bool counts = e >= 0 && e < EXPERTS;  // -1: not one of ours
      const u32 same = __match_any_sync(~0u, counts ? e : -1), before = same & ((1u << lane) - 1);
      const int had = counts ? r.pairs[e] : 0;
      __syncwarp();
      if (counts) r.rank[p] = had + __popc(before);
      if (counts && before == 0) r.pairs[e] = had + __popc(same);
      __syncwarp();
    }
    int tiles = 0, all = 0;
    for (int i = 0; i < OF_LANE; i++) {
      const int e = lane * OF_LANE + i, has = e < EXPERTS ? r.pairs[e] : 0;
      tiles += (has + OF_TILE - 1) / OF_TILE, all += has;
    }
    int tile = tiles, at = all;
    for (int by = 1; by < 32; by *= 2) {
      const int lower_tile = __shfl_up_sync(~0u, tile, by), lower_at = __shfl_up_sync(~0u, at, by);
      if (lane >= by) tile += lower_tile, at += lower_at;
    }
    if (lane == 31) r.tiles = tile;
    tile -= tiles, at -= all;
    for (int i = 0; i < OF_LANE; i++) {
      const int e = lane * OF_LANE + i, has = e < EXPERTS ? r.pairs[e] : 0;
      for (int j = 0; j < has; j += OF_TILE, tile++) r.first[tile] = at + j, r.expert[tile] = e, r.many[tile] = min(has - j, OF_TILE);
      if (e < EXPERTS) r.pairs[e] = at;  // from here on: where its pairs begin
      at += has;
    }
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += THREADS) {
    const int e = (int)ids[p];
    if (e >= 0 && e < EXPERTS) r.order[r.pairs[e] + r.rank[p]] = p;
  }
  __syncthreads();
}
