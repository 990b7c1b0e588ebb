// The rows of `_cross_entropy_rows_`, block by block of columns while they are in the first-level cache;
// dcs/cross_entropy/problem.h has the formulas. One pass finds maximum and sums (a block's own maximum first, then its
// sums relative to the largest so far), a second writes the gradient. Included by one file an instruction set, which
// defines DCS_KERNELS (the table's name) and DCS_ISA (its name in messages).
#pragma once

#include "cross_entropy/kernels.h"
#include "common/vector_math.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kBlock = 2048;  // columns; a block of logits, their z and their slopes are 24 KiB in float

template <typename T>
struct Compute {
  using type = float;
  static constexpr float kLowest = -3.4028234663852886e38f;
};
template <>
struct Compute<double> {
  using type = double;
  static constexpr double kLowest = -kLargest;
};

// Sums over a part of a row, relative to its largest z.
struct Sums {
  double largest;
  double power = 0;     // sum exp(z - largest)
  double weighted = 0;  // sum (z - largest) exp(z - largest); with entropy only
  double distance = 0;  // sum w (largest - z), and of w; with label smoothing or class probabilities only
  double weight = 0;
};

// The same sums relative to another z, at least as large.
DCS_INLINE void raise(Sums& sums, double largest) {
  if (!(largest > sums.largest)) return;
  // Anything below exp(-1000) is 0, and 0 times a longer way is not inf.
  const double rise = sums.largest - largest, scale = __builtin_exp(rise > -1000.0 ? rise : -1000.0);
  sums.weighted = scale * (sums.weighted + (rise > -1000.0 ? rise : -1000.0) * sums.power);
  sums.power *= scale;
  if (sums.weight != 0) sums.distance -= rise * sums.weight;
  sums.largest = largest;
}

template <typename T>
class RowKernel {
 public:
  using C = typename Compute<T>::type;
  using S = Simd<C>;
  using Reg = typename S::Reg;
  static constexpr int kWidth = S::kWidth;

  explicit RowKernel(const RowsProblem& problem)
      : problem_(problem),
        mixed_(problem.label_smoothing != 0 || problem.probabilities != nullptr),
        bias_(static_cast<const C*>(problem.bias)),
        weight_(static_cast<const C*>(problem.weight)),
        plain_(problem.bias == nullptr && !(problem.softcap > 0) && problem.logit_scale == 1.0) {}

  void run(int64_t index) {
    row_ = static_cast<T*>(problem_.logits) + index * problem_.stride;
    if (problem_.probabilities != nullptr)
      probabilities_ = static_cast<const C*>(problem_.probabilities) + index * problem_.probabilities_stride;
    const int64_t target = problem_.target != nullptr ? problem_.target[index * problem_.target_stride] : -1;
    const bool ignored = problem_.target != nullptr && target == problem_.ignore_index;
    if (ignored) {
      write(problem_.loss, index, 0);
      write(problem_.lse, index, 0);
      if (problem_.entropy != nullptr) write(problem_.entropy, index, 0);
      if (problem_.predictions != nullptr) {
        Sums sums{Compute<T>::kLowest};
        accumulate<false>(0, problem_.columns, sums);
        problem_.predictions[index] = position(static_cast<C>(sums.largest), sums.power != sums.power);
      }
      if (problem_.gradient) std::memset(row_, 0, static_cast<size_t>(problem_.columns) * sizeof(T));
      return;
    }
    const bool entropic = problem_.entropy != nullptr || problem_.grad_entropy.data != nullptr;
    if (entropic) valid_row<true>(index, target);
    else valid_row<false>(index, target);
  }

