// Operators. A dozen that deal with memory are written out; all others go through one fallback:
//
//   1. refuse tensors of several devices, as CUDA's operators do;
//   2. on the host, find out shapes by running the operator on meta tensors;
//   3. allocate the results and enqueue the CPU's kernel, which later works on the same memory.
//
// Where PyTorch has no meta kernel, or a result is no tensor, sizes or values depend on data: the host waits for the
// stream, and that is counted by the operator's name.
#pragma once
#include "guard.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace standin {

using at::IValue, at::Tensor, torch::jit::Stack;

inline bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == device_type; }

// The same memory as a CPU tensor, for kernels. It keeps nothing alive: memory that is freed too early must show.
inline Tensor cpu_alias(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto length = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  auto whole = at::from_blob(tensor.storage().mutable_data(), {length}, at::TensorOptions(tensor.dtype()));
  auto alias = at::as_strided(whole, tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}
// Its shape, strides and place in its storage, without data.
inline Tensor meta_alias(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor.defined() && tensor.dim() ? tensor.to(at::kMeta) : tensor;
  auto length = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  auto whole = at::empty({length}, at::TensorOptions(tensor.dtype()).device(at::kMeta));
  return at::as_strided(whole, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}
// What a kernel is given of a CPU tensor: the numbers as they are now, as with kernel arguments on a GPU.
inline Tensor kernel_argument(const Tensor& tensor) {
  return is_ours(tensor) ? cpu_alias(tensor) : tensor.defined() ? tensor.clone() : tensor;
}

// ---- arguments of any operator ---------------------------------------------------------------------------------------

// The argument with `change` applied to every tensor in it, and another device in the place of ours.
template <class Change>
IValue changed(const IValue& value, Change change, Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorList()) tensors.push_back(change(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      tensors.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().type() == device_type) return device;
  return value;
}
template <class Act>
void each_tensor(const IValue& value, Act act) {
  changed(value, [&](const Tensor& tensor) { act(tensor); return tensor; }, Device(device_type));
}

// The index of the device that an operator runs on. Refuses what CUDA's operators refuse.
inline DeviceIndex common_device(const c10::OperatorHandle& op, const Stack& args) {
  std::optional<Device> first;
  std::optional<Device> other;
  for (auto& value : args) {
    if (value.isDevice() && value.toDevice().type() == device_type && !first) first = value.toDevice();
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      auto device = tensor.device();
      if (is_ours(tensor) && !first) first = device;
      if (tensor.dim() == 0 && device.is_cpu()) return;  // becomes a kernel's argument
      if (value.isOptionalTensorList() && device.is_cpu()) return;  // x[cpu_indices] is allowed
      if (!first || *first != device) other = device;
    });
  }
  auto index = index_of(first.value_or(Device(device_type)));
  auto ours = Device(device_type, index);
  TORCH_CHECK(
      !other || *other == ours, "Expected all tensors to be on the same device, but found at least two devices, ", ours,
      " and ", *other, "! (when checking arguments of ", op.operator_name(), ")");
  return index;
}

// ---- results ---------------------------------------------------------------------------------------------------------

inline Tensor empty_like_meta(const Tensor& meta, DeviceIndex device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(Device(device_type, device)));
}

inline bool returns_tensors_only(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->str() != "Tensor[]") return false;
  return true;
}

// The argument that a result is, or is a view of; null if it is a new tensor.
inline const IValue* aliased_argument(const c10::FunctionSchema& schema, const Stack& args, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (!alias) return nullptr;
  for (size_t i = 0; i < args.size(); ++i)
    if (auto* info = schema.arguments()[i].alias_info(); info && info->beforeSets() == alias->beforeSets()) return &args[i];
  return nullptr;
}

// Results on the device, and what copies a kernel's results into them.
struct Results {
  Stack values;
  std::vector<std::pair<size_t, Tensor>> targets;
  std::vector<std::pair<size_t, std::vector<Tensor>>> target_lists;
  bool only_views = true;

