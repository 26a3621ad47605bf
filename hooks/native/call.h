// One call: from tensors to a problem, from the problem to its cell, through its route or stock torch.
#pragma once
#include <ATen/Context.h>

#include <time.h>

#include <algorithm>
#include <optional>

#include "blame.h"
#include "warmed_up.h"
#include "context.h"
#include "live_check.h"
#include "probation.h"

namespace gemmtuned {

// BLAS letters of configs/problem.py: 0 = n, 1 = t, 2 = s, for a row-major, column-major or otherwise strided matrix.
inline int side(const Tensor& t, bool prefer_t) {
  const int64_t d = t.dim();
  const bool n = t.stride(d - 1) == 1 || t.size(d - 1) == 1, c = t.stride(d - 2) == 1 || t.size(d - 2) == 1;
  // A vector is row-major and column-major: as the [K, N] operand it counts as a transposed weight, as X as row-major.
  if (prefer_t && c && (!n || t.size(d - 1) == 1)) return 1;
  if (n) return 0;
  return c ? 1 : 2;
}

// A subclass's wrapper around tensors: it has no data, so torch refuses it, and Python code of the program tells its sizes.
inline bool is_wrapper(const Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  return C10_UNLIKELY(impl.is_python_dispatch()) && !(impl.unsafe_storage() && impl.unsafe_storage().data());
}

// False for a GEMM that we do not count: the stock operator then runs and gives its own error or empty result.
template <class Device>
bool describe(Problem& p, Family family, const Tensor& a, const Tensor& b, at::ScalarType out) {
  const int64_t dims = family == BATCHED || family == BATCHED_ADD ? 3 : 2;
  if (is_wrapper(a) || is_wrapper(b)) return false;
  if (a.dim() != dims || b.dim() != dims || a.size(dims - 1) != b.size(dims - 2)) return false;
  if (dims == 3 && a.size(0) != b.size(0)) return false;
  if (a.device() != b.device()) return false;
  const int64_t batch = dims == 3 ? a.size(0) : 1, m = a.size(dims - 2), k = a.size(dims - 1), n = b.size(dims - 1);
  if (m == 0 || n == 0 || k == 0 || batch == 0) return false;
  if (std::max({batch, m, k, n}) > INT32_MAX) return false;  // the key's sizes are that wide
  p = Problem{};
  p.batch = static_cast<uint32_t>(batch), p.m = static_cast<uint32_t>(m), p.n = static_cast<uint32_t>(n);
  p.k = static_cast<uint32_t>(k);
  p.family = family;
  if (p.batch == 1 && dims == 3) p.family = family == BATCHED ? DENSE : DENSE_ADD;  // einsum's way of saying mm
  p.dtype = static_cast<uint8_t>(a.scalar_type());
  p.wdtype = static_cast<uint8_t>(b.scalar_type());
  p.out_dtype = static_cast<uint8_t>(out);
  p.layout = static_cast<uint8_t>(side(a, false) * 3 + side(b, true));
  Device::describe(p, a);
  if (at::globalContext().deterministicAlgorithms()) p.flags |= DETERMINISTIC;
  // Such a problem is the same for every M and layout of X; sums of integers are so by themselves
  if (C10_UNLIKELY(invariant()) && family == DENSE && out != at::kInt) {
    p.flags |= BATCH_INVARIANT;
    p.m = kChainM, p.layout = static_cast<uint8_t>(side(b, true));
  }
  return true;
}

struct Depth {
  explicit Depth(ThreadCounters& thread) : thread(thread) { ++thread.depth; }
  ~Depth() { --thread.depth; }
  ThreadCounters& thread;
};

// Called in a catch block of a call with this problem: switches the route off if it is to blame for the error (blame.h).
template <class Device>
void judge(Route& route, const Problem& p) {
  const auto bytes = [&](uint8_t dtype, int64_t rows, int64_t columns) {
    return static_cast<size_t>(p.batch) * static_cast<size_t>(rows) * static_cast<size_t>(columns) *
           c10::elementSize(static_cast<at::ScalarType>(dtype));
  };
  constexpr size_t kRoom = 16 << 20;
  const size_t most =
      Device::on_host
          ? 4 * (bytes(p.dtype, p.m, p.k) + bytes(p.wdtype, p.k, p.n) + bytes(p.out_dtype, p.m, p.n)) + kRoom
          : 0;
  try {
    if (blame(route, most)) g_epoch.fetch_add(1);
  } catch (...) {  // no memory to look at the error: nobody is blamed
  }
}

inline double flops_of(const Problem& p) { return 2.0 * p.batch * p.m * p.n * p.k; }

// Times one call. What was stopped in it (kill -STOP, Ctrl-Z, a debugger, a container that is frozen) has a time of hours:
// of a call of a millisecond or more the thread has then run for little of it, and a shorter one would have computed more
// slowly than any CPU does. Such a call is counted and not timed. How long the thread ran takes a microsecond to ask.
class Timed {
 public:
  explicit Timed(bool is_long) : is_long_(is_long), ran_(is_long ? now(CLOCK_THREAD_CPUTIME_ID) : 0) {}
  void add_to(Cell& cell) const {
    constexpr uint64_t kShort = 250'000'000;
    const uint64_t took = now(CLOCK_MONOTONIC) - began_;
    if (C10_LIKELY(took <= kShort) || took <= kShort + most(cell.key)) cell.add_sample(took);
  }
  static bool is_long(const Problem& p) { return flops_of(p) >= 1e8; }

