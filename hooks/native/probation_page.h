// The page in which a process on probation notes what it does, where hooks/probation.py finds it when the process is dead.
//
// It is made by the first routed call, so that a process which routes nothing, a forked child most of all, leaves nothing.
// It lies in /dev/shm, in blocks that are allocated before it is mapped: a page of a disk or of a network may fault, or keep
// the call waiting for the disk. Nothing here allocates, throws or takes a lock that a fork could leave held; without a page,
// for whatever reason, there is no probation.
#pragma once
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

namespace gemmtuned {

struct ProbationPage {             // hooks/probation.py reads it; behind it, up to the end of the page, is JSON
  std::atomic<int32_t> going_on;   // routed calls
  std::atomic<uint32_t> launched;  // 1 once a route has run on a GPU, whose faults come later
  std::atomic<uint32_t> fault;     // the GPU's, a code of is_fault
  uint32_t unused;
};
static_assert(sizeof(ProbationPage) == 16, "the facts begin there");

inline ProbationPage g_unborn;                            // stands for a page that the next routed call makes
inline std::atomic<ProbationPage*> g_probation{nullptr};  // null where no table is on probation
inline std::atomic<int64_t> g_holders{0};  // of a page; those of a fork's parent never let go in the child

// Text put together in memory of its own; what does not fit makes it useless, and `fits` says so.
template <size_t Room>
class Text {
 public:
  Text& operator<<(std::string_view text) {
    fits_ = fits_ && size_ + text.size() < Room;
    if (!fits_) return *this;
    std::memcpy(text_ + size_, text.data(), text.size());
    text_[size_ += text.size()] = 0;
    return *this;
  }
  Text& operator<<(uint64_t number) {
    char digits[20];
    return *this << std::string_view(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
  }
  void clear() { size_ = 0, text_[0] = 0, fits_ = true; }
  bool fits() const { return fits_; }
  const char* c_str() const { return text_; }
  std::string_view view() const { return {text_, size_}; }

 private:
  char text_[Room] = "";
  size_t size_ = 0;
  bool fits_ = true;
};

// The probation of this process, one at a time. Python calls begin and end, libc what belongs to a fork, a routed call page.
class Probation {
 public:
  static Probation& get() {
    static Probation only;  // trivially destroyed: threads outlive static destructors
    return only;
  }

  // From now on the first routed call makes a page, `folder`/GENERATION-PID-PARENT-TIME. base: the folder above, which nobody
  // else may write. facts: JSON up to the value of its last member, when the process began. space: the inode of the PID
  // namespace that the facts name; 0 when they name none.
  void begin(const char* base, const char* folder, uint64_t generation, const char* facts, uint64_t space) {
    end(false);
    std::lock_guard<std::mutex> hold(mutex_);
    base_.clear(), folder_.clear(), facts_.clear();
    base_ << base, folder_ << folder, facts_ << facts;
    generation_ = generation, space_ = space;
    if (base_.fits() && folder_.fits() && facts_.fits()) g_probation.store(&g_unborn);
  }

  // The page, made if need be. Null where none can be had: then the probation is over.
  ProbationPage* page() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (g_probation.load() == &g_unborn) g_probation.store(page_ = made(), std::memory_order_release);
    return g_probation.load();
  }

  // Ends the probation. Calls that are going on still write to the page: it stays mapped, as memory that nobody reads.
  // keep: the file stays for others to read.
  void end(bool keep) {
    std::lock_guard<std::mutex> hold(mutex_);
    g_probation.store(nullptr);
    if (!page_) return;
    forget();
    spare_ = g_holders.load() == 0 ? page_ : nullptr;  // no earlier call can spoil the count of the next
    page_ = nullptr;
    if (!keep) unlink(path_.c_str());
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }

  // The page is the parent's. The child's own comes with its own first routed call.
  void after_fork_in_child() {
    if (page_) forget();
    page_ = nullptr;
    if (g_probation.load()) g_probation.store(&g_unborn);
    mutex_.unlock();
  }

 private:
  static constexpr size_t kPage = 4096;
  std::mutex mutex_;
  ProbationPage *page_ = nullptr, *spare_ = nullptr;
  Text<1024> base_, folder_;
  Text<1200> path_;
  Text<kPage - sizeof(ProbationPage) - 64> facts_;
  uint64_t generation_ = 0, space_ = 0;

