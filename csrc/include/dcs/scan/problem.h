// What a scan kernel is asked to do, free of torch types: a kernel sees pointers, sizes, strides and flags.
#pragma once

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

enum class GammaKind : int32_t {
  kNumber,  // `gamma_value`, the same for every row
  kRow,     // one a row, read from `gamma` (any floating dtype, its time stride is 0)
  kStep,    // one a step, read from `gamma`, in the input's dtype
};

// y[t] = x[t] + g[t] * y[prev(t)]; with `shifted`, y[t] = x[t] + g[prev(t)] * y[prev(t)].
// prev(t) is t - 1, or t + 1 when `reverse`. All sizes are at least 1.
struct ScanProblem {
  ElementType dtype;  // of input, output, initial, and of step gammas
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;
  bool reverse = false;
  bool shifted = false;
  int64_t window = 0;  // distances 0 .. window - 1 are summed; 0: no window

  const void* input = nullptr;
  Strides input_strides;
  void* output = nullptr;
  Strides output_strides;

  GammaKind gamma_kind = GammaKind::kNumber;
  double gamma_value = 1.0;
  const void* gamma = nullptr;  // device memory of the input's device
  ElementType gamma_dtype = ElementType::Double;
  Strides gamma_strides;
  bool conjugate_gamma = false;  // complex step and row gammas enter as their conjugates

  const void* initial = nullptr;  // time stride 0; null: 0
  Strides initial_strides;
  const bool* reset = nullptr;  // null: none
  Strides reset_strides;

  // The backward of a scan (the forward one ran in the other direction, unshifted). `input` is the upstream gradient,
  // the fields above describe the adjoint scan (shifted = true; gates and resets are the forward's), and the kernel
  // also forms
  //   grad_gamma[t] = output[t] * conj(saved[next(t)]),  next(t) = the forward scan's prev(t) = the adjoint's next
  //   step,
  // with saved[beyond the end] = initial (or 0), and 0 where reset[t]. `initial` is the forward's and does not enter
  // the adjoint scan.
  bool backward = false;
  const void* saved = nullptr;  // the forward's output, input's dtype
  Strides saved_strides;
  // kStep: elementwise, in the input's dtype. Else: sums over time, (outer, inner, partials) with a time stride of 0
  // and a stride of 1 over the partials, in float for half, bfloat16 and float inputs and in the input's dtype for
  // others; every partial is written.
  void* grad_gamma = nullptr;
  Strides grad_gamma_strides;
  int64_t partials = 1;

  int64_t rows() const { return outer * inner; }
};

}  // namespace dcs
