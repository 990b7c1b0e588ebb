// The first step of a product, launched.
#pragma once

#include "log_bmm/launch.h"
#include "log_bmm/prepare.cuh"

namespace dcs {

// The two operands' maxima and, where `exponent` is asked for, their scaled exponentials.
template <typename T, typename Acc>
struct Prepared {
  Tensor peak_memory, scaled_memory;
  PrepareJob<T, Acc> a, b;

  Prepared(const char* op, const Tensor& left, const Tensor& right, bool scale, int exponent, bool floored,
      cudaStream_t stream) {
    const int64_t batches = left.size(0), rows = left.size(1), depth = left.size(2), columns = right.size(2),
                  ld = ceil_div(depth, 4) * 4;
    static_assert(sizeof(Peak<Acc>) == 2 * sizeof(Acc), "peaks lie in a tensor of numbers");
    peak_memory = make(left, {batches * (rows + columns) * 2}, left.scalar_type());
    auto* peaks = static_cast<Peak<Acc>*>(peak_memory.mutable_data_ptr());
    float* scaled = nullptr;
    if (scale) {
      scaled_memory = make(left, {batches * (rows + columns) * ld}, ScalarType::Float);
      scaled = static_cast<float*>(scaled_memory.mutable_data_ptr());
    }
    a = {rows_of<T>(left), batches, depth, peaks, scaled, ld, exponent, floored};
    b = {columns_of<T>(right), batches, depth, peaks + batches * rows,
        scaled == nullptr ? nullptr : scaled + batches * rows * ld, ld, exponent, floored};
    prepare_kernel<T, Acc><<<grid_of(op, a.blocks() + b.blocks()), dim3(32, kPrepareLanes), 0, stream>>>(a, b);
    check_cuda(cudaGetLastError(), op, "launching the maxima");
  }
};

}  // namespace dcs
