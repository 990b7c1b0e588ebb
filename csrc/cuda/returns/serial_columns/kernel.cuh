// The temporal difference scan along a strided time where columns fill the GPU, or steps are few: a thread takes
// all steps of its own columns serially, last to first, and reads them from global memory. A batch of steps is always
// on its way: what is used makes room for the steps that are a batch earlier. It asks nothing of alignment or strides,
// and takes every option.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/vector.cuh"
#include "returns/serial_columns/column.cuh"

namespace dcs {

constexpr int kSerialReturnsThreads = 128;

// Steps of a batch: as many bytes as keep memory busy, in as many registers as leave room for enough warps.
template <typename T, int kUnit, ColumnForm kForm>
constexpr int kSerialReturnsBatch = has_factors(kForm) ? (sizeof(T) == 8 ? 4 : 8)
    : sizeof(T) == 8                                   ? 8
    : sizeof(T) * kUnit == 4 || has_next(kForm)        ? 12
                                                       : 16;

// kUnit neighboring columns.
template <typename T, int kUnit, ColumnForm kForm>
struct SerialReturns {
  using Acc = typename Types<T>::Acc;
  using Cell = Vector<T, kUnit>;
  using Column = ColumnOf<T, kForm>;
  using Flags = std::conditional_t<kUnit == 2, uint16_t, uint8_t>;
  static constexpr bool kAll = has_all(kForm), kReadsNext = kAll || has_next(kForm), kRatios = has_factors(kForm),
                        kPg = kRatios || is_gradient(kForm);
  static constexpr int kBatch = kSerialReturnsBatch<T, kUnit, kForm>;
  static constexpr int kSome = kBatch / 4 * 4 == kBatch && kBatch > 4 ? 4 : 2;  // used, and asked for, at a time

  const ReturnsColumnParams<Acc>& params;
  const uint32_t outer, cell;
  const char *rewards, *values, *next_values, *rhos, *gammas, *traces, *terminated, *truncated;
  char *advantages, *targets, *pg_advantages;
  Column columns[kUnit];
  bool starts = true;  // the next step is the last one of its row

  // The batch.
  Cell r[kBatch], v[kBatch], next[kReadsNext ? kBatch : 1], rho[kRatios ? kBatch : 1];
  RateBits<T> gamma[kAll ? kBatch : 1], trace[kAll ? kBatch : 1];
  uint32_t terminates[kBatch], truncates[kBatch];

