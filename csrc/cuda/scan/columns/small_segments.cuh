// What the warps of columns/small_columns.cuh leave each other in shared memory.
#pragma once

#include "scan/carry/warp_segments.cuh"
#include "scan/columns/small_index.cuh"

namespace dcs {

struct ColumnSegments : WarpSegments<kSmallSpan, kSmallBlockWarps, kMostRowCluster> {
  // Where blocks leave each other words (small_words.cuh): what enters the block, the product of a whole block's gates
  // where it is a power, and the call's tag.
  double entering[kSmallSpan], over_block[kSmallSpan];
  uint64_t tag;
};

}  // namespace dcs
