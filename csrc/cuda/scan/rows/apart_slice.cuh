// Slices of long rows of one tensor whose rows lie apart, or begin at any address (padded views). A slice has parts of
// two rows at most. Of each the aligned chunks of 16 bytes around it come by one bulk copy, which lands some bytes
// before where its elements belong; the warp moves them there, a word a lane, once they have come. Output and flags are
// flat.
#pragma once

#include "scan/rows/slice.cuh"

namespace dcs {

// Where a slice's elements are when they have come, in bytes: [begin, split) of the first row and [split, end) of the
// second, each so many before their place.
struct alignas(16) RowLanding {
  int begin, split, end;
  uint16_t early, split_early;
};

template <typename T, Direction kDirection>
struct ApartSlice : Slice<T, false, false, kDirection, true> {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  using Whole = Slice<T, false, false, kDirection, true>;
  using Range = typename Whole::Range;
  using Whole::lane;
  using Whole::p;
  static constexpr int kSize = static_cast<int>(sizeof(T));

  RowLanding& landing;

  static __host__ __device__ __forceinline__ int bytes_of(const FlatParams& p) {
    return Whole::bytes_of(p) + kLandingBytes;
  }

  struct Copy {
    const char* from;
    char* to;
    int bytes;
  };
  // Of a row's part, what its copies begin with: bytes of the first chunk before it.
  static __device__ __forceinline__ int before(const T* from) { return reinterpret_cast<uintptr_t>(from) % 16; }
  // The chunks around a row's part whose first element lands at `to`. Where one reaches beyond the tensor's first or
  // last element, where there may be no memory, the part's elements in it come on their own.
  __device__ __forceinline__ Copy copy_of(const T* from, int count, char* to) const {
    const ScanProblem& problem = p.problem;
    const T* const tensor = static_cast<const T*>(problem.input);
    const auto first = reinterpret_cast<uintptr_t>(from), begin = reinterpret_cast<uintptr_t>(tensor),
               end = reinterpret_cast<uintptr_t>(
                   tensor + problem.input_strides.at(problem.outer - 1, problem.length - 1, problem.inner - 1) + 1);
    uintptr_t low = first / 16 * 16, high = (first + static_cast<unsigned>(count * kSize) + 15) / 16 * 16;
    if (low < begin || high > end) {
      if (low < begin) low += 16;
      if (high > end) high -= 16;
#pragma unroll 1
      for (int i = lane; i < count; i += 32) {
        const auto at = reinterpret_cast<uintptr_t>(from + i);
        if (at < low || at >= high) reinterpret_cast<T*>(to)[i] = from[i];
      }
    }
    const int bytes = static_cast<int>(static_cast<intptr_t>(high - low));
    return {reinterpret_cast<const char*>(low), to + static_cast<intptr_t>(low - first), max(bytes, 0)};
  }

