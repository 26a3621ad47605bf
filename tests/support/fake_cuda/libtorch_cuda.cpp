// What of torch's CUDA library the native hook needs, for tensors that lie in host memory and say that they are on a GPU.
//
// torch's own kernels are told apart from others by the file they are registered in, so ours here name such a file.
#include <ATen/Operators.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_int_mm_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/relu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>

#include "operator_list.h"

namespace {
using at::Tensor;
const c10::Device kCuda(c10::DeviceType::CUDA, 0), kHost(c10::DeviceType::CPU);
thread_local void* t_stream = reinterpret_cast<void*>(0x5000);
bool g_full = false;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kCuda; }
  c10::Device getDevice() const override { return kCuda; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, reinterpret_cast<c10::StreamId>(t_stream));
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

Tensor moved(const Tensor& t, c10::Device to) {  // the same memory
  auto* owner = new Tensor(t);
  c10::DataPtr data(t.storage().mutable_data(), owner, [](void* o) { delete static_cast<Tensor*>(o); }, to);
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  const auto key = to.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  Tensor y = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  y.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  return y;
}
Tensor on_gpu(const Tensor& t) { return moved(t, kCuda); }
Tensor on_host(const Tensor& t) { return moved(t, kHost); }

Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  TORCH_CHECK_WITH(OutOfMemoryError, !g_full, "CUDA out of memory. Tried to allocate");
  return on_gpu(at::empty(C10_AS_INTARRAYREF_SLOW(size), at::TensorOptions().dtype(dtype)));
}

Tensor strided(const Tensor& t, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  const auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}
Tensor& copied(Tensor& to, const Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}
Tensor& into(Tensor& out, const Tensor& y) {
  on_host(out).copy_(on_host(y));
  return out;
}
Tensor with_c(const Tensor& c, const Tensor& product, const at::Scalar& beta, const at::Scalar& alpha) {
  return on_gpu(on_host(c) * beta + on_host(product) * alpha);
}
}  // namespace

namespace at::cuda {
Tensor mm(const Tensor& a, const Tensor& b) { return on_gpu(at::cpu::mm(on_host(a), on_host(b))); }
Tensor& mm_out(Tensor& out, const Tensor& a, const Tensor& b) {
  Tensor host = on_host(out);
  at::cpu::mm_out(host, on_host(a), on_host(b));
  return out;
}
Tensor mm(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return on_gpu(at::cpu::mm(on_host(a), on_host(b)).to(type));
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return on_gpu(at::cpu::addmm(on_host(c), on_host(a), on_host(b), beta, alpha));
}
Tensor& addmm_out(Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                  const Scalar& alpha) {
  return into(out, at::cuda::addmm(c, a, b, beta, alpha));
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type, const Scalar& beta,
             const Scalar& alpha) {
  return with_c(c, at::cuda::mm(a, b, type), beta, alpha);
}
Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  Tensor host = on_host(c);
  at::cpu::addmm_(host, on_host(a), on_host(b), beta, alpha);
  return c;
}
Tensor bmm(const Tensor& a, const Tensor& b) { return on_gpu(at::cpu::bmm(on_host(a), on_host(b))); }
Tensor bmm(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return on_gpu(at::cpu::bmm(on_host(a), on_host(b)).to(type));
}
Tensor& bmm_out(Tensor& out, const Tensor& a, const Tensor& b) {
  Tensor host = on_host(out);
  at::cpu::bmm_out(host, on_host(a), on_host(b));
  return out;
}
Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return on_gpu(at::cpu::baddbmm(on_host(c), on_host(a), on_host(b), beta, alpha));
}
Tensor& baddbmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  Tensor host = on_host(c);
  at::cpu::baddbmm_(host, on_host(a), on_host(b), beta, alpha);
  return c;
}
Tensor& baddbmm_out(Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                    const Scalar& alpha) {
  return into(out, at::cuda::baddbmm(c, a, b, beta, alpha));
}
Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type, const Scalar& beta,
               const Scalar& alpha) {
  return with_c(c, at::cuda::bmm(a, b, type), beta, alpha);
}
Tensor _int_mm(const Tensor& a, const Tensor& b) { return on_gpu(at::cpu::_int_mm(on_host(a), on_host(b))); }
Tensor& _int_mm_out(Tensor& out, const Tensor& a, const Tensor& b) { return into(out, at::cuda::_int_mm(a, b)); }
Tensor _scaled_mm(const Tensor& a, const Tensor& b, const Tensor& sa, const Tensor& sb, const std::optional<Tensor>&,
                  const std::optional<Tensor>&, std::optional<at::ScalarType> type, bool) {
  const auto wide = [](const Tensor& t, const Tensor& s) { return on_host(t).to(at::kFloat) * on_host(s); };
  return on_gpu(at::cpu::mm(wide(a, sa), wide(b, sb)).to(type.value_or(a.scalar_type())));
}
Tensor& _scaled_mm_out(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& sa, const Tensor& sb,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& sr,
                       std::optional<at::ScalarType>, bool fast) {
  return into(out, at::cuda::_scaled_mm(a, b, sa, sb, bias, sr, out.scalar_type(), fast));
}
Tensor _scaled_mm_v2(const Tensor& a, const Tensor& b, at::TensorList sa, at::IntArrayRef, at::IntArrayRef,
                     at::TensorList sb, at::IntArrayRef, at::IntArrayRef, const std::optional<Tensor>& bias,
                     std::optional<at::ScalarType> type, at::IntArrayRef, bool fast) {
  return at::cuda::_scaled_mm(a, b, sa[0], sb[0], bias, std::nullopt, type, fast);
}
Tensor& _scaled_mm_v2_outf(const Tensor& a, const Tensor& b, at::TensorList sa, at::IntArrayRef ra, at::IntArrayRef wa,
                           at::TensorList sb, at::IntArrayRef rb, at::IntArrayRef wb, const std::optional<Tensor>& bias,
                           std::optional<at::ScalarType>, at::IntArrayRef dims, bool fast, Tensor& out) {
  return into(out, at::cuda::_scaled_mm_v2(a, b, sa, ra, wa, sb, rb, wb, bias, out.scalar_type(), dims, fast));
}
Tensor _grouped_mm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& ends, const std::optional<Tensor>&,
                   std::optional<at::ScalarType>) {
  const Tensor x = on_host(a), w = on_host(b), y = at::empty({x.size(0), w.size(-1)}, x.options());
  int64_t first = 0;
  for (int64_t g = 0; g < w.size(0); ++g) {
    const int64_t end = on_host(*ends)[g].item<int64_t>();
    y.narrow(0, first, end - first).copy_(at::cpu::mm(x.narrow(0, first, end - first), w[g]));
    first = end;
  }
  return on_gpu(y);
}
Tensor _scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& sa, const Tensor& sb,
                          const std::optional<Tensor>& ends, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>&, std::optional<at::ScalarType> type, bool) {
  const auto wide = [](const Tensor& t, const Tensor& s, int64_t axis) {
    return on_gpu(on_host(t).to(at::kFloat) * on_host(s).unsqueeze(axis));
  };
  const Tensor y = at::cuda::_grouped_mm(wide(a, sa, 1), wide(b, sb, 1), ends, bias, std::nullopt);
  return on_gpu(on_host(y).to(type.value_or(at::kBFloat16)));
}
Tensor _scaled_grouped_mm_v2(const Tensor& a, const Tensor& b, at::TensorList sa, at::IntArrayRef, at::IntArrayRef,
                             at::TensorList sb, at::IntArrayRef, at::IntArrayRef, const std::optional<Tensor>& ends,
                             const std::optional<Tensor>& bias, std::optional<at::ScalarType> type, at::IntArrayRef,
                             bool fast) {
  return at::cuda::_scaled_grouped_mm(a, b, sa[0], sb[0], ends, bias, std::nullopt, type, fast);
}
Tensor _addmm_activation(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                         bool gelu) {
  Tensor y = at::cpu::addmm(on_host(c), on_host(a), on_host(b), beta, alpha);
  return on_gpu(gelu ? at::gelu_(y) : at::relu_(y));
}
Tensor& _addmm_activation_out(Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                              const Scalar& alpha, bool gelu) {
  return into(out, at::cuda::_addmm_activation(c, a, b, beta, alpha, gelu));
}
}  // namespace at::cuda

