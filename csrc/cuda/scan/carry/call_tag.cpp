#include "scan/carry/call_tag.h"

#include <atomic>
#include <random>

namespace dcs {

// A counter from a random start, mixed (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014).
uint64_t new_tag() {
  static std::atomic<uint64_t> calls{(uint64_t{std::random_device()()} << 32) ^ std::random_device()()};
  uint64_t tag = calls.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
  tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
  return tag ^ tag >> 31;
}

}  // namespace dcs