  // What the tile has of the slice. The barrier has one arrival.
  __device__ __forceinline__ void load(uint64_t* barrier) const {
    const ScanProblem& problem = p.problem;
    const Range range = this->owned();
    const int count = max(Whole::count_of(range), 0), at = static_cast<int>(range.begin - this->memory_begin()) * kSize;
    RowLanding to{};
    Copy rows[2] = {}, flags{};
    if (count > 0) {
      const FlatPosition position = whole_rows(p, range.begin);
      const int64_t left = problem.length - position.done;
      const int of_first = static_cast<int>(min(left, static_cast<int64_t>(count)));
      const T* const from = static_cast<const T*>(problem.input) +
          (RowIndex(p, position.row).offset(problem.input_strides) + position.done);
      char* const home = reinterpret_cast<char*>(this->tensor(0));
      to.begin = at;
      to.split = at + of_first * kSize;
      to.end = at + count * kSize;
      // One row's lines of memory become lines of shared memory, unless all is in its place when it lands.
      const int in_line = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kLandingBytes);
      int early = in_line % 16 == 0 ? 0 : kLandingBytes - in_line;
      if (of_first < count) {
        const T* const second =
            static_cast<const T*>(problem.input) + RowIndex(p, position.row + 1).offset(problem.input_strides);
        const int split_at = (to.split - before(second)) & ~15;  // of the second row's copy
        to.split_early = static_cast<uint16_t>(to.split - before(second) - split_at);
        rows[1] = copy_of(second, count - of_first, home + (to.split - to.split_early));
        early = at - ((split_at - (before(from) + of_first * kSize)) & ~15) - before(from);
      }
      to.early = static_cast<uint16_t>(early);
      rows[0] = copy_of(from, of_first, home + (at - early));
    }
    if (problem.reset && count > 0) {
      const bool* const from = problem.reset + range.begin;
      bool* const home = this->flags() + at / kSize;
      const int whole = count / 16 * 16;
      if (whole + lane < count) home[whole + lane] = from[whole + lane];
      flags = {reinterpret_cast<const char*>(from), reinterpret_cast<char*>(home), whole};
    }
    __syncwarp();  // the lane that arrives does so for those that have copied elements
    if (lane != 0) return;
    landing = to;
    mbarrier_arrive_expect_tx(barrier, rows[0].bytes + rows[1].bytes + flags.bytes);
    const auto start = [&](const Copy& copy) {
      if (copy.bytes > 0) bulk_load(copy.to, copy.from, copy.bytes, barrier);
    };
    start(rows[0]);
    start(rows[1]);
    start(flags);
  }

  // Words [first, end) of the slice from so many bytes before them, the last ones first: what is written has been read.
  template <bool kHalf>
  __device__ __forceinline__ void move_words(int first, int end, int early) const {
    constexpr int kTogether = 7;
    uint32_t* const words = reinterpret_cast<uint32_t*>(this->shared) + lane;
    const uint32_t* const landed = words - (early + 3) / 4;
    const auto read = [&](int at) { return kHalf ? __funnelshift_r(landed[at], landed[at + 1], 16) : landed[at]; };
    uint32_t taken[kTogether];
    int at = end - 32 * kTogether;
#pragma unroll 1
    for (; at >= first; at -= 32 * kTogether) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) taken[j] = read(at + 32 * j);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kTogether; ++j) words[at + 32 * j] = taken[j];
    }
    if (at + 32 * kTogether == first) return;
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (at + 32 * j + lane >= first) taken[j] = read(at + 32 * j);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (at + 32 * j + lane >= first) words[at + 32 * j] = taken[j];
  }

  // Moves the elements to their place, once they have come.
  __device__ __forceinline__ void settle() const {
    const RowLanding at = landing;
    if ((at.early | at.split_early) == 0) return;
    // Of a word of two rows the second one's half is written behind the first one's.
    const bool is_shared = kSize == 2 && at.split % 4 != 0 && at.split < at.end;
    T of_second{};
    if (is_shared) of_second = *reinterpret_cast<const T*>(this->shared + (at.split - at.split_early));
    const int split = (at.split + 3) / 4;
#pragma unroll 1
    for (int row = 1; row >= 0; --row) {
      const int first = row ? split : at.begin / 4, end = row ? (at.end + 3) / 4 : split,
                early = row ? at.split_early : at.early;
      if (first >= end || early == 0) continue;
      if (kSize == 2 && early % 4 != 0) move_words<true>(first, end, early);
      else move_words<false>(first, end, early);
    }
    __syncwarp();
    if (is_shared && lane == 0) *reinterpret_cast<T*>(this->shared + at.split) = of_second;
    __syncwarp();
  }

  // The same as of flat rows.
  __device__ __forceinline__ void store() const {
    show_to_bulk_stores();
    __syncwarp();
    if (this->first >= this->low && this->first + this->elements() <= this->high) this->store_all_whole();
    else Whole::store_parts(*this);
  }
};

}  // namespace dcs
