// aten's leaf GEMMs that we stand in front of: the one list of them. Registration (install.h), the functions that compiled
// C++ calls (shims.h), the tests' fake of torch's CUDA library and the docs (docs/operator_list.py) are all made from it.
//
// X(operation, ours, torchs): on every device. The operator's name, our function of Operators (operators.h), and torch's own
// of namespace at::cpu or at::cuda. Those of torch's own use, with a _, are left alone where a later torch has them
// otherwise, or not at all: install.h.
//
// GPU(operation, torchs, ours, called): on GPUs alone, and in some torches only. torchs is the operator's name in torch's
// at::_ops, ours a template over T, which is Tensor. Where this torch does not take the call `called`, the operator is left
// alone (install.h: list_of_gpus).
#pragma once

#define GEMMTUNED_OPERATORS(X)               \
  X("mm", mm, mm)                            \
  X("mm.out", mm_out, mm_out)                \
  X("addmm", addmm, addmm)                   \
  X("addmm.out", addmm_out, addmm_out)       \
  X("addmm_", addmm_, addmm_)                \
  X("bmm", bmm, bmm)                         \
  X("bmm.out", bmm_out, bmm_out)             \
  X("baddbmm", baddbmm, baddbmm)             \
  X("baddbmm.out", baddbmm_out, baddbmm_out) \
  X("baddbmm_", baddbmm_, baddbmm_)

#if __has_include(<ATen/ops/_addmm_activation_cpu_dispatch.h>)
#define GEMMTUNED_ACTIVATION_OPERATORS(X)                     \
  X("_addmm_activation", addmm_activation, _addmm_activation) \
  X("_addmm_activation.out", addmm_activation_out, _addmm_activation_out)
#else
#define GEMMTUNED_ACTIVATION_OPERATORS(X)
#endif

#if __has_include(<ATen/ops/_int_mm_cpu_dispatch.h>)
#define GEMMTUNED_INT_OPERATORS(X) \
  X("_int_mm", int_mm, _int_mm)    \
  X("_int_mm.out", int_mm_out, _int_mm_out)
#else
#define GEMMTUNED_INT_OPERATORS(X)
#endif

#if __has_include(<ATen/ops/_scaled_mm_cuda_dispatch.h>)
#define GEMMTUNED_SCALED_OPERATORS(GPU)                                                                         \
  GPU("_scaled_mm", _scaled_mm, Cuda::scaled_mm<T>, at::cuda::_scaled_mm(t, t, t, t, none, none, unsaid, true)) \
  GPU("_scaled_mm.out", _scaled_mm_out, Cuda::scaled_mm_out<T>,                                                 \
      at::cuda::_scaled_mm(t, t, t, t, none, none, unsaid, true))
#else
#define GEMMTUNED_SCALED_OPERATORS(GPU)
#endif

#if __has_include(<ATen/ops/_scaled_mm_v2_cuda_dispatch.h>)
#define GEMMTUNED_SCALED_V2_OPERATORS(GPU)                                                                         \
  GPU("_scaled_mm_v2", _scaled_mm_v2, Cuda::ScaledV2::plain<Cuda::ScaledV2::as_plain<T>(at::cuda::_scaled_mm_v2)>, \
      Cuda::ScaledV2::as_plain<T>(at::cuda::_scaled_mm_v2))                                                        \
  GPU("_scaled_mm_v2.out", _scaled_mm_v2_out,                                                                      \
      Cuda::ScaledV2::out<Cuda::ScaledV2::as_out<T>(at::cuda::_scaled_mm_v2_outf)>,                                \
      Cuda::ScaledV2::as_out<T>(at::cuda::_scaled_mm_v2_outf))
#else
#define GEMMTUNED_SCALED_V2_OPERATORS(GPU)
#endif

#if __has_include(<ATen/ops/_grouped_mm_cuda_dispatch.h>)
#define GEMMTUNED_GROUPED_OPERATORS(GPU) \
  GPU("_grouped_mm", _grouped_mm, grouped_mm<T>, at::cuda::_grouped_mm(t, t, none, none, unsaid))
#else
#define GEMMTUNED_GROUPED_OPERATORS(GPU)
#endif

#if __has_include(<ATen/ops/_scaled_grouped_mm_cuda_dispatch.h>)
#define GEMMTUNED_SCALED_GROUPED_OPERATORS(GPU)                       \
  GPU("_scaled_grouped_mm", _scaled_grouped_mm, scaled_grouped_mm<T>, \
      at::cuda::_scaled_grouped_mm(t, t, t, t, none, none, none, unsaid, true))
#else
#define GEMMTUNED_SCALED_GROUPED_OPERATORS(GPU)
#endif

#if __has_include(<ATen/ops/_scaled_grouped_mm_v2_cuda_dispatch.h>)
#define GEMMTUNED_SCALED_GROUPED_V2_OPERATORS(GPU)                                           \
  GPU("_scaled_grouped_mm_v2", _scaled_grouped_mm_v2,                                        \
      ScaledGroupedV2::plain<ScaledGroupedV2::as_plain<T>(at::cuda::_scaled_grouped_mm_v2)>, \
      ScaledGroupedV2::as_plain<T>(at::cuda::_scaled_grouped_mm_v2))
#else
#define GEMMTUNED_SCALED_GROUPED_V2_OPERATORS(GPU)
#endif

#define GEMMTUNED_GPU_OPERATORS(GPU)                                                                      \
  GPU("mm.dtype", mm_dtype, Cuda::mm_dtype<T>, at::cuda::mm(t, t, type))                                  \
  GPU("bmm.dtype", bmm_dtype, Cuda::bmm_dtype<T>, at::cuda::bmm(t, t, type))                              \
  GPU("addmm.dtype", addmm_dtype, Cuda::addmm_dtype<T>, at::cuda::addmm(t, t, t, type, one, one))         \
  GPU("baddbmm.dtype", baddbmm_dtype, Cuda::baddbmm_dtype<T>, at::cuda::baddbmm(t, t, t, type, one, one)) \
  GEMMTUNED_SCALED_OPERATORS(GPU)                                                                         \
  GEMMTUNED_SCALED_V2_OPERATORS(GPU)                                                                      \
  GEMMTUNED_GROUPED_OPERATORS(GPU)                                                                        \
  GEMMTUNED_SCALED_GROUPED_OPERATORS(GPU)                                                                 \
  GEMMTUNED_SCALED_GROUPED_V2_OPERATORS(GPU)

// What compiled C++ calls by C functions of torch's, aoti_torch_cpu_mm_out for mm.out: shims.h. PRODUCT and INT take the result,
// X and W; SUM takes the result, C, X, W, beta and alpha.
#define GEMMTUNED_COMPILED_OPERATORS(PRODUCT, SUM, INT, device, Device) \
  PRODUCT(device, Device, mm)                                           \
  PRODUCT(device, Device, bmm)                                          \
  SUM(device, Device, addmm)                                            \
  SUM(device, Device, baddbmm)                                          \
  INT(device, Device, _int_mm)

// Torch's own function under our name, for whatever arguments it takes: some have several forms. A requires-expression can
// ask whether it takes some.
#define GEMMTUNED_TORCHS(ours, torchs)                                                                    \
  template <class... Arguments>                                                                           \
  static auto ours(Arguments&&... arguments) -> decltype(torchs(std::forward<Arguments>(arguments)...)) { \
    return torchs(std::forward<Arguments>(arguments)...);                                                 \
  }
