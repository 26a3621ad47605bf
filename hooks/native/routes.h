// What the look-up gives: an immutable table behind one atomic pointer, swapped whole by the loader.
#pragma once
#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>

#include "operator_call.h"
#include "problem.h"
#include "slots.h"

namespace gemmtuned::cuda {
struct Launch;
struct LtLaunch;
}  // namespace gemmtuned::cuda

namespace gemmtuned {

enum Outcome : uint8_t { MISS, EXACT_HIT, PADDED_HIT };  // order of OUTCOMES in configs/sighting.py

// How a route failed. FAILED: it raised; the daemon runs it again before it is withdrawn. WRONG: its result differed from
// stock's, which is proof enough. Order of HOW in hooks/native/records.py.
enum Failing : int32_t { FAILED, WRONG };

// How a route runs. Codes of kernels/backends; hooks/dispatch.py holds the same list.
enum Code : int32_t {
  STOCK = 0,
  SWAP = 1,
  MV = 2,
  ONEDNN = 3,
  ONEDNN_PACKED = 4,
  LAUNCH = 5,
  CUBLASLT = 6,
  OPERATOR = 7,
  ROWS = 8
};

// A product made of calls of at most `block` rows, each padded to a multiple of `grain` (kernels/backends/rows.py).
// Mirrored in hooks/native/records.py.
struct RowBlocks {
  int32_t kernel;  // STOCK, SWAP or ONEDNN
  int32_t block, grain;
};

// One way to run a problem. Interned: lives as long as the process, so that a call may hold it across a reload.
struct Route {
  int32_t id;              // names the solution on the Python side
  int32_t code;            // which implementation, see Device::run; 0 is stock
  int64_t chain_rows = 0;  // where it serves every M of a batch-invariant problem: rows of X at a time
  std::atomic<bool> failed{false};
  std::atomic<bool> launched{false};  // has run on a GPU while its table was on probation
  bool scales_sums = false;           // whether it takes any alpha and beta; else both must be 1
  std::vector<Cond> conditions{};
  std::unique_ptr<const cuda::Launch> launch{};  // what a code of LAUNCH needs
  std::unique_ptr<const cuda::LtLaunch> lt{};    // what a code of CUBLASLT needs
  std::unique_ptr<const OperatorCall> op{};      // what a code of OPERATOR needs
  std::unique_ptr<const RowBlocks> rows{};       // what a code of ROWS needs

  Failing how{};        // how it failed; this and what follows is written before it is queued in `untold`
  char* why = nullptr;  // null where there was no memory for it
  Route* next = nullptr;

  // Switches the route off and queues the report. Called in the middle of a call: takes no lock, throws nothing.
  void fail(Failing how_it_did, const char* reason) noexcept;
};

// Routes that failed and wait to be reported to the Python side, the newest first. Each is queued only once.
inline std::atomic<Route*> untold{nullptr};

inline void Route::fail(Failing how_it_did, const char* reason) noexcept {
  if (failed.exchange(true)) return;
  how = how_it_did, why = strdup(reason), next = untold.load(std::memory_order_relaxed);
  while (!untold.compare_exchange_weak(next, this, std::memory_order_release, std::memory_order_relaxed)) {}
}

// Takes the newest off the list; null when all are reported. One thread at a time.
inline Route* next_untold() noexcept {
  Route* first = untold.load(std::memory_order_acquire);
  while (first && !untold.compare_exchange_weak(first, first->next, std::memory_order_acquire)) {}
  return first;
}

// An engine's operator (hooks/engine_operators.py) by its number from 1; 0: a product of torch's, or of our own operators.
constexpr int kMostEngines = 15;

// How a row's races with the kernels of engines have ended, in two bits for each engine. Bit `number`: the engine's kernel
// lost, so the row may serve calls of that engine's operator. Bit `number + 16`: the engine's kernel is as good as the row,
// so such a call runs that kernel and counts as served.
struct Engines {
  uint32_t bits = 0;
  bool lost(int number) const { return bits >> number & 1; }
  bool are_as_good(int number) const { return bits >> (number + 16) & 1; }
};

struct Found {
  Route* route = nullptr;
  Outcome outcome = MISS;
  Engines engines{};
};

class RouteTable {
 public:
  explicit RouteTable(uint64_t generation) : generation(generation) {}
  const uint64_t generation;

  void add(const Problem& key, Route* route, Engines engines) { rows_.emplace(key, std::make_pair(route, engines)); }
  size_t size() const { return rows_.size(); }

  // Looks for the exact M, then for the fine bucket, then for the coarse one, and passes over a row whose route has failed.
  // It is a miss where none of the three holds.
  Found find(const Problem& problem) const {
    for (Covers covers : {EXACT, FINE, COARSE}) {
      Problem key = problem;
      key.covers = covers;
      key.m = static_cast<uint32_t>(padded_m(problem.m, problem.n, covers));
      const auto row = rows_.find(key);
      if (row != rows_.end() && !row->second.first->failed.load(std::memory_order_acquire))
        return {row->second.first, covers == EXACT ? EXACT_HIT : PADDED_HIT, row->second.second};
    }
    return {};
  }

 private:
  struct Hash {
    size_t operator()(const Problem& p) const { return p.hash(); }
  };
  std::unordered_map<Problem, std::pair<Route*, Engines>, Hash> rows_;
};

}  // namespace gemmtuned
