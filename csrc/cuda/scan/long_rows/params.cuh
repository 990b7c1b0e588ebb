// What the kernels of rows of many tiles are launched with.
#pragma once

#include "dcs/scan/problem.h"
#include "common/element_types.cuh"

namespace dcs {

struct StreamParams {
  ScanProblem problem;
  uint32_t rows;
  uint32_t tiles;  // of a row
  int64_t padded;  // a row in whole vectors
  bool one_gamma;
  bool row_per_block;  // a block takes whole rows, one tile after the other, and waits for nobody
  void* statuses;      // else of tiles, as they come: `tag` marks what this call wrote
  uint64_t tag;
  bool load_once;  // in bulk_stream.cuh, forward with a per-step gamma: what has been read makes room in L2 first
  bool replayed;   // a graph will launch the same again, tag and all
};

}  // namespace dcs
