// Exponentials of differences to the maximum of their vector, and what a sum of products of two such tells.
#pragma once

#include <cmath>

#include "log_bmm/operands.cuh"

namespace dcs {

constexpr float kFloor = 0x1p-60f;

// e^x 2^exponent for x <= 0, to float's last digit but one: every term has the error of its factors. x = n log 2 + g,
// and e^g by its series to the seventh power (|g| < 0.35: what is left out is below 1e-8). The exponent is added to n:
// inside the argument it would cost digits.
__device__ __forceinline__ float scaled_exp(float x, int exponent) {
  if (!(x > -infinity<float>())) return 0.f;
  const float whole = rintf(x * 1.44269504f);
  const float g = fmaf(-whole, 1.42860677e-6f, fmaf(-whole, 0.693145752f, x));
  float power = fmaf(g, 1.f / 5040, 1.f / 720);
  power = fmaf(g, power, 1.f / 120);
  power = fmaf(g, power, 1.f / 24);
  power = fmaf(g, power, 1.f / 6);
  power = fmaf(g, power, 0.5f);
  power = fmaf(g, power, 1.f);
  power = fmaf(g, power, 1.f);
  const int shift = static_cast<int>(whole) + exponent;
  return shift < -126 ? 0.f : power * __int_as_float((shift + 127) << 23);
}

// What is known of a sum of products of such exponentials: a term that is lost is below 2^-126 2^exponent, so that a
// sum above 2 K 2^-126 2^exponent 2^24 has lost less than float32's last digit. Vectors with -inf keep their finite
// elements at kFloor or above, which makes a sum of 0 mean that no k is open in both, and the test coarser (kFloor for
// 2^-126).
enum class Verdict { kCertified, kMasked, kFailed };

struct ScaledSums {
  int exponent;  // of either factor
  float threshold, floored_threshold;

  ScaledSums() = default;
  explicit ScaledSums(int64_t depth) {
    const int log_depth = static_cast<int>(std::ceil(std::log2(static_cast<double>(depth))));
    exponent = (126 - log_depth) / 2;
    threshold = static_cast<float>(std::ldexp(2.0 * depth, exponent + 24 - 126));
    floored_threshold = static_cast<float>(std::ldexp(2.0 * depth * kFloor, exponent + 24));
  }
  __device__ __forceinline__ Verdict judge(const Peak<float>& a, const Peak<float>& b, float sum) const {
    const int either = a.flags | b.flags;
    if (either & kSpecial) return Verdict::kFailed;
    if ((either & kAllMasked) || (sum == 0.f && (a.flags & b.flags & kHasMasked))) return Verdict::kMasked;
    return sum >= (either & kHasMasked ? floored_threshold : threshold) ? Verdict::kCertified : Verdict::kFailed;
  }
};

template <typename Acc>
struct PeakScan {
  Acc max = -infinity<Acc>();
  bool masked = false, special = false;

  __device__ __forceinline__ void see(Acc x) {
    max = x > max ? x : max;
    masked |= x == -infinity<Acc>();
    special |= !(x < infinity<Acc>());
  }
  __device__ __forceinline__ void merge(const PeakScan& other) {
    max = other.max > max ? other.max : max;
    masked |= other.masked;
    special |= other.special;
  }
  __device__ __forceinline__ Peak<Acc> peak() const {
    const bool all = max == -infinity<Acc>() && !special;
    return {
        special || all ? Acc(0) : max, (masked ? kHasMasked : 0) | (all ? kAllMasked : 0) | (special ? kSpecial : 0)};
  }
};

// An element's exponential; `floored`: at least kFloor in a vector with -inf.
__device__ __forceinline__ float scaled_element(const Peak<float>& peak, float x, int exponent, bool floored) {
  if (peak.flags & (kSpecial | kAllMasked)) return 0.f;  // a direct sum serves it; here it must not touch its neighbors
  const float e = scaled_exp(x - peak.shift, exponent);
  return floored && (peak.flags & kHasMasked) && x > -infinity<float>() ? fmaxf(e, kFloor) : e;
}

}  // namespace dcs
