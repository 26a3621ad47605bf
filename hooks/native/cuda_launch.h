// Launching published binaries through the CUDA driver.
//
// A launch is one call of cuLaunchKernel, or of cuLaunchKernelEx for clusters, with arguments taken from the operands;
// nothing synchronises, nothing allocates but the output, and the first call on a stream its workspace.
#pragma once
#include "driver.h"
#include "slots.h"
#include "tensor_map.h"
#include "workspaces.h"

namespace gemmtuned::cuda {

enum ArgumentKind : uint8_t {
  OPERAND,
  PARTIALS,
  COUNTERS,
  NOTHING_PASSED,
  TENSOR_MAP
};  // from PARTIALS to NOTHING_PASSED PLAIN of configs/launch.py, in its order

constexpr int kArguments = 24;

// A Slot and a What where the kind is OPERAND. Of a TENSOR_MAP `what` is its rows of a box / 8, `dim` the dimension of rows.
struct Argument {
  uint8_t kind, slot, what, dim;
};

struct Axis {
  int32_t block;
  uint8_t slot, dim;  // ceil(size / block); SLOT_COUNT: `block` itself
  uint16_t spare;
};

// How one kernel is launched: a KernelLaunch of configs/launch.py. Mirrored in hooks/native/launches.py.
struct Launch {
  Handle function;
  int64_t partials_offset, workspace_bytes;
  int32_t threads, shared, cluster, count;
  Axis grid[3];
  Argument arguments[kArguments];
};

inline unsigned programs(const Axis& axis, const Slots& slots) {
  if (axis.slot == SLOT_COUNT) return static_cast<unsigned>(axis.block);
  return static_cast<unsigned>((slots.t[axis.slot]->sizes()[axis.dim] + axis.block - 1) / axis.block);
}

inline ByteMatrix byte_matrix(const Argument& a, const Slots& slots) {
  return byte_matrix(*slots.t[a.slot], a.dim, a.what * 8u);
}

inline bool takes_strides(const Launch& l, Slot slot) {
  for (int i = 0; i < l.count; ++i)
    if (l.arguments[i].kind == OPERAND && l.arguments[i].slot == slot && l.arguments[i].what == STRIDE) return true;
  return false;
}

union Value {
  const void* pointer;
  Address address;
  int32_t number;
};

// The values of a kernel's arguments, but maps. Sizes and strides fit into 32 bits: that is among the conditions.
inline void fill(const Launch& l, const Slots& slots, Address workspace, Value* values) {
  for (int i = 0; i < l.count; ++i) {
    const Argument& a = l.arguments[i];
    if (a.kind == TENSOR_MAP) continue;
    if (a.kind != OPERAND) {
      values[i].address = a.kind == PARTIALS   ? workspace + static_cast<Address>(l.partials_offset)
                          : a.kind == COUNTERS ? workspace
                                               : 0;
      continue;
    }
    const Tensor* const t = slots.t[a.slot];
    if (a.what != PTR) values[i].number = static_cast<int32_t>(quantity(*t, a.what, a.dim));
    else values[i].pointer = !t ? nullptr : a.slot == SLOT_Y ? t->mutable_data_ptr() : t->const_data_ptr();
  }
}

// Asynchronously on the current stream, into y of `slots`.
inline void launch(const Launch& l, const Slots& slots) {
  const Driver& d = Driver::get();
  const int device = slots.x().device().index();
  const Handle stream = current_stream(device);
  const Address workspace = l.workspace_bytes ? Workspaces::get().find(device, stream, capture_of(stream),
                                                                       static_cast<size_t>(l.workspace_bytes))
                                              : 0;
  Value values[kArguments];
  void* arguments[kArguments];
  TensorMap maps[kMaps];
  int made = 0;
  fill(l, slots, workspace, values);
  for (int i = 0; i < l.count; ++i) {
    arguments[i] = &values[i];
    if (l.arguments[i].kind != TENSOR_MAP) continue;
    make_map(byte_matrix(l.arguments[i], slots), &maps[made]);
    arguments[i] = &maps[made++];
  }
  const unsigned x = programs(l.grid[0], slots), y = programs(l.grid[1], slots), z = programs(l.grid[2], slots);
  const auto threads = static_cast<unsigned>(l.threads), shared = static_cast<unsigned>(l.shared);
  if (l.cluster > 1) {
    ClusterAttribute size;
    size.x = static_cast<unsigned>(l.cluster);
    const LaunchConfig config{{x * size.x, y, z}, {threads, 1, 1}, shared, stream, &size};
    d.check(d.cuLaunchKernelEx(&config, l.function, arguments, nullptr), "cuLaunchKernelEx");
    return;
  }
  d.check(d.cuLaunchKernel(l.function, x, y, z, threads, 1, 1, shared, stream, arguments, nullptr), "cuLaunchKernel");
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
