// The same as columns/staged_columns.cuh of so few columns that threads which take whole ones would leave the GPU idle:
// several threads take parts of the steps of a column that are staged. Each folds its part from nothing; the totals of
// a warp's lanes meet by shuffles, those of a team of warps in shared memory; and each scans its part again from what
// enters it. One gamma over a part is a power of it.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/carry/warp_segments.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/staged_ranges.cuh"

namespace dcs {

template <typename T>
struct StagedParts : StagedRanges<T> {
  using Ranges = StagedRanges<T>;
  using Ranges::p, Ranges::t, Ranges::inner, Ranges::shift, Ranges::slabs;
  // What enters a part has the care that a few steps need not take.
  using Scan = ColumnScan<T, false, false, 1, false>;
  using Sum = typename Scan::Sum;
  using Cell = typename Scan::Cell;
  static constexpr int kBatch = 8;

  // A thread's steps of those that are staged.
  struct Part {
    T* x;
    const uint8_t* cuts;
    int count;
    bool is_cut;  // before its first step
  };

  PackedSegment* const of_warps;  // a team's
  const int lane_of_warp = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int team_warps = 1 << t.team_bits, team = warp >> t.team_bits, of_team = warp & (team_warps - 1);
  const int fan = 1 << t.fan_bits, own_column = lane_of_warp >> t.fan_bits, of_fan = lane_of_warp & (fan - 1);
  const int columns = 32 >> t.fan_bits;  // of a warp
  int slab, column;
  bool works;

  __device__ __forceinline__ StagedParts(const StagedColumnsParams& params, unsigned char* memory, uint64_t* barriers)
      : Ranges(params, memory, barriers), of_warps(reinterpret_cast<PackedSegment*>(memory + t.teams_at)) {
    const int of_block = team * columns + own_column;
    slab = static_cast<int>(params.rows.of(static_cast<uint32_t>(of_block)));
    column = of_block - slab * inner;
    works = slab < slabs;
    if (!works) slab = column = 0;
  }

  __device__ __forceinline__ Part part_of(int buffer, int64_t begin) const {
    const int staged = this->count_of(begin), first = (of_team * fan + of_fan) * t.part_steps,
              count = works ? max(0, min(t.part_steps, staged - first)) : 0,
              at = (p.reverse ? staged - 1 - first : first) * inner + column;
    const bool starts = begin == 0 && first == 0;
    const uint8_t* const cuts = p.reset ? this->staged_flags(buffer, slab, begin, staged) + at : nullptr;
    const bool flagged = cuts && count > 0 && !(starts && shift > 0) && *cuts;
    return {this->staged(buffer, slab, begin, staged) + at, cuts, count, flagged || (starts && !p.initial)};
  }

  // visit(where a step is, y after it, whether its flag makes the scan start anew before it); first_cut: whether the
  // scan does so before the first one, whose flag is known. Loads come before stores, which might take their place.
  template <bool kCuts, typename Visit>
  __device__ __forceinline__ void scan_part(const Part& part, bool first_cut, Scan& scan, const Visit& visit) const {
    if (part.count == 0) return;
    const int apart = p.reverse ? -inner : inner;
    T* x = part.x;
    const uint8_t* cuts = part.cuts;
    const auto cell_at = [](T* at) { return reinterpret_cast<Cell*>(at); };
    const auto step = [&](T* at, const Cell& cell, bool cut) {
      visit(cell_at(at), scan.step(cell, Cell{}, false, cut ? 1 : 0), cut);
    };
    visit(cell_at(x), scan.step(*cell_at(x), Cell{}, false, first_cut ? 1 : 0), false);
    const auto steps = [&](auto of_batch) {
      constexpr int kCount = of_batch();
      Cell cells[kCount];
      bool cut[kCount] = {};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        cells[i] = *cell_at(x + (i + 1) * apart);
        if constexpr (kCuts) cut[i] = cuts[(i + 1) * apart];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) step(x + (i + 1) * apart, cells[i], cut[i]);
      x += kCount * apart;
      if constexpr (kCuts) cuts += kCount * apart;
    };
    int left = part.count - 1;
#pragma unroll 1
    for (; left >= kBatch; left -= kBatch) steps(std::integral_constant<int, kBatch>());
#pragma unroll 1
    for (; left > 0; --left) steps(std::integral_constant<int, 1>());
  }
  template <typename Visit>
  __device__ __forceinline__ void scan_part(const Part& part, bool first_cut, Scan& scan, const Visit& visit) const {
    if (p.reset) scan_part<true>(part, first_cut, scan, visit);
    else scan_part<false>(part, first_cut, scan, visit);
  }

