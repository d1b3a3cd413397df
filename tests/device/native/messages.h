// A process-group backend with NCCL's rules, over Gloo. Operations run on a stream of the group's own, after what was on
// the current stream when they were launched. wait() orders the current stream behind them, and the host goes on.
#pragma once
#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace standin {

using GlooWork = c10::intrusive_ptr<c10d::Work>;
using Start = std::function<GlooWork()>;  // begins an operation of Gloo; nothing to wait for if it gives null
using Tensors = std::vector<Tensor>;

class Work final : public c10d::Work {
 public:
  Work(DeviceIndex device, Queue* queue, int64_t number, Tensors held, bool blocks_host)
      : device_(device), queue_(queue), number_(number), held_(std::move(held)), blocks_host_(blocks_host) {}
  bool isCompleted() override { return !queue_ || queue_->reached(number_); }
  bool isSuccess() const override { return !queue_ || queue_->error().empty(); }
  void synchronize() override {
    if (!queue_) return;  // of a batch: the batch's own work is what counts
    if (blocks_host_) {
      note_wait("barrier", Asked::explicitly);
      block_host(*queue_, number_);
    }
    current_queue(device_).put(Kind::marker, [queue = queue_, number = number_] { queue->wait_or_fail(number); });
    held_.clear();  // from here on, the stream's order protects the memory
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return held_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  DeviceIndex device_;
  Queue* queue_;
  int64_t number_;
  Tensors held_;
  bool blocks_host_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo),
        options_(c10::make_intrusive<Options>("standin", timeout)), stream_(next_private++) {}

