// The carries into the warps of a block that all have a segment of each of some columns, where the block, or a cluster
// of blocks along time, has all of time. In a cluster, or a block of many warps, one lane of a few warps has each
// warp's segment of a column: these lanes fold them by shuffles, send the block's to all later blocks, and wait for
// those of the blocks before. If every warp folded what lies before it, they would share the units for doubles, and
// take 0.5 to 1 us for it.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// A segment as 16 bytes of shared memory, this block's or another one's. Gates with all bits set say that it is closed:
// NaNs are given other bits.
struct alignas(16) PackedSegment {
  double total, gates;
  static __device__ __forceinline__ double closed_gates() { return __hiloint2double(-1, -1); }

  __device__ __forceinline__ PackedSegment& operator=(const Segment<double>& segment) {
    total = segment.total;
    const double open_gates = segment.gates == segment.gates ? segment.gates : __hiloint2double(0x7ff80000, 0);
    gates = segment.closed ? closed_gates() : open_gates;
    return *this;
  }
  __device__ __forceinline__ Segment<double> segment() const { return {total, gates, __double2hiint(gates) == -1}; }
};

// What lies before a lane's segment in those of its column, which neighboring lanes have: the product of their gates,
// and whether any of them is closed.
struct NeighborsBefore {
  double gates;
  bool closed;
};

// Each lane's segment with those of the lanes before it of its column, of which there are `fan` side by side: as far
// back as the nearest closed one. `of_fan`: which of them the lane is. kPowers: all have the same gates, whose powers
// are squares of each other, kBounded: kept within a double's range. Else `times` multiplies gates.
template <bool kPowers, bool kBounded = true, typename Times>
__device__ __forceinline__ NeighborsBefore fold_neighbors(
    Segment<double>& segment, int of_fan, int fan, const Times& times) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own = 1u << lane, up_to_own = (0xffffffffu >> (31 - of_fan)) << (lane - of_fan);
  const uint32_t closed = __ballot_sync(0xffffffffu, segment.closed) & up_to_own;
  const int reach = reach_of(closed, of_fan);
  NeighborsBefore before{1.0, (closed & ~own) != 0};
  segment.closed = closed != 0;
  if constexpr (kPowers) {
    const double base = segment.gates;
    const auto bounded = [&](double product) { return kBounded ? bounded_product(product, base) : product; };
    double power = base;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= fan) break;
      const double other = shuffle_up(segment.total, d);
      if (reach >= d) segment.total = fold(segment.total, power, other);
      if (of_fan & d) before.gates *= power;
      power = bounded(power * power);
    }
    before.gates = bounded(before.gates);
    segment.gates = bounded(before.gates * base);
  } else {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= fan) break;
      const double other = shuffle_up(segment.total, d), other_gates = shuffle_up(segment.gates, d);
      if (reach < d) continue;
      segment.total = fold(segment.total, segment.gates, other);
      segment.gates = times(segment.gates, other_gates);
    }
    before.gates = shuffle_up(segment.gates, 1);
    if (of_fan == 0) before.gates = 1.0;
  }
  return before;
}

// A lane that has the segment of a warp, of a column, with those of the warps before it.
struct WarpLane {
  Segment<double> up_to_own;
  NeighborsBefore others;
  int column, of_warp, fan, warps;  // so many neighboring lanes have the column's warps
  bool is_column, exists;           // of the column's lanes; of its warps

  __device__ __forceinline__ Segment<double> of_block() const {
    return segment_of_lane(up_to_own, static_cast<int>(threadIdx.x) % 32 - of_warp + warps - 1);
  }
  __device__ __forceinline__ Segment<double> before() const {
    const double total = shuffle_up(up_to_own.total, 1);
    return {of_warp == 0 ? 0.0 : total, others.gates, others.closed};
  }
};

