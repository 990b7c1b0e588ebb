// `_log_bmm` and `_log_bmm_backward` on CUDA.
#include <string>
#include <tuple>

#include "log_bmm/prepared.cuh"
#include "log_bmm/backward.cuh"
#include "log_bmm/direct.cuh"
#include "log_bmm/forward.cuh"

namespace dcs {
namespace {

constexpr const char* kOp = "_log_bmm";
constexpr const char* kBackwardOp = "_log_bmm_backward";

bool splits(const char* op, const std::string& precision) {
  check_precision(op, precision);
  return precision == "highest";
}

// Whether tensor cores are left out: they cannot, or a product this small is done before they start.
bool is_direct(const Tensor& a, const Tensor& b) {
  const int64_t rows = a.size(1), depth = a.size(2), columns = b.size(2);
  return a.scalar_type() == ScalarType::Double || depth < 16 || rows == 1 || columns == 1 ||
      (is_small(rows, columns) && depth <= 64);
}

template <typename Kernel, typename Job>
void launch_product(Kernel kernel, int bytes, const Job& job, int64_t tiles, cudaStream_t stream) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), kOp,
      "asking for shared memory");
  kernel<<<grid_of(kOp, tiles), kProductThreads, bytes, stream>>>(job);
}

// Large tiles (128 by 64, two a multiprocessor) read less, small ones fill the device sooner.
bool takes_large_tiles(int64_t batches, int64_t rows, int64_t columns, int32_t device) {
  return batches * ceil_div(rows, 128) * ceil_div(columns, kTile) >= 2 * device_of(device, kOp).multiprocessors;
}

void forward_product(
    const Tensor& a, const Tensor& b, const Tensor& out, const Tensor& log_s, bool split, cudaStream_t stream) {
  const int64_t depth = a.size(2);
  const ScaledSums sums(depth);
  const Prepared<float, float> prepared(kOp, a, b, true, sums.exponent, true, stream);
  ForwardJob<float> job;
  job.sums = sums;
  job.a = prepared.a.from, job.b = prepared.b.from;
  job.batches = a.size(0), job.depth = depth;
  job.peaks_a = prepared.a.peaks, job.peaks_b = prepared.b.peaks;
  job.scaled_a = {prepared.a.scaled, prepared.a.ld, a.size(1), depth};
  job.scaled_b = {prepared.b.scaled, prepared.b.ld, b.size(2), depth};
  job.out = static_cast<float*>(out.mutable_data_ptr());
  job.log_s = static_cast<float*>(log_s.mutable_data_ptr());
  const int64_t tiles = job.batches * ceil_div(job.a.count, kTile) * ceil_div(job.b.count, kTile);
  job.split_depth = split_depth_of(tiles, depth, device_of(a.get_device_index(), kOp).multiprocessors, 4 * kStageDepth);
  job.splits = ceil_div(depth, job.split_depth);
  const int64_t part_bytes = job.splits == 1 ? 0 : tiles * job.splits * kTile * kTile * int64_t{sizeof(float)};
  const Workspace parts(a, part_bytes), arrived(a, job.splits == 1 ? 0 : tiles * int64_t{sizeof(int)});
  job.parts = static_cast<float*>(parts.data()), job.arrived = static_cast<int*>(arrived.data());
  if (job.splits > 1)
    check_cuda(cudaMemsetAsync(job.arrived, 0, tiles * sizeof(int), stream), kOp, "clearing the counters");
  const auto run = [&](auto block) {
    constexpr int kBlock = decltype(block)::value;
    const int64_t blocks = job.batches * job.splits * ceil_div(job.a.count, kBlock) * ceil_div(job.b.count, kTile);
    if (split)
      launch_product(forward_kernel<float, kBlock, true>, Tf32Product<kBlock, kTile, true, true, true>::kSharedBytes,
          job, blocks, stream);
    else
      launch_product(forward_kernel<float, kBlock, false>, Tf32Product<kBlock, kTile, true, true, false>::kSharedBytes,
          job, blocks, stream);
  };
  if (takes_large_tiles(job.batches, job.a.count, job.b.count, a.get_device_index()))
    run(std::integral_constant<int, 128>());
  else run(std::integral_constant<int, 64>());
}

