// Memory of the device and pinned memory of the host, by the rules of CUDA's caching allocators.
//
// A freed block goes back to the pool of its stream at once, in the order of the host, and may be handed out again on
// that stream while kernels that read it are still queued; those of other streams are waited for only if record_stream
// named them. What is handed out is NaN (bytes 0xFF), written by the stream itself, so a block that was taken again too
// early, or is read before it was written, shows in the results. Blocks are not returned to the host: a kernel that
// runs after its memory was freed reads wrong numbers, and never crashes.
#pragma once
#include "streams.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

namespace standin {

constexpr int poison = 0xFF;
constexpr size_t granule = 512;  // bytes; CUDA's allocator counts in the same steps

struct Block {
  void* data;
  size_t capacity, counted;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> users;                       // other streams, by record_stream
  std::vector<std::pair<Queue*, int64_t>> after;  // once freed: what must be over before it is handed out again
};

struct Usage {
  int64_t now = 0, peak = 0, reserved = 0, allocations = 0;
};

inline std::mutex memory_lock;
inline auto& free_blocks() {
  static auto& all = *new std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<Block*>>;
  return all;
}
inline auto& usage() {
  static auto& all = *new std::map<DeviceIndex, Usage>;
  return all;
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> held(memory_lock);
  usage()[block->device].now -= block->counted;
  for (auto stream : block->users) {
    auto& queue = queue_of(block->device, stream);
    block->after.emplace_back(&queue, queue.last());
  }
  block->users.clear();
  free_blocks()[{block->device, block->stream, block->capacity}].push_back(block);
}

inline Block* take_free_block(DeviceIndex device, StreamId stream, size_t capacity) {
  auto& pool = free_blocks()[{device, stream, capacity}];
  for (size_t i = pool.size(); i-- > 0;) {  // the last one freed first, which is the most likely to be in use still
    auto is_over = [](auto& use) { return use.first->reached(use.second); };
    auto& after = pool[i]->after;
    if (!std::all_of(after.begin(), after.end(), is_over)) continue;
    auto* block = pool[i];
    pool.erase(pool.begin() + i);
    block->after.clear();
    return block;
  }
  return nullptr;
}

inline c10::DataPtr allocate_on(DeviceIndex device, size_t num_bytes) {
  auto place = Device(device_type, device);
  if (!num_bytes) return {nullptr, nullptr, [](void*) {}, place};
  size_t counted = (num_bytes + granule - 1) / granule * granule, capacity = granule;
  while (capacity < counted) capacity *= 2;
  auto stream = current_streams[device];
  Block* block;
  {
    std::lock_guard<std::mutex> held(memory_lock);
    block = take_free_block(device, stream, capacity);
    auto& used = usage()[device];
    if (!block) used.reserved += capacity;
    used.now += counted;
    used.peak = std::max(used.peak, used.now);
    ++used.allocations;
  }
  if (block) {
    auto* data = block->data;
    current_queue(device).put(Kind::marker, [data, capacity] { memset(data, poison, capacity); });
  } else {
    block = new Block{nullptr, capacity, 0, device, stream, {}, {}};
    TORCH_CHECK_WITH(OutOfMemoryError, !posix_memalign(&block->data, 64, capacity), "stand-in device: out of memory");
    memset(block->data, poison, capacity);
  }
  block->counted = counted;
  return {block->data, block, &free_block, place};
}

// When all streams are idle, so that no test reads what an earlier one has left, right by accident.
inline void poison_free_blocks() {
  std::lock_guard<std::mutex> held(memory_lock);
  for (auto& [place, pool] : free_blocks())
    for (auto* block : pool) memset(block->data, poison, block->capacity);
}

inline void record_use(const c10::DataPtr& memory, const Stream& stream) {
  auto* block = static_cast<Block*>(memory.get_context());
  if (!block || memory.device().type() != device_type) return;
  std::lock_guard<std::mutex> held(memory_lock);
  if (stream.id() != block->stream) block->users.insert(stream.id());
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(current_device, num_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }
};
inline DeviceMemory device_memory;

// Pinned memory is the host's, but copies from and to it may run later than the host: see copy_ in operators.h.
struct PinnedMemory final : c10::Allocator {
  static auto& ranges() {
    static auto& all = *new std::map<const char*, size_t>;
    return all;
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> held(memory_lock);
      ranges().erase(static_cast<char*>(data));
    }
    free(data);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    auto size = std::max<size_t>(num_bytes, 1);
    auto* data = static_cast<char*>(malloc(size));
    std::lock_guard<std::mutex> held(memory_lock);
    ranges()[data] = size;
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }
  static bool has(const void* data) {
    std::lock_guard<std::mutex> held(memory_lock);
    auto after = ranges().upper_bound(static_cast<const char*>(data));
    if (after == ranges().begin()) return false;
    auto& [start, size] = *std::prev(after);
    return static_cast<const char*>(data) < start + size;
  }
};
inline PinnedMemory pinned_memory;

}  // namespace standin
