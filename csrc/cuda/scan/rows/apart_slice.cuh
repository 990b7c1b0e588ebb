// Slices of long rows of one tensor whose rows lie apart, or begin at any address (padded views). A slice has parts of
// two rows at most. Of each the aligned chunks of 16 bytes around it come by one bulk copy, which lands some bytes
// before where its elements belong, and the warp moves them there once they have come. Output and flags are flat.
#pragma once

#include "scan/rows/slice.cuh"

namespace dcs {

// Where a slice's elements are when they have come, in bytes: [begin, split) of the first row and [split, end) of the
// second, each so many before their place.
struct alignas(16) RowLanding {
  uint16_t begin, split, end, early, split_early;
};

// How a slice comes; `to`: bytes from its first element's place on.
struct ApartCopies {
  struct Copy {
    uintptr_t from;
    int to, bytes;
  };
  Copy rows[2];
  RowLanding landing;
  bool is_cut;  // some elements do not come by them
};

template <typename T, Direction kDirection>
struct ApartSlice : Slice<T, false, false, kDirection, true> {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  using Whole = Slice<T, false, false, kDirection, true>;
  using Range = typename Whole::Range;
  using Whole::lane;
  using Whole::p;
  using Whole::shared;
  static constexpr int kSize = static_cast<int>(sizeof(T));

  RowLanding& landing;

  static __host__ __device__ __forceinline__ int bytes_of(const FlatParams& p) {
    return Whole::bytes_of(p) + kLandingBytes;
  }

  // The slice that begins with an index, in a place of those from `shared` on.
  static __device__ __forceinline__ ApartSlice at(
      const FlatParams& p, int64_t first, unsigned char* shared, int place, RowLanding* landings) {
    return {{InDirection<kDirection>(p), p, first, p.phase, p.count + p.phase,
                shared + place * bytes_of(p) + kLandingBytes},
        landings[place]};
  }

  // A row's part of the slice, whose place begins at byte `at`.
  struct Part {
    const T* from;
    int count, at, early;
    __device__ __forceinline__ uintptr_t address() const { return reinterpret_cast<uintptr_t>(from); }
    __device__ __forceinline__ int in_chunk() const { return static_cast<int>(address() % 16); }
    __device__ __forceinline__ uintptr_t end() const { return address() + static_cast<unsigned>(count * kSize); }
  };
  struct Parts {
    Part of[2];
  };
  __device__ __forceinline__ Parts parts() const {
    const ScanProblem& problem = p.problem;
    const T* const tensor = static_cast<const T*>(problem.input);
    const Range range = this->owned();
    const int count = Whole::count_of(range), at = static_cast<int>(range.begin - this->memory_begin()) * kSize;
    if (count <= 0) return {};
    const FlatPosition position = whole_rows(p, range.begin);
    const int64_t left = problem.length - position.done;
    const int of_first = static_cast<int>(min(left, static_cast<int64_t>(count)));
    Part first{tensor + (RowIndex(p, position.row).offset(problem.input_strides) + position.done), of_first, at, 0},
        second{nullptr, 0, at + of_first * kSize, 0};
    if (of_first == count) {
      // Lines of memory become lines of shared memory, unless all is in its place when it lands.
      if (first.in_chunk()) first.early = kLandingBytes - static_cast<int>(first.address() % kLandingBytes);
    } else {
      second.from = tensor + RowIndex(p, position.row + 1).offset(problem.input_strides);
      second.count = count - of_first;
      const int lands_at = (second.at - second.in_chunk()) & ~15;
      second.early = second.at - second.in_chunk() - lands_at;
      first.early = at - first.in_chunk() - ((lands_at - first.in_chunk() - of_first * kSize) & ~15);
    }
    return {first, second};
  }

