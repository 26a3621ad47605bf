// GEMMs on NVIDIA GPUs: what torch runs, and published kernels launched without Python.
#pragma once
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_addmm_activation_cuda_dispatch.h>
#if __has_include(<ATen/ops/_grouped_mm_cuda_dispatch.h>)
#include <ATen/ops/_grouped_mm_cuda_dispatch.h>
#define GEMMTUNED_GROUPED_MM
#endif
#include <ATen/ops/_int_mm_cuda_dispatch.h>
#if __has_include(<ATen/ops/_scaled_mm_cuda_dispatch.h>)
#include <ATen/ops/_scaled_mm_cuda_dispatch.h>
#define GEMMTUNED_SCALED_MM
#endif
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/baddbmm_cuda_dispatch.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#if __has_include(<ATen/ops/_scaled_mm_v2_cuda_dispatch.h>)
#include <ATen/ops/_scaled_mm_v2_cuda_dispatch.h>
#define GEMMTUNED_SCALED_MM_V2
#endif
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/version.h>

#include "call.h"
#include "cublaslt.h"
#include "cuda_launch.h"
#include "operators.h"
#include "scales.h"

namespace gemmtuned {

// Makes a device current, as the kernels we stand for do; 0.2 us that a process with one GPU need not spend.
class On {
 public:
  explicit On(c10::Device device) {
    static const bool several = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount() > 1;
    if (several) guard_.reset_device(device);
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

// What Operators (operators.h) asks of a device.
struct Cuda {
  static constexpr auto key = c10::DispatchKey::CUDA;
  static constexpr bool timed = false;    // a call returns before the work is done, and we never wait for it
  static constexpr bool on_host = false;  // memory of a call is the device's
  using Relaxed = cuda::RelaxedCapture;

  static void describe(Problem& p, const Tensor& a) {
    p.device_type = 1;
    p.device_index = static_cast<uint8_t>(a.device().index());
    p.math = math_mode(a.scalar_type());
    if (capturing(a.device())) p.flags |= GRAPH;
  }

  // The graph capture that this call is recorded into.
  static uint64_t capture_id(const Tensor& a) {
    const On here(a.device());
    return cuda::capture_of(cuda::current_stream(a.device().index())).id;
  }

  static bool accepts(const Route& route, const Tensor& a, const Tensor& b, const Tensor* bias) {
    if (a.dim() != 2 || other_rounding(a.scalar_type())) return false;
    if (route.lt) return route.lt->accepts(a, b, bias);
    if (route.op) return route.op->accepts(a, b, bias);
    if (route.chain) return route.launch && route.launch->accepts_others(a, b, bias);
    return route.launch && route.launch->accepts(a, b, bias);
  }

  static Tensor run(const Route& route, const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor&) {
    at::AutoDispatchBelowADInplaceOrView below;
    const On here(a.device());
    if (route.op) return (*route.op)(a, b, bias);
    const Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
    launch(route, a, b, bias, y);
    return y;
  }

  // Straight into `out` where that is the same as through a fresh tensor.
  static bool run_into(const Route& route, const Tensor& a, const Tensor& b, const OptionalTensor& bias, Tensor& out) {
    const auto apart = [&out](const Tensor& t) { return at::get_overlap_status(out, t) == at::MemOverlapStatus::No; };
    if (route.op || !out.is_contiguous() || reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 || !apart(a) || !apart(b) ||
        (bias && !apart(*bias)))
      return false;
    const On here(a.device());
    launch(route, a, b, bias, out);
    return true;
  }

#define GEMMTUNED_ON_CUDA(operation, ours, torchs) GEMMTUNED_TORCHS(ours, at::cuda::torchs)
  GEMMTUNED_OPERATORS(GEMMTUNED_ON_CUDA)
#undef GEMMTUNED_ON_CUDA

  // What follows is counted and served by torch. These operators are not torch's public interface, or not in all its
  // versions: each takes what calls torch as a parameter, and is registered where that can be called (install.h).
  // T is Tensor, made dependent so that another signature is no error.

  // Products whose result has a wider type than their operands.
  template <class T>
  static Tensor mm_dtype(const T& a, const T& b, at::ScalarType out_dtype) {
    return Operators<Cuda>::count_as(DENSE, out_dtype, a, b, [&] { return at::cuda::mm(a, b, out_dtype); });
  }
  template <class T>
  static Tensor bmm_dtype(const T& a, const T& b, at::ScalarType out_dtype) {
    return Operators<Cuda>::count_as(BATCHED, out_dtype, a, b, [&] { return at::cuda::bmm(a, b, out_dtype); });
  }
  template <class T>
  static Tensor addmm_dtype(const T& c, const T& a, const T& b, at::ScalarType out_dtype, const Scalar& beta,
                            const Scalar& alpha) {
    return Operators<Cuda>::count_as(DENSE_ADD, out_dtype, a, b,
                                     [&] { return at::cuda::addmm(c, a, b, out_dtype, beta, alpha); });
  }
  template <class T>
  static Tensor baddbmm_dtype(const T& c, const T& a, const T& b, at::ScalarType out_dtype, const Scalar& beta,
                              const Scalar& alpha) {
    return Operators<Cuda>::count_as(BATCHED_ADD, out_dtype, a, b,
                                     [&] { return at::cuda::baddbmm(c, a, b, out_dtype, beta, alpha); });
  }

#ifdef GEMMTUNED_SCALED_MM
  template <class T>
  static Tensor scaled_mm(const T& a, const T& b, const T& scale_a, const T& scale_b, const OptionalTensor& bias,
                          const OptionalTensor& scale_result, std::optional<at::ScalarType> out_dtype, bool fast) {
    const auto stock = [&] {
      return at::cuda::_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast);
    };
    const auto scales = [&] { return scales_of(a, b, scale_a, scale_b); };
    return count_scaled(a, b, scales, bias, out_dtype.value_or(a.scalar_type()), fast, stock);
  }
  template <class T>
  static Tensor& scaled_mm_out(const T& a, const T& b, const T& scale_a, const T& scale_b, const OptionalTensor& bias,
                               const OptionalTensor& scale_result, std::optional<at::ScalarType> out_dtype, bool fast,
                               T& out) {
    const auto stock = [&]() -> Tensor& {
      return at::cuda::_scaled_mm_out(out, a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast);
    };
    const auto scales = [&] { return scales_of(a, b, scale_a, scale_b); };
    return count_scaled(a, b, scales, bias, out.scalar_type(), fast, stock);
  }
#endif

  // The same for torch.nn.functional.scaled_mm's operator, which has lists of scales. Stock: torch's function.
  struct ScaledV2 {
    using Scales = at::TensorList;
    using Ints = at::IntArrayRef;
    using Type = std::optional<at::ScalarType>;
    using Plain = Tensor(const Tensor&, const Tensor&, Scales, Ints, Ints, Scales, Ints, Ints, const OptionalTensor&, Type,
                         Ints, bool);
    using Out = Tensor&(const Tensor&, const Tensor&, Scales, Ints, Ints, Scales, Ints, Ints, const OptionalTensor&, Type,
                        Ints, bool, Tensor&);

    template <Plain* Stock>
    static Tensor plain(const Tensor& a, const Tensor& b, Scales scale_a, Ints recipe_a, Ints swizzle_a, Scales scale_b,
                        Ints recipe_b, Ints swizzle_b, const OptionalTensor& bias, Type out_dtype, Ints dims, bool fast) {
      const auto stock = [&] {
        return Stock(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, dims, fast);
      };
      if (!dims.empty()) return stock();
      const auto scales = [&] {
        return scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
      };
      return count_scaled(a, b, scales, bias, out_dtype.value_or(a.scalar_type()), fast, stock);
    }

    template <Out* Stock>
    static Tensor& out(const Tensor& a, const Tensor& b, Scales scale_a, Ints recipe_a, Ints swizzle_a, Scales scale_b,
                       Ints recipe_b, Ints swizzle_b, const OptionalTensor& bias, Type out_dtype, Ints dims, bool fast,
                       Tensor& y) {
      const auto stock = [&]() -> Tensor& {
        return Stock(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, dims, fast, y);
      };
      if (!dims.empty()) return stock();
      const auto scales = [&] {
        return scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
      };
      return count_scaled(a, b, scales, bias, y.scalar_type(), fast, stock);
    }
  };

#ifdef GEMMTUNED_GROUPED_MM
  // Groups of rows (2-D by 3-D) or a batch of groups; the number of groups is the batch.
  template <class T>
  static Tensor grouped_mm(const T& a, const T& b, const OptionalTensor& offsets, const OptionalTensor& bias,
                           std::optional<at::ScalarType> out_dtype) {
    const auto stock = [&] { return at::cuda::_grouped_mm(a, b, offsets, bias, out_dtype); };
    if (off() || a.dim() != 2 || b.dim() != 3 || a.size(1) != b.size(1) || a.numel() == 0 || b.numel() == 0 ||
        b.size(0) > INT32_MAX)
      return stock();
    Problem p;
    const Tensor first = b.select(0, 0);
    if (!gemmtuned::describe<Cuda>(p, GROUPED, a, first, out_dtype.value_or(a.scalar_type()))) return stock();
    p.batch = static_cast<uint32_t>(b.size(0));
    return call<Cuda>(p, a, first, nullptr, false, stock, [&](Route&) { return stock(); });
  }
#endif

 private:
  // scales: what both stand for, told after the operands are known to be matrices that fit.
  template <class Scales, class Stock>
  static auto count_scaled(const Tensor& a, const Tensor& b, const Scales& scales, const OptionalTensor& bias,
                           at::ScalarType out_dtype, bool fast, const Stock& stock) -> decltype(stock()) {
    Problem p;
    if (off() || !gemmtuned::describe<Cuda>(p, SCALED, a, b, out_dtype) || !describe_scaled(p, scales(), a, bias, fast))
      return stock();
    return call<Cuda>(
        p, a, b, nullptr, false, stock, [&](Route&) -> decltype(stock()) { return stock(); }, [](Route&) { return Tensor(); });
  }

  static void launch(const Route& route, const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor& y) {
    const Tensor* const c = bias ? &*bias : nullptr;
    cuda::bind_context(a.device().index());
    if (route.lt) return cuda::launch(*route.lt, a, b, c, y);
    if (C10_LIKELY(!route.chain)) return cuda::launch(*route.launch, a, b, c, y);
    // Batch-invariant: the same kernel for every M, max_m rows at a time, whichever way X lies
    const Tensor x = route.launch->accepts_rows(a) ? a : a.clone(at::MemoryFormat::Contiguous);
    for (int64_t first = 0, m = a.size(0), most = route.launch->max_m; first < m; first += most) {
      const int64_t some = std::min(most, m - first);
      cuda::launch(*route.launch, some == m ? x : x.narrow(0, first, some), b, c, some == m ? y : y.narrow(0, first, some));
    }
  }

  static bool capturing(c10::Device device) {
    const On here(device);  // the default stream is that of the current device
    int state = 0;
    return cuda::Driver::get().cuStreamIsCapturing(cuda::current_stream(device.index()), &state) == 0 && state != 0;
  }

  // Switches that are not in the problem, and that our kernels and races know nothing of: no cuts of K at all, sums in fp16.
  static bool other_rounding(at::ScalarType dtype) {
    const auto& context = at::globalContext();
    if (dtype == at::kHalf && context.allowFP16AccumulationCuBLAS()) return true;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
    constexpr auto whole = at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
    return (dtype == at::kHalf && context.allowFP16ReductionCuBLAS() == whole) ||
           (dtype == at::kBFloat16 && context.allowBF16ReductionCuBLAS() == whole);
#else
    return false;
#endif
  }

  static uint8_t math_mode(at::ScalarType dtype) {
    const auto& context = at::globalContext();
    const auto full = [](auto option) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
      return option != at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
#else
      return !option;
#endif
    };
    switch (dtype) {
      case at::kFloat:
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
        return context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32
                   ? TF32
                   : IEEE;
#else
        return context.float32Precision("cuda", "matmul") == "tf32" ? TF32 : IEEE;
#endif
      case at::kHalf:
        return full(context.allowFP16ReductionCuBLAS()) ? IEEE : REDUCED;
      case at::kBFloat16:
        return full(context.allowBF16ReductionCuBLAS()) ? IEEE : REDUCED;
      default:
        return IEEE;
    }
  }
};

}  // namespace gemmtuned
