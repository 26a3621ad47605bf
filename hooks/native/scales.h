// What the scales of a product stand for, decided as torch does it: by shapes, strides and dtypes of both operands and both
// scales (_scaled_mm), or by the recipe that the caller names (_scaled_mm_v2).
//
// One value of scale_a says nothing alone: with M = 1 it is the scale of a row or of the tensor, and with K = 128 a value
// for each row is the scale of the row or of a block of 128. Only the two scales together tell.
#pragma once
#include <ATen/core/Tensor.h>

#include "context.h"
#include "problem.h"

namespace gemmtuned {

using at::Tensor;

// A scale as a matrix with a row for each row (or block of rows) of its operand, and a column for each block of K.
struct ScaleOf {
  uint8_t kind = UNSCALED, dtype = 0, layout = SCALES_BY_ROW;
};

struct BothScales {
  ScaleOf x, w;
  bool known = false;  // false: torch has the right error, or this is a form that we have no name for
};

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// How a scale of `rows` by `cols` values lies; torch has 128x128 blocks with room at the end of each column.
inline uint8_t layout_of(const Tensor& s, int64_t rows, int64_t cols) {
  const int64_t r = s.size(0), c = s.size(1);
  if (c == 1 || s.stride(1) == 1) {
    const bool whole = c == cols && (r == 1 || s.stride(0) == cols);
    if (whole) return SCALES_BY_ROW;
    if (r == 1 || s.stride(0) >= c) return SCALES_BY_ROW_PADDED;
  }
  if (r == 1 || s.stride(0) == 1) {
    const bool whole = r == rows && (c == 1 || s.stride(1) == rows);
    if (whole) return SCALES_BY_COL;
    if (c == 1 || s.stride(1) >= r) return SCALES_BY_COL_PADDED;
  }
  return SCALES_OTHERWISE;
}

inline bool is_fp8(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2 || type == at::kFloat8_e4m3fnuz ||
         type == at::kFloat8_e5m2fnuz;
}

// `t` [rows, K] is X, or W = b.t(); `s` its scale as the caller gave it for X, turned round for W.
struct Scaled {
  const Tensor& t;
  const Tensor& s;
  int64_t k;  // of values: a byte of fp4 holds two

  int64_t rows() const { return t.size(0); }
  bool is_float() const { return is_fp8(t.scalar_type()) && s.scalar_type() == at::kFloat; }
  bool of_tensor() const { return is_float() && s.numel() == 1; }
  bool of_rows() const {
    return is_float() && s.dim() == 2 && s.size(0) == rows() && s.size(1) == 1 && s.is_contiguous();
  }
  bool of_blocks(
      int64_t block) const {  // of `block` rows and 128 of K; torch lets the number of these be a multiple of 4
    if (!is_float() || s.dim() != 2 || s.size(0) != blocks_of(rows(), block)) return false;
    const int64_t cols = blocks_of(k, 128);
    return s.size(1) == cols || (block == 128 && s.size(1) == blocks_of(cols, 4) * 4);
  }
  bool swizzled(int64_t block, at::ScalarType type) const {  // in tiles of 128 rows and 4 blocks of K
    if (block == 16 && t.scalar_type() != at::kFloat4_e2m1fn_x2) return false;
    return s.scalar_type() == type && s.is_non_overlapping_and_dense() &&
           s.numel() == blocks_of(rows(), 128) * 128 * blocks_of(blocks_of(k, block), 4) * 4;
  }

