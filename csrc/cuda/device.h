// What a launch needs to know of its device.
#pragma once

namespace dcs {

struct RowsDevice {
  int multiprocessors = 108;
  int shared_per_block = 99 << 10;  // with leave
  int shared_per_multiprocessor = 100 << 10;
  bool clusters = false;
};

}  // namespace dcs
