// What the kernels of columns are launched with.
#pragma once

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "common/word.cuh"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/powers.h"

namespace dcs {

// A number gamma's power over so many steps, right to the last digit: by squares it would be off by as many roundings
// as there are steps.
inline double number_over(const ScanProblem& problem, int steps) {
  return bounded(std::pow(problem.gamma_value, steps), problem.gamma_value);
}

struct StagedColumnsParams {
  ScanProblem problem;
  StagedColumnsPlan plan;
  Divisor rows;      // column / rows: the slab
  double over_part;  // the power of a number gamma

  StagedColumnsParams(const ScanProblem& of, const StagedColumnsPlan& by)
      : problem(of),
        plan(by),
        rows(static_cast<uint32_t>(of.inner)),
        over_part(by.part_steps > 0 ? number_over(of, by.part_steps) : 0.0) {}
  __device__ __forceinline__ double over_part_of(double gamma) const {
    if (problem.gamma_kind == GammaKind::kNumber) return over_part;
    return whole_power(gamma, static_cast<unsigned>(plan.part_steps));
  }
};

struct StreamColumnsParams {
  ScanProblem problem;
  StreamColumnsPlan plan;
  void* workspace;  // words that blocks publish (carry/segment_words.cuh)
  CallTag tag;
  double over_part, over_tile;  // powers of a number gamma

  StreamColumnsParams(const ScanProblem& of, const StreamColumnsPlan& by, void* words, const CallTag& call)
      : problem(of), plan(by), workspace(words), tag(call) {
    over_part = number_over(of, by.part_steps);
    over_tile = number_over(of, by.part_steps * by.parts);
  }
  __device__ __forceinline__ double over_part_of(double gamma) const {
    if (problem.gamma_kind == GammaKind::kNumber) return over_part;
    return whole_power(gamma, static_cast<unsigned>(plan.part_steps));
  }
  __device__ __forceinline__ double over_tile_of(double gamma) const {
    if (problem.gamma_kind == GammaKind::kNumber) return over_tile;
    return whole_power(gamma, static_cast<unsigned>(plan.part_steps * plan.parts));
  }
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
