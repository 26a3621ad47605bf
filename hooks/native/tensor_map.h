// Tensor maps among a kernel's arguments: what the tensor memory accelerator copies boxes by (configs/tensor_maps.py).
//
// A map holds the operand's address, so each launch makes it anew, on the host; a captured graph keeps the one it was
// captured with, as it keeps every address.
#pragma once
#include "driver.h"

namespace gemmtuned::cuda {

constexpr int kMaps = 2;  // of a launch: MAX_MAPS of configs/launch_sizes.py

struct alignas(64) TensorMap {  // CUtensorMap of cuda.h
  unsigned char opaque[128];
};

// What a map is made of, in bytes: rows of `columns`, `stride` from one to the next, for boxes of `box_rows` of them.
struct ByteMatrix {
  Address address;
  uint64_t rows, columns, stride;
  unsigned box_rows;
};

// row_dim: the dimension of t that counts its rows, whose elements lie side by side. A single row may have any stride.
inline ByteMatrix byte_matrix(const at::Tensor& t, int row_dim, unsigned box_rows) {
  const auto size = static_cast<uint64_t>(t.element_size());
  const auto rows = static_cast<uint64_t>(t.sizes()[row_dim]),
             columns = static_cast<uint64_t>(t.sizes()[1 - row_dim]) * size;
  const uint64_t stride = rows > 1 ? static_cast<uint64_t>(t.strides()[row_dim]) * size : (columns + 15) / 16 * 16;
  return {reinterpret_cast<Address>(t.const_data_ptr()), rows, columns, stride, box_rows};
}

inline void make_map(const ByteMatrix& of, TensorMap* map) {
  const Driver& d = Driver::get();
  if (!d.cuTensorMapEncodeTiled) throw Declined("the CUDA driver is older than 12.0 and makes no tensor maps");
  constexpr int kBytes = 0, kPlain = 0, kSwizzle128 = 3, kNoPromotion = 0, kZeros = 0;  // CU_TENSOR_MAP_ of cuda.h
  const unsigned long long sizes[] = {of.columns, of.rows}, strides[] = {of.stride};
  const unsigned box[] = {128, of.box_rows}, steps[] = {1, 1};
  d.check(d.cuTensorMapEncodeTiled(map, kBytes, 2, of.address, sizes, strides, box, steps, kPlain, kSwizzle128,
                                   kNoPromotion, kZeros),
          "cuTensorMapEncodeTiled");
}

}  // namespace gemmtuned::cuda
