// Groups of rows on GPUs (2-D by 3-D): _grouped_mm, and _scaled_grouped_mm, which routes serve where it has a scale a row.
//
// The number of groups is the batch. Other forms, as those of a backward pass (2-D by 2-D), are torch's, uncounted. As with
// the private operators of cuda.h, each is registered where this torch has it so (install.h).
#pragma once
#if __has_include(<ATen/ops/_grouped_mm_cuda_dispatch.h>)
#include <ATen/ops/_grouped_mm_cuda_dispatch.h>
#define GEMMTUNED_GROUPED_MM
#endif
#if __has_include(<ATen/ops/_scaled_grouped_mm_cuda_dispatch.h>)
#include <ATen/ops/_scaled_grouped_mm_cuda_dispatch.h>
#define GEMMTUNED_SCALED_GROUPED_MM
#endif
#if __has_include(<ATen/ops/_scaled_grouped_mm_v2_cuda_dispatch.h>)
#include <ATen/ops/_scaled_grouped_mm_v2_cuda_dispatch.h>
#define GEMMTUNED_SCALED_GROUPED_MM_V2
#endif

#include "cuda.h"

namespace gemmtuned {

// Completes all but the scales; false where it is no product of groups of rows.
inline bool describe_grouped(Problem& p, const Tensor& a, const Tensor& b, at::ScalarType type) {
  if (a.dim() != 2 || b.dim() != 3 || a.size(1) != b.size(1) || a.numel() == 0 || b.numel() == 0 ||
      b.size(0) > INT32_MAX)
    return false;
  if (!describe<Cuda>(p, GROUPED, a, first_of(b), type)) return false;
  p.batch = static_cast<uint32_t>(b.size(0));
  return true;
}

// Of _scaled_grouped_mm: a value for each row of X and each row of each W, or e8m0 blocks as the hardware reads them.
inline BothScales scales_of_groups(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b) {
  const auto both = [&](Scale kind, uint8_t layout) {
    return BothScales{{kind, static_cast<uint8_t>(scale_a.scalar_type()), layout},
                      {kind, static_cast<uint8_t>(scale_b.scalar_type()), layout},
                      true};
  };
  const auto are = [&](at::ScalarType type) {
    return scale_a.scalar_type() == type && scale_b.scalar_type() == type && scale_b.dim() == 2 &&
           scale_b.size(0) == b.size(0);
  };
  if (are(at::kFloat) && scale_a.dim() == 1 && scale_a.size(0) == a.size(0) && scale_b.size(1) == b.size(2))
    return both(PER_ROW, SCALES_BY_ROW);
  if (are(at::kFloat8_e8m0fnu) && scale_a.dim() == 2) return both(BY_1X32, SCALES_SWIZZLED);
  return {};
}

// The same by recipe. Blocks that are not swizzled lie in no order that we have a name for where groups have their own.
inline BothScales scales_of_groups(const Tensor& a, const Tensor& b, at::TensorList scale_a, at::IntArrayRef recipe_a,
                                   at::IntArrayRef swizzle_a, at::TensorList scale_b, at::IntArrayRef recipe_b,
                                   at::IntArrayRef swizzle_b) {
  const Tensor w = turned_round(first_of(b));
  ScaleOf x = by_recipe(a, scale_a, recipe_a, swizzle_a, false), y = by_recipe(w, scale_b, recipe_b, swizzle_b, true);
  for (ScaleOf* one : {&x, &y})
    if (one->kind >= BY_1X32 && one->layout != SCALES_SWIZZLED) one->layout = SCALES_OTHERWISE;
  return {x, y, x.kind != UNSCALED && y.kind != UNSCALED};
}

// Whether a kernel can find the groups' rows: it reads their ends on the device, and adds nothing.
inline bool groups_are_routable(const Tensor& a, const OptionalTensor& offsets, const OptionalTensor& bias) {
  return offsets && offsets->dim() == 1 && offsets->scalar_type() == at::kInt && !bias &&
         offsets->device() == a.device();
}

struct ScaledGroupsCall {
  const Tensor &a, &b;
  const Tensor *scale_a, *scale_b;  // null where there are several of one operand, which no kernel of ours takes
  const OptionalTensor &offsets, &bias;
  std::optional<at::ScalarType> type;
  bool fast, routable;
};

// scales: gives what both stand for; called after the operands are known to be groups of rows that fit.
template <class Scales, class Stock>
Tensor scaled_groups(const ScaledGroupsCall& c, const Scales& scales, const Stock& stock) {
  Problem p;
  if (off() || !describe_grouped(p, c.a, c.b, c.type.value_or(at::kBFloat16)) ||
      !describe_scaled(p, scales(), c.a, c.bias.has_value(), c.fast))
    return stock();
  Slots slots = slots_of(c.a, c.b);
  slots.t[SLOT_SCALE_X] = c.scale_a, slots.t[SLOT_SCALE_W] = c.scale_b;
  if (c.offsets) slots.t[SLOT_OFFS] = &*c.offsets;
  const auto here = [&](const Tensor* t) { return t && t->device() == c.a.device(); };
  const bool routable = c.routable && groups_are_routable(c.a, c.offsets, c.bias) && here(c.scale_a) && here(c.scale_b);
  return call<Cuda>(p, slots, routable ? ROUTABLE : COUNTED_ONLY, stock);
}

#ifdef GEMMTUNED_GROUPED_MM
template <class T>
Tensor grouped_mm(const T& a, const T& b, const OptionalTensor& offsets, const OptionalTensor& bias,
                  std::optional<at::ScalarType> type) {
  const auto stock = [&] { return at::cuda::_grouped_mm(a, b, offsets, bias, type); };
  Problem p;
  if (off() || !describe_grouped(p, a, b, type.value_or(a.scalar_type()))) return stock();
  Slots slots = slots_of(a, b);
  if (offsets) slots.t[SLOT_OFFS] = &*offsets;
  return call<Cuda>(p, slots, groups_are_routable(a, offsets, bias) ? ROUTABLE : COUNTED_ONLY, stock);
}
#endif

#ifdef GEMMTUNED_SCALED_GROUPED_MM
template <class T>
Tensor scaled_grouped_mm(const T& a, const T& b, const T& scale_a, const T& scale_b, const OptionalTensor& offsets,
                         const OptionalTensor& bias, const OptionalTensor& scale_result,
                         std::optional<at::ScalarType> type, bool fast) {
  const auto stock = [&] {
    return at::cuda::_scaled_grouped_mm(a, b, scale_a, scale_b, offsets, bias, scale_result, type, fast);
  };
  const auto scales = [&] { return scales_of_groups(a, b, scale_a, scale_b); };
  return scaled_groups({a, b, &scale_a, &scale_b, offsets, bias, type, fast, !scale_result}, scales, stock);
}
#endif

// torch.nn.functional.scaled_grouped_mm's operator. Stock: torch's function.
struct ScaledGroupedV2 {
  using Scales = at::TensorList;
  using Ints = at::IntArrayRef;
  using Type = std::optional<at::ScalarType>;
  using Plain = Tensor(const Tensor&, const Tensor&, Scales, Ints, Ints, Scales, Ints, Ints, const OptionalTensor&,
                       const OptionalTensor&, Type, Ints, bool);

  // As ScaledV2's.
  template <class T>
  static constexpr Plain* as_plain(Plain* torchs) {
    return torchs;
  }

  template <Plain* Stock>
  static Tensor plain(const Tensor& a, const Tensor& b, Scales scale_a, Ints recipe_a, Ints swizzle_a, Scales scale_b,
                      Ints recipe_b, Ints swizzle_b, const OptionalTensor& offsets, const OptionalTensor& bias,
                      Type type, Ints dims, bool fast) {
    const auto stock = [&] {
      return Stock(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, offsets, bias, type, dims, fast);
    };
    if (!dims.empty()) return stock();
    const auto scales = [&] {
      return scales_of_groups(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
    };
    const auto one = [](Scales of) { return of.size() == 1 ? &of[0] : nullptr; };
    return scaled_groups({a, b, one(scale_a), one(scale_b), offsets, bias, type, fast, true}, scales, stock);
  }
};

}  // namespace gemmtuned
