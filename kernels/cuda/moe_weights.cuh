// Part of moe_decode.cu, whose constants it uses: weights as they lie in memory become what the tensor core takes.

// ---- weights: 16 bytes of a row become pairs for PER_QUAD / 4 products, in the order that `pair_of_x` gives X

__device__ __forceinline__ u32 pair_of_w(const Quad& w, int i) {
  if (WEIGHTS == FP8) return from_fp8(w.v[i / 2] >> (16 * (i % 2)));
  if (WEIGHTS >= INT4) {
    if (WEIGHTS == MXFP4) return small_from_fp4(w.v[i / 4], i % 4);  // the scale makes up for the rest
    return from_int4(w.v[i / 4], i % 4);
  }
  return w.v[i];
}
__device__ __forceinline__ u32 pair_of_x(const Quad* x, int i) {
  if (WEIGHTS < INT4) return x[i / 4].v[i % 4];
  const Quad& eight = x[i / 4];  // values 0 and 4, 1 and 5, ... of eight stand together in a word of codes
  const int of = i % 4;
  return picked(eight.v[of / 2], eight.v[2 + of / 2], of % 2 ? 0x7632 : 0x5410);
}

// ---- scales

#if SCALES == GROUPS && WEIGHTS == MXFP4
typedef u8 Scale;
#elif SCALES == GROUPS
typedef u16 Scale;
#else
typedef float Scale;
#endif
// Twice the same 16 bits, of GROUPS. For e8m0 (2^(scale - 127), 255 is NaN) times what small_from_fp4 leaves out; where that is
// no normal number of the type (`is_beyond`), `rest` is what it has to be multiplied by once more.
__device__ __forceinline__ bool is_beyond(Scale scale) {
  return WEIGHTS == MXFP4 && (DTYPE == BF16 ? scale > 128 : scale < 99 || scale > 128);
}
__device__ __forceinline__ u32 pair_of_scale(Scale scale) {
  if (SCALES != GROUPS) return 0;
  if (WEIGHTS != MXFP4) return (u32)scale * 0x10001;
  return (DTYPE == BF16 ? ((u32)scale + 126) << 7 : ((u32)scale - 98) << 10) * 0x10001;
}
__device__ __forceinline__ u32 pair_of_scale_beyond(Scale scale, u32& rest) {
  const int power = (int)scale - (DTYPE == BF16 ? 1 : 113), most = DTYPE == BF16 ? 127 : 15, least = DTYPE == BF16 ? -1 : -14;
  const int over = power > most ? power - most : power < least ? power - least : 0;
  const float f = __uint_as_float(scale == 255 ? 0x7fc00000 : (u32)(power - over + 127) << 23);
  const float g = DTYPE == F16 && over < -24 ? 0.0f : DTYPE == F16 && over > 15 ? __uint_as_float(0x7f800000)
                                                                              : __uint_as_float((u32)(over + 127) << 23);
  rest = pair_of(g, g);
  return pair_of(f, f);
}
constexpr int SCALES_K = SCALES == GROUPS ? K / GROUP : (K + 127) / 128;  // of a row, or of 128 rows
// Of a row of an expert, at k.
__device__ __forceinline__ const Scale* scale_at(const Scale* scales, int expert, int row, int k) {
  if (SCALES == GROUPS) return scales + ((long long)expert * ROWS_OF_EXPERT + row) * SCALES_K + k / GROUP;
  if (SCALES == BLOCK) return scales + ((long long)expert * ((ROWS_OF_EXPERT + 127) / 128) + row / 128) * SCALES_K + k / 128;
  if (SCALES == ROW) return scales + (long long)expert * ROWS_OF_EXPERT + row;
  return scales + expert;
}

// The row of an expert's W that row r of a piece is of, whose first column of the result is `column`. Past the last column
// the last one is read again; it is not stored.
__device__ __forceinline__ int row_of_w(int column, int r) {
  if (STAGE == 2) return D % ROWS == 0 ? column + r : min(column + r, D - 1);
  int of = column + r / 32 * 16 + r % 16;
  if (INTER % (16 * TILES) != 0) of = min(of, INTER - 1);
  const int side = r / 16 % 2;
  return ACT == SWIGLU_CLAMPED ? 2 * of + side : of + side * INTER;
}
