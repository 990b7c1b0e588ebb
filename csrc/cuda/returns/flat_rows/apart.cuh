// Operands and results of a slice (slice.cuh) that are not flat: rows that lie apart or at any address, or steps that
// are no neighbors. Parts of long rows, and all of a packed tensor, go in words; else all goes by the element. Calls,
// each of which is compiled once for operands of all sizes: inlined, such copies would lie in the midst of the code of
// what is flat, which then takes longer to come from memory.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "returns/flat_rows/params.cuh"

namespace dcs {

constexpr int kApartAtOnce = 4;  // words of a lane on their way

// visit(number) by the lanes of a warp, and put(number, get(number)).
template <typename Visit>
__device__ __forceinline__ void each_by_lane(int count, const Visit& visit) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x % 32); first < count; first += 32 * kApartAtOnce) {
#pragma unroll
    for (int j = 0; j < kApartAtOnce; ++j)
      if (first + 32 * j < count) visit(first + 32 * j);
  }
}
template <typename Get, typename Put>
__device__ __forceinline__ void move_by_lane(int count, const Get& get, const Put& put) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x % 32); first < count; first += 32 * kApartAtOnce) {
    decltype(get(0)) values[kApartAtOnce];
#pragma unroll
    for (int j = 0; j < kApartAtOnce; ++j)
      if (first + 32 * j < count) values[j] = get(first + 32 * j);
#pragma unroll
    for (int j = 0; j < kApartAtOnce; ++j)
      if (first + 32 * j < count) put(first + 32 * j, values[j]);
  }
}

// Neighboring bytes to words that are whole in shared memory: those of memory are as well aligned, or each is made of
// two, of which the first may begin up to three bytes before: not before memory that is there, as it begins at whole
// words. kWord: bytes that elements of more than two of them are aligned to.
template <int kWord>
__device__ __forceinline__ void load_bytes(unsigned char* to, const unsigned char* from, int bytes) {
  const auto address = reinterpret_cast<uintptr_t>(from), both = address | reinterpret_cast<uintptr_t>(to);
  int done;
  if (both % 16 == 0) {
    done = bytes / 16 * 16;
    each_by_lane(bytes / 16, [&](int i) { copy_async(to + 16 * i, from + 16 * i); });
  } else if (both % kWord == 0) {
    done = bytes / kWord * kWord;
    each_by_lane(bytes / kWord, [&](int i) { copy_async<kWord>(to + kWord * i, from + kWord * i, kWord); });
  } else {
    const int early = static_cast<int>(address % 4), count = max((bytes + early) / 4 - 1, 0);
    done = 4 * count;
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from - early);
    move_by_lane(
        count, [&](int i) { return uint2{words[i], words[i + 1]}; },
        [&](int i, uint2 pair) { reinterpret_cast<uint32_t*>(to)[i] = __funnelshift_r(pair.x, pair.y, 8 * early); });
  }
  const int at = done + static_cast<int>(threadIdx.x % 32);
  if (at < bytes) to[at] = from[at];
}
// Neighboring elements, halves by pairs that are whole in memory.
template <typename T>
__device__ __forceinline__ void store_neighbors(T* to, const T* from, int count) {
  if constexpr (sizeof(T) == 2) {
    const auto* const halves = reinterpret_cast<const uint16_t*>(from);
    auto* const at = reinterpret_cast<uint16_t*>(to);
    const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(to) / 2 % 2),
              lane = static_cast<int>(threadIdx.x % 32);
    move_by_lane((count - odd) / 2,
        [&](int i) { return halves[odd + 2 * i] | static_cast<uint32_t>(halves[odd + 2 * i + 1]) << 16; },
        [&](int i, uint32_t pair) { *reinterpret_cast<uint32_t*>(at + odd + 2 * i) = pair; });
    if (lane == 0 && odd) at[0] = halves[0];
    if (lane == 1 && (count - odd) % 2) at[count - 1] = halves[count - 1];
  } else {
    move_by_lane(count, [&](int i) { return from[i]; }, [&](int i, T value) { to[i] = value; });
  }
}

// The steps of the flat sequence from `first` on, counted from the first one of `row` on.
template <typename T>
struct FlatSteps {
  const FlatReturnsParams<T>& p;
  const int64_t row;
  const uint32_t first;

  // Of an element, in its tensor.
  __device__ __forceinline__ int64_t offset(const Strides& strides, int step) const {
    const uint32_t at = first + static_cast<uint32_t>(step), rows = p.length.of(at);
    return RowIndex(p.of_rows, row + rows).offset(strides) + (at - rows * p.length.divisor) * strides.time;
  }
  // Whether the steps [begin, end) go in words: they are neighbors or, where words need not begin at the first of them
  // (`any_part`), those of each long row are.
  __device__ __forceinline__ bool in_rows(const FlatTensor& tensor, bool any_part, int begin, int end) const {
    if (tensor.is_packed) return true;
    if (tensor.strides.time != 1) return false;
    const uint32_t at = first + static_cast<uint32_t>(begin), length = p.length.divisor,
                   done = at - p.length.of(at) * length;
    return (any_part && length >= kLeastPartedSteps) || done + static_cast<uint32_t>(end - begin) <= length;
  }
  // visit(offset in the tensor, step, steps) of the parts of rows that [begin, end) has.
  template <typename Visit>
  __device__ __forceinline__ void each_part(const FlatTensor& tensor, int begin, int end, const Visit& visit) const {
    const uint32_t at = first + static_cast<uint32_t>(begin), length = p.length.divisor;
    uint32_t rows = p.length.of(at), done = at - rows * length;
#pragma unroll 1
    for (int step = begin, part; step < end; step += part, ++rows, done = 0) {
      part = end - step;
      int64_t offset = row * length + at;
      if (!tensor.is_packed) {
        part = min(part, static_cast<int>(length - done));
        offset = RowIndex(p.of_rows, row + rows).offset(tensor.strides) + done;
      }
      visit(offset, step, part);
    }
  }
};

