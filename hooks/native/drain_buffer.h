// What was counted up to one moment, handed out piece by piece.
//
// All of it is taken at once: a program that counts faster than Python reads would else be read for ever.
#pragma once
#include <algorithm>
#include <mutex>
#include <vector>

#include "counters.h"

namespace gemmtuned {

class DrainBuffer {
 public:
  // Copies up to `room` records; fewer: there are no more. anew: first `take_all` adds what was counted since the last time
  // to what nobody has fetched. Without memory for all, the rest stays where it is counted.
  template <class TakeAll>
  size_t fetch(Record* out, size_t room, bool anew, const TakeAll& take_all) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (anew) try {
        take_all(records_);
      } catch (const std::bad_alloc&) {}
    const size_t n = std::min(room, records_.size() - next_);
    std::copy_n(records_.begin() + static_cast<std::ptrdiff_t>(next_), n, out);
    next_ += n;
    if (n < room) std::vector<Record>().swap(records_), next_ = 0;
    return n;
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child() {
    records_.clear(), next_ = 0;  // the parent's
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::vector<Record> records_;
  size_t next_ = 0;
};

}  // namespace gemmtuned
