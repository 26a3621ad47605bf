// Launching published binaries through the CUDA driver.
//
// Needs neither toolkit nor headers: the few driver functions are declared here and found in libcuda, which torch has
// loaded. A launch is one call of cuLaunchKernel, or of cuLaunchKernelEx for clusters, with arguments taken from the
// operands; nothing synchronises, nothing allocates but the output, and the first call on a stream its workspace.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

namespace gemmtuned::cuda {

using Handle = void*;  // CUcontext, CUmodule, CUfunction, CUstream
using Address = unsigned long long;

// Fills a function pointer from a library; throws when it is not there.
template <class Function>
void find_symbol(void* lib, const char* library, Function& slot, const char* name) {
  slot = reinterpret_cast<Function>(dlsym(lib, name));
  TORCH_CHECK(slot, library, " has no ", name);
}

// CUlaunchAttribute and CUlaunchConfig of cuda.h, as far as clusters need them. Triton's launcher, which measures, also
// asks for the scheduling policy SPREAD: times are the same with every one (benchmarks/results/clusters-h200-*.json).
struct ClusterAttribute {
  int id = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
  int pad = 0;
  unsigned x, y = 1, z = 1;
  char room[52] = {};
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  Handle stream;
  const ClusterAttribute* attributes;
  unsigned count = 1;
};
static_assert(sizeof(ClusterAttribute) == 72 && sizeof(LaunchConfig) == 56);

struct Driver {
  int (*cuDevicePrimaryCtxRetain)(Handle*, int);
  int (*cuCtxGetCurrent)(Handle*);
  int (*cuCtxSetCurrent)(Handle);
  int (*cuModuleLoadData)(Handle*, const void*);
  int (*cuModuleGetFunction)(Handle*, Handle, const char*);
  int (*cuFuncSetAttribute)(Handle, int, int);
  int (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                        void**);
  int (*cuLaunchKernelEx)(const LaunchConfig*, Handle, void**, void**);
  int (*cuMemAlloc_v2)(Address*, size_t);
  int (*cuMemsetD8Async)(Address, unsigned char, size_t, Handle);
  int (*cuStreamCreate)(Handle*, unsigned);
  int (*cuStreamSynchronize)(Handle);
  int (*cuStreamIsCapturing)(Handle, int*);
  int (*cuStreamGetCaptureInfo_v2)(Handle, int*, unsigned long long*, Handle*, const Handle**, size_t*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuGetErrorName)(int, const char**);

  static constexpr int kNoMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

  static const Driver& get() {
    static const Driver driver = load();
    return driver;
  }

  void check(int code, const char* what) const {
    if (code == 0) return;
    const char* name = nullptr;
    cuGetErrorName(code, &name);
    TORCH_CHECK_WITH(OutOfMemoryError, code != kNoMemory, what, ": ", name);
    TORCH_CHECK(false, what, ": ", name ? name : "unknown error ", code);
  }

 private:
  static Driver load() {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(lib, "libcuda.so.1 does not load: ", dlerror());
    Driver d{};
#define GEMMTUNED_FIND(name) find_symbol(lib, "libcuda", d.name, #name)
    GEMMTUNED_FIND(cuDevicePrimaryCtxRetain);
    GEMMTUNED_FIND(cuCtxGetCurrent);
    GEMMTUNED_FIND(cuCtxSetCurrent);
    GEMMTUNED_FIND(cuModuleLoadData);
    GEMMTUNED_FIND(cuModuleGetFunction);
    GEMMTUNED_FIND(cuFuncSetAttribute);
    GEMMTUNED_FIND(cuLaunchKernel);
    GEMMTUNED_FIND(cuLaunchKernelEx);
    GEMMTUNED_FIND(cuMemAlloc_v2);
    GEMMTUNED_FIND(cuMemsetD8Async);
    GEMMTUNED_FIND(cuStreamCreate);
    GEMMTUNED_FIND(cuStreamSynchronize);
    GEMMTUNED_FIND(cuStreamIsCapturing);
    GEMMTUNED_FIND(cuStreamGetCaptureInfo_v2);
    GEMMTUNED_FIND(cuThreadExchangeStreamCaptureMode);
    GEMMTUNED_FIND(cuGetErrorName);
#undef GEMMTUNED_FIND
    return d;
  }
};

constexpr int kRelaxed = 2, kDynamicShared = 8, kLargeClusters = 14, kNonBlocking = 1, kPortableCluster = 8;

// Lets this thread allocate and load modules while some stream of the process is being captured.
struct RelaxedCapture {
  int mode = kRelaxed;
  RelaxedCapture() { Driver::get().cuThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { Driver::get().cuThreadExchangeStreamCaptureMode(&mode); }
};

// Makes the device's primary context, the one torch uses, current for a scope.
struct OnDevice {
  Handle before = nullptr;
  explicit OnDevice(int device) {
    const Driver& d = Driver::get();
    d.check(d.cuCtxGetCurrent(&before), "cuCtxGetCurrent");
    Handle context;
    d.check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    d.check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
  ~OnDevice() { Driver::get().cuCtxSetCurrent(before); }
};

// A thread that has not used CUDA yet has no context, and a launch in it fails; torch's runtime calls bind one unasked.
inline void bind_context(int device) {
  const Driver& d = Driver::get();
  Handle context = nullptr;
  if (d.cuCtxGetCurrent(&context) == 0 && context) return;
  d.check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  d.check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

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
    const auto aligned = [this](const at::Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(pointer_align) == 0;
    };
    const int64_t m = a.size(0), ldx = a.stride(0), ldw = b.stride(1);
    return a.device().index() == device && m <= max_m && (a.stride(1) == 1 || a.size(1) == 1) &&
           (b.stride(0) == 1 || b.size(0) == 1) && (m == 1 || ldx % ld_multiple == 0) && ldw % ld_multiple == 0 &&
           ldx <= INT32_MAX && ldw <= INT32_MAX && aligned(a) && aligned(b) &&
           (!bias || (bias->stride(0) == 1 && aligned(*bias)));
  }
};

// Scratch memory of launches that reduce over K. Launches of one stream run one after another and share one; every
// stream has its own, and so has every stream of every graph capture: a graph may be replayed beside anything.
// Every launch leaves the counters zero, so what a graph had serves another one, long after it is gone: a last replay may
// still run when its graph is deleted, and nothing tells when it ends.
class Workspaces {
 public:
  static Workspaces& get() {
    static auto* all = new Workspaces;
    return *all;
  }

