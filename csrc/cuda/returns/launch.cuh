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
#include "returns/rows.cuh"
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
    const int64_t size = sizeof(T);
    const auto flag_size = [&](bool is_bool) { return is_bool ? int64_t{1} : size; };
    add(p_.rewards, size, kStagedRewards);
    add(p_.values, size, kStagedValues);
    add(p_.next_values, size, kStagedNext);
    add(p_.rhos, size, kStagedRhos);
    add(p_.terminated, flag_size(p_.terminated_is_bool), kStagedTerminated);
    add(p_.truncated, flag_size(p_.truncated_is_bool), kStagedTruncated);
    if (p_.gamma.kind == GammaKind::kStep) add(p_.gamma.tensor, bytes_of(p_.gamma.dtype), kStagedGamma);
    if (p_.trace.kind == GammaKind::kStep) add(p_.trace.tensor, bytes_of(p_.trace.dtype), kStagedTrace);
    for (const ReturnsOutput* output : {&p_.advantages, &p_.targets, &p_.pg_advantages})
      add({output->data, output->strides}, size, kStagedTensors);
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

  // With a value for every step.
  struct Operand {
    const void* data;
    Strides strides;
    int64_t size;
    StagedTensor which;
  };

  void add(const ReturnsInput& input, int64_t size, StagedTensor which) {
    if (input.data) operands_[count_++] = {input.data, input.strides, size, which};
  }
  template <typename Test>
  bool all(const Test& test) const {
    return std::all_of(operands_, operands_ + count_, test);
  }

  // Whether an operand's rows begin at multiples of so many bytes; packed: its packs do.
  bool is_aligned(const Operand& o, int64_t bytes, int64_t pack_rows) const {
    if (reinterpret_cast<uintptr_t>(o.data) % bytes) return false;
    if (pack_rows) return pack_rows * p_.length * o.size % bytes == 0;
    return (p_.outer == 1 || o.strides.outer * o.size % bytes == 0) &&
        (p_.inner == 1 || o.strides.inner * o.size % bytes == 0);
  }

  template <int kForm>
  cudaError_t run() {
    if constexpr (kForm != kAnyForm && sizeof(T) <= 4) {
      if (takes_short_rows()) {
        small<kForm>([&](auto wide) {
          const int64_t blocks = ceil_div(p_.rows() * p_.length * sizeof(T) / 16, kShortRowThreads);
          using Wide = std::conditional_t<(kForm & kWithRhos) != 0, double, decltype(wide)>;
          launch_dependent(returns_short_rows_kernel<T, kForm, Wide>, device_.cluster > 1, blocks, kShortRowThreads, 0,
              stream_, short_rows_call());
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
    if (p_.length > 1 && all([](const Operand& o) { return o.strides.time == 1; })) rows<kForm>();
    else columns<kForm>();
    return cudaGetLastError();
  }

  // launch(what goes between lanes): float where it holds gamma * lambda's powers, over 32 steps at most, as well as
  // double. With ratios no gate may exceed 1: a product that has left float's range does not come back then.
  template <int kForm, typename Launch>
  void small(const Launch& launch) {
    const double carried = std::fabs(p_.gamma.value * p_.trace.value);
    if (carried <= 1 && (carried == 0 || finite_power(carried, 32) >= FLT_MIN) &&
        (!(kForm & kWithRhos) || p_.clip_c <= 1))
      launch(float{});
    else launch(double{});
  }

  template <int kForm>
  void rows() {
    const bool one_behind_the_other = rows_are_packed();
    if (one_behind_the_other && p_.length <= ReturnsTile<T, kForm>::kSteps / 2 && p_.rows() > 1) {
      launch_rows<kForm, ReturnsRows::kPacked>(pack_rows(ReturnsTile<T, kForm>::kSteps));
    } else if (p_.length > 4 * ReturnsTile<T, kForm>::kSteps && p_.rows() < 4 * device_.multiprocessors) {
      // Fewer than four warps a multiprocessor would leave memory idle.
      launch_rows<kForm, ReturnsRows::kBlock>(0);
    } else {
      launch_rows<kForm, ReturnsRows::kWarp>(0);
    }
  }

  // Rows whose time is contiguous, one behind the other.
  bool rows_are_packed() const {
    return all([this](const Operand& o) {
      return (p_.inner == 1 || o.strides.inner == p_.length) &&
          (p_.outer == 1 || o.strides.outer == p_.inner * p_.length);
    });
  }

  // Whether a row's bootstrap_value is at a multiple of one stride.
  bool bootstrap_is_linear() const {
    const Strides& s = p_.bootstrap_value.strides;
    return !p_.bootstrap_value.data || p_.inner == 1 || p_.outer == 1 || s.outer == s.inner * p_.inner;
  }

  bool takes_short_rows() const {
    constexpr int kVec = 16 / sizeof(T);
    const int64_t lanes = p_.length / kVec;
    if (p_.length % kVec || lanes > 8 || (lanes & (lanes - 1)) || !bootstrap_is_linear() || !rows_are_packed())
      return false;
    return all([](const Operand& o) {
      return o.strides.time == 1 && reinterpret_cast<uintptr_t>(o.data) % (kVec * o.size) == 0;
    });
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
    call.bootstrap_stride = bootstrap_stride();
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

  ReturnsSmallCall<Acc> short_rows_call() const {
    ReturnsSmallCall<Acc> call{known_of<Acc>(p_, 16 / sizeof(T))};
    call.rewards = p_.rewards.data;
    call.values = p_.values.data;
    call.next_values = p_.next_values.data;
    call.rhos = p_.rhos.data;
    call.bootstrap = p_.bootstrap_value.data;
    call.terminated = static_cast<const uint8_t*>(p_.terminated.data);
    call.truncated = static_cast<const uint8_t*>(p_.truncated.data);
    call.advantages = p_.advantages.data;
    call.targets = p_.targets.data;
    call.pg_advantages = p_.pg_advantages.data;
    call.rows = p_.rows();
    call.bootstrap_stride = bootstrap_stride();
    call.length = static_cast<int>(p_.length);
    call.lanes = call.length * static_cast<int>(sizeof(T)) / 16;
    return call;
  }

  int64_t bootstrap_stride() const {
    return p_.inner > 1 ? p_.bootstrap_value.strides.inner : p_.bootstrap_value.strides.outer;
  }

  // As many rows as a tile holds; if that leaves enough of them, so many that packs begin at multiples of 16 bytes, for
  // flags too.
  int pack_rows(int64_t steps) const {
    const int64_t most = steps / p_.length, aligned = 16 / std::gcd(int64_t{16}, p_.length);
    return static_cast<int>(most >= aligned ? most / aligned * aligned : most);
  }

  template <int kForm, ReturnsRows kRows>
  void launch_rows(int pack_rows) {
    using Tile = ReturnsTile<T, kForm>;
    constexpr int kStaged = kStagedTensors, kTileBytes = Tile::kSteps * sizeof(T);
    ReturnsRowsCall<Acc> params{};
    params.problem = p_;
    params.rates = number_rates<Acc>(p_.gamma.value, p_.trace.value);
    for (int s = 0; s < 6; ++s) params.powers[s] = finite_power(params.rates.carried, Tile::kPer << s);
    params.pack_rows = pack_rows;
    params.lots = pack_rows ? ceil_div(p_.rows(), pack_rows) : p_.rows();
    params.whole_words = true;
    int bytes = 0;
    for (int i = 0; i < count_; ++i) {
      const Operand& o = operands_[i];
      const int grain = is_aligned(o, 16, pack_rows) ? 16 : is_aligned(o, 4, pack_rows) ? 4 : 0;
      if (o.which == kStaged) {
        params.whole_words = params.whole_words && grain == 16;
      } else {
        params.staged[o.which] = {
            static_cast<const char*>(o.data), o.strides.outer * o.size, o.strides.inner * o.size, bytes, grain};
        bytes += static_cast<int>(Tile::kSteps * o.size) + (o.which == kStagedValues ? 16 : 0);
      }
    }
    params.pg_slot = p_.rhos.data ? params.staged[kStagedRhos].slot : bytes;
    if (p_.pg_advantages.data && !p_.rhos.data) bytes += kTileBytes;
    params.stage_bytes = bytes;
    const int warp_bytes = Tile::kStages * bytes;
    int warps = std::min((device_.shared_per_block - 1024) / warp_bytes, returns_warps(kRows, kForm));
    int64_t blocks = params.lots;
    if (kRows != ReturnsRows::kBlock) {
      // A few rows are better off on many multiprocessors.
      while (warps > 1 && ceil_div(params.lots, warps) < device_.multiprocessors) warps /= 2;
      blocks = ceil_div(params.lots, warps);
    }
    params.tiles = pack_rows ? 1
                             : static_cast<int>(ceil_div(p_.length,
                                   static_cast<int64_t>(Tile::kSteps) * (kRows == ReturnsRows::kBlock ? warps : 1)));
    // As many blocks as run at once: so many warps have their registers.
    const int shared = warps * warp_bytes,
              most_warps = returns_blocks(kRows, kForm, sizeof(T)) * returns_warps(kRows, kForm);
    const int64_t resident =
        std::max(1, std::min(device_.shared_per_multiprocessor / (shared + 1024), most_warps / warps));
    blocks = std::min(blocks, resident * device_.multiprocessors);
    launch_rows_kernel(returns_rows_kernel<T, kForm, kRows>, params, blocks, warps, shared);
  }

  template <typename Kernel>
  void launch_rows_kernel(Kernel kernel, const ReturnsRowsCall<Acc>& params, int64_t blocks, int warps, int shared) {
    allow_shared(kernel, shared, device_.shared_per_block);
    kernel<<<static_cast<unsigned>(blocks), 32 * warps, shared, stream_>>>(params);
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
  Operand operands_[kStagedTensors + 3];
  int count_ = 0;
  int form_ = kAnyForm;
};

template <typename T>
cudaError_t launch_returns(const ReturnsProblem& problem, const Device& device,
    const std::optional<ResidentColumnsPlan>& tiles, void* workspace, cudaStream_t stream) {
  if (tiles) return launch_tile_columns<T>(problem, *tiles, workspace, stream);
  if (problem.steps) return NStepLaunch<T>(problem, device, stream).run();
  return ReturnsLaunch<T>(problem, device, stream).run();
}

}  // namespace dcs
