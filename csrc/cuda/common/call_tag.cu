#include "common/call_tag.h"

#include <sys/random.h>

#include <atomic>
#include <ctime>

namespace dcs {

namespace {

// From the system: std::random_device asks for a glibc newer than 2.28 where libstdc++ is linked as an archive.
uint64_t random_start() {
  uint64_t start = 0;
  if (getrandom(&start, sizeof start, 0) == static_cast<ssize_t>(sizeof start)) return start;
  std::timespec now{};
  std::timespec_get(&now, TIME_UTC);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

// A counter from a random start, mixed (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014).
uint64_t new_tag() {
  static std::atomic<uint64_t> calls{random_start()};
  uint64_t tag = calls.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
  tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
  return tag ^ tag >> 31;
}

namespace {

constexpr unsigned kCounters = 1u << 16;  // captured launches of a process; those after them clear their words
constexpr int kMostDevices = 64;
__device__ uint32_t launch_counters[kCounters];

// The current device's, which the first call that is not captured finds: that may load code.
uint32_t* counters_of(int device, bool captured) {
  static std::atomic<uint32_t*> found[kMostDevices];
  uint32_t* counters = found[device].load(std::memory_order_relaxed);
  void* address = nullptr;
  if (!counters && !captured) {
    // Another thread may be capturing, in a mode that would take loading code for its mistake.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (cudaGetSymbolAddress(&address, launch_counters) == cudaSuccess) counters = static_cast<uint32_t*>(address);
    else cudaGetLastError();
    cudaThreadExchangeStreamCaptureMode(&mode);
    found[device].store(counters, std::memory_order_relaxed);
  }
  return counters;
}

}  // namespace

uint32_t* new_launch_counter(bool captured) {
  static std::atomic<unsigned> taken[kMostDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return nullptr;
  uint32_t* const counters = counters_of(device, captured);
  if (!counters || !captured) return nullptr;
  unsigned index = taken[device].load(std::memory_order_relaxed);
  while (index < kCounters && !taken[device].compare_exchange_weak(index, index + 1, std::memory_order_relaxed)) {
  }
  return index < kCounters ? counters + index : nullptr;
}

}  // namespace dcs
