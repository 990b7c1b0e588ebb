// The operands of the row kernel of the temporal difference scan: where a warp's tiles lie, how they come into shared
// memory, and what lanes read there.
#pragma once

#include <type_traits>

#include "common/row_offset.cuh"
#include "returns/tile.cuh"

namespace dcs {

// A tile of a lot, which is a row or a pack of short rows.
struct ReturnsTileIndex {
  int64_t lot;
  int tile;
};

// Not inlined: packed rows' own discounts are rare, and there are up to 96 places that read one.
template <typename Acc>
__device__ __noinline__ Acc discount_of_row(
    const void* data, ElementType dtype, int64_t row, int64_t inner, int64_t outer_stride, int64_t inner_stride) {
  return load_gamma<Acc>(data, dtype, row_offset(row, inner, outer_stride, inner_stride), false);
}

template <typename T, int kForm, ReturnsRows kRows>
struct ReturnsRowsOperands {
  using Acc = typename Types<T>::Acc;
  using Tile = ReturnsTile<T, kForm>;
  using Given = ReturnsGiven<kForm>;
  using Index = ReturnsTileIndex;
  static constexpr bool kFull = Given::kFull, kGates = Given::kGates;
  static constexpr bool kPacked = kRows == ReturnsRows::kPacked, kBlock = kRows == ReturnsRows::kBlock;
  static constexpr int kPer = Tile::kPer, kSteps = Tile::kSteps, kStages = Tile::kStages;
  static constexpr int kVec = 16 / sizeof(T), kChunks = kPer / kVec, kLaneBytes = kPer * sizeof(T);

  const ReturnsRowsCall<Acc>& params;
  const ReturnsProblem& p;
  const int lane, warp, warps;
  unsigned char* const ring;  // the warp's stages
  const Given given;
  const bool each_gamma, each_trace;  // read for every step: one a step, or packed rows' own
  const bool has_bootstrap;
  const int tiles;
  const int64_t stride;  // from a lot to the next one

  Rates<Acc> own_rates;
  double lane_power;  // c over a lane's steps
  // Of packed rows. Bit i: the lane's step i is the last of its row; and the row of the lane's first step in its pack.
  // The same in every pack.
  uint32_t pack_lasts = 0;
  int first_row = 0;

  static __device__ __forceinline__ bool is_each(const ReturnsDiscount& discount) {
    return kFull && (kPacked ? discount.kind != GammaKind::kNumber : discount.kind == GammaKind::kStep);
  }

  __device__ __forceinline__ ReturnsRowsOperands(const ReturnsRowsCall<Acc>& call, unsigned char* shared)
      : params(call),
        p(call.problem),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        warps(blockDim.x / 32),
        ring(shared + warp * kStages * call.stage_bytes),
        given(p),
        each_gamma(is_each(p.gamma)),
        each_trace(is_each(p.trace)),
        has_bootstrap(p.bootstrap_value.data != nullptr),
        tiles(kPacked ? 1 : call.tiles),
        stride(kBlock ? gridDim.x : static_cast<int64_t>(gridDim.x) * warps),
        lane_power(call.powers[0]) {
    if (kFull) set_rates(0);
    if constexpr (kPacked) find_pack_lasts();
  }

  __device__ __forceinline__ void find_pack_lasts() {
    const int length = static_cast<int>(p.length);
    first_row = lane * kPer / length;
    int at = lane * kPer - first_row * length;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (++at == length) {
        pack_lasts |= 1u << i;
        at = 0;
      }
    }
  }

  __device__ __forceinline__ Index first_index() const {
    return {kBlock ? static_cast<int64_t>(blockIdx.x) : static_cast<int64_t>(blockIdx.x) * warps + warp, tiles - 1};
  }
  __device__ __forceinline__ void move_on(Index& at) const {
    if (at.tile > 0) {
      --at.tile;
    } else {
      at.tile = tiles - 1;
      at.lot += stride;
    }
  }
  // Steps of the lot, and the first one of this warp's tile.
  __device__ __forceinline__ int64_t length_of(const Index& at) const {
    if (!kPacked) return p.length;
    return min(p.outer * p.inner - at.lot * params.pack_rows, static_cast<int64_t>(params.pack_rows)) * p.length;
  }
  __device__ __forceinline__ int64_t base_of(const Index& at) const {
    return kPacked ? int64_t{0}
                   : (kBlock ? static_cast<int64_t>(at.tile) * warps + warp : static_cast<int64_t>(at.tile)) * kSteps;
  }
  __device__ __forceinline__ int64_t in_row(int64_t row, const Strides& strides) const {
    return row_offset(row, p.inner, strides);
  }
  // The row of the lane's step i.
  __device__ __forceinline__ int64_t packed_row(const Index& at, int i) const {
    return at.lot * params.pack_rows + first_row + __popc(pack_lasts & ((1u << i) - 1));
  }

