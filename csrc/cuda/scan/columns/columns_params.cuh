// What the kernels of columns are launched with.
#pragma once

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "common/word.cuh"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/kernel_plans.h"

namespace dcs {

struct StagedColumnsParams {
  ScanProblem problem;
  StagedColumnsPlan plan;
};

struct StreamColumnsParams {
  ScanProblem problem;
  StreamColumnsPlan plan;
  void* workspace;  // words that blocks publish (carry/segment_words.cuh)
  CallTag tag;
};

struct ResidentColumnsParams {
  ScanProblem problem;
  ResidentColumnsPlan plan;
  void* workspace;  // words that blocks publish (carry/segment_words.cuh)
  CallTag tag;
  Divisor strips, spans;  // block / strips: the tile; strip / spans: the outer row

  ResidentColumnsParams(const ScanProblem& of, const ResidentColumnsPlan& by, void* words, const CallTag& call)
      : problem(of),
        plan(by),
        workspace(words),
        tag(call),
        strips(static_cast<uint32_t>(by.strips)),
        spans(static_cast<uint32_t>(by.spans)) {}
};

}  // namespace dcs
