// The hook's one thread in a forked child: begun by its first count, so that a child which counts nothing has none.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <atomic>

#include "asleep.h"

namespace gemmtuned {

inline std::atomic<ThreadBody> g_at_first_count{nullptr};

// Called where a thread meets a problem for the first time; holds no lock of ours.
inline void first_count() {
  if (!g_at_first_count.load(std::memory_order_relaxed)) return;
  const ThreadBody body = g_at_first_count.exchange(nullptr);
  if (!body) return;
  // The host's signals are not for this thread; those that a fault of its own raises are (hooks/background.py: FAULTS).
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_t thread;
  pthread_create(&thread, nullptr, Asleep::run, nullptr);  // without a thread the counts are written at the end
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace gemmtuned
