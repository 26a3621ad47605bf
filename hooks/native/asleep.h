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
  void* (*let_go)() = find<void* (*)()>("PyEval_SaveThread");
  void (*take)(void*) = find<void (*)(void*)>("PyEval_RestoreThread");

  template <class Function>
  static Function find(const char* name, const char* older = nullptr) {
    void* const found = dlsym(RTLD_DEFAULT, name);
    return reinterpret_cast<Function>(found || !older ? found : dlsym(RTLD_DEFAULT, older));
  }
  bool is_held() const {
    return current && of_this_thread && let_go && take && current() && current() == of_this_thread();
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
inline thread_local bool t_python_forks = false;  // this thread is forking by Python, which has waited for ours

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
    return body.load()(ticket);
  }

  void before_fork() {
    if (t_python_forks) return;
    const auto wait = std::chrono::milliseconds(is_stuck_.load() ? 20 : 500);
    is_held_ = gate_.try_lock();
    if (!is_held_ && python_.is_held()) {
      void* const thread = python_.let_go();
      is_held_ = gate_.try_lock_for(wait);
      python_.take(thread);
    } else if (!is_held_) {
      is_held_ = gate_.try_lock_for(wait);
    }
    is_stuck_.store(!is_held_);
  }
  void after_fork_in_parent() {
    if (t_python_forks || !is_held_) return;
    is_held_ = false;
    gate_.unlock();
  }
  void after_fork_in_child() {  // our thread, which may have held any of these, stayed in the parent
    new (&gate_) std::timed_mutex;
    new (&mutex_) std::mutex;
    new (&woken_) std::condition_variable;
    is_held_ = false;
  }

  static inline std::atomic<ThreadBody> body{nullptr};

 private:
  friend struct Awake;

  const Interpreter python_;
  std::timed_mutex gate_;
  bool is_held_ = false;  // by a fork; one at a time, since the gate is held
  std::atomic<bool> is_stuck_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
  uint64_t wakes_ = 0;
};

inline Asleep& g_asleep = *new Asleep;  // never destroyed: our thread may outlive static objects

inline void Awake::enter() {
  if (!is_held) g_asleep.gate_.lock();
  is_held = true;
}
inline void Awake::leave() {
  if (is_held) g_asleep.gate_.unlock();
  is_held = false;
}

}  // namespace gemmtuned
