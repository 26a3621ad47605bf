// A route that is an operator registered with torch: called through the dispatcher, as its own package calls it.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <string>

#include "plain_text.h"
#include "slots.h"

namespace gemmtuned {

constexpr int kOperatorArguments = 16;
constexpr int kOperatorText = 32;
constexpr int kOperatorIntegers = 8;  // of a list
// A Slot: that operand as the record has it, [N, K] for w; AS_TORCH: as torch takes it.
enum OperandKind : uint8_t { AS_TORCH = 16, ALPHA = 32, BETA, NOTHING, INTEGER, REAL, TRUTH, TEXT, INTEGERS };

// What to call: an OperatorLaunch of configs/launch.py. Mirrored in hooks/native/launches.py.
struct OperatorLaunch {
  int64_t integer[kOperatorArguments];  // of a list: how many there are
  int64_t integers[kOperatorArguments][kOperatorIntegers];
  double real[kOperatorArguments];
  uint8_t kind[kOperatorArguments];
  uint8_t count;
  char text[kOperatorArguments][kOperatorText];
  char name[256], overload[128], schema[2048];
};

// Memory for the result of a [.., K] by b [.., K, N], without contents.
inline at::Tensor empty_result(const Tensor& a, const Tensor& b, at::ScalarType type) {
  const auto options = C10_LIKELY(type == a.scalar_type()) ? a.options() : a.options().dtype(type);
  return a.dim() == 2 ? at::empty({a.size(0), b.size(-1)}, options)
                      : at::empty({a.size(0), a.size(1), b.size(2)}, options);
}

class OperatorCall {
 public:
  // Throws where the program has no such operator, or one with another schema.
  explicit OperatorCall(const OperatorLaunch& facts)
      : facts_(facts),
        op_(find(facts)),
        schema_(op_.schema()),
        kept_(c10::Dispatcher::singleton().registerName(schema_.operator_name())),
        id_(std::hash<std::string>{}(std::string(facts.name) + "." + facts.overload)),
        writes_(writes_y(facts)) {}

  // Whether it writes into y of the slots, which must be there.
  bool writes() const { return writes_; }

  // The same for every route by this operator.
  uint64_t id() const { return id_; }

  // The result: y of `slots` where the operator writes into it, else what it returns. Throws where its package has taken it
  // back since, or has put another in its place.
  at::Tensor operator()(const Slots& slots) const {
    TORCH_CHECK(op_.hasSchema() && op_.schema() == schema_, facts_.name, " is no more what it was");
    torch::jit::Stack stack;
    stack.reserve(facts_.count);
    for (int i = 0; i < facts_.count; ++i) {
      switch (const uint8_t kind = facts_.kind[i]) {
        case ALPHA: stack.emplace_back(slots.alpha); break;
        case BETA: stack.emplace_back(slots.beta); break;
        case INTEGER: stack.emplace_back(facts_.integer[i]); break;
        case REAL: stack.emplace_back(facts_.real[i]); break;
        case TRUTH: stack.emplace_back(facts_.integer[i] != 0); break;
        case INTEGERS: stack.emplace_back(list(i)); break;
        case TEXT: stack.emplace_back(std::string(facts_.text[i])); break;
        case NOTHING: stack.emplace_back(); break;
        default: push(stack, slots, static_cast<uint8_t>(kind & ~AS_TORCH), kind & AS_TORCH);
      }
    }
    op_.callBoxed(stack);
    if (writes_) return *slots.t[SLOT_Y];
    TORCH_CHECK(stack.size() == 1 && stack[0].isTensor(), facts_.name, " returned no tensor");
    return std::move(stack[0]).toTensor();
  }

 private:
  c10::List<int64_t> list(int i) const {
    c10::List<int64_t> found;
    for (int at = 0; at < facts_.integer[i]; ++at) found.push_back(facts_.integers[i][at]);
    return found;
  }

  static void push(torch::jit::Stack& stack, const Slots& slots, uint8_t slot, bool as_torch) {
    const at::Tensor* const t = slots.t[slot];
    const bool turned = (slot == SLOT_W || slot == SLOT_SCALE_W) && !as_torch;
    if (!t) stack.emplace_back();
    else if (turned && t->dim() >= 2) stack.emplace_back(t->transpose(-2, -1));
    else stack.emplace_back(*t);
  }

  static bool writes_y(const OperatorLaunch& facts) {
    for (int i = 0; i < facts.count; ++i)
      if (facts.kind[i] == SLOT_Y) return true;
    return false;
  }

  static c10::OperatorHandle find(const OperatorLaunch& facts) {
    const auto found = c10::Dispatcher::singleton().findSchema({facts.name, facts.overload});
    TORCH_CHECK(found, "this program has no operator ", facts.name);
    PlainText schema;
    schema << found->schema();
    TORCH_CHECK(schema.str() == facts.schema, facts.name, " is ", schema.str(), " here, made for ", facts.schema);
    return *found;
  }

  const OperatorLaunch facts_;
  const c10::OperatorHandle op_;
  const c10::FunctionSchema schema_;
  const c10::RegistrationHandleRAII kept_;  // torch frees an operator whose name nobody has registered
  const uint64_t id_;
  const bool writes_;
};

}  // namespace gemmtuned