template <typename T>
void forward_direct(const Tensor& a, const Tensor& b, const Tensor& out, const Tensor& log_s, cudaStream_t stream) {
  const DirectJob<T, T> job{rows_of<T>(a), columns_of<T>(b), a.size(0), a.size(2),
      static_cast<T*>(out.mutable_data_ptr()), static_cast<T*>(log_s.mutable_data_ptr())};
  const int64_t rows = a.size(1), columns = b.size(2);
  if ((rows == 1 || columns == 1) && job.depth >= 16) {
    const Vectors<T>& matrix = columns == 1 ? job.a : job.b;
    const Vectors<T>& vector = columns == 1 ? job.b : job.a;
    const bool across = matrix.stride == 1 && matrix.step != 1;
    const int64_t blocks = job.batches * ceil_div(matrix.count, across ? 32 : kVectorWarps);
    const auto kernel = across ? direct_vector_kernel<T, T, true> : direct_vector_kernel<T, T, false>;
    kernel<<<grid_of(kOp, blocks), 32 * kVectorWarps, 0, stream>>>(
        matrix, vector, job.batches, job.depth, job.out, job.log_s);
  } else if (job.depth < 16 || (is_small(rows, columns) && job.depth <= 64)) {
    direct_small_kernel<T, T>
        <<<grid_of(kOp, std::min<int64_t>(ceil_div(job.batches * rows * columns, 256), 1 << 20)), 256, 0, stream>>>(
            job);
  } else if constexpr (std::is_same_v<T, double>) {
    const Prepared<T, T> prepared(kOp, a, b, false, 0, false, stream);
    const int64_t tiles = job.batches * ceil_div(rows, kTile) * ceil_div(columns, kTile);
    const bool is_sparse = is_small(rows, columns) || rows * columns * 32 < tiles / job.batches * kTile * kTile;
    const int64_t warps = std::min<int64_t>(ceil_div(job.batches * rows * columns, 8), 1 << 20);
    const auto kernel = is_sparse ? direct_warp_kernel<T, T> : direct_tile_kernel<T, T>;
    kernel<<<grid_of(kOp, is_sparse ? warps : tiles), kTileThreads, 0, stream>>>(
        job, prepared.a.peaks, prepared.b.peaks);
  }
}

