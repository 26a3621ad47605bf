// Per-thread counters: the owner adds without a lock, one drainer reads the differences.
//
// A cell's counts only grow and only their owner writes them, so plain relaxed stores are enough and nothing is
// lost or counted twice; the drainer remembers what it has already taken. A thread that outgrows its segment starts
// a larger one and leaves the old one to the drainer; one that ends adds what the drainer has not taken to a segment for
// all such threads, so that threads which come and go cost nothing that grows. Cells also cache the look-up, by epoch.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "beat.h"
#include "first_count.h"
#include "problem.h"
#include "routes.h"

namespace gemmtuned {

constexpr size_t kFirstCells = 64, kMaxCells = 1 << 16;  // a thread keeps at most 65,536 distinct problems
constexpr int kUnfit = 0;  // the bit of `unserved` of operands that a route does not take; others: engines by number
constexpr uint64_t kSampleMask = 63;  // one call in 64 is timed: 40 ns spread over 64 calls

struct alignas(64) Cell {
  Problem key;
  std::atomic<bool> used{false};
  std::atomic<uint16_t> unserved{
      0};  // whose calls a row here might not serve: a bit for each engine's operator, and kUnfit
  std::atomic<uint64_t> calls[3]{};  // by Outcome
  std::atomic<uint64_t> sampled_calls{0}, sampled_ns{0};
  uint64_t seen_calls[3] = {0, 0, 0}, seen_sampled_calls = 0, seen_sampled_ns = 0;  // the drainer alone uses these
  uint64_t epoch = 0;  // the owner alone uses this and what follows
  Found found;

