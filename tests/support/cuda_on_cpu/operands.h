// Operands of scans with a value for every step, in memory whose end or beginning is beside a page that must not be
// touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>

#include "dcs/types.h"

namespace trials {

// So many bytes, filled with ones: as floating point numbers NaNs. They end, or begin, at a page that must not be
// touched; where they end there, `aligned` moves them to the last multiple of 16 bytes before.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t offset, bool at_end, bool aligned) {
    const int64_t page = sysconf(_SC_PAGESIZE), inner = (offset + bytes + page - 1) / page * page;
    size_ = static_cast<size_t>(inner + 2 * page);
    area_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (area_ == MAP_FAILED) std::abort();
    memset(area_ + page, 0xff, static_cast<size_t>(inner));
    for (char* const guard : {area_, area_ + page + inner}) mprotect(guard, static_cast<size_t>(page), PROT_NONE);
    int64_t start = page + (at_end ? inner - bytes : offset);
    if (aligned) start = start / 16 * 16;
    data = area_ + start;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(area_, size_); }
  char* data;

 private:
  char* area_;
  size_t size_;
};

// How rows lie in memory.
enum class Layout {
  kFlat,       // one behind the other from an aligned address on
  kPadded,     // apart, from anywhere on, inner index first or last
  kScattered,  // the same, and the elements of a row, too
  kShared,     // all are one
  kOne,        // and all its elements are one
};

template <typename T>
class Operand {
 public:
  Operand(Layout layout, int64_t outer, int64_t length, int64_t inner, std::mt19937& random)
      : strides(draw(layout, outer, length, inner, random)),
        outer_(outer),
        length_(length),
        inner_(inner),
        extent_((outer - 1) * strides.outer + (length - 1) * strides.time + (inner - 1) * strides.inner + 1),
        memory_(extent_ * static_cast<int64_t>(sizeof(T)),
            layout == Layout::kFlat ? 0 : static_cast<int64_t>(random() % 16 * sizeof(T)), random() % 2,
            layout == Layout::kFlat),
        data(reinterpret_cast<T*>(memory_.data)) {}

  T& at(int64_t row, int64_t step) const {
    return data[row / inner_ * strides.outer + row % inner_ * strides.inner + step * strides.time];
  }
  int64_t bytes() const { return extent_ * static_cast<int64_t>(sizeof(T)); }
  // Whether what lies between the rows is as it was.
  bool is_padding_whole() const {
    std::vector<bool> used(static_cast<size_t>(extent_));
    for (int64_t row = 0; row < outer_ * inner_; ++row)
      for (int64_t step = 0; step < length_; ++step) used[static_cast<size_t>(&at(row, step) - data)] = true;
    for (int64_t i = 0; i < bytes(); ++i)
      if (!used[static_cast<size_t>(i) / sizeof(T)] && memory_.data[i] != '\xff') return false;
    return true;
  }

  const dcs::Strides strides;

 private:
  static dcs::Strides draw(Layout layout, int64_t outer, int64_t length, int64_t inner, std::mt19937& random) {
    if (layout == Layout::kFlat) return {inner * length, 1, length};
    if (layout == Layout::kShared) return {0, 1, 0};
    if (layout == Layout::kOne) return {0, 0, 0};
    const int64_t time = layout == Layout::kScattered ? 1 + static_cast<int64_t>(random() % 3) : 1;
    // Pitches of every alignment, and of none.
    const int64_t unit = int64_t{1} << random() % 5, pad = static_cast<int64_t>(random() % 4) * unit,
                  pitch = (length * time + unit - 1) / unit * unit + pad;
    if (random() % 2) return {inner * pitch, time, pitch};
    return {pitch, time, outer * pitch};
  }

  const int64_t outer_, length_, inner_, extent_;
  const Guarded memory_;

 public:
  T* const data;
};

}  // namespace trials
