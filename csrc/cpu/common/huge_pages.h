// Huge pages under large results.
#pragma once

#include <cstdint>

#include <sys/mman.h>

#include "dcs/types.h"

namespace dcs::cpu {

constexpr int64_t kHugePage = 2 << 20;  // bytes
constexpr int64_t kLeastHuge = 4 * kHugePage;

// Asks for huge pages under a large result of (outer, length, inner) elements, if nothing lies between them: it is
// fresh memory, and its page faults take longer than most kernels (at 4096 x 4096 float there are 16384 of them, 2/3 of
// a scan's time; torch asks likewise under THP_MEM_ALLOC_ENABLE). Advice only: an error changes nothing.
inline void advise_huge_pages(
    const void* result, const Strides& strides, int64_t outer, int64_t length, int64_t inner, int64_t element_bytes) {
  const int64_t elements = outer * length * inner, bytes = elements * element_bytes;
  const int64_t extent = strides.at(outer - 1, length - 1, inner - 1) + 1;
  if (bytes < kLeastHuge || extent != elements) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(result);
  const uintptr_t from = (begin + kHugePage - 1) / kHugePage * kHugePage, to = (begin + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

}  // namespace dcs::cpu
