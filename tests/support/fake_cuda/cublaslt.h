// cuBLASLt without a device: a product of host memory by what its descriptors say, after the library's documentation.
//
// Matrices are column-major; D = alpha op(A) op(B) + beta C, plus a bias for each row of D, scales of A's and B's rows or
// blocks.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>

namespace fake {

enum Type { FP32 = 0, I8 = 3, I32 = 10, BF16 = 14, E4M3 = 28 };  // cudaDataType

inline float value(int type, const void* data, int64_t i) {
  if (type == FP32) return static_cast<const float*>(data)[i];
  if (type == I8) return static_cast<const int8_t*>(data)[i];
  if (type == BF16) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const int bits = static_cast<const uint8_t*>(data)[i], e = bits >> 3 & 15, m = bits & 7;
  const float f = e ? std::ldexp(1.0f + m / 8.0f, e - 7) : std::ldexp(m / 8.0f, -6);
  return bits & 128 ? -f : f;
}

inline void put(int type, void* data, int64_t i, float f) {  // bf16: of values that have one
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (type == FP32) static_cast<float*>(data)[i] = f;
  else if (type == I32) static_cast<int32_t*>(data)[i] = static_cast<int32_t>(f);
  else static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
}

struct Layout {
  int type;
  int64_t rows, columns, leading;
  int batch = 1;
  int64_t stride = 0;
};

struct Desc {
  int compute, scale_type;  // of alpha and beta
  std::map<int, int64_t> attributes;
  int64_t of(int which, int64_t otherwise = 0) const {
    const auto found = attributes.find(which);
    return found == attributes.end() ? otherwise : found->second;
  }
  float number(const void* given) const {
    return scale_type == I32 ? static_cast<float>(*static_cast<const int32_t*>(given)) : *static_cast<const float*>(given);
  }
  // Of element l of row i, of `rows` with `k` elements each. OUTER_VEC_32F: one a row; VEC128_32F: one for each 128 of a
  // row, the rows side by side; BLK128x128_32F: for 128 rows, too, which begin at multiples of 4
  float scale(int pointer, int mode, int64_t i, int64_t l, int64_t rows, int64_t k) const {
    const auto* scales = reinterpret_cast<const float*>(of(pointer));
    const int64_t apart = ((k + 127) / 128 + 3) / 4 * 4;
    return !scales         ? 1
           : of(mode) == 3 ? scales[i]
           : of(mode) == 4 ? scales[l / 128 * rows + i]
           : of(mode) == 5 ? scales[i / 128 * apart + l / 128]
                           : scales[0];
  }
};

struct Matrix {
  const void* data;
  const void* layout;
  const Layout& of() const { return *static_cast<const Layout*>(layout); }
  float at(int64_t row, int64_t column, int batch) const {
    return value(of().type, data, batch * of().stride + column * of().leading + row);
  }
};

inline int matmul(const void* described, const void* alpha, Matrix a, Matrix b, const void* beta, Matrix c, Matrix d) {
  const Desc& desc = *static_cast<const Desc*>(described);
  const bool ta = desc.of(3), tb = desc.of(4);
  const bool ints = a.of().type == I8 && b.of().type == I8 && d.of().type == I32;
  if ((desc.compute == 72) != ints || (desc.scale_type == I32) != ints) return 15;  // NOT_SUPPORTED; 72: 32I
  const int64_t k = ta ? a.of().rows : a.of().columns;
  if (k != (tb ? b.of().columns : b.of().rows) || a.of().batch != d.of().batch) return 7;  // INVALID_VALUE
  const auto* bias = desc.of(7) == 4 ? reinterpret_cast<const void*>(desc.of(8)) : nullptr;
  const int bias_type = static_cast<int>(desc.of(26, d.of().type));
  for (int batch = 0; batch < d.of().batch; ++batch)
    for (int64_t j = 0; j < d.of().columns; ++j)
      for (int64_t i = 0; i < d.of().rows; ++i) {
        float sum = 0;
        for (int64_t l = 0; l < k; ++l)
          sum += (ta ? a.at(l, i, batch) : a.at(i, l, batch)) * (tb ? b.at(j, l, batch) : b.at(l, j, batch)) *
                 desc.scale(17, 31, i, l, d.of().rows, k) * desc.scale(18, 32, j, l, d.of().columns, k);
        sum *= desc.number(alpha);
        const float times = desc.number(beta);
        if (times != 0) sum += times * c.at(i, j, batch);
        if (bias) sum += value(bias_type, bias, i);
        put(d.of().type, const_cast<void*>(d.data), batch * d.of().stride + j * d.of().leading + i, sum);
      }
  return 0;
}

}  // namespace fake

extern "C" {
size_t cublasLtGetVersion() { return 130002; }
int cublasLtCreate(void** handle) { return *handle = reinterpret_cast<void*>(1), 0; }
int cublasLtMatmulDescCreate(void** desc, int compute, int type) { return *desc = new fake::Desc{compute, type, {}}, 0; }
int cublasLtMatmulDescDestroy(void* desc) { return delete static_cast<fake::Desc*>(desc), 0; }
int cublasLtMatmulDescSetAttribute(void* desc, int which, const void* value, size_t bytes) {
  int64_t read = 0;
  std::memcpy(&read, value, bytes);
  static_cast<fake::Desc*>(desc)->attributes[which] = read;
  return 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  *layout = new fake::Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), leading};
  return 0;
}
int cublasLtMatrixLayoutDestroy(void* layout) { return delete static_cast<fake::Layout*>(layout), 0; }
int cublasLtMatrixLayoutSetAttribute(void* layout, int which, const void* value, size_t bytes) {
  auto& of = *static_cast<fake::Layout*>(layout);
  if (which != 5 && which != 6) return 7;
  return std::memcpy(which == 5 ? static_cast<void*>(&of.batch) : &of.stride, value, bytes), 0;
}
}
