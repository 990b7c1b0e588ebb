// The forms of a scan that kernels are compiled for. Host code without CUDA or torch types.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dcs/scan/problem.h"

namespace dcs {

// launch(whether there is a per-step gamma, whether it is the backward), both as types. Integers are summed.
template <typename T, typename Launch>
auto by_form(const ScanProblem& problem, const Launch& launch) {
  if constexpr (!std::is_same_v<T, int64_t>) {
    const bool step = problem.gamma_kind == GammaKind::kStep;
    if (step && problem.backward) return launch(std::true_type(), std::true_type());
    if (problem.backward) return launch(std::false_type(), std::true_type());
    if (step) return launch(std::true_type(), std::false_type());
  }
  return launch(std::false_type(), std::false_type());
}

}  // namespace dcs
