// Products by an algorithm of cuBLASLt that was chosen for them: the library torch has loaded, called directly.
//
// Declared here as in driver.h, so that no toolkit is needed to build. The library works on columns: Y[M, N] in rows
// is its [N, M], its A is our [K, N] operand, its B our X. Descriptors are made for each call, as torch does: they hold
// the bias pointer. The workspace comes from torch's allocator, so that inside a graph capture it belongs to the graph.
#pragma once
#include <ATen/ops/empty.h>

#include <atomic>

#include "driver.h"
#include "workspaces.h"

namespace gemmtuned::cuda {

struct LtLibrary {
  size_t (*cublasLtGetVersion)();
  int (*cublasLtCreate)(Handle*);
  int (*cublasLtMatmulDescCreate)(Handle*, int, int);
  int (*cublasLtMatmulDescDestroy)(Handle);
  int (*cublasLtMatmulDescSetAttribute)(Handle, int, const void*, size_t);
  int (*cublasLtMatrixLayoutCreate)(Handle*, int, uint64_t, uint64_t, int64_t);
  int (*cublasLtMatrixLayoutDestroy)(Handle);
  int (*cublasLtMatmul)(Handle, Handle, const void*, const void*, Handle, const void*, Handle, const void*, const void*,
                        Handle, void*, Handle, const void*, void*, size_t, Handle);

  static const LtLibrary& get() {
    static const LtLibrary library = load();
    return library;
  }

  // One for each device and for the life of the process, as the library's documentation advises.
  Handle handle(int device) const {
    static std::mutex mutex;
    static std::atomic<Handle> handles[64]{};
    TORCH_CHECK(device >= 0 && device < 64, "more than 64 devices");
    if (const Handle known = handles[device].load(std::memory_order_acquire)) return known;  // no lock in a call
    std::lock_guard<std::mutex> hold(mutex);
    Handle made = handles[device].load(std::memory_order_relaxed);
    if (!made) {
      RelaxedCapture relaxed;
      check(cublasLtCreate(&made), "cublasLtCreate");
      handles[device].store(made, std::memory_order_release);
    }
    return made;
  }

  // Of a launch on this stream: statuses that a broken device or capture gives too are the route's only on a sound one.
  static void check_on(Handle stream, int code, const char* what) {
    constexpr int kNotInitialized = 1, kMappingError = 11, kExecutionFailed = 13, kInternalError = 14, kInvalidated = 2;
    int state = 0;
    for (const int vague : {kNotInitialized, kMappingError, kExecutionFailed, kInternalError})
      if (code == vague && (Driver::get().cuStreamIsCapturing(stream, &state) != 0 || state == kInvalidated))
        throw Declined("the device, the stream or the capture is broken");
    check(code, what);
  }

  static void check(int code, const char* what) {
    constexpr int kAllocFailed = 3, kNotSupported = 15;
    TORCH_CHECK_WITH(OutOfMemoryError, code != kAllocFailed, what, ": cuBLAS has no memory");
    TORCH_CHECK_WITH(NotImplementedError, code != kNotSupported, what, ": not supported by cuBLAS");
    TORCH_CHECK(code == 0, what, ": cuBLAS status ", code);
  }

 private:
  static LtLibrary load() {
    LtLibrary l{};
    void* lib = RTLD_DEFAULT;  // torch loads its libraries for all to see; where it did not, by name
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"})
      if (!dlsym(lib, "cublasLtMatmul"))
        if (void* found = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) lib = found;
#define GEMMTUNED_FIND(name) find_symbol(lib, "libcublasLt is not loaded, or", l.name, #name)
    GEMMTUNED_FIND(cublasLtGetVersion);
    GEMMTUNED_FIND(cublasLtCreate);
    GEMMTUNED_FIND(cublasLtMatmulDescCreate);
    GEMMTUNED_FIND(cublasLtMatmulDescDestroy);
    GEMMTUNED_FIND(cublasLtMatmulDescSetAttribute);
    GEMMTUNED_FIND(cublasLtMatrixLayoutCreate);
    GEMMTUNED_FIND(cublasLtMatrixLayoutDestroy);
    GEMMTUNED_FIND(cublasLtMatmul);
#undef GEMMTUNED_FIND
    return l;
  }
};

struct LtLaunch {  // mirrored in hooks/native/__init__.py; the fields are those of configs/launch.py
  uint64_t algo[8];
  int64_t max_m, workspace_bytes, pointer_align;
  int32_t device, ld_multiple, data_type, compute_type;  // cudaDataType, cublasComputeType_t
  uint8_t x_turned, w_turned;  // column-major

