// A CUDA driver without a device, as far as the native hook calls it: memory is the host's, a launch multiplies at once.
//
// Written from the driver's documentation. `fake_set(name, code)` has a function fail, `fake_calls(name)` counts its calls.
// What its kernels compute: products.h.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cublaslt.h"
#include "products.h"

namespace {
std::mutex g_mutex;
std::map<std::string, int> g_codes;
std::map<std::string, long> g_calls;
long g_allocated = 0;
struct Capture {
  unsigned long long id;
  int state;
  void* graph;
};
std::map<void*, Capture> g_capturing;  // by stream
std::map<void*, unsigned long long> g_ids;
struct LaunchAttribute {  // CUlaunchAttribute of cuda.h
  int id, pad;
  unsigned size[3];
  char room[52];
};
struct LaunchConfig {  // CUlaunchConfig
  unsigned sizes[7];   // grid, threads, bytes of shared memory
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
struct Object {
  void* what;
  void (*destroy)(void*);
  int count;
};
std::map<void*, std::vector<Object*>> g_held;  // by graph
thread_local void* t_context = nullptr;

int said(const char* name) {
  std::lock_guard<std::mutex> hold(g_mutex);
  ++g_calls[name];
  const auto code = g_codes.find(name);
  return code == g_codes.end() ? 0 : code->second;
}
}  // namespace

extern "C" {
unsigned fake_launched[10];  // of the last launch: grid, threads, bytes of shared memory, thread blocks per cluster

void fake_set(const char* name, int code) {
  std::lock_guard<std::mutex> hold(g_mutex);
  g_codes[name] = code;
}
long fake_calls(const char* name) {
  std::lock_guard<std::mutex> hold(g_mutex);
  return g_calls[name];
}
void fake_shape(int n, int k, float times) { g_n = n, g_k = k, g_times = times; }
long fake_allocated() { return g_allocated; }
void fake_stream_id(void* stream, unsigned long long id) { g_ids[stream] = id; }
void fake_capture(void* stream, unsigned long long id, int state, void* graph) {
  if (id) g_capturing[stream] = {id, state, graph};
  else g_capturing.erase(stream);
}
int fake_capture_state(void* stream) {
  const auto capture = g_capturing.find(stream);
  return capture == g_capturing.end() ? 0 : capture->second.state;
}
void fake_graph_gone(void* graph) {
  for (Object* o : g_held[graph])
    if (--o->count == 0) o->destroy(o->what);
  g_held.erase(graph);
}

int cuDevicePrimaryCtxRetain(void** context, int) { return *context = reinterpret_cast<void*>(0x1000), said(__func__); }
int cuCtxGetCurrent(void** context) { return *context = t_context, said(__func__); }
int cuCtxSetCurrent(void* context) { return t_context = context, said(__func__); }
int cuModuleLoadData(void** module, const void*) { return *module = reinterpret_cast<void*>(0x2000), said(__func__); }
int cuModuleGetFunction(void** f, void*, const char*) { return *f = reinterpret_cast<void*>(0x3000), said(__func__); }
int cuFuncSetAttribute(void*, int, int) { return said(__func__); }
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   void* stream, void** a, void**) {
  const int code = said(__func__);
  const unsigned given[10] = {x, y, z, tx, ty, tz, shared, 1, 1, 1};
  std::memcpy(fake_launched, given, sizeof given);
  const auto capture = g_capturing.find(stream);
  if (code) return code;
  if (capture != g_capturing.end() && capture->second.state == 2) return 901;  // STREAM_CAPTURE_INVALIDATED
  return multiply(f, a);
}
#ifndef FAKE_OLD
// Of two dimensions, bytes, swizzled by 128 bytes: what the hook makes, and what the driver says of it.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, const char* address, const unsigned long long* sizes,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int, int fill) {
  if (const int code = said(__func__)) return code;
  const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool plain =
      type == 0 && rank == 2 && interleave == 0 && swizzle == 3 && fill == 0 && steps[0] == 1 && steps[1] == 1;
  const bool fits = sizes[0] && sizes[1] && strides[0] >= sizes[0] && box[0] == 128 && box[1] > 0 && box[1] <= 256;
  if (!plain || !fits || at(map) % 64 || at(address) % 16 || strides[0] % 16) return 1;  // INVALID_VALUE
  const Map made = {address, sizes[0], sizes[1], strides[0], {box[0], box[1]}};
  std::memcpy(map, &made, sizeof made);
  return 0;
}
#endif
#ifndef FAKE_LESS  // an interposer that lacks one
int cuLaunchKernelEx(const LaunchConfig* config, void* f, void** a, void**) {
  const int code = said(__func__);
  const LaunchAttribute* const cluster = config->attributes;
  if (config->count != 1 || cluster->id != 4) return 1;  // INVALID_VALUE; 4: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
  std::memcpy(fake_launched, config->sizes, sizeof config->sizes);
  std::memcpy(fake_launched + 7, cluster->size, sizeof cluster->size);
  for (int axis = 0; axis < 3; ++axis)
    if (config->sizes[axis] % cluster->size[axis]) return 1;  // a grid is a multiple of its clusters
  return code ? code : multiply(f, a);
}
#endif
int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  if (const int code = said(__func__)) return code;
  g_allocated += static_cast<long>(bytes);
  *memory = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  return 0;
}
int cuMemFree_v2(unsigned long long memory) { return std::free(reinterpret_cast<void*>(memory)), said(__func__); }
int cuMemsetD8Async(unsigned long long memory, unsigned char value, size_t bytes, void*) {
  if (const int code = said(__func__)) return code;
  std::memset(reinterpret_cast<void*>(memory), value, bytes);
  return 0;
}
int cuStreamCreate(void** stream, unsigned) { return *stream = reinterpret_cast<void*>(0x4000), said(__func__); }
int cuStreamSynchronize(void*) { return said(__func__); }
int cuStreamQuery(void*) { return said(__func__); }
int cuStreamIsCapturing(void* stream, int* state) {
  const auto capture = g_capturing.find(stream);
  *state = capture == g_capturing.end() ? 0 : capture->second.state;
  return said(__func__);
}
int cuStreamGetCaptureInfo_v2(void* stream, int* state, unsigned long long* id, void** graph, const void***, size_t*) {
  const auto capture = g_capturing.find(stream);
  if (capture != g_capturing.end())
    *state = capture->second.state, *id = capture->second.id, *graph = capture->second.graph;
  return said(__func__);
}
int cuThreadExchangeStreamCaptureMode(int*) { return said(__func__); }
int cuGetErrorName(int code, const char** name) {
  static thread_local char text[40];
  std::strcpy(text, ("CUDA_ERROR_" + std::to_string(code)).c_str());
  return *name = text, 0;
}
#ifndef FAKE_OLD
int cuStreamGetId(void* stream, unsigned long long* id) {
  const auto capture = g_capturing.find(stream);
  if (capture != g_capturing.end()) {  // seen on an H200, driver 580.159: 900, and the capture is invalidated
    capture->second.state = 2;
    return said(__func__), 900;
  }
  const auto known = g_ids.find(stream);
  *id = known == g_ids.end() ? reinterpret_cast<unsigned long long>(stream) : known->second;
  return said(__func__);
}
int cuUserObjectCreate(void** object, void* what, void (*destroy)(void*), unsigned count, unsigned) {
  if (const int code = said(__func__)) return code;
  *object = new Object{what, destroy, static_cast<int>(count)};
  return 0;
}
int cuUserObjectRelease(void* object, unsigned count) {
  auto* o = static_cast<Object*>(object);
  if ((o->count -= static_cast<int>(count)) == 0) o->destroy(o->what);
  return said(__func__);
}
int cuGraphRetainUserObject(void* graph, void* object, unsigned, unsigned) {
  if (const int code = said(__func__)) return code;
  g_held[graph].push_back(static_cast<Object*>(object));
  return 0;
}
#endif

int cublasLtMatmul(void*, void* desc, const void* alpha, const void* a, void* of_a, const void* b, void* of_b,
                   const void* beta, const void* c, void* of_c, void* d, void* of_d, const void*, void*, size_t,
                   void*) {
  if (const int code = said("cublasLtMatmul")) return code;
  return fake::matmul(desc, alpha, {a, of_a}, {b, of_b}, beta, {c, of_c}, {d, of_d});
}
}
