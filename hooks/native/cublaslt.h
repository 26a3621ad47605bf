// Products by an algorithm of cuBLASLt that was chosen for them: the library torch has loaded, called directly.
//
// Declared here as in driver.h, so that no toolkit is needed to build. The library works on columns: Y[M, N] in rows
// is its [N, M], its A is our [K, N] operand, its B our X. Descriptors are made for each call, as torch does: they hold
// the bias pointer. The workspace comes from torch's allocator, so that inside a graph capture it belongs to the graph.
#pragma once
#include <ATen/ops/empty.h>

#include <atomic>

#include "driver.h"
#include "slots.h"
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
  int (*cublasLtMatrixLayoutSetAttribute)(Handle, int, const void*, size_t);
  int (*cublasLtMatmul)(Handle, Handle, const void*, const void*, Handle, const void*, Handle, const void*, const void*,
                        Handle, void*, Handle, const void*, void*, size_t, Handle);

  static const LtLibrary& get() {
    static const LtLibrary library = load();
    return library;
  }

  // The library's handle on a device, made once for the life of the process, as its documentation advises.
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

  // Throws for a launch that failed. Some statuses come of a broken device or capture, too: the route is blamed for such a one
  // only where the stream and its capture are sound.
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
    GEMMTUNED_FIND(cublasLtMatrixLayoutSetAttribute);
    GEMMTUNED_FIND(cublasLtMatmul);
#undef GEMMTUNED_FIND
    return l;
  }
};

// How one algorithm is run: a LibraryLaunch of configs/launch.py. Mirrored in hooks/native/launches.py.
struct LtLaunch {
  uint64_t algo[8];
  int64_t workspace_bytes;
  int32_t compute_type, type_x, type_w, type_y, type_bias;  // cublasComputeType_t, cudaDataType
  int32_t scale_x, scale_w;                                 // cublasLtMatmulMatrixScale_t; 0: one value
  uint8_t x_turned, w_turned;                               // column-major
  uint8_t fast;                                             // 8-bit products may be summed up in fewer bits
};

