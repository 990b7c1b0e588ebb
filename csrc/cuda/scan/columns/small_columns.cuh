// Small scans along a strided time, which are bound by latency: one round trip to memory, one exchange, one store. A
// block, or a cluster of blocks along time, takes a span of neighboring cells, which are columns or pairs of
// half-precision columns, through all of time. Lane (slot, cell) of a warp has a few neighboring steps of a cell in
// registers and issues all loads that they need at once. Slots, warps and the blocks of a cluster fold totals alike,
// back to the nearest cut. Where all columns are few (`flat`) a warp's elements are contiguous: they are read and
// written in that order and transposed in shared memory. Offsets are 32-bit, as the problem has fewer elements.
#pragma once

#include <type_traits>

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/small_exchange.cuh"
#include "scan/columns/small_index.cuh"

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

// `kStep`: per-step gamma.
template <typename T, bool kStep, int kUnit>
__global__ void __launch_bounds__(32 * kSmallColumnWarps, 1)
    small_columns_kernel(const __grid_constant__ SmallColumnsParams p) {
  using Acc = std::conditional_t<sizeof(T) == 2, float, double>;
  using Index = SmallColumnIndex<T, kStep, kUnit>;
  extern __shared__ __align__(16) unsigned char small_columns_shared[];
  __shared__ ColumnExchange<kUnit> exchange;
  launch_dependents();
  const Index at(p);
  if (p.cluster.divisor > 1) exchange.init_barrier(at.rank, kUnit << p.cell_bits);
  uint32_t* const shared = reinterpret_cast<uint32_t*>(small_columns_shared) + at.warp * (p.steps * kSmallPitch);
  griddepcontrol_wait();

  typename Index::Words x = {}, step_gates = {}, flags = {};
  uint32_t initial[kUnit] = {};
  at.ask(p.input, x);
  if constexpr (kStep) at.ask(p.gates, step_gates, p.back);
  if (p.reset.data) at.ask_flags(flags);
  if (p.initial.data) at.ask_initial(initial);
  Acc gates[kUnit];
  Segment<double> segments[kUnit];
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    const double gamma = !kStep && p.by_row ? at.row_gamma(u) : p.number;
    if constexpr (std::is_same_v<Acc, float>) gates[u] = make_gate<float, true>(gamma).value;
    else gates[u] = gamma;
    segments[u].gates = p.by_row ? whole_power(gamma, static_cast<unsigned>(p.steps)) : p.power;
  }
  const auto gates_of = [&](int k, Acc(&to)[kUnit]) {
    if constexpr (kStep) {
      values_of_word<T>(step_gates[k], to);
    } else {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) to[u] = gates[u];
    }
  };

  if (p.flat) {
    at.transpose_to_own(x, shared);
    if constexpr (kStep) at.transpose_to_own(step_gates, shared);
  }
  // A bit a step, before which the scan starts anew. The first step's value takes the initial one.
  uint32_t cuts[kUnit] = {};
  if (p.reset.data) at.read_flags(flags, cuts);
  Acc lead[kUnit], factors[kUnit];
  values_of_word<T>(x[0], lead);
  if (at.first == 0) {
    gates_of(0, factors);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const Acc start = value_of_word<T, Acc>(initial[u]);
      if (p.initial.data && !(cuts[u] & 1)) lead[u] = fold(lead[u], factors[u], start);
      cuts[u] |= 1;
    }
  }
  const auto advance = [&](int k, Acc(&y)[kUnit]) {
    Acc values[kUnit];
    values_of_word<T>(x[k], values);
    gates_of(k, factors);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const Acc value = k == 0 ? lead[u] : values[u];
      y[u] = cuts[u] >> k & 1 ? value : fold(value, factors[u], y[u]);
    }
  };

  // The thread's segments with a zero carry, the carries into them, and the results.
  Acc y[kUnit];
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    y[u] = lead[u];
    if (kStep && cuts[u] == 0 && at.count == p.steps) {
      segments[u].gates = product_of_each<Acc>([&](const auto& take) {
        at.each([&](int k) {
          gates_of(k, factors);
          take(factors[u]);
        });
      });
    }
  }
  at.each([&](int k) {
    if (k > 0) advance(k, y);
  });
#pragma unroll
  for (int u = 0; u < kUnit; ++u) segments[u].total = y[u], segments[u].closed = cuts[u] != 0;
  double carries[kUnit];
  enter(at, segments, exchange, carries);
#pragma unroll
  for (int u = 0; u < kUnit; ++u) y[u] = static_cast<Acc>(carries[u]);
  at.each([&](int k) {
    advance(k, y);
    x[k] = word_of_values<T>(y);
  });
  at.store(x, shared);
}

}  // namespace dcs
