// Whether a routed call is going on, while a table is on probation: a number in a page that outlives the process.
#pragma once
#include <atomic>
#include <cstdint>

namespace gemmtuned {

// Points into a page that hooks/probation.py never unmaps; null while no table is on probation.
inline std::atomic<std::atomic<uint32_t>*> g_trial{nullptr};

struct OnTrial {
  std::atomic<uint32_t>* const going_on = g_trial.load(std::memory_order_relaxed);
  OnTrial() {
    if (going_on) going_on->fetch_add(1, std::memory_order_relaxed);
  }
  ~OnTrial() {
    if (going_on) going_on->fetch_sub(1, std::memory_order_relaxed);
  }
  OnTrial(const OnTrial&) = delete;
  OnTrial& operator=(const OnTrial&) = delete;
};

}  // namespace gemmtuned
