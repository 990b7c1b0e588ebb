// Windowed scans: y[t] takes the distances 0 .. window - 1 back along the scan order.
// A short window is summed by running the plain recurrence over it for each output. A long one is composed by doubling:
// segments of 2^i steps ending at every position, and from them the segment of `window` steps by the window's binary
// digits. Nothing is subtracted, so a NaN or a large value leaves with the window that held it.
#pragma once

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// One row's view. Position 0 of the scan order is `initial` where there is one; the elements follow.
template <typename T>
struct WindowRow {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  const ScanProblem& p;
  int64_t outer, inner;
  Wide gamma;

  __device__ __forceinline__ WindowRow(const ScanProblem& problem, int64_t row)
      : p(problem), outer(p.inner == 1 ? row : divided(row, p.inner)), inner(row - outer * p.inner) {
    gamma = cast<Wide>(p.gamma_value);
    if (p.gamma_kind == GammaKind::kRow)
      gamma = load_gamma<Wide>(p.gamma, p.gamma_dtype, offset(p.gamma_strides), p.conjugate_gamma);
  }
  __device__ __forceinline__ int64_t offset(const Strides& strides) const { return strides.at(outer, inner); }
  // An operand at the q-th element in the order of the scan, and how far on the next one lies.
  template <typename E>
  __device__ __forceinline__ E* at(E* pointer, const Strides& strides, int64_t q) const {
    return pointer + offset(strides) + (p.reverse ? p.length - 1 - q : q) * strides.time;
  }
  __device__ __forceinline__ int64_t apart(const Strides& strides) const {
    return p.reverse ? -strides.time : strides.time;
  }
  __device__ __forceinline__ Acc initial() const {
    return cast<Acc>(static_cast<const T*>(p.initial)[offset(p.initial_strides)]);
  }
  __device__ __forceinline__ Wide gate_at(const T* gate) const {
    return cast<Wide>(cast<Acc>(conj_if(p.conjugate_gamma, *gate)));
  }
  // visit(the value, the gate and the cut before it) of the elements from `first` to `last`. A shifted scan has no gate
  // before its first step.
  template <typename Visit>
  __device__ __forceinline__ void each(int64_t first, int64_t last, const Visit& visit) const {
    const int64_t shift = p.shifted ? 1 : 0, x_apart = apart(p.input_strides);
    const T* x = at(static_cast<const T*>(p.input), p.input_strides, first);
    const bool step = p.gamma_kind == GammaKind::kStep;
    const T* gate = step ? at(static_cast<const T*>(p.gamma), p.gamma_strides, first - shift) : nullptr;
    const bool* flag = p.reset ? at(p.reset, p.reset_strides, first - shift) : nullptr;
    const int64_t gate_apart = apart(p.gamma_strides), flag_apart = apart(p.reset_strides);
#pragma unroll 4
    for (int64_t q = first; q <= last; ++q) {
      const bool none = q < shift;
      const Wide factor = !step ? gamma : none ? cast<Wide>(1.0) : gate_at(gate);
      visit(cast<Wide>(cast<Acc>(*x)), factor, none || (flag && *flag));
      x += x_apart;
      if (step) gate += gate_apart;
      if (flag) flag += flag_apart;
    }
  }
  __device__ __forceinline__ void store(int64_t q, Wide y) const {
    *at(static_cast<T*>(p.output), p.output_strides, q) = cast<T>(cast<Acc>(y));
  }
};

// Threads run along whichever of time and columns is contiguous in the output.
__device__ __forceinline__ void locate(const ScanProblem& p, int64_t index, int64_t length, int64_t& row, int64_t& q) {
  if (p.output_strides.time <= p.output_strides.inner || p.inner == 1) {
    row = divided(index, length);
    q = index - row * length;
  } else {
    const int64_t line = divided(index, p.inner), outer = divided(line, length);
    q = line - outer * length;
    row = outer * p.inner + index - line * p.inner;
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
    view.each(max(int64_t{0}, oldest), q, [&](Wide x, Wide gate, bool cut) {
      y = carried && !cut ? fold(x, gate, y) : x;
      carried = true;
    });
    view.store(q, y);
  }
}

// Segments that end at each position of a row (of length + 1 positions when there is an initial value).
template <typename Wide>
struct Segments {
  Wide* total;
  Wide* gates;
  bool* closed;
  __device__ __forceinline__ Segment<Wide> at(int64_t i) const { return {total[i], gates[i], closed[i]}; }
  __device__ __forceinline__ void store(int64_t i, const Segment<Wide>& segment) const {
    total[i] = segment.total;
    gates[i] = segment.gates;
    closed[i] = segment.closed;
  }
};

template <typename T>
__global__ void window_leaves_kernel(const __grid_constant__ ScanProblem p, int64_t first_row, int64_t rows,
    Segments<typename Types<T>::Wide> segments) {
  using Wide = typename Types<T>::Wide;
  const int64_t lead = p.initial ? 1 : 0, length = p.length + lead;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = divided(i, length), q = i - row * length - lead;
    const WindowRow<T> view(p, first_row + row);
    if (q < 0) segments.store(i, {cast<Wide>(view.initial()), cast<Wide>(1.0), true});
    else view.each(q, q, [&](Wide x, Wide gate, bool cut) { segments.store(i, {x, gate, cut}); });
  }
}

// to[i] = later[i] after earlier[i - distance]; `length` positions a row.
template <typename Wide>
__global__ void window_compose_kernel(
    Segments<Wide> to, Segments<Wide> later, Segments<Wide> earlier, int64_t distance, int64_t rows, int64_t length) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    Segment<Wide> segment = later.at(i);
    if (i - divided(i, length) * length >= distance && !segment.closed) {
      const Segment<Wide> other = earlier.at(i - distance);
      segment.total = fold(segment.total, segment.gates, other.total);
      segment.gates = clamped_mul(segment.gates, other.gates);
      segment.closed = other.closed;
    }
    to.store(i, segment);
  }
}

template <typename T>
__global__ void window_store_kernel(const __grid_constant__ ScanProblem p, int64_t first_row, int64_t rows,
    Segments<typename Types<T>::Wide> segments) {
  const int64_t lead = p.initial ? 1 : 0, length = p.length + lead;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * p.length;
      i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = divided(i, p.length), q = i - row * p.length;
    const WindowRow<T> view(p, first_row + row);
    view.store(q, segments.total[row * length + q + lead]);
  }
}

}  // namespace dcs
