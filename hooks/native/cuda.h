// GEMMs on NVIDIA GPUs: what torch runs, and published kernels launched without Python.
#pragma once
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#if __has_include(<ATen/ops/_addmm_activation_cuda_dispatch.h>)
#include <ATen/ops/_addmm_activation_cuda_dispatch.h>
#endif
#if __has_include(<ATen/ops/_int_mm_cuda_dispatch.h>)
#include <ATen/ops/_int_mm_cuda_dispatch.h>
#endif
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

inline bool may_overlap(const Tensor& a, const Tensor& b) {  // views with gaps are not looked at more closely
  return a.storage().is_alias_of(b.storage()) && at::get_overlap_status(a, b) != at::MemOverlapStatus::No;
}

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

  static bool may_run(const Route& route, const Slots& slots) {
    return (route.launch || route.lt || route.op) && !other_rounding(slots.x().scalar_type());
  }

  static Tensor run(const Route& route, const Problem& p, Slots slots) {
    const Below below;
    const Tensor &a = slots.x(), &b = slots.w();
    const On here(a.device());
    if (route.op && !route.op->writes()) return (*route.op)(slots);
    const Tensor y = empty_result(a, b, static_cast<at::ScalarType>(p.out_dtype));
    slots.t[SLOT_Y] = &y;
    launch(route, slots);
    return y;
  }

  // Whether the route can write straight into y of `slots`, as stock does: another tensor and a copy could take longer than
  // the route saves. y lies without gaps or, where the kernel is given its strides, as the record's conditions say.
  static bool writes_into(const Route& route, const Slots& slots) {
    const Tensor& y = *slots.t[SLOT_Y];
    if ((route.op && !route.op->writes()) || reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16) return false;
    if (!y.is_contiguous() &&
        !(route.launch && cuda::takes_strides(*route.launch, SLOT_Y) && holds(route.conditions, slots)))
      return false;
    for (int i = 0; i < SLOT_Y; ++i) {
      const bool in_place = route.lt && i == SLOT_C && slots.c() == &y;  // as the library allows
      if (slots.t[i] && !in_place && may_overlap(y, *slots.t[i])) return false;
    }
    return true;
  }
  // A batch-invariant product is copied where it is not so, since stock gives its rows other bits.
  static void run_into(const Route& route, const Problem& p, const Slots& slots, const Tensor& out, int flags) {
    if (C10_UNLIKELY(p.flags & BATCH_INVARIANT) && !writes_into(route, slots))
      return run_and_copy<Cuda>(route, p, slots, out, flags);
    const Below below;
    const On here(slots.x().device());
    launch(route, slots);
  }

#define GEMMTUNED_ON_CUDA(operation, ours, torchs) GEMMTUNED_TORCHS(ours, at::cuda::torchs)
  GEMMTUNED_OPERATORS(GEMMTUNED_ON_CUDA)
  GEMMTUNED_ACTIVATION_OPERATORS(GEMMTUNED_ON_CUDA)
  GEMMTUNED_INT_OPERATORS(GEMMTUNED_ON_CUDA)
#undef GEMMTUNED_ON_CUDA

  // These operators are not torch's public interface, or not in all its versions: each is registered where it can be called
  // so (operator_list.h). T is Tensor, made dependent so that another signature is no error.

  // Products whose result has a wider type than their operands.
  template <class T>
  static Tensor mm_dtype(const T& a, const T& b, at::ScalarType type) {
    if (type == at::kInt) return at::cuda::mm(a, b, type);  // torch refuses what has routes by way of `_int_mm`
    return Operators<Cuda>::product(DENSE, a, b, type, [&] { return at::cuda::mm(a, b, type); });
  }
  template <class T>
  static Tensor bmm_dtype(const T& a, const T& b, at::ScalarType type) {
    if (type == at::kInt) return at::cuda::bmm(a, b, type);
    return Operators<Cuda>::product(BATCHED, a, b, type, [&] { return at::cuda::bmm(a, b, type); });
  }
  template <class T>
  static Tensor addmm_dtype(const T& c, const T& a, const T& b, at::ScalarType type, const Scalar& beta,
                            const Scalar& alpha) {
    const auto stock = [&] { return at::cuda::addmm(c, a, b, type, beta, alpha); };
    return Operators<Cuda>::sum(DENSE_ADD, c, a, b, type, beta, alpha, stock);
  }
  template <class T>
  static Tensor baddbmm_dtype(const T& c, const T& a, const T& b, at::ScalarType type, const Scalar& beta,
                              const Scalar& alpha) {
    const auto stock = [&] { return at::cuda::baddbmm(c, a, b, type, beta, alpha); };
    return Operators<Cuda>::sum(BATCHED_ADD, c, a, b, type, beta, alpha, stock);
  }

