// The keys of products that others' operators make: of plain operands as of torch's own, else of a weight of their own form.
#pragma once
#include <algorithm>

#include "call.h"
#include "scales.h"

namespace gemmtuned {

// What scales stand for where an operator tells it by how many of both there are: one, one a row, or one for each block of
// 128. The number of one scale says nothing alone: with K = 16384, W has as many blocks as rows. by_k: blocks of W are given
// by K first where its scale could be read either way.
inline BothScales scales_by_number(const Tensor& x, const Tensor& b, const Tensor& scale_x, const Tensor& scale_w,
                                   bool by_k) {
  if (scale_x.scalar_type() != at::kFloat || scale_w.scalar_type() != at::kFloat) return {};
  const int64_t m = x.size(0), n = b.size(1), k_blocks = blocks_of(x.size(1), 128), n_blocks = blocks_of(n, 128);
  const int64_t of_x = scale_x.numel(), of_w = scale_w.numel();
  const auto of = [](Scale kind, uint8_t layout) { return ScaleOf{kind, static_cast<uint8_t>(at::kFloat), layout}; };
  if ((of_x == 1 || of_x == m) && (of_w == 1 || of_w == n)) {
    const bool rows = of_x != 1 || of_w != 1;
    return {of(rows && of_x == m ? PER_ROW : PER_TENSOR, SCALES_BY_ROW),
            of(rows && of_w == n ? PER_ROW : PER_TENSOR, SCALES_BY_ROW), true};
  }
  const auto is = [](const Tensor& s, int64_t rows, int64_t cols) {
    return s.dim() == 2 && s.size(0) == rows && s.size(1) == cols;
  };
  const bool k_first = is(scale_w, k_blocks, n_blocks) && (by_k || !is(scale_w, n_blocks, k_blocks));
  if (!is(scale_x, m, k_blocks) || (!k_first && !is(scale_w, n_blocks, k_blocks))) return {};
  return {of(BY_1X128, layout_of(scale_x, m, k_blocks)),
          of(BY_128X128, layout_of(k_first ? turned_round(scale_w) : scale_w, n_blocks, k_blocks)), true};
}

constexpr uint8_t kInt4 = 40, kE8m0 = 44, kFp4 = 45;  // DTYPES of configs/problem.py

// The sizes of a product into a new key; false where they are no product's.
inline bool set_sizes(Problem& p, int64_t m, int64_t n, int64_t k) {
  if (std::min({m, n, k}) < 1 || std::max({m, n, k}) > INT32_MAX) return false;
  p = Problem{};
  p.batch = 1, p.m = static_cast<uint32_t>(m), p.n = static_cast<uint32_t>(n), p.k = static_cast<uint32_t>(k);
  return true;
}

// What the key of a product says that does not hang on its scales: how X and b [K, N] lie, and what is asked of it.
template <class Device>
void set_rest(Problem& p, const Tensor& x, const Tensor& b, at::ScalarType out, bool bias) {
  p.out_dtype = static_cast<uint8_t>(out);
  p.layout = static_cast<uint8_t>(side(x, false) * 3 + side(b, true));
  if (bias) p.flags |= BIAS;
  if (at::globalContext().deterministicAlgorithms()) p.flags |= DETERMINISTIC;
  Device::describe(p, x);
}

// The key of a product of two operands of MXFP4 as torch takes them: x [M, K / 2] and b [K / 2, N] of bytes that hold two
// numbers each, and bytes that are their scales, [M, K / 32] and of_b [K / 32, N]. False where we have no name for it.
template <class Device>
bool describe_pairs(Problem& p, const Tensor& x, const Tensor& b, const Tensor& of_x, const Tensor& of_b,
                    at::ScalarType out, bool bias) {
  const int64_t m = x.size(0), k = 2 * x.size(1), n = b.size(1);
  for (const Tensor* t : {&x, &b, &of_x, &of_b})
    if (t->scalar_type() != at::kByte || t->device() != x.device()) return false;
  if (2 * b.size(0) != k || k % 32 || !set_sizes(p, m, n, k)) return false;
  const auto is = [k](const Tensor& s, int64_t rows) { return s.size(0) == rows && s.size(1) == k / 32; };
  if (!is(of_x, m) || !is(turned_round(of_b), n)) return false;
  p.family = SCALED, p.dtype = p.wdtype = kFp4;
  p.scale = p.wscale = BY_1X32, p.scale_dtype = p.wscale_dtype = kE8m0;
  p.scale_layout = of_x.is_contiguous() ? SCALES_BY_ROW : SCALES_OTHERWISE;
  p.wscale_layout = turned_is_contiguous(of_b) ? SCALES_BY_ROW : SCALES_OTHERWISE;
  set_rest<Device>(p, x, b, out, bias);
  return true;
}

// The key of a product of X with a quantised W, both as torch takes them: X [M, K] of 16 bits, b [K, N] of 8 bits or
// [K / 2, N] of bytes that hold two numbers each, of_b its scales, [columns, rows] (gemmtuned/ops/weight_only.py). Bytes
// with scales that are bytes are MXFP4. False where we have no name for it.
template <class Device>
bool describe_weight_only(Problem& p, const Tensor& x, const Tensor& b, const Tensor& of_b, at::ScalarType out,
                          bool bias) {
  const bool two_a_byte = b.scalar_type() == at::kByte, powers = of_b.scalar_type() == at::kByte;
  const int64_t m = x.size(0), k = x.size(1), n = b.size(1), rows = of_b.size(1), columns = of_b.size(0);
  if (b.size(0) * (two_a_byte ? 2 : 1) != k || std::min(rows, columns) < 1 || !set_sizes(p, m, n, k)) return false;
  if (x.device() != b.device() || x.device() != of_b.device()) return false;
  p.family = WEIGHT_ONLY, p.dtype = static_cast<uint8_t>(x.scalar_type());
  p.wdtype = !two_a_byte ? static_cast<uint8_t>(b.scalar_type()) : powers ? kFp4 : kInt4;
  p.wscale_dtype = powers ? kE8m0 : static_cast<uint8_t>(of_b.scalar_type());
  if (two_a_byte) {
    const int64_t group = rows == n && k % columns == 0 ? k / columns : 0;
    p.wscale = group == 32 ? BY_1X32 : group == 64 ? BY_1X64 : group == 128 ? BY_1X128 : UNSCALED;
  } else {
    const bool blocks = rows == blocks_of(n, 128) && columns == blocks_of(k, 128);
    p.wscale = rows * columns == 1 ? PER_TENSOR : rows == n && columns == 1 ? PER_ROW : blocks ? BY_128X128 : UNSCALED;
  }
  if (p.wscale == UNSCALED) return false;
  p.wscale_layout = turned_is_contiguous(of_b) ? SCALES_BY_ROW : SCALES_OTHERWISE;
  set_rest<Device>(p, x, b, out, bias);
  return true;
}

// The same of an operator that subtracts zero points of X: one a row, or one that `sums_w` holds already.
inline BothScales with_zero_points(BothScales both, const Tensor& x, const Tensor& b, const Tensor& scale_x,
                                   const Tensor& zero_x, const Tensor& sums_w) {
  const auto are = [](const Tensor& t, int64_t many) { return t.scalar_type() == at::kInt && t.numel() == many; };
  const bool int8 = x.scalar_type() == at::kChar && b.scalar_type() == at::kChar, by_row = zero_x.defined();
  if (!both.known || !int8 || !sums_w.defined() || !are(sums_w, b.size(1))) return {};
  if (scale_x.numel() != (by_row ? x.size(0) : 1) || (by_row && !are(zero_x, x.size(0)))) return {};
  both.x.kind = by_row ? PER_ROW_WITH_ZERO : PER_TENSOR_WITH_ZERO;
  return both;
}

// The key of a product whose weight is nobody's but the operator's; false where there is none. `batched`: x and y have a
// batch in front, and each of it a weight of its own.
template <class Device>
bool describe_opaque(Problem& p, const Tensor& x, const Tensor& y, bool bias, bool batched) {
  if (x.dim() < 1 || y.dim() < 1 || (batched && (x.dim() != 3 || y.dim() != 3))) return false;
  const int64_t batch = batched ? x.size(0) : 1, k = x.size(-1), n = y.size(-1);
  const int64_t m = k && batch ? x.numel() / k / batch : 0;
  if (m <= 0 || n <= 0 || std::max({batch, m, n, k}) > INT32_MAX) return false;
  p = Problem{};
  p.batch = static_cast<uint32_t>(batch), p.m = static_cast<uint32_t>(m), p.n = static_cast<uint32_t>(n);
  p.k = static_cast<uint32_t>(k);
  p.family = batch == 1 ? DENSE : BATCHED, p.dtype = p.wdtype = static_cast<uint8_t>(x.scalar_type());
  p.out_dtype = static_cast<uint8_t>(y.scalar_type());
  p.layout = 1;  // nt, as a linear layer has it
  p.flags = bias ? PACKED | BIAS : PACKED, p.packing = kOpaque;
  Device::describe(p, x);
  return true;
}

}  // namespace gemmtuned
