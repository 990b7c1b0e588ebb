// What lookback_columns.cuh is launched with.
#pragma once

#include <cmath>

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "common/word.cuh"
#include "dcs/limits.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/problem.h"
#include "scan/lines/float_powers.cuh"

namespace dcs {

// Gamma's powers over 0, 1, 2, ... warps' steps, blocks and chunks.
struct LookbackPowers {
  Gate<float> gate;
  float parts[kLookbackWarps], blocks[kMostLookbackCluster + 1], chunks[kMostLookbackGroup + 1];
};

struct LookbackParams {
  const char* input;  // from the scan's first step on, with strides of bytes in its direction
  char* output;
  const void* initial;  // null where there is none
  int64_t input_outer, input_time, output_outer, output_time;
  int64_t initial_outer, initial_inner;  // of elements
  int64_t length;
  int columns, span;                             // of a step; of a warp
  int across_bits, steps, chunks, group;         // as in the plan
  Divisor cluster, blocks_across, outer_blocks;  // blocks of a cluster; of a chunk's spans; of an outer row's
  int64_t chunk_words;
  Word* words;
  CallTag tag;
  LookbackPowers powers;
};

inline void fill_lookback_powers(LookbackPowers& powers, double gamma, const LookbackColumnsPlan& plan) {
  powers.gate = split_gamma(gamma);
  // Of `steps` steps, 0, 1, 2, ... times.
  const auto fill = [&](float* to, int count, int64_t steps) {
    const double once = bounded(std::pow(gamma, static_cast<double>(steps)), gamma);
    double power = 1.0;
    for (int i = 0; i < count; ++i, power = product_of_powers(gamma, power, once)) to[i] = rounded(power);
  };
  const int64_t block = int64_t{plan.steps} * plan.parts;
  fill(powers.parts, kLookbackWarps, plan.steps);
  fill(powers.blocks, kMostLookbackCluster + 1, block);
  fill(powers.chunks, kMostLookbackGroup + 1, block * plan.cluster);
}

inline LookbackParams lookback_params(const ScanProblem& p, const LookbackColumnsPlan& plan, int64_t bytes) {
  LookbackParams params{};
  const int64_t sign = p.reverse ? -bytes : bytes, last = p.reverse ? p.length - 1 : 0;
  params.input = static_cast<const char*>(p.input) + last * p.input_strides.time * bytes;
  params.output = static_cast<char*>(p.output) + last * p.output_strides.time * bytes;
  params.input_outer = p.input_strides.outer * bytes, params.input_time = p.input_strides.time * sign;
  params.output_outer = p.output_strides.outer * bytes, params.output_time = p.output_strides.time * sign;
  params.initial = p.initial;
  params.initial_outer = p.initial_strides.outer, params.initial_inner = p.initial_strides.inner;
  params.length = p.length;
  params.columns = static_cast<int>(p.inner);
  params.span = plan.span;
  params.across_bits = plan.across_bits;
  params.steps = plan.steps;
  params.chunks = static_cast<int>(plan.chunks);
  params.group = plan.group;
  const int64_t outer_blocks = ceil_div(plan.spans, int64_t{1} << plan.across_bits);
  params.cluster = Divisor(static_cast<uint32_t>(plan.cluster));
  params.blocks_across = Divisor(static_cast<uint32_t>(p.outer * outer_blocks));
  params.outer_blocks = Divisor(static_cast<uint32_t>(outer_blocks));
  params.chunk_words = plan.chunk_words;
  fill_lookback_powers(params.powers, p.gamma_value, plan);
  return params;
}

}  // namespace dcs
