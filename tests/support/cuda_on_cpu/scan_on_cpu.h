// A scan on a CPU in the place of the kernels of csrc/cuda/scan, to test kernels around it.
#pragma once

#include <algorithm>
#include <vector>

#include "dcs/scan/problem.h"
#include "trials.h"

namespace trials {

using namespace dcs;

inline double number_at(const void* data, ElementType dtype, int64_t index) {
  if (dtype == ElementType::Double) return static_cast<const double*>(data)[index];
  if (dtype == ElementType::Float) return static_cast<const float*>(data)[index];
  return widened(static_cast<const __nv_bfloat16*>(data)[index]);
}

// In double, rounded when it is stored.
inline void run_scan(const ScanProblem& p) {
  for (int64_t row = 0; row < p.outer * p.inner; ++row) {
    const int64_t o = row / p.inner, i = row % p.inner;
    const auto at = [&](const Strides& s, int64_t t) { return o * s.outer + t * s.time + i * s.inner; };
    const auto gate = [&](int64_t t) {
      return p.gamma_kind == GammaKind::kNumber ? p.gamma_value
                                                : number_at(p.gamma, p.gamma_dtype, at(p.gamma_strides, t));
    };
    const int64_t step = p.reverse ? -1 : 1, first = p.reverse ? p.length - 1 : 0;
    std::vector<double> y(static_cast<size_t>(p.length));
    for (int64_t k = 0; k < p.length; ++k) {
      const int64_t t = first + k * step;
      // With a window each result is a sum of its own.
      double carry = p.initial ? number_at(p.initial, p.dtype, at(p.initial_strides, 0)) : 0.0;
      const int64_t begin = p.window ? std::max<int64_t>(0, k - p.window + 1) : k;
      if (begin > 0) carry = p.window ? 0.0 : y[static_cast<size_t>(k - 1)];
      for (int64_t j = begin; j <= k; ++j) {
        const int64_t s = first + j * step, owner = p.shifted ? s - step : s;
        const bool has_gate = owner >= 0 && owner < p.length && !(p.window && j == begin && begin > 0);
        const bool is_reset = p.reset && has_gate && p.reset[at(p.reset_strides, owner)];
        carry =
            number_at(p.input, p.dtype, at(p.input_strides, s)) + (!has_gate || is_reset ? 0.0 : gate(owner) * carry);
      }
      y[static_cast<size_t>(k)] = carry;
      const int64_t to = at(p.output_strides, t);
      if (p.dtype == ElementType::Double) static_cast<double*>(p.output)[to] = carry;
      else if (p.dtype == ElementType::Float) static_cast<float*>(p.output)[to] = static_cast<float>(carry);
      else static_cast<__nv_bfloat16*>(p.output)[to] = narrowed<__nv_bfloat16>(carry);
    }
  }
}

}  // namespace trials
