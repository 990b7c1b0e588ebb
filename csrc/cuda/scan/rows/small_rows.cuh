// Small problems of contiguous time, whose time is latency: one trip to memory, one exchange, one trip back. A thread
// has 16 bytes of neighboring elements in registers and asks for all that they need at once, in a word where memory has
// one for it, element by element elsewhere. A block takes some whole rows, a cluster of blocks a longer one. Where rows
// start is arithmetic in 32 bits, as the problem has fewer elements. Of gates, one a row is as one a step. Backward a
// lane has gates and resets of the step before, and `saved` of the step behind, from the lanes beside it.
#pragma once

#include <type_traits>

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/latency.cuh"
#include "dcs/scan/plan/tuning.h"
#include "scan/carry/warp_segments.cuh"
#include "scan/rows/lane_state.cuh"
#include "scan/rows/small_elements.cuh"
#include "scan/rows/small_lanes.cuh"
#include "scan/rows/small_sums.cuh"

namespace dcs {

// A product of gates. Of a shared gamma, whose powers only shrink or only grow, it is not 0 where no gate is, so that
// an infinity stays one behind it.
__device__ __forceinline__ double gates_product(double a, double b, bool of_steps) {
  return of_steps ? clamped_mul(a, b) : power_mul(a, b);
}

// What a thread asks memory for, all at once.
template <typename T, int kVec>
struct SmallAsked {
  Asked<T, kVec> input, step_gates, initial;
  Asked<uint8_t, kVec> flags;
  // Backward: `saved` at each element or, not in words, behind it; what no lane of the warp has.
  Asked<T, kVec> saved;
  Asked<T, 1> gate_before, saved_behind;
  Asked<uint8_t, 1> flag_before;
};

enum class SmallGradient { kNone, kSteps, kSums };  // of gamma

// What a thread makes of its elements. `kGates`: a per-row or per-step gamma.
template <typename T, bool kGates, SmallGradient kGradient>
struct SmallScan {
  using Acc = LaneAcc<T>;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr bool kBackward = kGradient != SmallGradient::kNone;

  const SmallRowsParams& p;
  const SmallElements<kVec>& mine;
  const int lane = threadIdx.x % 32;
  uint32_t starts = 0, cuts = 0;  // bits of elements: a row starts; that, or a reset
  uint32_t ends = 0, resets = 0;  // a row ends; the element's own reset
  double weight = 1.0;            // of what enters the warp in what enters the lane
  using Values = Acc[kVec];
  using Gates = Acc[kGates ? kVec : 1];

  __device__ __forceinline__ SmallScan(const SmallRowsParams& params, const SmallElements<kVec>& at)
      : p(params), mine(at) {
    mine.each([&](int i, int, int done) {
      starts |= (done == 0 ? 1u : 0u) << i;
      if constexpr (kBackward) ends |= (done == mine.length - 1 ? 1u : 0u) << i;
    });
    if constexpr (!kGates) weight = weight_of_lane(p.powers, p.number);
  }
  __device__ __forceinline__ bool by_step() const { return kBackward ? kGradient == SmallGradient::kSteps : p.by_step; }
  static __device__ __forceinline__ Acc gate(const Gates& gates, int i) { return gates[kGates ? i : 0]; }