  // A part's chunks that reach beyond neither the tensor's first nor its last element, where there may be no memory.
  struct Chunks {
    uintptr_t low, high;
    bool is_cut;
  };
  __device__ __forceinline__ Chunks chunks_of(const Part& part) const {
    const auto tensor = reinterpret_cast<uintptr_t>(p.problem.input);
    const Strides& strides = p.problem.input_strides;
    const uintptr_t last =
        tensor + strides.at(p.problem.outer - 1, p.problem.length - 1, p.problem.inner - 1) * kSize + (kSize - 1);
    Chunks of{part.address() / 16 * 16, (part.end() + 15) / 16 * 16, false};
    const bool begins = of.low < tensor;
    const bool ends = of.high > last + 1;
    if (begins) of.low += 16;
    if (ends) of.high -= 16;
    of.is_cut = begins || ends;
    return of;
  }
  __device__ __forceinline__ ApartCopies copies() const {
    const Parts found = parts();
    const Part &first = found.of[0], &second = found.of[1];
    ApartCopies of{};
    of.landing.begin = static_cast<uint16_t>(first.at);
    of.landing.split = static_cast<uint16_t>(second.at);
    of.landing.end = static_cast<uint16_t>(second.at + second.count * kSize);
    of.landing.early = static_cast<uint16_t>(first.early);
    of.landing.split_early = static_cast<uint16_t>(second.early);
    for (int i = 0; i < 2; ++i) {
      const Part& part = found.of[i];
      if (part.count == 0) continue;
      const Chunks chunks = chunks_of(part);
      of.rows[i].from = chunks.low;
      of.rows[i].to = part.at - part.early + static_cast<int>(static_cast<intptr_t>(chunks.low - part.address()));
      of.rows[i].bytes = max(static_cast<int>(static_cast<intptr_t>(chunks.high - chunks.low)), 0);
      of.is_cut = of.is_cut || chunks.is_cut;
    }
    return of;
  }
  // The elements that are not in those chunks.
  static __device__ __noinline__ void load_cut(const ApartSlice slice) {
    const Parts found = slice.parts();
    for (const Part& part : found.of) {
      if (part.count == 0) continue;
      const Chunks chunks = slice.chunks_of(part);
      T* const to = reinterpret_cast<T*>(slice.shared + (part.at - part.early));
      for (int i = slice.lane; i < part.count; i += 32) {
        const auto address = reinterpret_cast<uintptr_t>(part.from + i);
        if (address < chunks.low || address >= chunks.high) to[i] = part.from[i];
      }
    }
  }

  // What the tile has of the slice, of which lane `owner` has the copies. The barrier has one arrival.
  __device__ __forceinline__ void load(const ApartCopies& copies, int owner, bool is_cut, uint64_t* barrier) const {
    if (is_cut) load_cut(*this);
    int flags = 0;
    if (p.problem.reset) {
      const Range range = this->owned();
      const int count = Whole::count_of(range);
      if (count > 0) {
        const bool* const from = p.problem.reset + range.begin;
        bool* const to = this->flags() + (range.begin - this->memory_begin());
        flags = count / 16 * 16;
        if (flags + lane < count) to[flags + lane] = from[flags + lane];
        if (lane == owner && flags > 0) bulk_load(to, from, flags, barrier);
      }
    }
    __syncwarp();  // the lane that arrives does so for those that have copied elements
    if (lane != owner) return;
    landing = copies.landing;
    mbarrier_arrive_expect_tx(barrier, copies.rows[0].bytes + copies.rows[1].bytes + flags);
#pragma unroll
    for (const ApartCopies::Copy& copy : copies.rows)
      if (copy.bytes > 0) bulk_load(shared + copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes, barrier);
  }

