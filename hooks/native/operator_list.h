// aten's leaf GEMMs that we stand in front of, on every device: the one list of them.
//
// X(operation, ours, torchs): the operator's name, our function of Operators (operators.h), and torch's own of namespace
// at::cpu or at::cuda. Those of torch's own use, with a _, are left alone where a later torch has them otherwise, or not at
// all: install.h. Operators that only some torches have, on GPUs alone, are there, too: list_private.
#pragma once

#define GEMMTUNED_OPERATORS(X)               \
  X("mm", mm, mm)                            \
  X("mm.out", mm_out, mm_out)                \
  X("addmm", addmm, addmm)                   \
  X("addmm.out", addmm_out, addmm_out)       \
  X("addmm_", addmm_, addmm_)                \
  X("bmm", bmm, bmm)                         \
  X("bmm.out", bmm_out, bmm_out)             \
  X("baddbmm", baddbmm, baddbmm)             \
  X("baddbmm.out", baddbmm_out, baddbmm_out) \
  X("baddbmm_", baddbmm_, baddbmm_)

#if __has_include(<ATen/ops/_addmm_activation_cpu_dispatch.h>)
#define GEMMTUNED_ACTIVATION_OPERATORS(X)                     \
  X("_addmm_activation", addmm_activation, _addmm_activation) \
  X("_addmm_activation.out", addmm_activation_out, _addmm_activation_out)
#else
#define GEMMTUNED_ACTIVATION_OPERATORS(X)
#endif

#if __has_include(<ATen/ops/_int_mm_cpu_dispatch.h>)
#define GEMMTUNED_INT_OPERATORS(X) \
  X("_int_mm", int_mm, _int_mm)    \
  X("_int_mm.out", int_mm_out, _int_mm_out)
#else
#define GEMMTUNED_INT_OPERATORS(X)
#endif

// Torch's own function under our name, for whatever arguments it takes: some have several forms. A requires-expression can
// ask whether it takes some.
#define GEMMTUNED_TORCHS(ours, torchs)                                                                    \
  template <class... Arguments>                                                                           \
  static auto ours(Arguments&&... arguments) -> decltype(torchs(std::forward<Arguments>(arguments)...)) { \
    return torchs(std::forward<Arguments>(arguments)...);                                                 \
  }
