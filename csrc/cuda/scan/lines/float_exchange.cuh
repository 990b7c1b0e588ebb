// What warps and blocks along time leave each other in float_lines.cuh. Blocks of a cluster leave a message a column in
// each other's shared memory, with the weight that it has in what enters the receiver; those that are no cluster a word
// a column in global memory, of which each block weighs those of all before it. Such a block waits for earlier blocks
// alone, which publish before they wait: none waits without end.
#pragma once

#include "common/ptx/cluster.cuh"
#include "common/ptx/latency.cuh"
#include "dcs/scan/plan/tuning.h"
#include "scan/carry/segment_words.cuh"
#include "scan/lines/float_powers.cuh"
#include "scan/lines/place.cuh"

namespace dcs {

// Gamma's powers: over steps; over 1, 2, 4, ... slots, warps and blocks, whose exponents are even.
struct FloatPowers {
  Gate<float> gate;
  float steps[4 * kSmallBatch], slots[kSmallLevels], warps[4];
  double of_slots[kSmallLevels], of_warps[kSmallLevels + 1], of_blocks[8];
  double least;  // of such a power
};

struct FloatLinesParams : SmallLinesParams {
  bool shifts;  // threads of a row begin where words do
  FloatPowers powers;
};

// Of a thread's steps, 32 >> span_bits slots of a warp and a block's warps.
inline void fill_float_powers(FloatPowers& powers, double gamma, int steps, int span_bits, int warps) {
  const auto times = [&](double a, double b) { return product_of_powers(gamma, a, b); };
  powers.gate = split_gamma(gamma);
  powers.least = gamma == 0.0 ? 0.0 : kLeastPower;
  double power = 1.0;
  for (int i = 0; i < steps; ++i) power = times(power, gamma), powers.steps[i] = rounded(power);
  const auto double_up = [&](int count, double* each) {
    for (int i = 0; i < count; ++i) each[i] = power, power = times(power, power);
  };
  double_up(kSmallLevels - span_bits, powers.of_slots);
  double_up(kSmallLevels + 1, powers.of_warps);
  for (int i = 0; i < kSmallLevels; ++i) powers.slots[i] = rounded(powers.of_slots[i]);
  for (int i = 0; i < 4; ++i) powers.warps[i] = rounded(powers.of_warps[i]);
  power = 1.0;
  for (int i = 0; i <= kSmallLevels; ++i)
    if (warps >> i & 1) power = times(power, powers.of_warps[i]);
  double_up(8, powers.of_blocks);
}

struct FloatPlace : SmallPlaceOf<FloatLinesParams> {
  using SmallPlaceOf::SmallPlaceOf;

  // What something so far back counts for; `most` distances, as in all threads.
  template <int kCount>
  __device__ __forceinline__ double weight_of(int distance, int most, const double (&powers)[kCount]) const {
    double weight = 1.0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (1 << i >= most) break;
      if (distance >> i & 1) weight = fmax(weight * powers[i], p.powers.least);
    }
    return weight;
  }
};

// Of a block's warps, the last one first. Each warp reads as many as there can be before it, some at a time, of which
// those that are not are 0.
struct alignas(16) FloatTotals {
  static constexpr int kTogether = 8;
  float of_warps[2 * kSmallBlockWarps][kSmallSpan];

  __device__ __forceinline__ void init(int warps) {
    constexpr int kFloats = sizeof(float4) / sizeof(float);
    float4* const vectors = reinterpret_cast<float4*>(&of_warps[0][0]);
    const int count = 2 * ((warps + kTogether - 1) & -kTogether) * kSmallSpan / kFloats;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) vectors[i] = float4{};
  }
  // What comes of the warps before one, in turn `own`; before all, -1, is the block's total.
  __device__ __forceinline__ float before(const FloatPlace& at, int own, int column) const {
    float entering = 0.f;
#pragma unroll 1
    for (int from = (at.warps - 1) & -kTogether; from >= 0; from -= kTogether) {
      float values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) values[i] = of_warps[own + from + kTogether - i][column];
      entering = fmaf(at.p.powers.warps[3], entering, weighed<kTogether>(values, at.p.powers.warps));
    }
    return entering;
  }
};

// In a cluster.
struct FloatMessages {
  static constexpr bool kCluster = true;
  struct alignas(16) Shared {
    static constexpr int kPitch = kMaxCluster + 4;  // of 16 bytes each, which neighboring columns have in other banks
    float messages[kSmallSpan][kPitch];             // of the earlier blocks
    uint64_t arrivals;
  };
  const FloatPlace& at;
  Shared& shared;
  const int blocks = static_cast<int>(at.p.cluster.divisor), columns = 1 << at.p.span_bits;
  int destination = 0, column = 0;    // the block and the column of the thread's first message
  float weight = 0.f, further = 0.f;  // in what enters that block; the same for the next message

