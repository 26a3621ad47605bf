// The part of the C interface that is about the hook's one thread; hooks/native/our_thread.py calls it.
#pragma once
#include <unistd.h>

#include "asleep.h"
#include "first_count.h"

using namespace gemmtuned;

namespace gemmtuned {

inline std::atomic<pid_t> g_begins_soon_in{0};  // the process: a child has its parent's pending calls

inline int begin_now(void*) noexcept {
  if (g_begins_soon_in.exchange(0) == getpid()) first_count();
  return 0;
}

}  // namespace gemmtuned

extern "C" {

// Has `body` run in a thread of its own with the next problem that any thread meets for the first time; null: not.
// Whether there was one before, and no problem has come yet.
int gt_at_first_count(ThreadBody body) noexcept {
  if (body) Asleep::body.store(body);
  return g_at_first_count.exchange(body) != nullptr;
}

// What a thread of ours is to begin with, so that it runs `body` and forks by C code wait for it.
ThreadBody gt_thread(ThreadBody body) noexcept {
  Asleep::body.store(body);
  return Asleep::run;
}

// Sleeps; see Asleep::sleep.
int gt_sleep(int fd, int timeout_ms, uint64_t* seen) noexcept { return g_asleep.sleep(fd, timeout_ms, seen); }

// Ends all such sleeps, or the next one of those who sleep not.
void gt_wake() noexcept { g_asleep.wake(); }

// Whether this thread's next fork is by Python, which has waited for our thread in its own way.
void gt_python_forks(int is_so) noexcept { t_python_forks = is_so != 0; }

// Our thread, which has ended for a fork by Python, begins again once the forking thread runs Python code: from 3.13 on
// Python counts the threads of a parent after all its hooks of the fork, and warns of a second one.
void gt_begin_soon() noexcept { g_begins_soon_in.store(getpid()); }

// Python's last of these hooks, called by C: nothing written in Python runs between it and the count.
void gt_after_python_fork() noexcept {
  if (g_begins_soon_in.load() != getpid()) return;
  using Add = int (*)(int (*)(void*), void*);
  static const Add add = Interpreter::find<Add>("Py_AddPendingCall");
  if (!add || add(begin_now, nullptr) != 0) begin_now(nullptr);
}

}  // extern "C"