  const std::string getBackendName() const override { return "standin"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { *is_aborted_ = true; }
  void shutdown() override { *is_aborted_ = true; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_batch_ = true; }
  GlooWork endCoalescing() override {
    is_batch_ = false;
    auto starts = std::exchange(batch_, {});
    auto tensors = std::exchange(batch_tensors_, {});
    return launch(starts, tensors, /*is_p2p=*/true, /*waits_for_all=*/true);
  }

  GlooWork broadcast(Tensors& x, const c10d::BroadcastOptions& o) override {
    return run(x, [g = gloo_, a = aliases(x), o]() mutable { return g->broadcast(a, o); });
  }
  GlooWork allreduce(Tensors& x, const c10d::AllreduceOptions& o) override {
    return run(x, [g = gloo_, a = aliases(x), s = Sum(o, size_)]() mutable { return s.end(g->allreduce(a, s.options), a); });
  }
  GlooWork allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& o) override {
    Starts starts;
    for (auto& tensor : x) {
      c10d::AllreduceOptions each;
      each.reduceOp = o.reduceOp;
      starts.push_back([g = gloo_, a = aliases({tensor}), s = Sum(each, size_)]() mutable {
        return s.end(g->allreduce(a, s.options), a);
      });
    }
    return launch(starts, x);
  }
  GlooWork reduce(Tensors& x, const c10d::ReduceOptions& o) override {
    return run(x, [g = gloo_, a = aliases(x), o]() mutable { return g->reduce(a, o); });
  }
  GlooWork allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return run(all_of(to, from), [g = gloo_, a = aliases(to), b = aliases(from), o]() mutable { return g->allgather(a, b, o); });
  }
  GlooWork _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    return run({to, from}, [g = gloo_, a = flat_alias(to), b = flat_alias(from), o]() mutable {
      return g->_allgather_base(a, b, o);
    });
  }
  GlooWork allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return run(all_of({to}, from), [g = gloo_, a = aliases(to), b = aliases(from), o]() mutable {
      return g->allgather_into_tensor_coalesced(a, b, o);
    });
  }
  GlooWork reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& o) override {
    return run(all_of(from, to), [g = gloo_, a = aliases(to), b = aliases(from), s = Sum(o, size_)]() mutable {
      return s.end(g->reduce_scatter(a, b, s.options), a);
    });
  }
  GlooWork _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return run({to, from}, [g = gloo_, a = flat_alias(to), b = flat_alias(from), s = Sum(o, size_)]() mutable {
      return s.end(g->_reduce_scatter_base(a, b, s.options), {a});
    });
  }
  GlooWork reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    Starts starts;
    for (size_t i = 0; i < to.size(); ++i)
      starts.push_back([g = gloo_, a = flat_alias(to[i]), b = flat_alias(from[i]), s = Sum(o, size_)]() mutable {
        return s.end(g->_reduce_scatter_base(a, b, s.options), {a});
      });
    return launch(starts, all_of({to}, from));
  }
  GlooWork alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                         const c10d::AllToAllOptions& o) override {
    return run({to, from}, [g = gloo_, a = cpu_alias(to), b = cpu_alias(from), m = to_sizes, n = from_sizes, o]() mutable {
      return g->alltoall_base(a, b, m, n, o);
    });
  }
  GlooWork alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions&) override {  // Gloo has none
    Tensors a = aliases(to), b = aliases(from);
    Starts starts;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) {
        starts.push_back([a, b, rank]() -> GlooWork { a[rank].copy_(b[rank]); return {}; });
        continue;
      }
      starts.push_back([g = gloo_, one = Tensors{b[rank]}, rank]() mutable { return g->send(one, rank, 0); });
      starts.push_back([g = gloo_, one = Tensors{a[rank]}, rank]() mutable { return g->recv(one, rank, 0); });
    }
    return launch(starts, all_of({to}, from));
  }
  GlooWork gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& o) override {
    return run(all_of(to, from), [g = gloo_, a = aliases(to), b = aliases(from), o]() mutable { return g->gather(a, b, o); });
  }
  GlooWork scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& o) override {
    return run(all_of(from, to), [g = gloo_, a = aliases(to), b = aliases(from), o]() mutable { return g->scatter(a, b, o); });
  }
  // Tags are ignored: as with NCCL, messages between two ranks are matched by their order.
  GlooWork send(Tensors& x, int to, int) override {
    return launch({[g = gloo_, a = aliases(x), to]() mutable { return g->send(a, to, 0); }}, x, true, false);
  }
  GlooWork recv(Tensors& x, int from, int) override {
    return launch({[g = gloo_, a = aliases(x), from]() mutable { return g->recv(a, from, 0); }}, x, true, false);
  }
  GlooWork barrier(const c10d::BarrierOptions& o) override {
    return launch({[g = gloo_, o] { return g->barrier(o); }}, {}, false, true, true);
  }

 private:
  using Starts = std::vector<Start>;

  // Gloo has no averages.
  template <class Options>
  struct Sum {
    Options options;
    double divisor = 0;
    Sum(const Options& o, int size) : options(o) {
      if (o.reduceOp != c10d::ReduceOp::AVG) return;
      options.reduceOp = c10d::ReduceOp::SUM;
      divisor = size;
    }
    GlooWork end(GlooWork work, const Tensors& tensors) {
      if (!divisor) return work;
      work->wait();
      for (auto tensor : tensors) tensor.div_(divisor);
      return {};  // not to be waited for again: Gloo's reduce_scatter delivers its result in each wait
    }
  };

  // Begins operations of Gloo and waits for them. Gloo's waits cannot be interrupted, NCCL's end when the group is
  // aborted, as if all was well: they are left to a thread of their own. Between the GPUs of a host, NCCL does not
  // notice that a process has died: it waits until the group is aborted, or its time is up.
  static void run_unless_aborted(Starts& starts, std::shared_ptr<std::atomic<bool>> aborted,
                                 std::chrono::milliseconds timeout) {
    struct Ending {
      std::mutex lock;
      std::condition_variable changed;
      bool is_over = false;
      std::string failure;
      void run(const Task& task) {
        std::string found;
        try {
          task();
        } catch (const std::exception& error) {
          found = error.what();
        }
        std::lock_guard<std::mutex> held(lock);
        is_over = true, failure = failure.empty() ? found : failure;
        changed.notify_all();
      }
    };
    std::vector<GlooWork> works;
    auto ending = std::make_shared<Ending>();
    auto end = Clock::now() + timeout;
    ending->run([&] {
      for (auto& start : starts)
        if (!*aborted) works.push_back(start());
    });
    ending->is_over = !ending->failure.empty();
    if (!ending->is_over)
      std::thread([ending, works = std::move(works)] {
        ending->run([&] {
          for (auto& work : works)
            if (work) work->wait();
        });
      }).detach();
    std::unique_lock<std::mutex> held(ending->lock);
    while (!ending->is_over && !*aborted) ending->changed.wait_for(held, std::chrono::milliseconds(20));
    auto& failure = ending->failure;
    auto is_lost = failure.find("onnection") != std::string::npos || failure.find("pipe") != std::string::npos;
    while (is_lost && !*aborted && Clock::now() < end) ending->changed.wait_for(held, std::chrono::milliseconds(20));
    if (!*aborted && !failure.empty()) throw std::runtime_error(failure);
  }
  // NCCL looks at numbers, not at shapes; Gloo cuts along the first dim.
  static Tensor flat_alias(const Tensor& tensor) { return cpu_alias(tensor).view(-1); }
  static Tensors aliases(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(cpu_alias(tensor));
    return found;
  }
  static std::vector<Tensors> aliases(const std::vector<Tensors>& lists) {
    std::vector<Tensors> found;
    for (auto& tensors : lists) found.push_back(aliases(tensors));
    return found;
  }
  static Tensors all_of(const std::vector<Tensors>& lists, Tensors tensors) {
    for (auto& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
    return tensors;
  }

  GlooWork run(const Tensors& tensors, Start start) { return launch({std::move(start)}, tensors); }

  GlooWork launch(Starts starts, const Tensors& tensors, bool is_p2p = false, bool waits_for_all = true,
                  bool blocks_host = false) {
    if (is_batch_) {
      batch_.insert(batch_.end(), starts.begin(), starts.end());
      batch_tensors_.insert(batch_tensors_.end(), tensors.begin(), tensors.end());
      return c10::make_intrusive<Work>(current_device, nullptr, 0, Tensors{}, false);
    }
    TORCH_CHECK(!*is_aborted_, "the process group was aborted");
    auto device = tensors.empty() ? current_device : tensors[0].device().index();
    for (auto& tensor : tensors)
      TORCH_CHECK(tensor.device() == Device(device_type, device), "Tensor found on device ", tensor.device(),
                  " but the group's operation is on ", Device(device_type, device));
    auto stream = Stream(Stream::UNSAFE, Device(device_type, device), stream_);
    auto &compute = current_queue(device), &queue = queue_of(stream);
    // NCCL connects all ranks in the first operation of a group, and a rank without one is waited for.
    if (waits_for_all && !std::exchange(is_connected_, true))
      starts.insert(starts.begin(), [g = gloo_] { return g->barrier(c10d::BarrierOptions()); });
    auto number = queue.put(Kind::message, [starts, &compute, ready = compute.last(), aborted = is_aborted_,
                                            timeout = options_->timeout]() mutable {
      compute.wait_or_fail(ready);
      run_unless_aborted(starts, aborted, timeout);
    });
    // As in ProcessGroupNCCL: point-to-point tensors are recorded, those of collectives are held until wait().
    if (is_p2p)
      for (auto& tensor : tensors) record_use(tensor.storage().data_ptr(), stream);
    auto work = c10::make_intrusive<Work>(device, &queue, number, is_p2p ? Tensors{} : tensors, blocks_host);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(device_type, device)});
    auto before = Guard().exchangeStream(stream);  // what waits for the future waits for this stream
    work->future->markCompleted(IValue(tensors));
    Guard().exchangeStream(before);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  StreamId stream_;
  std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  bool is_batch_ = false, is_connected_ = false;
  Starts batch_;
  Tensors batch_tensors_;
};

// DistributedDataParallel wants to know how long things take on every device; here by the host's clock.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimestamp(start), b = getTimestamp(end);
    return a && b ? std::optional(*b - *a) : std::nullopt;
  }
};
inline void register_timer() {
  c10d::TimerRegistry()->Register(
      device_type, [](Device device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<HostTimer>(device); });
}

}  // namespace standin
