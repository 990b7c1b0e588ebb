// Tiles of columns/stream_columns.cuh: which ones a block has, where they lie in memory and in its shared memory, and
// the warp that copies them.
#pragma once

#include "common/ptx/bulk_copy.cuh"
#include "common/ptx/named_barrier.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

constexpr int kStreamTurns = kStreamAhead + 1;  // of what a block's warps leave each other
constexpr int kStreamScanThreads = 32 * kStreamWarps,
              kStreamThreads = kStreamScanThreads + 32 * (kStreamCarryWarps + 1);  // the last warp copies

// Powers of a gamma: over a part; over 1, 2, 4, ... lanes' parts; over a tile, the block's share of the first round,
// and a round but for the block's own tile.
template <typename Wide>
struct StreamPowers {
  Wide part, lanes[5], tile, first, round;
};

// Named barriers, at which warps that scan arrive: they have left a tile's totals, and its results.
constexpr int kTotalsBarrier = 1, kResultsBarrier = kTotalsBarrier + kStreamTurns;
static_assert(kResultsBarrier + kMostStreamStages <= kNamedBarriers);

// Before the tiles.
template <typename Wide>
struct StreamShared {
  uint64_t full[kMostStreamStages], carries_ready[kStreamTurns], output_free[2];
  uint64_t tag;                                  // of this launch's words
  Wide parts[kStreamTurns][kStreamScanThreads];  // totals, then what enters parts from those before in the tile
  Wide totals[kMostStreamColumns];               // of a tile
  Wide carries[kStreamTurns][kMostStreamColumns];
  Wide ends[kMostStreamColumns];  // behind the block's last tile
  StreamPowers<Wide> powers[kMostStreamColumns];
  Wide behind[kStreamPowersBehind];
};

// A block's tiles, one after the other.
struct StreamCursor {
  const StreamColumnsPlan& plan;
  int64_t outer, tile;
  int member;      // of the blocks that share an outer row
  int number = 0;  // of tiles
  int round = 0;   // in the outer row

  __device__ __forceinline__ explicit StreamCursor(const StreamColumnsPlan& of) : plan(of) {
    outer = blockIdx.x / static_cast<unsigned>(plan.sharers);
    member = static_cast<int>(blockIdx.x - outer * plan.sharers);
    tile = member;
  }
  __device__ __forceinline__ void next() {
    ++number, ++round;
    tile += plan.sharers;
    if (tile >= plan.tiles) tile = member, outer += plan.strips_apart, round = 0;
  }
  __device__ __forceinline__ int stage() const { return number % plan.stages; }
  __device__ __forceinline__ uint32_t parity() const { return number / plan.stages & 1; }
  __device__ __forceinline__ int turn() const { return number % kStreamTurns; }
  __device__ __forceinline__ uint32_t turn_parity() const { return number / kStreamTurns & 1; }
};

template <typename T>
struct StreamTile {
  const ScanProblem& p;
  const StreamColumnsPlan& t;
  unsigned char* const shared;  // of the stages

  __device__ __forceinline__ int steps_of(int64_t tile) const {
    return static_cast<int>(min(int64_t{t.parts} * t.part_steps, p.length - tile * t.parts * t.part_steps));
  }
  // Where a tile begins in memory.
  template <typename Byte>
  __device__ __forceinline__ Byte* in_memory(
      Byte* pointer, const Strides& strides, const StreamCursor& at, int steps) const {
    const int64_t first = at.tile * t.parts * t.part_steps, row = p.reverse ? p.length - first - steps : first;
    return pointer + (at.outer * strides.outer + row * strides.time) * int64_t{sizeof(T)};
  }
  __device__ __forceinline__ const char* input(const StreamCursor& at, int steps) const {
    return in_memory(static_cast<const char*>(p.input), p.input_strides, at, steps);
  }
  __device__ __forceinline__ char* output(const StreamCursor& at, int steps) const {
    return in_memory(static_cast<char*>(p.output), p.output_strides, at, steps);
  }
  // In shared memory it begins as far behind a whole vector as in memory: whole vectors there are whole vectors here.
  __device__ __forceinline__ unsigned char* stage(const StreamCursor& at, int steps) const {
    return shared + at.stage() * t.stage_bytes + reinterpret_cast<uintptr_t>(input(at, steps)) % 16;
  }
  __device__ __forceinline__ unsigned char* results(const StreamCursor& at, int steps) const {
    if (t.output_bytes == 0) return stage(at, steps);
    return shared + t.stages * t.stage_bytes + at.number % 2 * t.output_bytes +
        reinterpret_cast<uintptr_t>(output(at, steps)) % 16;
  }
};