  __device__ __forceinline__ const Rates<Acc>& rates() const {
    if constexpr (kFull) return own_rates;
    else return params.rates;
  }
  __device__ __forceinline__ bool rates_by_row() const {
    return kFull && !kPacked && (p.gamma.kind == GammaKind::kRow || p.trace.kind == GammaKind::kRow);
  }
  __device__ __forceinline__ void set_rates(int64_t row) {
    if (kPacked) {
      ReturnsDiscount gamma = p.gamma, trace = p.trace;
      if (each_gamma) gamma.kind = GammaKind::kStep;
      if (each_trace) trace.kind = GammaKind::kStep;
      own_rates = rates_of<Acc>(gamma, trace, 0, 0);
    } else {
      own_rates =
          rates_of<Acc>(p.gamma, p.trace, in_row(row, p.gamma.tensor.strides), in_row(row, p.trace.tensor.strides));
    }
    lane_power = power_of<kPer>(own_rates.carried);
  }
  __device__ __forceinline__ T bootstrap_of(int64_t row) const {
    return static_cast<const T*>(p.bootstrap_value.data)[in_row(row, p.bootstrap_value.strides)];
  }

  // One operand's tile of `left` steps. kElement: its bytes.
  template <int kElement>
  __device__ __forceinline__ void fetch_operand(
      StagedTensor which, const Index& at, unsigned char* to, int64_t base, int64_t left) const {
    const Staged& staged = params.staged[which];
    const int64_t offset = kPacked ? at.lot * params.pack_rows * p.length * kElement
                                   : row_offset(at.lot, p.inner, staged.outer, staged.inner);
    const char* const from = staged.data + offset + base * kElement;
    const int valid = static_cast<int>(max(int64_t{0}, min(left, int64_t{kSteps}))) * kElement;
    fetch_tile<kPer * kElement, kElement>(to + staged.slot, from, valid, staged.grain, lane);
    if (which == kStagedValues && lane == 0) {
      // The step behind the tile.
      unsigned char* const behind = to + staged.slot + 32 * kLaneBytes;
      const char* const there = from + 32 * kLaneBytes;
      const int more = static_cast<int>(max(int64_t{0}, min(left - kSteps, int64_t{kVec}))) * kElement;
      if (staged.grain == 16) {
        copy_existing<16, kElement>(behind, there, more);
      } else if (staged.grain == 4) {
        copy_existing<4, std::min(kElement, 4)>(behind, there, more);
        if constexpr (kElement == 8) copy_existing<4, 4>(behind + 4, there + 4, more);
      } else if constexpr (kElement == 2) {
        *reinterpret_cast<uint16_t*>(behind) = more > 0 ? *reinterpret_cast<const uint16_t*>(there) : uint16_t(0);
      }
    }
  }
  __device__ __forceinline__ void fetch_flags(const ReturnsInput& flags, bool is_bool, StagedTensor which,
      const Index& at, unsigned char* to, int64_t base, int64_t left) const {
    if (!flags.data) return;
    if (!kFull || is_bool) fetch_operand<1>(which, at, to, base, left);
    else fetch_operand<sizeof(T)>(which, at, to, base, left);
  }
  __device__ __forceinline__ void fetch_rate(const ReturnsDiscount& rate, StagedTensor which, const Index& at,
      unsigned char* to, int64_t base, int64_t left) const {
    if (rate.kind != GammaKind::kStep) return;
    if (sizeof(T) == 2 && rate.is_narrow()) fetch_operand<sizeof(T)>(which, at, to, base, left);
    else fetch_operand<sizeof(Acc)>(which, at, to, base, left);
  }
  __device__ __forceinline__ void fetch(const Index& at, int stage) const {
    if (at.lot < params.lots) {
      unsigned char* const to = ring + stage * params.stage_bytes;
      const int64_t base = base_of(at), left = length_of(at) - base;
      fetch_operand<sizeof(T)>(kStagedRewards, at, to, base, left);
      if (given.values) fetch_operand<sizeof(T)>(kStagedValues, at, to, base, left);
      fetch_flags(p.terminated, p.terminated_is_bool, kStagedTerminated, at, to, base, left);
      fetch_flags(p.truncated, p.truncated_is_bool, kStagedTruncated, at, to, base, left);
      if (given.next) fetch_operand<sizeof(T)>(kStagedNext, at, to, base, left);
      if (given.rhos) fetch_operand<sizeof(T)>(kStagedRhos, at, to, base, left);
      if constexpr (kFull) {
        fetch_rate(p.gamma, kStagedGamma, at, to, base, left);
        fetch_rate(p.trace, kStagedTrace, at, to, base, left);
      }
    }
    commit_copies();
  }