  ScaleOf as(Scale kind) const {
    ScaleOf found{kind, static_cast<uint8_t>(s.scalar_type()), SCALES_BY_ROW};
    if (kind == BY_1X32 || kind == BY_1X16) found.layout = SCALES_SWIZZLED;
    if (kind == BY_1X128) found.layout = layout_of(s, rows(), blocks_of(k, 128));
    if (kind == BY_128X128) found.layout = layout_of(s, blocks_of(rows(), 128), blocks_of(k, 128));
    return found;
  }
};

inline int64_t values_of_k(const Tensor& a) {
  const bool two_a_byte = a.scalar_type() == at::kFloat4_e2m1fn_x2;
  return a.size(1) * (two_a_byte ? 2 : 1);
}

// _scaled_mm: a [M, K], b [K, N], in the order that torch asks in (ATen/native/cuda/ScaledBlas.cpp).
inline BothScales scales_of(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b) {
  const int64_t k = values_of_k(a);
  const Tensor w = turned_round(b), of_w = scale_b.dim() == 2 ? turned_round(scale_b) : scale_b;
  const Scaled x{a, scale_a, k}, y{w, of_w, k};
  if (x.of_tensor() && y.of_tensor()) return {x.as(PER_TENSOR), y.as(PER_TENSOR), true};
  if (x.of_rows() && y.of_rows()) return {x.as(PER_ROW), y.as(PER_ROW), true};
  // with M = 1 the one row of blocks is that row's, as it is for every other M, and not of 128 rows, as torch has it
  if (x.of_blocks(128) && y.of_blocks(1) && !x.of_blocks(1)) return {x.as(BY_128X128), y.as(BY_1X128), true};
  if (x.of_blocks(1) && y.of_blocks(128)) return {x.as(BY_1X128), y.as(BY_128X128), true};
  if (x.of_blocks(1) && y.of_blocks(1)) return {x.as(BY_1X128), y.as(BY_1X128), true};
  if (x.swizzled(32, at::kFloat8_e8m0fnu) && y.swizzled(32, at::kFloat8_e8m0fnu))
    return {x.as(BY_1X32), y.as(BY_1X32), true};
  if (x.swizzled(16, at::kFloat8_e4m3fn) && y.swizzled(16, at::kFloat8_e4m3fn))
    return {x.as(BY_1X16), y.as(BY_1X16), true};
  return {};
}

// One side of _scaled_mm_v2: torch's ScalingType and SwizzleType by number (c10/core/ScalingType.h, at/BlasBackend.h).
inline ScaleOf by_recipe(const Tensor& t, at::TensorList scales, at::IntArrayRef recipe, at::IntArrayRef swizzle,
                         bool turned) {
  static constexpr uint8_t kinds[] = {PER_TENSOR, PER_ROW, BY_1X16, BY_1X32, BY_1X128, BY_128X128};
  if (recipe.empty() || recipe.size() != scales.size() || recipe[0] < 0 || recipe[0] >= 6) return {};
  const Tensor& given = scales[0];
  ScaleOf found{kinds[recipe[0]], static_cast<uint8_t>(given.scalar_type()), SCALES_BY_ROW};
  if (recipe.size() == 2 && found.kind == BY_1X16 && recipe[1] == 0) found.kind = BY_1X16_TWICE;
  else if (recipe.size() > 1) return {};
  const bool blocks = found.kind >= BY_1X32;
  if (!swizzle.empty() && swizzle[0] != 0) {
    found.layout = SCALES_SWIZZLED;
  } else if (blocks && given.dim() == 2) {
    const int64_t k = values_of_k(t), depth = found.kind == BY_1X32 ? 32 : found.kind >= BY_1X16 ? 16 : 128;
    const int64_t rows = blocks_of(t.size(0), found.kind == BY_128X128 ? 128 : 1), cols = blocks_of(k, depth);
    // W's blocks are given by K first, as b is; some callers give them by N first
    const bool by_k = turned && given.size(0) >= cols && given.size(1) == rows;
    found.layout = layout_of(by_k ? turned_round(given) : given, rows, cols);
  } else if (blocks) {
    found.layout = SCALES_OTHERWISE;
  }
  return found;
}

inline BothScales scales_of(const Tensor& a, const Tensor& b, at::TensorList scale_a, at::IntArrayRef recipe_a,
                            at::IntArrayRef swizzle_a, at::TensorList scale_b, at::IntArrayRef recipe_b,
                            at::IntArrayRef swizzle_b) {
  const ScaleOf x = by_recipe(a, scale_a, recipe_a, swizzle_a, false);
  const ScaleOf w = by_recipe(turned_round(b), scale_b, recipe_b, swizzle_b, true);
  return {x, w, x.kind != UNSCALED && w.kind != UNSCALED};
}

// Completes the key of a scaled product; false when torch has the right error, or we have no name for it.
inline bool describe_scaled(Problem& p, const BothScales& both, const Tensor& a, bool has_bias, bool fast) {
  if (!both.known) return false;
  p.k = static_cast<uint32_t>(values_of_k(a));
  p.scale = both.x.kind, p.scale_dtype = both.x.dtype, p.scale_layout = both.x.layout;
  p.wscale = both.w.kind, p.wscale_dtype = both.w.dtype, p.wscale_layout = both.w.layout;
  p.math = fast && a.scalar_type() != at::kChar ? REDUCED : IEEE;  // sums of int8 are exact: there is nothing to allow
  if (has_bias) p.flags |= BIAS;
  return true;
}

}  // namespace gemmtuned