  __device__ __forceinline__ SerialReturns(const ReturnsColumnParams<Acc>& given, uint32_t outer, uint32_t cell)
      : params(given), outer(outer), cell(cell) {
    rewards = begin(params.rewards);
    values = begin(params.values);
    terminated = begin(params.terminated);
    truncated = begin(params.truncated);
    advantages = begin(params.advantages);
    targets = begin(params.targets);
    if constexpr (kRatios) rhos = begin(params.rhos);
    if constexpr (kPg) pg_advantages = begin(params.pg_advantages);
    if constexpr (kReadsNext) next_values = begin(params.next_values);
    if constexpr (kAll) {
      gammas = begin(params.gamma);
      traces = begin(params.trace);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      terminates[b] = truncates[b] = 0;
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        v[b].set(u, cast<T>(Acc(0)));
        if constexpr (is_gradient(kForm)) r[b].set(u, cast<T>(Acc(0)));
      }
      if constexpr (kAll) gamma[b] = trace[b] = bits_of_one<T>();
    }
    const char* const bootstrap = begin(params.bootstrap);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      if (params.bootstrap.last)
        columns[u].after = cast<Acc>(*reinterpret_cast<const T*>(bootstrap + u * (params.bootstrap.cell / kUnit)));
      columns[u].rates = params.rates;
      if (params.row_rates) {
        const auto at = [&](const Strides& strides) {
          return strides.at(outer, static_cast<int64_t>(cell) * kUnit + u);
        };
        columns[u].rates = rates_of<Acc>(params.row_gamma, params.row_trace, at(params.row_gamma.tensor.strides),
            at(params.row_trace.tensor.strides));
      }
    }
  }

  // All steps.
  __device__ __forceinline__ void run() {
    int left = params.length;
#pragma unroll
    for (int k = 0; k < kBatch; k += kSome) load(k, left);
#pragma unroll 1
    while (left > 0) {
#pragma unroll
      for (int k = 0; k < kBatch; k += kSome) {
        if (left <= k) break;
        use(k, left);
        load(kBatch + k, left);
      }
      move_on();
      left -= kBatch;
      starts = false;
    }
    if constexpr (is_gradient(kForm)) {
      if (!params.bootstrap_gradient.last) return;
      char* const at = begin(params.bootstrap_gradient);
#pragma unroll
      for (int u = 0; u < kUnit; ++u)
        *reinterpret_cast<T*>(at + u * (params.bootstrap_gradient.cell / kUnit)) = cast<T>(columns[u].after);
    }
  }

 private:
  template <typename Byte>
  __device__ __forceinline__ Byte* begin(const ColumnTensor<Byte>& tensor) const {
    return last_of_cell(tensor, outer, cell);
  }
  __device__ __forceinline__ void move_on() {
    const auto move = [](auto*& at, int back) { at += int64_t{kBatch} * back; };
    move(rewards, params.rewards.back);
    move(values, params.values.back);
    move(terminated, params.terminated.back);
    move(truncated, params.truncated.back);
    move(advantages, params.advantages.back);
    move(targets, params.targets.back);
    if constexpr (kRatios) move(rhos, params.rhos.back);
    if constexpr (kPg) move(pg_advantages, params.pg_advantages.back);
    if constexpr (kReadsNext) move(next_values, params.next_values.back);
    if constexpr (kAll) {
      move(gammas, params.gamma.back);
      move(traces, params.trace.back);
    }
  }

  // visit(the step's index in the batch, its element) for some steps from `first` on, where the row has them.
  template <bool kGuarded, typename Element, typename Byte, typename Visit>
  __device__ __forceinline__ static void each(
      const ColumnTensor<Byte>& tensor, Byte* at, int first, int left, const Visit& visit) {
    using Own = std::conditional_t<std::is_const_v<Byte>, const Element, Element>;
    if (!tensor.last) return;
#pragma unroll
    for (int i = first; i < first + kSome; ++i)
      if (!kGuarded || i < left) visit(i % kBatch, *reinterpret_cast<Own*>(at + static_cast<int64_t>(i) * tensor.back));
  }
  template <bool kGuarded, typename Element>
  __device__ __forceinline__ static void read(
      const ColumnTensor<const char>& tensor, const char* at, int first, int left, Element* to) {
    each<kGuarded, Element>(tensor, at, first, left, [&](int b, const Element& element) { to[b] = element; });
  }
  template <bool kGuarded>
  __device__ __forceinline__ static void read_rates(
      const ColumnTensor<const char>& tensor, const char* at, bool is_narrow, int first, int left, RateBits<T>* to) {
    read_rate_bits<T>(is_narrow, [&](auto bits) {
      each<kGuarded, decltype(bits)>(tensor, at, first, left, [&](int b, const auto& element) { to[b] = element; });
    });
  }
  template <bool kGuarded>
  __device__ __forceinline__ static void read_flags(const ColumnTensor<const char>& tensor, const char* at,
      bool is_bool, int first, int left, uint32_t (&to)[kBatch]) {
    if (is_bool) {
      each<kGuarded, Flags>(tensor, at, first, left, [&](int b, Flags flags) { to[b] = flags; });
      return;
    }
    each<true, Cell>(tensor, at, first, left, [&](int b, const Cell& numbers) {
      to[b] = 0;
#pragma unroll
      for (int u = 0; u < kUnit; ++u)
        if (cast<Acc>(numbers.get(u)) != Acc(0)) to[b] |= 1u << 8 * u;
    });
  }
  // Asks for some steps.
  __device__ __forceinline__ void load(int first, int left) {
    if (left >= first + kSome) load_some<false>(first, left);
    else if (left > first) load_some<true>(first, left);
  }
  template <bool kGuarded>
  __device__ __forceinline__ void load_some(int first, int left) {
    read<kGuarded>(params.rewards, rewards, first, left, r);
    read<kGuarded>(params.values, values, first, left, v);
    if constexpr (kRatios) read<kGuarded>(params.rhos, rhos, first, left, rho);
    if constexpr (kReadsNext) read<kGuarded>(params.next_values, next_values, first, left, next);
    if constexpr (kAll) {
      read_rates<kGuarded>(params.gamma, gammas, params.gamma_is_narrow, first, left, gamma);
      read_rates<kGuarded>(params.trace, traces, params.trace_is_narrow, first, left, trace);
    }
    read_flags<kGuarded>(params.terminated, terminated, params.terminated_is_bool, first, left, terminates);
    read_flags<kGuarded>(params.truncated, truncated, params.truncated_is_bool, first, left, truncates);
  }

  // A column's step.
  __device__ __forceinline__ ColumnResults<Acc> step(
      int b, int u, int left, Acc reward, Acc value, Acc next_value, Acc rho) {
    const uint32_t bits = kUnit == 1 ? ~0u : 0xffu << 8 * u;
    const bool is_last = is_gradient(kForm) ? b + 1 == left : b == 0 && starts;
    return columns[u].step(
        params, {reward, value, next_value, rho, terminates[b] & bits, truncates[b] & bits, is_last}, [&] {
          return ColumnStepRates<Acc>{
              rate_of_bits<T>(gamma[b], params.gamma_is_narrow), rate_of_bits<T>(trace[b], params.trace_is_narrow)};
        });
  }
  // Some steps, whose operands have come. Beyond the row's first one they are anything, and nobody reads them.
  __device__ __forceinline__ void use(int first, int left) {
    Cell of_advantages[kBatch], of_targets[kBatch], of_pg[kBatch];
#pragma unroll
    for (int b = first; b < first + kSome; ++b) {
      Acc reward[kUnit], value[kUnit], next_value[kUnit], ratios[kUnit] = {};
      unpack(r[b], reward);
      unpack(v[b], value);
      Cell following = v[b];
      if constexpr (kReadsNext) {
        if (!kAll || params.next_values.last) following = next[b];
      }
      unpack(following, next_value);
      if constexpr (kRatios) unpack(rho[b], ratios);
      Acc advantage[kUnit], target[kUnit], pg[kUnit];
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        // What is left behind the last step is a gradient, too.
        if (is_gradient(kForm) && b >= left) break;
        const auto results = step(b, u, left, reward[u], value[u], next_value[u], ratios[u]);
        advantage[u] = results.advantage, target[u] = results.target, pg[u] = results.pg;
      }
      of_advantages[b] = pack<Acc, T, kUnit>(advantage);
      of_targets[b] = pack<Acc, T, kUnit>(target);
      of_pg[b] = pack<Acc, T, kUnit>(pg);
    }
    const auto write = [&](const ColumnTensor<char>& tensor, char* at, const Cell(&from)[kBatch]) {
      const auto put = [&](int b, Cell& element) { element = from[b]; };
      if (left >= first + kSome) each<false, Cell>(tensor, at, first, left, put);
      else each<true, Cell>(tensor, at, first, left, put);
    };
    write(params.advantages, advantages, of_advantages);
    write(params.targets, targets, of_targets);
    if constexpr (kPg) write(params.pg_advantages, pg_advantages, of_pg);
  }
};

template <typename T, int kUnit, ColumnForm kForm>
__global__ void __launch_bounds__(kSerialReturnsThreads, 4)
    returns_serial_columns_kernel(const __grid_constant__ ReturnsColumnParams<typename Types<T>::Acc> params) {
  overlap_launches();
  const uint32_t cell = blockIdx.x * blockDim.x + threadIdx.x;
  if (cell >= params.cells) return;
  const uint32_t outer = params.cells == params.in_line.divisor ? 0 : params.in_line.of(cell);
  SerialReturns<T, kUnit, kForm>(params, outer, cell - outer * params.in_line.divisor).run();
}

}  // namespace dcs
