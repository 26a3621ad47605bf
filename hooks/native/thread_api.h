// The part of the C interface that is about the hook's one thread; hooks/native/our_thread.py calls it.
#pragma once
#include <unistd.h>

#include "asleep.h"
#include "first_count.h"
#include "watched.h"

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

// What a forked child closes: see watched.h.
void gt_watched(int fd, const char* facts, size_t length) noexcept { g_watched.is(fd, facts, length); }

// Unix time in microseconds at which this process was forked; 0 where it was not, since the library is here.
int64_t gt_forked_us() noexcept { return g_forked_us.load(); }

// Python's first hook of a fork, called by C: no exception of a handler's can come in between.
void gt_before_python_fork() noexcept { g_asleep.python_forks(); }

// Whether our thread sleeps until the fork by Python that this thread is in is over.
int gt_is_held() noexcept { return Asleep::is_held(); }

// It may wake up nevertheless.
void gt_release_gate() noexcept { g_asleep.release_gate(); }

// Our thread, which has ended for a fork by Python, begins again once the forking thread runs Python code: from 3.13 on
// Python counts the threads of a parent after all its hooks of the fork, and warns of a second one.
void gt_begin_soon() noexcept { g_begins_soon_in.store(getpid()); }

// Python's last of these hooks, called by C: nothing written in Python runs between it and the count.
void gt_after_python_fork() noexcept {
  g_asleep.python_has_forked();
  if (g_begins_soon_in.load() != getpid()) return;
  using Add = int (*)(int (*)(void*), void*);
  static const Add add = Interpreter::find<Add>("Py_AddPendingCall");
  if (!add || add(begin_now, nullptr) != 0) begin_now(nullptr);
}

}  // extern "C"
