// Operators that others have registered and that are products at heart: an engine's FP8 kernels, its packed weights.
//
// One boxed kernel stands in front of all of them, without being built against any. A table (hooks/foreign.py) says of each
// operator which argument is what; its schema is compared first, so that an operator that has changed is left alone. What
// is a scaled product of plain operands has the key of torch's own, and is routed where the solution has won over the
// engine's kernel, too; what keeps its weight in a form of its own is counted.
#pragma once
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || \
    TORCH_VERSION_MINOR >= 10  // its dispatcher hands out the kernel that ours goes in front of
#define GEMMTUNED_FOREIGN
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <thread>

#include "foreign_keys.h"
#include "plain_text.h"

namespace gemmtuned {

// How an operator takes W. SCALED_KN: [K, N] as torch does; SCALED_NK: [N, K]; OPAQUE: in a form that we cannot read, of a batch
// with one for each in OPAQUE_BATCHED; WEIGHTS: [N, K], and W alone is quantised; SHUFFLED_KN: as SCALED_KN, in AITER's order;
// PAIRS: [N, K / 2], two numbers a byte as in X.
enum Form : uint8_t { SCALED_KN, SCALED_NK, OPAQUE, OPAQUE_BATCHED, WEIGHTS, SHUFFLED_KN, PAIRS };
constexpr int kRouted = 16;  // or-ed to a form

struct ForeignFacts {  // numbers of arguments, -1: there is none
  int8_t y, x, w, scale_x, scale_w, bias, zero_x, sums_w;
  int8_t out;     // the result's ScalarType, where there is no y
  int8_t unless;  // true where the operator does more than the product: such a call is left to it
  int8_t blocks;  // how many rows of W and how much of K have one scale
  uint8_t form;
  bool routed;     // a route may serve it: its product is one of torch's
  uint8_t family;  // the family of another package that declared the operator; 0: it is an engine's, or ours
  uint8_t engine;  // its number among engines' operators whose calls a solution may serve that has won over its kernel
};

// STANDS: ours is registered. LEAVING: one thread takes it back. GONE: it has.
enum Standing : uint8_t { STANDS, LEAVING, GONE };

// An operator that we stand before, and the kernel beneath. Never freed: a call may be in it. What made that kernel may
// go at any time (a torch.library.Library is destroyed), and torch then refuses to call it.
struct Foreign {
  ForeignFacts facts;
  c10::OperatorHandle op;
  c10::SafeKernelFunction stock;
  size_t arguments;
  bool returns;
  bool is_ours;   // gemmtuned's own
  bool is_alone;  // the operator had a single kernel when ours was registered, none that replaces another
  std::unique_ptr<torch::Library> library{};
  std::atomic<Standing> standing{STANDS};
};
constexpr size_t kMostForeign = 64;  // operators of a device, in a table of twice as many slots
template <class Device>
inline std::array<std::atomic<Foreign*>, 2 * kMostForeign> foreigns{};
template <class Device>
inline size_t foreign_count = 0;

// The slot of this operator, with the newest Foreign that stands before it; an empty one where there has been none.
template <class Device>
std::atomic<Foreign*>& slot_of(const c10::OperatorHandle& op) {
  for (size_t at = std::hash<c10::OperatorHandle>{}(op) >> 4;; ++at) {  // the hash is the address of a node
    std::atomic<Foreign*>& slot = foreigns<Device>[at % (2 * kMostForeign)];
    const Foreign* const it = slot.load(std::memory_order_acquire);
    if (!it || it->op == op) return slot;
  }
}

template <class Device>
Foreign* foreign_of(const c10::OperatorHandle& op) {
  return slot_of<Device>(op).load(std::memory_order_acquire);
}

// Whether a call of the operator comes to our kernel.
template <class Device>
bool is_called(const Foreign& it) {
  return it.op.hasSchema() &&
         it.op.getComputedKernelForDispatchKey(Device::key).debug().find(GEMMTUNED_REGISTERED) != std::string::npos;
}

// Takes our kernel back, so that torch finds what it would without us. False where somebody has put another kernel in front
// of ours: that one keeps calling what it has found, which without us would be a dead kernel, too.
template <class Device>
bool take_back(Foreign& it) {
  Standing was = STANDS;
  if (!it.standing.compare_exchange_strong(was, LEAVING)) {
    while (it.standing.load(std::memory_order_acquire) == LEAVING) std::this_thread::yield();
    return it.standing.load(std::memory_order_acquire) == GONE;
  }
  const bool ours_is_called = is_called<Device>(it);
  if (ours_is_called) it.library.reset();
  it.standing.store(ours_is_called ? GONE : STANDS, std::memory_order_release);
  return ours_is_called;
}

// Whether torch has refused to call the kernel beneath, before anything of it ran.
inline bool is_refused(const c10::Error& error, const Foreign& it) {
  const std::string text = error.what_without_backtrace();
  return text.find("SafeKernelFunction has been invalidated") != std::string::npos &&
         text.find(it.stock.debug()) != std::string::npos;
}

// Runs the call as it would run without us.
template <class Device>
void call_stock(Foreign& it, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (C10_LIKELY(it.standing.load(std::memory_order_acquire) == STANDS)) {
    const size_t size = stack->size();
    try {
      return it.stock.callBoxed(it.op, keys, stack);
    } catch (const c10::Error& error) {
      if (stack->size() != size || !is_refused(error, it) || !take_back<Device>(it)) throw;
    }
  }
  it.op.redispatchBoxed(keys, stack);
}

template <class Device>
void foreign_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Foreign* const it = foreign_of<Device>(op);
  const auto stock = [&] { call_stock<Device>(*it, keys, stack); };
  if (off() || stack->size() < it->arguments) return stock();
  const ForeignFacts& f = it->facts;
  const auto argument = [&](int8_t at) -> const c10::IValue& {
    static const c10::IValue none;
    return at < 0 ? none : (*stack)[stack->size() - it->arguments + static_cast<size_t>(at)];
  };
  static const Tensor absent;
  const auto tensor = [&](int8_t at) -> const Tensor& {
    const c10::IValue& given = argument(at);
    if (!given.isTensor()) return absent;
    return given.toTensor();
  };
  const Tensor x = tensor(f.x);
  Tensor y = tensor(f.y);
  if (!x.defined()) return stock();
  Tensor own[6];  // a live check looks at them after stock has taken its arguments off the stack
  const bool held = f.routed && g_live_every.load(std::memory_order_relaxed);
  const int8_t others[] = {f.w, f.scale_x, f.scale_w, f.bias, f.zero_x, f.sums_w};
  for (int i = 0; held && i < 6; ++i) own[i] = tensor(others[i]);
  const auto other = [&](int i) -> const Tensor& { return held ? own[i] : tensor(others[i]); };
  const Tensor &w = other(0), &scale_x = other(1), &scale_w = other(2), &bias = other(3), &zero_x = other(4),
               &sums_w = other(5);
  const bool has_bias = bias.defined();
  Problem p;
  Slots slots = slots_of(x, x, has_bias ? &bias : nullptr);
  bool is_done = false;
  const auto counted = [&]() -> Tensor& {
    stock();
    is_done = true;
    return y;
  };
  // operands that torch's own operator would refuse may be right for the engine's: such a call is left to it
  const auto fits = [&](int64_t n, at::ScalarType out) {
    const bool plain_bias =
        !has_bias || (bias.dim() == 1 && bias.size(0) == n && bias.scalar_type() == out && bias.device() == x.device());
    const bool fits_y = !y.defined() || (y.dim() == 2 && y.size(0) == x.size(0) && y.size(1) == n &&
                                         y.device() == x.device() && !it->returns);
    const auto here = [&](const Tensor& t) { return !t.defined() || t.device() == x.device(); };
    const bool others_here = here(scale_x) && here(scale_w) && here(zero_x) && here(sums_w);
    const c10::IValue& more = argument(f.unless);
    if (more.isBool() && more.toBool()) return false;
    return f.routed && it->is_alone && plain_bias && fits_y && others_here;
  };
  if (f.form == WEIGHTS || f.form == PAIRS) {
    const auto is_flat = [](const Tensor& t) { return t.defined() && t.dim() == 2; };
    const bool pairs = f.form == PAIRS;
    if (!y.defined() || !is_flat(x) || !is_flat(w) || !is_flat(scale_w) || (pairs && !is_flat(scale_x))) return stock();
    const Tensor b = turned_round(w), of_b = turned_round(scale_w);
    const bool known = pairs ? describe_pairs<Device>(p, x, b, scale_x, of_b, y.scalar_type(), has_bias)
                             : describe_weight_only<Device>(p, x, b, of_b, y.scalar_type(), has_bias);
    if (!known) return stock();
    slots.t[SLOT_W] = &b, slots.t[SLOT_SCALE_W] = &of_b;
    if (pairs) slots.t[SLOT_SCALE_X] = &scale_x;
    // no live check: it works the size of the result out from the operands, which bytes of two codes do not tell
    call<Device>(p, slots, fits(b.size(1), y.scalar_type()) ? ROUTABLE | UNCHECKED : COUNTED_ONLY, counted, &y);
    if (!is_done) torch::jit::drop(*stack, it->arguments);  // the route wrote into y
    return;
  }
  const bool is_plain = w.defined() && w.dim() == 2 && x.dim() == 2 && scale_x.defined() && scale_w.defined() &&
                        (y.defined() || argument(f.out).isInt());
  const Tensor turned = is_plain && f.form == SCALED_NK ? turned_round(w) : Tensor();
  const Tensor of_turned =
      turned.defined() && scale_w.dim() == 2 ? turned_round(scale_w) : Tensor();  // by rows of K, as b
  const Tensor& b = turned.defined() ? turned : w;
  const auto describe_plain = [&] {
    const c10::IValue& blocks = argument(f.blocks);  // numbers of scales do not tell those of 96 of K from ours
    if (f.blocks >= 0 && !(blocks.isIntList() && blocks.toIntVector() == std::vector<int64_t>{128, 128})) return false;
    const auto out = y.defined() ? y.scalar_type() : static_cast<at::ScalarType>(argument(f.out).toInt());
    BothScales both = scales_by_number(x, b, scale_x, scale_w, f.form != SCALED_NK);
    if (f.sums_w >= 0) both = with_zero_points(both, x, b, scale_x, zero_x, sums_w);
    return describe<Device>(p, SCALED, x, b, out) &&
           describe_scaled(p, both, x, has_bias, !it->is_ours);  // engines' kernels add up as the tensor core does
  };
  if (is_plain && describe_plain()) {
    if (f.form == SHUFFLED_KN) p.flags |= SHUFFLED;
    slots.t[SLOT_W] = &b, slots.t[SLOT_SCALE_X] = &scale_x;
    slots.t[SLOT_SCALE_W] = of_turned.defined() ? &of_turned : &scale_w;
    slots.t[SLOT_ZERO_X] = zero_x.defined() ? &zero_x : nullptr;
    slots.t[SLOT_SUMS_W] = sums_w.defined() ? &sums_w : nullptr;
    const bool routable = (it->is_ours || f.engine) && fits(b.size(1), static_cast<at::ScalarType>(p.out_dtype));
    const int flags = (!routable ? COUNTED_ONLY : held ? ROUTABLE : ROUTABLE | UNCHECKED) | f.engine << kEngineShift;
    if (!y.defined()) {
      const Tensor made = call<Device>(p, slots, flags, [&]() -> Tensor {
        stock();
        is_done = true;
        return stack->back().toTensor();
      });
      if (is_done) return;
      torch::jit::drop(*stack, it->arguments);
      stack->emplace_back(made);
      return;
    }
    call<Device>(p, slots, flags, counted, &y);
    if (!is_done) torch::jit::drop(*stack, it->arguments);  // the route wrote into y
    return;
  }
  const bool batched = f.form == OPAQUE_BATCHED;
  if (y.defined()) {
    if (describe_opaque<Device>(p, x, y, has_bias, batched)) call<Device>(p, slots, COUNTED_ONLY, counted, &y);
    else stock();
    return;
  }
  if (!it->returns) return stock();
  call_then_describe<Device>(x, stock, [&] {  // only the result tells the number of columns
    const c10::IValue& made = stack->back();
    return made.isTensor() && describe_opaque<Device>(p, x, made.toTensor(), has_bias, batched) ? &p : nullptr;
  });
}

