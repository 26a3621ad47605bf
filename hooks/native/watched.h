// The one descriptor that the hook holds between two turns: a forked child closes its copy at once.
//
// A program may close every descriptor it finds and open its own under our number. So Python says what /proc has to say of
// it as long as it is ours (hooks/inotify.py), and a child closes nothing else.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace gemmtuned {

class Watched {
 public:
  // -1: there is none. Longer facts are not kept: Python closes the copy of such a one with the child's first count.
  void is(int fd, const char* facts, size_t length) {
    fd_.store(-1);
    if (fd < 0 || length > sizeof facts_) return;
    memcpy(facts_, facts, length);
    length_ = length;
    fd_.store(fd);
  }

  // In a forked child. Allocates nothing.
  void close_inherited() {
    const int fd = fd_.exchange(-1);
    if (fd >= 0 && is_ours(fd)) close(fd);
  }

 private:
  static constexpr size_t kRoom = 1024;
  std::atomic<int> fd_{-1};
  size_t length_ = 0;
  char facts_[kRoom] = {};

  bool is_ours(int fd) const {
    char name[64], now[kRoom + 1];
    snprintf(name, sizeof name, "/proc/thread-self/fdinfo/%d", fd);
    const int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    size_t length = 0;
    for (ssize_t n; length < sizeof now && (n = read(file, now + length, sizeof now - length)) > 0;)
      length += static_cast<size_t>(n);
    close(file);
    return length == length_ && std::equal(now, now + length, facts_);
  }
};

inline Watched g_watched;
inline std::atomic<int64_t> g_forked_us{
    0};  // Unix time at which this process was forked; 0: not since the library is here

}  // namespace gemmtuned
