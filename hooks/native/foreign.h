// Operators that others have registered and that are products at heart: an engine's FP8 kernels, its packed weights.
//
// One boxed kernel stands in front of all of them, without being built against any. A table (hooks/foreign.py) says of each
// operator which argument is what; its schema is compared first, so that an operator that has changed is left alone. What
// is a scaled product of plain operands has the key of torch's own, and is routed where it writes into an argument; what
// keeps its weight in a form of its own is counted.
#pragma once
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || \
    TORCH_VERSION_MINOR >= 10  // its dispatcher hands out the kernel that ours goes in front of
#define GEMMTUNED_FOREIGN
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "call.h"
#include "scales.h"

namespace gemmtuned {

enum Form : uint8_t { SCALED_KN, SCALED_NK, OPAQUE };  // of W: [K, N] as torch takes it, [N, K], or not to be seen

struct ForeignFacts {  // numbers of arguments, -1: there is none
  int8_t y, x, w, scale_x, scale_w, bias;
  int8_t out;  // the result's ScalarType, where there is no y
  uint8_t form;
  uint8_t family;  // of another package, whose operator it is; 0: it is an engine's
};

struct Foreign {
  ForeignFacts facts;
  c10::OperatorHandle op;
  c10::SafeKernelFunction stock;
  size_t arguments;
  bool returns;
};
constexpr size_t kMostForeign = 64;  // operators of a device
template <class Device>
inline std::array<Foreign*, kMostForeign> foreigns{};
template <class Device>
inline std::atomic<size_t> foreign_count{0};

template <class Device>
Foreign* foreign_of(const c10::OperatorHandle& op) {
  const size_t count = foreign_count<Device>.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i)
    if (foreigns<Device>[i]->op == op) return foreigns<Device>[i];
  return nullptr;
}

// What scales stand for where an operator tells it by how many there are: one, one a row, or one for each block of 128.
inline BothScales scales_by_number(const Tensor& x, const Tensor& b, const Tensor& scale_x, const Tensor& of_w) {
  const Tensor scale_w = of_w.dim() == 2 && of_w.size(0) == blocks_of(x.size(1), 128) ? of_w.t() : of_w;  // by N first
  if (scale_x.scalar_type() != at::kFloat || scale_w.scalar_type() != at::kFloat) return {};
  const int64_t m = x.size(0), n = b.size(1), blocks = blocks_of(x.size(1), 128);
  const auto of = [](uint8_t kind, const Tensor& s, int64_t rows, int64_t cols) {
    const uint8_t layout = s.dim() == 2 && s.size(0) == rows && s.size(1) == cols ? layout_of(s, rows, cols)
                                                                                  : static_cast<uint8_t>(SCALES_BY_ROW);
    return ScaleOf{kind, static_cast<uint8_t>(at::kFloat),
                   kind >= BY_1X32 ? layout : static_cast<uint8_t>(SCALES_BY_ROW)};
  };
  BothScales both;
  const int64_t given_w = scale_w.numel(), given_x = scale_x.numel();
  if (given_w == n && (n > 1 || given_x == m)) both.w = of(PER_ROW, scale_w, n, 1);
  else if (given_w == 1) both.w = of(PER_TENSOR, scale_w, 1, 1);
  else if (given_w == blocks * blocks_of(n, 128)) both.w = of(BY_128X128, scale_w, blocks_of(n, 128), blocks);
  else return {};
  if (both.w.kind == BY_128X128 && given_x == m * blocks) both.x = of(BY_1X128, scale_x, m, blocks);
  else if (given_x == m && (m > 1 || both.w.kind == PER_ROW)) both.x = of(PER_ROW, scale_x, m, 1);
  else if (given_x == 1) both.x = of(PER_TENSOR, scale_x, 1, 1);
  else return {};
  both.known = true;
  return both;
}

// The key of a product whose weight is nobody's but the operator's; false where there is none.
template <class Device>
bool describe_opaque(Problem& p, const Tensor& x, const Tensor& y, bool bias) {
  const int64_t k = x.dim() ? x.size(-1) : 0, m = k ? x.numel() / k : 0, n = y.dim() ? y.size(-1) : 0;
  if (m <= 0 || n <= 0 || std::max({m, n, k}) > INT32_MAX) return false;
  p = Problem{};
  p.batch = 1, p.m = static_cast<uint32_t>(m), p.n = static_cast<uint32_t>(n), p.k = static_cast<uint32_t>(k);
  p.family = DENSE, p.dtype = p.wdtype = static_cast<uint8_t>(x.scalar_type());
  p.out_dtype = static_cast<uint8_t>(y.scalar_type());
  p.layout = 1;  // nt, as a linear layer has it
  p.flags = bias ? PACKED | BIAS : PACKED, p.packing = kOpaque;
  Device::describe(p, x);
  return true;
}

