// GEMMs on the CPU: what torch runs, what a route may run instead.
#pragma once
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#if __has_include(<ATen/ops/_addmm_activation_cpu_dispatch.h>)
#include <ATen/ops/_addmm_activation_cpu_dispatch.h>
#endif
#if __has_include(<ATen/ops/_int_mm_cpu_dispatch.h>)
#include <ATen/ops/_int_mm_cpu_dispatch.h>
#endif
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/zeros.h>
#include <torch/version.h>

#include <utility>

#include "call.h"
#include "operator_list.h"

// Functions of the OpenMP and the MKL that torch has loaded; null where it has none.
extern "C" int omp_get_max_threads() __attribute__((weak));
extern "C" int omp_get_thread_limit() __attribute__((weak));
extern "C" int mkl_get_max_threads() __attribute__((weak));

namespace gemmtuned {

// The number of threads that torch's own product takes. at::get_num_threads() is not asked: in a thread that has run none
// of torch's loops it also sets OpenMP's number, so torch.set_num_threads(1) of a program would hold in that thread from its
// first product on, which it does not without us. MKL's number costs six times as much to ask for; it is the smaller one
// where each core runs two threads and nothing has set OpenMP's number yet.
inline int threads_of_products() {
  if (!omp_get_max_threads) return at::get_num_threads();
  thread_local int of_openmp = 0, least = 0, looks = 0;
  const int now = omp_get_max_threads();
  if (C10_UNLIKELY(now != of_openmp || ++looks > 64)) {
    of_openmp = now, looks = 0;
    least = mkl_get_max_threads ? std::min(now, mkl_get_max_threads()) : now;
    if (omp_get_thread_limit) least = std::min(least, omp_get_thread_limit());  // OMP_THREAD_LIMIT
  }
  return least;
}

inline Tensor onednn_linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  using Sig = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                     c10::List<std::optional<Scalar>>, std::optional<std::string_view>);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Sig>();
  return op.call(x, w, bias, "none", c10::List<std::optional<Scalar>>(), "");
}

// (W @ X.T).T of int8, where this torch has such products as we call them. It takes a side of one element to have the stride
// that follows from the other side.
template <class Device>
Tensor int_swapped(const Tensor& a, const Tensor& b) {
  const auto usual = [](const Tensor& t) {
    const int64_t rows = t.size(0), columns = t.size(1), apart = t.stride(0), step = t.stride(1);
    if (rows == 1) return t.as_strided({1, columns}, {columns * step, step});
    return columns == 1 ? t.as_strided({rows, 1}, {apart, apart == 1 ? rows : 1}) : t;
  };
  if constexpr (requires(const Tensor& t) { Device::int_mm(t, t); })
    return Device::int_mm(usual(b.t()), usual(a.t())).t().contiguous();
  else TORCH_CHECK_NOT_IMPLEMENTED(false, "this torch has no _int_mm that we call");
}

// Whether no two elements of a matrix share memory, by strides alone: oneDNN reads what lies over itself as something else.
inline bool lies_apart(const Tensor& t) {
  const int64_t rows = t.size(0), columns = t.size(1), apart = t.stride(0), step = t.stride(1);
  if (rows == 1 || columns == 1) return (rows == 1 || apart > 0) && (columns == 1 || step > 0);
  return apart > 0 && step > 0 && (apart >= columns * step || step >= rows * apart);
}

// What Operators (operators.h) asks of a device.
struct Cpu {
  static constexpr auto key = c10::DispatchKey::CPU;
  static constexpr bool timed = true;    // a call returns when the work is done
  static constexpr bool on_host = true;  // memory of a call is the host's
  struct Relaxed {};

  static void describe(Problem& p, const Tensor& a) {
    p.math = math_mode(a.scalar_type());
    p.threads = static_cast<uint16_t>(threads_of_products());
  }

  static uint64_t capture_id(const Tensor&) { return 0; }

  static bool may_run(const Route& route, const Slots& slots) {
    const int32_t code = route.rows ? route.rows->kernel : route.code;
    if ((code == ONEDNN || code == ONEDNN_PACKED) && !at::globalContext().userEnabledMkldnn()) return false;
    if (code == SWAP && slots.x().scalar_type() == at::kChar && !(lies_apart(slots.x()) && lies_apart(slots.w())))
      return false;
    return !slots.c() || code == SWAP || code == OPERATOR;
  }

  // Runs the route; the result is in memory of its own.
  static Tensor run(const Route& route, const Problem& p, const Slots& slots) {
    const Below below;  // as inside any backend kernel: no autograd for what we call
    if (route.op && route.op->writes()) {
      const Tensor y = empty_result(slots.x(), slots.w(), static_cast<at::ScalarType>(p.out_dtype));
      Slots with_y = slots;
      with_y.t[SLOT_Y] = &y;
      return (*route.op)(with_y);
    }
    return route.rows ? run_rows(*route.rows, slots) : run_code(route.code, route, slots);
  }

