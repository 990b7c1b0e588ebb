// The second destination of the logits' gradient (SavedGradient in dcs/cross_entropy/problem.h): where an element or a
// vector of 16 bytes belongs, and a copy to there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "dcs/cross_entropy/problem.h"
#include "common/device.h"

namespace dcs {

// In words: vectors of 16 bytes, or elements.
struct SavedSlices {
  unsigned char *within = nullptr, *beside = nullptr;
  int64_t within_slice = 0, beside_slice = 0, first_row = 0;
  uint32_t magic = 0;  // 2^32 / width, rounded up; 0: not exact for these sizes
  int width = 0, inner = 0, rest = 0, last_rest = 0, last = 0;

  template <typename Word>
  __device__ __forceinline__ Word* at(int64_t row, int word) const {
    const int whole = magic ? static_cast<int>(__umulhi(static_cast<uint32_t>(word), magic)) : word / width,
              slice = whole < last ? whole : last, in_slice = word - slice * width;
    const bool is_last = slice == last;
    if (!is_last && in_slice < inner)
      return reinterpret_cast<Word*>(within) + slice * within_slice + (first_row + row) * inner + in_slice;
    return reinterpret_cast<Word*>(beside) + slice * beside_slice + (first_row + row) * (is_last ? last_rest : rest) +
        (is_last ? in_slice : in_slice - inner);
  }
};

// In words of `elements`; nothing where they do not divide the slices.
inline SavedSlices saved_slices(const RowsProblem& problem, int element_size, int64_t elements) {
  const SavedGradient& saved = problem.saved;
  const int64_t padding = 16 / element_size, last_width = problem.columns - (saved.slices - 1) * saved.width;
  const int64_t rest = ceil_div(saved.width - saved.inner, padding) * padding,
                last_rest = ceil_div(last_width, padding) * padding;
  const auto aligned = [](const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 16 == 0; };
  SavedSlices sliced;
  if (!saved.beside || saved.width % elements || saved.inner % elements || saved.stride % elements) return sliced;
  if (elements > 1 && (!aligned(saved.within) || !aligned(saved.beside))) return sliced;
  const int64_t width = saved.width / elements;
  sliced.within = static_cast<unsigned char*>(saved.within), sliced.beside = static_cast<unsigned char*>(saved.beside);
  sliced.within_slice = saved.stride / elements, sliced.beside_slice = saved.rows * rest / elements,
  sliced.first_row = saved.first_row;
  const bool is_exact = width > 1 && ceil_div(problem.columns, elements) * width < int64_t{1} << 32;
  sliced.magic = is_exact ? static_cast<uint32_t>(((int64_t{1} << 32) + width - 1) / width) : 0;
  sliced.width = static_cast<int>(width);
  sliced.inner = static_cast<int>(saved.inner / elements);
  sliced.rest = static_cast<int>(rest / elements), sliced.last_rest = static_cast<int>(last_rest / elements),
  sliced.last = static_cast<int>(saved.slices - 1);
  return sliced;
}

}  // namespace dcs
