// What the kernels of the fake driver compute, by their addresses.
//
// Arguments of a launch: X, W, Y, rows, ldx, ldw and, with scratch memory, counters; N and K are told by fake_shape. The
// kernel 0x3001 takes X and W in e4m3, Y in bf16 and, before Y, the scales of the rows of both; 0x3002 takes where the
// groups end before Y, and the number of groups and the distance between them; 0x3003 takes X in bf16, W in bytes of two
// codes (value = code - 8), the scales of the rows of W in fp32, and Y in bf16; 0x3004 takes e4m3 in groups, as our own
// kernel does: X, W, the scales of the rows of X and of each W, ends, Y in bf16, rows, ldx, between groups of W, ldw, between
// groups of scales; 0x3006 takes X and W in bytes of two e2m1, a byte per row of each that stands for a power of two, Y in
// bf16; 0x3007 takes tensor maps of X and W, and Y; 0x3008 takes batches: X, W, Y, batch, rows, and the distances between
// matrices and rows of each.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cublaslt.h"

namespace {
int g_n = 0, g_k = 0;
float g_times = 1;

int multiply_scaled(void** a) {
  const auto pointer = [&](int i) { return *static_cast<const char**>(a[i]); };
  const auto number = [&](int i) { return *static_cast<int*>(a[i]); };
  for (int m = 0; m < number(5); ++m)
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k)
        sum += fake::value(fake::E4M3, pointer(0), m * number(6) + k) *
               fake::value(fake::E4M3, pointer(1), n * number(7) + k);
      const float scale = fake::value(fake::FP32, pointer(2), m) * fake::value(fake::FP32, pointer(3), n);
      fake::put(fake::BF16, const_cast<char*>(pointer(4)), m * g_n + n, sum * scale * g_times);
    }
  return 0;
}

int multiply_groups(void** a) {
  const float *x = *static_cast<const float**>(a[0]), *w = *static_cast<const float**>(a[1]);
  const int* ends = *static_cast<const int**>(a[2]);
  float* y = *static_cast<float**>(a[3]);
  const auto number = [&](int i) { return *static_cast<int*>(a[i]); };
  for (int m = 0, g = 0; m < number(4); ++m) {
    while (g < number(5) && m >= ends[g]) ++g;
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k) sum += x[m * number(6) + k] * w[g * number(7) + n * number(8) + k];
      y[m * g_n + n] = sum * g_times;
    }
  }
  return 0;
}

int multiply_scaled_groups(void** a) {
  const auto pointer = [&](int i) { return *static_cast<const char**>(a[i]); };
  const auto number = [&](int i) { return *static_cast<int*>(a[i]); };
  const int* ends = *static_cast<const int**>(a[4]);
  for (int m = 0, g = 0; m < number(6); ++m) {
    while (m >= ends[g]) ++g;
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k)
        sum += fake::value(fake::E4M3, pointer(0), m * number(7) + k) *
               fake::value(fake::E4M3, pointer(1), g * number(8) + n * number(9) + k);
      const float scale =
          fake::value(fake::FP32, pointer(2), m) * fake::value(fake::FP32, pointer(3), g * number(10) + n);
      fake::put(fake::BF16, const_cast<char*>(pointer(5)), m * g_n + n, sum * scale * g_times);
    }
  }
  return 0;
}

int multiply_codes(void** a) {
  const uint16_t* x = *static_cast<const uint16_t**>(a[0]);
  const uint8_t* w = *static_cast<const uint8_t**>(a[1]);
  const float* scale = *static_cast<const float**>(a[2]);
  uint16_t* y = *static_cast<uint16_t**>(a[3]);
  const int rows = *static_cast<int*>(a[4]), ldx = *static_cast<int*>(a[5]), ldw = *static_cast<int*>(a[6]);
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k) {
        const uint32_t bits = static_cast<uint32_t>(x[m * ldx + k]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        sum += value * static_cast<float>((w[n * ldw + k / 2] >> (k % 2 * 4) & 15) - 8);
      }
      sum *= scale[n];
      uint32_t whole;
      std::memcpy(&whole, &sum, 4);
      y[m * g_n + n] = static_cast<uint16_t>(whole >> 16);
    }
  return 0;
}

