// Loads a table, notes what its routes do while it is on probation, and sees both through a fork.
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
#include "probation.h"
#include "watched.h"

namespace gemmtuned {

inline auto& g_load_mutex = *new std::mutex;  // one table change at a time
inline auto& g_interned = *new std::unordered_map<uint64_t, std::unique_ptr<Route>>;
inline auto& g_retired = *new std::vector<const RouteTable*>;

// A new route for this row. Throws where there is no memory for it, or no such operator.
inline std::unique_ptr<Route> made_route(const GtRow& row) {
  auto route = std::make_unique<Route>(row.id, row.code);
  route->conditions.assign(row.conditions, row.conditions + row.condition_count);
  route->scales_sums = row.scales_sums, route->chain_rows = row.chain_rows;
  if (!row.launch) return route;
  const auto copy = [&row]<class Kind>(std::unique_ptr<const Kind>& to) {
    to = std::make_unique<const Kind>(*static_cast<const Kind*>(row.launch));
  };
  switch (row.code) {
    case LAUNCH: copy(route->launch); break;
    case CUBLASLT: copy(route->lt); break;
    case ROWS: copy(route->rows); break;
    case OPERATOR:
      route->op = std::make_unique<const OperatorCall>(*static_cast<const OperatorLaunch*>(row.launch));
      break;
  }
  return route;
}

// Replaces the whole table; old ones are freed once nobody reads them. If it throws, the earlier table stays.
inline void load_table(const GtRow* rows, size_t count, uint64_t generation) {
  std::lock_guard<std::mutex> hold(g_load_mutex);
  auto table = std::make_unique<RouteTable>(generation);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t where = static_cast<uint32_t>(rows[i].code) << 8 | rows[i].key.device_index;
    const uint64_t name = static_cast<uint64_t>(static_cast<uint32_t>(rows[i].id)) << 32 | where;
    auto known = g_interned.find(name);
    if (known == g_interned.end()) known = g_interned.emplace(name, made_route(rows[i])).first;
    table->add(rows[i].key, known->second.get(), Engines{rows[i].engines});
  }
  g_retired.reserve(g_retired.size() + 1);
  g_retired.push_back(g_table.exchange(table.release(), std::memory_order_seq_cst));
  g_epoch.fetch_add(1, std::memory_order_release);
  std::erase_if(g_retired, [](const RouteTable* old) {
    if (!g_counters.unread(old)) return false;
    delete old;
    return true;
  });
}

// The table that is about to be used is on probation.
inline void begin_probation(const char* base, const char* folder, uint64_t generation, const char* facts,
                            uint64_t space) {
  std::lock_guard<std::mutex> hold(g_load_mutex);
  for (const auto& [key, route] : g_interned) route->launched.store(false);
  Probation::get().begin(base, folder, generation, facts, space);
}

// Whether a device on which routes ran while on probation has a fault (probation.h): its code, else 0. Gives the ids of these
// routes, `room` at most, and how many there are.
inline int fault_on_probation(int32_t* ids, size_t room, size_t* count) {
  *count = 0;
  int fault = 0;
  std::lock_guard<std::mutex> hold(g_load_mutex);
  for (const auto& [key, route] : g_interned) {
    if (!route->launched.load()) continue;
    if (*count < room) ids[(*count)++] = route->id;
    try {
      if (!fault) fault = cuda::fault_of(static_cast<int>(key & 0xFF));
    } catch (...) {  // no driver: nothing has run on a GPU
    }
  }
  return fault;
}

// A fork waits until nobody holds one of our locks, so that the child has consistent data and free locks. Nothing here
// allocates, because an exception here would end the program.
inline void before_fork() noexcept {
  g_asleep.before_fork();  // first: our thread may need any of these locks before it can sleep
  g_load_mutex.lock();
  g_drain_buffer.before_fork();
  g_counters.before_fork();
  g_captures.before_fork();
  Probation::get().before_fork();
}

inline void after_fork_in_parent() noexcept {
  Probation::get().after_fork_in_parent();
  g_captures.after_fork_in_parent();
  g_counters.after_fork_in_parent();
  g_drain_buffer.after_fork_in_parent();
  g_load_mutex.unlock();
  g_asleep.after_fork_in_parent();
}

inline void after_fork_in_child() noexcept {
  g_asleep.after_fork_in_child();
  g_watched.close_inherited();
  g_forked_us.store(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  g_at_first_count.store(Asleep::body.load());  // Python learns of the fork with the first count, or when it is asked
  g_beats.store(&g_unseen);                     // the page is the parent's
  Probation::get().after_fork_in_child();
  g_captures.after_fork_in_child();
  cuda::Workspaces::get().after_fork_in_child();
  g_counters.after_fork_in_child();
  g_drain_buffer.after_fork_in_child();
  g_thread_end.set(nullptr);
  t_counters = nullptr;   // the parent's: this thread makes its own with its next call
  untold.store(nullptr);  // the parent tells
  g_load_mutex.unlock();
}

}  // namespace gemmtuned