  __device__ __forceinline__ void ask(const T* first, SmallAsked<T, kVec>& asked, Gates& gates) const {
    const int back = kBackward ? 0 : p.back;
    mine.ask(p.input, first, asked.input);
    if (kGates && by_step()) mine.ask(p.gates, mine.template first_of<T>(p.gates, back), asked.step_gates, back);
    if (p.reset.data) mine.ask(p.reset, mine.template first_of<uint8_t>(p.reset, back), asked.flags, back);
    if constexpr (kBackward) {
      ask_neighbors(asked);
    } else if (p.initial.data) {
      mine.each([&](int i, int row, int) {
        if (starts >> i & 1)
          asked.initial.load(mine.has(i), static_cast<const T*>(p.initial.data) + mine.offset(p.initial, row), i);
      });
    }
    if constexpr (kGates) {
      if (!by_step()) mine.get_row_gammas(gates);
    } else if constexpr (std::is_same_v<Acc, float>) {
      gates[0] = make_gate<float, true>(p.number).value;
    } else {
      gates[0] = p.number;
    }
  }
  __device__ __forceinline__ void ask_neighbors(SmallAsked<T, kVec>& asked) const {
    const bool goes_on = lane == 0 && mine.has(0) && mine.done > 0;
    if (kGates && by_step()) asked.gate_before.load(goes_on, mine.template first_of<T>(p.gates, 1), 0);
    if (p.reset.data) asked.flag_before.load(goes_on, mine.template first_of<uint8_t>(p.reset, 1), 0);
    if (p.saved.in_words) {
      const T* const first = mine.template first_of<T>(p.saved);
      mine.ask(p.saved, first, asked.saved);
      const bool is_behind = lane == 31 && mine.has(kVec - 1) && !(ends >> (kVec - 1) & 1);
      asked.saved_behind.load(is_behind, p.reverse ? first - kVec : first + kVec, 0);
    } else {
      mine.ask_behind(p.saved, p.initial, asked.saved);
    }
  }
  // Waits for memory.
  __device__ __forceinline__ void get(const SmallAsked<T, kVec>& asked, Values& x, Gates& gates) {
    mine.get(p.input, asked.input, x);
    if constexpr (kGates)
      if (by_step()) mine.get(p.gates, asked.step_gates, gates);
    if constexpr (kGradient == SmallGradient::kSteps) {
      const Acc other = shuffle_up(gates[kVec - 1], 1);
#pragma unroll
      for (int i = kVec - 1; i > 0; --i) gates[i] = gates[i - 1];
      gates[0] = lane == 0 ? cast<Acc>(asked.gate_before[0]) : other;
    }
    cuts = starts;
    if (p.reset.data) {
      int each[kVec];
      mine.get(p.reset, asked.flags, each);
#pragma unroll
      for (int i = 0; i < kVec; ++i) resets |= (each[i] != 0 ? 1u : 0u) << i;
      if constexpr (kBackward) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, resets >> (kVec - 1), 1);
        cuts |= resets << 1 & ((1u << kVec) - 1);
        cuts |= lane == 0 ? (asked.flag_before[0] ? 1u : 0u) : other;
      } else {
        starts &= ~resets;
        cuts |= resets;
      }
    }
    if (!kBackward && p.initial.data) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (starts >> i & 1) x[i] = fold(x[i], gate(gates, i), cast<Acc>(asked.initial[i]));
    }
  }

  // The thread's segment from nothing.
  __device__ __forceinline__ Segment<double> segment(const Values& x, const Gates& gates) const {
    Acc y = x[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) y = cuts >> i & 1 ? x[i] : fold(x[i], gate(gates, i), y);
    Segment<double> segment{cast<double>(y), 1.0, false};
    if constexpr (kGates) segment.gates = product_of(gates);
    return segment;
  }
  // Segments of the lanes up to the thread's own. Returns the total of those before it.
  __device__ __forceinline__ double fold_lanes(Segment<double>& segment, uint32_t closed) {
    return fold_small_lanes<kGates>(
        p, closed, [&](double a, double b) { return gates_product(a, b, by_step()); }, segment, weight);
  }
  __device__ __forceinline__ void apply(double carry, const Gates& gates, Values& x) const {
    Acc y = cast<Acc>(carry);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = y = cuts >> i & 1 ? x[i] : fold(x[i], gate(gates, i), y);
  }

  // output[t] * saved[next(t)]. A product of floats is one of doubles, rounded.
  template <typename Product>
  __device__ __forceinline__ void multiply(
      const SmallAsked<T, kVec>& asked, const Values& y, Product (&products)[kVec]) const {
    Product behind[kVec];
    mine.get(p.saved, asked.saved, behind);
    if (p.saved.in_words) {
      Product other = shuffle_down(behind[0], 1);
      if (lane == 31) other = cast<Product>(asked.saved_behind[0]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Product next = i + 1 < kVec ? behind[(i + 1) % kVec] : other;
        behind[i] = ends >> i & 1 ? cast<Product>(0.0) : next;
      }
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      products[i] = resets >> i & 1 ? cast<Product>(0.0) : behind[i] * cast<Product>(cast<T>(y[i]));
  }
};

template <typename T, bool kGates, SmallGradient kGradient>
__global__ void __launch_bounds__(32 * kSmallBlockWarps, 1)
    small_rows_kernel(const __grid_constant__ SmallRowsParams p) {
  using Scan = SmallScan<T, kGates, kGradient>;
  constexpr bool kSums = kGradient == SmallGradient::kSums;
  constexpr int kVec = Scan::kVec;
  extern __shared__ __align__(128) unsigned char small_shared[];
  __shared__ WarpSegments<1, kSmallBlockWarps, kMostRowCluster> segments;
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const SmallElements<kVec> mine(p);
  __shared__ BlockSums sums;
  if constexpr (kSums)
    if (p.cluster.divisor > 1) sums.init(mine.rank);
  if (p.cluster.divisor > 1) segments.init(1, mine.rank);
  Scan scan(p, mine);
  const T* first = mine.template first_of<T>(p.input);
  keep(first);
  griddepcontrol_wait();

  SmallAsked<T, kVec> asked;
  typename Scan::Gates gates = {};
  scan.ask(first, asked, gates);
  if (p.cluster.divisor > 1) segments.wait_for_others();
  typename Scan::Values x;
  scan.get(asked, x, gates);
  Segment<double> segment = scan.segment(x, gates);
  const uint32_t closed = __ballot_sync(0xffffffffu, scan.cuts != 0);
  const double before = scan.fold_lanes(segment, closed);
  if (lane == 31) segments.of_warps[warp][0] = segment;
  if (!kGates && threadIdx.x == 31) segments.over_warp[0] = segment.gates;
  const double carry = segments.template carry<!kGates>(0, 1, mine.rank, static_cast<int>(p.cluster.divisor),
      [&](double a, double b) { return gates_product(a, b, scan.by_step()); });
  scan.apply(closed & ((1u << lane) - 1) ? before : fold(before, scan.weight, carry), gates, x);
  mine.template store<T>(p.output, x, small_shared);
  if constexpr (kSums) {
    typename Scan::Acc products[kVec];
    scan.multiply(asked, x, products);
    SmallSums<kVec, typename Scan::Acc>{p, mine, scan.starts, scan.ends}.add(products, sums);
  } else if constexpr (kGradient == SmallGradient::kSteps) {
    float products[kVec];
    scan.multiply(asked, x, products);
    __syncwarp();
    mine.template store<T>(p.gradient, products, small_shared);
  }
}

}  // namespace dcs
