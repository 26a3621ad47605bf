// The native hook: counts and routes GEMMs under aten's leaf operators.
//
//   torch.mm -> dispatcher -> mm() here -> look up -> a tuned route, or at::cpu::mm as without us
//
// It sits at the backend key, below autograd, autocast, vmap and torch.compile, so it sees what really runs. The call
// path takes no lock, allocates only for a problem new to its thread, and never throws anything of its own: a route
// that fails is switched off and the call is served by stock torch. Loaded with ctypes (no Python headers needed).
#include <ATen/ops/linear.h>
#include <pthread.h>

#include <algorithm>
#include <array>

#include "context.h"
#include "cublaslt.h"
#include "cuda_launch.h"
#include "install.h"
#include "layout.h"
#include "scales.h"

// What torch's dump of an operator names as the place of our kernels; hooks/overrides.py knows them by it.
#define GEMMTUNED_REGISTERED "gemmtuned/hooks/native/c_api.cpp"

namespace gemmtuned {
namespace {

using OnCpu = Operators<Cpu>;

// ---- frozen layers ------------------------------------------------------------------------------------------------

// What a weight was when it was packed: version, address, storage, and a sum over its form and 32 places of its content.
//
// Versions do not count edits under `.data`, and addresses come again. The storage is the address of its StorageImpl, to
// which freeze.py holds a weak reference: so it is nobody else's, however often `.data` was given another. Memory of the
// same storage that was given back and taken anew (resize_), and edits under `.data`, show in the content alone.
std::array<int64_t, 4> stamp_of(const Tensor& w) {
  uint64_t sum = 0x9e3779b97f4a7c15ull;
  const auto take = [&sum](uint64_t word) { sum = (sum ^ word) * 0xd6e8feb86659fd93ull, sum ^= sum >> 32; };
  for (const int64_t size : w.sizes()) take(static_cast<uint64_t>(size));
  for (const int64_t stride : w.strides()) take(static_cast<uint64_t>(stride));
  const char* const data = static_cast<const char*>(w.const_data_ptr());
  const size_t bytes = w.nbytes();
  if (w.is_contiguous() && data && w.storage().nbytes() >= w.storage_offset() * w.itemsize() + bytes)
    for (size_t i = 0; bytes >= sizeof(uint64_t) && i < 32; ++i) {
      uint64_t word;
      std::memcpy(&word, data + (bytes - sizeof word) / 31 * i, sizeof word);
      take(word);
    }
  return {w.is_inference() ? -1 : static_cast<int64_t>(w._version()), reinterpret_cast<int64_t>(data),
          reinterpret_cast<int64_t>(w.storage().unsafeGetStorageImpl()), static_cast<int64_t>(sum)};
}

std::vector<int64_t> frozen_stamp(const Tensor& w) {
  const auto stamp = stamp_of(w);
  return {stamp.begin(), stamp.end()};
}

// A linear layer whose weight is also held packed (gemmtuned.freeze): its own problem first, then the plain one. A weight
// that is not what it was when it was packed is served plain.
Tensor frozen_linear(const Tensor& x, const Tensor& w, const Tensor& packed, const OptionalTensor& bias,
                     at::IntArrayRef stamp) {
  if (x.dim() == 0 || w.dim() != 2 || w.size(1) == 0 || x.size(-1) != w.size(1) ||
      (bias && (bias->dim() != 1 || bias->size(0) != w.size(0))))
    return at::linear(x, w, bias);  // torch has the right error
  const Tensor a = x.dim() == 2 ? x : x.reshape({-1, w.size(1)});
  const Tensor b = w.t();
  const Tensor* const c = bias ? &*bias : nullptr;
  const auto plain = [&] { return bias ? OnCpu::addmm(*bias, a, b, 1, 1) : OnCpu::mm(a, b); };
  const auto frozen = [&](Problem& p) {
    if (bias) p.flags |= BIAS;
    const Problem as_plain = p;
    p.flags |= PACKED;
    const auto otherwise = [&] {  // inside call(): not counted again
      ThreadCounters* thread = this_thread();
      const Found found = thread && dispatching() ? look_up(*thread, as_plain) : Found{};
      if (found.route && found.route->code != STOCK && Cpu::accepts(*found.route, a, b, c)) {
        try {
          return OnCpu::checked(*found.route, as_plain, a, b, bias);
        } catch (...) {
          judge<Cpu>(*found.route, as_plain);
        }
      }
      return plain();
    };
    return call<Cpu>(p, a, b, c, true, otherwise, [&](Route& r) { return OnCpu::checked(r, p, a, b, bias, packed); });
  };
  Problem p;
  const bool same = w.scalar_type() == packed.scalar_type() && (!bias || bias->scalar_type() == w.scalar_type()) &&
                    std::ranges::equal(stamp, stamp_of(w));
  const Tensor y = off() || invariant() || !same || !describe<Cpu>(p, DENSE, a, b, a.scalar_type()) ? plain() : frozen(p);
  auto sizes = x.sizes().vec();
  sizes.back() = w.size(0);
  return y.reshape(sizes);
}

using FrozenSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef);

// Above the kernel, for calls that come here by other ways than freeze.py, as from compiled code: what derives or maps over
// examples gets plain F.linear, which has formulas for that.
Tensor frozen_autograd(const Tensor& x, const Tensor& w, const Tensor& packed, const OptionalTensor& bias,
                       at::IntArrayRef stamp) {
  const auto derived = [](const Tensor& t) {
    return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(0).defined();
  };
  if (derived(x) || derived(w) || (bias && derived(*bias))) return at::linear(x, w, bias);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("gemmtuned::frozen_linear", "").typed<FrozenSignature>();
  at::AutoDispatchBelowAutograd below;
  return op.call(x, w, packed, bias, stamp);
}

Tensor frozen_batched(const Tensor& x, const Tensor& w, const Tensor&, const OptionalTensor& bias, at::IntArrayRef) {
  return at::linear(x, w, bias);
}

// The key, byte by byte, that a scaled product has on a GPU but for the device: to look at where there is none. Without
// recipes it is _scaled_mm's, with them _scaled_mm_v2's; empty where the product is not counted.
std::vector<int64_t> scaled_key(const Tensor& a, const Tensor& b, at::TensorList scale_a, at::IntArrayRef recipe_a,
                                at::IntArrayRef swizzle_a, at::TensorList scale_b, at::IntArrayRef recipe_b,
                                at::IntArrayRef swizzle_b, at::ScalarType out_dtype) {
  Problem p;
  if (!describe<Cpu>(p, SCALED, a, b, out_dtype)) return {};
  const BothScales both = recipe_a.empty()
                              ? scales_of(a, b, scale_a[0], scale_b[0])
                              : scales_of(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b);
  if (!describe_scaled(p, both, a, std::nullopt, false)) return {};
  p.threads = 0;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
  return {bytes, bytes + sizeof p};
}

void define_ops() {  // once for the life of the process: modules may hold the operator
  using torch::Library;
  static auto& definition = *new Library(Library::FRAGMENT, "gemmtuned", std::nullopt, __FILE__, __LINE__);
  static auto& cpu = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static auto& packed = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::MkldnnCPU, __FILE__, __LINE__);
  static auto& autograd = *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  static auto& batched =
      *new Library(Library::IMPL, "gemmtuned", c10::DispatchKey::FuncTorchBatched, __FILE__, __LINE__);
  static bool done = false;
  if (done) return;
  definition.def("frozen_stamp(Tensor weight) -> int[]");
  definition.def(
      "scaled_key(Tensor a, Tensor b, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, "
      "int[] recipe_b, int[] swizzle_b, ScalarType out_dtype) -> int[]");
  definition.def("frozen_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, int[] stamp) -> Tensor");
  cpu.impl("frozen_stamp", TORCH_FN(frozen_stamp));
  cpu.impl("frozen_linear", TORCH_FN(frozen_linear));
  cpu.impl("scaled_key", TORCH_FN(scaled_key));
  packed.impl("frozen_linear", TORCH_FN(frozen_linear));
  autograd.impl("frozen_linear", TORCH_FN(frozen_autograd));
  batched.impl("frozen_linear", TORCH_FN(frozen_batched));
  done = true;
}

