// Products of compiled C++: AOTInductor's packages, and torch.compile with a C++ wrapper.
//
//   generated code -> aoti_torch_cpu_addmm_out -> at::cpu::addmm_out          no dispatcher, and no count
//
// Those functions are symbols that generated code looks up when it is loaded. Ours have the same names and do the same,
// by way of Operators (operators.h), whose stock is the very function that torch's would have called. They are found
// first once the library's symbols are global (library.py); exports.map says which symbols those are. The types are
// those of torch's own header, which promises never to change a function (torch/csrc/inductor/aoti_torch/c/shim.h).
#pragma once
#if __has_include(<torch/csrc/inductor/aoti_torch/utils.h>)
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "install.h"

namespace gemmtuned {

template <class... Handles>
auto tensors_of(Handles... handles) {
  return std::tuple{torch::aot_inductor::resolve_tensor_dispatch_flags(handles)...};
}

// Torch's own function of this name where its product is none that we call.
template <class Device>
AOTITorchError int_mm_out(const char* name, AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  if constexpr (CallsIntMm<Device>) {
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
      auto [y, x, w] = tensors_of(out, self, mat2);
      Operators<Device>::int_mm_out(x, w, y);
    });
  } else {
    const auto torchs = reinterpret_cast<AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle)>(
        dlsym(RTLD_NEXT, name));
    return torchs ? torchs(out, self, mat2) : AOTI_TORCH_FAILURE;
  }
}

}  // namespace gemmtuned

#define GEMMTUNED_PRODUCT_SHIM(device, Device, operation)                                             \
  AOTITorchError aoti_torch_##device##_##operation##_out(AtenTensorHandle out, AtenTensorHandle self, \
                                                         AtenTensorHandle mat2) {                     \
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({                                                      \
      auto [y, x, w] = gemmtuned::tensors_of(out, self, mat2);                                        \
      gemmtuned::Operators<Device>::operation##_out(x, w, y);                                         \
    });                                                                                               \
  }

#define GEMMTUNED_SUM_SHIM(device, Device, operation)                                                               \
  AOTITorchError aoti_torch_##device##_##operation##_out(AtenTensorHandle out, AtenTensorHandle self,               \
                                                         AtenTensorHandle mat1, AtenTensorHandle mat2, double beta, \
                                                         double alpha) {                                            \
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({                                                                    \
      auto [y, c, x, w] = gemmtuned::tensors_of(out, self, mat1, mat2);                                             \
      gemmtuned::Operators<Device>::operation##_out(c, x, w, beta, alpha, y);                                       \
    });                                                                                                             \
  }

#define GEMMTUNED_INT_SHIM(device, Device, operation)                                                 \
  AOTITorchError aoti_torch_##device##_##operation##_out(AtenTensorHandle out, AtenTensorHandle self, \
                                                         AtenTensorHandle mat2) {                     \
    return gemmtuned::int_mm_out<Device>(__func__, out, self, mat2);                                  \
  }

#define GEMMTUNED_SHIMS(device, Device) \
  GEMMTUNED_COMPILED_OPERATORS(GEMMTUNED_PRODUCT_SHIM, GEMMTUNED_SUM_SHIM, GEMMTUNED_INT_SHIM, device, Device)

extern "C" {

GEMMTUNED_SHIMS(cpu, gemmtuned::Cpu)
#ifdef GEMMTUNED_CUDA
GEMMTUNED_SHIMS(cuda, gemmtuned::Cuda)
#endif

// Whether code that is loaded from now on finds ours.
int gt_has_shims() noexcept {
  return dlsym(RTLD_DEFAULT, "aoti_torch_cpu_addmm_out") == reinterpret_cast<void*>(&aoti_torch_cpu_addmm_out);
}

}  // extern "C"
#else
extern "C" int gt_has_shims() noexcept { return 0; }
#endif