Tensor narrowed(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

std::tuple<Tensor, Tensor> log_bmm(Tensor a, Tensor b, std::string precision) {
  check_operands(kOp, a, b);
  const bool split = splits(kOp, precision);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const cudaStream_t stream = current_stream(a.get_device_index());
  const ScalarType dtype = a.scalar_type();
  a = widened(a), b = widened(b);  // half precision: n^2 conversions before n^3 terms
  const Tensor out = make(a, {a.size(0), a.size(1), b.size(2)}, a.scalar_type()),
               log_s = make(a, {a.size(0), a.size(1), b.size(2)}, a.scalar_type());
  if (out.numel() > 0) {
    if (!is_direct(a, b)) forward_product(a, b, out, log_s, split, stream);
    else if (a.scalar_type() == ScalarType::Double) forward_direct<double>(a, b, out, log_s, stream);
    else forward_direct<float>(a, b, out, log_s, stream);
    check_cuda(cudaGetLastError(), kOp, "launching the kernel");
  }
  return {narrowed(out, dtype), log_s};
}

// A (batch, n, m) tensor's strides with n the rows or, for b's gradient, the columns.
template <typename Acc>
Upstream<Acc> upstream_of(const Tensor& grad, const Tensor& log_s, bool rows) {
  const int n = rows ? 1 : 2, m = rows ? 2 : 1;
  return {static_cast<const Acc*>(grad.const_data_ptr()), grad.stride(0), grad.stride(n), grad.stride(m),
      static_cast<const Acc*>(log_s.const_data_ptr()), log_s.stride(0), log_s.stride(n), log_s.stride(m)};
}

void backward_product(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& log_s, const Tensor* grad_a,
    const Tensor* grad_b, bool split, cudaStream_t stream) {
  const int64_t batches = a.size(0), rows = a.size(1), depth = a.size(2), columns = b.size(2),
                ld = ceil_div(columns, 4) * 4;
  const Prepared<float, float> prepared(kOp, a, b, true, 0, false, stream);
  const int64_t tiles_i = ceil_div(rows, kTile), tiles_j = ceil_div(ld, kTile);
  const Tensor scaled = make(a, {batches * rows * ld}, ScalarType::Float),
               direct = make(a, {batches * tiles_i * tiles_j}, ScalarType::Byte);
  const GradientTiles tiles{upstream_of<float>(grad, log_s, true), batches, rows, columns, ld,
      static_cast<float*>(scaled.mutable_data_ptr()), static_cast<unsigned char*>(direct.mutable_data_ptr())};
  gradient_tiles_kernel<<<grid_of(kOp, batches * tiles_i * tiles_j), kTileThreads, 0, stream>>>(tiles);
  const auto launch = [&](auto block, auto along, const BackwardJob<float>& job) {
    constexpr int kBlock = decltype(block)::value;
    constexpr bool kAlong = decltype(along)::value;
    const int64_t count = batches * ceil_div(job.own.count, kBlock) * ceil_div(depth, kTile);
    if (split)
      launch_product(backward_kernel<float, kBlock, kAlong, true>,
          Tf32Product<kBlock, kTile, kAlong, false, true>::kSharedBytes, job, count, stream);
    else
      launch_product(backward_kernel<float, kBlock, kAlong, false>,
          Tf32Product<kBlock, kTile, kAlong, false, false>::kSharedBytes, job, count, stream);
  };
  const auto run = [&](bool is_a, const Tensor& result) {
    const auto &own = is_a ? prepared.a : prepared.b, &other = is_a ? prepared.b : prepared.a;
    BackwardJob<float> job;
    job.own = own.from, job.other = other.from;
    job.batches = batches, job.depth = depth;
    job.peaks_own = own.peaks, job.peaks_other = other.peaks;
    job.gradient = {tiles.scaled, ld, own.from.count, other.from.count};
    job.gradient_batch = rows * ld;
    job.scaled_other = {other.scaled, other.ld, depth, other.from.count};
    job.upstream = upstream_of<float>(grad, log_s, is_a);
    job.direct = tiles.direct;
    job.direct_batch = tiles_i * tiles_j, job.direct_n = is_a ? tiles_j : 1, job.direct_m = is_a ? 1 : tiles_j;
    job.grad = static_cast<float*>(result.mutable_data_ptr());
    job.grad_batch = result.stride(0), job.grad_n = result.stride(is_a ? 1 : 2),
    job.grad_k = result.stride(is_a ? 2 : 1);
    const bool large = takes_large_tiles(batches, own.from.count, depth, a.get_device_index());
    using Large = std::integral_constant<int, 128>;
    using Small = std::integral_constant<int, 64>;
    if (large && is_a) launch(Large(), std::true_type(), job);
    else if (large) launch(Large(), std::false_type(), job);
    else if (is_a) launch(Small(), std::true_type(), job);
    else launch(Small(), std::false_type(), job);
  };
  if (grad_a != nullptr) run(true, *grad_a);
  if (grad_b != nullptr) run(false, *grad_b);
}

template <typename T>
void backward_direct(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& log_s, const Tensor* grad_a,
    const Tensor* grad_b, cudaStream_t stream) {
  const Prepared<T, T> prepared(kOp, a, b, false, 0, false, stream);
  const auto run = [&](bool is_a, const Tensor& result) {
    const auto &own = is_a ? prepared.a : prepared.b, &other = is_a ? prepared.b : prepared.a;
    const DirectBackwardJob<T, T> job{own.from, other.from, a.size(0), a.size(2), own.peaks, other.peaks,
        upstream_of<T>(grad, log_s, is_a), static_cast<T*>(result.mutable_data_ptr()), result.stride(0),
        result.stride(is_a ? 1 : 2), result.stride(is_a ? 2 : 1)};
    const int64_t total = result.numel();
    constexpr int64_t kFew = 1 << 17;  // elements that fill the device when each has a thread
    const bool by_warp = total < kFew && other.from.count >= 32;
    const auto kernel = by_warp ? direct_backward_kernel<T, T, true> : direct_backward_kernel<T, T, false>;
    kernel<<<grid_of(kOp, std::min<int64_t>(ceil_div(total * (by_warp ? 32 : 1), 256), 1 << 20)), 256, 0, stream>>>(
        job);
  };
  if (grad_a != nullptr) run(true, *grad_a);
  if (grad_b != nullptr) run(false, *grad_b);
}

std::tuple<Tensor, Tensor> log_bmm_backward(
    Tensor grad, Tensor a, Tensor b, Tensor log_s, std::string precision, bool need_a, bool need_b) {
  check_operands(kBackwardOp, a, b);
  const bool split = splits(kBackwardOp, precision);
  const ScalarType dtype = a.scalar_type();
  const Sizes shape = products_shape(a, b);
  check_beside_a(kBackwardOp, "grad", grad, a, dtype, shape);
  check_beside_a(kBackwardOp, "log_s", log_s, a, sum_dtype(dtype), shape);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const cudaStream_t stream = current_stream(a.get_device_index());
  grad = widened(grad), a = widened(a), b = widened(b);
  const auto result = [&](bool needed, const Tensor& like) {
    return needed ? make(a, {like.size(0), like.size(1), like.size(2)}, a.scalar_type())
                  : make(a, {0}, a.scalar_type());
  };
  Tensor grad_a = result(need_a, a), grad_b = result(need_b, b);
  const Tensor *to_a = grad_a.numel() > 0 ? &grad_a : nullptr, *to_b = grad_b.numel() > 0 ? &grad_b : nullptr;
  if (log_s.numel() == 0) {  // no output: nothing flows back
    if (to_a != nullptr) torch::stable::zero_(grad_a);
    if (to_b != nullptr) torch::stable::zero_(grad_b);
  } else if (to_a != nullptr || to_b != nullptr) {
    if (!is_direct(a, b)) backward_product(grad, a, b, log_s, to_a, to_b, split, stream);
    else if (a.scalar_type() == ScalarType::Double) backward_direct<double>(grad, a, b, log_s, to_a, to_b, stream);
    else backward_direct<float>(grad, a, b, log_s, to_a, to_b, stream);
    check_cuda(cudaGetLastError(), kBackwardOp, "launching the kernel");
  }
  return {narrowed(grad_a, dtype), narrowed(grad_b, dtype)};
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  m.impl(dcs::kOp, TORCH_BOX(&dcs::log_bmm));
  m.impl(dcs::kBackwardOp, TORCH_BOX(&dcs::log_bmm_backward));
}