template <class Device>
void foreign_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Foreign* const it = foreign_of<Device>(op);
  const auto stock = [&] { it->stock.callBoxed(op, keys, stack); };
  if (off()) return stock();
  const ForeignFacts& f = it->facts;
  const auto argument = [&](int8_t at) -> const c10::IValue& {
    static const c10::IValue none;
    return at < 0 ? none : (*stack)[stack->size() - it->arguments + static_cast<size_t>(at)];
  };
  const auto tensor = [&](int8_t at) { return argument(at).isTensor() ? argument(at).toTensor() : Tensor(); };
  const Tensor x = tensor(f.x), w = tensor(f.w), scale_x = tensor(f.scale_x), scale_w = tensor(f.scale_w);
  const Tensor given_bias = tensor(f.bias);
  Tensor y = tensor(f.y);
  if (!x.defined()) return stock();
  Problem p;
  Slots slots = slots_of(x, x, given_bias.defined() ? &given_bias : nullptr);
  bool is_done = false;
  const auto counted = [&]() -> Tensor& {
    if (!is_done) stock();
    is_done = true;
    return y;
  };
  if (f.form == OPAQUE) {
    if (it->returns) {  // what comes out says how many columns it has
      counted();
      y = stack->back().isTensor() ? stack->back().toTensor() : Tensor();
    }
    if (y.defined() && describe_opaque<Device>(p, x, y, given_bias.defined()))
      call<Device>(p, slots, COUNTED_ONLY, counted, &y);
    counted();
    return;
  }
  const bool has_all = w.defined() && x.dim() == 2 && w.dim() == 2 && scale_x.defined() && scale_w.defined();
  const auto out = y.defined() ? y.scalar_type()
                               : static_cast<at::ScalarType>(argument(f.out).isInt() ? argument(f.out).toInt() : -1);
  if (!has_all || (!y.defined() && !argument(f.out).isInt())) return stock();
  const Tensor b = f.form == SCALED_NK ? w.t() : w;
  const OptionalTensor bias = given_bias.defined() ? OptionalTensor(given_bias) : std::nullopt;
  if (!describe<Device>(p, SCALED, x, b, out)) return stock();
  if (!describe_scaled(p, scales_by_number(x, b, scale_x, scale_w), x, bias, true)) return stock();
  slots.t[SLOT_W] = &b, slots.t[SLOT_SCALE_X] = &scale_x, slots.t[SLOT_SCALE_W] = &scale_w;
  // what torch's own operator would refuse, and the engine's perhaps takes, is the engine's
  const bool plain_bias = !bias || (bias->dim() == 1 && bias->size(0) == b.size(1) && bias->scalar_type() == out);
  const bool fits_y =
      y.defined() && y.dim() == 2 && y.size(0) == x.size(0) && y.size(1) == b.size(1) && y.device() == x.device();
  const bool routable = !it->returns && plain_bias && fits_y;
  call<Device>(p, slots, routable ? ROUTABLE : COUNTED_ONLY, counted, &y);
  if (!is_done) torch::jit::drop(*stack, it->arguments);  // the route wrote into y
}

template <class Device>
void listened_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);  // listened.h

// Types and names of arguments and results, without the letters that say what is written to.
inline std::string schema_text(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  text << schema.operator_name() << "(";
  for (const c10::Argument& a : schema.arguments())
    text << (&a == schema.arguments().data() ? "" : ", ") << a.type()->str() << " " << a.name();
  text << ") -> (";
  for (const c10::Argument& r : schema.returns())
    text << (&r == schema.returns().data() ? "" : ", ") << r.type()->str();
  text << ")";
  return text.str();
}

// Stands in front of this operator, `namespace::name` or `namespace::name.overload`, for the life of the process. False where
// the operator or its kernel for the device is not there (yet), or ours is. Throws where its schema is another, unless
// `schema` is empty.
template <class Device>
bool stand_before(const std::string& name, const std::string& schema, const ForeignFacts& facts) {
  const size_t dot = std::min(name.find('.'), name.size());
  const auto op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), name.substr(std::min(dot + 1, name.size()))});
  const auto has_kernel = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
  if (!op || foreign_of<Device>(*op)) return false;
  if (!has_kernel(Device::key) && !has_kernel(c10::DispatchKey::CompositeExplicitAutograd)) return false;
  const std::string found = schema_text(op->schema());
  TORCH_CHECK(schema.empty() || found == schema, "it is ", found, ", expected ", schema);
  const size_t at = foreign_count<Device>.load(), arguments = op->schema().arguments().size();
  TORCH_CHECK(at < kMostForeign, "there are too many operators");
  foreigns<Device>[at] = new Foreign{facts, *op, op->getComputedKernelForDispatchKey(Device::key), arguments,
                                     !op->schema().returns().empty()};
  foreign_count<Device>.store(at + 1, std::memory_order_release);
  const std::string space = name.substr(0, name.find("::"));
  auto* library = new torch::Library(torch::Library::IMPL, space, Device::key, __FILE__, __LINE__);
  library->impl(name.substr(space.size() + 2).c_str(),
                facts.family ? torch::CppFunction::makeFromBoxedFunction<&listened_kernel<Device>>()
                             : torch::CppFunction::makeFromBoxedFunction<&foreign_kernel<Device>>());
  return true;
}

}  // namespace gemmtuned
#endif
