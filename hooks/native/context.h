// The state of the hook in this process: mode, table, counters, and the look-up of a thread.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>

#include "captures.h"
#include "counters.h"
#include "problem.h"
#include "routes.h"

// What torch's dump of an operator names as the place of our kernels; hooks/overrides.py knows them by it.
#define GEMMTUNED_REGISTERED "gemmtuned/hooks/native/c_api.cpp"

namespace gemmtuned {

using at::Scalar;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// INVARIANT: the program wants the bits of a row to be the same in every batch. Its dense products are batch-invariant
// problems then, and nothing else is routed.
enum Mode : int { OFF = 0, CAPTURE = 1, DISPATCH = 2, INVARIANT = 4 };
inline std::atomic<int> g_mode{OFF};
inline std::atomic<const RouteTable*> g_table{new RouteTable(0)};
inline std::atomic<uint64_t> g_epoch{1};      // raised after every swap of g_table or change of mode
inline Counters& g_counters = *new Counters;  // never destroyed: threads outlive static destructors
inline Captures& g_captures = *new Captures;

struct ThreadSlot {
  ThreadCounters* counters = nullptr;
  ~ThreadSlot() {
    if (counters) g_counters.leave(counters);
    counters = nullptr;
  }
};
inline thread_local ThreadSlot t_slot;

inline ThreadCounters* this_thread() {  // null when there is no memory for it
  if (C10_UNLIKELY(!t_slot.counters)) t_slot.counters = g_counters.join();
  return t_slot.counters;
}

// Looks the problem up in the newest table. The hazard pointer keeps the loader from freeing it under our feet.
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

inline bool off() { return g_mode.load(std::memory_order_relaxed) == OFF; }
inline bool dispatching() { return g_mode.load(std::memory_order_relaxed) & DISPATCH; }
inline bool invariant() { return g_mode.load(std::memory_order_relaxed) & INVARIANT; }

}  // namespace gemmtuned