template <class Device>  // in declared_kernel.h
void declared_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Types and names of arguments and results, without the letters that say what is written to.
inline std::string schema_text(const c10::FunctionSchema& schema) {
  PlainText text;
  text << schema.operator_name() << "(";
  for (const c10::Argument& a : schema.arguments())
    text << (&a == schema.arguments().data() ? "" : ", ") << a.type()->str() << " " << a.name();
  text << ") -> (";
  for (const c10::Argument& r : schema.returns())
    text << (&r == schema.returns().data() ? "" : ", ") << r.type()->str();
  text << ")";
  return text.str();
}

// Stands in front of this operator, `namespace::name` or `namespace::name.overload`, from now on, until the kernel beneath is
// gone. True where it does, also from before; false where the operator or its kernel for the device is not there (yet).
// Throws where its schema is another, unless `schema` is empty.
template <class Device>
bool stand_before(const std::string& name, const std::string& schema, const ForeignFacts& facts) {
  const size_t dot = std::min(name.find('.'), name.size());
  const auto op =
      c10::Dispatcher::singleton().findSchema({name.substr(0, dot), name.substr(std::min(dot + 1, name.size()))});
  const auto has_kernel = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
  if (!op || (!has_kernel(Device::key) && !has_kernel(c10::DispatchKey::CompositeExplicitAutograd))) return false;
  if (const Foreign* it = foreign_of<Device>(*op); it && it->standing.load(std::memory_order_acquire) != GONE)
    return true;
  const std::string found = schema_text(op->schema());
  TORCH_CHECK(schema.empty() || found == schema, "it is ", found, ", expected ", schema);
  std::atomic<Foreign*>& slot = slot_of<Device>(*op);
  const bool is_new = !slot.load();
  TORCH_CHECK(!is_new || foreign_count<Device> < kMostForeign, "there are too many operators");
  const bool alone = op->dumpState().find(std::string(c10::toString(Device::key)) + " (inactive)") == std::string::npos;
  const std::string space = name.substr(0, name.find("::"));
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, space, Device::key, GEMMTUNED_REGISTERED, __LINE__);
  auto* const ours = new Foreign{facts,
                                 *op,
                                 op->getComputedKernelForDispatchKey(Device::key),
                                 op->schema().arguments().size(),
                                 !op->schema().returns().empty(),
                                 space == "gemmtuned",
                                 alone,
                                 std::move(library)};
  slot.store(ours, std::memory_order_release);  // first: with the registration calls come at once
  foreign_count<Device> += is_new;
  try {
    ours->library->impl(name.substr(space.size() + 2).c_str(),
                        facts.family ? torch::CppFunction::makeFromBoxedFunction<&declared_kernel<Device>>()
                                     : torch::CppFunction::makeFromBoxedFunction<&foreign_kernel<Device>>());
  } catch (...) {
    if (!is_called<Device>(
            *ours)) {  // torch may have thrown after it had registered ours, and cannot take it back then
      ours->standing.store(GONE, std::memory_order_release);
      throw;
    }
  }
  return true;
}

}  // namespace gemmtuned
#endif
