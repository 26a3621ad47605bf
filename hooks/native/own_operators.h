// The operators in the namespace `gemmtuned`, which Python calls as torch.ops.gemmtuned.
#pragma once
#include <torch/library.h>

#include <vector>

#include "cuda_launch.h"
#include "frozen.h"
#include "scales.h"

namespace gemmtuned {

// The key, byte by byte, that a scaled product has on a GPU but for the device: to look at where there is none. Without
// recipes it is _scaled_mm's, with them _scaled_mm_v2's; empty where the product is not counted.
inline std::vector<int64_t> scaled_key(const Tensor& a, const Tensor& b, at::TensorList scale_a,
                                       at::IntArrayRef recipe_a, at::IntArrayRef swizzle_a, at::TensorList scale_b,
                                       at::IntArrayRef recipe_b, at::IntArrayRef swizzle_b, at::ScalarType out_dtype) {
  Problem p;
  if (!describe<Cpu>(p, SCALED, a, b, out_dtype)) return {};
  const BothScales both = recipe_a.empty()
                              ? scales_of(a, b, scale_a[0], scale_b[0])
                              : scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
  if (!describe_scaled(p, both, a, false, false)) return {};
  p.threads = 0;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
  return {bytes, bytes + sizeof p};
}

// What the loops over a launch record come to, for tests: nothing where the operands do not meet its conditions, else the
// grid and each argument's value, of a map what it is made of. `conditions` and `launch` are addresses.
inline std::vector<int64_t> evaluated(const c10::List<OptionalTensor>& operands, int64_t conditions, int64_t count,
                                      int64_t launch, int64_t workspace) {
  std::array<OptionalTensor, SLOT_COUNT> kept;
  Slots slots;
  for (size_t i = 0; i < SLOT_COUNT; ++i)
    if ((kept[i] = operands.get(i))) slots.t[i] = &*kept[i];
  const auto* const first = reinterpret_cast<const Cond*>(conditions);
  if (!holds({first, first + count}, slots)) return {};
  const auto& l = *reinterpret_cast<const cuda::Launch*>(launch);
  std::vector<int64_t> found;
  for (const cuda::Axis& axis : l.grid) found.push_back(cuda::programs(axis, slots));
  cuda::Value values[cuda::kArguments] = {};
  cuda::fill(l, slots, static_cast<cuda::Address>(workspace), values);
  for (int i = 0; i < l.count; ++i) {
    if (l.arguments[i].kind == cuda::TENSOR_MAP) {
      const cuda::ByteMatrix of = cuda::byte_matrix(l.arguments[i], slots);
      for (const uint64_t value : {uint64_t{of.address}, of.rows, of.columns, of.stride, uint64_t{of.box_rows}})
        found.push_back(static_cast<int64_t>(value));
      continue;
    }
    const bool number = l.arguments[i].kind == cuda::OPERAND && l.arguments[i].what != PTR;
    found.push_back(number ? values[i].number : static_cast<int64_t>(values[i].address));
  }
  return found;
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
  definition.def("frozen_fingerprint(Tensor weight) -> int[]");
  definition.def(
      "scaled_key(Tensor a, Tensor b, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, "
      "int[] recipe_b, int[] swizzle_b, ScalarType out_dtype) -> int[]");
  definition.def("frozen_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, int[] fingerprint) -> Tensor");
  definition.def("evaluated(Tensor?[] operands, int conditions, int count, int launch, int workspace) -> int[]");
  cpu.impl("evaluated", TORCH_FN(evaluated));
  cpu.impl("frozen_fingerprint", TORCH_FN(frozen_fingerprint));
  cpu.impl("frozen_linear", TORCH_FN(frozen_linear));
  cpu.impl("scaled_key", TORCH_FN(scaled_key));
  packed.impl("frozen_linear", TORCH_FN(frozen_linear));
  autograd.impl("frozen_linear", TORCH_FN(frozen_autograd));
  batched.impl("frozen_linear", TORCH_FN(frozen_batched));
  done = true;
}

}  // namespace gemmtuned
