// Small scans along a strided time, which are bound by latency: one round trip to memory, one exchange, one store. A
// block, or several along time, takes a span of neighboring columns through all of time: a cluster of them, or more
// that leave each other words (small_words.cuh). Lane (slot, span_column) of a warp has a few neighboring steps of a
// column in registers and issues all loads that they need at once. Slots fold totals in a warp, back to the nearest
// cut; what enters a warp comes from those before it (carry/warp_segments.cuh). Where all columns are few (`flat`) a
// warp's elements are contiguous: they are read and written in that order and transposed in shared memory. Offsets are
// 32-bit, as the problem has fewer elements.
#pragma once

#include <type_traits>

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/small_exchange.cuh"
#include "scan/columns/small_index.cuh"
#include "scan/columns/small_powers.cuh"
#include "scan/columns/small_sums.cuh"

namespace dcs {

// The product that neither leaves the range of double nor vanishes but for a gate of 0. `each` visits the gates.
template <typename Acc, typename Each>
__device__ __forceinline__ double product_of_each(const Each& each) {
  Acc product = 1;
  each([&](Acc gate) { product *= gate; });
  constexpr double kMost = std::is_same_v<Acc, float> ? 0x1p100 : 0x1p1000;
  if (fabs(product) < static_cast<Acc>(kMost) && fabs(product) > static_cast<Acc>(1.0 / kMost)) return product;
  double careful = 1.0;
  each([&](Acc gate) { careful = power_mul(careful, static_cast<double>(gate)); });
  return careful;
}

// What a thread has of its steps. Each operand has a number, of its range in shared memory.
template <typename Index, bool kStep, bool kBackward>
struct SmallColumnSteps {
  static constexpr int kOperands = small_column_ranges(kStep, kBackward);
  typename Index::Words x, gates, saved;

  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) {
    visit(x, 0);
    if constexpr (kStep) visit(gates, 1);
    if constexpr (kBackward) visit(saved, kOperands - 1);
  }
  __device__ __forceinline__ void ask(const Index& at) {
    const SmallColumnsParams& p = at.p;
    each([](typename Index::Words& words, int) {
#pragma unroll
      for (uint32_t& word : words) word = 0;
    });
    at.ask(p.input, x);
    if constexpr (kStep) at.ask(p.gates, gates, p.back);
    if constexpr (kBackward) at.ask(p.saved, saved, 0, true);
  }
};

