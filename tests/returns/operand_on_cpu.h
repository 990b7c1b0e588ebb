// A rollout's tensors in memory, for the programs that run kernels of returns on a CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "trials.h"
#include "dcs/types.h"

namespace trials {

// What a tensor is the same along.
enum class Same { kNothing, kTime, kOuter, kInner };

// A tensor, and memory around it that must stay as it is.
template <typename T>
class Operand {
 public:
  // `apart`: elements that it begins behind where it would.
  template <typename Case>
  Operand(const Case& c, bool padded, Same same = Same::kNothing, int64_t apart = 0) {
    const int64_t more = padded ? 3 : 0;
    strides = c.contiguous ? dcs::Strides{c.inner * (c.length + more), 1, c.length + more}
                           : dcs::Strides{c.length * (c.inner + more), c.inner + more, 1};
    if (same == Same::kTime) strides.time = 0;
    if (same == Same::kOuter) strides.outer = 0;
    if (same == Same::kInner) strides.inner = 0;
    const int64_t before = is_aligned(c) ? 16 / static_cast<int64_t>(sizeof(T)) : 1 + apart;
    memory_.assign(static_cast<size_t>(c.outer * (c.length + more) * (c.inner + more) + before + 1), untouched());
    data = memory_.data() + before;
  }
  T& at(int64_t o, int64_t t, int64_t i) const {
    return data[o * strides.outer + t * strides.time + i * strides.inner];
  }
  template <typename Case>
  bool is_spoiled(const Case& c) const {
    std::vector<bool> own(memory_.size(), false);
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) own[static_cast<size_t>(&at(o, t, i) - memory_.data())] = true;
    for (size_t k = 0; k < own.size(); ++k) {
      const T want = untouched();
      if (!own[k] && std::memcmp(&memory_[k], &want, sizeof(T))) return true;
    }
    return false;
  }
  void clear() { std::fill(memory_.begin(), memory_.end(), untouched()); }
  T* data;
  dcs::Strides strides;

 private:
  // Whether the first element is at a multiple of 16 bytes, as the memory is.
  template <typename Case>
  static auto is_aligned(const Case& c) -> decltype(c.aligned) {
    return c.aligned;
  }
  static bool is_aligned(...) { return false; }
  static T untouched() { return narrowed<T>(77.0); }
  std::vector<T> memory_;
};

}  // namespace trials
