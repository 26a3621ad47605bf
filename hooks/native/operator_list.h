// aten's leaf GEMMs that we stand in front of, on every device: the one list of them.
//
// X(operation, ours, torchs): the operator's name, our function of Operators (operators.h), and torch's own of namespace
// at::cpu or at::cuda. Operators that only some torches have, on GPUs alone, are in install.h: list_private.
#pragma once

#define GEMMTUNED_OPERATORS(X)                                            \
  X("mm", mm, mm)                                                         \
  X("mm.out", mm_out, mm_out)                                             \
  X("addmm", addmm, addmm)                                                \
  X("addmm.out", addmm_out, addmm_out)                                    \
  X("addmm_", addmm_, addmm_)                                             \
  X("bmm", bmm, bmm)                                                      \
  X("bmm.out", bmm_out, bmm_out)                                          \
  X("baddbmm", baddbmm, baddbmm)                                          \
  X("baddbmm.out", baddbmm_out, baddbmm_out)                              \
  X("baddbmm_", baddbmm_, baddbmm_)                                       \
  X("_addmm_activation", addmm_activation, _addmm_activation)             \
  X("_addmm_activation.out", addmm_activation_out, _addmm_activation_out) \
  X("_int_mm", int_mm, _int_mm)                                           \
  X("_int_mm.out", int_mm_out, _int_mm_out)

// Torch's own function under our name, for whatever arguments it takes: some have several forms.
#define GEMMTUNED_TORCHS(ours, torchs)                    \
  template <class... Arguments>                           \
  static decltype(auto) ours(Arguments&&... arguments) {  \
    return torchs(std::forward<Arguments>(arguments)...); \
  }
