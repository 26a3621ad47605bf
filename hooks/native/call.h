// One call: from tensors to a problem, from the problem to its cell, through its route or stock torch.
#pragma once
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>

#include "context.h"

namespace gemmtuned {

// BLAS letters of configs/problem.py: 0 = n, 1 = t, 2 = s, for a row-major, column-major or otherwise strided matrix.
inline int side(const Tensor& t, bool prefer_t) {
  const int64_t d = t.dim();
  const bool n = t.stride(d - 1) == 1 || t.size(d - 1) == 1, c = t.stride(d - 2) == 1 || t.size(d - 2) == 1;
  // a vector is both: the [K, N] operand is then a transposed weight, X a plain row
  if (prefer_t && c && (!n || t.size(d - 1) == 1)) return 1;
  if (n) return 0;
  return c ? 1 : 2;
}

// False when this is no GEMM we count: the stock operator then runs and gives its own error or empty result.
template <class Device>
bool describe(Problem& p, Family family, const Tensor& a, const Tensor& b, at::ScalarType out) {
  const int64_t dims = family == BATCHED || family == BATCHED_ADD ? 3 : 2;
  if (a.dim() != dims || b.dim() != dims || a.size(dims - 1) != b.size(dims - 2)) return false;
  if (dims == 3 && a.size(0) != b.size(0)) return false;
  if (a.device() != b.device()) return false;
  p = Problem{};
  p.batch = dims == 3 ? static_cast<int32_t>(a.size(0)) : 1;
  p.m = a.size(dims - 2), p.k = a.size(dims - 1), p.n = b.size(dims - 1);
  if (p.m == 0 || p.n == 0 || p.k == 0 || p.batch == 0) return false;
  p.family = family;
  if (p.batch == 1 && dims == 3) p.family = family == BATCHED ? DENSE : DENSE_ADD;  // einsum's way of saying mm
  p.dtype = static_cast<uint8_t>(a.scalar_type());
  p.wdtype = static_cast<uint8_t>(b.scalar_type());
  p.out_dtype = static_cast<uint8_t>(out);
  p.layout = static_cast<uint8_t>(side(a, false) * 3 + side(b, true));
  Device::describe(p, a);
  if (at::globalContext().deterministicAlgorithms()) p.flags |= DETERMINISTIC;
  return true;
}

struct Depth {
  explicit Depth(ThreadCounters& thread) : thread(thread) { ++thread.depth; }
  ~Depth() { --thread.depth; }
  ThreadCounters& thread;
};

// In a catch block: switches the route off. Every thread looks up again: what failed is a miss from now on.
inline void fail(Route& route) {
  try {
    throw;
  } catch (const c10::Error& err) {
    route.fail(err.what_without_backtrace());
  } catch (const std::exception& err) {
    route.fail(err.what());
  } catch (...) {
    route.fail("unknown exception");
  }
  g_epoch.fetch_add(1);
}

inline uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// The result of a route as stock would have returned it; throws when it is something else.
inline Tensor as_stock(const Tensor& y, const Problem& p, const Tensor& a) {
  TORCH_CHECK(y.scalar_type() == static_cast<at::ScalarType>(p.out_dtype) && y.is_contiguous() && y.dim() == a.dim() &&
                  y.size(-1) == p.n && y.size(-2) == p.m,
              "result is ", y.scalar_type(), " ", y.sizes(), ", not what torch returns");
  const int64_t batch = y.dim() == 3 ? y.stride(0) : p.m * p.n;
  if (y.stride(-1) == 1 && y.stride(-2) == p.n && batch == p.m * p.n) return y;
  // contiguous leaves the stride of a dimension of size 1 open, stock does not
  at::AutoDispatchBelowADInplaceOrView below;
  if (y.dim() == 3) return y.as_strided(y.sizes(), {p.m * p.n, p.n, 1});
  return y.as_strided(y.sizes(), {p.n, 1});
}

// Runs the call's route through `routed` or, without one, `stock`; then counts the call, unless torch raised.
// `free`: the call can be routed at all.  A call that stock served though it had a route is counted as a miss.
template <class Device, class Stock, class Routed>
auto call(const Problem& key, const Tensor& a, const Tensor& b, const Tensor* bias, bool free, const Stock& stock,
          const Routed& routed) -> decltype(stock()) {
  ThreadCounters* thread = this_thread();
  if (!thread || thread->depth) return stock();
  Cell* cell = g_counters.cell(*thread, key);
  if (C10_UNLIKELY(!cell)) return stock();
  const uint64_t epoch = g_epoch.load(std::memory_order_acquire);
  if (C10_UNLIKELY(cell->epoch != epoch)) {
    cell->found = dispatching() ? look_up(*thread, key) : Found{};
    cell->epoch = epoch;
  }
  Depth inside(*thread);
  const auto count = [&](Outcome seen) {
    cell->add(seen);
    if (C10_LIKELY(!(key.flags & GRAPH))) return;
    try {
      g_captures.add(Device::capture_id(a), key, seen);
    } catch (...) {  // its replays are not counted; the call has been made
    }
  };
  Outcome outcome = cell->found.outcome;
  Route* route = cell->found.route;
  if (route && route->code != STOCK) {
    if (free && !route->failed.load(std::memory_order_relaxed) && Device::accepts(*route, a, b, bias)) {
      try {
        decltype(auto) y = routed(*route);
        count(outcome);
        return y;
      } catch (const c10::OutOfMemoryError&) {  // the device's shortage and not the route's fault: torch tries
      } catch (const c10::NotImplementedError&) {  // a library that does not take these strides
      } catch (...) {
        fail(*route);
      }
    }
    outcome = MISS;
  }
  if (!Device::timed || outcome != MISS || !cell->due()) {
    decltype(auto) y = stock();
    count(outcome);
    return y;
  }
  const uint64_t start = now_ns();
  decltype(auto) y = stock();
  cell->add_sample(now_ns() - start);
  cell->add(MISS);
  return y;
}

}  // namespace gemmtuned
