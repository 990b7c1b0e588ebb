// The row kernels' problem: `_cross_entropy_rows_` in pointers, sizes and numbers.
//
//   u = logit_scale * (logits + bias)     z = softcap > 0 ? softcap * tanh(u / softcap) : u
//   lse = log sum_j exp z_j               p = exp(z - lse)          entropy = -sum_j p_j log p_j
//   loss = (1 - eps) w_t (lse - z_t) + eps / V * sum_j w_j (lse - z_j) + z_loss * lse^2
// and, in the logits' place, d/dlogits of grad_loss * loss + grad_lse * lse + grad_entropy * entropy. With H the
// entropy, for j other than t
//   d/dz_j = p_j (A + C + B log p_j) - E w_j      A = grad_loss (eps / V * sum w + 2 z_loss lse) + grad_lse -
//   grad_entropy * H
//                                                 B = -grad_entropy    C = grad_loss (1 - eps) w_t    E = grad_loss *
//                                                 eps / V
//   d/dz_t = C (p_t - 1) + p_t (A + B log p_t) - E w_t
// With class probabilities q the loss is sum_j v_j (lse - z_j) + z_loss * lse^2 for v_j = w_j ((1 - eps) q_j + eps /
// V), so C = 0 and, in A and E, v takes the place of eps / V * w.
//
// The target is kept out of the row's sums. With m the largest logit, R = the sum of exp(z_j - m) over the others and S
// = R + exp(z_t - m): p_t - 1 = -R / S and, where z_t is the largest, lse - z_t = log1p(R), so that a loss of 1e-20 and
// its gradient keep all their digits.
#pragma once

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

// One number a row, or (stride 0) one for all.
struct RowScalar {
  const void* data = nullptr;  // null: the default
  int64_t stride = 0;
};

// Where the logits' gradient is written a second time, for one GEMM over the rows of several calls: by slices of
// `width` classes, `inner` of a slice's columns in the memory of the GEMM's result and the others beside it; the last
// slice has the remaining classes, all of them beside it (torch_dcs_ops/ops/linear_cross_entropy/weight_gradient.py).
struct SavedGradient {
  void* within = nullptr;  // slices lie `stride` elements apart, and are matrices of `rows` rows
  void* beside = nullptr;  // one slice behind the other; rows padded to 16 bytes. Null: nowhere
  int64_t stride = 0;
  int64_t rows = 0, first_row = 0;  // the logits' first row is the slices' row first_row
  int64_t width = 1, inner = 0, slices = 1;
};

// Numbers are float, for double logits double. Rows and columns are at least 1.
struct RowsProblem {
  ElementType dtype = ElementType::Float;  // of the logits
  void* logits = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t stride = 0;  // elements from a row to the next

  const int64_t* target = nullptr;  // class indices, one a row; or null
  int64_t target_stride = 0;
  const void* probabilities =
      nullptr;  // where `target` is null: one a logit, probabilities_stride elements from a row to the next
  int64_t probabilities_stride = 0;
  const void* bias = nullptr;    // one a column, or null
  const void* weight = nullptr;  // likewise
  RowScalar grad_loss;           // default 1
  RowScalar grad_lse;            // default 0
  RowScalar grad_entropy;        // default 0

  int64_t ignore_index = 0;
  double label_smoothing = 0, softcap = 0, logit_scale = 1, z_loss = 0;
  bool gradient = false;

  void* loss = nullptr;
  void* lse = nullptr;
  int64_t* predictions = nullptr;  // null: not wanted
  void* entropy = nullptr;         // null: not wanted
  SavedGradient saved;
};

}  // namespace dcs
