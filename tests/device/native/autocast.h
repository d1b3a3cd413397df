// Autocast of the PrivateUse1 form, by PyTorch's own lists of operators. For "cuda" a CPU build has all of it already.
#pragma once
#include "operators.h"

#include <ATen/autocast_mode.h>

namespace standin {

enum class Precision { lower, full };

template <Precision precision>
void cast_arguments(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  auto dtype = precision == Precision::lower ? at::autocast::get_autocast_dtype(device_type) : at::kFloat;
  auto cast = [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, device_type); };
  auto num_args = op.schema().arguments().size();
  for (size_t i = stack->size() - num_args; i < stack->size(); ++i)
    if (!(*stack)[i].isDevice()) (*stack)[i] = changed((*stack)[i], cast, Device(device_type));
  op.callBoxed(stack);
}

inline void register_autocast() {
  static auto& all = *new std::vector<torch::Library>;
  all.emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  all.back().fallback(torch::CppFunction::makeFallthrough());
  auto& aten = all.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  auto name = [](std::string words) {  // "pow, Tensor_Scalar" is how the lists write pow.Tensor_Scalar
    if (auto comma = words.find(", "); comma != std::string::npos) words.replace(comma, 2, ".");
    return words;
  };
#define LOWER(...) \
  aten.impl(name(#__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&cast_arguments<Precision::lower>>());
#define FULL(...) \
  aten.impl(name(#__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&cast_arguments<Precision::full>>());
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL)  // softmax and sums: the same numbers as with dtype=float32
#undef LOWER
#undef FULL
}

}  // namespace standin
