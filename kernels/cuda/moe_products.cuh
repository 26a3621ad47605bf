// Part of moe_decode.cu, whose constants it uses: weights become 16 bits in registers, and are multiplied by tokens.

// sums += the products of a step; tokens: of `tokens_of`.
template <bool BEYOND>
__device__ __forceinline__ void add_products(float (*sums)[4], u32 slot, u32 tokens, const Scales& scales) {
  const int part = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
  float block[SIDES][4];
#pragma unroll
  for (int i = 0; i < SIDES; i++) block[i][0] = block[i][1] = block[i][2] = block[i][3] = 0.0f;
#pragma unroll
  for (int q = 0; q < 2; q++) {
    Quad x[X_QUADS];
#pragma unroll
    for (int i = 0; i < X_QUADS; i++) x[i] = quad_at(tokens ^ (q * X_QUADS + i) * 16);
#pragma unroll
    for (int i = 0; i < SIDES; i++) {
      Quad w[2];
      u32 factor[2], rest[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        w[half] = quad_at(slot + (16 * i + 8 * half + g) * 128 + ((part + q) ^ g) * 16);
        const Scale scale = scales.of[i][half][SCALES == GROUPS ? q : 0];
        factor[half] = BEYOND ? pair_of_scale_beyond(scale, rest[half]) : pair_of_scale(scale);
      }
#pragma unroll
      for (int p = 0; p < PER_QUAD / 4; p++) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          a[j] = pair_of_w(w[j % 2], 2 * p + j / 2);
          if (SCALES == GROUPS) a[j] = times(a[j], factor[j % 2]);
          if (BEYOND) a[j] = times(a[j], rest[j % 2]);
        }
        multiply(SCALES == BLOCK ? block[i] : sums[i], a[0], a[1], a[2], a[3], pair_of_x(x, 2 * p), pair_of_x(x, 2 * p + 1));
      }
    }
  }
  if (SCALES == BLOCK)
#pragma unroll
    for (int i = 0; i < SIDES; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] += block[i][j] * (float)scales.of[i][j / 2][0];
}
__device__ __forceinline__ void add_step(float (*sums)[4], u32 slot, int column, int step, int many) {
  const Scales scales = scales_of(slot, column, step);
  const u32 tokens = tokens_of(slot, many);
  bool beyond = false;
  if (WEIGHTS == MXFP4)
#pragma unroll
    for (int i = 0; i < 4 * SIDES; i++) beyond |= is_beyond(scales.of[i / 4][i / 2 % 2][SCALES == GROUPS ? i % 2 : 0]);
  if (WEIGHTS == MXFP4 && __any_sync(~0u, beyond)) add_products<WEIGHTS == MXFP4>(sums, slot, tokens, scales);
  else add_products<false>(sums, slot, tokens, scales);
}