  void add(Outcome outcome) {
    auto& n = calls[outcome];
    n.store(n.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  // The drainer takes the bits away: one that it takes in the middle of this comes with the next such call.
  void note_unserved(int engine) {
    const auto all = static_cast<uint16_t>(unserved.load(std::memory_order_relaxed) | 1u << engine);
    unserved.store(all, std::memory_order_relaxed);
  }
  // Whether to time this call, a miss. Not the first: it may build primitives.
  bool due() const { return (calls[MISS].load(std::memory_order_relaxed) & kSampleMask) == 1; }
  void add_sample(uint64_t ns) {
    sampled_ns.store(sampled_ns.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
    sampled_calls.store(sampled_calls.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
};

struct Segment {
  explicit Segment(size_t size) : mask(size - 1), cells(size) {}
  const size_t mask;
  size_t filled = 0;
  std::vector<Cell> cells;
  std::atomic<bool> closed{false};  // its owner will not write here again
  bool left_full = false;           // see Counters::make_room
};

struct Record {  // what drain() gives; mirrored in hooks/native/records.py
  Problem key;
  uint64_t calls[3], sampled_calls, sampled_ns, unserved;
};

class Counters;

// One thread's counters. `depth` is above 0 inside a GEMM, or an op that counts itself, whose inner GEMMs do not count.
struct ThreadCounters {
  int depth = 0;
  const unsigned beat_line = g_next_beat_line.fetch_add(1, std::memory_order_relaxed);  // in the page of beats
  std::atomic<const RouteTable*> reading{nullptr};  // hazard pointer of a look-up in progress
  Segment* current;

  explicit ThreadCounters(Segment* first) : current(first) {}
};

class Counters {
 public:
  std::atomic<uint64_t> dropped{0};

  ThreadCounters* join() try {
    auto segment = std::make_unique<Segment>(kFirstCells);
    auto thread = std::make_unique<ThreadCounters>(segment.get());
    std::lock_guard<std::mutex> hold(mutex_);
    threads_.reserve(threads_.size() + 1);
    segments_.push_back(segment.get());
    threads_.push_back(thread.get());
    segment.release();
    return thread.release();
  } catch (const std::bad_alloc&) {
    return nullptr;  // the program is short of memory, which is not ours to report: the call is not counted
  }

  void leave(ThreadCounters* thread) {
    std::lock_guard<std::mutex> hold(mutex_);
    Segment* const mine = thread->current;
    std::erase(threads_, thread);
    delete thread;
    try {
      for (Cell& c : mine->cells)
        if (c.used.load(std::memory_order_relaxed)) bequeath(c);
      std::erase(segments_, mine);
      delete mine;
    } catch (const std::bad_alloc&) {  // the drainer takes the rest, cell by cell
      mine->closed.store(true, std::memory_order_release);
    }
  }

  // The thread's cell for this key, or null when it already holds too many distinct ones.
  Cell* cell(ThreadCounters& thread, const Problem& key) {
    Segment* s = thread.current;
    for (size_t i = key.hash();; ++i) {
      Cell& c = s->cells[i & s->mask];
      if (!c.used.load(std::memory_order_relaxed)) break;
      if (c.key == key) return &c;
    }
    return add_cell(thread, key);
  }

  // Adds a record for each cell with new counts. If it throws bad_alloc, the rest comes with the next drain.
  void drain(std::vector<Record>& out) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (size_t i = 0; i < segments_.size();) {
      Segment* s = segments_[i];
      const bool closed = s->closed.load(std::memory_order_acquire);  // read before its cells
      for (Cell& c : s->cells) {
        if (!c.used.load(std::memory_order_acquire)) continue;
        out.emplace_back();
        if (!take(c, out.back())) out.pop_back();
      }
      if (closed) {
        left_full_ -= s->left_full;
        delete s;
        segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }

  // True when no thread is inside a look-up in `table`.
  bool unread(const RouteTable* table) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto* t : threads_)
      if (t->reading.load(std::memory_order_seq_cst) == table) return false;
    return true;
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }

  // In a forked child: only the forking thread is left, and it starts from nothing with its next call. We leave the parent's
  // counters alone: at the fork the other threads may have been anywhere, and this one in a call. Allocates nothing.
  void after_fork_in_child() {
    mutex_.unlock();
    new (&segments_) std::vector<Segment*>;
    new (&threads_) std::vector<ThreadCounters*>;
    left_ = nullptr;
    left_full_ = 0;
    dropped.store(0);
  }

 private:
  static constexpr size_t kMostFull = 2;
  std::mutex mutex_;
  std::vector<Segment*> segments_;
  std::vector<ThreadCounters*> threads_;
  Segment* left_ = nullptr;  // of threads that have ended; one of segments_, written under the mutex alone
  size_t left_full_ = 0;     // closed ones of the largest size, which the drainer has not taken yet

  // Adds what the drainer has not seen of a cell to `left_`, and marks it seen.
  void bequeath(Cell& c) {
    if (!left_ || left_->filled * 2 > left_->mask) make_room();
    Record rest;
    if (!take(c, rest)) return;
    const size_t most = 2 * kMaxCells;
    size_t i = rest.key.hash();
    for (;; ++i) {
      Cell& heir = left_->cells[i & left_->mask];
      const bool used = heir.used.load(std::memory_order_relaxed);
      if (used && !(heir.key == rest.key)) continue;
      if (!used && left_->filled * 2 > left_->mask && left_->cells.size() >= most) {
        dropped.fetch_add(rest.calls[0] + rest.calls[1] + rest.calls[2], std::memory_order_relaxed);
        return;
      }
      if (!used) heir.key = rest.key, ++left_->filled;
      for (int o = 0; o < 3; ++o) heir.calls[o].fetch_add(rest.calls[o], std::memory_order_relaxed);
      heir.unserved.fetch_or(static_cast<uint16_t>(rest.unserved), std::memory_order_relaxed);
      heir.sampled_ns.fetch_add(rest.sampled_ns, std::memory_order_relaxed);
      heir.sampled_calls.fetch_add(rest.sampled_calls, std::memory_order_relaxed);
      heir.used.store(true, std::memory_order_release);
      return;
    }
  }

  // Makes a larger `left_`, or a new one after the largest. The drainer empties and frees the old one, once a second; if it
  // does not run, counts that exceed three of the largest are dropped. Throws bad_alloc.
  void make_room() {
    const bool largest = left_ && left_->cells.size() >= 2 * kMaxCells;
    if (largest && left_full_ >= kMostFull) return;
    auto next = std::make_unique<Segment>(left_ && !largest ? left_->cells.size() * 2 : kFirstCells);
    segments_.reserve(segments_.size() + 1);
    left_full_ += largest;
    if (left_) left_->left_full = largest, left_->closed.store(true, std::memory_order_release);
    left_ = next.release();
    segments_.push_back(left_);
  }

  static bool take(Cell& c, Record& r) {
    uint64_t any = 0;
    r.key = c.key;
    r.sampled_calls = c.sampled_calls.load(std::memory_order_acquire);
    r.sampled_ns = c.sampled_ns.load(std::memory_order_relaxed);
    for (int o = 0; o < 3; ++o) {
      const uint64_t now = c.calls[o].load(std::memory_order_relaxed);
      any |= r.calls[o] = now - c.seen_calls[o];
      c.seen_calls[o] = now;
    }
    r.unserved = any ? c.unserved.exchange(0, std::memory_order_relaxed) : 0;
    std::swap(c.seen_sampled_calls, r.sampled_calls);
    std::swap(c.seen_sampled_ns, r.sampled_ns);
    r.sampled_calls = c.seen_sampled_calls - r.sampled_calls;
    r.sampled_ns = c.seen_sampled_ns - r.sampled_ns;
    return any || r.sampled_calls;
  }

  Segment* grow(size_t size) try {
    auto larger = std::make_unique<Segment>(size);
    std::lock_guard<std::mutex> hold(mutex_);
    segments_.push_back(larger.get());
    return larger.release();
  } catch (const std::bad_alloc&) {
    dropped.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  Cell* add_cell(ThreadCounters& thread, const Problem& key) {
    Segment* s = thread.current;
    if (s->filled * 2 > s->mask) {
      if (s->cells.size() >= 2 * kMaxCells) {
        dropped.fetch_add(1, std::memory_order_relaxed);
        return nullptr;
      }
      Segment* larger = grow(s->cells.size() * 2);
      if (!larger) return nullptr;
      thread.current = larger;
      s->closed.store(true, std::memory_order_release);
      s = larger;
    }
    size_t i = key.hash();
    while (s->cells[i & s->mask].used.load(std::memory_order_relaxed)) ++i;
    Cell& c = s->cells[i & s->mask];
    c.key = key;
    ++s->filled;
    c.used.store(true, std::memory_order_release);
    first_count();
    return &c;
  }
};

}  // namespace gemmtuned
