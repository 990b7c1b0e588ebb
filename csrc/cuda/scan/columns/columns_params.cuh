// What the kernels of columns are launched with.
#pragma once

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/pieces.h"

namespace dcs {

struct HeldColumnsParams {
  ScanProblem problem;
  HeldColumnsPlan plan;
  void* workspace;  // words that blocks leave each other (carry/piece_words.cuh)
  uint64_t tag;
  Divisor blocks, spans;  // block / blocks: the tile, in clusters the walk; walk / spans: the outer row

  HeldColumnsParams(const ScanProblem& of, const HeldColumnsPlan& by, void* words, uint64_t call)
      : problem(of),
        plan(by),
        workspace(words),
        tag(call),
        blocks(static_cast<uint32_t>(by.cluster ? by.tiles : by.walks)),
        spans(static_cast<uint32_t>(by.spans)) {}
};

}  // namespace dcs
