// What a routed call notes while its table is on probation.
#pragma once
#include "routes.h"
#include "trial_page.h"

namespace gemmtuned {

// Faults of a GPU that a broken kernel leaves behind: an illegal or misaligned address, an illegal instruction, a wrong
// address space, program counter or stack. An assertion (710) is the program's own word.  cuda.h, CUresult.
inline bool is_fault(int code) { return code == 700 || (code >= 714 && code <= 718); }

inline void note_fault(int code) {
  TrialPage* page = g_trial.load(std::memory_order_relaxed);
  if (page && is_fault(code)) page->fault.store(static_cast<uint32_t>(code), std::memory_order_relaxed);
}

// While a routed call is going on.
struct OnTrial {
  TrialPage* const page;
  OnTrial(Route& route, bool on_host) : page(current()) {
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

 private:
  static TrialPage* current() {
    TrialPage* const page = g_trial.load(std::memory_order_relaxed);
    return C10_LIKELY(page != &g_unborn) ? page : Trial::get().page();
  }
};

}  // namespace gemmtuned
