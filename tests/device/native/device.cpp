// The stand-in device, for Python: see tests/device/__init__.py.
#include "autocast.h"
#include "messages.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>

using namespace standin;

// Must run before `import torch`, which looks for CUDA's hooks once: called by ctypes, see tests/device/cuda.py.
extern "C" __attribute__((visibility("default"))) void standin_take_the_place_of_cuda() {
  device_type = c10::DeviceType::CUDA;
  dispatch_key = c10::DispatchKey::CUDA;
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<CudaHooks>(args);
  });
}

static void start(int devices) {
  num_devices = static_cast<DeviceIndex>(devices);
  c10::impl::DeviceGuardImplRegistrar registered(device_type, new Guard);
  c10::SetAllocator(device_type, &device_memory, 1);
  if (device_type == c10::DeviceType::PrivateUse1) {
    at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
    register_autocast();
  }
  register_operators();
  register_timer();
}

// A kernel in Python, on the current stream of a device.
static void launch(int device, pybind11::function kernel) {
  auto held = std::shared_ptr<pybind11::function>(new pybind11::function(std::move(kernel)), [](auto* function) {
    pybind11::gil_scoped_acquire gil;
    delete function;
  });
  ++waits().launches;
  current_queue(static_cast<DeviceIndex>(device)).put(Kind::kernel, [held] {
    pybind11::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (const pybind11::error_already_set& error) {
      throw std::runtime_error(error.what());  // while the GIL is held: the original cannot be read without it
    }
  });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("device_count", [] { return static_cast<int>(num_devices); });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice(Device(device_type, static_cast<DeviceIndex>(device))); });
  m.def("launch", &launch);
  m.def("cpu_alias", &cpu_alias);
  m.def("group", [](c10::intrusive_ptr<c10d::Backend> gloo, int64_t milliseconds) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(gloo, std::chrono::milliseconds(milliseconds)));
  });
  m.def("resize_storage", [](const pybind11::object& storage, int64_t num_bytes) {
    resize_storage(THPStorage_Unpack(storage.ptr()), num_bytes);
  });
  m.def("default_generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(
        THPGenerator_Wrap(default_generator(static_cast<DeviceIndex>(device))));
  });
  m.def("set_schedule", [](int64_t kernel_delay, int64_t message_delay, int64_t late_kernels, int64_t late_messages) {
    schedule.kernel_delay = kernel_delay, schedule.message_delay = message_delay;
    schedule.late_kernels = late_kernels, schedule.late_messages = late_messages;
  });
  m.def("waits", [] {
    std::lock_guard<std::mutex> held(waits().lock);
    return waits().count;
  });
  m.def("tasks", [](int device) {  // how many were put on a device's streams
    int64_t found = 0;
    for (auto* queue : queues_on(static_cast<DeviceIndex>(device))) found += queue->last();
    return found;
  });
  m.def("launches", [] { return waits().launches.load(); });
  m.def("reset_waits", [] {
    std::lock_guard<std::mutex> held(waits().lock);
    waits().count.clear();
    waits().launches = 0;
  });
  m.def("observe_waits", [](const pybind11::object& observer) {
    waits().observed = false;
    waits().observer = observer;
    waits().observed = !observer.is_none();
  });
  m.def("forbid_waits", [](bool forbidden) { waits().forbidden = forbidden; });
  m.def("drain", [](bool clears_errors) {  // waits for everything, on all devices, and counts no wait
    std::vector<Queue*> queues;
    for (DeviceIndex device = 0; device < num_devices; ++device)
      for (auto* queue : queues_on(device)) queues.push_back(queue);
    pybind11::gil_scoped_release no_gil;
    for (auto* queue : queues) queue->wait(queue->last());
    for (auto* queue : queues)
      if (clears_errors) queue->clear_error();
    poison_free_blocks();
  });
  m.def("memory", [](int device) {
    std::lock_guard<std::mutex> held(memory_lock);
    auto& used = usage()[static_cast<DeviceIndex>(device)];
    return std::make_tuple(used.now, used.peak, used.reserved, used.allocations);
  });
  m.def("reset_peak", [](int device) {
    std::lock_guard<std::mutex> held(memory_lock);
    auto& used = usage()[static_cast<DeviceIndex>(device)];
    used.peak = used.now;
  });
}
