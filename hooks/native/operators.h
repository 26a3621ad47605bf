// aten's leaf GEMMs, for any device that offers what cpu.h does. Registered by install.h.
#pragma once
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

#include "call.h"

namespace gemmtuned {

// Whether the product can simply be copied into `out`: it need not be resized, and torch would not refuse it.
inline bool fits(const Tensor& out, const Problem& p, const Tensor& a) {
  return out.device() == a.device() && out.dim() == a.dim() && out.size(-1) == p.n && out.size(-2) == a.size(-2) &&
         (a.dim() == 2 || out.size(0) == a.size(0)) && out.scalar_type() == static_cast<at::ScalarType>(p.out_dtype) &&
         at::has_internal_overlap(out) != at::MemOverlap::Yes;
}

inline bool is_one(const Scalar& s) { return !s.isComplex() && s.toDouble() == 1.0; }

// A bias that is added to every row; anything else makes the product an "add" family.
inline bool is_bias(const Tensor& c, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return c.dim() == 1 && c.scalar_type() == b.scalar_type() && b.dim() == 2 && c.size(0) == b.size(1) && is_one(beta) &&
         is_one(alpha);
}

// A full C, which torch need not broadcast.
inline bool is_full(const Tensor& c, const Problem& p, const Tensor& a) {
  return c.dim() == a.dim() && c.size(-1) == p.n && c.size(-2) == a.size(-2) &&
         (a.dim() == 2 || c.size(0) == a.size(0));
}

// C broadcast as torch does it, without a copy; undefined if torch would refuse it.
inline Tensor spread(const Tensor& c, const Problem& p, const Tensor& a) {
  auto sizes = a.sizes().vec();
  sizes.back() = p.n;
  if (c.dim() > a.dim()) return {};
  for (int64_t d = 1; d <= c.dim(); ++d)
    if (c.size(-d) != 1 && c.size(-d) != sizes[sizes.size() - static_cast<size_t>(d)]) return {};
  const Below below;
  return c.expand(sizes);
}

template <class Device>
struct Operators {
  // x w: describe the problem, name the operands, call.
  template <class Stock>
  static auto product(Family family, const Tensor& a, const Tensor& b, at::ScalarType type, const Stock& stock,
                      Tensor* out = nullptr) -> decltype(stock()) {
    Problem p;
    if (off() || !describe<Device>(p, family, a, b, type)) return stock();
    const int flags = !out || fits(*out, p, a) ? ROUTABLE : COUNTED_ONLY;
    if (C10_LIKELY(p.family == family)) return call<Device>(p, slots_of(a, b), flags, stock, out);
    const auto [x, w] = without_batch(a, b);  // a batch of 1: the solution is a dense one
    return call<Device>(p, slots_of(x, w), flags | (flags ? NO_BATCH : 0), stock, out);
  }

  // alpha x w + beta c, where c may be a bias that is added to every row.
  template <class Stock>
  static auto sum(Family family, const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type,
                  const Scalar& beta, const Scalar& alpha, const Stock& stock, Tensor* out = nullptr)
      -> decltype(stock()) {
    Problem p;
    if (off() || is_wrapper(c) || c.device() != a.device()) return stock();  // torch has the right error
    const bool bias = family == DENSE_ADD && is_bias(c, b, beta, alpha);
    if (!describe<Device>(p, bias ? DENSE : family, a, b, type)) return stock();
    const bool alike = c.scalar_type() == type;  // torch also takes C in X's type where the result is wider
    if (bias) {
      p.flags |= BIAS;
      const bool routable = alike && (!out || fits(*out, p, a));
      return call<Device>(p, slots_of(a, b, &c), routable ? ROUTABLE : COUNTED_ONLY, stock, out);
    }
    Tensor whole;
    const bool numbers = !beta.isComplex() && !alpha.isComplex(), full = is_full(c, p, a);
    if (numbers && !full) whole = spread(c, p, a);
    if (!alike || !numbers || (!full && !whole.defined()) || (out && !fits(*out, p, a)))
      return call<Device>(p, slots_of(a, b), COUNTED_ONLY, stock, out);
    Slots slots = slots_of(a, b);
    slots.t[SLOT_C] = full ? &c : &whole, slots.alpha = alpha.toDouble(), slots.beta = beta.toDouble();
    if (C10_LIKELY(p.family == family)) return call<Device>(p, slots, ROUTABLE, stock, out);
    const auto [x, w, of_batch] = without_batch(a, b, *slots.c());  // a batch of 1, as in product
    slots.t[SLOT_X] = &x, slots.t[SLOT_W] = &w, slots.t[SLOT_C] = &of_batch;
    return call<Device>(p, slots, ROUTABLE | NO_BATCH, stock, out);
  }

