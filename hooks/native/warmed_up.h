// The operators of libraries that have run in this process, and the problems that they ran at. At its first call with new
// sizes a library may compile, load what it compiled, measure, or wait for the device, and no graph capture allows that.
#pragma once
#include <atomic>
#include <cstdint>

#include "routes.h"

namespace gemmtuned {

// A set of hashes without a lock. Where there is no room for another, an old one is overwritten: the operator that it stands
// for serves no capture until it is called outside of one again, which each warm-up does.
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

// Whether the route may serve this call: always outside of captures; an operator serves a capture only if it has run at this
// problem outside of one.
inline bool may_serve_capture(const Route& route, const Problem& p) {
  return C10_LIKELY(!(p.flags & GRAPH)) || !route.op || g_warmed_up.has(route, p);
}

// What the first call of a problem under a table runs. That is `found`, with one exception, in programs that capture graphs:
// outside of a capture, if an operator would serve captures of this problem and has not run at it yet, this call runs that
// operator, so that the next capture can have it (may_serve_capture).
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
