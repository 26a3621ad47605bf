// Taking up a table, what its routes have done while it is on probation, and what a fork does to both.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "context.h"
#include "cublaslt.h"
#include "cuda_launch.h"
#include "mirrored.h"
#include "trial.h"

namespace gemmtuned {

inline auto& g_load_mutex = *new std::mutex;  // one table change at a time
inline auto& g_interned = *new std::unordered_map<uint64_t, std::unique_ptr<Route>>;
inline auto& g_retired = *new std::vector<const RouteTable*>;

// A fork waits until nobody holds one of our locks, so that the child gets whole data and free locks.
inline void before_fork() {
  g_load_mutex.lock();
  failures().mutex.lock();
  g_counters.before_fork();
  g_captures.before_fork();
}

inline void after_fork_in_parent() {
  g_captures.after_fork_in_parent();
  g_counters.after_fork_in_parent();
  failures().mutex.unlock();
  g_load_mutex.unlock();
}

inline void after_fork_in_child() {
  g_captures.after_fork_in_child();
  cuda::Workspaces::get().after_fork_in_child();
  g_counters.after_fork_in_child(t_slot.counters);
  failures().mutex.unlock();  // held by this thread, as in the parent
  failures().waiting.clear();  // the parent tells
  g_load_mutex.unlock();
}

}  // namespace gemmtuned