int multiply_integers(void** a) {
  const int8_t *x = *static_cast<const int8_t**>(a[0]), *w = *static_cast<const int8_t**>(a[1]);
  int32_t* y = *static_cast<int32_t**>(a[2]);
  const int rows = *static_cast<int*>(a[3]), ldx = *static_cast<int*>(a[4]), ldw = *static_cast<int*>(a[5]);
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < g_n; ++n) {
      y[m * g_n + n] = 0;
      for (int k = 0; k < g_k; ++k) y[m * g_n + n] += x[m * ldx + k] * w[n * ldw + k];
    }
  return 0;
}

int multiply_pairs(void** a) {
  constexpr float kSizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const auto pointer = [&](int i) { return *static_cast<const uint8_t**>(a[i]); };
  const auto number = [&](int i) { return *static_cast<int*>(a[i]); };
  const auto value = [&](const uint8_t* row, int k) {
    const int code = row[k / 2] >> (k % 2 * 4) & 15;
    return code > 7 ? -kSizes[code - 8] : kSizes[code];
  };
  for (int m = 0; m < number(5); ++m)
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k) sum += value(pointer(0) + m * number(6), k) * value(pointer(1) + n * number(7), k);
      sum = std::ldexp(sum, pointer(2)[m] + pointer(3)[n] - 2 * 127);
      fake::put(fake::BF16, *static_cast<char**>(a[4]), m * g_n + n, sum);
    }
  return 0;
}

struct Map {  // what is kept in the 128 bytes of a tensor map
  const char* address;
  unsigned long long columns, rows, stride;
  unsigned box[2];
};

int multiply_mapped(void** a) {
  const auto map = [&](int i) { return *static_cast<const Map*>(a[i]); };
  const auto value = [](const Map& of, int row, int k) {
    return *reinterpret_cast<const float*>(of.address + row * of.stride + k * sizeof(float));
  };
  for (int m = 0; m < static_cast<int>(map(0).rows); ++m)
    for (int n = 0; n < static_cast<int>(map(1).rows); ++n) {
      float sum = 0;
      for (int k = 0; k < static_cast<int>(map(0).columns / 4); ++k) sum += value(map(0), m, k) * value(map(1), n, k);
      (*static_cast<float**>(a[2]))[m * g_n + n] = sum * g_times;
    }
  return 0;
}

int multiply_batches(void** a) {
  const float *x = *static_cast<const float**>(a[0]), *w = *static_cast<const float**>(a[1]);
  const auto number = [&](int i) { return *static_cast<int*>(a[i]); };
  for (int i = 0; i < number(3) * number(4) * g_n; ++i) {
    const int b = i / g_n / number(4), m = i / g_n % number(4), n = i % g_n;
    float sum = 0;
    for (int k = 0; k < g_k; ++k) sum += x[b * number(5) + m * number(6) + k] * w[b * number(7) + n * number(8) + k];
    (*static_cast<float**>(a[2]))[b * number(9) + m * number(10) + n] = sum * g_times;
  }
  return 0;
}

int multiply(void* function, void** a) {
  if (function == reinterpret_cast<void*>(0x3008)) return multiply_batches(a);
  if (function == reinterpret_cast<void*>(0x3007)) return multiply_mapped(a);
  if (function == reinterpret_cast<void*>(0x3006)) return multiply_pairs(a);
  if (function == reinterpret_cast<void*>(0x3005)) return multiply_integers(a);
  if (function == reinterpret_cast<void*>(0x3004)) return multiply_scaled_groups(a);
  if (function == reinterpret_cast<void*>(0x3003)) return multiply_codes(a);
  if (function == reinterpret_cast<void*>(0x3002)) return multiply_groups(a);
  if (function == reinterpret_cast<void*>(0x3001)) return multiply_scaled(a);
  const float* x = *static_cast<const float**>(a[0]);
  const float* w = *static_cast<const float**>(a[1]);
  float* y = *static_cast<float**>(a[2]);
  const int rows = *static_cast<int*>(a[3]), ldx = *static_cast<int*>(a[4]), ldw = *static_cast<int*>(a[5]);
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < g_n; ++n) {
      float sum = 0;
      for (int k = 0; k < g_k; ++k) sum += x[m * ldx + k] * w[n * ldw + k];
      y[m * g_n + n] = sum * g_times;
    }
  return 0;
}
}  // namespace
