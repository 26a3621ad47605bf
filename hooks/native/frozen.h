// Linear layers whose weight is also held packed: the operator behind gemmtuned.freeze.
#pragma once
#include <ATen/ops/linear.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "operators.h"

namespace gemmtuned {

using OnCpu = Operators<Cpu>;

// What a weight was when it was packed: version, address, storage, and a sum over its form and 32 words of its content.
//
// Versions do not count edits under `.data`, and addresses come again. The storage is the address of its StorageImpl, to
// which freeze.py holds a weak reference: so it is nobody else's, however often `.data` was given another. Memory of the
// same storage that was given back and taken anew (resize_), and edits under `.data`, show in the content alone.
inline std::array<int64_t, 4> fingerprint_of(const Tensor& w) {
  uint64_t sum = 0x9e3779b97f4a7c15ull;
  const auto take = [&sum](uint64_t word) { sum = (sum ^ word) * 0xd6e8feb86659fd93ull, sum ^= sum >> 32; };
  for (const int64_t size : w.sizes()) take(static_cast<uint64_t>(size));
  for (const int64_t stride : w.strides()) take(static_cast<uint64_t>(stride));
  const char* const data = static_cast<const char*>(w.const_data_ptr());
  const size_t bytes = w.nbytes();
  if (w.is_contiguous() && data && w.storage().nbytes() >= w.storage_offset() * w.itemsize() + bytes)
    for (size_t i = 0; bytes >= sizeof(uint64_t) && i < 32; ++i) {
      uint64_t word;
      std::memcpy(&word, data + (bytes - sizeof word) / 31 * i, sizeof word);
      take(word);
    }
  return {w.is_inference() ? -1 : static_cast<int64_t>(w._version()), reinterpret_cast<int64_t>(data),
          reinterpret_cast<int64_t>(w.storage().unsafeGetStorageImpl()), static_cast<int64_t>(sum)};
}

inline std::vector<int64_t> frozen_fingerprint(const Tensor& w) {
  const auto fingerprint = fingerprint_of(w);
  return {fingerprint.begin(), fingerprint.end()};
}

// A linear layer whose weight is also held packed (gemmtuned.freeze): its own problem first, then the plain one. A weight
// that is not what it was when it was packed is served plain.
inline Tensor frozen_linear(const Tensor& x, const Tensor& w, const Tensor& packed, const OptionalTensor& bias,
                            at::IntArrayRef fingerprint) {
  if (x.dim() == 0 || w.dim() != 2 || w.size(1) == 0 || x.size(-1) != w.size(1) ||
      (bias && (bias->dim() != 1 || bias->size(0) != w.size(0))))
    return at::linear(x, w, bias);  // torch has the right error
  const Tensor a = x.dim() == 2 ? x : x.reshape({-1, w.size(1)});
  const Tensor b = turned_round(w);
  Slots slots = slots_of(a, b, bias ? &*bias : nullptr);
  slots.packed = &packed;
  const auto plain = [&] {  // inside call() these are torch's own
    return bias ? OnCpu::addmm(*bias, a, b, 1, 1) : OnCpu::mm(a, b);
  };
  const auto frozen = [&](Problem& p) {
    if (bias) p.flags |= BIAS;
    const Problem as_plain = p;
    p.flags |= PACKED;
    const auto otherwise = [&] {  // inside call(): not counted again
      ThreadCounters* thread = this_thread();
      const Found found = thread && dispatching() ? look_up(*thread, as_plain) : Found{};
      if (found.route && found.route->code != STOCK && accepts<Cpu>(*found.route, slots)) {
        Tensor y;
        try {
          const OnProbation going_on(*found.route, true);
          y = run_route<Cpu>(*found.route, as_plain, slots);
        } catch (...) {
          judge<Cpu>(*found.route, as_plain);
        }
        if (y.defined() && !live_check_due()) return y;
        const Tensor stock = plain();
        return y.defined() && !found_wrong<Cpu>(*found.route, as_plain, slots, y, stock) ? y : stock;
      }
      return plain();
    };
    return call<Cpu>(p, slots, ROUTABLE, otherwise, nullptr, plain);
  };
  Problem p;
  const bool same = w.scalar_type() == packed.scalar_type() && (!bias || bias->scalar_type() == w.scalar_type()) &&
                    std::ranges::equal(fingerprint, fingerprint_of(w));
  const Tensor y =
      off() || invariant() || !same || !describe<Cpu>(p, DENSE, a, b, a.scalar_type()) ? plain() : frozen(p);
  auto sizes = x.sizes().vec();
  sizes.back() = w.size(0);
  return y.reshape(sizes);
}

using FrozenSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef);

// Above the kernel, for calls that come here by other ways than freeze.py, as from compiled code: what derives or maps over
// examples gets plain F.linear, which has formulas for that.
inline Tensor frozen_autograd(const Tensor& x, const Tensor& w, const Tensor& packed, const OptionalTensor& bias,
                              at::IntArrayRef fingerprint) {
  const auto derived = [](const Tensor& t) {
    return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(0).defined();
  };
  if (derived(x) || derived(w) || (bias && derived(*bias))) return at::linear(x, w, bias);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("gemmtuned::frozen_linear", "").typed<FrozenSignature>();
  at::AutoDispatchBelowAutograd below;
  return op.call(x, w, packed, bias, fingerprint);
}

inline Tensor frozen_batched(const Tensor& x, const Tensor& w, const Tensor&, const OptionalTensor& bias,
                             at::IntArrayRef) {
  return at::linear(x, w, bias);
}

}  // namespace gemmtuned
