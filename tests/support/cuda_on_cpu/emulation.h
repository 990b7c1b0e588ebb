// CUDA kernels on a CPU, to test what they compute and that they cannot wait for each other forever: a block is an
// operating system's thread, its CUDA threads are fibers that take turns in a random order, and asynchronous copies
// happen late. What it cannot show: how a GPU orders memory, and any speed.
//
// Include it before the kernels, whose `extern __shared__` arrays have been replaced by `emulation::shared()`, with
// this folder ahead of csrc/cuda: its headers stand in for those of PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __align__
#undef __restrict__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local
#define __align__(bytes) alignas(bytes)
#define __restrict__

namespace emulation {

// A copy that nobody waits for: it happens some time later.
struct Copy {
  void* to;
  const void* from;
  int bytes;
  uint64_t* barrier;
};

struct Fiber {
  ucontext_t context;
  unsigned id;
  bool done = false;
  std::string waits_for;
  unsigned cluster_generation = 0;  // at its last arrival
  std::vector<char> stack;
  std::deque<std::vector<Copy>> groups;  // of copies that the thread itself waits for; the last one is still open
  std::deque<Copy> stores;               // to global memory, whose source must stay until they have read it
};

struct Warp {
  uint64_t values[2][32];
  int arrived = 0;
  uint32_t generation = 0;
};

// A word that another block of the cluster stores here: it comes some time later.
struct RemoteStore {
  void* to;
  uint64_t bits;
  int bytes;
  uint64_t* barrier;
};
struct RemoteStores {
  std::mutex mutex;
  std::vector<RemoteStore> stores;
};

// Blocks that run together, by rank: where each has its shared memory, static (from `anchor`) and dynamic.
struct Cluster {
  std::vector<std::atomic<char*>> anchors;
  std::vector<std::atomic<unsigned char*>> dynamics;
  std::vector<RemoteStores> remote_stores;
  std::atomic<unsigned> arrived{0}, generation{0};
  explicit Cluster(int blocks)
      : anchors(static_cast<size_t>(blocks)),
        dynamics(static_cast<size_t>(blocks)),
        remote_stores(static_cast<size_t>(blocks)) {}
};
inline thread_local char anchor;

struct Block {
  unsigned index, threads, blocks;
  Cluster* cluster;
  RemoteStores* remote_stores;
  unsigned char* shared;
  int64_t shared_bytes;
  ucontext_t scheduler;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  unsigned arrived = 0, generation = 0;  // at __syncthreads
  bool all[2] = {true, true};            // at __syncthreads_and, of this generation and the next
  Fiber* now = nullptr;
  std::vector<Copy> loads;
  std::mt19937 random;
};

inline thread_local Block* block = nullptr;
inline std::atomic<uint64_t> progress{0};

inline Block& current() { return *block; }
inline unsigned thread() { return current().now->id; }
inline unsigned char* shared() { return current().shared; }

inline void wait_for(const std::string& what) {
  Fiber* const fiber = current().now;
  fiber->waits_for = what;
  swapcontext(&fiber->context, &current().scheduler);
}

// All lanes of the warp leave a value; then the values, which stay until the next but one exchange.
inline const uint64_t* exchange(uint64_t value, const char* what) {
  Warp& warp = current().warps[thread() / 32];
  const uint32_t generation = warp.generation;
  warp.values[generation & 1][thread() % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    ++progress;
  } else {
    while (warp.generation == generation) wait_for(what);
  }
  return warp.values[generation & 1];
}
template <typename T, typename Source>
T shuffle(T value, const char* what, const Source& source) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const int lane = static_cast<int>(thread() % 32);
  const uint64_t* const values = exchange(bits, what);
  memcpy(&value, &values[source(lane)], sizeof(T));
  return value;
}

// A barrier in shared memory, in the 8 bytes of CUDA's.
struct Barrier {
  uint16_t pending, expected;
  int32_t bytes_and_phase;  // bytes to come * 2 + phase
};
inline Barrier& barrier_at(uint64_t* barrier) { return *reinterpret_cast<Barrier*>(barrier); }
inline void settle(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes_and_phase >> 1 != 0) return;
  barrier.pending = barrier.expected;
  barrier.bytes_and_phase ^= 1;
  ++progress;
}

// Lets some of what is on its way arrive, from where `from` says.
template <typename Item, typename From>
void run_some(std::vector<Item>& items, const From& from) {
  for (size_t i = 0; i < items.size();) {
    if (current().random() % 3) {
      ++i;
      continue;
    }
    const Item item = items[i];
    items.erase(items.begin() + static_cast<std::ptrdiff_t>(i));
    memcpy(item.to, from(item), static_cast<size_t>(item.bytes));
    barrier_at(item.barrier).bytes_and_phase -= 2 * item.bytes;
    settle(barrier_at(item.barrier));
    ++progress;
  }
}
inline void run_some_loads() {
  run_some(current().loads, [](const Copy& copy) { return copy.from; });
}
inline void run_some_remote_stores() {
  const std::lock_guard<std::mutex> guard(current().remote_stores->mutex);
  run_some(current().remote_stores->stores, [](const RemoteStore& store) { return &store.bits; });
}
inline void run_stores(Fiber& fiber) {
  for (const Copy& copy : fiber.stores) memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  fiber.stores.clear();
}

