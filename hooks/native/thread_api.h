// The part of the C interface that is about the hook's one thread; hooks/native/our_thread.py calls it.
#pragma once
#include "asleep.h"
#include "first_count.h"

using namespace gemmtuned;

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

// Whether this thread is about to fork by Python, which has waited for our thread in its own way.
void gt_python_forks(int is_so) noexcept { t_python_forks = is_so != 0; }

}  // extern "C"