#ifdef GEMMTUNED_SCALED_MM
  template <class T>
  static Tensor scaled_mm(const T& a, const T& b, const T& scale_a, const T& scale_b, const OptionalTensor& bias,
                          const OptionalTensor& scale_result, std::optional<at::ScalarType> type, bool fast) {
    const auto stock = [&] { return at::cuda::_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, type, fast); };
    const auto scales = [&] { return scales_of(a, b, scale_a, scale_b); };
    const ScaledCall call{a, b, scale_a, scale_b, bias, type.value_or(a.scalar_type()), fast, !scale_result};
    return scaled(call, scales, stock);
  }
  template <class T>
  static Tensor& scaled_mm_out(const T& a, const T& b, const T& scale_a, const T& scale_b, const OptionalTensor& bias,
                               const OptionalTensor& scale_result, std::optional<at::ScalarType> type, bool fast,
                               T& out) {
    const auto stock = [&]() -> Tensor& {
      return at::cuda::_scaled_mm_out(out, a, b, scale_a, scale_b, bias, scale_result, type, fast);
    };
    const auto scales = [&] { return scales_of(a, b, scale_a, scale_b); };
    return scaled({a, b, scale_a, scale_b, bias, out.scalar_type(), fast, !scale_result}, scales, stock, &out);
  }
