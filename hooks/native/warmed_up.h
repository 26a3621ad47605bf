// Which operators have run here, and at which problems: a library may compile at its first call with new sizes, and load what
// it compiled, measure, or wait for the device, which no graph capture allows.
#pragma once
#include <atomic>
#include <cstdint>

#include "routes.h"

namespace gemmtuned {

// A set of hashes without a lock. Where there is no room for another, an old one gives way: the operator that it stands for
// serves no capture until it is called outside of one again, which each warm-up does.
class WarmedUp {
 public:
  bool has(const Route& route, const Problem& p) const {
    const uint64_t wanted = key_of(route, p);
    for (size_t i = 0; i < kTries; ++i) {
      const uint64_t kept = slots_[(wanted + i) % kSlots].load(std::memory_order_relaxed);
      if (kept == wanted) return true;
      if (!kept) return false;
    }
    return false;
  }

  void add(const Route& route, const Problem& p) {
    const uint64_t wanted = key_of(route, p);
    for (size_t i = 0; i < kTries; ++i) {
      uint64_t kept = 0;
      auto& slot = slots_[(wanted + i) % kSlots];
      if (slot.load(std::memory_order_relaxed) == wanted) return;
      if (slot.compare_exchange_strong(kept, wanted, std::memory_order_relaxed) || kept == wanted) return;
    }
    const size_t turn = given_way_.fetch_add(1, std::memory_order_relaxed);
    slots_[(wanted + turn % kTries) % kSlots].store(wanted, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kSlots = 1 << 13, kTries = 64;
  static uint64_t key_of(const Route& route, Problem p) {
    p.flags &= static_cast<uint8_t>(~GRAPH);
    return (p.hash() ^ route.op->id()) | 1;  // 0 is an empty slot
  }
  std::atomic<uint64_t> slots_[kSlots]{};
  std::atomic<size_t> given_way_{0};
};
inline WarmedUp& g_warmed_up = *new WarmedUp;
inline std::atomic<bool> g_captures_graphs{false};  // whether a product of this program was ever captured

// Whether the route may serve this call: an operator serves a capture only where it has run outside of one.
inline bool may_serve_capture(const Route& route, const Problem& p) {
  return C10_LIKELY(!(p.flags & GRAPH)) || !route.op || g_warmed_up.has(route, p);
}

// What serves a call outside of captures, the first at this problem with this table: `found`, or the operator that serves
// captures of it and has not run yet, so that it has before the next one. Only in a program that captures graphs.
template <class LookUp>
Found before_captures(const Problem& key, const Found& found, const LookUp& look_up) {
  if (key.flags & GRAPH || !g_captures_graphs.load(std::memory_order_relaxed)) return found;
  Problem captured = key;
  captured.flags |= GRAPH;
  const Found in_graphs = look_up(captured);
  const Route* const route = in_graphs.route;
  return route && route->op && !g_warmed_up.has(*route, key) ? in_graphs : found;
}

}  // namespace gemmtuned
