// An engine's extension as vLLM builds its own: against torch's stable ABI, with three of its schemas and their looks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

namespace {

void onednn_mm(Tensor c, const Tensor& a, std::optional<Tensor> bias, const Tensor& handler) {
  torch::stable::fill_(c, bias ? 3.0 : 2.0);
}

void cutlass_scaled_mm(Tensor out, const Tensor& a, const Tensor& b, const Tensor& a_scales, const Tensor& b_scales,
                       std::optional<Tensor> bias) {
  torch::stable::fill_(out, 5.0);
}

Tensor awq_gemm(const Tensor& in, const Tensor& kernel, const Tensor& scales, const Tensor& zeros, int64_t split_k) {
  Tensor y = torch::stable::empty_like(in);
  torch::stable::fill_(y, 7.0);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(_C, ops) {
  ops.def("onednn_mm(Tensor! c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()");
  ops.def("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()");
  ops.def(
      "awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, SymInt split_k_iters) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, ops) {
  ops.impl("onednn_mm", TORCH_BOX(&onednn_mm));
  ops.impl("cutlass_scaled_mm", TORCH_BOX(&cutlass_scaled_mm));
  ops.impl("awq_gemm", TORCH_BOX(&awq_gemm));
}