  // Chunk c of the lane's steps of an operand whose elements are U.
  template <typename U>
  __device__ __forceinline__ Vector<U, 16 / sizeof(U)>& chunk(unsigned char* here, StagedTensor which, int c) const {
    constexpr int kBytes = kPer * sizeof(U);
    return *reinterpret_cast<Vector<U, 16 / sizeof(U)>*>(
        here + params.staged[which].slot + chunk_offset<kBytes>(lane * (kBytes / 16) + c));
  }
  __device__ __forceinline__ void read(unsigned char* here, StagedTensor which, int c, Acc (&to)[kVec]) const {
    unpack(whole(chunk<T>(here, which, c)), to);
  }
  // Bit i: the lane's step i.
  __device__ __forceinline__ uint32_t flags_of(
      const ReturnsInput& flags, bool is_bool, StagedTensor which, unsigned char* here) const {
    uint32_t bits = 0;
    if (!flags.data) return bits;
    if (!kFull || is_bool) {
      const uint32_t* const bytes = reinterpret_cast<const uint32_t*>(here + params.staged[which].slot + lane * kPer);
      const Vector<uint32_t, kPer / 4> words = *reinterpret_cast<const Vector<uint32_t, kPer / 4>*>(bytes);
#pragma unroll
      for (int w = 0; w < kPer / 4; ++w) bits |= flag_bits(words.get(w)) << 4 * w;
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        Acc set[kVec];
        read(here, which, c, set);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          if (set[j] != Acc(0)) bits |= 1u << (c * kVec + j);
      }
    }
    return bits;
  }

  // Discounts and ratios of a chunk's steps.
  struct Factors {
    Acc gamma[kVec], steps[kVec], trace[kVec], rho[kVec];  // steps: of gamma * trace, what is one a step
  };
  __device__ __forceinline__ void read_each(bool each, const ReturnsDiscount& discount, StagedTensor which, int c,
      Acc otherwise, const Index& at, unsigned char* here, int count, Acc (&to)[kVec]) const {
#pragma unroll
    for (int j = 0; j < kVec; ++j) to[j] = otherwise;
    if (!each) return;
    if (kPacked && discount.kind == GammaKind::kRow) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = c * kVec + j;
        const ReturnsInput& tensor = discount.tensor;
        if (lane * kPer + i < count)
          to[j] = discount_of_row<Acc>(
              tensor.data, discount.dtype, packed_row(at, i), p.inner, tensor.strides.outer, tensor.strides.inner);
      }
    } else if (sizeof(T) == 2 && discount.is_narrow()) {
      read(here, which, c, to);
    } else {
      // As wide as Acc: a chunk of half precision has two of these.
      constexpr int kWide = 16 / sizeof(Acc);
#pragma unroll
      for (int w = 0; w < kVec / kWide; ++w) {
        const Vector<Acc, kWide> part = whole(chunk<Acc>(here, which, c * (kVec / kWide) + w));
#pragma unroll
        for (int j = 0; j < kWide; ++j) to[w * kWide + j] = part.get(j);
      }
    }
  }
  __device__ __forceinline__ void read_factors(
      int c, const Index& at, unsigned char* here, int count, Factors& to) const {
    read_each(each_gamma, p.gamma, kStagedGamma, c, rates().gamma, at, here, count, to.gamma);
    read_each(each_trace, p.trace, kStagedTrace, c, rates().trace, at, here, count, to.trace);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      to.steps[j] = (each_gamma ? to.gamma[j] : Acc(1)) * (each_trace ? to.trace[j] : Acc(1));
      to.rho[j] = 1;
    }
    if (given.rhos) read(here, kStagedRhos, c, to.rho);
  }
};

}  // namespace dcs