  bool accepts(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias) const {
    const auto aligned = [this](const at::Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(pointer_align) == 0;
    };
    const auto lies = [this](const at::Tensor& t, bool turned) {
      const int unit = turned ? 0 : 1;
      return (t.stride(unit) == 1 || t.size(unit) == 1) && leading(t, turned) % ld_multiple == 0 &&
             leading(t, turned) >= t.size(unit);
    };
    return a.device().index() == device && a.size(0) <= max_m && lies(a, x_turned) && lies(b, w_turned) && aligned(a) &&
           aligned(b) && (!bias || (bias->stride(0) == 1 && aligned(*bias)));
  }

  static int64_t leading(const at::Tensor& t, bool turned) {
    const int lead = turned ? 1 : 0;
    return t.size(lead) > 1 ? t.stride(lead) : t.size(1 - lead);
  }
};

// From torch's allocator, which at the limit gives all that it keeps back to the driver first: so not at every call.
inline at::Tensor scratch(int device, int64_t bytes, const at::TensorOptions& options) {
  if (Shortage::lasts(device)) throw Declined("the device had no memory a moment ago");
  try {
    return at::empty({bytes}, options.dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) {
    Shortage::begin(device);
    throw Declined("the device has no memory");
  }
}

// y [M, N] = a [M, K] @ b [K, N] (+ bias), asynchronously on the current stream.
inline void launch(const LtLaunch& l, const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias,
                   const at::Tensor& y) {
  constexpr int kFloat = 0, kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8, kEpilogueBias = 4;
  const LtLibrary& lt = LtLibrary::get();
  struct Owned {  // descriptors, destroyed on every way out
    const LtLibrary& lt;
    Handle desc = nullptr, layouts[3] = {};
    ~Owned() {
      for (Handle layout : layouts)
        if (layout) lt.cublasLtMatrixLayoutDestroy(layout);
      if (desc) lt.cublasLtMatmulDescDestroy(desc);
    }
  } own{lt};
  const auto set = [&](int which, const auto& value) {
    lt.check(lt.cublasLtMatmulDescSetAttribute(own.desc, which, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  };
  const auto layout = [&](int i, int64_t rows, int64_t columns, int64_t leading) {
    lt.check(lt.cublasLtMatrixLayoutCreate(&own.layouts[i], l.data_type, static_cast<uint64_t>(rows),
                                           static_cast<uint64_t>(columns), leading),
             "cublasLtMatrixLayoutCreate");
  };
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  lt.check(lt.cublasLtMatmulDescCreate(&own.desc, l.compute_type, kFloat), "cublasLtMatmulDescCreate");
  set(kTransA, static_cast<int32_t>(l.w_turned));
  set(kTransB, static_cast<int32_t>(l.x_turned));
  if (bias) {
    set(kEpilogue, static_cast<int32_t>(kEpilogueBias));
    set(kBiasPointer, bias->const_data_ptr());
  }
  layout(0, l.w_turned ? k : n, l.w_turned ? n : k, LtLaunch::leading(b, l.w_turned));
  layout(1, l.x_turned ? m : k, l.x_turned ? k : m, LtLaunch::leading(a, l.x_turned));
  layout(2, n, m, n);
  const Handle stream = current_stream(l.device);
  const at::Tensor space = l.workspace_bytes ? scratch(l.device, l.workspace_bytes, a.options()) : at::Tensor();
  const float one = 1, zero = 0;
  void* const out = y.mutable_data_ptr();
  lt.check_on(stream,
              lt.cublasLtMatmul(lt.handle(l.device), own.desc, &one, b.const_data_ptr(), own.layouts[0],
                                a.const_data_ptr(), own.layouts[1], &zero, out, own.layouts[2], out, own.layouts[2],
                                l.algo, space.defined() ? space.mutable_data_ptr() : nullptr,
                                static_cast<size_t>(l.workspace_bytes), stream),
              "cublasLtMatmul");
}

}  // namespace gemmtuned::cuda
