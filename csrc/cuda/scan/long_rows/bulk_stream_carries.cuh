// The two warps of a block of bulk_stream.cuh that pass carries on: one publishes the totals of the
// block's tiles, the other collects those of the tiles before and leaves each warp its carry. resident.cuh collects and
// wipes in the same way.
#pragma once

#include "scan/long_rows/bulk_stream_shared.cuh"
#include "scan/long_rows/gated_lookback.cuh"

namespace dcs {

// Lane w: the fold of the totals of the warps up to w, and what a shared gamma is over them.
template <bool kStep, int kVec, typename Shape>
struct WarpTotals {
  static constexpr int kWarps = Shape::kWarps;
  const StreamParams& params;
  const int lane = threadIdx.x % 32;
  double total = 0.0, gates = 1.0;
  double warp_powers[5], warp_power = 1.0,
                         tile_power = 1.0;  // over 1, 2, 4, ... warps, over `lane` of them, and over a tile
  int64_t gamma_row = -1;

  __device__ __forceinline__ explicit WarpTotals(const StreamParams& of) : params(of) {}

  // Whether the powers are new.
  __device__ __forceinline__ bool set_row(uint32_t row) {
    if (kStep || gamma_row == row || (gamma_row >= 0 && params.one_gamma)) return false;
    gamma_row = row;
    double power = whole_power(gamma_of_row(params.problem, row), kVec * Shape::kSlice);
    warp_power = 1.0;
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      warp_powers[d] = power;
      if (1 << d < kWarps && (lane >> d & 1)) warp_power = power_mul(warp_power, power);
      if (1 << d == kWarps) tile_power = power;
      power = power_mul(power, power);
    }
    return true;
  }

  __device__ __forceinline__ void fold_warps(const BulkStreamShared<kStep, Shape>& shared, int turn) {
    total = lane < kWarps ? shared.totals[turn][lane] : 0.0;
    if constexpr (kStep) {
      gates = lane < kWarps ? shared.gates[turn][lane] : 1.0;
      fold_lanes<kWarps>(total, gates, lane);
    } else {
#pragma unroll
      for (int d = 0; 1 << d < kWarps; ++d) {
        const double other = shuffle_up(total, 1 << d);
        if (lane >= 1 << d) total = fold(total, warp_powers[d], other);
      }
    }
  }
};

template <bool kStep, int kVec, typename Shape>
__device__ __forceinline__ void publish_totals(const StreamParams& params, BulkStreamShared<kStep, Shape>& shared) {
  Word* const words = static_cast<Word*>(params.statuses);
  if constexpr (kStep) clear_totals(params);
  using Shared = BulkStreamShared<kStep, Shape>;
  WarpTotals<kStep, kVec, Shape> warps(params);
  uint32_t index = blockIdx.x;
  int turn = 0;
  for (TileCursor now(params); now.inside(); now.move_on(), index += gridDim.x) {
    warps.set_row(now.row);
    wait_at(Shared::kToPublish + turn, Shared::kArrivals);
    warps.fold_warps(shared, turn);
    if constexpr (kStep) {
      const double total = shuffle(warps.total, Shape::kWarps - 1), gates = shuffle(warps.gates, Shape::kWarps - 1);
      if (warps.lane < kStepCopies && now.tile + 1 < params.tiles)
        store_total(copy_of_totals(words, params, warps.lane) + index, total, gates);
    } else if (warps.lane == Shape::kWarps - 1 && now.tile + 1 < params.tiles) {
      store_word(words + index, __double_as_longlong(warps.total), params.tag);
    }
    if (warps.lane < Shape::kWarps) mbarrier_arrive(&shared.carries_ready[turn]);  // each has read its total
    if (++turn == Shared::kTurns) turn = 0;
  }
}

// The total of the tiles before the one of this index, `window` of them, with a shared gamma; in all lanes.
// `far_power`: of gamma over 32 tiles; `lane_weight`: over `lane` of them.
template <int kWindow>
__device__ __forceinline__ double collect_totals(
    const Word* words, uint64_t tag, uint32_t index, uint32_t window, double far_power, double lane_weight) {
  Word read[kWindow];
  read_window(words, index, window, read, [tag](uint64_t state) { return state == tag; });
  double sum = 0.0;
#pragma unroll
  for (int j = kWindow - 1; j >= 0; --j)
    if (threadIdx.x % 32 + 32 * j < window) sum = fold(__longlong_as_double(read[j].value), far_power, sum);
  return warp_sum(sum * lane_weight);
}

// Once every block has collected all it wants, the last one wipes what this call marked, `count` words and one of a
// block behind them: a replay of this launch, with the same tag, must find none of them. Takes 1.3 us at the end of a
// launch on an H200; clearing statuses before it takes 2.6.
__device__ __forceinline__ void wipe_marks(const StreamParams& params, Word* words, int64_t count) {
  const int lane = threadIdx.x % 32;
  Word* const done = words + count;  // one of a block
  __syncwarp();
  __threadfence();
  if (lane == 0) store_word(done + blockIdx.x, 0, params.tag);
  if (blockIdx.x + 1 < gridDim.x) return;
  wait_for_marks(done, params.tag);
  for (int64_t i = lane; i < count + gridDim.x; i += 32) store_word(words + i, 0, ~params.tag);
}

