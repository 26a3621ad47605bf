// What an operator was called with, by name, and what a launch record says of it: the words of configs/launch.py.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace gemmtuned {

using at::Tensor;

// Order of SLOTS in configs/launch.py. W and its scale lie here as torch takes them, [K, N]: hooks/native/launches.py
// exchanges the dimensions of a record, in which they are [N, K].
enum Slot : uint8_t {
  SLOT_X,
  SLOT_W,
  SLOT_SCALE_X,
  SLOT_SCALE_W,
  SLOT_ZERO_X,
  SLOT_SUMS_W,
  SLOT_BIAS,
  SLOT_C,
  SLOT_OFFS,
  SLOT_Y,
  SLOT_COUNT
};

struct Slots {
  std::array<const Tensor*, SLOT_COUNT> t{};  // null where the call has none
  double alpha = 1, beta = 1;                 // y = alpha x w + beta c
  const Tensor* packed = nullptr;             // w in oneDNN's order (gemmtuned.freeze)

  const Tensor& x() const { return *t[SLOT_X]; }
  const Tensor& w() const { return *t[SLOT_W]; }
  const Tensor* bias() const { return t[SLOT_BIAS]; }
  const Tensor* c() const { return t[SLOT_C]; }
};

inline Slots slots_of(const Tensor& x, const Tensor& w, const Tensor* bias = nullptr) {
  Slots s;
  s.t[SLOT_X] = &x, s.t[SLOT_W] = &w, s.t[SLOT_BIAS] = bias;
  return s;
}

// What of an operand: order of WHATS in configs/launch.py. CONTIGUOUS_TURNED is the record's `contiguous` of `w` and
// `scale_w`, whose slots hold them with the last two dimensions exchanged.
enum What : uint8_t { PTR, SIZE, STRIDE, RANK, NUMEL, CONTIGUOUS, CONTIGUOUS_TURNED };
// How a condition compares: order of OPS in configs/launch.py. A MULTIPLE is of a power of two.
enum Op : uint8_t { EQUAL, MULTIPLE, AT_MOST, AT_LEAST };

struct Cond {  // mirrored in hooks/native/launches.py
  uint8_t slot, what, dim, op;
  uint8_t of_slot, of_dim;  // the size to compare with; SLOT_COUNT: `value`
  uint16_t spare;
  int32_t value;
};

// Of the same memory with the last two dimensions exchanged, without making a tensor for it.
inline bool turned_is_contiguous(const Tensor& t) {
  const int64_t d = t.dim();
  if (d < 2) return t.is_contiguous();
  int64_t dense = 1;
  for (int64_t i = d - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i == d - 1 ? d - 2 : i == d - 2 ? d - 1 : i);
    if (t.sizes()[at] != 1 && t.strides()[at] != dense) return false;
    dense *= t.sizes()[at];
  }
  return true;
}

inline int64_t quantity(const Tensor& t, uint8_t what, uint8_t dim) {
  switch (what) {
    case PTR: return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()));
    case SIZE: return t.sizes()[dim];
    case STRIDE: return t.strides()[dim];
    case RANK: return t.dim();
    case NUMEL: return t.numel();
    case CONTIGUOUS: return t.is_contiguous();
    default: return turned_is_contiguous(t);
  }
}

inline bool holds(const Cond& c, const Slots& slots) {
  const Tensor* const t = slots.t[c.slot];
  if (!t) return true;
  if (c.what == SIZE || c.what == STRIDE) {
    if (c.dim >= t->dim()) return false;
    if (c.what == STRIDE && t->sizes()[c.dim] == 1) return true;
  }
  int64_t wanted = c.value;
  if (c.of_slot != SLOT_COUNT) {
    const Tensor* const other = slots.t[c.of_slot];
    if (!other) return true;
    if (c.of_dim >= other->dim()) return false;
    wanted = other->sizes()[c.of_dim];
  }
  const int64_t is = quantity(*t, c.what, c.dim);
  switch (c.op) {
    case EQUAL: return is == wanted;
    case MULTIPLE: return (is & (wanted - 1)) == 0;
    case AT_MOST: return is <= wanted;
    default: return is >= wanted;
  }
}

// Whether all hold, but for those on the operand `except`. A call that does not meet them runs on stock torch, without blame.
inline bool holds(const std::vector<Cond>& conditions, const Slots& slots, Slot except = SLOT_COUNT) {
  for (const Cond& c : conditions)
    if (c.slot != except && !holds(c, slots)) return false;
  return true;
}

}  // namespace gemmtuned
