// output = input * factors, rounded once. In place, a factor of 1 costs no traffic: it is read on the device, and the
// kernel ends.
#include "cross_entropy/scale.h"

#include <algorithm>

#include "common/device.h"
#include "common/ptx/dependent_launch.cuh"
#include "common/vector.cuh"

namespace dcs {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 12;  // some waves of an H200; 65536 of them take 40 us to see a factor of 1

template <typename From, typename To, typename Factor, int kVec>
__global__ void __launch_bounds__(kThreads) scale_kernel(
    const From* input, const Factor* factor, const Factor* other, Factor number, To* output, int64_t count) {
  using Acc = typename Types<From>::Acc;
  overlap_launches();
  const auto of = [](const Factor* one) { return one ? *one : Factor(1); };
  const Acc by = static_cast<Acc>(of(factor) * (of(other) * number));
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
cudaError_t launch(const ScaleProblem& problem, bool can_wait, cudaStream_t stream) {
  using Factor = typename Types<From>::Acc;
  constexpr int kFull = 16 / std::max(sizeof(From), sizeof(To));
  const auto* from = static_cast<const From*>(problem.input);
  auto* to = static_cast<To*>(problem.output);
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const int64_t blocks = std::clamp<int64_t>(problem.count / (kThreads * kFull * 4), 1, kMostBlocks);
  const auto kernel = aligned ? scale_kernel<From, To, Factor, kFull> : scale_kernel<From, To, Factor, 1>;
  return launch_dependent(kernel, can_wait, blocks, kThreads, 0, stream, from,
      static_cast<const Factor*>(problem.factor), static_cast<const Factor*>(problem.other),
      static_cast<Factor>(problem.number), to, problem.count);
}

}  // namespace

cudaError_t launch_scale(const ScaleProblem& problem, bool can_wait, cudaStream_t stream) {
  switch (problem.from) {
    case ElementType::Half: return launch<__half, __half>(problem, can_wait, stream);
    case ElementType::BFloat16: return launch<__nv_bfloat16, __nv_bfloat16>(problem, can_wait, stream);
    case ElementType::Double: return launch<double, double>(problem, can_wait, stream);
    default:
      if (problem.to == ElementType::Half) return launch<float, __half>(problem, can_wait, stream);
      if (problem.to == ElementType::BFloat16) return launch<float, __nv_bfloat16>(problem, can_wait, stream);
      return launch<float, float>(problem, can_wait, stream);
  }
}

}  // namespace dcs
