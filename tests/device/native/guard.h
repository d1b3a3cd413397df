// What PyTorch asks a backend for: the device guard (devices, streams, events) and the hooks of accelerators.
#pragma once
#include "memory.h"
#include "random.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace standin {

inline Event* event_of(void* event) { return static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return device_type; }

  Device getDevice() const override { return Device(device_type, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "invalid device ordinal: there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(device_type, index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> next{0};
    return Stream(Stream::UNSAFE, Device(device_type, index_of(device)), 1 + next++ % num_pooled);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return queue_of(stream).reached(queue_of(stream).last()); }
  void synchronizeStream(const Stream& stream) const override {
    wait_for_queue(queue_of(stream), "synchronize a stream");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device : device);
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    auto& queue = queue_of(stream);
    if (flag != c10::EventFlag::BACKEND_DEFAULT) {  // events with timing
      *event_of(*event) = {&queue, queue.last(), nullptr};
      return;
    }
    auto time = std::make_shared<std::atomic<Clock::time_point>>();
    *event_of(*event) = {&queue, queue.put(Kind::marker, [time] { *time = Clock::now(); }), time};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    auto [queue, number, time] = *event_of(event);
    auto& waiting = queue_of(stream);
    if (queue != &waiting) waiting.put(Kind::marker, [queue = queue, number = number] { queue->wait_or_fail(number); });
  }
  bool queryEvent(void* event) const override {
    return !event || event_of(event)->queue->reached(event_of(event)->number);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    note_wait("synchronize an event", Asked::explicitly);
    block_host(*event_of(event)->queue, event_of(event)->number);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto *a = event_of(first), *b = event_of(second);
    TORCH_CHECK(a->time && b->time, "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(b->time->load() - a->time->load()).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete event_of(event); }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    record_use(memory, stream);
  }
};

template <class Interface>
struct AcceleratorHooks : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(device_type, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(device_type, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
};

inline void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto device = storage.device().index();
  auto memory = allocate_on(device, num_bytes);
  auto *to = memory.get(), *from = storage.mutable_data();
  auto kept = std::min(num_bytes, storage.nbytes());
  if (kept) current_queue(device).put(Kind::kernel, [=] { memcpy(to, from, kept); });
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

struct PrivateUse1Hooks final : AcceleratorHooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

struct CudaHooks final : AcceleratorHooks<at::CUDAHooksInterface> {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return standin::current_device; }
  int getNumGPUs() const override { return num_devices; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

}  // namespace standin