// The warp that copies.
template <typename T>
struct StreamCopies {
  using Wide = typename Types<T>::Wide;
  const StreamTile<T>& tiles;
  StreamShared<Wide>& shared;
  const int lane = threadIdx.x % 32;

  static __device__ __forceinline__ int64_t up(int64_t address) { return (address + 15) / 16 * 16; }
  static __device__ __forceinline__ int64_t down(int64_t address) { return address / 16 * 16; }

  // Elements of a range that lie before or behind its whole vectors, one for each of the first lanes.
  template <typename To, typename From>
  __device__ __forceinline__ void copy_edges(
      To* to, From* from, int64_t bytes, int64_t whole_begin, int64_t whole_end) const {
    constexpr int kMost = 16 / sizeof(T);
    const int64_t head = min(whole_begin, bytes), tail = max(whole_end, head);
    const int64_t byte = (lane < kMost ? lane : tail / int64_t{sizeof(T)} + lane - kMost) * int64_t{sizeof(T)};
    if (lane < 2 * kMost && byte < (lane < kMost ? head : bytes))
      *reinterpret_cast<T*>(to + byte) = *reinterpret_cast<const T*>(from + byte);
  }

  // Whole vectors, the ones around the range's ends too where they are in the tensor.
  __device__ __forceinline__ void load(const StreamCursor& at, const char* tensor, const char* tensor_end) const {
    const int steps = tiles.steps_of(at.tile);
    const ScanProblem& p = tiles.p;
    const char* const from = tiles.input(at, steps);
    const int64_t bytes = ((steps - 1) * p.input_strides.time + p.inner) * int64_t{sizeof(T)},
                  begin = reinterpret_cast<int64_t>(from), end = begin + bytes;
    const int64_t first = down(begin) < reinterpret_cast<int64_t>(tensor) ? up(begin) : down(begin),
                  last = up(end) > reinterpret_cast<int64_t>(tensor_end) ? down(end) : up(end);
    unsigned char* const to = tiles.stage(at, steps);
    copy_edges(to, from, bytes, first - begin, last - begin);
    __syncwarp();
    if (lane > 0) return;
    const int whole = static_cast<int>(max(last - first, int64_t{0}));
    uint64_t* const full = &shared.full[at.stage()];
    mbarrier_arrive_expect_tx(full, whole);
    if (whole > 0) bulk_load_once(to + (first - begin), from + (first - begin), whole, full);
  }
  __device__ __forceinline__ void store(const StreamCursor& at) const {
    const int steps = tiles.steps_of(at.tile);
    char* const to = tiles.output(at, steps);
    const unsigned char* const from = tiles.results(at, steps);
    const int64_t bytes = steps * tiles.p.inner * int64_t{sizeof(T)}, begin = reinterpret_cast<int64_t>(to),
                  first = up(begin) - begin, last = down(begin + bytes) - begin;
    copy_edges(to, from, bytes, first, last);
    if (lane > 0) return;
    if (last > first) bulk_store(to + first, from + first, static_cast<int>(last - first));
    commit_stores();
  }

  __device__ __forceinline__ void run() const {
    const ScanProblem& p = tiles.p;
    const char* const tensor = static_cast<const char*>(p.input);
    const char* const tensor_end = tensor +
        ((p.outer - 1) * p.input_strides.outer + (p.length - 1) * p.input_strides.time + p.inner) * int64_t{sizeof(T)};
    StreamCursor loaded(tiles.t), done(tiles.t);
    const auto load_next = [&] {
      if (loaded.outer >= p.outer) return;
      load(loaded, tensor, tensor_end);
      loaded.next();
    };
    for (int i = 0; i < tiles.t.stages; ++i) load_next();
    const bool apart = tiles.t.output_bytes > 0;
    for (; done.outer < p.outer; done.next()) {
      wait_at(kResultsBarrier + done.stage(), kStreamScanThreads + 32);
      store(done);
      if (apart) load_next();
      if (lane == 0) wait_for_stores_to_read();
      __syncwarp();
      if (!apart) load_next();
      else mbarrier_arrive(&shared.output_free[done.number % 2]);
    }
  }
};

}  // namespace dcs
