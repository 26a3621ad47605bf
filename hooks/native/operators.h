// aten's leaf GEMMs, for any device that offers what cpu.h does. Registered by install.h.
#pragma once
#include <ATen/MemoryOverlap.h>

#include "call.h"

namespace gemmtuned {

// Whether copying the product into `out` is all there is to do: it need not be resized, and torch will not refuse it.
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

template <class Device>
struct Operators {
  static Tensor checked(const Route& route, const Problem& p, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                 const Tensor& packed = {}) {
    return as_stock(Device::run(route, a, b, bias, packed), p, a);
  }

  static Tensor& checked_out(const Route& route, const Problem& p, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                      Tensor& out) {
    if (Device::run_into(route, a, b, bias, out)) return out;
    const Tensor y = checked(route, p, a, b, bias);
    at::AutoDispatchBelowADInplaceOrView below;
    return out.copy_(y);  // through a fresh tensor: `out` may overlap an operand
  }

  static Tensor mm(const Tensor& a, const Tensor& b) {
    Problem p;
    if (off() || !describe<Device>(p, DENSE, a, b, a.scalar_type())) return Device::mm(a, b);
    return call<Device>(
        p, a, b, nullptr, true, [&] { return Device::mm(a, b); },
        [&](Route& r) { return checked(r, p, a, b, std::nullopt); });
  }

  static Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    Problem p;
    if (off() || !describe<Device>(p, DENSE, a, b, a.scalar_type())) return Device::mm_out(out, a, b);
    return call<Device>(
        p, a, b, nullptr, fits(out, p, a), [&]() -> Tensor& { return Device::mm_out(out, a, b); },
        [&](Route& r) -> Tensor& { return checked_out(r, p, a, b, std::nullopt, out); },
        [&](Route& r) { return checked(r, p, a, b, std::nullopt); });
  }

  static bool describe_addmm(Problem& p, const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                      const Scalar& alpha) {
    if (c.device() != a.device()) return false;  // torch has the right error
    const bool bias = is_bias(c, b, beta, alpha);
    if (!describe<Device>(p, bias ? DENSE : DENSE_ADD, a, b, c.scalar_type())) return false;
    if (bias) p.flags |= BIAS;
    return true;
  }

  static Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    Problem p;
    if (off() || !describe_addmm(p, c, a, b, beta, alpha)) return Device::addmm(c, a, b, beta, alpha);
    return call<Device>(
        p, a, b, &c, p.family == DENSE, [&] { return Device::addmm(c, a, b, beta, alpha); },
        [&](Route& r) { return checked(r, p, a, b, c); });
  }

  static Tensor& addmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                    Tensor& out) {
    Problem p;
    if (off() || !describe_addmm(p, c, a, b, beta, alpha)) return Device::addmm_out(out, c, a, b, beta, alpha);
    return call<Device>(
        p, a, b, &c, p.family == DENSE && fits(out, p, a),
        [&]() -> Tensor& { return Device::addmm_out(out, c, a, b, beta, alpha); },
        [&](Route& r) -> Tensor& { return checked_out(r, p, a, b, c, out); },
        [&](Route& r) { return checked(r, p, a, b, c); });
  }

  // The families with a full C are counted and served by torch: no route is taken up for them.
  template <class Stock>
  static auto count(Family family, const Tensor& c, const Tensor& a, const Tensor& b, const Stock& stock) -> decltype(stock()) {
    return count_as(family, c.scalar_type(), a, b, stock);
  }

  template <class Stock>
  static auto count_as(Family family, at::ScalarType out, const Tensor& a, const Tensor& b, const Stock& stock)
      -> decltype(stock()) {
    Problem p;
    if (off() || !describe<Device>(p, family, a, b, out)) return stock();
    return call<Device>(
        p, a, b, nullptr, false, stock, [&](Route&) -> decltype(stock()) { return stock(); }, [](Route&) { return Tensor(); });
  }

  // With a function of the sum behind it, which no route has; and whole numbers.
  static Tensor addmm_activation(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                                 bool gelu) {
    return count(DENSE_ADD, c, a, b, [&] { return Device::addmm_activation(c, a, b, beta, alpha, gelu); });
  }

  static Tensor& addmm_activation_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                                      const Scalar& alpha, bool gelu, Tensor& out) {
    return count(DENSE_ADD, c, a, b,
                 [&]() -> Tensor& { return Device::addmm_activation_out(out, c, a, b, beta, alpha, gelu); });
  }

  static Tensor int_mm(const Tensor& a, const Tensor& b) {
    return count_as(DENSE, at::kInt, a, b, [&] { return Device::int_mm(a, b); });
  }

  static Tensor& int_mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    return count_as(DENSE, at::kInt, a, b, [&]() -> Tensor& { return Device::int_mm_out(out, a, b); });
  }

  static Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    return count(DENSE_ADD, c, a, b, [&]() -> Tensor& { return Device::addmm_(c, a, b, beta, alpha); });
  }

  static Tensor bmm(const Tensor& a, const Tensor& b) {
    Problem p;
    if (off() || !describe<Device>(p, BATCHED, a, b, a.scalar_type())) return Device::bmm(a, b);
    const auto stock = [&] { return Device::bmm(a, b); };
    if (p.family == BATCHED)
      return call<Device>(p, a, b, nullptr, true, stock, [&](Route& r) { return checked(r, p, a, b, std::nullopt); });
    const Tensor x = a.squeeze(0), w = b.squeeze(0);  // batch 1: the solution is a dense one
    return call<Device>(p, x, w, nullptr, true, stock,
                        [&](Route& r) { return checked(r, p, x, w, std::nullopt).unsqueeze(0); });
  }

  static Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) {
    Problem p;
    if (off() || !describe<Device>(p, BATCHED, a, b, a.scalar_type())) return Device::bmm_out(out, a, b);
    const auto stock = [&]() -> Tensor& { return Device::bmm_out(out, a, b); };
    if (p.family == BATCHED)
      return call<Device>(
          p, a, b, nullptr, fits(out, p, a), stock,
          [&](Route& r) -> Tensor& { return checked_out(r, p, a, b, std::nullopt, out); },
          [&](Route& r) { return checked(r, p, a, b, std::nullopt); });
    const Tensor x = a.squeeze(0), w = b.squeeze(0);
    const auto fresh = [&](Route& r) { return checked(r, p, x, w, std::nullopt).unsqueeze(0); };
    const auto routed = [&](Route& r) -> Tensor& {
      const Tensor y = fresh(r);
      at::AutoDispatchBelowADInplaceOrView below;
      return out.copy_(y);
    };
    return call<Device>(p, x, w, nullptr, fits(out, p, a), stock, routed, fresh);
  }

  static Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    return count(BATCHED_ADD, c, a, b, [&] { return Device::baddbmm(c, a, b, beta, alpha); });
  }

  static Tensor& baddbmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                      Tensor& out) {
    return count(BATCHED_ADD, c, a, b, [&]() -> Tensor& { return Device::baddbmm_out(out, c, a, b, beta, alpha); });
  }

  static Tensor& baddbmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
    return count(BATCHED_ADD, c, a, b, [&]() -> Tensor& { return Device::baddbmm_(c, a, b, beta, alpha); });
  }
};

}  // namespace gemmtuned
