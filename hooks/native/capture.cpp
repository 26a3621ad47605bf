// The native hook: counts and routes GEMMs under aten's leaf operators.
//
//   torch.mm -> dispatcher -> mm() here -> look up -> a tuned route, or at::cpu::mm as without us
//
// It sits at the backend key, below autograd, autocast, vmap and torch.compile, so it sees what really runs. The call
// path takes no lock, allocates only for a problem new to its thread, and never throws anything of its own: a route
// that fails is switched off and the call is served by stock torch. Loaded with ctypes (no Python headers needed).
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mv.h>
#include <pthread.h>
#include <torch/library.h>
#include <torch/version.h>

#include <chrono>

#include "counters.h"
#include "problem.h"
#include "routes.h"

namespace gemmtuned {
namespace {

using at::Scalar;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- state of the process -------------------------------------------------------------------------------------

enum Mode : int { OFF = 0, CAPTURE = 1, DISPATCH = 2 };
std::atomic<int> g_mode{OFF};
std::atomic<const RouteTable*> g_table{new RouteTable(0)};
std::atomic<uint64_t> g_epoch{1};  // raised after every swap of g_table or change of mode
Counters& g_counters = *new Counters;  // never destroyed: threads outlive static destructors

struct ThreadSlot {
  ThreadCounters* counters = nullptr;
  ~ThreadSlot() {
    if (counters) g_counters.leave(counters);
    counters = nullptr;
  }
};
thread_local ThreadSlot t_slot;

ThreadCounters* this_thread() {  // null when there is no memory for it
  if (C10_UNLIKELY(!t_slot.counters)) t_slot.counters = g_counters.join();
  return t_slot.counters;
}

// Looks the problem up in the newest table. The hazard pointer keeps the loader from freeing it under our feet.
Found look_up(ThreadCounters& thread, const Problem& key) {
  const RouteTable* table;
  do {
    table = g_table.load(std::memory_order_seq_cst);
    thread.reading.store(table, std::memory_order_seq_cst);
  } while (table != g_table.load(std::memory_order_seq_cst));
  const Found found = table->find(key);
  thread.reading.store(nullptr, std::memory_order_release);
  return found;
}

bool off() { return g_mode.load(std::memory_order_relaxed) == OFF; }
bool dispatching() { return g_mode.load(std::memory_order_relaxed) & DISPATCH; }

// ---- from tensors to a problem --------------------------------------------------------------------------------

// BLAS letters of configs/problem.py: 0 = n, 1 = t, 2 = s, for a row-major, column-major or otherwise strided matrix.
inline int side(const Tensor& t, bool prefer_t) {
  const int64_t d = t.dim();
  const bool n = t.stride(d - 1) == 1 || t.size(d - 1) == 1, c = t.stride(d - 2) == 1 || t.size(d - 2) == 1;
  // a vector is both: the [K, N] operand is then a transposed weight, X a plain row
  if (prefer_t && c && (!n || t.size(d - 1) == 1)) return 1;
  if (n) return 0;
  return c ? 1 : 2;
}

uint8_t math_mode(at::ScalarType dtype) {
  const auto& context = at::globalContext();
  if (dtype == at::kFloat) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
    switch (context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL)) {
      case at::Float32Precision::TF32: return TF32;
      case at::Float32Precision::BF16: return BF16_INSIDE;
      default: return IEEE;
    }
#else
    const auto precision = context.float32Precision("mkldnn", "matmul");
    return precision == "tf32" ? TF32 : precision == "bf16" ? BF16_INSIDE : IEEE;
#endif
  }
  return dtype == at::kHalf && context.allowFP16ReductionCPU() ? REDUCED : IEEE;
}

// False when this is no GEMM we count: the stock operator then runs and gives its own error or empty result.
bool describe(Problem& p, Family family, const Tensor& a, const Tensor& b, at::ScalarType out) {
  const int64_t dims = family == BATCHED || family == BATCHED_ADD ? 3 : 2;
  if (a.dim() != dims || b.dim() != dims || a.size(dims - 1) != b.size(dims - 2)) return false;
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
  p.math = math_mode(a.scalar_type());
  p.threads = static_cast<uint16_t>(at::get_num_threads());
  if (at::globalContext().deterministicAlgorithms()) p.flags |= DETERMINISTIC;
  return true;
}

// ---- routes -----------------------------------------------------------------------------------------------------