 private:
  uint64_t most(const Problem& p) const {  // ns
    constexpr double kSlowest = 0.1;       // floating point operations a ns
    return is_long_ ? 4 * (now(CLOCK_THREAD_CPUTIME_ID) - ran_) : static_cast<uint64_t>(flops_of(p) / kSlowest);
  }
  static uint64_t now(clockid_t clock) {  // ns
    timespec t{};
    clock_gettime(clock, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
  }
  const bool is_long_;
  const uint64_t ran_, began_ = now(CLOCK_MONOTONIC);
};

// The same for a call that stock torch has served meanwhile: operands that it refuses, too, are no route's fault. On a GPU
// that is no evidence, for a kernel that fails may leave a fault that all later calls meet.
template <class Device>
void judge(Route& route, const Problem& p, const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (...) {
    judge<Device>(route, p);
  }
}

// The result of a route as stock would have returned it; throws when it is something else.
inline Tensor as_stock(const Tensor& y, const Problem& p, const Tensor& a) {
  const int64_t m = a.size(-2), n = p.n;
  TORCH_CHECK(y.scalar_type() == static_cast<at::ScalarType>(p.out_dtype) && y.is_contiguous() && y.dim() == a.dim() &&
                  y.size(-1) == n && y.size(-2) == m,
              "result is ", y.scalar_type(), " ", y.sizes(), ", not what torch returns");
  const int64_t batch = y.dim() == 3 ? y.stride(0) : m * n;
  if (y.stride(-1) == 1 && y.stride(-2) == n && batch == m * n) return y;
  // contiguous leaves the stride of a dimension of size 1 open, stock does not
  if (y.dim() == 3) return y.as_strided(y.sizes(), {m * n, n, 1});
  return y.as_strided(y.sizes(), {n, 1});
}

// Dimension names, which torch dropped in 2.13: kernels and libraries refuse them, torch's own operators keep them.
template <class T>
bool has_names(const T& t) {
  if constexpr (requires { t.has_names(); }) return t.has_names();
  else return false;
}

// Whether the live check finds that `y`, the route's result, differs from stock's; it then switches the route off.
template <class Device>
bool found_wrong(Route& route, const Problem& p, const Slots& slots, const Tensor& y, const Tensor& stock) {
  std::string wrong;
  try {
    const Below below;
    [[maybe_unused]] const typename Device::Relaxed relaxed;
    wrong = live_mismatch(p, slots, y, stock);
  } catch (...) {  // no memory for it: this call is not checked
  }
  if (wrong.empty()) return false;
  route.fail(WRONG, wrong.c_str());
  g_epoch.fetch_add(1);
  return true;
}

// Copies the checked result into `y`, which holds torch's. False if that is impossible: `y` is then left as it is.
inline bool is_copied(const Tensor& y, const Tensor& checked) {
  try {
    const Below below;
    y.copy_(checked);
    return true;
  } catch (...) {  // no memory for it
    return false;
  }
}

// Flags of a call. ROUTABLE: a route can serve it. NO_BATCH: x and w are 2-D, torch's operands have a batch of 1 in front.
// UNCHECKED: stock overwrites or frees operands, so the result cannot be compared with stock's. Above them stands the number
// of the engine's operator that is called; its own kernel, which is stock then, may be faster than a route (routes.h).
enum CallFlags : int { COUNTED_ONLY = 0, ROUTABLE = 1, NO_BATCH = 2, UNCHECKED = 4 };
constexpr int kEngineShift = 8;

// Whether the route takes this call: its operands lie as the launch record's conditions say, alpha and beta are 1 where the
// route scales no sums, no operand has named dimensions, and the device may run it. A call that it does not take runs on
// stock torch, and the route is not blamed.
template <class Device>
bool accepts(const Route& route, const Slots& slots) {
  if (!Device::may_run(route, slots)) return false;
  if (C10_UNLIKELY(!route.scales_sums && (slots.alpha != 1 || slots.beta != 1))) return false;
  for (const Tensor* t : slots.t)
    if (t && has_names(*t)) return false;
  return C10_LIKELY(!route.chain_rows) ? holds(route.conditions, slots) : holds(route.conditions, slots, SLOT_X);
}

// The route's result in memory of its own, as torch would have returned it.
template <class Device>
Tensor run_route(const Route& route, const Problem& p, const Slots& slots, int flags = ROUTABLE) {
  const Below below;
  const Tensor y = as_stock(Device::run(route, p, slots), p, slots.x());
  return C10_UNLIKELY(flags & NO_BATCH) ? y.unsqueeze(0) : y;
}

// The same, copied into the caller's result.
template <class Device>
void run_and_copy(const Route& route, const Problem& p, Slots slots, const Tensor& out, int flags) {
  slots.t[SLOT_Y] = nullptr;
  const Tensor y = run_route<Device>(route, p, slots, flags);
  const Below below;
  out.copy_(y);  // it may overlap an operand
}

// The operands with the caller's result, without the batch of 1 that torch's operands have.
struct WithResult {
  Tensor first;
  Slots slots;
  WithResult(const Slots& operands, const Tensor& out, int flags) : slots(operands) {
    if (flags & NO_BATCH) first = first_of(out);
    slots.t[SLOT_Y] = flags & NO_BATCH ? &first : &out;
  }
};
struct NoResult {};  // of a call that gives its result back

// Runs the call by its route or, without one, by `stock`; then counts it, unless torch raised. `out`: the tensor that stock
// returns, if it is the caller's. A call with a route that ran on stock all the same is counted as a miss.
// `reference`: computes torch's own result for a live check; mostly `stock`, unless that is a route of another problem.
template <class Device, class Stock, class Reference>
auto call(const Problem& key, const Slots& slots, int flags, const Stock& stock, Tensor* out,
          const Reference& reference) -> decltype(stock()) {
  constexpr bool into = std::is_reference_v<decltype(stock())>;
  ThreadCounters* thread = this_thread();
  if (!thread || thread->depth) return stock();
  Cell* cell = g_counters.cell(*thread, key);
  if (C10_UNLIKELY(!cell)) return stock();
  const uint64_t epoch = g_epoch.load(std::memory_order_acquire);
  Found found = cell->found;
  if (C10_UNLIKELY(cell->epoch != epoch)) {
    const bool may = dispatching() && (!invariant() || key.flags & BATCH_INVARIANT);
    cell->found = found = may ? look_up(*thread, key) : Found{};
    cell->epoch = epoch;
    if constexpr (!Device::on_host)
      if (may) found = before_captures(key, found, [&](const Problem& p) { return look_up(*thread, p); });
  }
  Depth inside(*thread);
  beat(thread->beat_line);
  const int engine = flags >> kEngineShift;
  const bool by_engine =
      engine && found.engines.are_as_good(engine);  // its own kernel is the answer, and stock runs that
  bool fits = flags & ROUTABLE;                     // whether a route may serve the call at all
  const auto count = [&](Outcome seen) {
    cell->add(seen);
    if (C10_LIKELY(!(key.flags & GRAPH))) {
      if constexpr (!Device::on_host)
        if (seen != MISS && C10_UNLIKELY(static_cast<bool>(found.route->op)) && !by_engine)
          g_warmed_up.add(*found.route, key);
      return;
    }
    if (!g_captures_graphs.exchange(true, std::memory_order_relaxed)) g_epoch.fetch_add(1);  // for before_captures
    try {
      g_captures.add(Device::capture_id(slots.x()), key, seen, fits ? engine : Captures::NOBODY);
    } catch (...) {  // its replays are not counted; the call has been made
    }
  };
  Outcome outcome = found.outcome;
  Route* route = found.route;
  std::exception_ptr failure;
  [[maybe_unused]] std::conditional_t<into, std::optional<WithResult>, NoResult> with_y;
  if (route && route->code != STOCK && !by_engine) {
    const bool may_replace = !engine || found.engines.lost(engine);
    const bool failed = route->failed.load(std::memory_order_relaxed);
    if (may_replace && !failed) fits = fits && accepts<Device>(*route, slots);
    if constexpr (into) {
      if (may_replace && !failed && fits)
        fits = Device::writes_into(*route, with_y.emplace(slots, *out, flags).slots) || key.flags & BATCH_INVARIANT;
    }
    if (!fits) cell->note_unserved(kUnfit);
    else if (!may_replace) cell->note_unserved(engine);
    if (fits && may_replace && !failed && may_serve_capture(*route, key)) {
      Tensor checked;
      try {
        const OnProbation going_on(*route, Device::on_host);
        if (C10_LIKELY((flags & UNCHECKED) || !live_check_due() || (key.flags & GRAPH))) {
          if constexpr (into) {
            Device::run_into(*route, key, with_y->slots, *out, flags);
            count(outcome);
            return *out;
          } else {
            Tensor y = run_route<Device>(*route, key, slots, flags);
            count(outcome);
            return y;
          }
        }
        checked = run_route<Device>(*route, key, slots, flags);  // what stock writes into may be an operand
      } catch (...) {
        if constexpr (Device::on_host) failure = std::current_exception();
        else judge<Device>(*route, key);
      }
      if (checked.defined()) {
        decltype(auto) y = reference();
        const bool kept = !found_wrong<Device>(*route, key, slots, checked, y) && is_copied(y, checked);
        count(kept ? outcome : MISS);
        return y;
      }
    }
    outcome = MISS;
  }
  if (!Device::timed || outcome != MISS || !cell->due() || failure) {
    decltype(auto) y = stock();
    if (C10_UNLIKELY(static_cast<bool>(failure))) judge<Device>(*route, key, failure);
    count(outcome);
    return y;
  }
  const Timed timed(Timed::is_long(key));
  decltype(auto) y = stock();
  timed.add_to(*cell);
  cell->add(MISS);
  return y;
}

template <class Device, class Stock>
auto call(const Problem& key, const Slots& slots, int flags, const Stock& stock, Tensor* out = nullptr)
    -> decltype(stock()) {
  return call<Device>(key, slots, flags, stock, out, stock);
}

// For a product whose key is known only from its result: `describe` gives the key once stock has returned, or null.
template <class Device, class Stock, class Describe>
void call_then_describe(const Tensor& x, const Stock& stock, const Describe& describe) {
  ThreadCounters* thread = this_thread();
  if (!thread || thread->depth) return stock();
  // The cell is known only after the call. So a counter chooses which calls are timed: it moves in steps of the golden
  // ratio, which fall in with no order in which a model calls its layers.
  thread_local uint64_t steps = 0;
  const bool chosen = Device::timed && (steps += 0x9e3779b97f4a7c15ull) <= UINT64_MAX / (kSampleMask + 1);
  std::optional<Timed> timed;
  if (C10_UNLIKELY(chosen)) timed.emplace(x.numel() >= 1 << 16);  // X of a product of a millisecond, mostly
  {
    Depth inside(*thread);
    stock();
  }
  try {
    const Problem* key = describe();
    Cell* cell = key ? g_counters.cell(*thread, *key) : nullptr;
    if (!cell) return;
    const bool is_first = !cell->calls[MISS].load(std::memory_order_relaxed);  // it may build primitives
    if (C10_UNLIKELY(chosen) && !is_first) timed->add_to(*cell);
    cell->add(MISS);
    if (key->flags & GRAPH) g_captures.add(Device::capture_id(x), *key, MISS);
  } catch (...) {  // the call has been made
  }
}

}  // namespace gemmtuned
