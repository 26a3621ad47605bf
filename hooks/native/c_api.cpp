// The native hook: counts and routes GEMMs under aten's leaf operators.
//
//   torch.mm -> dispatcher -> mm() here -> look up -> a tuned route, or at::cpu::mm as without us
//
// It sits at the backend key, below autograd, autocast, vmap and torch.compile, so it sees what really runs. The call
// path takes no lock, allocates only for a problem new to its thread, and never throws anything of its own: a route
// that fails is switched off and the call is served by stock torch. Loaded with ctypes (no Python headers needed).
#include <pthread.h>

#include "install.h"
#include "mirrored.h"
#include "own_operators.h"
#include "tables.h"

// What torch's dump of an operator names as the place of our kernels; hooks/overrides.py knows them by it.
#define GEMMTUNED_REGISTERED "gemmtuned/hooks/native/c_api.cpp"

namespace gemmtuned {
namespace {

struct Quiet : c10::WarningHandler {  // torch warns once when a kernel is overridden; that is what we are here for
  void process(const c10::Warning&) override {}
};

bool g_cuda = false;  // the CUDA half is in use

}  // namespace
}  // namespace gemmtuned

// ---- the C interface, used by hooks/native/library.py alone ---------------------------------------------------------

using namespace gemmtuned;

extern "C" {

// Where the members of every structure that Python mirrors lie, a line each.
const char* gt_fields() { return mirrored_fields(); }

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
