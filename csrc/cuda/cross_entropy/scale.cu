// `_scale` on CUDA: output = input * factor, rounded once. In place, a factor of 1 costs no traffic: it is read on the
// device, and the kernel ends.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "common/host.h"
#include "common/vector.cuh"

namespace dcs {
namespace {

constexpr const char* kScale = "_scale";
constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 12;  // some waves of an H200; 65536 of them take 40 us to see a factor of 1

template <typename From, typename To, typename Factor, int kVec>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const From* input, const Factor* factor, To* output, int64_t count) {
  using Acc = typename Types<From>::Acc;
  const Acc by = static_cast<Acc>(*factor);
  if (static_cast<const void*>(input) == output && by == 1) return;
  const int64_t vectors = count / kVec, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < vectors; i += stride) {
    Acc values[kVec];
    unpack(reinterpret_cast<const Vector<From, kVec>*>(input)[i], values);
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[k] *= by;
    reinterpret_cast<Vector<To, kVec>*>(output)[i] = pack<Acc, To, kVec>(values);
  }
  for (int64_t i = vectors * kVec + first; i < count; i += stride) output[i] = cast<To>(cast<Acc>(input[i]) * by);
}

template <typename From, typename To>
void launch(const Tensor& input, const Tensor& factor, const Tensor& output) {
  using Factor = typename Types<From>::Acc;
  constexpr int kFull = 16 / std::max(sizeof(From), sizeof(To));
  const int64_t count = input.numel();
  const auto* from = static_cast<const From*>(input.const_data_ptr());
  const auto* by = static_cast<const Factor*>(factor.const_data_ptr());
  auto* to = static_cast<To*>(output.mutable_data_ptr());
  const int32_t device = input.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const int64_t blocks = std::clamp<int64_t>(count / (kThreads * kFull * 4), 1, kMostBlocks);
  const auto kernel = aligned ? scale_kernel<From, To, Factor, kFull> : scale_kernel<From, To, Factor, 1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, current_stream(device)>>>(from, by, to, count);
  check_cuda(cudaGetLastError(), kScale, "launching the kernel");
}

// The caller is torch_dcs_ops/ops/linear_cross_entropy/scale.py alone, with buffers of its own.
void scale(Tensor input, Tensor factor, Tensor output) {
  const ScalarType from = input.scalar_type(), to = output.scalar_type();
  if (input.numel() != output.numel() || !input.is_contiguous() || !output.is_contiguous())
    fail(kScale, ": input and output must be contiguous and of one size, got ", shape_text(sizes_of(input)), " and ",
        shape_text(sizes_of(output)));
  const ScalarType wide = from == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  if (factor.numel() != 1 || factor.scalar_type() != wide)
    fail(kScale, ": factor must be one ", dtype_name(wide), ", got ", dtype_name(factor.scalar_type()),
        " of the shape ", shape_text(sizes_of(factor)));
  if (input.numel() == 0) return;
  if (from == ScalarType::Float && to == ScalarType::Float) launch<float, float>(input, factor, output);
  else if (from == ScalarType::Float && to == ScalarType::Half) launch<float, __half>(input, factor, output);
  else if (from == ScalarType::Float && to == ScalarType::BFloat16) launch<float, __nv_bfloat16>(input, factor, output);
  else if (from == ScalarType::Half && to == ScalarType::Half) launch<__half, __half>(input, factor, output);
  else if (from == ScalarType::BFloat16 && to == ScalarType::BFloat16)
    launch<__nv_bfloat16, __nv_bfloat16>(input, factor, output);
  else if (from == ScalarType::Double && to == ScalarType::Double) launch<double, double>(input, factor, output);
  else fail(kScale, ": output must be ", dtype_name(from), " or a half of float32, got ", dtype_name(to));
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { m.impl(dcs::kScale, TORCH_BOX(&dcs::scale)); }
