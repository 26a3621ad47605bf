// Scratch memory on GPUs, and whose it is.
//
// Launches that reduce over K need some. Launches of one stream run one after another and share one; every stream has its
// own, and so has every stream of every graph capture: a graph may be replayed beside anything. Every launch leaves the
// counters zero, so what one owner had serves the next.
#pragma once
#include <atomic>
#include <chrono>
#include <list>
#include <mutex>
#include <new>

#include "blame.h"
#include "driver.h"

namespace gemmtuned::cuda {

// A device that had no memory for us is not asked again for some seconds. An allocation that fails is slow, since torch's
// allocator and the driver first free all that they can, and every call would wait for one.
class Shortage {
 public:
  static bool lasts(int device) {
    const int64_t until = until_[slot(device)].load(std::memory_order_relaxed);
    return until && now() < until;
  }
  static void begin(int device) { until_[slot(device)].store(now() + kLasts, std::memory_order_relaxed); }

 private:
  static constexpr int64_t kLasts = 5'000'000'000;  // ns
  static inline std::atomic<int64_t> until_[kMostDevices]{};
  static size_t slot(int device) { return static_cast<size_t>(device) % kMostDevices; }
  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
};

class Workspaces {
 public:
  static Workspaces& get() {
    static auto* all = new Workspaces;
    return *all;
  }

  // At least `bytes` for launches of this stream, as part of this capture; the counters in front are zero. Throws Declined
  // where there is none to be had.
  Address find(int device, Handle stream, const Capture& capture, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(stream) == 2) throw Declined("the handle of each thread's own default stream");
    const Owner owner{device, capture.id ? reinterpret_cast<uintptr_t>(stream) : key_of(stream), capture.id};
    thread_local Known known[8];  // what this thread used last: no lock in a call, whatever streams take turns
    thread_local unsigned next = 0;
    for (const Known& k : known)
      if (k.memory && k.owner == owner && k.bytes >= bytes) return k.memory;
    const Slot& slot = slot_of(owner, capture, bytes);
    known[next++ % 8] = {owner, slot.memory, slot.bytes};
    return slot.memory;
  }

