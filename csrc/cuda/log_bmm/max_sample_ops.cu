// `_max_bmm` and `_sample_bmm` on CUDA.
#include <tuple>

#include "log_bmm/launch.h"
#include "log_bmm/semiring_tile.cuh"

namespace dcs {
namespace {

constexpr const char* kMax = "_max_bmm";
constexpr const char* kSample = "_sample_bmm";

template <typename T>
struct SemiringJob {
  using Acc = typename Types<T>::Acc;
  Vectors<T> a, b;
  int64_t batches, depth;
  const Acc* uniforms;  // of sample_bmm
  T* values;            // of max_bmm
  int64_t* indices;

  template <int kCount>
  __device__ __forceinline__ void prepare(MaxOp<Acc, kCount>&, int, int64_t) const {}
  template <int kCount>
  __device__ __forceinline__ void prepare(SampleOp<Acc, kCount>& op, int e, int64_t at) const {
    op.target[e] = uniforms[at];
  }
  template <int kCount>
  __device__ __forceinline__ void write(const MaxOp<Acc, kCount>& op, int e, int64_t at) const {
    values[at] = cast<T>(op.max[e]);
    indices[at] = op.index[e];
  }
  template <int kCount>
  __device__ __forceinline__ void write(const SampleOp<Acc, kCount>& op, int e, int64_t at) const {
    indices[at] = op.drawn(e);
  }
};

template <typename T, template <typename, int> class Op>
__global__ void __launch_bounds__(256) semiring_small_kernel(SemiringJob<T> job) {
  using Acc = typename SemiringJob<T>::Acc;
  const int64_t total = job.batches * job.a.count * job.b.count;
  for (int64_t at = blockIdx.x * 256ll + threadIdx.x; at < total; at += gridDim.x * 256ll) {
    const int64_t j = at % job.b.count, i = at / job.b.count % job.a.count, batch = at / job.b.count / job.a.count;
    Op<Acc, 1> op;
    job.prepare(op, 0, at);
    run_single(op, job.a.of_batch(batch), job.b.of_batch(batch), i, j, job.depth);
    job.write(op, 0, at);
  }
}

template <typename T, template <typename, int> class Op>
__global__ void __launch_bounds__(kTileThreads) semiring_tile_kernel(SemiringJob<T> job) {
  using Acc = typename SemiringJob<T>::Acc;
  __shared__ TileMemory<Acc> memory;
  const int64_t tiles_i = (job.a.count + kTile - 1) / kTile, tiles_j = (job.b.count + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x, batch = tile / (tiles_i * tiles_j), row = tile / tiles_j % tiles_i * kTile,
                column = tile % tiles_j * kTile;
  const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int e = 0; e < kOwn * kOwn; ++e) {
      const int64_t i = row + ty + e / kOwn, j = column + tx + e % kOwn;
      if (i < job.a.count && j < job.b.count) f(e, (batch * job.a.count + i) * job.b.count + j);
    }
  };
  Op<Acc, kOwn * kOwn> op;
  each([&](int e, int64_t at) { job.prepare(op, e, at); });
  run_tile(op, memory, job.a.of_batch(batch), job.b.of_batch(batch), row, column, job.depth);
  each([&](int e, int64_t at) { job.write(op, e, at); });
}

template <typename T, template <typename, int> class Op>
void launch(const Tensor& a, const Tensor& b, const Tensor* uniforms, const Tensor* values, const Tensor& indices) {
  const char* name = values == nullptr ? kSample : kMax;
  const int32_t device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  using Acc = typename SemiringJob<T>::Acc;
  const SemiringJob<T> job{rows_of<T>(a), columns_of<T>(b), a.size(0), a.size(2),
      uniforms == nullptr ? nullptr : static_cast<const Acc*>(uniforms->const_data_ptr()),
      values == nullptr ? nullptr : static_cast<T*>(values->mutable_data_ptr()),
      static_cast<int64_t*>(indices.mutable_data_ptr())};
  if (is_small(a.size(1), b.size(2)) || a.size(1) == 1 || b.size(2) == 1) {
    semiring_small_kernel<T, Op>
        <<<grid_of(name, std::min<int64_t>(ceil_div(indices.numel(), 256), 1 << 20)), 256, 0, stream>>>(job);
  } else {
    const int64_t tiles = a.size(0) * ceil_div(a.size(1), kTile) * ceil_div(b.size(2), kTile);
    semiring_tile_kernel<T, Op><<<grid_of(name, tiles), kTileThreads, 0, stream>>>(job);
  }
  check_cuda(cudaGetLastError(), name, "launching the kernel");
}

template <template <typename, int> class Op>
void dispatch(const Tensor& a, const Tensor& b, const Tensor* uniforms, const Tensor* values, const Tensor& indices) {
  if (indices.numel() == 0) return;
  switch (a.scalar_type()) {
    case ScalarType::Half: return launch<__half, Op>(a, b, uniforms, values, indices);
    case ScalarType::BFloat16: return launch<__nv_bfloat16, Op>(a, b, uniforms, values, indices);
    case ScalarType::Double: return launch<double, Op>(a, b, uniforms, values, indices);
    default: return launch<float, Op>(a, b, uniforms, values, indices);
  }
}

std::tuple<Tensor, Tensor> max_bmm(Tensor a, Tensor b) {
  check_operands(kMax, a, b);
  check_not_empty(kMax, a);
  Tensor values = make(a, {a.size(0), a.size(1), b.size(2)}, a.scalar_type()),
         indices = make(a, {a.size(0), a.size(1), b.size(2)}, ScalarType::Long);
  dispatch<MaxOp>(a, b, nullptr, &values, indices);
  return {values, indices};
}

Tensor sample_bmm(Tensor a, Tensor b, Tensor uniforms) {
  check_operands(kSample, a, b);
  check_beside_a(kSample, "uniforms", uniforms, a, sum_dtype(a.scalar_type()), products_shape(a, b));
  uniforms = torch::stable::contiguous(uniforms);
  const Tensor indices = make(a, {a.size(0), a.size(1), b.size(2)}, ScalarType::Long);
  dispatch<SampleOp>(a, b, &uniforms, nullptr, indices);
  return indices;
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  m.impl(dcs::kMax, TORCH_BOX(&dcs::max_bmm));
  m.impl(dcs::kSample, TORCH_BOX(&dcs::sample_bmm));
}