// ---- installing ---------------------------------------------------------------------------------------------------

struct Quiet : c10::WarningHandler {  // torch warns once when a kernel is overridden; that is what we are here for
  void process(const c10::Warning&) override {}
};

std::vector<Installable>& installables() {
  static auto& all = *[] {
    auto* list = new std::vector<Installable>;
    list_operators<Cpu>(*list);
#ifdef GEMMTUNED_CUDA
    list_operators<Cuda>(*list);
#endif
    return list;
  }();
  return all;
}

bool g_cuda = false;  // the CUDA half is in use

// ---- tables and forks ---------------------------------------------------------------------------------------------

auto& g_load_mutex = *new std::mutex;  // one table change at a time
auto& g_interned = *new std::unordered_map<uint64_t, std::unique_ptr<Route>>;
auto& g_retired = *new std::vector<const RouteTable*>;

// A fork waits until nobody holds one of our locks, so that the child gets whole data and free locks.
void before_fork() {
  g_load_mutex.lock();
  failures().mutex.lock();
  g_counters.before_fork();
  g_captures.before_fork();
}

void after_fork_in_parent() {
  g_captures.after_fork_in_parent();
  g_counters.after_fork_in_parent();
  failures().mutex.unlock();
  g_load_mutex.unlock();
}

void after_fork_in_child() {
  g_captures.after_fork_in_child();
  cuda::Workspaces::get().after_fork_in_child();
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
const char* gt_fields() {
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

// Whether the program has this operator; 0, or -1 with the reason in `error`.
int gt_check_operator(const OperatorLaunch* facts, char* error, size_t room) {
  try {
    const OperatorCall call(*facts);
    return 0;
  } catch (const c10::Error& err) {
    snprintf(error, room, "%s", err.what_without_backtrace());
  } catch (const std::exception& err) {
    snprintf(error, room, "%s", err.what());
  }
  return -1;
}

// Makes ready for gt_install. 0; 1 when the CUDA half is left out for the reason in `note`; -1 with it when all is.
int gt_prepare(char* note, size_t room) {
  static bool forks = false;
  try {
    if (!forks) pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    forks = true;
    define_ops();
  } catch (const std::exception& err) {
    snprintf(note, room, "%s", err.what());
    return -1;
  }
#ifdef GEMMTUNED_CUDA
  try {
    cuda::Driver::get();
    g_cuda = true;
  } catch (const c10::Error& err) {
    snprintf(note, room, "%s", err.what_without_backtrace());
    return 1;
  }
#endif
  return 0;
}

// Name of the operator of this number, "CPU aten::mm.out"; null past the last.
const char* gt_operator(size_t number) {
  return number < installables().size() ? installables()[number].name.c_str() : nullptr;
}

// Puts ours in front of what is registered for it now, for the life of the process. A second time does nothing. 0, or -1
// with the reason in `error`.
int gt_install(size_t number, char* error, size_t room) {
  static Quiet quiet;
  if (number >= installables().size() || installables()[number].done) return 0;
  Installable& it = installables()[number];
  auto* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&quiet);
  int rc = 0;
  try {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", it.key, GEMMTUNED_REGISTERED, __LINE__);
    it.add(*library, it.operation);
    it.done = true;
  } catch (const c10::Error& err) {  // of a torch whose operator takes other arguments
    snprintf(error, room, "%s", err.what_without_backtrace());
    rc = -1;
  } catch (const std::exception& err) {
    snprintf(error, room, "%s", err.what());
    rc = -1;
  }
  c10::WarningUtils::set_warning_handler(before);
  return rc;
}

int gt_is_installed(size_t number) { return number < installables().size() && installables()[number].done; }

// Whether we stand in front of CUDA operators.
int gt_has_cuda() { return g_cuda; }

// One routed call in this many is checked against stock torch; 0: none.
void gt_live_check(uint32_t every) { g_live_every.store(every); }

// Loads a binary on a CUDA device; its kernel's handle, or null with the reason in `error`.
void* gt_load_kernel(int device, const void* image, const char* name, int shared, int cluster, char* error,
                     size_t room) {
  try {
    return cuda::load_kernel(device, image, name, shared, cluster);
  } catch (const c10::Error& err) {
    snprintf(error, room, "%s", err.what_without_backtrace());
  } catch (const std::exception& err) {
    snprintf(error, room, "%s", err.what());
  }
  return nullptr;
}

// Has `body` run in a thread of its own with the next problem that any thread meets for the first time; null: not.
// Whether there was one before, and no problem has come yet.
int gt_at_first_count(ThreadBody body) { return g_at_first_count.exchange(body) != nullptr; }

// Notes in this page what the table does from now on; null: nowhere.
void gt_on_trial(TrialPage* page) {
  std::lock_guard<std::mutex> hold(g_load_mutex);
  g_trial.store(page);
  for (const auto& [key, route] : g_interned)
    if (page) route->launched.store(false);
}

// A fault (trial.h) of the devices on which routes ran while on probation; 0 without one. Fills in the ids of these routes,
// `room` at most, and how many.
int gt_fault(int32_t* ids, size_t room, size_t* count) {
  *count = 0;
  int fault = 0;
  std::lock_guard<std::mutex> hold(g_load_mutex);
  for (const auto& [key, route] : g_interned) {
    if (!route->launched.load()) continue;
    if (*count < room) ids[(*count)++] = route->id;
    try {
      if (!fault) fault = cuda::fault_of(static_cast<int>(key & 0xFF));
    } catch (...) {  // no driver: nothing ran on one
    }
  }
  return fault;
}

void gt_set_mode(int mode) {
  g_mode.store(mode);
  g_epoch.fetch_add(1);
}

uint64_t gt_generation() { return g_table.load()->generation; }

uint64_t gt_dropped() { return g_counters.dropped.load(); }

size_t gt_drain(Record* out, size_t room) {
  const size_t n = g_counters.drain(out, room);
  return n + g_captures.drain(out + n, room - n);
}

// Id of the graph capture that this thread's current stream on the device is part of; 0 when it is none. What is captured
// from here on is kept until gt_graph_gone.
uint64_t gt_capture_begun(int device) {
#ifdef GEMMTUNED_CUDA
  try {
    const uint64_t id = cuda::capture_of(cuda::current_stream(device)).id;
    g_captures.expect(id);
    return id;
  } catch (...) {
  }
#endif
  (void)device;
  return 0;
}

void gt_graph_replayed(uint64_t capture, uint64_t times) { g_captures.replayed(capture, times); }

void gt_graph_gone(uint64_t capture) {
  g_captures.forget(capture);
  cuda::Workspaces::get().release(capture);
}

// Version of the cuBLASLt that launches call, 130002 for 13.0.2; 0 without one.
uint64_t gt_cublaslt_version() {
  try {
    return cuda::LtLibrary::get().cublasLtGetVersion();
  } catch (...) {
    return 0;
  }
}

// Replaces the whole table; retired ones are freed once nobody reads them.
void gt_load(const GtRow* rows, size_t count, uint64_t generation) {
  std::lock_guard<std::mutex> hold(g_load_mutex);
  auto* table = new RouteTable(generation);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t where = static_cast<uint32_t>(rows[i].code) << 8 | rows[i].key.device_index;
    auto& route = g_interned[static_cast<uint64_t>(static_cast<uint32_t>(rows[i].id)) << 32 | where];
    if (!route) {
      route.reset(new Route{rows[i].id, rows[i].code});
      if (rows[i].code == LAUNCH && rows[i].launch)
        route->launch = std::make_unique<const cuda::Launch>(*static_cast<const cuda::Launch*>(rows[i].launch));
      if (rows[i].code == CUBLASLT && rows[i].launch)
        route->lt = std::make_unique<const cuda::LtLaunch>(*static_cast<const cuda::LtLaunch*>(rows[i].launch));
      if (rows[i].code == OPERATOR && rows[i].launch)
        route->op = std::make_unique<const OperatorCall>(*static_cast<const OperatorLaunch*>(rows[i].launch));
      if (rows[i].code == ROWS && rows[i].launch)
        route->rows = std::make_unique<const RowBlocks>(*static_cast<const RowBlocks*>(rows[i].launch));
      route->chain = rows[i].key.flags & BATCH_INVARIANT;
    }
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
    const auto& last = all.waiting.back();
    out[n].id = last.id, out[n].how = last.how;
    snprintf(out[n].reason, sizeof out[n].reason, "%s", last.why.c_str());
  }
  return n;
}
}
