// Slabs (slabs.cuh) of any number of columns: in so many vectors of the slab, `chunk`, each block of a group has a
// strip of `width` neighboring ones in every `stride`, after which the columns are where they were. So blocks read
// whole vectors, and some KB side by side, of columns that are no whole vectors, too.
#pragma once

#include "softmax/held.cuh"

namespace dcs {

template <typename T>
struct Strip : ThreadVectors<T> {
  using ThreadVectors<T>::kVec;
  static constexpr bool kReadTwice = true;
  Range mine;  // the slab's elements in this chunk, relative to the first vector
  int columns, width;
  int start;  // the column of the strip's first element

  __device__ __forceinline__ Strip(const SoftmaxTiles<T>& params, int64_t slab, int rank)
      : columns(static_cast<int>(params.inner)), width(params.width) {
    constexpr int64_t kFar = 1 << 30;
    const int chunk = rank / params.strips, in_stride = (rank - chunk * params.strips) * width,
              thread = in_stride + static_cast<int>(threadIdx.x);
    const int64_t size = params.length * params.inner;
    const int shift = static_cast<int>(slab * size % kVec);
    const int64_t begin = (chunk * params.chunk + thread) * kVec, end = (chunk + 1) * params.chunk * kVec;
    start = in_stride * kVec % columns;
    this->first = slab * size - shift + begin;
    this->apart = params.stride * kVec;
    mine.low = static_cast<int>(max(shift - begin, -kFar));
    mine.high = static_cast<int>(min(min(shift + size, end) - begin, kFar));
    const int apart = params.stride * kVec;
    if (static_cast<int>(threadIdx.x) < width && thread < params.stride)
      this->count = max(0, mine.high + apart - 1) / apart;
    this->left = params.elements - this->first;
    this->is_whole = mine.low <= 0 && mine.high - (this->count - 1) * apart >= kVec;
    this->settle();
  }
  __device__ __forceinline__ Range range(int k) const {
    const int before = k * static_cast<int>(this->apart);
    return {mine.low - before, mine.high - before};
  }
  // The first `count` vectors, and the others.
  __device__ __forceinline__ Strip head(int count) const {
    Strip lines = *this;
    lines.count = count;
    return lines;
  }
  __device__ __forceinline__ Strip tail(int first) const {
    Strip lines = *this;
    lines.mine = range(first);
    lines.first += first * this->apart;
    lines.left -= first * this->apart;
    lines.count -= first;
    return lines;
  }

  __device__ __forceinline__ static int slot(int column) { return column; }
  // As Slab's, of elements from column `start` on; what the strip has nothing of adds nothing.
  template <bool kBackward, typename Acc>
  __device__ __forceinline__ Part<Acc>* join(const Part<Acc> (&parts)[kVec], Part<Acc>* shared) const {
    if (columns == 1) return join_one_column<kBackward>(parts, shared);
    const int pitch = width + 1, thread = threadIdx.x;
    if (thread < width) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) shared[i * pitch + thread] = parts[i];
    }
    __syncthreads();
    return join_all<kBackward, Acc>(
        start + width * kVec, columns,
        [&](int p) { return p < start ? Part<Acc>{} : shared[(p - start) % kVec * pitch + (p - start) / kVec]; },
        shared + kVec * pitch);
  }
  template <typename Acc>
  __device__ __forceinline__ void take(const Part<Acc>* joined, Part<Acc> (&parts)[kVec]) const {
    int column = (start + static_cast<int>(threadIdx.x) * kVec) % columns;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      parts[i] = joined[column];
      column = column + 1 == columns ? 0 : column + 1;
    }
  }
};

// The same of a view, each of whose slabs is in one run.
template <typename T>
struct PaddedStrip : Strip<T> {
  static constexpr bool kView = true;
  int64_t beyond;

  __device__ __forceinline__ PaddedStrip(const SoftmaxTiles<T>& params, int64_t slab, int rank)
      : Strip<T>(params, slab, rank), beyond(params.runs.beyond(slab * params.length * params.inner)) {
    const int64_t span = params.runs.span;
    this->is_inside = is_within(source(params, 0), params.input, span) &&
        is_within(source(params, max(this->count, 1) - 1), params.input, span);
  }
  __device__ __forceinline__ PaddedStrip(const Strip<T>& strip, int64_t by) : Strip<T>(strip), beyond(by) {}
  __device__ __forceinline__ PaddedStrip head(int count) const { return {Strip<T>::head(count), beyond}; }
  __device__ __forceinline__ PaddedStrip tail(int first) const { return {Strip<T>::tail(first), beyond}; }
  __device__ __forceinline__ const T* source(const SoftmaxTiles<T>& params, int k) const {
    return params.input + this->place(k) + beyond;
  }
};

template <bool kBackward, bool kAll, typename T, int kCount>
__device__ __forceinline__ void load_vectors(
    const SoftmaxTiles<T>& params, const PaddedStrip<T>& lines, int k, Vector<T, 16 / sizeof(T)> (&raw)[kCount]) {
  if (kAll && lines.is_inside) {
    const T* const from = lines.source(params, k);
    AnyVector<T> pieces[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) pieces[i].ask(true, from + i * lines.apart);
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = pieces[i].get(from + i * lines.apart);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) raw[i] = neutral<T, 16 / sizeof(T), kBackward>();
  load_view_vectors<kCount>(params, lines, k, [&](int i, const auto& vector) { raw[i] = vector; });
}

}  // namespace dcs
