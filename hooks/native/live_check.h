// The live check: one routed call in N, by chance, is computed by stock torch too, and the two are compared.
//
// Off by default (GEMMTUNED_LIVE_CHECK=N): the two results of a sampled call, and reading them, cost more than the call. It
// finds what no check before publishing can: a kernel that is wrong rarely, or only on this program's numbers.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <atomic>
#include <cmath>
#include <iomanip>
#include <limits>
#include <string>

#include "plain_text.h"
#include "problem.h"
#include "slots.h"

namespace gemmtuned {

inline std::atomic<uint32_t> g_live_every{0};

inline bool live_check_due() {
  const uint32_t every = g_live_every.load(std::memory_order_relaxed);
  if (C10_LIKELY(!every)) return false;
  thread_local uint64_t state = reinterpret_cast<uintptr_t>(&state) | 1;  // xorshift64: models call in a fixed order
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state % every == 0;
}

// What the gate lets the RMS error of either result be at most, whatever stock's own is: `cap` of kernels/families/error.py,
// of this many results, which tests/hooks/test_hooks_live_check.py compares with this. 0: it has none for such results.
inline double live_cap(const Problem& p, double count) {
  constexpr double kSure = 6;
  const auto out = static_cast<at::ScalarType>(p.out_dtype);
  const bool half = out == at::kHalf, bf16 = out == at::kBFloat16, is_double = out == at::kDouble;
  if (!half && !bf16 && !is_double && out != at::kFloat) return 0;
  const double u_out = std::ldexp(1.0, half ? -11 : bf16 ? -8 : is_double ? -53 : -24);
  const double u_sum = std::min(u_out, std::ldexp(1.0, -24)), reference = is_double ? 2 : 1;
  const double adding = std::sqrt(reference * (p.k + 1.0) / 3) * u_sum;
  const double chance = 1 + kSure / std::sqrt(count);
  const double floor = std::hypot(adding * chance, u_out / 2);
  const bool of_floats = static_cast<at::ScalarType>(p.dtype) == at::kFloat;
  double cap = half || bf16 ? 5e-3 : is_double ? 1e-12 : 1e-5;
  if (of_floats && p.math == TF32) cap = 2e-3;
  if ((of_floats && p.math == BF16_INSIDE) || p.scale != UNSCALED) cap = 5e-3;
  if (p.family != MOE) return std::max(cap, floor);
  return std::max({cap, floor, 1.25 * std::sqrt(p.wscale != UNSCALED ? 10 : 6.5) * u_out / 2 * chance});
}

// How far y is from stock's result beyond what is allowed, in words; "" when it is not. Reads the results: on a GPU it waits.
//
// Distances are taken against RMS(stock), or what K products of random sign would sum to where the sum is smaller: then it
// has cancelled, and its rounding is that of its parts. Where stock is not finite, or about to overflow, nothing is compared.
inline std::string live_mismatch(const Problem& p, const Slots& slots, const at::Tensor& y, const at::Tensor& stock) {
  if (stock.scalar_type() == at::kInt) {  // sums of integers have one right value
    const int64_t others = y.ne(stock).sum().item<int64_t>();
    return others ? "live check: " + std::to_string(others) + " of " + std::to_string(stock.numel()) +
                        " whole numbers are not torch's"
                  : "";
  }
  const double cap = live_cap(p, static_cast<double>(stock.numel()));
  if (!cap || !at::isFloatingType(stock.scalar_type())) return "";
  const auto wide = stock.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto rms = [&](const at::Tensor& t) {
    return t.to(wide).square().mean().to(at::kDouble).sqrt().item<double>();
  };
  const double largest = stock.scalar_type() == at::kHalf ? 65504.0 : 3e38;
  const at::Tensor s = stock.to(wide), size = s.abs();
  const at::Tensor usual = size.lt(largest / 2);  // false for NaN and Inf
  if (!usual.any().item<bool>()) return "";
  const at::Tensor none = at::zeros_like(s);
  const at::Tensor apart = at::where(usual, y.to(wide).sub(s).abs(), none);
  const at::Tensor kept = at::where(usual, s, none);
  double spread = std::sqrt(static_cast<double>(p.k)) * std::abs(slots.alpha);
  for (const Slot operand : {SLOT_X, SLOT_W, SLOT_SCALE_X, SLOT_SCALE_W})
    if (slots.t[operand]) spread *= rms(*slots.t[operand]);
  if (!std::isfinite(spread)) return "";  // NaN or Inf among the operands: rows they touch are not finite either way
  const double scale = std::max({rms(kept), spread, std::numeric_limits<double>::min()});
  const double reach = std::max(kept.abs().max().item<double>() / scale, 3.0);
  const double r = apart.to(at::kDouble).square().mean().sqrt().item<double>() / scale;
  const double m = apart.max().item<double>() / scale;  // NaN when y has one where stock has none
  const double r_limit = 2 * cap, m_limit = 4 * cap * reach;
  if (r <= r_limit && m <= m_limit) return "";
  PlainText text;
  text << std::scientific << std::setprecision(2) << "live check: off from torch's result by RMS " << r
       << " and at most " << m << " of its RMS, allowed " << r_limit << " and " << m_limit;
  return text.str();
}

}  // namespace gemmtuned
