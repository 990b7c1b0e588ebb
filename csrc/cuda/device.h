// What a launch needs to know of its device.
#pragma once

#include <cstdint>

namespace dcs {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Device {
  int multiprocessors = 108;
  int shared_per_block = 99 << 10;  // with leave
  int shared_per_multiprocessor = 100 << 10;
  int cluster = 1;  // blocks that a cluster can have
};

}  // namespace dcs