  // Calls that no route can serve. `whole`: the kernel does more than the product, which is part of the key.
  template <class Stock>
  static auto count(Family family, at::ScalarType type, const Tensor& a, const Tensor& b, const Stock& stock,
                    bool whole = false, bool bias = false) -> decltype(stock()) {
    Problem p;
    if (off() || !describe<Device>(p, family, a, b, type)) return stock();
    if (whole) p.flags |= PACKED, p.packing = kOpaque;
    if (bias) p.flags |= BIAS;
    return call<Device>(p, slots_of(a, b), COUNTED_ONLY, stock);
  }

  static Tensor mm(const Tensor& a, const Tensor& b) {
    return product(DENSE, a, b, a.scalar_type(), [&] { return Device::mm(a, b); });
  }
  static Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    return product(DENSE, a, b, a.scalar_type(), [&]() -> Tensor& { return Device::mm_out(out, a, b); }, &out);
  }
  static Tensor bmm(const Tensor& a, const Tensor& b) {
    return product(BATCHED, a, b, a.scalar_type(), [&] { return Device::bmm(a, b); });
  }
  static Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    return product(BATCHED, a, b, a.scalar_type(), [&]() -> Tensor& { return Device::bmm_out(out, a, b); }, &out);
  }

  static Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    return sum(DENSE_ADD, c, a, b, c.scalar_type(), beta, alpha, [&] { return Device::addmm(c, a, b, beta, alpha); });
  }
  static Tensor& addmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                           Tensor& out) {
    const auto stock = [&]() -> Tensor& { return Device::addmm_out(out, c, a, b, beta, alpha); };
    return sum(DENSE_ADD, c, a, b, c.scalar_type(), beta, alpha, stock, &out);
  }
  static Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    const auto stock = [&]() -> Tensor& { return Device::addmm_(c, a, b, beta, alpha); };
    return sum(DENSE_ADD, c, a, b, c.scalar_type(), beta, alpha, stock, &c);
  }
  static Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    return sum(BATCHED_ADD, c, a, b, c.scalar_type(), beta, alpha,
               [&] { return Device::baddbmm(c, a, b, beta, alpha); });
  }
  static Tensor& baddbmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                             Tensor& out) {
    const auto stock = [&]() -> Tensor& { return Device::baddbmm_out(out, c, a, b, beta, alpha); };
    return sum(BATCHED_ADD, c, a, b, c.scalar_type(), beta, alpha, stock, &out);
  }
  static Tensor& baddbmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    const auto stock = [&]() -> Tensor& { return Device::baddbmm_(c, a, b, beta, alpha); };
    return sum(BATCHED_ADD, c, a, b, c.scalar_type(), beta, alpha, stock, &c);
  }

  // On a CPU torch computes the sum, then the function in place; on a GPU one kernel does both.
  static Tensor addmm_activation(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                                 const Scalar& alpha, bool gelu) {
    if constexpr (Device::on_host) {
      Tensor y = addmm(c, a, b, beta, alpha);
      return gelu ? at::gelu_(y) : at::relu_(y);
    } else {
      const bool bias = is_bias(c, b, beta, alpha);
      return count(
          bias ? DENSE : DENSE_ADD, c.scalar_type(), a, b,
          [&] { return Device::addmm_activation(c, a, b, beta, alpha, gelu); }, true, bias);
    }
  }
  static Tensor& addmm_activation_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                                      const Scalar& alpha, bool gelu, Tensor& out) {
    if constexpr (Device::on_host) {
      addmm_out(c, a, b, beta, alpha, out);
      return gelu ? at::gelu_(out) : at::relu_(out);
    } else {
      const bool bias = is_bias(c, b, beta, alpha);
      const auto stock = [&]() -> Tensor& { return Device::addmm_activation_out(out, c, a, b, beta, alpha, gelu); };
      return count(bias ? DENSE : DENSE_ADD, c.scalar_type(), a, b, stock, true, bias);
    }
  }
  static Tensor int_mm(const Tensor& a, const Tensor& b) {
    return product(DENSE, a, b, at::kInt, [&] { return Device::int_mm(a, b); });
  }
  static Tensor& int_mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    return product(DENSE, a, b, at::kInt, [&]() -> Tensor& { return Device::int_mm_out(out, a, b); }, &out);
  }
};

}  // namespace gemmtuned
