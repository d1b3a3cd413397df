// Random numbers. As with CUDA's Philox generators, the state is a seed and an offset, and a kernel takes its own pair
// when it is launched: what it draws does not depend on when it runs, nor on what the host draws meanwhile.
#pragma once
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

namespace standin {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(device_type, device), c10::DispatchKeySet(dispatch_key)) {}

  // A generator for one kernel.
  at::Generator draw() {
    std::lock_guard<std::mutex> held(mutex_);
    auto mixed = seed_ * 0x9E3779B97F4A7C15ull ^ (offset_ += 4) * 0xBF58476D1CE4E5B9ull;
    return at::detail::createCPUGenerator(mixed ^ mixed >> 31);
  }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "the state of a generator must have 16 bytes, but got ", state.numel());
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline at::Generator& default_generator(DeviceIndex device) {
  static auto& all = *new std::map<DeviceIndex, at::Generator>;
  static std::mutex lock;
  std::lock_guard<std::mutex> held(lock);
  auto index = device < 0 ? current_device : device;
  auto found = all.find(index);
  if (found == all.end()) found = all.emplace(index, at::make_generator<Generator>(index)).first;
  return found->second;
}

}  // namespace standin
