// The key of one GEMM call, packed: its fields and their codes are those of configs/key.py.
#pragma once
#include <cstdint>
#include <cstring>

#include "problem.gen.h"

namespace gemmtuned {

struct Problem : ProblemFields {
  bool operator==(const Problem& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }

  uint64_t hash() const {  // word by word, multiplied and folded; every bit of the key reaches every bit of the result
    uint64_t word[sizeof(ProblemFields) / 8], h = 0x9e3779b97f4a7c15ull;
    std::memcpy(word, this, sizeof word);
    for (uint64_t w : word) {
      const unsigned __int128 p = static_cast<unsigned __int128>(h ^ w) * 0xd6e8feb86659fd93ull;
      h = static_cast<uint64_t>(p) ^ static_cast<uint64_t>(p >> 64);
    }
    return h;
  }
};
static_assert(sizeof(Problem) == sizeof(ProblemFields) && sizeof(Problem) <= 48, "a key is nothing but its fields");

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
