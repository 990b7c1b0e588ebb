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

// Of at most so many columns, warps of a block and blocks of a cluster.
template <int kColumns, int kMostWarps, int kMostBlocks>
struct WarpSegments {
  // Of so few warps each goes through those before it in less time than two barriers take.
  static constexpr int kMostChainedWarps = 16;
  static constexpr int kPitch = kColumns > 1 ? kColumns + 1 : 1;  // neighboring lanes read other banks
  PackedSegment of_warps[kMostWarps][kPitch], of_blocks[kMostBlocks][kColumns];
  uint64_t arrivals;  // completes when the segments of all earlier blocks have come

  // At the start, by all threads of a block of a cluster.
  __device__ __forceinline__ void init(int columns, int rank) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * columns * static_cast<int>(sizeof(PackedSegment)));
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  // Until the barriers of the cluster's other blocks are ready. Loads that are on their way do not wait.
  __device__ __forceinline__ void wait_for_others() const { wait_for_cluster(); }

  // What enters the thread's warp in a column, when each warp has stored its segments in `of_warps`. `times` multiplies
  // gates. By all threads.
  template <typename Times>
  __device__ __forceinline__ double carry(int column, int columns, int rank, int blocks, const Times& times) {
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    if (blocks == 1 && warps <= kMostChainedWarps) {
      double entering = 0.0;
#pragma unroll 4
      for (int i = 0; i < warp; ++i) entering = after(of_warps[i][column].segment(), entering);
      return entering;
    }
    const int fan_bits = 32 - __clz(warps - 1), first = warp << (5 - fan_bits);  // lanes of a column; the warp's first
    if (first < columns) fold(columns, first, fan_bits, warps, rank, blocks, times);
    __syncthreads();
    return of_warps[warp][column].total;
  }

 private:
  template <typename Times>
  __device__ __forceinline__ void fold(
      int columns, int first, int fan_bits, int warps, int rank, int blocks, const Times& times) {
    const int fan = 1 << fan_bits, lane = static_cast<int>(threadIdx.x) % 32, of_warp = lane & (fan - 1);
    const int own_column = first + (lane >> fan_bits), column = min(own_column, columns - 1);
    const bool is_column = own_column < columns, exists = is_column && of_warp < warps;
    Segment<double> segment = exists ? of_warps[of_warp][column].segment() : identity<double>();
    const uint32_t up_to_own = (0xffffffffu >> (31 - of_warp)) << (lane - of_warp);
    const uint32_t closed = __ballot_sync(0xffffffffu, segment.closed) & up_to_own;
    const int reach = reach_of(closed, of_warp);
#pragma unroll
    for (int d = 1; d < kMostWarps; d *= 2) {
      if (d >= fan) break;
      const double other = shuffle_up(segment.total, d), other_gates = shuffle_up(segment.gates, d);
      if (reach < d) continue;
      segment.total = dcs::fold(segment.total, segment.gates, other);
      segment.gates = times(segment.gates, other_gates);
    }
    segment.closed = closed != 0;
    double entering = 0.0;
    if (blocks > 1) {
      const Segment<double> block = segment_of_lane(segment, lane - of_warp + warps - 1);
      if (is_column)
        for (int to = rank + 1 + of_warp; to < blocks; to += fan) send(block, rank, column, to);
      if (rank > 0) mbarrier_wait(&arrivals, 0);
#pragma unroll 4
      for (int i = 0; i < rank; ++i) entering = after(of_blocks[i][column].segment(), entering);
    }
    Segment<double> before = segment_of_lane(segment, max(lane - 1, 0));
    if (of_warp == 0) before = identity<double>();
    if (exists) of_warps[of_warp][column].total = after(before, entering);
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
