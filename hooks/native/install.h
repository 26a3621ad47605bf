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
// Those of GPUs alone, as far as this torch has them as the list calls them. T is Tensor, of which all depends: what this
// torch has otherwise is left out, and no error.
template <class T, class Take>
void list_of_gpus(const Take& take) {
  [[maybe_unused]] const T t;
  [[maybe_unused]] const at::ScalarType type{};
  [[maybe_unused]] const Scalar one = 1;
  [[maybe_unused]] const OptionalTensor none;
  [[maybe_unused]] const std::optional<at::ScalarType> unsaid;
#define GEMMTUNED_TAKE_OF_GPU(operation, torchs, ours, called) \
  if constexpr (requires { called; }) take(operation, add_to<&ours>);
  GEMMTUNED_GPU_OPERATORS(GEMMTUNED_TAKE_OF_GPU)
#undef GEMMTUNED_TAKE_OF_GPU
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
  if constexpr (std::is_same_v<Device, Cuda>) list_of_gpus<Tensor>(take);
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