// Of the operands that `others` has bits of, the first `count` elements of the slice `here`, and those behind it, of
// `left` that there are.
template <typename T, int kVectors>
__device__ __noinline__ void load_apart(const FlatReturnsParams<T>& p, unsigned char* here, int64_t row, uint32_t first,
    int count, int left, uint32_t others) {
  using Acc = typename Types<T>::Acc;
  constexpr int kOwn = kVectors * flat_vector(sizeof(T)), kAtOnce = kVectors == 1 ? kOwn + 1 : (kOwn + 4) / 4;
  const FlatSteps<T> steps{p, row, first};
  // Most of a launch of one vector a lane is a wait for its code: all goes by the element.
  if constexpr (kVectors > 1 || !DCS_HAS_BULK_COPIES) {
#pragma unroll 1
    for (uint32_t asked = others; asked; asked &= asked - 1) {
      const FlatTensor& tensor = p.operands[__ffs(static_cast<int>(asked)) - 1];
      const int end = min(count + tensor.extra, left);
      if (!steps.in_rows(tensor, tensor.bytes >= 4, 0, end)) continue;
      others ^= asked & (0u - asked);
      steps.each_part(tensor, 0, end, [&](int64_t offset, int step, int part) {
        load_bytes<sizeof(T) == 8 ? 8 : 4>(here + tensor.slot + step * tensor.bytes,
            reinterpret_cast<const unsigned char*>(tensor.data) + offset * tensor.bytes, part * tensor.bytes);
      });
    }
  }
  // A lane has every 32nd element.
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int begin = lane; others && begin < count + flat_vector(sizeof(T)); begin += 32 * kAtOnce) {
    int64_t offsets[kAtOnce];
    Strides known{-1, -1, -1};  // that the offsets are of: no tensor's
#pragma unroll 1
    for (uint32_t asked = others; asked; asked &= asked - 1) {
      const FlatTensor& tensor = p.operands[__ffs(static_cast<int>(asked)) - 1];
      const int end = min(count + tensor.extra, left);
      const Strides& strides = tensor.strides;
      if (strides.outer != known.outer || strides.time != known.time || strides.inner != known.inner) {
        known = strides;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) offsets[j] = steps.offset(strides, begin + 32 * j);
      }
      const auto copy = [&](auto element) {
        using E = decltype(element);
        const E* const from = reinterpret_cast<const E*>(tensor.data);
        E* const to = reinterpret_cast<E*>(here + tensor.slot) + begin;
        [[maybe_unused]] E values[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (begin + 32 * j >= end) continue;
          if constexpr (sizeof(E) >= 4) copy_async<sizeof(E)>(to + 32 * j, from + offsets[j], sizeof(E));
          else values[j] = from[offsets[j]];
        }
#pragma unroll
        for (int j = 0; sizeof(E) < 4 && j < kAtOnce; ++j)
          if (begin + 32 * j < end) to[32 * j] = values[j];
      };
      if (tensor.bytes == 1) copy(uint8_t{});
      else if (sizeof(T) == 2 && tensor.bytes == 2) copy(uint16_t{});
      else copy(Acc{});
    }
  }
  commit_copies();
  wait_for_copies<0>();
}

// Of the results that are not flat, the steps [begin, end) of the slice.
template <typename T, int kVectors>
__device__ __noinline__ void store_apart(
    const FlatReturnsParams<T>& p, const unsigned char* here, int64_t row, uint32_t first, int begin, int end) {
  const FlatSteps<T> steps{p, row, first};
  [[maybe_unused]] const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int i = 0; i < p.result_count; ++i) {
    const FlatTensor& tensor = p.results[i];
    const T* const from = reinterpret_cast<const T*>(here + tensor.slot);
    T* const to = reinterpret_cast<T*>(tensor.data);
    if (tensor.is_flat) {
#if !DCS_HAS_BULK_COPIES
      constexpr int kVec = flat_vector(sizeof(T));
      T* const of_slice = to + row * p.length.divisor + first;
      for (int at = (begin + kVec - 1 + lane * kVec) / kVec * kVec; at + kVec <= end; at += 32 * kVec)
        *reinterpret_cast<uint4*>(of_slice + at) = *reinterpret_cast<const uint4*>(from + at);
#endif
      continue;
    }
    if ((kVectors > 1 || !DCS_HAS_BULK_COPIES) && steps.in_rows(tensor, true, begin, end)) {
      steps.each_part(tensor, begin, end,
          [&](int64_t offset, int step, int part) { store_neighbors(to + offset, from + step, part); });
    } else {
      move_by_lane(
          end - begin, [&](int step) { return from[begin + step]; },
          [&](int step, const T& value) { to[steps.offset(tensor.strides, begin + step)] = value; });
    }
  }
}

}  // namespace dcs
