// The operators that we stand in front of, and how each is registered.
//
// Each registration lives as long as the process: programs, and torch itself, keep the kernel that they find (as
// torch.library.get_kernel gives it) and call it for what theirs does not take. Switched off, ours pass calls on.
#pragma once
#include <torch/library.h>

#include <concepts>
#include <string>
#include <vector>

#include "cpu.h"
#include "operators.h"
#ifdef GEMMTUNED_CUDA
#include "cuda_grouped.h"
#endif

namespace gemmtuned {

struct Installable {
  std::string name;  // "CPU aten::mm.out"
  const char* operation;
  c10::DispatchKey key;
  void (*add)(torch::Library&, const char*);
  bool done = false;
};

template <auto* Ours>
void add_to(torch::Library& library, const char* operation) {
  library.impl(operation, c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(Ours)>, Ours>());
}

#ifdef GEMMTUNED_CUDA
// Operators of torch's own use, as far as this torch calls them as we do. T is Tensor.
template <class Take, class T>
void list_private(std::vector<Installable>&, const Take& take, const T& t) {
  using Type = at::ScalarType;
  const Type d{};
  const Scalar one = 1;
  if constexpr (requires { at::cuda::mm(t, t, d); }) take("mm.dtype", add_to<&Cuda::mm_dtype<T>>);
  if constexpr (requires { at::cuda::bmm(t, t, d); }) take("bmm.dtype", add_to<&Cuda::bmm_dtype<T>>);
  if constexpr (requires { at::cuda::addmm(t, t, t, d, one, one); }) take("addmm.dtype", add_to<&Cuda::addmm_dtype<T>>);
  if constexpr (requires { at::cuda::baddbmm(t, t, t, d, one, one); })
    take("baddbmm.dtype", add_to<&Cuda::baddbmm_dtype<T>>);
  [[maybe_unused]] const OptionalTensor o;
  [[maybe_unused]] const std::optional<Type> od;
#ifdef GEMMTUNED_SCALED_MM
  if constexpr (requires { at::cuda::_scaled_mm(t, t, t, t, o, o, od, true); }) {
    take("_scaled_mm", add_to<&Cuda::scaled_mm<T>>);
    take("_scaled_mm.out", add_to<&Cuda::scaled_mm_out<T>>);
  }
#endif
#ifdef GEMMTUNED_SCALED_MM_V2
  using V2 = Cuda::ScaledV2;
  constexpr auto plain = at::cuda::_scaled_mm_v2;
  constexpr auto outf = at::cuda::_scaled_mm_v2_outf;
  if constexpr (std::is_same_v<decltype(plain), V2::Plain* const> && std::is_same_v<decltype(outf), V2::Out* const>) {
    take("_scaled_mm_v2", add_to<&V2::plain<plain>>);
    take("_scaled_mm_v2.out", add_to<&V2::out<outf>>);
  }
#endif
#ifdef GEMMTUNED_GROUPED_MM
  if constexpr (requires { at::cuda::_grouped_mm(t, t, o, o, od); }) take("_grouped_mm", add_to<&grouped_mm<T>>);
#endif
#ifdef GEMMTUNED_SCALED_GROUPED_MM
  if constexpr (requires { at::cuda::_scaled_grouped_mm(t, t, t, t, o, o, o, od, true); })
    take("_scaled_grouped_mm", add_to<&scaled_grouped_mm<T>>);
#endif
#ifdef GEMMTUNED_SCALED_GROUPED_MM_V2
  constexpr auto groups = at::cuda::_scaled_grouped_mm_v2;
  if constexpr (std::is_same_v<decltype(groups), ScaledGroupedV2::Plain* const>)
    take("_scaled_grouped_mm_v2", add_to<&ScaledGroupedV2::plain<groups>>);
#endif
}
#endif

// Whether this torch has the operators of its own use that are on every device as we call them.
template <class Device, class T = Tensor>
concept CallsActivation = requires(const T t, T out, const Scalar one) {
  { Device::addmm_activation(t, t, t, one, one, true) } -> std::same_as<T>;
  { Device::addmm_activation_out(out, t, t, t, one, one, true) } -> std::same_as<T&>;
};
template <class Device, class T = Tensor>
concept CallsIntMm = requires(const T t, T out) {
  { Device::int_mm(t, t) } -> std::same_as<T>;
  { Device::int_mm_out(out, t, t) } -> std::same_as<T&>;
};

template <class Device>
void list_operators(std::vector<Installable>& all) {
  using Ours = Operators<Device>;
  const auto take = [&](const char* operation, void (*add)(torch::Library&, const char*)) {
    all.push_back({std::string(c10::toString(Device::key)) + " aten::" + operation, operation, Device::key, add});
  };
#define GEMMTUNED_TAKE(operation, ours, torchs) take(operation, add_to<&Ours::ours>);
  GEMMTUNED_OPERATORS(GEMMTUNED_TAKE)
  if constexpr (CallsActivation<Device>) {
    GEMMTUNED_ACTIVATION_OPERATORS(GEMMTUNED_TAKE)
  }
  if constexpr (CallsIntMm<Device>) {
    GEMMTUNED_INT_OPERATORS(GEMMTUNED_TAKE)
  }
#undef GEMMTUNED_TAKE
#ifdef GEMMTUNED_CUDA
  if constexpr (std::is_same_v<Device, Cuda>) list_private(all, take, Tensor());
#endif
}

inline std::vector<Installable>& installables() {
  static auto& all = *[] {
    auto* list = new std::vector<Installable>;
    list_operators<Cpu>(*list);
#ifdef GEMMTUNED_CUDA
    list_operators<Cuda>(*list);
#endif
    return list;
  }();
  return all;
}

}  // namespace gemmtuned