// Codes of kernels/backends; hooks/dispatch.py holds the same list.
enum Code : int32_t { STOCK = 0, SWAP = 1, MV = 2, ONEDNN = 3, ONEDNN_PACKED = 4 };

Tensor onednn_linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  using Sig = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                     c10::List<std::optional<Scalar>>, std::optional<std::string_view>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Sig>();
  return op.call(x, w, bias, "none", c10::List<std::optional<Scalar>>(), "");
}

// Strides are not part of the problem: a route declines, without blame, operands laid out as it cannot take them.
bool accepts(int32_t code, const Tensor& a, const Tensor& b, const Tensor* bias) {
  switch (code) {
    case ONEDNN:
    case ONEDNN_PACKED:
      return at::globalContext().userEnabledMkldnn() && a.is_contiguous() && b.stride(-2) == 1 &&
             b.stride(-1) == b.size(-2) && (!bias || bias->is_contiguous());
    case MV:
      return a.dim() == 2 && a.size(0) == 1;
    default:
      return true;
  }
}

// y = a @ b (+ bias) by the route's implementation; a [M, K], b [K, N] or both with a batch in front.
Tensor run_route(int32_t code, const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor& packed) {
  at::AutoDispatchBelowADInplaceOrView below;  // as inside any backend kernel: no autograd for what we call
  switch (code) {
    case SWAP: {
      const Tensor bt = b.transpose(-2, -1), at_ = a.transpose(-2, -1);
      if (a.dim() == 3) return at::cpu::bmm(bt, at_).transpose(-2, -1).contiguous();
      const Tensor yt = bias ? at::cpu::addmm(bias->unsqueeze(1), bt, at_) : at::cpu::mm(bt, at_);
      return yt.t().contiguous();
    }
    case MV: {
      const Tensor x = a.select(0, 0), w = b.t();
      return (bias ? at::addmv(*bias, w, x) : at::mv(w, x)).unsqueeze(0);
    }
    case ONEDNN:
      return onednn_linear(a, b.t(), bias);
    case ONEDNN_PACKED:
      return onednn_linear(a, packed, bias);
  }
  TORCH_CHECK(false, "route code ", code, " is not known to this build");
}

// ---- one call ---------------------------------------------------------------------------------------------------

struct Depth {
  explicit Depth(ThreadCounters& thread) : thread(thread) { ++thread.depth; }
  ~Depth() { --thread.depth; }
  ThreadCounters& thread;
};

