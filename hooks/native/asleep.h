// Forks by C code, as servers that embed Python make them: they begin while the hook's thread sleeps.
//
// Python repairs its lock (the GIL) in the child of os.fork. In the child of fork() it stays as it was: held for ever by a
// thread of ours that is not there, or asked for by it, whereupon the first Python thread that lets go waits for ever.
// So our thread holds a gate while it has the GIL or may ask for it, and such a fork waits until the gate is free.
#pragma once
#include <dlfcn.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>

namespace gemmtuned {

using ThreadBody = void* (*)(void*);

// What a fork takes of Python, found at run time: the library is built for no one Python.
struct Interpreter {
  void* (*current)() = find<void* (*)()>("PyThreadState_GetUnchecked", "_PyThreadState_UncheckedGet");  // until 3.12
  void* (*of_this_thread)() = find<void* (*)()>("PyGILState_GetThisThreadState");
  void* (*release)() = find<void* (*)()>("PyEval_SaveThread");
  void (*take)(void*) = find<void (*)(void*)>("PyEval_RestoreThread");
  void* (*main)() = find<void* (*)()>("PyInterpreterState_Main");
  void* (*add_thread)(void*) = find<void* (*)(void*)>("PyThreadState_New");
  void (*clear)(void*) = find<void (*)(void*)>("PyThreadState_Clear");
  void (*remove_this)() = find<void (*)()>("PyThreadState_DeleteCurrent");
  bool tells_threads_apart = is_at_least(3, 12);  // before, `current` is of the thread that holds the lock, whichever

  template <class Function>
  static Function find(const char* name, const char* older = nullptr) {
    void* const found = dlsym(RTLD_DEFAULT, name);
    return reinterpret_cast<Function>(found || !older ? found : dlsym(RTLD_DEFAULT, older));
  }
  static bool is_at_least(unsigned major, unsigned minor) {
    const auto* const version = find<const unsigned long*>("Py_Version");  // 0x030c01f0 is 3.12.1; 3.11 is its first
    return version && *version >> 16 >= (major << 8 | minor);
  }
  // Until 3.11 the child of a fork waits for ever where another thread has Python's list of threads locked meanwhile, which
  // one that C begins does without the GIL.
  bool locks_its_threads() const { return !tells_threads_apart && main && add_thread && clear && remove_this && take; }

  // Whether this thread holds it. Until 3.11 not seen for threads of sub-interpreters.
  bool is_held() const {
    if (!current || !of_this_thread || !release || !take) return false;
    void* const thread = current();
    return thread && (tells_threads_apart || thread == of_this_thread());
  }
};

// Our thread's hold on the gate, which the end of the thread lets go.
struct Awake {
  bool is_held = false;
  void enter();
  void leave();
  ~Awake() { leave(); }
};
inline thread_local Awake t_awake;
inline thread_local int t_python_forks = 0;          // how many forks by Python this thread is in: a hook may fork, too
inline thread_local bool t_fork_is_pythons = false;  // the innermost one
inline thread_local bool t_holds_gate = false;       // for the outermost one
inline thread_local bool t_keeps_out = false;        // the same: no thread of ours joins Python's

class Asleep {
 public:
  // Until there is something to read from the descriptor (-1: none), somebody wakes, or the time is over. The GIL is not
  // held. seen: how many wakes the caller knows of; one that came since ends the sleep at once.
  int sleep(int fd, int timeout_ms, uint64_t* seen) {
    t_awake.leave();
    int ready = 0;
    {
      std::unique_lock<std::mutex> hold(mutex_);
      const auto woken = [&] { return wakes_ != *seen; };
      if (fd < 0) {
        woken_.wait_for(hold, std::chrono::milliseconds(timeout_ms), woken);
      } else if (!woken()) {
        hold.unlock();
        pollfd entry{fd, POLLIN, 0};
        ready = poll(&entry, 1, timeout_ms);
        hold.lock();
      }
      *seen = wakes_;
    }
    t_awake.enter();
    return ready;
  }

  void wake() {
    std::lock_guard<std::mutex> hold(mutex_);
    wakes_++;
    woken_.notify_all();
  }

  // The body of our thread, which is awake at first.
  static void* run(void* ticket) {
    t_awake.enter();
    return as_pythons(body.load(), ticket);
  }

  // Python's first hook of a fork: where our thread sleeps, it does so until the last one, and none joins Python's.
  void python_forks() {
    if (t_python_forks++ > 0) return;
    t_keeps_out = python_.locks_its_threads();
    if (t_keeps_out) joining_.lock();
    t_holds_gate = gate_.try_lock();
  }
  // Whether that is so for the fork by Python that this thread is in.
  static bool is_held() { return t_python_forks > 0 && t_holds_gate; }
  void release_gate() {
    if (t_holds_gate) gate_.unlock();
    if (t_keeps_out) joining_.unlock();
    t_holds_gate = t_keeps_out = false;
  }
  void python_has_forked() {
    if (t_python_forks > 0 && --t_python_forks == 0) release_gate();
  }

  void before_fork() {
    t_fork_is_pythons = t_python_forks > 0;
    if (t_fork_is_pythons) return;  // our thread sleeps, or Python's own hooks have waited for it
    const auto wait = std::chrono::milliseconds(is_stuck_.load() ? 20 : 500);
    t_holds_gate = gate_.try_lock();
    if (!t_holds_gate && python_.is_held()) {
      void* const thread = python_.release();
      t_holds_gate = gate_.try_lock_for(wait);
      python_.take(thread);
    } else if (!t_holds_gate) {
      t_holds_gate = gate_.try_lock_for(wait);
    }
    is_stuck_.store(!t_holds_gate);
  }
  void after_fork_in_parent() {
    if (!t_fork_is_pythons) release_gate();
  }
  void after_fork_in_child() {  // our thread, which may have held any of these, stayed in the parent
    new (&gate_) std::timed_mutex;
    new (&joining_) std::mutex;
    new (&mutex_) std::mutex;
    new (&woken_) std::condition_variable;
    t_holds_gate = t_keeps_out = false;
    if (t_fork_is_pythons) --t_python_forks;  // Python's last hook is called in the parent alone
  }

  static inline std::atomic<ThreadBody> body{nullptr};

 private:
  friend struct Awake;

  // Calls the body in one of Python's threads, which this one becomes while nobody forks by Python.
  static void* as_pythons(ThreadBody called, void* ticket);

  const Interpreter python_;
  std::timed_mutex gate_;
  std::mutex joining_;  // Python's list of threads, by one of ours
  std::atomic<bool> is_stuck_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
  uint64_t wakes_ = 0;
};

inline Asleep& g_asleep = *new Asleep;  // never destroyed: our thread may outlive static objects

inline void* Asleep::as_pythons(ThreadBody called, void* ticket) {
  const Interpreter& python = g_asleep.python_;
  if (!python.locks_its_threads()) return called(ticket);
  void* thread = nullptr;
  {
    std::lock_guard<std::mutex> hold(g_asleep.joining_);
    thread = python.add_thread(python.main());
  }
  if (!thread) return called(ticket);  // no memory: Python says so itself
  python.take(thread);
  void* const result = called(ticket);
  python.clear(thread);
  python.remove_this();
  return result;
}

inline void Awake::enter() {
  if (!is_held) g_asleep.gate_.lock();
  is_held = true;
}
inline void Awake::leave() {
  if (is_held) g_asleep.gate_.unlock();
  is_held = false;
}

}  // namespace gemmtuned