inline void enter(unsigned low, unsigned high) {
  const uint64_t address = (static_cast<uint64_t>(high) << 32) | low;
  (*reinterpret_cast<const std::function<void()>*>(address))();
  current().now->done = true;
  ++progress;
  swapcontext(&current().now->context, &current().scheduler);
}

inline void start_fibers(Block& of, const std::function<void()>& kernel) {
  for (unsigned id = 0; id < of.threads; ++id) {
    auto fiber = std::make_unique<Fiber>();
    fiber->id = id;
    fiber->stack.resize(48 << 10);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = nullptr;
    const uint64_t address = reinterpret_cast<uint64_t>(&kernel);
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address),
        static_cast<unsigned>(address >> 32));
    of.fibers.push_back(std::move(fiber));
  }
}

// False where nothing has happened for so many seconds: every thread waits.
inline bool run_block(Block& of, double seconds) {
  using Clock = std::chrono::steady_clock;
  uint64_t last = progress;
  Clock::time_point since = Clock::now();
  while (true) {
    bool alive = false;
    const unsigned first = of.random() % of.threads;
    for (unsigned i = 0; i < of.threads; ++i) {
      Fiber* const fiber = of.fibers[(first + i) % of.threads].get();
      if (fiber->done) continue;
      alive = true;
      of.now = fiber;
      swapcontext(&of.scheduler, &fiber->context);
    }
    run_some_loads();
    run_some_remote_stores();
    if (!alive) break;
    if (progress != last) {
      last = progress;
      since = Clock::now();
    } else if (std::chrono::duration<double>(Clock::now() - since).count() > seconds) {
      printf("stuck: block %u", of.index);
      for (size_t i = 0; i < of.fibers.size(); i += 32)
        if (!of.fibers[i]->done) printf(", warp %zu waits for %s", i / 32, of.fibers[i]->waits_for.c_str());
      printf("\n");
      return false;
    }
    if (of.random() % 4 == 0) std::this_thread::yield();
  }
  for (const std::unique_ptr<Fiber>& fiber : of.fibers) run_stores(*fiber);
  return true;
}

// A launch. `together`: the blocks run at the same time, else one cluster after the other; `cluster`: blocks of one.
inline bool launch(int64_t blocks, int threads, int64_t shared_bytes, bool together, unsigned seed,
    const std::function<void()>& kernel, int cluster = 1) {
  std::atomic<bool> is_done{true};
  std::deque<Cluster> clusters;
  for (int64_t i = 0; i < blocks; i += cluster) clusters.emplace_back(cluster);
  const auto run = [&](unsigned index) {
    Block mine{};
    block = &mine;
    mine.index = index;
    mine.threads = static_cast<unsigned>(threads);
    mine.blocks = static_cast<unsigned>(blocks);
    mine.cluster = &clusters[index / static_cast<unsigned>(cluster)];
    mine.cluster->anchors[index % static_cast<unsigned>(cluster)] = &anchor;
    mine.remote_stores = &mine.cluster->remote_stores[index % static_cast<unsigned>(cluster)];
    mine.random.seed(seed * 7919 + index);
    std::vector<unsigned char> memory(static_cast<size_t>(shared_bytes) + 128, 0xff);
    mine.shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    mine.shared_bytes = shared_bytes;
    mine.cluster->dynamics[index % static_cast<unsigned>(cluster)] = mine.shared;
    mine.warps.resize(static_cast<size_t>(threads) / 32);
    start_fibers(mine, kernel);
    if (!run_block(mine, 20.0)) is_done = false;
  };
  std::vector<std::thread> running;
  for (unsigned index = 0; index < blocks; ++index) {
    running.emplace_back(run, index);
    if (together ? index + 1 < blocks : (index + 1) % static_cast<unsigned>(cluster) != 0) continue;
    for (std::thread& each : running) each.join();
    running.clear();
  }
  return is_done;
}

}  // namespace emulation

namespace dcs {
inline struct {
  struct {
    operator unsigned() const { return emulation::thread(); }
  } x;
} threadIdx;
inline struct {
  struct {
    operator unsigned() const { return emulation::current().index; }
  } x;
} blockIdx;
inline struct {
  struct {
    operator unsigned() const { return emulation::current().threads; }
  } x;
} blockDim;
inline struct {
  struct {
    operator unsigned() const { return emulation::current().blocks; }
  } x;
} gridDim;
using std::max;
using std::min;
}  // namespace dcs

#include "intrinsics.h"