#endif

  // The same for torch.nn.functional.scaled_mm's operator, which has lists of scales. Stock: torch's function.
  struct ScaledV2 {
    using Scales = at::TensorList;
    using Ints = at::IntArrayRef;
    using Type = std::optional<at::ScalarType>;
    using Plain = Tensor(const Tensor&, const Tensor&, Scales, Ints, Ints, Scales, Ints, Ints, const OptionalTensor&,
                         Type, Ints, bool);
    using Out = Tensor&(const Tensor&, const Tensor&, Scales, Ints, Ints, Scales, Ints, Ints, const OptionalTensor&,
                        Type, Ints, bool, Tensor&);

    // Torch's function, where it takes what these do; T makes that a question and no error (operator_list.h).
    template <class T>
    static constexpr Plain* as_plain(Plain* torchs) {
      return torchs;
    }
    template <class T>
    static constexpr Out* as_out(Out* torchs) {
      return torchs;
    }

    template <Plain* Stock>
    static Tensor plain(const Tensor& a, const Tensor& b, Scales scale_a, Ints recipe_a, Ints swizzle_a, Scales scale_b,
                        Ints recipe_b, Ints swizzle_b, const OptionalTensor& bias, Type type, Ints dims, bool fast) {
      const auto stock = [&] {
        return Stock(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, type, dims, fast);
      };
      if (!dims.empty() || scale_a.empty() || scale_b.empty()) return stock();
      const auto scales = [&] { return scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b); };
      const bool one = scale_a.size() == 1 && scale_b.size() == 1;
      return scaled({a, b, scale_a[0], scale_b[0], bias, type.value_or(a.scalar_type()), fast, one}, scales, stock);
    }

    template <Out* Stock>
    static Tensor& out(const Tensor& a, const Tensor& b, Scales scale_a, Ints recipe_a, Ints swizzle_a, Scales scale_b,
                       Ints recipe_b, Ints swizzle_b, const OptionalTensor& bias, Type type, Ints dims, bool fast,
                       Tensor& y) {
      const auto stock = [&]() -> Tensor& {
        return Stock(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, type, dims, fast, y);
      };
      if (!dims.empty() || scale_a.empty() || scale_b.empty()) return stock();
      const auto scales = [&] { return scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b); };
      const bool one = scale_a.size() == 1 && scale_b.size() == 1;
      return scaled({a, b, scale_a[0], scale_b[0], bias, y.scalar_type(), fast, one}, scales, stock, &y);
    }
  };

 private:
  struct ScaledCall {
    const Tensor &a, &b, &scale_a, &scale_b;
    const OptionalTensor& bias;
    at::ScalarType type;
    bool fast, routable;
  };

  // scales: what both stand for, found after the operands are known to be matrices that fit.
  template <class Scales, class Stock>
  static auto scaled(const ScaledCall& c, const Scales& scales, const Stock& stock, Tensor* out = nullptr)
      -> decltype(stock()) {
    Problem p;
    if (off() || !gemmtuned::describe<Cuda>(p, SCALED, c.a, c.b, c.type) ||
        !describe_scaled(p, scales(), c.a, c.bias.has_value(), c.fast))
      return stock();
    Slots slots = slots_of(c.a, c.b, c.bias ? &*c.bias : nullptr);
    slots.t[SLOT_SCALE_X] = &c.scale_a, slots.t[SLOT_SCALE_W] = &c.scale_b;
    const auto here = [&](const Tensor* t) { return !t || t->device() == c.a.device(); };
    const bool routable = c.routable && here(slots.bias()) && here(&c.scale_a) && here(&c.scale_b);
    return call<Cuda>(p, slots, routable && (!out || fits(*out, p, c.a)) ? ROUTABLE : COUNTED_ONLY, stock, out);
  }

  static void launch(const Route& route, const Slots& slots) {
    const Tensor &a = slots.x(), &y = *slots.t[SLOT_Y];
    const Below below;
    if (route.op) return void((*route.op)(slots));
    cuda::bind_context(a.device().index());
    if (route.lt) return cuda::launch(*route.lt, slots);
    if (C10_LIKELY(!route.chain_rows)) return cuda::launch(*route.launch, slots);
    // Batch-invariant: the same kernel for every M, a fixed number of rows at a time, whichever way X lies
    const int64_t m = a.size(0), most = route.chain_rows;
    Tensor x = a.narrow(0, 0, std::min(m, most));
    Slots part = slots;
    part.t[SLOT_X] = &x;
    const Tensor whole = holds(route.conditions, part) ? a : a.clone(at::MemoryFormat::Contiguous);
    for (int64_t first = 0; first < m; first += most) {
      const int64_t some = std::min(most, m - first);
      x = whole.narrow(0, first, some);
      const Tensor rows = y.narrow(0, first, some);
      part.t[SLOT_Y] = &rows;
      cuda::launch(*route.launch, part);
    }
  }

  static bool capturing(c10::Device device) {
    const cuda::Handle stream = cuda::current_stream(device.index());
    if (!stream) return false;  // the default stream cannot be captured: most calls need not ask the driver
    const On here(device);
    int state = 0;
    return cuda::Driver::get().cuStreamIsCapturing(stream, &state) == 0 && state != 0;
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

  // By this variable NVIDIA's libraries multiply in fp32 whatever a program allows, so our kernels are to do so, too.
  static bool never_tf32() {
    static const bool never = [] {
      const char* const said = std::getenv("NVIDIA_TF32_OVERRIDE");
      return said && std::string_view(said) == "0";
    }();
    return never;
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
        if (C10_UNLIKELY(never_tf32())) return IEEE;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
        return context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32
                   ? TF32
                   : IEEE;
#else
        return context.float32Precision("cuda", "matmul") == "tf32" ? TF32 : IEEE;
#endif
      case at::kHalf: return full(context.allowFP16ReductionCuBLAS()) ? IEEE : REDUCED;
      case at::kBFloat16: return full(context.allowBF16ReductionCuBLAS()) ? IEEE : REDUCED;
      default: return IEEE;
    }
  }
};

}  // namespace gemmtuned
