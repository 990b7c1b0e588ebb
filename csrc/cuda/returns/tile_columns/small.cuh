// Tiles of columns (kernel.cuh) of few elements, which are bound by latency: a block, or a cluster of blocks along
// time, takes a span of neighboring columns through all of time, and what is carried goes by shuffles and shared memory
// alone, as in the scans' small columns (scan/columns/small_columns.cuh).
#pragma once

#include "returns/tile_columns/tile_scan.cuh"
#include "scan/columns/small_powers.cuh"

namespace dcs {

template <typename Acc>
struct SmallTileParams {
  SmallColumnsParams carries;  // of the scan of differences: `reset` is there where flags are
  ReturnsColumnParams<Acc> call;
};

template <typename T>
SmallTileParams<typename Types<T>::Acc> small_tile_params(const ReturnsProblem& problem, const SmallColumnsPlan& plan) {
  SmallTileParams<typename Types<T>::Acc> params{
      small_place_params(carried_scan(problem), plan), returns_column_params<T>(problem, 1)};
  params.carries.reset.data = problem.terminated.data ? problem.terminated.data : problem.truncated.data;
  return params;
}

// Where a thread's steps are. A thread without a column of its own does what another does.
struct SmallTilePlace : SmallPlace {
  int column, count;  // the thread's, of which it has so many steps, in the order of the scan

  using SmallPlace::SmallPlace;
  __device__ __forceinline__ int part_steps() const { return p.steps; }
  __device__ __forceinline__ void find_steps(int length) {
    column = min(span_column, width - 1);
    count = max(0, min(p.steps, length - first_step));
  }
};

template <typename Tile, typename Params>
__device__ __forceinline__ void run_small_tile(const Params& params) {
  __shared__ ColumnSegments segments;
  static_assert(sizeof(segments) <= kSmallColumnsStatics);
  launch_dependents();
  Tile tile(params);
  const bool clustered = params.carries.cluster.divisor > 1;
  if (clustered) segments.init(1 << params.carries.span_bits, tile.rank);
  griddepcontrol_wait();
  const bool full = tile.is_full();
  if (full) tile.template load<true>();
  else tile.template load<false>();
  if (clustered) segments.wait_for_others();
  const auto segment = full ? tile.template add_up<true>() : tile.template add_up<false>();
  const auto y = static_cast<typename Tile::Acc>(
      carry_by_powers<false, false>(tile, segment.total, segment.closed, params.carries.number, segments));
  if (full) tile.template finish<true>(y);
  else tile.template finish<false>(y);
}

}  // namespace dcs
