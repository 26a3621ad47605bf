// Launching published binaries through the CUDA driver.
//
// A launch is one call of cuLaunchKernel, or of cuLaunchKernelEx for clusters, with arguments taken from the operands;
// nothing synchronises, nothing allocates but the output, and the first call on a stream its workspace.
#pragma once
#include "driver.h"
#include "workspaces.h"

namespace gemmtuned::cuda {

// Order of ARGUMENTS and OVERS in configs/launch.py.
enum Argument : uint8_t { X, W, BIAS, Y, PARTIALS, COUNTERS, ROWS, LDX, LDW };
enum Over : uint8_t { FIXED, OVER_M, OVER_N };

struct Launch {  // mirrored in hooks/native/__init__.py; the fields are those of kernels/triton/launch.py
  Handle function;
  int64_t max_m, partials_offset, workspace_bytes, pointer_align;
  int32_t device, warps, warp_size, shared, ld_multiple, n, cluster;
  int32_t block[3];
  uint8_t over[3], argument_count, null_pointers, arguments[15];

  unsigned grid(int axis, int64_t m) const {
    if (over[axis] == FIXED) return static_cast<unsigned>(block[axis]);
    const int64_t size = over[axis] == OVER_M ? m : n;
    return static_cast<unsigned>((size + block[axis] - 1) / block[axis]);
  }

  // What the binary was compiled for is checked at every call; what it cannot take is served by torch, without blame.
  bool accepts(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias) const {
    return a.size(0) <= max_m && accepts_rows(a) && accepts_others(a, b, bias);
  }

  bool accepts_rows(const at::Tensor& a) const {
    const int64_t ldx = a.stride(0);
    return (a.stride(1) == 1 || a.size(1) == 1) && (a.size(0) == 1 || ldx % ld_multiple == 0) && ldx <= INT32_MAX && aligned(a);
  }

  bool accepts_others(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias) const {
    const int64_t ldw = b.stride(1);
    return a.device().index() == device && (b.stride(0) == 1 || b.size(0) == 1) && ldw % ld_multiple == 0 && ldw <= INT32_MAX &&
           aligned(b) && (!bias || (bias->stride(0) == 1 && aligned(*bias)));
  }

  bool aligned(const at::Tensor& t) const {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(pointer_align) == 0;
  }
};

// y [M, N] = a [M, K] @ b [K, N] (+ bias), asynchronously on the current stream.
inline void launch(const Launch& l, const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias,
                   const at::Tensor& y) {
  const Driver& d = Driver::get();
  const Handle stream = current_stream(l.device);
  const int64_t m = a.size(0);
  const void* pointers[4] = {a.const_data_ptr(), b.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                             y.mutable_data_ptr()};
  Address partials = 0, counters = 0;
  if (l.workspace_bytes) {
    counters = Workspaces::get().find(l.device, stream, capture_of(stream), static_cast<size_t>(l.workspace_bytes));
    partials = counters + static_cast<Address>(l.partials_offset);
  }
  int32_t rows = static_cast<int32_t>(m), ldx = static_cast<int32_t>(a.stride(0)),
          ldw = static_cast<int32_t>(b.stride(1));
  void* null = nullptr;
  void* const values[] = {&pointers[0], &pointers[1], &pointers[2], &pointers[3], &partials,
                          &counters,    &rows,        &ldx,         &ldw};
  void* arguments[18];
  int count = 0;
  for (; count < l.argument_count; ++count) arguments[count] = values[l.arguments[count]];
  for (int i = 0; i < l.null_pointers; ++i) arguments[count++] = &null;
  const unsigned threads = static_cast<unsigned>(l.warps * l.warp_size), shared = static_cast<unsigned>(l.shared);
  if (l.cluster > 1) {
    ClusterAttribute size;
    size.x = static_cast<unsigned>(l.cluster);
    const LaunchConfig config{
        {l.grid(0, m) * size.x, l.grid(1, m), l.grid(2, m)}, {threads, 1, 1}, shared, stream, &size};
    d.check(d.cuLaunchKernelEx(&config, l.function, arguments, nullptr), "cuLaunchKernelEx");
    return;
  }
  d.check(d.cuLaunchKernel(l.function, l.grid(0, m), l.grid(1, m), l.grid(2, m), threads, 1, 1, shared, stream,
                           arguments, nullptr),
          "cuLaunchKernel");
}

// Loads a binary on a device and finds its kernel. Modules stay for the life of the process: captured graphs hold them.
inline Handle load_kernel(int device, const void* image, const char* name, int shared, int cluster) {
  const Driver& d = Driver::get();
  RelaxedCapture relaxed;
  OnDevice on(device);
  Handle module, function;
  d.check(d.cuModuleLoadData(&module, image), "cuModuleLoadData");
  d.check(d.cuModuleGetFunction(&function, module, name), "cuModuleGetFunction");
  if (shared > 48 * 1024) d.check(d.cuFuncSetAttribute(function, kDynamicShared, shared), "cuFuncSetAttribute");
  if (cluster > kPortableCluster) d.check(d.cuFuncSetAttribute(function, kLargeClusters, 1), "cuFuncSetAttribute");
  return function;
}

}  // namespace gemmtuned::cuda