// In a catch block: switches the route off. Every thread looks up again: what failed is a miss from now on.
void fail(Route& route) {
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

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// The result of a route as stock would have returned it; throws when it is something else.
Tensor as_stock(const Tensor& y, const Problem& p, const Tensor& a) {
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
template <class Stock, class Routed>
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
  Outcome outcome = cell->found.outcome;
  Route* route = cell->found.route;
  if (route && route->code != STOCK) {
    if (free && !route->failed.load(std::memory_order_relaxed) && accepts(route->code, a, b, bias)) {
      try {
        decltype(auto) y = routed(*route);
        cell->add(outcome);
        return y;
      } catch (...) {
        fail(*route);
      }
    }
    outcome = MISS;
  }
  if (outcome != MISS || !cell->due()) {
    decltype(auto) y = stock();
    cell->add(outcome);
    return y;
  }
  const uint64_t start = now_ns();
  decltype(auto) y = stock();
  cell->add_sample(now_ns() - start);
  cell->add(MISS);
  return y;
}

Tensor checked(const Route& route, const Problem& p, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
               const Tensor& packed = {}) {
  return as_stock(run_route(route.code, a, b, bias, packed), p, a);
}

Tensor& checked_out(const Route& route, const Problem& p, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                    Tensor& out) {
  const Tensor y = checked(route, p, a, b, bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return out.copy_(y);  // through a fresh tensor: `out` may overlap an operand
}

// Whether copying the product into `out` is all there is to do: it need not be resized, and torch will not refuse it.
bool fits(const Tensor& out, const Problem& p, const Tensor& a) {
  return out.dim() == a.dim() && out.size(-1) == p.n && out.size(-2) == p.m &&
         (a.dim() == 2 || out.size(0) == a.size(0)) && out.scalar_type() == static_cast<at::ScalarType>(p.out_dtype) &&
         at::has_internal_overlap(out) != at::MemOverlap::Yes;
}

bool is_one(const Scalar& s) { return !s.isComplex() && s.toDouble() == 1.0; }

// A bias that is added to every row; anything else makes the product an "add" family.
bool is_bias(const Tensor& c, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return c.dim() == 1 && c.scalar_type() == b.scalar_type() && b.dim() == 2 && c.size(0) == b.size(1) && is_one(beta) &&
         is_one(alpha);
}

// ---- the operators on CPU -----------------------------------------------------------------------------------------

Tensor mm(const Tensor& a, const Tensor& b) {
  Problem p;
  if (off() || !describe(p, DENSE, a, b, a.scalar_type())) return at::cpu::mm(a, b);
  return call(
      p, a, b, nullptr, true, [&] { return at::cpu::mm(a, b); },
      [&](Route& r) { return checked(r, p, a, b, std::nullopt); });
}

Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  Problem p;
  if (off() || !describe(p, DENSE, a, b, a.scalar_type())) return at::cpu::mm_out(out, a, b);
  return call(
      p, a, b, nullptr, fits(out, p, a), [&]() -> Tensor& { return at::cpu::mm_out(out, a, b); },
      [&](Route& r) -> Tensor& { return checked_out(r, p, a, b, std::nullopt, out); });
}

bool describe_addmm(Problem& p, const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                    const Scalar& alpha) {
  const bool bias = is_bias(c, b, beta, alpha);
  if (!describe(p, bias ? DENSE : DENSE_ADD, a, b, c.scalar_type())) return false;
  if (bias) p.flags |= BIAS;
  return true;
}

Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  Problem p;
  if (off() || !describe_addmm(p, c, a, b, beta, alpha)) return at::cpu::addmm(c, a, b, beta, alpha);
  return call(
      p, a, b, &c, p.family == DENSE, [&] { return at::cpu::addmm(c, a, b, beta, alpha); },
      [&](Route& r) { return checked(r, p, a, b, c); });
}

Tensor& addmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                  Tensor& out) {
  Problem p;
  if (off() || !describe_addmm(p, c, a, b, beta, alpha)) return at::cpu::addmm_out(out, c, a, b, beta, alpha);
  return call(
      p, a, b, &c, p.family == DENSE && fits(out, p, a),
      [&]() -> Tensor& { return at::cpu::addmm_out(out, c, a, b, beta, alpha); },
      [&](Route& r) -> Tensor& { return checked_out(r, p, a, b, c, out); });
}

// The families with a full C are counted and served by torch: no route is taken up for them.
template <class Stock>
auto count(Family family, const Tensor& c, const Tensor& a, const Tensor& b, const Stock& stock) -> decltype(stock()) {
  Problem p;
  if (off() || !describe(p, family, a, b, c.scalar_type())) return stock();
  return call(p, a, b, nullptr, false, stock, [&](Route&) -> decltype(stock()) { return stock(); });
}

Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return count(DENSE_ADD, c, a, b, [&]() -> Tensor& { return at::cpu::addmm_(c, a, b, beta, alpha); });
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  Problem p;
  if (off() || !describe(p, BATCHED, a, b, a.scalar_type())) return at::cpu::bmm(a, b);
  return call(
      p, a, b, nullptr, true, [&] { return at::cpu::bmm(a, b); },
      [&](Route& r) {
        if (p.family == BATCHED) return checked(r, p, a, b, std::nullopt);
        // batch 1: the solution is a dense one
        return checked(r, p, a.squeeze(0), b.squeeze(0), std::nullopt).unsqueeze(0);
      });
}

Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  Problem p;
  if (off() || !describe(p, BATCHED, a, b, a.scalar_type())) return at::cpu::bmm_out(out, a, b);
  return call(
      p, a, b, nullptr, fits(out, p, a), [&]() -> Tensor& { return at::cpu::bmm_out(out, a, b); },
      [&](Route& r) -> Tensor& {
        if (p.family == BATCHED) return checked_out(r, p, a, b, std::nullopt, out);
        const Tensor y = checked(r, p, a.squeeze(0), b.squeeze(0), std::nullopt).unsqueeze(0);
        at::AutoDispatchBelowADInplaceOrView below;
        return out.copy_(y);
      });
}

Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return count(BATCHED_ADD, c, a, b, [&] { return at::cpu::baddbmm(c, a, b, beta, alpha); });
}

