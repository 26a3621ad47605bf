// The native hook: counts and routes GEMMs under aten's leaf operators.
//
//   torch.mm -> dispatcher -> mm() here -> look up -> a tuned route, or at::cpu::mm as without us
//
// It sits at the backend key, below autograd, autocast, vmap and torch.compile, so it sees what really runs. The call
// path takes no lock, allocates only for a problem new to its thread, and never throws anything of its own: a route
// that fails is switched off and the call runs on stock torch. Loaded with ctypes (no Python headers needed).
#include <pthread.h>

#include <cstdio>
#include <type_traits>

#include "foreign.h"
#include "install.h"
#include "declared_kernel.h"
#include "mirrored.h"
#include "own_operators.h"
#include "shims.h"
#include "tables.h"
#include "thread_api.h"

namespace gemmtuned {
namespace {

struct Quiet : c10::WarningHandler {  // torch warns once when a kernel is overridden; that is what we are here for
  void process(const c10::Warning&) override {}
};

struct WithHandler {
  explicit WithHandler(c10::WarningHandler& one) { c10::WarningUtils::set_warning_handler(&one); }
  ~WithHandler() { c10::WarningUtils::set_warning_handler(before); }
  c10::WarningHandler* before = c10::WarningUtils::get_warning_handler();
};

bool g_cuda = false;  // the CUDA half is in use

// Nothing leaves a C function as an exception: it would end the program. What `run` returns, or `otherwise` where it throws.
template <class Run>
auto guarded(std::invoke_result_t<Run> otherwise, const Run& run) noexcept -> std::invoke_result_t<Run> {
  try {
    return run();
  } catch (...) {
    return otherwise;
  }
}

template <class Run>
void guarded(const Run& run) noexcept {
  try {
    run();
  } catch (...) {}
}

// The same with the reason, in words, in `error`.
template <class Run>
auto guarded(char* error, size_t room, std::invoke_result_t<Run> otherwise, const Run& run) noexcept
    -> std::invoke_result_t<Run> {
  try {
    try {
      return run();
    } catch (const c10::Error& err) {
      snprintf(error, room, "%s", err.what_without_backtrace());
    } catch (const std::exception& err) {
      snprintf(error, room, "%s", err.what());
    }
  } catch (...) {  // no memory to say it in
    snprintf(error, room, "not enough memory");
  }
  return otherwise;
}

}  // namespace
}  // namespace gemmtuned

// ---- the C interface, used by hooks/native/library.py alone -------------------------------------------------------------

using namespace gemmtuned;