// Backward a number is as a row's gamma. kShares: blocks along time leave each other words, else they are a cluster.
template <typename T, GammaKind kGamma, bool kBackward, bool kShares>
__global__ void __launch_bounds__(32 * kSmallBlockWarps, 1)
    small_columns_kernel(const __grid_constant__ SmallColumnsParams p) {
  constexpr bool kStep = kGamma == GammaKind::kStep, kRow = kGamma == GammaKind::kRow, kSums = kBackward && !kStep;
  using Acc = std::conditional_t<sizeof(T) == 2, float, double>;
  using Index = SmallColumnIndex<T, kStep, kBackward>;
  extern __shared__ __align__(16) unsigned char small_columns_shared[];
  __shared__ ColumnSegments segments;
  __shared__ ColumnSums sums;
  static_assert(sizeof(segments) + sizeof(sums) <= kSmallColumnsStatics);
  launch_dependents();
  const Index at(p);
  const bool clustered = !kShares && p.cluster.divisor > 1;
  if constexpr (kSums)
    if (clustered) sums.init_barrier(at);
  if (clustered) segments.init(1 << p.span_bits, at.rank);
  // Blocks that share time leave their operands there while they wait for others.
  using Steps = SmallColumnSteps<Index, kStep, kBackward>;
  const auto range_of = [&](int operand) {
    uint32_t* const shared = reinterpret_cast<uint32_t*>(small_columns_shared);
    return kShares ? at.range_of(shared, operand, Steps::kOperands) : at.range_of(shared, 0, 1);
  };
  uint32_t* const shared = range_of(0);
  griddepcontrol_wait();
  if constexpr (kShares) find_small_tag(p, segments);

  Steps steps, later;  // later: after others have been waited for; those before would be kept in registers
  typename Index::Words flags = {};
  uint32_t initial = 0, last_flag = 0;
  steps.ask(at);
  if (p.reset.data) {
    at.ask_flags(flags);
    if constexpr (kBackward) at.ask_last_flag(last_flag);
  }
  if (p.initial.data) at.ask_initial(initial);
  Acc gate;
  const double gamma = kRow && (!kBackward || p.gamma.data) ? at.row_gamma() : p.number;
  if (clustered) segments.wait_for_others();
  if constexpr (std::is_same_v<Acc, float>) gate = make_gate<float, true>(gamma).value;
  else gate = gamma;
  const auto gate_in = [&](const typename Index::Words& gates, int k) {
    if constexpr (kStep) return value_of_word<T, Acc>(gates[k]);
    else return gate;
  };

  if (p.flat)
    steps.each([&](typename Index::Words& words, int operand) { at.transpose_to_own(words, range_of(operand)); });
  // A bit a step, before which the scan starts anew. The first step's value takes the initial one.
  uint32_t cuts = p.reset.data ? at.bits_of(flags) : 0;
  // Backward, where the reset of a step drops its term of gamma's gradient, which is output[t] * saved[next(t)].
  [[maybe_unused]] const uint32_t drops = cuts >> 1 | (last_flag ? 1u : 0u) << max(at.count - 1, 0);
  Acc lead = value_of_word<T, Acc>(steps.x[0]);
  if (at.first_step == 0) {
    if (!kBackward && p.initial.data && !(cuts & 1))
      lead = fold(lead, gate_in(steps.gates, 0), value_of_word<T, Acc>(initial));
    cuts |= 1;
  }
  const auto advance = [&](const Steps& of, int k, Acc& y) {
    const Acc value = k == 0 ? lead : value_of_word<T, Acc>(of.x[k]);
    y = cuts >> k & 1 ? value : fold(value, gate_in(of.gates, k), y);
  };

  // The total with a zero carry, the carry, and the results.
  Acc y = lead;
  double gates = 1.0;
  if (kStep && cuts == 0 && at.count == p.steps)
    gates = product_of_each<Acc>([&](const auto& take) { at.each([&](int k) { take(gate_in(steps.gates, k)); }); });
  at.each([&](int k) {
    if (k > 0) advance(steps, k, y);
  });
  if constexpr (kShares)
    steps.each([&](const typename Index::Words& words, int operand) { at.park(words, range_of(operand)); });
  if constexpr (kStep) {
    Segment<double> segment{y, gates, cuts != 0};
    y = static_cast<Acc>(carry_into<kShares>(at, segment, segments));
  } else {
    y = static_cast<Acc>(carry_by_powers<kRow, kShares>(at, y, cuts != 0, gamma, segments));
  }
  if constexpr (kShares)
    later.each([&](typename Index::Words& words, int operand) { at.unpark(words, range_of(operand)); });
  Steps& again = kShares ? later : steps;
  if (kBackward && p.initial.data && at.count > 0) {
    at.each([&](int k) {
      if (at.first_step + k + 1 == p.length) again.saved[k] = initial;
    });
  }
  [[maybe_unused]] double sum = 0.0;
  at.each([&](int k) {
    advance(again, k, y);
    again.x[k] = word_of_value<T>(y);
    if constexpr (kBackward) {
      const Acc term = drops >> k & 1 ? Acc(0) : y * value_of_word<T, Acc>(again.saved[k]);
      if (kStep) again.saved[k] = word_of_value<T>(term);
      else if (k < at.count) sum += term;
    }
  });
  at.store(again.x, p.output, shared);
  if constexpr (kBackward && kStep) at.store(again.saved, p.grad_gamma, shared);
  if constexpr (kSums)
    if (sums.template add_up<kShares>(at, sum)) at.template store_sum<kShares>(sum);
}

}  // namespace dcs