// Memory for one call, from torch's allocator. Where a device has none left the allocator first gives all that it keeps back
// to the driver, so it is not asked again for a while.
inline at::Tensor scratch(int device, int64_t bytes, const at::TensorOptions& options) {
  if (Shortage::lasts(device)) throw Declined("the device had no memory a moment ago");
  try {
    return at::empty({bytes}, options.dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) {
    Shortage::begin(device);
    throw Declined("the device has no memory");
  }
}

// A matrix as it lies, from the last two dimensions of a tensor: columns of the library are rows of ours.
struct LtMatrix {
  uint64_t rows, columns;
  int64_t leading;

  LtMatrix(const Tensor& t, bool turned) {
    const auto size = t.sizes().slice(t.dim() - 2), stride = t.strides().slice(t.dim() - 2);
    const size_t unit = turned ? 0 : 1, lead = 1 - unit;
    rows = static_cast<uint64_t>(size[unit]), columns = static_cast<uint64_t>(size[lead]);
    leading = size[lead] > 1 ? stride[lead] : size[unit];
  }
};

constexpr int kComputeInt = 72;  // CUBLAS_COMPUTE_32I: alpha and beta are integers, too

// The library's descriptors of one call, destroyed on every way out. Attributes are those of cublasLt.h.
class LtDescribed {
 public:
  LtDescribed(const LtLibrary& lt, int compute_type) : lt_(lt) {
    constexpr int kFloat = 0, kInt = 10;
    const int scale_type = compute_type == kComputeInt ? kInt : kFloat;
    lt_.check(lt_.cublasLtMatmulDescCreate(&desc, compute_type, scale_type), "cublasLtMatmulDescCreate");
  }
  ~LtDescribed() {
    for (Handle layout : layouts)
      if (layout) lt_.cublasLtMatrixLayoutDestroy(layout);
    if (desc) lt_.cublasLtMatmulDescDestroy(desc);
  }
  LtDescribed(const LtDescribed&) = delete;
  LtDescribed& operator=(const LtDescribed&) = delete;

  template <class T>
  void set(int which, const T& value) {
    lt_.check(lt_.cublasLtMatmulDescSetAttribute(desc, which, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  void layout(int i, int type, const Tensor& t, bool turned) {
    constexpr int kBatchCount = 5, kBatchStride = 6;
    const LtMatrix m(t, turned);
    lt_.check(lt_.cublasLtMatrixLayoutCreate(&layouts[i], type, m.rows, m.columns, m.leading),
              "cublasLtMatrixLayoutCreate");
    if (t.dim() < 3) return;
    const auto batch = static_cast<int32_t>(t.sizes()[0]);
    const int64_t stride = t.strides()[0];
    const char* const what = "cublasLtMatrixLayoutSetAttribute";
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(layouts[i], kBatchCount, &batch, sizeof batch), what);
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(layouts[i], kBatchStride, &stride, sizeof stride), what);
  }

  Handle desc = nullptr, layouts[4] = {};  // of A (our w), B (our x), C, D

 private:
  const LtLibrary& lt_;
};

// Asynchronously on the current stream, into y of `slots`.
inline void launch(const LtLaunch& l, const Slots& slots) {
  enum {
    kTransA = 3,
    kTransB = 4,
    kEpilogue = 7,
    kBiasPointer = 8,
    kScaleA = 17,
    kScaleB = 18,
    kFast = 25,
    kBiasType = 26,
    kScaleModeA = 31,
    kScaleModeB = 32
  };
  constexpr int32_t kEpilogueBias = 4;
  const LtLibrary& lt = LtLibrary::get();
  const Tensor &x = slots.x(), &w = slots.w(), &y = *slots.t[SLOT_Y];
  const Tensor& c = slots.c() ? *slots.c() : y;
  LtDescribed own(lt, l.compute_type);
  own.set(kTransA, static_cast<int32_t>(l.w_turned));
  own.set(kTransB, static_cast<int32_t>(l.x_turned));
  if (slots.bias()) {
    own.set(kEpilogue, kEpilogueBias);
    own.set(kBiasPointer, slots.bias()->const_data_ptr());
    if (l.type_bias != l.type_y) own.set(kBiasType, l.type_bias);
  }
  if (slots.t[SLOT_SCALE_X] && slots.t[SLOT_SCALE_W]) {
    own.set(kScaleA, slots.t[SLOT_SCALE_W]->const_data_ptr());
    own.set(kScaleB, slots.t[SLOT_SCALE_X]->const_data_ptr());
    if (l.scale_w) own.set(kScaleModeA, l.scale_w);  // older libraries have no modes, but the scale of a tensor
    if (l.scale_x) own.set(kScaleModeB, l.scale_x);
  }
  if (l.fast) own.set(kFast, static_cast<int8_t>(1));
  own.layout(0, l.type_w, w, l.w_turned);
  own.layout(1, l.type_x, x, l.x_turned);
  own.layout(2, l.type_y, c, false);
  if (slots.c()) own.layout(3, l.type_y, y, false);
  const int device = x.device().index();
  const Handle stream = current_stream(device);
  const at::Tensor space = l.workspace_bytes ? scratch(device, l.workspace_bytes, x.options()) : at::Tensor();
  const float alpha = static_cast<float>(slots.alpha), beta = slots.c() ? static_cast<float>(slots.beta) : 0.0f;
  const int32_t one = 1, zero = 0;
  const bool ints = l.compute_type == kComputeInt;
  const void* const by_alpha = ints ? static_cast<const void*>(&one) : &alpha;
  const void* const by_beta = ints ? static_cast<const void*>(&zero) : &beta;
  void* const out = y.mutable_data_ptr();
  lt.check_on(
      stream,
      lt.cublasLtMatmul(lt.handle(device), own.desc, by_alpha, w.const_data_ptr(), own.layouts[0], x.const_data_ptr(),
                        own.layouts[1], by_beta, slots.c() ? c.const_data_ptr() : out, own.layouts[2], out,
                        own.layouts[slots.c() ? 3 : 2], l.algo, space.defined() ? space.mutable_data_ptr() : nullptr,
                        static_cast<size_t>(l.workspace_bytes), stream),
      "cublasLtMatmul");
}

}  // namespace gemmtuned::cuda