  __device__ __forceinline__ FloatMessages(const FloatPlace& place, Shared& with) : at(place), shared(with) {}
  // By all threads, a barrier between the two, before memory may be read.
  __device__ __forceinline__ void init() const {
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int kFloats = sizeof(float4) / sizeof(float);
    float4* const vectors = reinterpret_cast<float4*>(&shared.messages[0][0]);
    for (int i = thread; i < columns * Shared::kPitch / kFloats; i += static_cast<int>(blockDim.x))
      vectors[i] = float4{};
    if (thread == 0) init_transaction_barrier(&shared.arrivals, at.rank * columns * static_cast<int>(sizeof(float)));
  }
  __device__ __forceinline__ void begin() {
    const int thread = static_cast<int>(threadIdx.x), together = static_cast<int>(blockDim.x) >> at.p.span_bits;
    arrive_in_cluster();
    column = thread & (columns - 1);
    destination = at.rank + 1 + (thread >> at.p.span_bits);
    weight = rounded(at.weight_of(destination - at.rank - 1, blocks, at.p.powers.of_blocks));
    further = rounded(at.weight_of(together, blocks, at.p.powers.of_blocks));
    hold(destination);
    hold(column);
    keep(weight);
    keep(further);
    wait_for_cluster();
  }
  // `total`: the block's, of a column.
  template <typename Total>
  __device__ __forceinline__ void send(const Total& total) const {
    if (destination >= blocks) return;
    float message = total(column) * weight;
    for (int to = destination; to < blocks; to += static_cast<int>(blockDim.x) >> at.p.span_bits) {
      store_async_in_cluster(&shared.messages[column][at.rank], &shared.arrivals, static_cast<uint32_t>(to), message);
      message *= further;
    }
  }
  __device__ __forceinline__ float entering() const {
    mbarrier_wait(&shared.arrivals, 0);
    float values[kMaxCluster];
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) values[i] = shared.messages[at.span_column][i];
    return sum_of<kMaxCluster>(values);
  }
};

// In global memory.
struct FloatWords {
  static constexpr bool kCluster = false;
  struct Shared {
    float entering[kSmallSpan];
    uint64_t tag;
  };
  using Words = SegmentWords<double, false>;
  static constexpr int kReads = kMostSmallSharers / 32;  // of a lane
  const FloatPlace& at;
  Shared& shared;
  const int blocks = static_cast<int>(at.p.cluster.divisor);
  float weights[kReads];  // of the words that a lane reads

  __device__ __forceinline__ FloatWords(const FloatPlace& place, Shared& with) : at(place), shared(with) {}
  __device__ __forceinline__ void init() const {}
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      weights[i] = rounded(at.weight_of(max(at.rank - 1 - 32 * i - at.lane, 0), blocks, at.p.powers.of_blocks));
      keep(weights[i]);
    }
  }
  __device__ __forceinline__ void find_tag() const {
    if (threadIdx.x == 0) shared.tag = tag_of_launch(at.p.tag);
  }
  template <typename Total>
  __device__ __forceinline__ void send(const Total& total) const {
    const int column = static_cast<int>(threadIdx.x);
    if (column < at.width && at.rank + 1 < blocks)
      words_of_column<Words>(at, column)[at.rank].publish({total(column), 1.0, false}, shared.tag);
  }
  __device__ __forceinline__ float entering() const {
    if (at.rank == 0) return 0.f;
#pragma unroll 1
    for (int column = at.warp; column < at.width; column += at.warps) {
      const Words* const words = words_of_column<Words>(at, column) + at.lane;
      uint32_t wanted = 0;
#pragma unroll
      for (int i = 0; i < kReads; ++i) wanted |= (32 * i + at.lane < at.rank ? 1u : 0u) << i;
      Segment<double> read[kReads];
      float sum = 0.f;
      read_segments(words, 32, wanted, shared.tag, read);
#pragma unroll
      for (int i = 0; i < kReads; ++i)
        if (32 * i + at.lane < at.rank) sum = fmaf(weights[i], static_cast<float>(read[i].total), sum);
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (at.lane == 0) shared.entering[column] = sum;
    }
    __syncthreads();
    return shared.entering[min(at.span_column, at.width - 1)];
  }
};

}  // namespace dcs
