// The operators in the namespace `gemmtuned`, which Python calls as torch.ops.gemmtuned.
#pragma once
#include <torch/library.h>

#include <vector>

#include "frozen.h"
#include "scales.h"

namespace gemmtuned {

// The key, byte by byte, that a scaled product has on a GPU but for the device: to look at where there is none. Without
// recipes it is _scaled_mm's, with them _scaled_mm_v2's; empty where the product is not counted.
inline std::vector<int64_t> scaled_key(const Tensor& a, const Tensor& b, at::TensorList scale_a, at::IntArrayRef recipe_a,
                                at::IntArrayRef swizzle_a, at::TensorList scale_b, at::IntArrayRef recipe_b,
                                at::IntArrayRef swizzle_b, at::ScalarType out_dtype) {
  Problem p;
  if (!describe<Cpu>(p, SCALED, a, b, out_dtype)) return {};
  const BothScales both = recipe_a.empty()
                              ? scales_of(a, b, scale_a[0], scale_b[0])
                              : scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
  if (!describe_scaled(p, both, a, std::nullopt, false)) return {};
  p.threads = 0;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
  return {bytes, bytes + sizeof p};
}

inline void define_ops() {  // once for the life of the process: modules may hold the operator
  using torch::Library;
  static auto& definition = *new Library(Library::FRAGMENT, "gemmtuned", std::nullopt, __FILE__, __LINE__);
  static auto& cpu = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static auto& packed = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::MkldnnCPU, __FILE__, __LINE__);
  static auto& autograd = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  static auto& batched =
      *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::FuncTorchBatched, __FILE__, __LINE__);
  static bool done = false;
  if (done) return;
  definition.def("frozen_stamp(Tensor weight) -> int[]");
  definition.def(
      "scaled_key(Tensor a, Tensor b, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, "
      "int[] recipe_b, int[] swizzle_b, ScalarType out_dtype) -> int[]");
  definition.def("frozen_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, int[] stamp) -> Tensor");
  cpu.impl("frozen_stamp", TORCH_FN(frozen_stamp));
  cpu.impl("frozen_linear", TORCH_FN(frozen_linear));
  cpu.impl("scaled_key", TORCH_FN(scaled_key));
  packed.impl("frozen_linear", TORCH_FN(frozen_linear));
  autograd.impl("frozen_linear", TORCH_FN(frozen_autograd));
  batched.impl("frozen_linear", TORCH_FN(frozen_batched));
  done = true;
}

}  // namespace gemmtuned
