// What of torch's CUDA library the native hook needs, for tensors that lie in host memory and say that they are on a GPU.
//
// torch's own kernels are told apart from others by the file they are registered in, so ours here name such a file.
#include <ATen/ATen.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>

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
}  // namespace at::cuda

namespace {
Tensor stock_mm(const Tensor& a, const Tensor& b) { return at::cuda::mm(a, b); }
Tensor& stock_mm_out(const Tensor& a, const Tensor& b, Tensor& out) { return at::cuda::mm_out(out, a, b); }
Tensor stock_mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType type) { return at::cuda::mm(a, b, type); }
Tensor stock_addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::cuda::addmm(c, a, b, beta, alpha);
}
}  // namespace

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
  aten.impl("mm", TORCH_FN(stock_mm));
  aten.impl("mm.out", TORCH_FN(stock_mm_out));
  aten.impl("mm.dtype", TORCH_FN(stock_mm_dtype));
  aten.impl("addmm", TORCH_FN(stock_addmm));
}
}