 private:
  // target -1: class probabilities.
  template <bool kEntropy>
  void valid_row(int64_t index, int64_t target) {
    const int64_t columns = problem_.columns;
    const bool has_target = target >= 0;
    Sums sums{Compute<T>::kLowest};
    if (has_target) {
      // Up to where vectors do not straddle cache lines again, and from there.
      const int64_t aligned = target / 64 * 64 + 64 < columns ? target / 64 * 64 + 64 : columns;
      accumulate<kEntropy>(0, target, sums);
      accumulate<kEntropy>(target + 1, aligned, sums);
      accumulate<kEntropy>(aligned, columns, sums);
    } else {
      accumulate<kEntropy>(0, columns, sums);
    }

    const double eps = problem_.label_smoothing, even = has_target ? eps / static_cast<double>(columns) : 1.0;
    double gap = 0, hit = 0, target_power = 0, target_share = 0;
    C target_slope = 1;
    bool target_is_largest = false;
    if (has_target) {
      const double z = static_cast<double>(one_value(target, &target_slope));
      const double weight = weight_ == nullptr ? 1.0 : static_cast<double>(weight_[target]);
      target_is_largest = z >= sums.largest;
      raise(sums, z);
      gap = sums.largest - z;
      hit = (1 - eps) * weight;
      target_power = __builtin_exp(-gap);
      target_share = even * weight;
      if (mixed_) {
        sums.distance += weight * gap;
        sums.weight += weight;
      }
    }
    const double others = sums.power, total = others + target_power;
    const double log_total = target_is_largest ? __builtin_log1p(others) : __builtin_log(total);
    const double nll = gap + log_total, lse = sums.largest + log_total;
    double loss = has_target ? hit * nll : 0;
    if (mixed_) loss += even * (sums.distance + sums.weight * log_total);
    if (problem_.z_loss != 0) loss += problem_.z_loss * lse * lse;
    double entropy = 0;
    // 0 * inf is no contribution.
    if (kEntropy) entropy = log_total - (sums.weighted - (target_power > 0 ? target_power * gap : 0)) / total;
    write(problem_.loss, index, loss);
    write(problem_.lse, index, lse);
    if (problem_.entropy != nullptr) write(problem_.entropy, index, entropy);
    if (problem_.predictions != nullptr)
      problem_.predictions[index] = position(static_cast<C>(sums.largest), total != total);
    if (!problem_.gradient) return;

    const double grad_loss = read(problem_.grad_loss, index, 1), grad_lse = read(problem_.grad_lse, index, 0);
    const double grad_entropy = read(problem_.grad_entropy, index, 0);
    double a = grad_lse - grad_entropy * entropy;
    if (mixed_) a += grad_loss * even * sums.weight;
    if (problem_.z_loss != 0) a += grad_loss * 2 * problem_.z_loss * lse;
    const double c = grad_loss * hit, scale = problem_.logit_scale;
    // exp(d) (power + slope d) - e w, d = z - largest.
    const double power = scale / total * (a + c + grad_entropy * log_total), slope = -scale / total * grad_entropy;
    write_gradient<kEntropy>(static_cast<C>(sums.largest), static_cast<C>(power), static_cast<C>(slope),
        static_cast<C>(mixed_ ? scale * grad_loss * even : 0));
    if (!has_target) return;
    const double log_p = nll > 1000.0 ? -1000.0 : -nll;
    const double at_target =
        -c * (others / total) + target_power / total * (a - grad_entropy * log_p) - grad_loss * target_share;
    C number = static_cast<C>(at_target * scale * static_cast<double>(target_slope));
    convert(&number, 1, row_ + target);
  }

  void write(void* results, int64_t index, double value) const {
    static_cast<C*>(results)[index] = static_cast<C>(value);
  }

  double read(const RowScalar& scalar, int64_t index, double otherwise) const {
    return scalar.data == nullptr ? otherwise
                                  : static_cast<double>(static_cast<const C*>(scalar.data)[index * scalar.stride]);
  }

  // The z of `count` <= kBlock columns from `from`, filled up to whole vectors with -inf; with kSlope, dz/du in
  // slopes_.
  template <bool kSlope>
  DCS_INLINE const C* values(int64_t from, int64_t count) {
    const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
    if constexpr (sizeof(T) == sizeof(C)) {
      if (plain_ && padded == count) return reinterpret_cast<const C*>(row_ + from);
    }
    convert(row_ + from, count, values_);
    for (int64_t i = count; i < padded; ++i) values_[i] = -__builtin_inf();
    if (plain_) return values_;
    if (bias_ != nullptr)
      for (int64_t i = 0; i < count; ++i) values_[i] += bias_[from + i];
    const Reg scale = S::splat(static_cast<C>(problem_.logit_scale));
    if (problem_.logit_scale != 1.0)
      for (int64_t i = 0; i < padded; i += kWidth) S::store(values_ + i, S::mul(S::load(values_ + i), scale));
    if (problem_.softcap > 0) cap<kSlope>(count, padded);
    // What a factor of 0 or less makes of the filling.
    for (int64_t i = count; i < padded; ++i) values_[i] = -__builtin_inf();
    return values_;
  }