template <typename T, bool kStep, bool kBackward, typename Shape>
__device__ __forceinline__ void collect_carries(const StreamParams& params, BulkStreamShared<kStep, Shape>& shared) {
  using Shared = BulkStreamShared<kStep, Shape>;
  constexpr int kVec = 16 / sizeof(T), kWarps = Shape::kWarps, kTurns = Shared::kTurns;
  const ScanProblem& p = params.problem;
  const Word* const statuses = static_cast<const Word*>(params.statuses);
  const Word* const words = kStep ? copy_of_totals(statuses, params, blockIdx.x % kStepCopies) : statuses;
  const uint32_t blocks = gridDim.x;
  WarpTotals<kStep, kVec, Shape> warps(params);
  const int lane = warps.lane;
  double carry_in = 0.0;  // into this block's tile before; `row_per_block`: out of it
  double lane_weight = 1.0, far_power = 1.0, base_weight = 1.0;
  TileCursor behind(params);  // where gamma's gradient is stored next
  double row_sum = 0.0;       // `row_per_block`: there is one a row
  const auto store_sum = [&](int turn) {
    float* const partials = static_cast<float*>(p.grad_gamma) + row_offset(behind.row, p.inner, p.grad_gamma_strides);
    if (lane == 0) {
      float all = shared.sums[turn][0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) all += shared.sums[turn][w];
      if (params.row_per_block) {
        row_sum = (behind.tile == 0 ? 0.0 : row_sum) + all;
        if (behind.tile + 1 == params.tiles) *partials = static_cast<float>(row_sum);
      } else {
        partials[behind.tile] = all;
      }
    }
    if (behind.tile == 0)
      for (int64_t j = (params.row_per_block ? 1 : params.tiles) + lane; j < p.partials; j += 32) partials[j] = 0.f;
    behind.move_on();
  };
  uint32_t index = blockIdx.x, rounds = 0;
  int turn = 0;
  if (kStep && !params.row_per_block) wait_for_marks(marks_behind_totals(params), params.tag);
  for (TileCursor now(params); now.inside(); now.move_on(), index += blocks) {
    if (warps.set_row(now.row) && !params.row_per_block) {
      lane_weight = whole_power(warps.tile_power, lane);
      far_power = power_of<32>(warps.tile_power);
      if (params.tiles > blocks) base_weight = whole_power(warps.tile_power, blocks);
    }
    wait_at(Shared::kToCollect + turn, Shared::kArrivals);
    double into = 0.0;  // the carry into this lane's warp
    if (params.row_per_block) {
      // One warp after the other: an infinity keeps its sign, where doubling would let two of them meet.
      if (now.tile == 0) carry_in = 0.0;
      if (lane < kWarps) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          if (lane == w) into = carry_in;
          carry_in = fold(shared.totals[turn][w], kStep ? shared.gates[turn][w] : warps.warp_powers[0], carry_in);
        }
      }
    } else {
      warps.fold_warps(shared, turn);
      double carry = 0.0;
      if (now.tile > 0) {
        double power = base_weight;
        const uint32_t window = min(now.tile, blocks);
        if constexpr (kStep) collect_totals<Shape::kWindow>(words, index, window, carry, power);
        else carry = collect_totals<Shape::kWindow>(words, params.tag, index, window, far_power, lane_weight);
        if (now.tile > blocks) carry = fold(carry, power, carry_in);
      }
      carry_in = carry;
      const double earlier = shuffle_up(warps.total, 1),
                   earlier_gates = kStep ? shuffle_up(warps.gates, 1) : warps.warp_power;
      into = lane == 0 ? carry : fold(earlier, earlier_gates, carry);
    }
    if constexpr (kBackward && !kStep) {
      if (++rounds > kTurns) store_sum(turn);
    }
    if (lane < kWarps) {
      shared.carries[turn][lane] = into;
      mbarrier_arrive(&shared.carries_ready[turn]);  // each for what it wrote, and for what it read
    }
    if (++turn == kTurns) turn = 0;
  }
  if (params.replayed && !params.row_per_block) {
    if constexpr (kStep) wipe_marks(params, marks_behind_totals(params), blocks);
    else wipe_marks(params, static_cast<Word*>(params.statuses), static_cast<int64_t>(params.rows) * params.tiles);
  }
  if constexpr (kBackward && !kStep) {
    wait_at(Shared::kLastSums, Shared::kArrivals);
    if (rounds < kTurns) turn = 0;
    for (uint32_t i = 0; i < min(rounds, static_cast<uint32_t>(kTurns)); ++i) {
      store_sum(turn);
      if (++turn == kTurns) turn = 0;
    }
  }
}

}  // namespace dcs
