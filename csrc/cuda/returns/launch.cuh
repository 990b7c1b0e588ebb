// Which kernel a temporal difference scan takes, and with what tiles.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "returns/launch.h"
#include "dcs/returns/few_steps_plan.h"
#include "returns/block_columns.cuh"
#include "returns/n_step_launch.cuh"
#include "returns/small.cuh"
#include "returns/tile_columns/launch.cuh"
#include "returns/serial_columns/launch.h"
#include "returns/warp_columns.cuh"

namespace dcs {

template <typename T>
class ReturnsLaunch {
 public:
  ReturnsLaunch(const ReturnsProblem& problem, const Device& device, cudaStream_t stream)
      : p_(problem), device_(device), stream_(stream) {
    form_ = form_of(p_);
  }

  cudaError_t run() {
    if constexpr (kCommon) {
      if (form_ == kRatios) return run<kRatios>();
      if (form_ == kMixed) return run<kMixed>();
      if (form_ == kMixedShifted) return run<kMixedShifted>();
      if (form_ == kAdvantagesNext) return run<kAdvantagesNext>();
      if (form_ == kRatiosNext) return run<kRatiosNext>();
    }
    return form_ == kAdvantages ? run<kAdvantages>() : run<kAnyForm>();
  }

 private:
  using Acc = typename Types<T>::Acc;
  // The types that the forms beside kAdvantages are worth their code for.
  static constexpr bool kCommon = std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>;

  template <int kForm>
  cudaError_t run() {
    if constexpr (kForm != kAnyForm && sizeof(T) <= 4) {
      if (takes_short_returns(p_)) {
        small<kForm>([&](auto wide) {
          const int64_t blocks = ceil_div(p_.rows() * p_.length * sizeof(T) / 16, kShortRowThreads);
          using Wide = std::conditional_t<(kForm & kWithRhos) != 0, double, decltype(wide)>;
          launch_dependent(returns_short_rows_kernel<T, kForm, Wide>, device_.cluster > 1, blocks, kShortRowThreads, 0,
              stream_, short_rows_call<T>(p_));
        });
        return cudaGetLastError();
      }
      if (takes_few_columns(p_, device_.multiprocessors)) {
        small<kForm>([&](auto wide) {
          using Wide = decltype(wide);
          constexpr int kHalf = kSmallWarps / 2;
          if (!few_columns_are_even(kForm)) launch_few_columns<kForm, kSmallWarps, Wide, false>();
          else if (p_.length <= kSmallWarpSteps * kHalf) launch_few_columns<kForm, kHalf, Wide, true>();
          else launch_few_columns<kForm, kSmallWarps, Wide, true>();
        });
        return cudaGetLastError();
      }
    }
    columns<kForm>();
    return cudaGetLastError();
  }

  // launch(what goes between lanes).
  template <int kForm, typename Launch>
  void small(const Launch& launch) {
    if (float_holds_gates(p_, kForm)) launch(float{});
    else launch(double{});
  }

  // The common call of few columns (returns_few_columns_kernel).
  bool few_columns_are_even(int form) const {
    const bool rhos = form & kWithRhos;
    const bool outputs = p_.targets.data && (p_.advantages.data != nullptr) == (has_own_values(form) && !rhos) &&
        (!rhos || p_.pg_advantages.data);
    return p_.length % kSmallWarpSteps == 0 && p_.rows() % kSmallColumns == 0 && p_.terminated.data &&
        !p_.truncated.data && outputs && (p_.next_values.data || p_.bootstrap_value.data);
  }

  template <int kForm, int kWarps, typename Wide, bool kEven>
  void launch_few_columns() {
    ReturnsFewCall<Acc> call{};
    call.rewards = p_.rewards.data;
    call.values = p_.values.data;
    call.terminated = static_cast<const uint8_t*>(p_.terminated.data);
    call.truncated = static_cast<const uint8_t*>(p_.truncated.data);
    call.advantages = p_.advantages.data;
    call.targets = p_.targets.data;
    call.pg_advantages = p_.pg_advantages.data;
    call.next_values = p_.next_values.data ? p_.next_values.data : p_.bootstrap_value.data;
    call.rhos = p_.rhos.data;
    call.columns = static_cast<int>(p_.rows());
    call.length = static_cast<int>(p_.length);
    call.bootstrap_stride = small_bootstrap_stride(p_);
    const Rates<Acc> rates = number_rates<Acc>(p_.gamma.value, p_.trace.value);
    call.gamma = rates.gamma;
    call.rest = rates.rest;
    call.gate = rates.gate;
    call.carried = rates.carried;
    call.clip_rho = static_cast<Acc>(p_.clip_rho);
    call.clip_c = static_cast<Acc>(p_.clip_c);
    call.clip_pg = static_cast<Acc>(p_.clip_pg);
    const int64_t warps = ceil_div(p_.length, kSmallWarpSteps);
    launch_dependent(returns_few_columns_kernel<T, kForm, kWarps, Wide, kEven>, device_.cluster > 1,
        ceil_div(p_.rows(), kSmallColumns), 32 * warps, 0, stream_, call);
  }