  // Words [first, end) of the slice from so many bytes before them, the last ones first: what is written has been read.
  template <bool kHalf>
  __device__ __forceinline__ void move_words(int first, int end, int early) const {
    constexpr int kTogether = 4;
    uint32_t* const words = reinterpret_cast<uint32_t*>(shared) + lane;
    const uint32_t* const landed = words - (early + 3) / 4;
#pragma unroll 1
    for (int at = end - 32 * kTogether; at > first - 32 * kTogether; at -= 32 * kTogether) {
      uint32_t taken[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int word = at + 32 * j;
        if (word + lane >= first) taken[j] = kHalf ? __funnelshift_r(landed[word], landed[word + 1], 16) : landed[word];
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (at + 32 * j + lane >= first) words[at + 32 * j] = taken[j];
    }
  }
  // Those of two rows, the second one first.
  static __device__ __noinline__ void move_rows(const ApartSlice slice) {
    const RowLanding at = slice.landing;
    // Of a word of both the second one's half is written behind the first one's.
    const bool is_shared = kSize == 2 && at.split % 4 != 0;
    T of_second{};
    if (is_shared) of_second = *reinterpret_cast<const T*>(slice.shared + (at.split - at.split_early));
    const int split = (at.split + 3) / 4;
    for (int row = 1; row >= 0; --row) {
      const int first = row ? split : at.begin / 4, end = row ? (at.end + 3) / 4 : split,
                early = row ? at.split_early : at.early;
      if (early == 0) continue;
      if (kSize == 2 && early % 4 != 0) slice.template move_words<true>(first, end, early);
      else slice.template move_words<false>(first, end, early);
    }
    __syncwarp();
    if (is_shared && slice.lane == 0) *reinterpret_cast<T*>(slice.shared + at.split) = of_second;
  }

  // A lane's vectors of a slice of one row, each made of two aligned ones that are kSkipped bytes and more behind
  // it. All have read before one writes.
  template <int kSkipped>
  __device__ __forceinline__ void move_vectors(int early) const {
    constexpr int kWord = kSkipped / 4;
    uint4* const to = reinterpret_cast<uint4*>(shared) + lane * p.vectors;
    const uint4* const from = to - (early + 15) / 16;
    uint32_t words[4 * (kFlatVectors + 1)];
#pragma unroll
    for (int k = 0; k <= kFlatVectors; ++k)
      if (k <= p.vectors) {
        const uint4 read = from[k];
        memcpy(words + 4 * k, &read, 16);
      }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kFlatVectors; ++k)
      if (k < p.vectors) {
        uint32_t moved[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int word = 4 * k + j + kWord;
          moved[j] = kSkipped % 4 ? __funnelshift_r(words[word], words[word + 1], 16) : words[word];
        }
        uint4 written;
        memcpy(&written, moved, 16);
        to[k] = written;
      }
  }
  // `visit` with the number of bytes as a type, of which elements are multiples.
  template <int kLeast = kSize, typename Visit>
  static __device__ __forceinline__ void with_bytes(int bytes, const Visit& visit) {
    if constexpr (kLeast + kSize < 16) {
      if (bytes != kLeast) return with_bytes<kLeast + kSize>(bytes, visit);
    }
    visit(std::integral_constant<int, kLeast>());
  }

  // Moves the elements to their place, once they have come.
  __device__ __forceinline__ void settle() const {
    const RowLanding at = landing;
    if ((at.early | at.split_early) == 0) return;
    if (at.split < at.end) {
      move_rows(*this);
    } else {
      const int early = at.early;
      with_bytes((16 - early % 16) % 16, [&](auto bytes) { move_vectors<bytes()>(early); });
    }
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

// How a warp's slices come: those of 32 rounds are found at once, a round a lane.
struct ApartRounds {
  ApartCopies copies;
  uint32_t cut = 0;  // bits of the rounds

  // In every round, by all lanes; those of neighboring rounds begin so many indices apart.
  template <typename Work>
  __device__ __forceinline__ void load(int round, int rounds, const Work& slice, int64_t apart, uint64_t* barrier) {
    if (round % 32 == 0) {
      Work of_lane = slice;
      of_lane.first += of_lane.lane * apart;
      copies = of_lane.copies();
      cut = __ballot_sync(0xffffffffu, copies.is_cut);
    }
    if (round < rounds) slice.load(copies, round % 32, cut >> round % 32 & 1, barrier);
  }
};

// Those of a kernel.
template <typename T, bool kStep, bool kBackward, Direction kDirection, bool kApart>
struct LongSlice {
  using type = Slice<T, kStep, kBackward, kDirection, true>;
};
template <typename T, Direction kDirection>
struct LongSlice<T, false, false, kDirection, true> {
  using type = ApartSlice<T, kDirection>;
};

}  // namespace dcs