  void forget() { mmap(page_, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0); }

  ProbationPage* made() {
    struct stat there;
    if (space_ && (stat("/proc/self/ns/pid", &there) != 0 || there.st_ino != space_)) return nullptr;
    rlimit files{};  // a file beyond this limit ends the process by a signal
    if (getrlimit(RLIMIT_FSIZE, &files) != 0 || files.rlim_cur < kPage) return nullptr;
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    path_.clear();
    path_ << folder_.view() << "/" << generation_ << "-" << static_cast<uint64_t>(getpid()) << "-"
          << static_cast<uint64_t>(getppid()) << "-"
          << static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
    if (!path_.fits()) return nullptr;
    int file = -1;
    for (int tries = 0; file < 0 && tries < 3; ++tries) {  // another process that ends takes empty folders away
      if (mkdir(base_.c_str(), 0700) == 0) chmod(base_.c_str(), 0700);  // whatever the program's umask
      if (lstat(base_.c_str(), &there) == 0 &&
          (!S_ISDIR(there.st_mode) || there.st_uid != geteuid() || there.st_mode & 022))
        return nullptr;
      if (mkdir(folder_.c_str(), 0700) == 0) chmod(folder_.c_str(), 0700);
      file = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    }
    if (file < 0) return nullptr;
    fchmod(file, 0600);
    struct statfs system{};
    void* address = MAP_FAILED;
    if (fstatfs(file, &system) == 0 && static_cast<uint32_t>(system.f_type) == TMPFS_MAGIC &&
        fallocate(file, 0, 0, kPage) == 0)
      address = mmap(spare_, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | (spare_ ? MAP_FIXED : 0), file, 0);
    close(file);
    if (address == MAP_FAILED) {
      unlink(path_.c_str());
      return nullptr;
    }
    spare_ = nullptr;
    char began[24];
    char* const text = static_cast<char*>(address) + sizeof(ProbationPage);
    Text<kPage - sizeof(ProbationPage)> facts;
    facts << facts_.view() << "\"" << when_it_began(began) << "\"}";
    std::memcpy(text, facts.c_str(), facts.view().size());
    return static_cast<ProbationPage*>(address);
  }

  // Clock ticks from boot to the start of this process: the 22nd field of /proc/self/stat, whose 2nd may hold anything.
  static std::string_view when_it_began(char (&room)[24]) {
    char text[1024];
    const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return "";
    const ssize_t size = read(file, text, sizeof text);
    close(file);
    if (size <= 0) return "";
    std::string_view rest(text, static_cast<size_t>(size));
    rest.remove_prefix(rest.rfind(')') + 1);
    for (int field = 2; field < 22; ++field) {
      const size_t space = rest.find(' ');
      if (space == rest.npos) return "";
      rest.remove_prefix(space + 1);
    }
    const std::string_view began = rest.substr(0, rest.find(' ')).substr(0, sizeof room);
    std::memcpy(room, began.data(), began.size());
    return {room, began.size()};
  }
};

// Holds the page for one call; null where no probation is going on. As long as it is held, the page of the next probation
// gets another address. Who has not been counted in g_holders when `end` looks finds no page any more. Without a probation it
// costs one load.
class HeldPage {
 public:
  enum Unborn { MADE, NONE };  // what happens where no call has needed the page yet

  explicit HeldPage(Unborn unborn) {
    if (g_probation.load(std::memory_order_relaxed) == nullptr) return;
    g_holders.fetch_add(1);
    page_ = g_probation.load();
    if (page_ == &g_unborn) page_ = unborn == MADE ? Probation::get().page() : nullptr;
    if (!page_) g_holders.fetch_sub(1);
  }
  ~HeldPage() {
    if (page_) g_holders.fetch_sub(1);
  }
  HeldPage(const HeldPage&) = delete;
  HeldPage& operator=(const HeldPage&) = delete;
  ProbationPage* operator->() const { return page_; }
  explicit operator bool() const { return page_; }
  ProbationPage* keep() { return std::exchange(page_, nullptr); }  // until it is released
  static void release(ProbationPage*) { g_holders.fetch_sub(1); }

 private:
  ProbationPage* page_ = nullptr;
};

}  // namespace gemmtuned