  template <bool kSlope>
  DCS_INLINE void cap(int64_t count, int64_t padded) {
    if constexpr (sizeof(C) == sizeof(float)) {
      (void)count;
      const Reg softcap = S::splat(static_cast<C>(problem_.softcap));
      for (int64_t i = 0; i < padded; i += kWidth) {
        const Squashed squashed = squash(S::div(S::load(values_ + i), softcap));
        S::store(values_ + i, S::mul(softcap, squashed.value));
        if constexpr (kSlope) S::store(slopes_ + i, squashed.slope);
      }
    } else {
      (void)padded;
      for (int64_t i = 0; i < count; ++i) {
        const double u = values_[i] / problem_.softcap, e = __builtin_exp(-2 * __builtin_fabs(u));
        values_[i] = problem_.softcap * __builtin_tanh(u);
        if constexpr (kSlope) slopes_[i] = 4 * e / ((1 + e) * (1 + e));
      }
    }
  }

  C one_value(int64_t column, C* slope) {
    const C z = values<true>(column, 1)[0];
    if (problem_.softcap > 0) *slope = slopes_[0];
    return z;
  }

  // w of `count` columns, for class probabilities v; null where all are 1.
  DCS_INLINE const C* weights(int64_t from, int64_t count) {
    if (probabilities_ == nullptr) return weight_ == nullptr ? nullptr : weight_ + from;
    const C keep = static_cast<C>(1 - problem_.label_smoothing),
            even = static_cast<C>(problem_.label_smoothing / static_cast<double>(problem_.columns));
    for (int64_t i = 0; i < count; ++i) weights_[i] = keep * probabilities_[from + i] + even;
    if (weight_ != nullptr)
      for (int64_t i = 0; i < count; ++i) weights_[i] *= weight_[from + i];
    return weights_;
  }

  // Adds columns [from, to).
  template <bool kEntropy>
  void accumulate(int64_t from, int64_t to, Sums& sums) {
    for (; from < to; from += kBlock) {
      const int64_t count = to - from < kBlock ? to - from : kBlock, padded = (count + kWidth - 1) / kWidth * kWidth;
      const C* z = values<false>(from, count);
      raise(sums, static_cast<double>(block_largest(z, padded)));
      const C largest = static_cast<C>(sums.largest);
      add_powers<kEntropy>(z, padded, largest, sums);
      if (mixed_) add_distances(z, count, from, largest, sums);
    }
  }