Tensor& baddbmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                    Tensor& out) {
  return count(BATCHED_ADD, c, a, b, [&]() -> Tensor& { return at::cpu::baddbmm_out(out, c, a, b, beta, alpha); });
}

Tensor& baddbmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return count(BATCHED_ADD, c, a, b, [&]() -> Tensor& { return at::cpu::baddbmm_(c, a, b, beta, alpha); });
}

// A linear layer whose weight is also held packed (gemmtuned.freeze): its own problem first, then the plain one.
// `version` and `address` are the weight's when it was packed: a weight edited, converted or replaced since then is
// served plain (inference tensors have no version).
Tensor frozen_linear(const Tensor& x, const Tensor& w, const Tensor& packed, const OptionalTensor& bias,
                     int64_t version, int64_t address) {
  if (x.dim() == 0 || w.dim() != 2 || w.size(1) == 0 || x.size(-1) != w.size(1) ||
      (bias && (bias->dim() != 1 || bias->size(0) != w.size(0))))
    return at::linear(x, w, bias);  // torch has the right error
  const Tensor a = x.dim() == 2 ? x : x.reshape({-1, w.size(1)});
  const Tensor b = w.t();
  const Tensor* const c = bias ? &*bias : nullptr;
  const auto plain = [&] { return bias ? addmm(*bias, a, b, 1, 1) : mm(a, b); };
  const auto frozen = [&](Problem& p) {
    if (bias) p.flags |= BIAS;
    const Problem as_plain = p;
    p.flags |= PACKED;
    const auto otherwise = [&] {  // inside call(): not counted again
      ThreadCounters* thread = this_thread();
      const Found found = thread && dispatching() ? look_up(*thread, as_plain) : Found{};
      if (found.route && found.route->code != STOCK && accepts(found.route->code, a, b, c)) {
        try {
          return checked(*found.route, as_plain, a, b, bias);
        } catch (...) {
          fail(*found.route);
        }
      }
      return plain();
    };
    return call(p, a, b, c, true, otherwise, [&](Route& r) { return checked(r, p, a, b, bias, packed); });
  };
  Problem p;
  const bool same = (w.is_inference() || w._version() == static_cast<uint32_t>(version)) &&
                    reinterpret_cast<int64_t>(w.const_data_ptr()) == address &&
                    w.scalar_type() == packed.scalar_type() && (!bias || bias->scalar_type() == w.scalar_type());
  const Tensor y = off() || !same || !describe(p, DENSE, a, b, a.scalar_type()) ? plain() : frozen(p);
  auto sizes = x.sizes().vec();
  sizes.back() = w.size(0);
  return y.reshape(sizes);
}

// ---- installing ---------------------------------------------------------------------------------------------------

struct Quiet : c10::WarningHandler {  // torch warns once when a kernel is overridden; that is what we are here for
  void process(const c10::Warning&) override {}
};

// Not destroyed at exit: other threads may still be in a GEMM then.
auto& g_installed = *new std::vector<std::unique_ptr<torch::Library>>;

void install_cpu() {
  auto lib = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  lib->impl("mm", TORCH_FN(mm));
  lib->impl("mm.out", TORCH_FN(mm_out));
  lib->impl("addmm", TORCH_FN(addmm));
  lib->impl("addmm.out", TORCH_FN(addmm_out));
  lib->impl("addmm_", TORCH_FN(addmm_));
  lib->impl("bmm", TORCH_FN(bmm));
  lib->impl("bmm.out", TORCH_FN(bmm_out));
  lib->impl("baddbmm", TORCH_FN(baddbmm));
  lib->impl("baddbmm.out", TORCH_FN(baddbmm_out));
  lib->impl("baddbmm_", TORCH_FN(baddbmm_));
  g_installed.push_back(std::move(lib));
}

void define_ops() {  // once for the life of the process: modules may hold the operator
  using torch::Library;
  static auto& definition = *new Library(Library::FRAGMENT, "gemmtuned", std::nullopt, __FILE__, __LINE__);
  static auto& cpu = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static auto& packed = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::MkldnnCPU, __FILE__, __LINE__);
  static bool done = false;
  if (done) return;
  definition.def("frozen_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, int version, int address) -> Tensor");
  cpu.impl("frozen_linear", TORCH_FN(frozen_linear));
  packed.impl("frozen_linear", TORCH_FN(frozen_linear));
  done = true;
}

