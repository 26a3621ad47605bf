// The structures that Python mirrors (hooks/native/records.py, launches.py), beyond those of the other headers, and how all of them lie.
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
  const Cond* conditions;
  int32_t condition_count, scales_sums;  // scales_sums: of Route, as chain_rows
  int64_t chain_rows;
  uint32_t engines, unused;  // engines: the bits of Engines
};

struct GtFailure {
  int32_t id, how;  // how: a Failing
  char reason[248];
};

// Where the members of every structure that Python mirrors lie, a line each.
inline const char* mirrored_fields() {
  using cuda::Argument;
  using cuda::Axis;
  using cuda::Launch;
  using cuda::LtLaunch;
  static const FieldLayout fields[] = {
      GEMMTUNED_PROBLEM_FIELDS,
      GEMMTUNED_FIELD(Record, key),
      GEMMTUNED_FIELD(Record, calls),
      GEMMTUNED_FIELD(Record, sampled_calls),
      GEMMTUNED_FIELD(Record, sampled_ns),
      GEMMTUNED_FIELD(Record, unserved),
      GEMMTUNED_FIELD(Cond, slot),
      GEMMTUNED_FIELD(Cond, what),
      GEMMTUNED_FIELD(Cond, dim),
      GEMMTUNED_FIELD(Cond, op),
      GEMMTUNED_FIELD(Cond, of_slot),
      GEMMTUNED_FIELD(Cond, of_dim),
      GEMMTUNED_FIELD(Cond, spare),
      GEMMTUNED_FIELD(Cond, value),
      GEMMTUNED_FIELD(Argument, kind),
      GEMMTUNED_FIELD(Argument, slot),
      GEMMTUNED_FIELD(Argument, what),
      GEMMTUNED_FIELD(Argument, dim),
      GEMMTUNED_FIELD(Axis, block),
      GEMMTUNED_FIELD(Axis, slot),
      GEMMTUNED_FIELD(Axis, dim),
      GEMMTUNED_FIELD(Axis, spare),
      GEMMTUNED_FIELD(Launch, function),
      GEMMTUNED_FIELD(Launch, partials_offset),
      GEMMTUNED_FIELD(Launch, workspace_bytes),
      GEMMTUNED_FIELD(Launch, threads),
      GEMMTUNED_FIELD(Launch, shared),
      GEMMTUNED_FIELD(Launch, cluster),
      GEMMTUNED_FIELD(Launch, count),
      GEMMTUNED_FIELD(Launch, grid),
      GEMMTUNED_FIELD(Launch, arguments),
      GEMMTUNED_FIELD(LtLaunch, algo),
      GEMMTUNED_FIELD(LtLaunch, workspace_bytes),
      GEMMTUNED_FIELD(LtLaunch, compute_type),
      GEMMTUNED_FIELD(LtLaunch, type_x),
      GEMMTUNED_FIELD(LtLaunch, type_w),
      GEMMTUNED_FIELD(LtLaunch, type_y),
      GEMMTUNED_FIELD(LtLaunch, type_bias),
      GEMMTUNED_FIELD(LtLaunch, scale_x),
      GEMMTUNED_FIELD(LtLaunch, scale_w),
      GEMMTUNED_FIELD(LtLaunch, x_turned),
      GEMMTUNED_FIELD(LtLaunch, w_turned),
      GEMMTUNED_FIELD(LtLaunch, fast),
      GEMMTUNED_FIELD(OperatorLaunch, integer),
      GEMMTUNED_FIELD(OperatorLaunch, integers),
      GEMMTUNED_FIELD(OperatorLaunch, real),
      GEMMTUNED_FIELD(OperatorLaunch, kind),
      GEMMTUNED_FIELD(OperatorLaunch, count),
      GEMMTUNED_FIELD(OperatorLaunch, text),
      GEMMTUNED_FIELD(OperatorLaunch, name),
      GEMMTUNED_FIELD(OperatorLaunch, overload),
      GEMMTUNED_FIELD(OperatorLaunch, schema),
      GEMMTUNED_FIELD(RowBlocks, kernel),
      GEMMTUNED_FIELD(RowBlocks, block),
      GEMMTUNED_FIELD(RowBlocks, grain),
      GEMMTUNED_FIELD(GtRow, key),
      GEMMTUNED_FIELD(GtRow, id),
      GEMMTUNED_FIELD(GtRow, code),
      GEMMTUNED_FIELD(GtRow, launch),
      GEMMTUNED_FIELD(GtRow, conditions),
      GEMMTUNED_FIELD(GtRow, condition_count),
      GEMMTUNED_FIELD(GtRow, scales_sums),
      GEMMTUNED_FIELD(GtRow, chain_rows),
      GEMMTUNED_FIELD(GtRow, engines),
      GEMMTUNED_FIELD(GtRow, unused),
      GEMMTUNED_FIELD(GtFailure, id),
      GEMMTUNED_FIELD(GtFailure, how),
      GEMMTUNED_FIELD(GtFailure, reason),
  };
  static const std::string text = layout_text(fields);
  return text.c_str();
}

}  // namespace gemmtuned