  Results(const c10::OperatorHandle& op, const Stack& args, const Stack& shapes, DeviceIndex device) {
    auto& schema = op.schema();
    for (size_t r = 0; r < schema.returns().size(); ++r) {
      auto* source = aliased_argument(schema, args, r);
      auto& shape = shapes[r];
      if (source && schema.returns()[r].alias_info()->isWrite()) {
        only_views = false;
        values.push_back(*source);
      } else if (source) {
        TORCH_CHECK(shape.isTensor() && shape.toTensor().dtype() == source->toTensor().dtype(),
                    "stand-in device: no views by ", op.operator_name());
        auto view = shape.toTensor();
        values.push_back(at::as_strided(source->toTensor(), view.sizes(), view.strides(), view.storage_offset()));
      } else if (shape.isTensor() && shape.toTensor().defined()) {
        only_views = false;
        values.push_back(empty_like_meta(shape.toTensor(), device));
        targets.emplace_back(r, cpu_alias(values.back().toTensor()));
      } else if (shape.isTensorList()) {
        only_views = false;
        std::vector<Tensor> made, aliases;
        for (const Tensor& meta : shape.toTensorList()) {
          made.push_back(empty_like_meta(meta, device));
          aliases.push_back(cpu_alias(made.back()));
        }
        values.push_back(made);
        target_lists.emplace_back(r, aliases);
      } else {
        values.push_back(shape);
      }
    }
    only_views &= !schema.returns().empty();
  }

  auto delivery() const {
    return [targets = targets, lists = target_lists](const Stack& computed) {
      for (auto& [r, target] : targets) target.copy_(computed[r].toTensor());
      for (auto& [r, tensors] : lists) {
        auto from = computed[r].toTensorVector();
        for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(from[i]);
      }
    };
  }
};

// ---- the fallback ----------------------------------------------------------------------------------------------------

// Shapes of the results by the operator's meta kernel; nothing where there is none, or where it refuses: then the CPU's
// kernel says why. Enlarges tensors that an `out=` call writes to.
inline std::optional<Stack> infer_shapes(const c10::OperatorHandle& op, const Stack& args) {
  if (!returns_tensors_only(op.schema())) return std::nullopt;
  Stack metas;
  for (auto& value : args) metas.push_back(changed(value, meta_alias, at::kMeta));
  Stack results = metas;
  try {
    op.callBoxed(&results);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (size_t i = 0; i < args.size(); ++i) {
    auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    if (args[i].toTensor().sizes() != metas[i].toTensor().sizes()) args[i].toTensor().resize_(metas[i].toTensor().sizes());
  }
  return results;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  auto num_args = op.schema().arguments().size();
  Stack args(stack->end() - num_args, stack->end());
  auto device = common_device(op, args);
  WithDevice on(device);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ++waits().launches;

  for (size_t i = 0; i < num_args; ++i) {  // random numbers: see random.h
    if (op.schema().arguments()[i].type()->str() != "Generator?") continue;
    auto given = args[i].isNone() ? default_generator(device) : args[i].toGenerator();
    if (given.device().type() == device_type) args[i] = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->draw();
  }
  auto shapes = infer_shapes(op, args);
  Stack computed;
  for (auto& value : args) computed.push_back(changed(value, kernel_argument, at::kCPU));
  if (!shapes) {
    wait_for_queue(current_queue(device), c10::toString(op.operator_name()));
    op.callBoxed(&computed);
  }
  Results results(op, args, shapes ? *shapes : computed, device);
  if (!shapes || !results.only_views)
    current_queue(device).put(Kind::kernel, [op, computed, is_computed = !shapes, deliver = results.delivery()]() mutable {
      if (!is_computed) op.callBoxed(&computed);
      deliver(computed);
    });
  stack->erase(stack->end() - num_args, stack->end());
  for (auto& value : results.values) stack->push_back(std::move(value));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

using Size = c10::IntArrayRef;

inline Tensor empty(Size size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  WithDevice on(index_of(device.value_or(Device(device_type))));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(dispatch_key), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(Size size, Size stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  WithDevice on(index_of(device.value_or(Device(device_type))));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(dispatch_key), c10::dtype_or_default(dtype));
}
inline Tensor as_strided(const Tensor& tensor, Size size, Size stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(tensor.storage_offset()));
  return view;
}
inline Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, Size size, Size stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return tensor;
}
inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  auto length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {length}, {});
}
inline const Tensor& resize(const Tensor& tensor, Size size, std::optional<at::MemoryFormat>) {
  auto needed = (tensor.storage_offset() + c10::multiply_integers(size)) * tensor.itemsize();
  if (tensor.storage().nbytes() < needed) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}