  // Columns of their own for every warp where that leaves three warps a multiprocessor; where there are fewer, a
  // block's warps share them, as many warps as leave room for all blocks at once.
  template <int kForm>
  bool warp_columns() {
    constexpr int kWords = sizeof(T) == 2 ? 2 : 1;  // of a lane, in shared columns: 128 bytes a step and warp
    const auto blocks_of = [&](int columns) { return p_.outer * ceil_div(p_.inner, 32 * columns); };
    const int64_t alone = blocks_of(2), shared = blocks_of(kWords);
    if (!columns_take_words(p_) || alone > INT_MAX) return false;
    if (alone >= 3 * device_.multiprocessors) {
      constexpr int kStages = kForm & kWithRhos ? 6 : 8;
      return launch_warp_columns(returns_warp_columns_kernel<T, kForm, 2, 4, kStages, false, 32, 12>,
          warp_columns_stage_bytes<T, kForm, 2, 4, false>, 2, 4, kStages, 0, alone, 1);
    }
    if (shared < device_.multiprocessors / 2 || p_.length < 128) return false;
    const int warps =
        static_cast<int>(std::max<int64_t>(1, kMaxColumnWarps / ceil_div(shared, device_.multiprocessors)));
    constexpr int kStages = (kForm & kWithRhos) || kForm == kAdvantagesNext ? 3 : 4;
    return launch_warp_columns(returns_warp_columns_kernel<T, kForm, kWords, 8, kStages, true, 32 * kMaxColumnWarps, 1>,
        warp_columns_stage_bytes<T, kForm, kWords, 8, true>, kWords, 8, kStages, WarpColumnsCarries<kWords>::kBytes,
        shared, warps);
  }

  bool launch_warp_columns(void (*kernel)(ReturnsWarpColumnsCall<Acc>), int (*stage_bytes)(bool, bool), int columns,
      int steps, int stages, int carries, int64_t blocks, int warps) {
    ReturnsWarpColumnsCall<Acc> call = warp_columns_call<Acc>(p_, columns, steps);
    call.stage_bytes = stage_bytes(p_.terminated.data != nullptr, p_.truncated.data != nullptr);
    const int shared = warps * (stages * call.stage_bytes + carries);
    if (shared > device_.shared_per_block) return false;
    allow_shared(kernel, shared, device_.shared_per_block);
    kernel<<<static_cast<unsigned>(blocks), 32 * warps, shared, stream_>>>(call);
    return true;
  }

  template <int kForm>
  void columns() {
    const bool are_serial = takes_serial_columns(p_, device_.multiprocessors);
    if constexpr (kForm != kAnyForm && sizeof(T) <= 4) {
      // Few steps do not fill a warp's stages.
      if (!(are_serial && takes_few_returns(p_, device_.multiprocessors)) && warp_columns<kForm>()) return;
    }
    constexpr bool kFull = kForm == kAnyForm, kLarge = (kForm & kWithRhos) || kForm == kAdvantagesNext;
    if (are_serial) {
      launch_serial_returns<T>(p_, device_, stream_);
      return;
    }
    constexpr int kSteps = sizeof(T) <= 4 ? 8 : 4;
    if constexpr (kFull) launch_columns<kSteps, 8>(returns_columns_kernel<T, kForm, kSteps, 8>);
    else if constexpr (kLarge || sizeof(T) > 4) launch_columns<8, 16>(returns_columns_kernel<T, kForm, 8, 16>);
    else launch_columns<8, 32>(returns_columns_kernel<T, kForm, 8, 32>);
  }

  // Few columns: many warps share a column's time, in as few rounds as they can; many: enough for the multiprocessor to
  // hide its own latency.
  template <int kCount, int kWarps>
  void launch_columns(void (*kernel)(ReturnsColumnsCall<Acc>)) {
    const int64_t blocks = ceil_div(p_.rows(), 32);
    const int most = blocks >= 4 * device_.multiprocessors && p_.length > kCount * 8 ? std::min(kWarps, 8) : kWarps;
    int warps = 1;  // a power of two: lanes scan the warps' totals
    while (warps < most && warps * kCount < p_.length) warps *= 2;
    kernel<<<static_cast<unsigned>(blocks), 32 * warps, 0, stream_>>>(
        {p_, number_rates<Acc>(p_.gamma.value, p_.trace.value)});
  }

  const ReturnsProblem& p_;
  const Device& device_;
  cudaStream_t stream_;
  int form_ = kAnyForm;
};

template <typename T>
cudaError_t launch_returns(const ReturnsProblem& problem, const Device& device, const std::optional<TilesPlan>& tiles,
    void* workspace, cudaStream_t stream) {
  if (tiles) return launch_tile_columns<T>(problem, *tiles, workspace, stream);
  if (problem.steps) return NStepLaunch<T>(problem, device, stream).run();
  return ReturnsLaunch<T>(problem, device, stream).run();
}

}  // namespace dcs
