// A route that is an operator registered with torch: called through the dispatcher, as its own package calls it.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <sstream>
#include <string>

namespace gemmtuned {

constexpr int kOperatorArguments = 16;
enum OperandKind : uint8_t { OF_X, OF_W, OF_B, OF_BIAS, NOTHING, INTEGER, REAL, TRUTH };

// What to call: configs/launch.py says what the fields of its record mean. Mirrored in hooks/native/records.py.
struct OperatorLaunch {
  int64_t max_m;
  int64_t integer[kOperatorArguments];
  double real[kOperatorArguments];
  uint8_t kind[kOperatorArguments];
  uint8_t count, contiguous;  // contiguous: a bit for each of x, w, b, bias
  char name[256], overload[128], schema[2048];
};

class OperatorCall {
 public:
  // Throws where the program has no such operator, or one with another schema.
  explicit OperatorCall(const OperatorLaunch& facts) : facts_(facts), op_(find(facts)) {}

  bool accepts(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias) const {
    if (a.dim() != 2 || a.size(0) > facts_.max_m) return false;
    const auto lies = [&](OperandKind kind, bool so) { return !(facts_.contiguous >> kind & 1) || so; };
    return lies(OF_X, a.is_contiguous()) && lies(OF_B, b.is_contiguous()) &&
           lies(OF_W, b.stride(0) == 1 && (b.stride(1) == b.size(0) || b.size(1) == 1)) &&
           lies(OF_BIAS, !bias || bias->is_contiguous());
  }

  at::Tensor operator()(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) const {
    torch::jit::Stack stack;
    stack.reserve(facts_.count);
    for (int i = 0; i < facts_.count; ++i) {
      switch (facts_.kind[i]) {
        case OF_X: stack.emplace_back(a); break;
        case OF_W: stack.emplace_back(b.t()); break;
        case OF_B: stack.emplace_back(b); break;
        case OF_BIAS: bias ? stack.emplace_back(*bias) : stack.emplace_back(); break;
        case INTEGER: stack.emplace_back(facts_.integer[i]); break;
        case REAL: stack.emplace_back(facts_.real[i]); break;
        case TRUTH: stack.emplace_back(facts_.integer[i] != 0); break;
        default: stack.emplace_back();
      }
    }
    op_.callBoxed(stack);
    TORCH_CHECK(stack.size() == 1 && stack[0].isTensor(), facts_.name, " returned no tensor");
    return std::move(stack[0]).toTensor();
  }

 private:
  static c10::OperatorHandle find(const OperatorLaunch& facts) {
    const auto found = c10::Dispatcher::singleton().findSchema({facts.name, facts.overload});
    TORCH_CHECK(found, "this program has no operator ", facts.name);
    std::ostringstream schema;
    schema << found->schema();
    TORCH_CHECK(schema.str() == facts.schema, facts.name, " is ", schema.str(), " here, made for ", facts.schema);
    return *found;
  }

  const OperatorLaunch facts_;
  const c10::OperatorHandle op_;
};

}  // namespace gemmtuned