  // In blocks of rows that are all alike, so that the bits of a row do not depend on how many others there are. X is
  // brought to one form first: some libraries add up in another order where an operand lies at another alignment.
  static Tensor run_rows(const RowBlocks& rows, Slots slots) {
    constexpr uintptr_t kAligned = 64;
    const Tensor &a = slots.x(), &b = slots.w();
    const bool as_is = a.is_contiguous() && reinterpret_cast<uintptr_t>(a.const_data_ptr()) % kAligned == 0;
    const Tensor x = as_is ? a : a.clone(at::MemoryFormat::Contiguous);
    const int64_t m = a.size(0);
    Route plain{-1, rows.kernel};
    Tensor y;
    for (int64_t first = 0; first < m; first += rows.block) {
      const int64_t some = std::min<int64_t>(rows.block, m - first),
                    padded = (some + rows.grain - 1) / rows.grain * rows.grain;
      Tensor part = some == m ? x : x.narrow(0, first, some);
      if (padded != some) {
        Tensor wide = at::zeros({padded, x.size(1)}, x.options());
        wide.narrow(0, 0, some).copy_(part);
        part = wide;
      }
      slots.t[SLOT_X] = &part;
      Tensor made = run_code(rows.kernel, plain, slots);
      if (padded == m) return made;
      if (!y.defined()) y = at::empty({m, b.size(1)}, x.options());
      y.narrow(0, first, some).copy_(padded == some ? made : made.narrow(0, 0, some));
    }
    return y;
  }

  static Tensor run_code(int32_t code, const Route& route, const Slots& slots) {
    const Tensor &a = slots.x(), &b = slots.w();
    const OptionalTensor bias = slots.bias() ? OptionalTensor(*slots.bias()) : std::nullopt;
    switch (code) {
      case STOCK: return bias ? at::cpu::addmm(*bias, a, b) : at::cpu::mm(a, b);
      case SWAP: {
        if (a.scalar_type() == at::kChar) return int_swapped<Cpu>(a, b);
        const Tensor bt = b.transpose(-2, -1), at_ = a.transpose(-2, -1);
        if (slots.c()) {
          const Tensor ct = slots.c()->transpose(-2, -1);
          const Scalar beta = slots.beta, alpha = slots.alpha;
          return (a.dim() == 3 ? at::cpu::baddbmm(ct, bt, at_, beta, alpha) : at::cpu::addmm(ct, bt, at_, beta, alpha))
              .transpose(-2, -1)
              .contiguous();
        }
        if (a.dim() == 3) return at::cpu::bmm(bt, at_).transpose(-2, -1).contiguous();
        const Tensor yt = bias ? at::cpu::addmm(bias->unsqueeze(1), bt, at_) : at::cpu::mm(bt, at_);
        return yt.t().contiguous();
      }
      case MV: {
        const Tensor x = a.select(0, 0), w = b.t();
        return (bias ? at::addmv(*bias, w, x) : at::mv(w, x)).unsqueeze(0);
      }
      case ONEDNN: return onednn_linear(a, b.t(), bias);
      case ONEDNN_PACKED: return onednn_linear(a, *slots.packed, bias);
      case OPERATOR: return (*route.op)(slots);
    }
    TORCH_CHECK(false, "route code ", code, " is not known to this build");
  }

  // By way of a tensor of its own, which costs a copy of the result in the cache.
  static bool writes_into(const Route&, const Slots&) { return true; }
  static void run_into(const Route& route, const Problem& p, const Slots& slots, const Tensor& out, int flags) {
    run_and_copy<Cpu>(route, p, slots, out, flags);
  }

#define GEMMTUNED_ON_CPU(operation, ours, torchs) GEMMTUNED_TORCHS(ours, at::cpu::torchs)
  GEMMTUNED_OPERATORS(GEMMTUNED_ON_CPU)
  GEMMTUNED_ACTIVATION_OPERATORS(GEMMTUNED_ON_CPU)
  GEMMTUNED_INT_OPERATORS(GEMMTUNED_ON_CPU)
#undef GEMMTUNED_ON_CPU

 private:
  static uint8_t math_mode(at::ScalarType dtype) {
    const auto& context = at::globalContext();
    if (dtype == at::kFloat) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
      switch (context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL)) {
        case at::Float32Precision::TF32: return TF32;
        case at::Float32Precision::BF16: return BF16_INSIDE;
        default: return IEEE;
      }
#else
      const auto precision = context.float32Precision("mkldnn", "matmul");
      return precision == "tf32" ? TF32 : precision == "bf16" ? BF16_INSIDE : IEEE;
#endif
    }
    return dtype == at::kHalf && context.allowFP16ReductionCPU() ? REDUCED : IEEE;
  }
};

}  // namespace gemmtuned