  static C block_largest(const C* z, int64_t padded) {
    // A NaN never is: where one operand is, the instruction returns the second. The powers' sum has it.
    Reg most[4];
    for (Reg& each : most) each = S::splat(Compute<T>::kLowest);
    int64_t i = 0;
    for (; i + 4 * kWidth <= padded; i += 4 * kWidth)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) most[k] = S::max(S::load(z + i + k * kWidth), most[k]);
    for (; i < padded; i += kWidth) most[0] = S::max(S::load(z + i), most[0]);
    return largest_lane<C>(S::max(S::max(most[0], most[1]), S::max(most[2], most[3])));
  }

  template <bool kEntropy>
  static void add_powers(const C* z, int64_t padded, C largest, Sums& sums) {
    const Reg top = S::splat(largest), least = S::splat(C(-1000));
    Reg power[4], weighted[4];
    for (int k = 0; k < 4; ++k) power[k] = weighted[k] = S::splat(C(0));
    const auto add = [&](int64_t i, int k) __attribute__((always_inline)) {
      const Reg d = S::sub(S::load(z + i), top), e = exponential(d);
      power[k] = S::add(power[k], e);
      if constexpr (kEntropy) weighted[k] = S::fma(e, S::max(d, least), weighted[k]);
    };
    int64_t i = 0;
    for (; i + 4 * kWidth <= padded; i += 4 * kWidth)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) add(i + k * kWidth, k);
    for (; i < padded; i += kWidth) add(i, 0);
    sums.power += sum_lanes<C>(S::add(S::add(power[0], power[1]), S::add(power[2], power[3])));
    if constexpr (kEntropy)
      sums.weighted += sum_lanes<C>(S::add(S::add(weighted[0], weighted[1]), S::add(weighted[2], weighted[3])));
  }

  void add_distances(const C* z, int64_t count, int64_t from, C largest, Sums& sums) {
    const C* weights = this->weights(from, count);
    const Reg top = S::splat(largest);
    Reg distance[2] = {S::splat(C(0)), S::splat(C(0))}, weight = distance[0];
    double tail = 0, tail_weight = 0;
    int64_t i = 0;
    if (weights == nullptr) {
      for (; i + 2 * kWidth <= count; i += 2 * kWidth)
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) distance[k] = S::add(distance[k], S::sub(top, S::load(z + i + k * kWidth)));
      tail_weight = static_cast<double>(i);
    } else {
      for (; i + kWidth <= count; i += kWidth) {
        const Reg w = S::load(weights + i);
        distance[0] = S::fma(w, S::sub(top, S::load(z + i)), distance[0]);
        weight = S::add(weight, w);
      }
    }
    for (; i < count; ++i) {
      const double w = weights == nullptr ? 1.0 : static_cast<double>(weights[i]);
      tail += w * static_cast<double>(largest - z[i]);
      tail_weight += w;
    }
    sums.distance += tail + sum_lanes<C>(S::add(distance[0], distance[1]));
    sums.weight += tail_weight + sum_lanes<C>(weight);
  }

  template <bool kEntropy>
  void write_gradient(C largest, C power, C slope, C even) {
    const bool capped = problem_.softcap > 0;
    const Reg top = S::splat(largest), a = S::splat(power), b = S::splat(slope), e = S::splat(even),
              least = S::splat(C(-1000));
    for (int64_t from = 0; from < problem_.columns; from += kBlock) {
      const int64_t count = problem_.columns - from < kBlock ? problem_.columns - from : kBlock;
      const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
      const C* z = values<true>(from, count);
      C* to = values_;
      if constexpr (sizeof(T) == sizeof(C)) {
        if (padded == count) to = reinterpret_cast<C*>(row_ + from);
      }
      const C* w = mixed_ ? weights(from, count) : nullptr;
      const auto put = [&](int64_t i, Reg smoothing) __attribute__((always_inline)) {
        const Reg d = S::sub(S::load(z + i), top);
        Reg factor = a;
        if constexpr (kEntropy) factor = S::fma(b, S::max(d, least), a);
        Reg g = S::sub(S::mul(exponential(d), factor), smoothing);
        if (capped) g = S::mul(g, S::load(slopes_ + i));
        S::store(to + i, g);
      };
      if (!mixed_) {
        const Reg none = S::splat(C(0));
        for (int64_t i = 0; i < padded; i += kWidth) put(i, none);
      } else if (w == nullptr) {
        for (int64_t i = 0; i < padded; i += kWidth) put(i, e);
      } else {
        int64_t i = 0;
        for (; i + kWidth <= count; i += kWidth) put(i, S::mul(e, S::load(w + i)));
        if (i < count) {
          C last[kWidth] = {};
          for (int64_t k = i; k < count; ++k) last[k - i] = w[k];
          put(i, S::mul(e, S::load(last)));
        }
      }
      if (to == values_) convert(values_, count, row_ + from);
    }
  }

  // The first column with the largest z; a NaN counts as the largest.
  int64_t position(C largest, bool maybe_nan) {
    for (int64_t from = 0; maybe_nan && from < problem_.columns; from += kBlock) {
      const int64_t count = problem_.columns - from < kBlock ? problem_.columns - from : kBlock;
      const C* z = values<false>(from, count);
      for (int64_t i = 0; i < count; ++i)
        if (z[i] != z[i]) return from + i;
    }
    const Reg top = S::splat(largest);
    for (int64_t from = 0; from < problem_.columns; from += kBlock) {
      const int64_t count = problem_.columns - from < kBlock ? problem_.columns - from : kBlock;
      const C* z = values<false>(from, count);
      for (int64_t i = 0; i < count; i += kWidth) {
        const unsigned lanes = S::equal_lanes(S::load(z + i), top);
        if (lanes != 0) return from + i + __builtin_ctz(lanes);
      }
    }
    return 0;
  }

  const RowsProblem& problem_;
  const bool mixed_;  // label smoothing or class probabilities
  const C* bias_;
  const C* weight_;
  const bool plain_;
  T* row_ = nullptr;
  const C* probabilities_ = nullptr;
  alignas(64) C values_[kBlock];
  alignas(64) C slopes_[kBlock];
  alignas(64) C weights_[kBlock];
};

template <typename T>
void run_rows(const RowsProblem& problem, int64_t begin, int64_t end) {
  RowKernel<T> kernel(problem);
  for (int64_t row = begin; row < end; ++row) kernel.run(row);
}

void rows(const RowsProblem& problem, int64_t begin, int64_t end) {
  switch (problem.dtype) {
    case ElementType::Half: return run_rows<Half>(problem, begin, end);
    case ElementType::BFloat16: return run_rows<BFloat16>(problem, begin, end);
    case ElementType::Float: return run_rows<float>(problem, begin, end);
    default: return run_rows<double>(problem, begin, end);
  }
}

}  // namespace

extern const CrossEntropyKernels DCS_KERNELS = {DCS_ISA, rows};

}  // namespace dcs::cpu