  // What enters each part. `carry`: what enters the steps that are staged, then what leaves them.
  __device__ __forceinline__ double enter(Segment<double> segment, double& carry) const {
    // 32 of these gates are within a double's range.
    const bool bounded = fabs(segment.gates) > 0x1p-31 && fabs(segment.gates) < 0x1p31;
    const auto times = [](double a, double b) { return a * b; };
    if (__all_sync(0xffffffffu, bounded)) fold_neighbors<true, false>(segment, of_fan, fan, times);
    else fold_neighbors<true>(segment, of_fan, fan, times);
    double entering = carry;
    if (team_warps > 1) {
      const PackedSegment* const own_team = of_warps + team * team_warps * columns + own_column;
      if (of_fan == fan - 1) of_warps[warp * columns + own_column] = segment;
      __syncthreads();
#pragma unroll 4
      for (int i = 0; i < team_warps; ++i) {
        if (i == of_team) entering = carry;
        carry = after(own_team[i * columns].segment(), carry);
      }
    }
    const double leaving = after(segment, entering), before = shuffle_up(leaving, 1);
    if (team_warps == 1) carry = shuffle(leaving, lane_of_warp - of_fan + fan - 1);
    return of_fan == 0 ? entering : before;
  }

  __device__ __forceinline__ void scan_steps(
      int buffer, int64_t begin, Scan& scan, double over_part, double& carry) const {
    const Part part = part_of(buffer, begin);
    scan.y[0] = 0;
    bool closed = part.is_cut;
    scan_part(part, true, scan, [&](Cell*, const Cell&, bool cut) { closed = closed || cut; });
    closed = part.count > 0 && closed;
    scan.y[0] = static_cast<Sum>(enter({static_cast<double>(scan.y[0]), over_part, closed}, carry));
    scan_part(part, part.is_cut, scan, [](Cell* at, const Cell& y, bool) { *at = y; });
  }

  __device__ __forceinline__ void run(const StagedColumnsParams& params) const {
    Scan scan;
    double over_part = 0.0, carry = 0.0;
    // Before the first steps there is nothing to scan but some to ask for.
    int64_t begin = -t.steps;
#pragma unroll 1
    for (int turn = -1; begin < p.length; ++turn, begin += t.steps) {
      const int buffer = turn & 1;
      if (begin + t.steps < p.length) {
        this->wait_for_reads();
        __syncthreads();  // until all have stored what the next steps take the place of
        this->fetch(buffer ^ 1, begin + t.steps);
      }
      commit_copies();
      if (begin < 0) {
        scan.begin(p, {this->first_outer + slab, column});
        over_part = params.over_part_of(scan.gamma[0]);
        carry = static_cast<double>(scan.y[0]);
        continue;
      }
      wait_for_copies<1>();
      mbarrier_wait(this->full + buffer, static_cast<uint32_t>(turn) / kStagedBuffers & 1);
      __syncthreads();
      scan_steps(buffer, begin, scan, over_part, carry);
      show_to_bulk_stores();
      __syncthreads();
      this->store(buffer, begin);
    }
    this->wait_for_reads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kMostPartedThreads)
    staged_parts_kernel(const __grid_constant__ StagedColumnsParams params) {
  extern __shared__ __align__(16) unsigned char staged_shared[];
  __shared__ uint64_t full[kStagedBuffers];
  launch_dependents();
  const StagedParts<T> columns(params, staged_shared, full);
  griddepcontrol_wait();
  columns.run(params);
}

}  // namespace dcs
