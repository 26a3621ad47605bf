// The key of one GEMM call, packed. Mirrors configs/problem.py; hooks/native/__init__.py mirrors this layout.
#pragma once
#include <cstdint>
#include <cstring>

namespace gemmtuned {

// Codes are indices into FAMILIES, LAYOUTS, WEIGHT_STATES, MATH_MODES, SCALES of configs/problem.py.
enum Family : uint8_t { DENSE, BATCHED, DENSE_ADD, BATCHED_ADD, SCALED, GROUPED };
enum Math : uint8_t { IEEE, TF32, BF16_INSIDE, REDUCED };
enum Covers : uint8_t { EXACT, FINE, COARSE };
enum Scale : uint8_t { UNSCALED, PER_TENSOR, PER_ROW, BLOCK_32, PER_BLOCK, BLOCK_128 };
enum Flag : uint8_t { BIAS = 1, DETERMINISTIC = 2, GRAPH = 4, PACKED = 8 };

struct Problem {
  int64_t m, n, k;
  int32_t batch;
  uint16_t threads;
  uint8_t family, dtype, wdtype, out_dtype, layout, math, flags, covers;
  uint8_t device_type : 2, scale : 6, device_index;  // device_type: 0 CPU, 1 CUDA

  bool operator==(const Problem& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }

  uint64_t hash() const {  // five words, multiplied and folded; every bit of the key reaches every bit of the result
    uint64_t word[5], h = 0x9e3779b97f4a7c15ull;
    std::memcpy(word, this, sizeof word);
    for (uint64_t w : word) {
      const unsigned __int128 p = static_cast<unsigned __int128>(h ^ w) * 0xd6e8feb86659fd93ull;
      h = static_cast<uint64_t>(p) ^ static_cast<uint64_t>(p >> 64);
    }
    return h;
  }
};
static_assert(sizeof(Problem) == 40, "the key has no hidden padding");

// AITER's padded M; the Python twin and its source are in configs/padding.py, a test compares the two.
inline int64_t padded_m(int64_t m, int64_t n, Covers covers) {
  if (covers == EXACT) return m;
  if (covers == FINE) {
    const int64_t step = m <= 256 ? 16 : m <= 1024 ? 32 : m <= 4096 ? 64 : 128;
    return (m + step - 1) / step * step;
  }
  if (m > 8192 && n > 4096) return 8192;
  int64_t p = 1;
  while (p < m) p <<= 1;
  return p;
}

}  // namespace gemmtuned
