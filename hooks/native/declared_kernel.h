// Operators of families that other packages declare (hooks/declared.py): counted under the family's problem, and served.
#pragma once
#include "foreign.h"

#ifdef GEMMTUNED_FOREIGN
namespace gemmtuned {

// X as a matrix: what is in front of its last dimension is rows. Undefined where that takes a copy.
inline Tensor as_rows(const Tensor& x) {
  const Below below;
  if (x.dim() == 2) return x;
  return x.dim() > 2 && x.is_contiguous() && x.numel() ? x.view({-1, x.size(-1)}) : Tensor();
}

template <class Device>
void declared_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Foreign* const it = foreign_of<Device>(op);
  const ForeignFacts& f = it->facts;
  bool is_done = false;
  const auto stock = [&] {
    call_stock<Device>(*it, keys, stack);
    is_done = true;
  };
  if (off() || stack->size() < it->arguments) return stock();
  const auto argument = [&](int8_t at) {
    return at < 0 ? c10::IValue() : (*stack)[stack->size() - it->arguments + static_cast<size_t>(at)];
  };
  const auto tensor = [&](int8_t at) {
    const c10::IValue given = argument(at);
    return given.isTensor() ? given.toTensor() : Tensor();
  };
  const Tensor given_x = tensor(f.x), w = tensor(f.w), bias = tensor(f.bias);
  Tensor y = tensor(f.y);
  if (!given_x.defined() || !w.defined() || w.dim() != 2) return stock();
  const Tensor x = as_rows(given_x), b = f.form == SCALED_NK ? turned_round(w) : w;
  if (!x.defined()) return stock();
  const c10::IValue named = argument(f.out);
  const auto out = y.defined()     ? y.scalar_type()
                   : named.isInt() ? static_cast<at::ScalarType>(named.toInt())
                                   : x.scalar_type();
  Problem p;
  // `describe` is asked for a scaled product, because it makes only dense ones batch-invariant. No product of another
  // package's family is batch-invariant, so a program that wants batch invariance runs the package's own operator.
  if (!describe<Device>(p, SCALED, x, b, out)) return stock();
  p.family = f.family;
  if (bias.defined()) p.flags |= BIAS;
  const bool plain_bias = !bias.defined() || (bias.dim() == 1 && bias.size(0) == p.n && bias.device() == x.device());
  const int flags = it->is_alone && plain_bias ? ROUTABLE : COUNTED_ONLY;
  const Slots slots = slots_of(x, b, bias.defined() ? &bias : nullptr);
  if (y.defined()) {
    const bool fits = given_x.dim() == 2 && y.dim() == 2 && y.size(0) == p.m && y.size(1) == p.n &&
                      y.device() == x.device() && at::has_internal_overlap(y) != at::MemOverlap::Yes;
    const auto written = [&]() -> Tensor& {
      stock();
      return y;
    };
    call<Device>(p, slots, fits ? flags : COUNTED_ONLY, written, &y);
    if (is_done) return;
    torch::jit::drop(*stack, it->arguments);
    if (it->returns) stack->emplace_back(y);
    return;
  }
  const auto returned = [&] {
    stock();
    const Tensor& made = stack->back().toTensor();
    const Below below;
    return made.dim() > 2 && made.is_contiguous() && made.numel() == p.m * int64_t{p.n} ? made.view({p.m, p.n}) : made;
  };
  const Tensor made = call<Device>(p, slots, flags, returned);
  if (is_done) return;
  torch::jit::drop(*stack, it->arguments);
  auto sizes = given_x.sizes().vec();
  sizes.back() = p.n;
  const Below below;
  stack->emplace_back(given_x.dim() == 2 ? made : made.view(sizes));
}

}  // namespace gemmtuned
#endif
