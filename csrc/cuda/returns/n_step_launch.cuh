// Which kernel returns over n steps take.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device.h"
#include "returns/n_step.cuh"
#include "returns/n_step_shared_launch.cuh"

namespace dcs {

template <typename T>
class NStepLaunch {
 public:
  NStepLaunch(const ReturnsProblem& problem, const Device& device, cudaStream_t stream)
      : p_(problem), device_(device), stream_(stream) {}

  cudaError_t run() {
    const bool has_values = p_.next_values.data || p_.values.data;
    if (is_plain(p_) && has_values && p_.steps <= kMostSteps) {
      // The types that a kernel for each number of steps is worth its code for.
      constexpr bool kIsCommon = std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>;
      if constexpr (kIsCommon) {
        if (time_is_in_vectors(16 / sizeof(T)))
          return fast<kMostSteps>([this](auto n, auto next) { rows<n(), next()>(); });
        if (columns_are_in_words())
          return fast<kMostSteps>([this](auto n, auto next) { columns<n(), next(), kNStepColumns, true>(); });
      }
      if constexpr (sizeof(T) <= 4) {
        if (time_is_contiguous())
          return by_next([this](auto next) { launch_rows<kMostSteps, next(), 16 / sizeof(T), false>(); });
      }
      if constexpr (sizeof(T) == 2 && !kIsCommon) {
        if (columns_are_in_words()) return columns_of_any<kNStepColumns>();
      }
      if (columns_are_neighbors()) return columns_of_any<1>();
    }
    if (takes_n_step_blocks(p_, device_.shared_per_block)) return launch_shared_windows<T, false>(p_, device_, stream_);
    if (p_.steps >= 8) return launch_any<8>();
    return launch_any<1>();
  }

 private:
  using Acc = typename Types<T>::Acc;

  template <typename Number>
  NStepCall<Number> call() const {
    return {p_, n_step_rates<Number>(p_), 0};
  }

  // test(data, strides, element size) of every operand with a value for each step.
  template <typename Test>
  bool all(const Test& test) const {
    const ReturnsInput& values = p_.next_values.data ? p_.next_values : p_.values;
    return test(p_.targets.data, p_.targets.strides, sizeof(T)) &&
        test(p_.rewards.data, p_.rewards.strides, sizeof(T)) && test(values.data, values.strides, sizeof(T)) &&
        (!p_.terminated.data || test(p_.terminated.data, p_.terminated.strides, 1)) &&
        (!p_.truncated.data || test(p_.truncated.data, p_.truncated.strides, 1));
  }

  bool time_is_contiguous() const {
    return all([](const void*, const Strides& s, int64_t) { return s.time == 1; });
  }

  bool time_is_in_vectors(int64_t vec) const {
    return p_.length % vec == 0 && all([&](const void* data, const Strides& s, int64_t size) {
      return s.time == 1 && reinterpret_cast<uintptr_t>(data) % (vec * size) == 0 &&
          (p_.outer == 1 || s.outer % vec == 0) && (p_.inner == 1 || s.inner % vec == 0);
    });
  }

  bool columns_are_in_words() const {
    constexpr int64_t kColumns = kNStepColumns;
    return p_.inner % kColumns == 0 && all([this](const void* data, const Strides& s, int64_t size) {
      return s.inner == 1 && reinterpret_cast<uintptr_t>(data) % (kColumns * size) == 0 && s.time % kColumns == 0 &&
          (p_.outer == 1 || s.outer % kColumns == 0);
    });
  }

  bool columns_are_neighbors() const {
    return p_.inner > 1 && all([](const void*, const Strides& s, int64_t) { return s.inner == 1; });
  }

  // run(whether there are next_values), known to the compiler.
  template <typename Run>
  cudaError_t by_next(const Run& run) {
    if (p_.next_values.data) run(std::true_type{});
    else run(std::false_type{});
    return cudaGetLastError();
  }
  // run(n, whether there are next_values), both known to the compiler.
  template <int kN, typename Run>
  cudaError_t fast(const Run& run) {
    if constexpr (kN > 1) {
      if (p_.steps < kN) return fast<kN - 1>(run);
    }
    return by_next([&](auto next) { run(std::integral_constant<int, kN>{}, next); });
  }

  template <int kN, bool kNext>
  void rows() {
    constexpr int kVec = 16 / sizeof(T);
    // Of many steps each more is read again: by half as many threads where they take two vectors each.
    if constexpr (sizeof(T) == 4 && kN >= 3) {
      if (time_is_in_vectors(2 * kVec)) return launch_rows<kN, kNext, 2 * kVec, true>();
    }
    launch_rows<kN, kNext, kVec, true>();
  }

  template <int kN, bool kNext, int kVec, bool kAligned>
  void launch_rows() {
    const int64_t vectors = p_.rows() * ceil_div(p_.length, kVec);
    n_step_rows_kernel<T, kN, kNext, kVec, kAligned>
        <<<static_cast<unsigned>(ceil_div(vectors, kNStepThreads)), kNStepThreads, 0, stream_>>>(call<Acc>());
  }

  // Of any number of steps.
  template <int kColumns>
  cudaError_t columns_of_any() {
    return by_next([this](auto next) {
      if (p_.steps <= kMostSteps / 2) columns<kMostSteps / 2, next(), kColumns, false>();
      else columns<kMostSteps, next(), kColumns, false>();
    });
  }
  // Long segments read few steps twice, short ones leave no multiprocessor idle.
  template <int kN, bool kNext, int kColumns, bool kExact>
  void columns() {
    const int64_t words = p_.rows() / kColumns;
    NStepCall<Acc> each = call<Acc>();
    each.chunk = kNStepBatch;
    while (each.chunk < 64 && words >= kNStepThreads &&
        words * ceil_div(p_.length, 2 * each.chunk) >= int64_t{1024} * device_.multiprocessors)
      each.chunk *= 2;
    n_step_columns_kernel<T, kN, kNext, kColumns, kExact>
        <<<static_cast<unsigned>(ceil_div(words * ceil_div(p_.length, each.chunk), kNStepThreads)), kNStepThreads, 0,
            stream_>>>(each);
  }

  template <int kOut>
  cudaError_t launch_any() {
    const int64_t blocks = ceil_div(p_.rows() * ceil_div(p_.length, kOut), kNStepThreads);
    n_step_kernel<T, kOut><<<static_cast<unsigned>(blocks), kNStepThreads, 0, stream_>>>(call<double>());
    return cudaGetLastError();
  }

  const ReturnsProblem& p_;
  const Device& device_;
  cudaStream_t stream_;
};

}  // namespace dcs