  Address find(int device, Handle stream, unsigned long long capture, size_t bytes) {
    struct Last {
      int device;
      Handle stream;
      unsigned long long capture;
      Address memory;
      size_t bytes;
    };
    thread_local Last last{-1, nullptr, 0, 0, 0};
    if (last.device == device && last.stream == stream && last.capture == capture && last.bytes >= bytes)
      return last.memory;
    std::lock_guard<std::mutex> hold(mutex_);
    Slot* found = nullptr;
    for (Slot& slot : slots_)
      if (slot.device == device && slot.stream == stream && slot.capture == capture && slot.bytes >= bytes) found = &slot;
    if (!found && capture) found = spare(device, stream, capture, bytes);
    if (!found) {  // a smaller one is kept: a launch that uses it may still run
      const size_t size = std::max<size_t>(bytes, kSmallest);
      slots_.push_back({device, stream, capture, zeroed(device, size), size, {}});
      found = &slots_.back();
    }
    last = {device, stream, capture, found->memory, found->bytes};
    return found->memory;
  }

  // The graph of this capture is gone.
  void release(unsigned long long capture) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (Slot& slot : slots_)
      if (slot.capture == capture && capture) slot.capture = kSpare, slot.since = std::chrono::steady_clock::now();
  }

 private:
  static constexpr size_t kSmallest = 1 << 20;
  static constexpr unsigned long long kSpare = ~0ull;
  static constexpr std::chrono::seconds kLongest{30};  // no replay takes that long
  struct Slot {
    int device;
    Handle stream;
    unsigned long long capture;  // 0: eager launches; kSpare: nobody's since `since`
    Address memory;
    size_t bytes;
    std::chrono::steady_clock::time_point since;
  };
  std::mutex mutex_;
  std::deque<Slot> slots_;

  Slot* spare(int device, Handle stream, unsigned long long capture, size_t bytes) {
    for (Slot& slot : slots_)
      if (slot.capture == kSpare && slot.device == device && slot.bytes >= bytes &&
          std::chrono::steady_clock::now() - slot.since > kLongest) {
        slot.stream = stream, slot.capture = capture;
        return &slot;
      }
    return nullptr;
  }

  // Counters start at zero. On a stream of our own, outside of any capture; happens once for each slot.
  static Address zeroed(int device, size_t bytes) {
    const Driver& d = Driver::get();
    RelaxedCapture relaxed;
    OnDevice on(device);
    static Handle streams[64] = {};
    TORCH_CHECK(device < 64, "more than 64 devices");
    if (!streams[device]) d.check(d.cuStreamCreate(&streams[device], kNonBlocking), "cuStreamCreate");
    Address memory;
    d.check(d.cuMemAlloc_v2(&memory, bytes), "cuMemAlloc");
    d.check(d.cuMemsetD8Async(memory, 0, bytes, streams[device]), "cuMemsetD8Async");
    d.check(d.cuStreamSynchronize(streams[device]), "cuStreamSynchronize");
    return memory;
  }
};

inline Handle current_stream(int device) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))).native_handle();
}

// The id of the capture this stream is part of, 0 when it is none.
inline unsigned long long capture_of(Handle stream) {
  const Driver& d = Driver::get();
  int state = 0;
  if (d.cuStreamIsCapturing(stream, &state) != 0 || state == 0) return 0;
  unsigned long long id = 0;
  d.check(d.cuStreamGetCaptureInfo_v2(stream, &state, &id, nullptr, nullptr, nullptr), "cuStreamGetCaptureInfo");
  return id;
}

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