// Of at most so many columns, warps of a block and blocks of a cluster.
template <int kColumns, int kMostWarps, int kMostBlocks>
struct WarpSegments {
  // Of so few warps each goes through those before it in less time than two barriers take.
  static constexpr int kMostChainedWarps = 16;
  static constexpr int kPitch = kColumns > 1 ? kColumns + 1 : 1;  // neighboring lanes read other banks
  PackedSegment of_warps[kMostWarps][kPitch], of_blocks[kMostBlocks][kColumns];
  double over_warp[kColumns];  // the product of each warp's gates, where all have the same: closed ones keep none
  uint64_t arrivals;           // completes when the segments of all earlier blocks have come

  // At the start, by all threads of a block of a cluster.
  __device__ __forceinline__ void init(int columns, int rank) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * columns * static_cast<int>(sizeof(PackedSegment)));
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  // Until the barriers of the cluster's other blocks are ready. Loads that are on their way do not wait.
  __device__ __forceinline__ void wait_for_others() const { wait_for_cluster(); }

  // What enters the thread's warp in a column, when each warp has stored its segments in `of_warps`, and with kPowers
  // the first one `over_warp`. By all threads.
  template <bool kPowers, typename Times>
  __device__ __forceinline__ double carry(int column, int columns, int rank, int blocks, const Times& times) {
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    if (blocks == 1 && warps <= kMostChainedWarps) {
      double entering = 0.0;
#pragma unroll 4
      for (int i = 0; i < warp; ++i) entering = after(of_warps[i][column].segment(), entering);
      return entering;
    }
    fold_warps<kPowers>(columns, times, [&](const WarpLane& own) {
      const double entering = blocks > 1 ? exchange(own, rank, blocks) : 0.0;
      const Segment<double> before = own.before();
      if (own.exists) of_warps[own.of_warp][own.column].total = after(before, entering);
    });
    __syncthreads();
    return of_warps[warp][column].total;
  }

  // Visits the lanes that have warps' segments, when these are stored.
  template <bool kPowers, typename Times, typename Visit>
  __device__ __forceinline__ void fold_warps(int columns, const Times& times, const Visit& visit) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32,
              lane = static_cast<int>(threadIdx.x) % 32;
    const int fan_bits = 32 - __clz(warps - 1), first = warp << (5 - fan_bits);  // lanes of a column; the warp's first
    if (first >= columns) return;
    const int fan = 1 << fan_bits, of_warp = lane & (fan - 1), own_column = first + (lane >> fan_bits),
              column = min(own_column, columns - 1);
    const bool is_column = own_column < columns, exists = is_column && of_warp < warps;
    WarpLane own{exists ? of_warps[of_warp][column].segment() : identity<double>(), {}, column, of_warp, fan, warps,
        is_column, exists};
    if constexpr (kPowers) own.up_to_own.gates = over_warp[column];
    own.others = fold_neighbors<kPowers>(own.up_to_own, of_warp, fan, times);
    visit(own);
  }

 private:
  // Sends the block's segment to all later blocks of the cluster. What enters it from the earlier ones.
  __device__ __forceinline__ double exchange(const WarpLane& own, int rank, int blocks) {
    const Segment<double> block = own.of_block();
    if (own.is_column)
      for (int to = rank + 1 + own.of_warp; to < blocks; to += own.fan) send(block, rank, own.column, to);
    if (rank > 0) mbarrier_wait(&arrivals, 0);
    double entering = 0.0;
#pragma unroll 4
    for (int i = 0; i < rank; ++i) entering = after(of_blocks[i][own.column].segment(), entering);
    return entering;
  }
  __device__ __forceinline__ void send(const Segment<double>& segment, int rank, int column, int to) const {
    PackedSegment packed;
    packed = segment;
    const PackedSegment& there = of_blocks[rank][column];
    store_async_in_cluster(&there.total, &arrivals, static_cast<uint32_t>(to), packed.total);
    store_async_in_cluster(&there.gates, &arrivals, static_cast<uint32_t>(to), packed.gates);
  }
};

}  // namespace dcs
