// What the kernel of the temporal difference scan is called with whose rows are one flat sequence (kernel.cuh).
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>
#include <type_traits>

#include "common/divisor.cuh"
#include "dcs/returns/flat_rows_plan.h"
#include "returns/flat_rows/links.cuh"
#include "returns/step.cuh"
#include "scan/rows/flat.cuh"

namespace dcs {

// A tensor with an element for every step. `slot`: where a slice of it lies in a warp's shared memory.
struct FlatTensor {
  char* data = nullptr;
  Strides strides{};
  int bytes = 0;  // of an element
  int slot = 0;
  int extra = 0;           // elements behind a slice that are copied, too
  bool is_packed = false;  // rows are one behind the other
  bool is_flat = false;    // from an aligned address on
};

// Where in a warp's shared memory a slice of each operand and result lies, or -1.
struct FlatSlots {
  int rewards = -1, values = -1, next_values = -1, rhos = -1, terminated = -1, truncated = -1, gamma = -1, trace = -1;
  int advantages = -1, targets = -1, pg_advantages = -1;
};

constexpr int kMostFlatOwn = 24;  // steps of a lane
constexpr int kMostFlatOperands = 8, kMostFlatResults = 3;

// In shared memory. A row's step weighs the next state's value with gamma where nothing is carried into it, else with
// `rest`.
template <typename Acc>
struct alignas(16) FlatRow {
  Acc gamma, rest;
  Gate<Acc> gate;  // gamma * trace
};

// A discount, toward zero where it is a float, and the digits that float lacks: 0, not far below its own as in a gate,
// where there are none, for what weighs nothing is left out.
template <typename Acc>
__host__ __device__ __forceinline__ Gate<Acc> digits_of(double number) {
  if constexpr (std::is_same_v<Acc, double>) {
    return {number};
  } else {
#ifdef __CUDA_ARCH__
    const float value = __double2float_rz(number);
#else
    float value = static_cast<float>(number);
    if (std::fabs(static_cast<double>(value)) > std::fabs(number)) value = std::nextafter(value, 0.f);
#endif
    return {value, std::fabs(value) <= FLT_MAX ? static_cast<float>(number - static_cast<double>(value)) : 0.f};
  }
}
template <typename T>
struct FlatReturnsParams {
  using Acc = typename Types<T>::Acc;
  FlatTensor operands[kMostFlatOperands], results[kMostFlatResults];
  int operand_count, result_count;
  FlatSlots slots;
  const T* bootstrap;  // of the first row
  Strides bootstrap_strides;
  ReturnsDiscount gamma, trace;
  Rates<Acc> rates;                      // where none is a row's
  Gate<Acc> gamma_digits, trace_digits;  // where they are no row's
  double powers[6];                      // of gamma * trace over 1, 2, 4, ... lanes
  float short_powers[6];
  Acc gate;                       // the same of one step, in one number
  Acc step_powers[kMostFlatOwn];  // of 1, 2, 3, ... steps
  Acc clip_rho, clip_c, clip_pg;
  uint32_t nothing;  // 0
  bool is_gradient;
  bool row_rates, has_own_values, has_no_values;
  bool is_shifted;  // values are those of the step before's next state
  bool terminated_is_bool, truncated_is_bool;
  bool gamma_is_narrow, trace_is_narrow;  // those of steps
  bool rest_is_nothing,
      gamma_is_nothing;  // a next state's value counts for nothing where no episode ends; where one does
  uint32_t row_ends;     // bits at the multiples of length
  Divisor length;
  int lift;        // rows before a tile: of kFlatReturnsGrain elements at least
  int cluster;     // blocks of a row, or 1
  bool is_linked;  // a row's tiles are no cluster
  FlatLinks links;
  int tile_rows, tile_steps, last_rows;  // the last tile's
  int64_t count;
  int warp_bytes, rows_at;  // of shared memory; where what rows have of their own begins
  int values_at;            // the values behind them, from there
  FlatParams of_rows;       // for copies of what is not flat

