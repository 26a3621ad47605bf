// What a routed call notes while its table is on probation.
#pragma once
#include "routes.h"
#include "probation_page.h"

namespace gemmtuned {

// Faults of a GPU that a broken kernel leaves behind: an illegal or misaligned address, an illegal instruction, a wrong
// address space, program counter or stack. An assertion (710) is the program's own word.  cuda.h, CUresult.
inline bool is_fault(int code) { return code == 700 || (code >= 714 && code <= 718); }

inline void note_fault(int code) {
  if (!is_fault(code)) return;
  if (const HeldPage page(HeldPage::NONE); page)
    page->fault.store(static_cast<uint32_t>(code), std::memory_order_relaxed);
}

// While a routed call is going on.
class OnProbation {
 public:
  OnProbation(Route& route, bool on_host) : page_(HeldPage::MADE) {
    if (C10_LIKELY(!page_)) return;
    page_->going_on.fetch_add(1, std::memory_order_relaxed);
    if (on_host) return;
    page_->launched.store(1, std::memory_order_relaxed);
    route.launched.store(true, std::memory_order_relaxed);
  }
  ~OnProbation() {
    if (C10_UNLIKELY(static_cast<bool>(page_))) page_->going_on.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  const HeldPage page_;
};

}  // namespace gemmtuned