// ---- tables and forks ---------------------------------------------------------------------------------------------

auto& g_load_mutex = *new std::mutex;  // one table change at a time
auto& g_interned = *new std::unordered_map<uint64_t, std::unique_ptr<Route>>;
auto& g_retired = *new std::vector<const RouteTable*>;

// A fork waits until nobody holds one of our locks, so that the child gets whole data and free locks.
void before_fork() {
  g_load_mutex.lock();
  failures().mutex.lock();
  g_counters.before_fork();
}

void after_fork_in_parent() {
  g_counters.after_fork_in_parent();
  failures().mutex.unlock();
  g_load_mutex.unlock();
}

void after_fork_in_child() {
  g_counters.after_fork_in_child(t_slot.counters);
  failures().mutex.unlock();  // held by this thread, as in the parent
  failures().waiting.clear();  // the parent tells
  g_load_mutex.unlock();
}

}  // namespace
}  // namespace gemmtuned

// ---- the C interface, used by hooks/native/__init__.py alone ---------------------------------------------------------

using namespace gemmtuned;

extern "C" {

struct GtRow {  // one row of a table
  Problem key;
  int32_t id, code;
};

struct GtFailure {
  int32_t id;
  char reason[252];
};

uint64_t gt_layout() { return sizeof(Problem) << 32 | sizeof(Record) << 16 | sizeof(GtRow); }

// Puts our operators in front of torch's; 0, or -1 with the reason in `error`.
int gt_install(char* error, size_t room) {
  static Quiet quiet;
  static bool forks = false;
  auto* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&quiet);
  int rc = 0;
  try {
    if (!forks) pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    forks = true;
    define_ops();
    if (g_installed.empty()) install_cpu();
  } catch (const std::exception& err) {
    snprintf(error, room, "%s", err.what());
    g_installed.clear();
    rc = -1;
  }
  c10::WarningUtils::set_warning_handler(before);
  return rc;
}

void gt_remove() { g_installed.clear(); }

void gt_set_mode(int mode) {
  g_mode.store(mode);
  g_epoch.fetch_add(1);
}

uint64_t gt_generation() { return g_table.load()->generation; }

uint64_t gt_dropped() { return g_counters.dropped.load(); }

size_t gt_drain(Record* out, size_t room) { return g_counters.drain(out, room); }

// Replaces the whole table; retired ones are freed once nobody reads them.
void gt_load(const GtRow* rows, size_t count, uint64_t generation) {
  std::lock_guard<std::mutex> hold(g_load_mutex);
  auto* table = new RouteTable(generation);
  for (size_t i = 0; i < count; ++i) {
    auto& route = g_interned[static_cast<uint64_t>(static_cast<uint32_t>(rows[i].id)) << 32 |
                             static_cast<uint32_t>(rows[i].code)];
    if (!route) route.reset(new Route{rows[i].id, rows[i].code, {false}});
    table->add(rows[i].key, route.get());
  }
  g_retired.push_back(g_table.exchange(table, std::memory_order_seq_cst));
  g_epoch.fetch_add(1, std::memory_order_release);
  std::erase_if(g_retired, [](const RouteTable* old) {
    if (!g_counters.unread(old)) return false;
    delete old;
    return true;
  });
}

// What a call with this problem would get: outcome in the low byte, (route id + 1) above it.
uint64_t gt_find(const Problem* key) {
  ThreadCounters* thread = this_thread();
  const Found found = thread ? look_up(*thread, *key) : Found{};
  return static_cast<uint64_t>(found.outcome) | (found.route ? static_cast<uint64_t>(found.route->id + 1) << 8 : 0);
}

int64_t gt_padded_m(int64_t m, int64_t n, int covers) { return padded_m(m, n, static_cast<Covers>(covers)); }

// Hands out the routes that failed since the last time, at most `room`; returns how many.
size_t gt_take_failures(GtFailure* out, size_t room) {
  auto& all = failures();
  std::lock_guard<std::mutex> hold(all.mutex);
  size_t n = 0;
  for (; n < room && !all.waiting.empty(); ++n, all.waiting.pop_back()) {
    out[n].id = all.waiting.back().first;
    snprintf(out[n].reason, sizeof out[n].reason, "%s", all.waiting.back().second.c_str());
  }
  return n;
}
}