  // The graph of this capture is gone. Only called for graphs that do not hold their memory themselves.
  void release(unsigned long long capture) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (Slot& slot : slots_)
      if (capture && slot.owner.capture == capture && !slot.held)
        slot.owner.capture = kNobody, slot.since = std::chrono::steady_clock::now();
  }

  // In a forked child, where nothing of the parent's on a device can be used.
  void after_fork_in_child() {
    new (&mutex_) std::mutex;
    new (&slots_) std::list<Slot>;
  }

 private:
  static constexpr size_t kSmallest = 1 << 20;
  static constexpr size_t kMostSlots = 512;  // with more streams, or more graphs alive, calls run on stock torch
  static constexpr unsigned long long kNobody = ~0ull;
  static constexpr std::chrono::seconds kLongest{30};  // no replay of a graph that was deleted takes that long
  struct Owner {
    int device = -1;
    unsigned long long stream = 0, capture = 0;  // capture 0: eager launches; kNobody: free
    bool operator==(const Owner&) const = default;
  };
  struct Known {
    Owner owner;
    Address memory = 0;
    size_t bytes = 0;
  };
  struct Slot {
    Owner owner;
    Address memory;
    size_t bytes;
    bool held = false;               // by the graph: the driver reports its end, once no replay runs
    std::atomic<bool> freed{false};  // it was reported
    std::chrono::steady_clock::time_point since{};
    Slot(const Owner& owner, Address memory, size_t bytes) : owner(owner), memory(memory), bytes(bytes) {}
  };
  std::mutex mutex_;
  std::list<Slot> slots_;  // a list: the driver holds addresses of slots, and an empty one allocates nothing

  // Handles of destroyed streams come again; numbers of streams do not. Never asked of a stream that is being captured:
  // the driver answers 900 and breaks the capture. There the capture's own number tells owners apart.
  static unsigned long long key_of(Handle stream) {
    const Driver& d = Driver::get();
    unsigned long long id = 0;
    const bool is_of_all = reinterpret_cast<uintptr_t>(stream) <= 1;  // the default stream's handles
    if (!is_of_all && d.cuStreamGetId && d.cuStreamGetId(stream, &id) == 0) return id + 3;
    return reinterpret_cast<uintptr_t>(stream);
  }

  Slot& slot_of(const Owner& owner, const Capture& capture, size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (Slot& slot : slots_)
      if (slot.owner == owner && slot.bytes >= bytes && !slot.freed.load(std::memory_order_acquire)) return slot;
    Slot* found = capture.id ? spare(owner.device, bytes) : nullptr;
    if (!found) {  // a smaller one of the same owner is kept: a launch that uses it may still run
      if (slots_.size() >= kMostSlots) throw Declined("too many streams or graphs with scratch memory");
      const size_t size = std::max(bytes, kSmallest);
      slots_.emplace_back(Owner{owner.device, 0, kNobody}, zeroed(owner.device, size), size);
      found = &slots_.back();
    }
    found->freed.store(false, std::memory_order_relaxed);
    found->owner = owner;
    found->held = capture.id && hand_over(*found, capture.graph);
    return *found;
  }

  Slot* spare(int device, size_t bytes) {
    const auto now = std::chrono::steady_clock::now();
    for (Slot& slot : slots_) {
      const bool free = slot.held ? slot.freed.load(std::memory_order_acquire)
                                  : slot.owner.capture == kNobody && now - slot.since > kLongest;
      if (free && slot.owner.device == device && slot.bytes >= bytes) return &slot;
    }
    return nullptr;
  }

  // Has the graph hold the slot. The driver calls back once the graph, its clones and what was instantiated from them are
  // gone and no replay runs. False where this driver cannot: then graphs.py tells, and time has to do.
  static bool hand_over(Slot& slot, Handle graph) {
    const Driver& d = Driver::get();
    if (!graph || !d.cuUserObjectCreate || !d.cuGraphRetainUserObject || !d.cuUserObjectRelease) return false;
    constexpr unsigned kNoSync = 1, kMove = 1;
    const auto freed = [](void* slot) { static_cast<Slot*>(slot)->freed.store(true, std::memory_order_release); };
    Handle object = nullptr;
    if (d.cuUserObjectCreate(&object, &slot, freed, 1, kNoSync) != 0) return false;
    if (d.cuGraphRetainUserObject(graph, object, 1, kMove) == 0) return true;
    slot.held = true;  // the callback comes at once, or a moment later: either way the slot is then free
    d.cuUserObjectRelease(object, 1);
    throw Declined("the graph does not take its scratch memory");
  }

  // On a stream of our own, outside of any capture; happens once for each slot.
  static Address zeroed(int device, size_t bytes) {
    if (Shortage::lasts(device)) throw Declined("the device had no memory a moment ago");
    const Driver& d = Driver::get();
    RelaxedCapture relaxed;
    OnDevice on(device);
    static Handle streams[kMostDevices] = {};
    if (!streams[device]) d.check(d.cuStreamCreate(&streams[device], kNonBlocking), "cuStreamCreate");
    Address memory = 0;
    const int code = d.cuMemAlloc_v2(&memory, bytes);
    if (code == Driver::kNoMemory) {
      Shortage::begin(device);
      throw Declined("the device has no memory");
    }
    d.check(code, "cuMemAlloc");
    try {
      d.check(d.cuMemsetD8Async(memory, 0, bytes, streams[device]), "cuMemsetD8Async");
      d.check(d.cuStreamSynchronize(streams[device]), "cuStreamSynchronize");
    } catch (...) {
      d.cuMemFree_v2(memory);
      throw;
    }
    return memory;
  }
};

}  // namespace gemmtuned::cuda
