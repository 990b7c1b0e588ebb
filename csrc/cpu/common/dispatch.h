// Which instruction set's kernels a call runs, and how work is shared out among torch's threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <torch/csrc/stable/ops.h>

namespace dcs::cpu {

// Below this many elements a thread is not worth waking (as at::internal::GRAIN_SIZE).
constexpr int64_t kLeastShare = 32768;

// Of three tables with a `name`, the best that the CPU has. TORCH_DCS_CPU_ISA=default|avx2|avx512 asks for less, for
// tests.
template <typename Table>
const Table& best_table(const Table& avx512, const Table& avx2, const Table& plain) {
  const char* asked = std::getenv("TORCH_DCS_CPU_ISA");
  const auto allows = [&](const Table& table) { return asked == nullptr || std::strcmp(asked, table.name) == 0; };
  if (allows(avx512) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    return avx512;
  if (allows(avx2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2;
  return plain;
}

// run(begin, end) over [0, count), `elements` in all, by several threads where they are enough.
template <typename Run>
void share_out(int64_t count, int64_t elements, const Run& run) {
  if (elements <= kLeastShare || count == 1) return run(int64_t{0}, count);
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, kLeastShare * count / elements), run);
}

}  // namespace dcs::cpu
