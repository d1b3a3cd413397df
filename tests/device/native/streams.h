// Streams and events. A stream is a queue with a thread of its own: the host puts tasks in and goes on, the thread runs
// them later and in order. An event is the number of a task in a queue.
//
// A race is only seen if the scheduler lets it happen, so tests choose between three schedules:
//   - plain: a task runs as soon as its thread gets to it;
//   - delays: every kernel or message takes some microseconds more, whoever waits for it;
//   - late: a task does not start before something waits for it (or a limit has passed). This is the schedule in which
//     a forgotten wait always shows: nothing else makes the task run, however long other streams take.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace standin {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;
using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::microseconds;
using Task = std::function<void()>;

// Chosen once by start(): PrivateUse1, or CUDA to take the place of "cuda" in a CPU build of PyTorch.
inline c10::DeviceType device_type = c10::DeviceType::PrivateUse1;
inline c10::DispatchKey dispatch_key = c10::DispatchKey::PrivateUse1;
inline DeviceIndex num_devices = 2;

enum class Kind { kernel, message, marker };  // a marker (an event, a wait) takes no time of its own

struct Schedule {
  std::atomic<int64_t> kernel_delay{0}, message_delay{0};  // microseconds
  std::atomic<int64_t> late_kernels{0}, late_messages{0};  // microseconds at most, unless something waits
};
inline Schedule schedule;

class Queue {
 public:
  Queue() { std::thread([this] { run(); }).detach(); }

  // Returns the number of the task, for waits.
  int64_t put(Kind kind, Task task) {
    std::lock_guard<std::mutex> held(lock);
    tasks.emplace_back(kind, std::move(task));
    changed.notify_all();
    return ++queued;
  }
  int64_t last() {
    std::lock_guard<std::mutex> held(lock);
    return queued;
  }
  bool reached(int64_t number) {
    std::lock_guard<std::mutex> held(lock);
    return done >= number;
  }
  void wait(int64_t number) {
    std::unique_lock<std::mutex> held(lock);
    if (wanted < number) wanted = number, changed.notify_all();
    changed.wait(held, [&] { return done >= number; });
  }
  // For streams: what waits for a failed kernel fails as well.
  void wait_or_fail(int64_t number) {
    wait(number);
    auto failure = error();
    if (!failure.empty()) throw std::runtime_error(failure);
  }
  // As on a GPU, a failed kernel is reported by a later wait, and by every wait after that.
  std::string error() {
    std::lock_guard<std::mutex> held(lock);
    return first_error;
  }
  void clear_error() {
    std::lock_guard<std::mutex> held(lock);
    first_error.clear();
  }

 private:
  void run() {
    at::set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
      changed.wait(held, [&] { return !tasks.empty(); });
      auto [kind, task] = std::move(tasks.front());
      tasks.pop_front();
      auto number = done + 1;
      if (auto late = Microseconds(kind == Kind::message ? schedule.late_messages : schedule.late_kernels); late.count())
        changed.wait_for(held, late, [&] { return wanted >= number; });
      held.unlock();
      auto delay = kind == Kind::kernel ? schedule.kernel_delay.load() : kind == Kind::message ? schedule.message_delay.load() : 0;
      if (delay) std::this_thread::sleep_for(Microseconds(delay));
      std::string failure;
      try {
        task();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      task = nullptr;  // what it holds is let go before anybody sees it as done
      held.lock();
      if (first_error.empty()) first_error = failure;
      ++done;
      changed.notify_all();
    }
  }

  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::pair<Kind, Task>> tasks;
  int64_t queued = 0, done = 0, wanted = 0;
  std::string first_error;
};

// ---- which queue -----------------------------------------------------------------------------------------------------

constexpr StreamId num_pooled = 32;  // streams 1 to 32, dealt in turn as CUDA does; 0 is the default stream
inline std::atomic<StreamId> next_private{num_pooled + 1};  // those of process groups come after them

// Queues are never deleted: their threads are detached, and may outlive static objects.
inline auto& all_queues() {
  static auto& all = *new std::map<std::pair<DeviceIndex, StreamId>, Queue*>;
  return all;
}
inline std::mutex queues_lock;

inline Queue& queue_of(DeviceIndex device, StreamId stream) {
  std::lock_guard<std::mutex> held(queues_lock);
  auto& found = all_queues()[{device, stream}];
  if (!found) found = new Queue;
  return *found;
}
inline Queue& queue_of(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

inline std::vector<Queue*> queues_on(DeviceIndex device) {
  std::lock_guard<std::mutex> held(queues_lock);
  std::vector<Queue*> found;
  for (auto& [place, queue] : all_queues())
    if (place.first == device) found.push_back(queue);
  return found;
}

// The current device and its current stream belong to a thread, as with CUDA.
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::map<DeviceIndex, StreamId> current_streams;

inline DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
inline Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(device_type, device), current_streams[device]);
}
inline Queue& current_queue(DeviceIndex device) { return queue_of(device, current_streams[device]); }

struct WithDevice {  // sets the current device for a scope
  DeviceIndex before = current_device;
  explicit WithDevice(DeviceIndex device) { current_device = device; }
  ~WithDevice() { current_device = before; }
};

// ---- what the host waits for -----------------------------------------------------------------------------------------

struct Waits {
  std::mutex lock;
  std::map<std::string, int64_t> count;  // by operator, or by what else made the host wait
  std::atomic<int64_t> launches{0};
  std::atomic<bool> forbidden{false};  // set_sync_debug_mode("error")
  pybind11::object observer;           // called with the reason, on the thread that waits
  std::atomic<bool> observed{false};
};
inline Waits& waits() {
  static auto& one = *new Waits;
  return one;
}

enum class Asked { implicitly, explicitly };  // set_sync_debug_mode lets torch.cuda.synchronize() pass, as CUDA's does

inline void note_wait(const std::string& reason, Asked asked) {
  {
    std::lock_guard<std::mutex> held(waits().lock);
    ++waits().count[reason];
  }
  if (waits().observed) {
    pybind11::gil_scoped_acquire gil;
    waits().observer(reason);
  }
  TORCH_CHECK(asked == Asked::explicitly || !waits().forbidden, "called a synchronizing CUDA operation: ", reason);
}

// Blocks the host. Kernels may be Python functions, so the GIL must be free meanwhile.
inline void block_host(Queue& queue, int64_t number) {
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    queue.wait(number);
  } else {
    queue.wait(number);
  }
  auto error = queue.error();
  TORCH_CHECK(error.empty(), "stand-in device: a kernel that was launched earlier failed: ", error);
}
inline void wait_for_queue(Queue& queue, const std::string& reason, Asked asked = Asked::implicitly) {
  note_wait(reason, asked);
  block_host(queue, queue.last());
}
inline void synchronize_device(DeviceIndex device) {
  note_wait("synchronize", Asked::explicitly);
  for (auto* queue : queues_on(device)) block_host(*queue, queue->last());
}

struct Event {
  Queue* queue = nullptr;
  int64_t number = 0;
  std::shared_ptr<std::atomic<Clock::time_point>> time;  // when the stream came past it; only of events with timing
};

}  // namespace standin