// torch's own, by their names in at::_ops, with the result that is written into as their last argument.
namespace stock {
using namespace at::cuda;

template <auto* First>
struct Turned;
template <class... A, Tensor& (*First)(Tensor&, A...)>
struct Turned<First> {
  static Tensor& out_last(A... a, Tensor& out) { return First(out, a...); }
};
constexpr auto* mm_out = &Turned<at::cuda::mm_out>::out_last;
constexpr auto* bmm_out = &Turned<at::cuda::bmm_out>::out_last;
constexpr auto* addmm_out = &Turned<at::cuda::addmm_out>::out_last;
constexpr auto* baddbmm_out = &Turned<at::cuda::baddbmm_out>::out_last;
constexpr auto* _addmm_activation_out = &Turned<at::cuda::_addmm_activation_out>::out_last;
constexpr auto* _int_mm_out = &Turned<at::cuda::_int_mm_out>::out_last;
constexpr auto* _scaled_mm_out = &Turned<at::cuda::_scaled_mm_out>::out_last;
constexpr auto* _scaled_mm_v2_out = &at::cuda::_scaled_mm_v2_outf;

constexpr at::_ops::mm_dtype::schema* mm_dtype = &at::cuda::mm;
constexpr at::_ops::bmm_dtype::schema* bmm_dtype = &at::cuda::bmm;
constexpr at::_ops::addmm_dtype::schema* addmm_dtype = &at::cuda::addmm;
constexpr at::_ops::baddbmm_dtype::schema* baddbmm_dtype = &at::cuda::baddbmm;
}  // namespace stock

extern "C" {
void fake_not_here() {
  std::fputs("the fake of torch's CUDA library has no such function\n", stderr);
  std::abort();
}
void fake_stream(void* stream) { t_stream = stream; }
void fake_full(int full) { g_full = full; }
void fake_register() {
  static auto& ops = *new torch::Library(torch::Library::DEF, "fake", std::nullopt, __FILE__, __LINE__);
  ops.def("on_gpu(Tensor t) -> Tensor", on_gpu);
  ops.def("on_host(Tensor t) -> Tensor", on_host);
  static auto& aten = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                          "/fake/aten/src/ATen/RegisterCUDA_0.cpp", 1);
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("as_strided", TORCH_FN(strided));
  aten.impl("copy_", TORCH_FN(copied));
#define FAKE_STOCK(operation, torchs, ...) aten.impl(operation, static_cast<at::_ops::torchs::schema*>(stock::torchs));
#define FAKE_STOCK_OF_X(operation, ours, torchs) FAKE_STOCK(operation, torchs)
  GEMMTUNED_OPERATORS(FAKE_STOCK_OF_X)
  GEMMTUNED_ACTIVATION_OPERATORS(FAKE_STOCK_OF_X)
  GEMMTUNED_INT_OPERATORS(FAKE_STOCK_OF_X)
  GEMMTUNED_GPU_OPERATORS(FAKE_STOCK)
}
}
