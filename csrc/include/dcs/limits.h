// What plans and launches count with, without CUDA.
#pragma once

#include <cstdint>

namespace dcs {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kStaticBytes = 3 << 10;  // of shared memory in CUDA kernels that ask for more, at most

}  // namespace dcs
