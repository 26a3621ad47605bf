// The structures that Python mirrors (hooks/native/records.py), beyond those of the other headers, and how all of them lie.
#pragma once
#include "cublaslt.h"
#include "cuda_launch.h"
#include "layout.h"
#include "routes.h"

namespace gemmtuned {

// One row of a table; launch: a cuda::Launch for LAUNCH, a cuda::LtLaunch for CUBLASLT, an OperatorLaunch for OPERATOR, a RowBlocks for ROWS
struct GtRow {
  Problem key;
  int32_t id, code;
  const void* launch;
};

struct GtFailure {
  int32_t id, how;  // how: a Failing
  char reason[248];
};

// Where the members of every structure that Python mirrors lie, a line each.
inline const char* mirrored_fields() {
  using cuda::Launch;
  using cuda::LtLaunch;
  static const FieldLayout fields[] = {
      GEMMTUNED_PROBLEM_FIELDS,
      GEMMTUNED_FIELD(Record, key), GEMMTUNED_FIELD(Record, calls), GEMMTUNED_FIELD(Record, sampled_calls),
      GEMMTUNED_FIELD(Record, sampled_ns),
      GEMMTUNED_FIELD(Launch, function), GEMMTUNED_FIELD(Launch, max_m), GEMMTUNED_FIELD(Launch, partials_offset),
      GEMMTUNED_FIELD(Launch, workspace_bytes), GEMMTUNED_FIELD(Launch, pointer_align), GEMMTUNED_FIELD(Launch, device),
      GEMMTUNED_FIELD(Launch, warps), GEMMTUNED_FIELD(Launch, warp_size), GEMMTUNED_FIELD(Launch, shared),
      GEMMTUNED_FIELD(Launch, ld_multiple), GEMMTUNED_FIELD(Launch, n), GEMMTUNED_FIELD(Launch, cluster),
      GEMMTUNED_FIELD(Launch, block), GEMMTUNED_FIELD(Launch, over), GEMMTUNED_FIELD(Launch, argument_count),
      GEMMTUNED_FIELD(Launch, null_pointers), GEMMTUNED_FIELD(Launch, arguments),
      GEMMTUNED_FIELD(LtLaunch, algo), GEMMTUNED_FIELD(LtLaunch, max_m), GEMMTUNED_FIELD(LtLaunch, workspace_bytes),
      GEMMTUNED_FIELD(LtLaunch, pointer_align), GEMMTUNED_FIELD(LtLaunch, device), GEMMTUNED_FIELD(LtLaunch, ld_multiple),
      GEMMTUNED_FIELD(LtLaunch, data_type), GEMMTUNED_FIELD(LtLaunch, compute_type), GEMMTUNED_FIELD(LtLaunch, x_turned),
      GEMMTUNED_FIELD(LtLaunch, w_turned),
      GEMMTUNED_FIELD(OperatorLaunch, max_m), GEMMTUNED_FIELD(OperatorLaunch, integer), GEMMTUNED_FIELD(OperatorLaunch, real),
      GEMMTUNED_FIELD(OperatorLaunch, kind), GEMMTUNED_FIELD(OperatorLaunch, count),
      GEMMTUNED_FIELD(OperatorLaunch, contiguous), GEMMTUNED_FIELD(OperatorLaunch, name),
      GEMMTUNED_FIELD(OperatorLaunch, overload), GEMMTUNED_FIELD(OperatorLaunch, schema),
      GEMMTUNED_FIELD(RowBlocks, kernel), GEMMTUNED_FIELD(RowBlocks, block), GEMMTUNED_FIELD(RowBlocks, grain),
      GEMMTUNED_FIELD(GtRow, key), GEMMTUNED_FIELD(GtRow, id), GEMMTUNED_FIELD(GtRow, code), GEMMTUNED_FIELD(GtRow, launch),
      GEMMTUNED_FIELD(GtFailure, id), GEMMTUNED_FIELD(GtFailure, how), GEMMTUNED_FIELD(GtFailure, reason),
  };
  static const std::string text = layout_text(fields);
  return text.c_str();
}

}  // namespace gemmtuned