  __device__ __forceinline__ T bootstrap_of(int64_t row) const {
    return bootstrap[RowIndex(of_rows, row).offset(bootstrap_strides)];
  }
};

// A bounded power of a number up to 1, which does not vanish in Acc either.
template <typename Acc>
Acc narrowed_power(double power) {
  constexpr double kLeast = std::is_same_v<Acc, float> ? static_cast<double>(FLT_MIN) : DBL_MIN;
  return static_cast<Acc>(power != 0.0 && std::fabs(power) < kLeast ? std::copysign(kLeast, power) : power);
}

// A number in Acc: a finite one stays finite.
template <typename Acc>
Acc narrowed(double number) {
  constexpr double kMost = std::is_same_v<Acc, float> ? static_cast<double>(FLT_MAX) : DBL_MAX;
  return static_cast<Acc>(std::fabs(number) <= DBL_MAX ? std::fmax(-kMost, std::fmin(kMost, number)) : number);
}

// Outer, length and inner, as copies of rows want them.
inline FlatParams flat_geometry(int64_t outer, int64_t length, int64_t inner) {
  FlatParams params{};
  params.problem.outer = outer;
  params.problem.length = length;
  params.problem.inner = inner;
  params.rows = outer * inner;
  params.count = outer * inner * length;
  params.inverse = ~uint64_t{0} / static_cast<uint64_t>(length);
  params.inner_inverse = ~uint64_t{0} / static_cast<uint64_t>(inner);
  return params;
}

template <typename T>
FlatTensor flat_tensor(const ReturnsProblem& p, const void* data, const Strides& strides, int64_t bytes) {
  FlatTensor tensor;
  tensor.data = static_cast<char*>(const_cast<void*>(data));
  tensor.strides = strides;
  tensor.bytes = static_cast<int>(bytes);
  tensor.is_packed = strides.time == 1 && (p.inner == 1 || strides.inner == p.length) &&
      (p.outer == 1 || strides.outer == p.inner * p.length);
  tensor.is_flat = tensor.is_packed && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return tensor;
}

inline FlatLinks flat_links(const ReturnsProblem& p, const FlatReturnsPlan& plan, void* workspace, const CallTag& tag) {
  FlatLinks links{};
  static_assert(sizeof(FlatLinks::Words) == kFlatSegmentBytes);
  links.words = static_cast<FlatLinks::Words*>(workspace);
  links.call = tag;
  links.rows = Divisor(static_cast<uint32_t>(p.rows()));
  links.row_tiles = static_cast<int>(plan.row_tiles);
  links.row_groups = static_cast<int>(plan.groups());
  links.row_segments = static_cast<int>(plan.row_segments());
  links.fan_bits = plan.fan_bits;
  return links;
}

// Results in the place of operands, and behind them.
template <typename T>
void place_flat_results(FlatReturnsParams<T>& params, const ReturnsProblem& p, int behind, int slice_bytes) {
  FlatSlots& slots = params.slots;
  const auto place = [&](const ReturnsOutput& output, int slot) {
    if (!output.data) return -1;
    FlatTensor tensor = flat_tensor<T>(p, output.data, output.strides, sizeof(T));
    tensor.slot = slot;
    params.results[params.result_count++] = tensor;
    return slot;
  };
  if (!p.is_gradient) {
    slots.advantages = place(p.advantages, slots.rewards);
    slots.targets = place(p.targets, params.has_own_values ? slots.values : slots.rewards);
    slots.pg_advantages = place(p.pg_advantages, p.rhos.data ? slots.rhos : behind);
    return;
  }
  int places[kMostFlatResults];
  int operands = 0;
  for (const int slot : {slots.rewards, p.values.data ? slots.values : -1, slots.next_values, slots.rhos})
    if (slot >= 0 && operands < kMostFlatResults) places[operands++] = slot;
  const auto place_next = [&](const ReturnsOutput& output) {
    const int number = params.result_count;
    return place(output, number < operands ? places[number] : behind + (number - operands) * slice_bytes);
  };
  slots.advantages = place_next(p.advantages);
  slots.targets = place_next(p.targets);
  slots.pg_advantages = place_next(p.pg_advantages);
}

template <typename T>
FlatReturnsParams<T> flat_returns_params(
    const ReturnsProblem& p, const FlatReturnsPlan& plan, void* workspace = nullptr, const CallTag& tag = {}) {
  using Acc = typename Types<T>::Acc;
  constexpr int64_t kBytes = sizeof(T);
  static_assert(sizeof(FlatRow<Acc>) == 4 * sizeof(Acc), "FlatReturnsSizes::row_bytes counts on it");
  FlatReturnsParams<T> params{};
  const FlatReturnsSizes sizes{kBytes, sizeof(Acc), plan.vectors};
  const int64_t slice = sizes.slice();
  int64_t at = 0;
  sizes.each_operand(p, [&](const ReturnsInput& input, int64_t bytes, bool is_shifted) {
    FlatTensor tensor = flat_tensor<T>(p, input.data, input.strides, bytes);
    tensor.slot = static_cast<int>(at);
    tensor.extra = is_shifted ? 16 / static_cast<int>(bytes) : 0;
    params.operands[params.operand_count++] = tensor;
    at += slice * bytes + (is_shifted ? 16 : 0);
  });
  int next = 0;
  const auto slot_of = [&](bool is_given) { return is_given ? params.operands[next++].slot : -1; };
  FlatSlots& slots = params.slots;
  slots.rewards = slot_of(p.rewards.data);
  slots.values = slot_of(p.values.data);
  slots.next_values = slot_of(p.next_values.data);
  slots.rhos = slot_of(p.rhos.data);
  slots.terminated = slot_of(p.terminated.data);
  slots.truncated = slot_of(p.truncated.data);
  slots.gamma = slot_of(p.gamma.kind == GammaKind::kStep);
  slots.trace = slot_of(p.trace.kind == GammaKind::kStep);
  params.is_gradient = p.is_gradient;
  params.has_own_values = p.is_gradient ? p.of_own_values : p.values.data && !p.values_are_next;
  params.has_no_values = !p.values.data && !p.next_values.data;
  params.is_shifted = !p.next_values.data && !p.is_gradient;
  // Nobody looks at what is read in their place.
  if (!p.values.data) slots.values = slots.rewards;
  place_flat_results(params, p, static_cast<int>(at), static_cast<int>(slice * kBytes));
  params.warp_bytes = static_cast<int>(sizes.warp_bytes(p));
  params.rows_at = plan.warps * params.warp_bytes;
  params.values_at = has_row_rates(p) ? static_cast<int>((plan.rows + plan.warps) * sizeof(FlatRow<Acc>)) : 0;
  params.bootstrap = static_cast<const T*>(p.bootstrap_value.data);
  params.bootstrap_strides = p.bootstrap_value.strides;
  params.gamma = p.gamma;
  params.trace = p.trace;
  params.row_rates = has_row_rates(p);
  const auto digits = [](const ReturnsDiscount& rate) {
    return digits_of<Acc>(rate.kind == GammaKind::kStep ? 1.0 : rate.value);
  };
  params.gamma_digits = digits(p.gamma);
  params.trace_digits = digits(p.trace);
  params.rates = rates_beside_steps<Acc>(p);
  params.gate = narrowed<Acc>(params.rates.carried);
  const int64_t own = slice / 32;
  for (int j = 0; j < 6; ++j) {
    params.powers[j] = bounded_power(params.rates.carried, own << j);
    params.short_powers[j] = narrowed_power<float>(params.powers[j]);
  }
  for (int64_t i = 0; i < own; ++i)
    params.step_powers[i] = narrowed_power<Acc>(bounded_power(params.rates.carried, i + 1));
  // Ratios that there are not are 1, which is not clipped.
  const auto most = [&](double clip) {
    return p.rhos.data ? static_cast<Acc>(clip) : std::numeric_limits<Acc>::infinity();
  };
  params.clip_rho = most(p.clip_rho);
  params.clip_c = most(p.clip_c);
  params.clip_pg = most(p.clip_pg);
  params.terminated_is_bool = p.terminated_is_bool;
  params.truncated_is_bool = p.truncated_is_bool;
  params.gamma_is_narrow = p.gamma.is_narrow();
  params.trace_is_narrow = p.trace.is_narrow();
  const bool may_be_nothing = !params.has_own_values && !params.row_rates;
  params.rest_is_nothing = may_be_nothing && params.rates.rest == Acc(0);
  params.gamma_is_nothing = may_be_nothing && params.rates.gamma == Acc(0);
  for (int64_t i = 0; i < 32; i += p.length) params.row_ends |= 1u << i;
  params.length = Divisor(static_cast<uint32_t>(p.length));
  params.lift = static_cast<int>(ceil_div(kFlatReturnsGrain, p.length));
  params.tile_rows = static_cast<int>(plan.rows);
  params.cluster = plan.cluster;
  params.is_linked = plan.is_linked();
  if (params.is_linked) params.links = flat_links(p, plan, workspace, tag);
  params.tile_steps = static_cast<int>(plan.row_tiles == 1 ? plan.rows * p.length : plan.warps * slice);
  params.last_rows = static_cast<int>(p.rows() - (plan.tiles - 1) * plan.rows);
  params.count = p.rows() * p.length;
  params.of_rows = flat_geometry(p.outer, p.length, p.inner);
  return params;
}

}  // namespace dcs
