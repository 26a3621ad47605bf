// The state of the hook in this process: switches, table, counters, and each thread's look-up.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Macros.h>
#include <pthread.h>

#include <array>

#include "captures.h"
#include "counters.h"
#include "drain_buffer.h"
#include "problem.h"
#include "routes.h"

// The source file of our kernels in torch's dump of an operator, by which hooks/overrides.py recognises them.
#define GEMMTUNED_REGISTERED "gemmtuned/hooks/native/c_api.cpp"

namespace gemmtuned {

using at::Scalar;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// While one lives, what this thread calls of torch goes straight to the backend's kernels, as inside one of them. Who calls
// a kernel of ours without the dispatcher, as AOTInductor's packages do, may have modes, transforms, autocast or a tracer on,
// which see nothing of what torch's kernel does.
inline const c10::DispatchKeySet kAboveBackends = [] {
  using c10::DispatchKey, c10::DispatchKeySet;
  const DispatchKeySet below =
      DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect) |
      DispatchKeySet({DispatchKey::BackendSelect, DispatchKey::Conjugate, DispatchKey::Negative,
                      DispatchKey::ZeroTensor});  // these are a tensor's, not the thread's
  const uint64_t all = DispatchKeySet(DispatchKeySet::FULL).raw_repr();
  return DispatchKeySet(DispatchKeySet::RAW, all & ~below.raw_repr() & ~c10::full_backend_mask);
}();
struct Below {
  c10::impl::ExcludeDispatchKeyGuard above{kAboveBackends};
};

// Views for our own use.
inline Tensor turned_round(const Tensor& t) {
  const Below below;
  return t.t();
}
inline Tensor first_of(const Tensor& t) {  // of a batch
  const Below below;
  return t.select(0, 0);
}
template <class... T>
std::array<Tensor, sizeof...(T)> without_batch(const T&... t) {  // of batches of 1
  const Below below;
  return {t.squeeze(0)...};
}

// INVARIANT: the program wants a row to have the same bits in every batch. Then its dense products are batch-invariant
// problems, and nothing else is routed.
enum Switch : int { OFF = 0, CAPTURE = 1, DISPATCH = 2, INVARIANT = 4 };
inline std::atomic<int> g_switches{OFF};
inline std::atomic<const RouteTable*> g_table{new RouteTable(0)};
inline std::atomic<uint64_t> g_epoch{1};      // raised after every swap of g_table or change of g_switches
inline Counters& g_counters = *new Counters;  // never destroyed: threads outlive static destructors
inline Captures& g_captures = *new Captures;
inline DrainBuffer& g_drain_buffer = *new DrainBuffer;

// A thread's counters. Destructors of others' thread-local objects may call GEMMs, before and after any destructor of ours.
// So this type has no destructor and lasts as long as its thread. The destructor of a pthread key ends it: that runs after
// all destructors of C++, and again if the thread has made new counters meanwhile.
inline thread_local ThreadCounters* t_counters = nullptr;

class ThreadEnd {
 public:
  ThreadEnd() : made_(pthread_key_create(&key_, &leave) == 0) {}
  // Ends `counters` with the thread; null: nothing to end. False if there is no memory, or no pthread key, for it.
  bool set(ThreadCounters* counters) const { return made_ && pthread_setspecific(key_, counters) == 0; }

 private:
  static void leave(void* counters) {
    t_counters = nullptr;
    g_counters.leave(static_cast<ThreadCounters*>(counters));
  }
  pthread_key_t key_{};
  const bool made_;
};
inline const ThreadEnd g_thread_end;

inline ThreadCounters* this_thread() {  // null when there is no memory for it
  if (C10_LIKELY(t_counters)) return t_counters;
  ThreadCounters* const made = g_counters.join();
  if (made && !g_thread_end.set(made)) g_counters.leave(made);
  else t_counters = made;
  return t_counters;
}

// Looks the problem up in the newest table. The hazard pointer keeps the loader from freeing the table meanwhile.
inline Found look_up(ThreadCounters& thread, const Problem& key) {
  const RouteTable* table;
  do {
    table = g_table.load(std::memory_order_seq_cst);
    thread.reading.store(table, std::memory_order_seq_cst);
  } while (table != g_table.load(std::memory_order_seq_cst));
  const Found found = table->find(key);
  thread.reading.store(nullptr, std::memory_order_release);
  return found;
}

inline bool off() { return g_switches.load(std::memory_order_relaxed) == OFF; }
inline bool dispatching() { return g_switches.load(std::memory_order_relaxed) & DISPATCH; }
inline bool invariant() { return g_switches.load(std::memory_order_relaxed) & INVARIANT; }

}  // namespace gemmtuned
