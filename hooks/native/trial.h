// What a table on probation has done, in a page that outlives the process: hooks/probation.py reads it when that is dead.
#pragma once
#include <atomic>
#include <cstdint>

#include "routes.h"

namespace gemmtuned {

struct TrialPage {  // mirrored in hooks/probation.py
  std::atomic<uint32_t> going_on;  // routed calls
  std::atomic<uint32_t> launched;  // 1 once a route has run on a GPU, whose faults come later
  std::atomic<uint32_t> fault;     // the GPU's, a code of is_fault
};

// Points into a page that hooks/probation.py never unmaps; null while no table is on probation.
inline std::atomic<TrialPage*> g_trial{nullptr};

// Faults of a GPU that a broken kernel leaves behind: an illegal or misaligned address, an illegal instruction, a wrong
// address space, program counter or stack. An assertion (710) is the program's own word.  cuda.h, CUresult.
inline bool is_fault(int code) { return code == 700 || (code >= 714 && code <= 718); }

inline void note_fault(int code) {
  TrialPage* page = g_trial.load(std::memory_order_relaxed);
  if (page && is_fault(code)) page->fault.store(static_cast<uint32_t>(code), std::memory_order_relaxed);
}

// While a routed call is going on.
struct OnTrial {
  TrialPage* const page = g_trial.load(std::memory_order_relaxed);
  OnTrial(Route& route, bool on_host) {
    if (!page) return;
    page->going_on.fetch_add(1, std::memory_order_relaxed);
    if (on_host) return;
    page->launched.store(1, std::memory_order_relaxed);
    route.launched.store(true, std::memory_order_relaxed);
  }
  ~OnTrial() {
    if (page) page->going_on.fetch_sub(1, std::memory_order_relaxed);
  }
  OnTrial(const OnTrial&) = delete;
  OnTrial& operator=(const OnTrial&) = delete;
};

}  // namespace gemmtuned
