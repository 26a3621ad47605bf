// What every CUDA graph holds, so that a replay counts for all its launches.
//
// A launch that is recorded into a graph is counted once as a call, when it is recorded, and noted here under the id of its
// capture. A replay adds to one number; the drainer multiplies. Graphs are captured rarely, so a mutex does.
#pragma once
#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "counters.h"

namespace gemmtuned {

class Captures {
 public:
  static constexpr int NOBODY = -1;

  // A graph is being captured under this id, and the driver will report its end: only of such is anything kept.
  void expect(uint64_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (id && captures_.size() < kMost) captures_[id];
  }

  // by: the number of the engine's operator that made the launch, 0 for any other, NOBODY where no route may serve it.
  void add(uint64_t id, const Problem& key, Outcome outcome, int by = 0) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto capture = captures_.find(id);
    if (capture == captures_.end()) return;
    auto& entries = capture->second.entries;
    const auto same = [&](const Entry& e) { return e.outcome == outcome && e.by == by && e.key == key; };
    const auto found = std::find_if(entries.begin(), entries.end(), same);
    if (found != entries.end()) ++found->launches;
    else entries.push_back({key, outcome, 1, 0, by});
  }

  void replayed(uint64_t id, uint64_t times) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto found = captures_.find(id);
    if (found != captures_.end()) found->second.replays += times;
  }

  // The graph is gone: once its replays are drained nothing is kept.
  void forget(uint64_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto found = captures_.find(id);
    if (found != captures_.end()) found->second.gone = true;
  }

  // How many launches of graphs that live missed when they were captured, and would now run another kernel: what `look_up`
  // finds. Captured anew, those that stay with torch's or an engine's own would run that again.
  template <class LookUp>
  uint64_t stale(const LookUp& look_up) {
    std::lock_guard<std::mutex> hold(mutex_);
    uint64_t launches = 0;
    for (const auto& [id, capture] : captures_)
      for (const Entry& e : capture.entries)
        if (!capture.gone && e.outcome == MISS && is_served(e.by, look_up(e.key))) launches += e.launches;
    return launches;
  }

  // Drains as Counters::drain does. A graph replays the kernel that was captured, while the table may have changed since.
  // A launch may have been a miss when it was captured, and the table in use may now say that torch's own kernel, or the
  // engine's, is best. Then the replay runs the kernel that the table names, and counts as a hit, as a call outside of
  // graphs does.
  template <class LookUp>
  void drain(std::vector<Record>& out, const LookUp& look_up) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto capture = captures_.begin(); capture != captures_.end();) {
      auto& [entries, replays, gone] = capture->second;
      for (Entry& e : entries) {
        if (e.seen == replays) continue;
        const Found found = e.outcome == MISS ? look_up(e.key) : Found{};
        const Outcome outcome = is_what_runs(e.by, found) ? found.outcome : e.outcome;
        // The bit says only that some route might not serve the launch. Whether the table in use has a solution that may
        // not serve it is decided by the reader of the record (hooks/unserved.py).
        const bool unserved_by_some = outcome == MISS && e.by != 0;
        const uint64_t unserved = unserved_by_some ? uint64_t{1} << (e.by == NOBODY ? kUnfit : e.by) : 0;
        out.push_back({e.key, {}, 0, 0, unserved});
        out.back().calls[outcome] = (replays - e.seen) * e.launches;
        e.seen = replays;
      }
      capture = gone ? captures_.erase(capture) : std::next(capture);
    }
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child() {
    captures_.clear();  // a child cannot replay its parent's graphs
    mutex_.unlock();
  }

 private:
  static constexpr size_t kMost = 1 << 14;
  struct Entry {
    Problem key;
    Outcome outcome;
    uint64_t launches, seen;  // seen: replays that were drained
    int by;
  };
  // Whether the answer to a launch of torch's or of an engine's own is to run that.
  static bool is_what_runs(int by, const Found& found) {
    return found.outcome != MISS && (found.route->code == STOCK || (by > 0 && found.engines.are_as_good(by)));
  }
  static bool is_served(int by, const Found& found) {
    if (found.outcome == MISS || found.route->code == STOCK) return false;  // the latter is what runs already
    return by == 0 || (by != NOBODY && found.engines.lost(by));
  }
  struct Capture {
    std::vector<Entry> entries;
    uint64_t replays = 0;
    bool gone = false;
  };
  std::mutex mutex_;
  std::unordered_map<uint64_t, Capture> captures_;
};

}  // namespace gemmtuned
