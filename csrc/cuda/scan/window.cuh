// Windowed scans: y[t] takes the distances 0 .. window - 1 back along the scan order.
// A short window is summed by running the plain recurrence over it for each output. A long one is composed by doubling:
// pieces of 2^i steps ending at every position, and from them the piece of `window` steps by the window's binary
// digits. Nothing is subtracted, so a NaN or a large value leaves with the window that held it.
#pragma once

#include "scan/carry/segment.cuh"
#include "common/element_types.cuh"

namespace dcs {

// One row's view. Position 0 of the scan order is `initial` where there is one; the elements follow.
template <typename T>
struct WindowRow {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  const ScanProblem& p;
  int64_t outer, inner;
  Wide gamma;

  __device__ WindowRow(const ScanProblem& problem, int64_t row)
      : p(problem), outer(row / problem.inner), inner(row % problem.inner) {
    gamma = cast<Wide>(p.gamma_value);
    if (p.gamma_kind == GammaKind::kRow)
      gamma = load_gamma<Wide>(p.gamma, p.gamma_dtype, offset(p.gamma_strides), p.conjugate_gamma);
  }
  __device__ int64_t offset(const Strides& strides) const { return outer * strides.outer + inner * strides.inner; }
  __device__ int64_t memory(int64_t q) const { return p.reverse ? p.length - 1 - q : q; }
  __device__ Acc value(int64_t q) const {
    return cast<Acc>(static_cast<const T*>(p.input)[offset(p.input_strides) + memory(q) * p.input_strides.time]);
  }
  __device__ Acc initial() const { return cast<Acc>(static_cast<const T*>(p.initial)[offset(p.initial_strides)]); }
  // The gate and the cut between q - 1 and q. A shifted scan has none before its first step.
  __device__ bool cut(int64_t q) const {
    const int64_t at = q - (p.shifted ? 1 : 0);
    return at < 0 || (p.reset && p.reset[offset(p.reset_strides) + memory(at) * p.reset_strides.time]);
  }
  __device__ Wide gate(int64_t q) const {
    if (p.gamma_kind != GammaKind::kStep) return gamma;
    const int64_t at = q - (p.shifted ? 1 : 0);
    if (at < 0) return cast<Wide>(1.0);
    return cast<Wide>(cast<Acc>(conj_if(p.conjugate_gamma,
        static_cast<const T*>(p.gamma)[offset(p.gamma_strides) + memory(at) * p.gamma_strides.time])));
  }
  __device__ void store(int64_t q, Wide y) const {
    static_cast<T*>(p.output)[offset(p.output_strides) + memory(q) * p.output_strides.time] = cast<T>(cast<Acc>(y));
  }
};

// Threads run along whichever of time and columns is contiguous in the output.
__device__ __forceinline__ void locate(const ScanProblem& p, int64_t index, int64_t length, int64_t& row, int64_t& q) {
  if (p.output_strides.time <= p.output_strides.inner || p.inner == 1) {
    row = index / length;
    q = index % length;
  } else {
    const int64_t inner = index % p.inner;
    q = index / p.inner % length;
    row = index / p.inner / length * p.inner + inner;
  }
}

template <typename T>
__global__ void window_direct_kernel(const __grid_constant__ ScanProblem p) {
  using Wide = typename Types<T>::Wide;
  const int64_t count = p.outer * p.inner * p.length;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < count;
      index += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    int64_t row, q;
    locate(p, index, p.length, row, q);
    const WindowRow<T> view(p, row);
    const int64_t oldest = q - p.window + 1;
    Wide y = cast<Wide>(0.0);
    bool carried = oldest < 0 && p.initial;
    if (carried) y = cast<Wide>(view.initial());
    for (int64_t s = max(int64_t{0}, oldest); s <= q; ++s) {
      const Wide x = cast<Wide>(view.value(s));
      y = carried && !view.cut(s) ? fold(x, view.gate(s), y) : x;
      carried = true;
    }
    view.store(q, y);
  }
}

// Pieces that end at each position of a row (of length + 1 positions when there is an initial value).
template <typename Wide>
struct Pieces {
  Wide* total;
  Wide* gates;
  bool* closed;
  __device__ __forceinline__ Piece<Wide> at(int64_t i) const { return {total[i], gates[i], closed[i]}; }
  __device__ __forceinline__ void put(int64_t i, const Piece<Wide>& piece) const {
    total[i] = piece.total;
    gates[i] = piece.gates;
    closed[i] = piece.closed;
  }
};

template <typename T>
__global__ void window_leaves_kernel(
    const __grid_constant__ ScanProblem p, int64_t first_row, int64_t rows, Pieces<typename Types<T>::Wide> pieces) {
  using Wide = typename Types<T>::Wide;
  const int64_t lead = p.initial ? 1 : 0, length = p.length + lead;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const WindowRow<T> view(p, first_row + i / length);
    const int64_t q = i % length - lead;
    if (q < 0) pieces.put(i, {cast<Wide>(view.initial()), cast<Wide>(1.0), true});
    else pieces.put(i, {cast<Wide>(view.value(q)), view.gate(q), view.cut(q)});
  }
}

// to[i] = later[i] after earlier[i - distance]; `length` positions a row.
template <typename Wide>
__global__ void window_compose_kernel(
    Pieces<Wide> to, Pieces<Wide> later, Pieces<Wide> earlier, int64_t distance, int64_t rows, int64_t length) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    Piece<Wide> piece = later.at(i);
    if (i % length >= distance && !piece.closed) {
      const Piece<Wide> other = earlier.at(i - distance);
      piece.total = fold(piece.total, piece.gates, other.total);
      piece.gates = clamped_mul(piece.gates, other.gates);
      piece.closed = other.closed;
    }
    to.put(i, piece);
  }
}

template <typename T>
__global__ void window_store_kernel(
    const __grid_constant__ ScanProblem p, int64_t first_row, int64_t rows, Pieces<typename Types<T>::Wide> pieces) {
  const int64_t lead = p.initial ? 1 : 0, length = p.length + lead;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * p.length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const WindowRow<T> view(p, first_row + i / p.length);
    view.store(i % p.length, pieces.total[i / p.length * length + i % p.length + lead]);
  }
}

}  // namespace dcs