inline void record_stream(Tensor& tensor, Stream stream) { record_use(tensor.storage().data_ptr(), stream); }

// ---- copies ----------------------------------------------------------------------------------------------------------

// Between devices: runs on the source's stream; the target's streams wait for it, and it for them.
inline void copy_between_devices(const Tensor& to, const Tensor& from) {
  auto &source = current_queue(from.device().index()), &target = current_queue(to.device().index());
  auto before = target.last();
  source.put(Kind::marker, [&target, before] { target.wait_or_fail(before); });
  auto copied = source.put(Kind::kernel, [a = cpu_alias(to), b = cpu_alias(from)] { a.copy_(b); });
  target.put(Kind::marker, [&source, copied] { source.wait_or_fail(copied); });
}

// Between host and device, as cudaMemcpyAsync: pageable memory is read at once; pinned memory is read or written when
// the stream gets there. The host waits unless `non_blocking`, and always for results in pageable memory.
inline void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& queue = current_queue(to.device().index());
  bool is_pinned = PinnedMemory::has(from.const_data_ptr());
  auto source = is_pinned ? from : from.clone();  // it is held until then: the host's allocator waits for copies
  queue.put(Kind::kernel, [a = cpu_alias(to), source] { a.copy_(source); });
  if (!non_blocking) wait_for_queue(queue, is_pinned ? "copy from pinned memory" : "copy from pageable memory");
}
inline void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& queue = current_queue(from.device().index());
  bool is_pinned = PinnedMemory::has(to.const_data_ptr());
  queue.put(Kind::kernel, [to, b = cpu_alias(from)] { to.copy_(b); });
  if (!non_blocking || !is_pinned) wait_for_queue(queue, "copy to the host");
}

inline Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (!to.numel()) return to;
  ++waits().launches;
  if (!is_ours(to))
    copy_to_host(to.detach(), source.detach(), non_blocking);
  else if (!is_ours(from))
    copy_to_device(to.detach(), source.detach(), non_blocking);
  else if (from.device() != to.device())
    copy_between_devices(to, source);
  else
    current_queue(to.device().index()).put(Kind::kernel, [a = cpu_alias(to), b = cpu_alias(source)] { a.copy_(b); });
  return to;
}
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy(target, from, non_blocking);
}
inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ---- values for the host ---------------------------------------------------------------------------------------------

inline at::Scalar item(const Tensor& tensor) {
  wait_for_queue(current_queue(tensor.device().index()), "aten::item");
  return cpu_alias(tensor).item();
}
inline bool equal(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "!");
  wait_for_queue(current_queue(a.device().index()), "aten::equal");
  return at::equal(cpu_alias(a), cpu_alias(b));
}

// PyTorch's CPU kernel draws from the CPU's default generator; here it must be the device's.
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto kept = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * kept * (p == 1 ? 0.0 : 1 / (1 - p)), kept};
}
inline int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                                std::optional<double>, bool) {
  return 0;  // plain tensor operations: the fused ones are models that tests register by name
}

inline void register_operators() {
  static auto& all = *new std::vector<torch::Library>;
  all.emplace_back(torch::Library::IMPL, "_", dispatch_key, __FILE__, __LINE__);
  all.back().fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto& aten = all.emplace_back(torch::Library::IMPL, "aten", dispatch_key, __FILE__, __LINE__);
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("as_strided", as_strided);
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("set_.source_Storage", set_whole_storage);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("resize_", resize);
  aten.impl("record_stream", record_stream);
  aten.impl("copy_", copy);
  aten.impl("_copy_from", copy_from);
  aten.impl("_copy_from_and_resize", copy_from_and_resize);
  aten.impl("_local_scalar_dense", item);
  aten.impl("equal", equal);
  aten.impl("native_dropout", native_dropout);
  aten.impl("_fused_sdp_choice", choose_attention);
  // PyTorch has other ways to compute these, for any device: kernels of the CPU, so that the bits are the same.
  for (auto name : {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward",
                    "native_group_norm", "native_group_norm_backward", "silu_backward"})
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace standin
