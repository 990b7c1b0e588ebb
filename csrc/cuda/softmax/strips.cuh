// Slabs (slabs.cuh) of any number of columns: in so many vectors of the slab, `chunk`, each block of a group has a
// strip of `width` neighboring ones in every `stride`, after which the columns are where they were. So blocks read
// whole vectors, and some KB side by side, of columns that are no whole vectors, too.
#pragma once

#include "softmax/cluster_tiles.cuh"

namespace dcs {

template <typename T>
struct Strip : SlabVectors<T> {
  using SlabVectors<T>::kVec;
  static constexpr bool kReadTwice = true;
  int start;  // the column of the strip's first element

  __device__ __forceinline__ Strip(const SoftmaxTiles<T>& params, int64_t slab, int rank)
      : Strip(params, slab, rank / params.strips, rank % params.strips * params.width) {}
  // The first `count` vectors, and the others.
  __device__ __forceinline__ Strip head(int count) const {
    Strip lines = *this;
    lines.count = count;
    return lines;
  }
  __device__ __forceinline__ Strip tail(int first) const {
    Strip lines = *this;
    lines.mine = this->range(first);
    lines.first += first * this->apart;
    lines.left -= first * this->apart;
    lines.count -= first;
    return lines;
  }

  template <bool kBackward, typename Acc>
  __device__ __forceinline__ Part<Acc>* join(const Part<Acc> (&parts)[kVec], Part<Acc>* shared) const {
    return this->template join_from<kBackward>(start, parts, shared);
  }
  template <typename Acc>
  __device__ __forceinline__ void take(const Part<Acc>* joined, Part<Acc> (&parts)[kVec]) const {
    this->take_from(start, joined, parts);
  }

 private:
  __device__ __forceinline__ Strip(const SoftmaxTiles<T>& params, int64_t slab, int64_t chunk, int in_stride)
      : SlabVectors<T>(params, slab, chunk * params.chunk + in_stride + threadIdx.x, (chunk + 1) * params.chunk,
            params.stride,
            static_cast<int>(threadIdx.x) < params.width && in_stride + static_cast<int>(threadIdx.x) < params.stride),
        start(in_stride * kVec % static_cast<int>(params.inner)) {}
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
