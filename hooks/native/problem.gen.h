// Written by `python -m gemmtuned.configs.key`; the table is there. Do not edit.
#pragma once
#include <cstdint>

namespace gemmtuned {

enum Family : uint8_t { DENSE, BATCHED, DENSE_ADD, BATCHED_ADD, SCALED, GROUPED, MOE, WEIGHT_ONLY };
enum Math : uint8_t { IEEE, TF32, BF16_INSIDE, REDUCED };
enum Covers : uint8_t { EXACT, FINE, COARSE };
enum Scale : uint8_t { UNSCALED, PER_TENSOR, PER_ROW, BY_1X32, BY_1X128, BY_128X128, BY_1X16, BY_1X16_TWICE, BY_1X64, PER_TENSOR_WITH_ZERO, PER_ROW_WITH_ZERO };
enum ScaleLayout : uint8_t { SCALES_BY_ROW, SCALES_BY_COL, SCALES_BY_ROW_PADDED, SCALES_BY_COL_PADDED, SCALES_SWIZZLED, SCALES_OTHERWISE };
constexpr uint32_t kChainM = 256;  // m of a batch-invariant problem, whatever was called
constexpr uint8_t kOpaque = 4;  // packing
enum Flag : uint8_t { BIAS = 1, DETERMINISTIC = 2, GRAPH = 4, PACKED = 8, SHUFFLED = 16, BATCH_INVARIANT = 32 };

struct ProblemFields {
  uint32_t m;
  uint32_t n;
  uint32_t k;
  uint32_t batch;
  uint32_t inter;
  uint16_t experts;
  uint16_t threads;
  uint8_t family;
  uint8_t dtype;
  uint8_t wdtype;
  uint8_t out_dtype;
  uint8_t layout;
  uint8_t math;
  uint8_t flags;
  uint8_t covers;
  uint8_t device_type;
  uint8_t device_index;
  uint8_t scale;
  uint8_t wscale;
  uint8_t scale_dtype;
  uint8_t wscale_dtype;
  uint8_t scale_layout;
  uint8_t wscale_layout;
  uint8_t topk;
  uint8_t act;
  uint8_t packing;
  uint8_t spare[5];
};
static_assert(sizeof(ProblemFields) == 48, "the key has no hidden padding");

#define GEMMTUNED_PROBLEM_FIELDS GEMMTUNED_FIELD(ProblemFields, m), GEMMTUNED_FIELD(ProblemFields, n), GEMMTUNED_FIELD(ProblemFields, k), GEMMTUNED_FIELD(ProblemFields, batch), GEMMTUNED_FIELD(ProblemFields, inter), GEMMTUNED_FIELD(ProblemFields, experts), GEMMTUNED_FIELD(ProblemFields, threads), GEMMTUNED_FIELD(ProblemFields, family), GEMMTUNED_FIELD(ProblemFields, dtype), GEMMTUNED_FIELD(ProblemFields, wdtype), GEMMTUNED_FIELD(ProblemFields, out_dtype), GEMMTUNED_FIELD(ProblemFields, layout), GEMMTUNED_FIELD(ProblemFields, math), GEMMTUNED_FIELD(ProblemFields, flags), GEMMTUNED_FIELD(ProblemFields, covers), GEMMTUNED_FIELD(ProblemFields, device_type), GEMMTUNED_FIELD(ProblemFields, device_index), GEMMTUNED_FIELD(ProblemFields, scale), GEMMTUNED_FIELD(ProblemFields, wscale), GEMMTUNED_FIELD(ProblemFields, scale_dtype), GEMMTUNED_FIELD(ProblemFields, wscale_dtype), GEMMTUNED_FIELD(ProblemFields, scale_layout), GEMMTUNED_FIELD(ProblemFields, wscale_layout), GEMMTUNED_FIELD(ProblemFields, topk), GEMMTUNED_FIELD(ProblemFields, act), GEMMTUNED_FIELD(ProblemFields, packing), GEMMTUNED_FIELD(ProblemFields, spare)

}  // namespace gemmtuned
