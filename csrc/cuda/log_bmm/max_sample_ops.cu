// `_max_bmm` and `_sample_bmm` on CUDA.
#include <tuple>

#include "log_bmm/prepared.cuh"
#include "log_bmm/sample_product.cuh"
#include "log_bmm/select.cuh"

namespace dcs {
namespace {

constexpr const char* kMax = "_max_bmm";
constexpr const char* kSample = "_sample_bmm";

enum class Kernel { kThreads, kWarps, kTiles };

struct Plan {
  Kernel kernel;
  int split_depth;  // terms of a tile that a block takes
};

// Short sums an output a thread. Where most of a tile would lie outside an output a warp, if that makes enough warps.
// Else tiles; where they would not fill the device, parts of their terms, of at least two steps.
// Products cost less than what they are split into: they are split where they leave most of the device idle.
Plan plan_of(int64_t batches, int64_t rows, int64_t columns, int64_t depth, int multiprocessors, bool by_products) {
  const int64_t tiles = batches * ceil_div(rows, kTile) * ceil_div(columns, kTile), outputs = batches * rows * columns;
  const int all = static_cast<int>(depth);
  if (depth < 16 || (is_small(rows, columns) && depth <= 64)) return {Kernel::kThreads, all};
  const bool is_sparse = outputs * 32 < tiles * kTile * kTile;
  if (is_sparse && (outputs >= 8 * multiprocessors || depth <= 2048)) return {Kernel::kWarps, all};
  if (by_products && tiles * 5 >= multiprocessors) return {Kernel::kTiles, all};
  return {Kernel::kTiles, static_cast<int>(split_depth_of(tiles, depth, multiprocessors, 2 * kTileDepth))};
}

template <typename Kernel, typename Job>
void run(const char* op, Kernel kernel, int64_t blocks, const Job& job, cudaStream_t stream) {
  static_assert(kSelectThreads == kTileThreads, "every kernel has as many threads");
  kernel<<<grid_of(op, blocks), kTileThreads, 0, stream>>>(job);
  check_cuda(cudaGetLastError(), op, "launching the kernel");
}

void sample_products(const Tensor& a, const Tensor& b, const float* uniforms, int64_t* indices, cudaStream_t stream) {
  const ScaledSums sums(a.size(2));
  const Prepared<float, float> prepared(kSample, a, b, true, sums.exponent, true, stream);
  const SampleProductJob job{prepared.a.from, prepared.b.from, a.size(0), static_cast<int>(a.size(2)),
      static_cast<int>(prepared.a.ld), prepared.a.peaks, prepared.b.peaks, prepared.a.scaled, prepared.b.scaled, sums,
      uniforms, indices};
  const int64_t tiles = a.size(0) * ceil_div(a.size(1), kTile) * ceil_div(b.size(2), kTile);
  run(kSample, sample_product_kernel, tiles, job, stream);
}

// `values` is null for sample_bmm, `uniforms` for max_bmm.
template <typename T>
void launch(const Tensor& a, const Tensor& b, const Tensor* uniforms, const Tensor* values, const Tensor& indices) {
  const bool is_max = values != nullptr;
  const char* name = is_max ? kMax : kSample;
  const int32_t device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  using Acc = typename SelectJob<T>::Acc;
  const int64_t rows = a.size(1), columns = b.size(2), outputs = indices.numel();
  const Plan plan = plan_of(a.size(0), rows, columns, a.size(2), device_of(device, name).multiprocessors,
      !is_max && std::is_same_v<Acc, float>);
  SelectJob<T> job{rows_of<T>(a), columns_of<T>(b), a.size(0), static_cast<int>(a.size(2))};
  job.split_depth = plan.split_depth;
  job.splits = job.depth == 0 ? 1 : static_cast<int>(ceil_div(job.depth, plan.split_depth));
  job.uniforms = is_max ? nullptr : static_cast<const Acc*>(uniforms->const_data_ptr());
  job.values = is_max ? static_cast<T*>(values->mutable_data_ptr()) : nullptr;
  job.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  job.is_narrow = outputs < int64_t{1} << 31;
  if (job.is_narrow)
    job.by_columns = Divisor(static_cast<uint32_t>(columns)), job.by_rows = Divisor(static_cast<uint32_t>(rows));
  const auto blocks_of = [](int64_t units) { return std::min<int64_t>(units, 1 << 20); };
  const int64_t by_warps = blocks_of(ceil_div(outputs, kSelectWarps));
  const int64_t tiles = a.size(0) * ceil_div(rows, kTile) * ceil_div(columns, kTile);
  if (plan.kernel == Kernel::kThreads) {
    run(name, is_max ? select_by_thread_kernel<T, MaxOp> : select_by_thread_kernel<T, SampleOp>,
        blocks_of(ceil_div(outputs, kSelectThreads)), job, stream);
  } else if (plan.kernel == Kernel::kWarps) {
    run(name, is_max ? max_by_warp_kernel<T> : sample_by_warp_kernel<T>, by_warps, job, stream);
  } else if (job.splits > 1) {
    const Workspace parts(a, outputs * job.splits * int64_t{sizeof(typename SelectJob<T>::Part)});
    job.parts = static_cast<typename SelectJob<T>::Part*>(parts.data());
    run(name, is_max ? select_tile_kernel<T, MaxOp, true> : select_tile_kernel<T, LseOp, true>, tiles * job.splits, job,
        stream);
    run(name, is_max ? merge_max_kernel<T> : merge_sample_kernel<T>, by_warps, job, stream);
  } else if (is_max) {
    run(name, select_tile_kernel<T, MaxOp, false>, tiles, job, stream);
  } else if constexpr (std::is_same_v<Acc, float>) {
    sample_products(widened(a), widened(b), job.uniforms, job.indices, stream);
  } else {
    run(name, select_tile_kernel<T, SampleOp, false>, tiles, job, stream);
  }
}

void dispatch(const Tensor& a, const Tensor& b, const Tensor* uniforms, const Tensor* values, const Tensor& indices) {
  if (indices.numel() == 0) return;
  switch (a.scalar_type()) {
    case ScalarType::Half: return launch<__half>(a, b, uniforms, values, indices);
    case ScalarType::BFloat16: return launch<__nv_bfloat16>(a, b, uniforms, values, indices);
    case ScalarType::Double: return launch<double>(a, b, uniforms, values, indices);
    default: return launch<float>(a, b, uniforms, values, indices);
  }
}

std::tuple<Tensor, Tensor> max_bmm(Tensor a, Tensor b) {
  check_operands(kMax, a, b);
  check_not_empty(kMax, a);
  Tensor values = make(a, {a.size(0), a.size(1), b.size(2)}, a.scalar_type()),
         indices = make(a, {a.size(0), a.size(1), b.size(2)}, ScalarType::Long);
  dispatch(a, b, nullptr, &values, indices);
  return {values, indices};
}

Tensor sample_bmm(Tensor a, Tensor b, Tensor uniforms) {
  check_operands(kSample, a, b);
  check_beside_a(kSample, "uniforms", uniforms, a, sum_dtype(a.scalar_type()), products_shape(a, b));
  uniforms = torch::stable::contiguous(uniforms);
  const Tensor indices = make(a, {a.size(0), a.size(1), b.size(2)}, ScalarType::Long);
  dispatch(a, b, &uniforms, nullptr, indices);
  return indices;
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  m.impl(dcs::kMax, TORCH_BOX(&dcs::max_bmm));
  m.impl(dcs::kSample, TORCH_BOX(&dcs::sample_bmm));
}
