// The CUDA driver: the few functions we call, declared here and found in libcuda, which torch has loaded.
//
// Needs neither toolkit nor headers. Found when the hook is installed: where one is missing the CUDA half is left out.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "blame.h"
#include "probation.h"

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
  int (*cuMemFree_v2)(Address);
  int (*cuMemsetD8Async)(Address, unsigned char, size_t, Handle);
  int (*cuStreamCreate)(Handle*, unsigned);
  int (*cuStreamSynchronize)(Handle);
  int (*cuStreamQuery)(Handle);
  int (*cuStreamIsCapturing)(Handle, int*);
  int (*cuStreamGetCaptureInfo_v2)(Handle, int*, unsigned long long*, Handle*, const Handle**, size_t*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuGetErrorName)(int, const char**);
  // The oldest drivers that torch runs with lack these; null where this one does.
  int (*cuStreamGetId)(Handle, unsigned long long*);
  int (*cuUserObjectCreate)(Handle*, void*, void (*)(void*), unsigned, unsigned);
  int (*cuUserObjectRelease)(Handle, unsigned);
  int (*cuGraphRetainUserObject)(Handle, Handle, unsigned, unsigned);
  int (*cuTensorMapEncodeTiled)(void*, int, unsigned, Address, const unsigned long long*, const unsigned long long*,
                                const unsigned*, const unsigned*, int, int, int, int);

  static constexpr int kNoMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

  // Codes that tell of the process, its device, a stream or a capture, and not of what we launched: the driver is shutting
  // down or was not started (3, 4), the device is gone or lost data (46, 100, 101, 214, 220), no context or a destroyed
  // one (201, 709), a destroyed stream (400), a fault that a kernel left behind, after which everything fails (700, 702,
  // 710, 714 to 720), a capture that the program broke (900 to 909).  cuda.h, CUresult.
  static bool is_of_the_program(int code) {
    for (const int known : {3, 4, 46, 100, 101, 201, 214, 220, 400, 700, 702, 709, 710})
      if (code == known) return true;
    return (code >= 714 && code <= 720) || (code >= 900 && code <= 909);
  }

  static const Driver& get() {
    static const Driver driver = load();
    return driver;
  }

  void check(int code, const char* what) const {
    if (code == 0) return;
    note_fault(code);
    if (is_of_the_program(code)) throw Declined("the device, the stream or the capture is broken");
    const char* name = nullptr;
    cuGetErrorName(code, &name);
    TORCH_CHECK_WITH(OutOfMemoryError, code != kNoMemory, what, ": ", name);
    TORCH_CHECK(false, what, ": ", name ? std::string(name) : "unknown error " + std::to_string(code));
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
    GEMMTUNED_FIND(cuStreamQuery);
    GEMMTUNED_FIND(cuStreamIsCapturing);
    GEMMTUNED_FIND(cuStreamGetCaptureInfo_v2);
    GEMMTUNED_FIND(cuThreadExchangeStreamCaptureMode);
    GEMMTUNED_FIND(cuMemFree_v2);
    GEMMTUNED_FIND(cuGetErrorName);
#define GEMMTUNED_TRY(name) d.name = reinterpret_cast<decltype(d.name)>(dlsym(lib, #name))
    GEMMTUNED_TRY(cuStreamGetId);
    GEMMTUNED_TRY(cuUserObjectCreate);
    GEMMTUNED_TRY(cuUserObjectRelease);
    GEMMTUNED_TRY(cuGraphRetainUserObject);
    GEMMTUNED_TRY(cuTensorMapEncodeTiled);
#undef GEMMTUNED_TRY
#undef GEMMTUNED_FIND
    return d;
  }
};

constexpr int kMostDevices = 64;
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

// The fault that a kernel has left on a device, after which nothing works there; 0 without one. Waits for nothing.
inline int fault_of(int device) {
  const Driver& d = Driver::get();
  Handle before = nullptr, context = nullptr;
  d.cuCtxGetCurrent(&before);
  int code = d.cuDevicePrimaryCtxRetain(&context, device);
  if (code == 0) code = d.cuCtxSetCurrent(context);
  if (code == 0) code = d.cuStreamQuery(nullptr);
  d.cuCtxSetCurrent(before);
  return is_fault(code) ? code : 0;
}

// A thread that has not used CUDA yet has no context, and a launch in it fails; torch's runtime calls bind one unasked.
inline void bind_context(int device) {
  const Driver& d = Driver::get();
  Handle context = nullptr;
  if (d.cuCtxGetCurrent(&context) == 0 && context) return;
  d.check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  d.check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

// The CUstream of torch's current stream, for torch before 2.11, whose streams do not give it.
inline Handle handle_by_device(int device) {
  using Get = int (*)(int32_t, void**);  // aoti_torch_get_current_cuda_stream of torch's inductor/aoti_torch/c/shim.h
  static const Get get = [] {
    void* lib = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    TORCH_CHECK(lib, "libtorch_cuda.so is not loaded");
    Get found = nullptr;
    find_symbol(lib, "libtorch_cuda.so", found, "aoti_torch_get_current_cuda_stream");
    return found;
  }();
  Handle stream = nullptr;
  TORCH_CHECK(get(device, &stream) == 0, "torch tells no current stream of GPU ", device);
  return stream;
}

template <class Stream>
Handle handle_of(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) return stream.native_handle();
  else return handle_by_device(stream.device_index());
}

inline Handle current_stream(int device) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return handle_of(guard.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))));
}

// The graph capture that a stream is part of: its number, 0 when it is part of none, and the graph as far as it is recorded.
struct Capture {
  unsigned long long id = 0;
  Handle graph = nullptr;
};

inline Capture capture_of(Handle stream) {
  const Driver& d = Driver::get();
  int state = 0;
  if (d.cuStreamIsCapturing(stream, &state) != 0 || state == 0) return {};
  Capture capture;
  d.check(d.cuStreamGetCaptureInfo_v2(stream, &state, &capture.id, &capture.graph, nullptr, nullptr),
          "cuStreamGetCaptureInfo");
  return capture;
}

}  // namespace gemmtuned::cuda