extern "C" {

// Where the members of every structure that Python mirrors lie, a line each; null without memory.
const char* gt_fields() noexcept {
  return guarded(nullptr, [] { return mirrored_fields(); });
}

// Whether the program has this operator; 0, or -1 with the reason in `error`.
int gt_check_operator(const OperatorLaunch* facts, char* error, size_t room) noexcept {
  return guarded(error, room, -1, [&] {
    const OperatorCall call(*facts);
    return 0;
  });
}

// Makes ready for gt_install. 0; 1 when the CUDA half is left out for the reason in `note`; -1 with it when all is.
int gt_prepare(char* note, size_t room) noexcept {
  static bool forks = false;
  const int ready = guarded(note, room, -1, [] {
    define_ops();
    cuda::Workspaces::get(), Probation::get();  // a fork makes nothing
    if (!forks && pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) throw std::bad_alloc();
    forks = true;
    return 0;
  });
#ifdef GEMMTUNED_CUDA
  if (ready == 0)
    return guarded(note, room, 1, [] {
      cuda::Driver::get();
      g_cuda = true;
      return 0;
    });
#endif
  return ready;
}

// Name of the operator of this number, "CPU aten::mm.out"; null past the last.
const char* gt_operator(size_t number) noexcept {
  return guarded(nullptr, [&]() -> const char* {
    return number < installables().size() ? installables()[number].name.c_str() : nullptr;
  });
}

// Puts ours in front of what is registered for it now, for the life of the process. A second time does nothing. 0, or -1
// with the reason in `error`: of a torch whose operator takes other arguments.
int gt_install(size_t number, char* error, size_t room) noexcept {
  static Quiet quiet;
  return guarded(error, room, -1, [&] {
    if (number >= installables().size() || installables()[number].done) return 0;
    Installable& it = installables()[number];
    const WithHandler silent(quiet);
    auto* library = new torch::Library(torch::Library::IMPL, "aten", it.key, GEMMTUNED_REGISTERED, __LINE__);
    it.add(*library, it.operation);
    it.done = true;
    return 0;
  });
}

// Has an operator of somebody else's counted. arguments: which is y, x, w, the scale of x, of w, the bias, the
// result's type, zero points of x, sums of w, and what keeps a route away where it is true. form: a Form, with kRouted where
// calls may be routed, and its number from kEngineShift on where it is an engine's. family: its code where it is one of
// another package's, else 0. Where it is from now on, or was already: 1 for the CPU, 2 for CUDA, 3 for both; 0 where it is
// not there yet; -1 with the reason in `error`.
int gt_stand_before(const char* name, const char* schema, const int8_t* arguments, int form, int family, char* error,
                    size_t room) noexcept {
  static Quiet quiet;
  return guarded(error, room, -1, [&]() -> int {
#ifdef GEMMTUNED_FOREIGN
    const WithHandler silent(quiet);
    const int8_t* const a = arguments;
    const auto kind = static_cast<uint8_t>(form & 15), code = static_cast<uint8_t>(family);
    const auto engine = static_cast<uint8_t>(form >> kEngineShift);
    const ForeignFacts facts{
        a[0], a[1], a[2], a[3], a[4], a[5], a[7], a[8], a[6], a[9], a[10], kind, (form & kRouted) != 0, code, engine};
    int stands = stand_before<Cpu>(name, schema, facts) ? 1 : 0;
#ifdef GEMMTUNED_CUDA
    if (g_cuda && stand_before<Cuda>(name, schema, facts)) stands |= 2;
#endif
    return stands;
#else
    (void)name, (void)schema, (void)arguments, (void)form, (void)family;
    return 0;
#endif
  });
}

int gt_is_installed(size_t number) noexcept {
  return guarded(0, [&]() -> int { return number < installables().size() && installables()[number].done; });
}

// Whether we stand in front of CUDA operators.
int gt_has_cuda() noexcept { return g_cuda; }

// One routed call in this many is checked against stock torch; 0: none.
void gt_live_check(uint32_t every) noexcept { g_live_every.store(every); }

// The largest RMS error that this check expects of `count` results of this problem.
double gt_live_cap(const Problem* key, double count) noexcept { return live_cap(*key, count); }

// Loads a binary on a CUDA device; its kernel's handle, or null with the reason in `error`.
void* gt_load_kernel(int device, const void* image, const char* name, int shared, int cluster, char* error,
                     size_t room) noexcept {
  return guarded(error, room, static_cast<void*>(nullptr),
                 [&]() -> void* { return cuda::load_kernel(device, image, name, shared, cluster); });
}

// The table that is about to be used is on probation: see Probation::begin.
void gt_probation_begin(const char* base, const char* folder, uint64_t generation, const char* facts,
                        uint64_t space) noexcept {
  guarded([&] { begin_probation(base, folder, generation, facts, space); });
}

// It is over. keep: the page stays for others to read.
void gt_probation_end(int keep) noexcept {
  guarded([&] { Probation::get().end(keep); });
}

// The page of this process on probation; null while it has routed nothing, or is on none. make: have it made now.
ProbationPage* gt_probation_page(int make) noexcept {
  return guarded(nullptr, [&]() -> ProbationPage* {
    ProbationPage* const page = g_probation.load();
    return page != &g_unborn ? page : make ? Probation::get().page() : nullptr;
  });
}

// See fault_on_probation.
int gt_fault(int32_t* ids, size_t room, size_t* count) noexcept {
  return guarded(0, [&] { return fault_on_probation(ids, room, count); });
}

void gt_set_switches(int switches) noexcept {
  g_switches.store(switches);
  g_epoch.fetch_add(1);
}

uint64_t gt_generation() noexcept { return g_table.load()->generation; }

uint64_t gt_dropped() noexcept { return g_counters.dropped.load(); }

// Up to `room` records of what was counted; fewer: there are no more. anew: until now, else until the last such call.
size_t gt_drain(Record* out, size_t room, int anew) noexcept {
  return guarded(0, [&] {
    return g_drain_buffer.fetch(out, room, anew, [](std::vector<Record>& all) {
      g_counters.drain(all);
      ThreadCounters* const thread = this_thread();
      g_captures.drain(all, [thread](const Problem& key) {
        const bool may = thread && dispatching() && (!invariant() || key.flags & BATCH_INVARIANT);
        return may ? look_up(*thread, key) : Found{};
      });
    });
  });
}

// Id of the graph capture that this thread's current stream on the device is part of; 0 when it is none. What is captured
// from here on is kept until gt_graph_gone.
uint64_t gt_capture_begun(int device) noexcept {
#ifdef GEMMTUNED_CUDA
  return guarded(0, [&]() -> uint64_t {
    const uint64_t id = cuda::capture_of(cuda::current_stream(device)).id;
    g_captures.expect(id);
    return id;
  });
#else
  (void)device;
  return 0;
#endif
}

// A call of an op that counts itself, which went into the capture that its device's current stream is part of: replays count.
void gt_op_captured(const Problem* key, int outcome) noexcept {
#ifdef GEMMTUNED_CUDA
  guarded([&] {
    const uint64_t id = cuda::capture_of(cuda::current_stream(key->device_index)).id;
    g_captures.add(id, *key, static_cast<Outcome>(outcome));
  });
#else
  (void)key, (void)outcome;
#endif
}

// A call of such an op begins in this thread: GEMMs that it runs under aten are torch's, and not counted. routed: a kernel of
// the table serves it, 1 on the host, 2 on a GPU; 0 for none.  Gives what gt_op_ends takes.
ProbationPage* gt_op_begins(int routed) noexcept {
  return guarded(nullptr, [&]() -> ProbationPage* {
    if (ThreadCounters* const thread = this_thread()) ++thread->depth;
    if (!routed) return nullptr;
    HeldPage page(HeldPage::MADE);
    if (C10_LIKELY(!page)) return nullptr;
    page->going_on.fetch_add(1, std::memory_order_relaxed);
    if (routed != 1) page->launched.store(1, std::memory_order_relaxed);
    return page.keep();
  });
}

void gt_op_ends(ProbationPage* page) noexcept {
  ThreadCounters* const thread = t_counters;
  if (thread && thread->depth) --thread->depth;  // there was no memory for one when it began
  if (!page) return;
  page->going_on.fetch_sub(1, std::memory_order_relaxed);
  HeldPage::release(page);
}

void gt_graph_replayed(uint64_t capture, uint64_t times) noexcept {
  guarded([&] {
    beat(0);
    g_captures.replayed(capture, times);
  });
}

void gt_graph_gone(uint64_t capture) noexcept {
  guarded([&] {
    g_captures.forget(capture);
    cuda::Workspaces::get().release(capture);
  });
}

// How many launches in captured graphs run by torch, and would be served by the table of now.
uint64_t gt_stale_launches() noexcept {
  return guarded(0, []() -> uint64_t {
    ThreadCounters* thread = this_thread();
    return thread ? g_captures.stale([&](const Problem& key) { return look_up(*thread, key); }) : 0;
  });
}

// Count the calls in a page at this path, too, which others may look at. Whether there is one.
int gt_show_beats(const char* path) noexcept {
  return guarded(0, [&]() -> int { return show_beats(path); });
}

// Version of the cuBLASLt that launches call, 130002 for 13.0.2; 0 without one.
uint64_t gt_cublaslt_version() noexcept {
  return guarded(0, []() -> uint64_t { return cuda::LtLibrary::get().cublasLtGetVersion(); });
}

// Replaces the whole table. 0, or -1 with the reason in `error`: then the earlier table stays.
int gt_load(const GtRow* rows, size_t count, uint64_t generation, char* error, size_t room) noexcept {
  return guarded(error, room, -1, [&] {
    load_table(rows, count, generation);
    return 0;
  });
}

// What a call with this problem would get: outcome in the low byte, (route id + 1) above it.
uint64_t gt_find(const Problem* key) noexcept {
  return guarded(0, [&]() -> uint64_t {
    ThreadCounters* thread = this_thread();
    const Found found = thread ? look_up(*thread, *key) : Found{};
    return static_cast<uint64_t>(found.outcome) | (found.route ? static_cast<uint64_t>(found.route->id + 1) << 8 : 0);
  });
}

int64_t gt_padded_m(int64_t m, int64_t n, int covers) noexcept { return padded_m(m, n, static_cast<Covers>(covers)); }

// Hands out the routes that failed since the last time, at most `room`; returns how many.
size_t gt_take_failures(GtFailure* out, size_t room) noexcept {
  size_t n = 0;
  for (; n < room; ++n) {
    const Route* route = next_untold();
    if (!route) break;
    out[n].id = route->id, out[n].how = route->how;
    snprintf(out[n].reason, sizeof out[n].reason, "%s", route->why ? route->why : "no memory for the reason");
  }
  return n;
}
}
