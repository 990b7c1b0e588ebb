// Scans along a strided time with too few columns to give each warp its own (warp_columns.cuh): a block takes 32
// columns, and its warps, or halves of them, take segments of 32 steps side by side. A warp leaves its segments'
// totals in shared memory, waits for its own group of warps and those before it alone, folds their totals, and writes:
// the first results leave while later steps still arrive. Where all blocks read at once, the warps of earlier steps ask
// first. Half precision is read by whole lines of memory, half of which a neighboring block wants.
#pragma once

#include <type_traits>

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/named_barrier.cuh"
#include "dcs/scan/plan/kernel_plans.h"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

struct SplitColumnsParams {
  ScanProblem problem;
  int64_t blocks;  // of an outer index
  bool in_turn;    // the warps ask for their first steps
};

// Cycles between the requests of one four warps for their first steps, 16 KB a tensor, and those of the next.
constexpr unsigned kSplitPace = 200;

// Warps of a group, which are four segments; the number of its barrier is its index, counted from 1.
template <typename T>
constexpr int kSplitGroup = sizeof(T);
// Blocks of no more warps wait as a whole: a kernel with named barriers would leave four of them side by side
// (ptx/named_barrier.cuh), where registers and shared memory hold more. Of larger blocks they hold four or, of the
// smallest, five to seven.
template <typename T>
constexpr int kSplitWholeBlock = 2 * kSplitGroup<T>;

template <typename T, bool kBackward, bool kReverse, bool kWholeBlock>
__global__ void __launch_bounds__(sizeof(T) == 2 ? 512 : 1024)
    split_columns_kernel(const __grid_constant__ SplitColumnsParams params) {
  constexpr int kSize = sizeof(T), kColumns = 4 / kSize, kLanes = 32 / kColumns, kTogether = kColumns,
                kCount = kSplitSteps;  // kTogether: segments of a warp
  constexpr int kRowBytes = kSplitBlockColumns * kSize, kChunks = kRowBytes / 16, kEvery = 32 / kChunks,
                kRows = kTogether * kCount;
  constexpr bool kShort = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kGroup = kSplitGroup<T>;
  static_assert(kSplitSegments / kTogether / kGroup < kNamedBarriers);
  constexpr bool kInRegisters = kSize == 2 && !kBackward;  // in registers between the two readings, so that the next
                                                           // round can be on its way; floats would take too many
  using Word = Vector<T, kColumns>;
  const ScanProblem& p = params.problem;
  overlap_launches();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int sub = lane % kLanes, segment = warp * kTogether + lane / kLanes, segments = warps * kTogether;
  // Totals of this round and of the one before, then each warp's steps.
  extern __shared__ __align__(16) unsigned char split_shared[];
  double* const all_totals = reinterpret_cast<double*>(split_shared) + sub * kColumns;
  unsigned char* const here = split_shared + 2 * segments * kSplitBlockColumns * 8 + warp * kRows * kRowBytes;

  unsigned char* const saved_here = here + warps * kRows * kRowBytes;  // the saved output, one step on
  const unsigned char* const own_steps = here + lane / kLanes * kCount * kRowBytes + sub * kColumns * kSize;
  const int64_t outer = params.blocks == 1 ? blockIdx.x : blockIdx.x / static_cast<uint32_t>(params.blocks);
  const int64_t first_column = (blockIdx.x - outer * params.blocks) * kSplitBlockColumns;
  const int columns = static_cast<int>(min(p.inner - first_column, static_cast<int64_t>(kSplitBlockColumns)));
  const bool inside = sub * kColumns < columns;
  const int64_t length = p.length;
  const auto step_of = [&](const Strides& strides) { return kReverse ? -strides.time : strides.time; };
  // A tensor at the scan's first step of these columns.
  const auto at_start = [&](auto* pointer, const Strides& strides) {
    return pointer + (strides.at(outer, kReverse ? length - 1 : 0, 0) + first_column);
  };

  const int own_row = lane / kChunks, chunk = lane % kChunks;
  const bool exists = chunk * 16 < columns * kSize;
  const T* const input = at_start(static_cast<const T*>(p.input), p.input_strides);
  const int64_t input_step = step_of(p.input_strides);
  const auto load = [&](unsigned char* to, const T* tensor, int64_t step, int64_t first) {
    const char* from = reinterpret_cast<const char*>(tensor + first * step) + chunk * 16;
#pragma unroll
    for (int r = 0; r < kRows; r += kEvery) {
      copy_async < 16,
          kRowBytes<128>(to + (r + own_row) * kRowBytes + chunk * 16, from, exists && first + r < length ? 16 : 0);
      from += kEvery * step * kSize;
    }
  };
  const T* saved = nullptr;
  if constexpr (kBackward) saved = at_start(static_cast<const T*>(p.saved), p.saved_strides);
  const auto fetch = [&](int64_t round) {
    const int64_t first = (round * warps + warp) * kRows + own_row;
    load(here, input, input_step, first);
    if constexpr (kBackward) load(saved_here, saved, step_of(p.saved_strides), first + 1);
    commit_copies();
  };
  if (!kWholeBlock && params.in_turn) {
    const auto now = [] { return static_cast<unsigned>(clock()); };
    const unsigned start = now();
    while (now() - start < warp / 4 * kSplitPace) {
    }
  }
  fetch(0);
  // Behind the copies: a division of 64 bits, its code not in the cache, delayed them by 900 cycles.
  const int64_t rounds = (length + segments * kCount - 1) / (segments * kCount);
  Gate<float, kShort> gate[kColumns];
  double power[kColumns], into[kColumns];  // gamma's over a segment; the carry into the round
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    double gamma = p.gamma_value;
    if (p.gamma_kind == GammaKind::kRow && inside)
      gamma = load_gamma<double>(
          p.gamma, p.gamma_dtype, p.gamma_strides.at(outer, first_column + sub * kColumns + c), false);
    gate[c] = make_gate<float, kShort>(gamma);
    power[c] = power_of<kCount>(gamma);
    into[c] = 0.0;
  }
  // This warp has left its totals; those of its group and of the groups before it are there.
  const auto exchange_totals = [&] {
    if constexpr (kWholeBlock) {
      __syncthreads();
    } else {
      const int group = warp / kGroup + 1;
      for (int later = group + 1; later <= (warps - 1) / kGroup + 1; ++later)
        arrive_at(later, min(later * kGroup, warps) * 32);
      wait_at(group, min(group * kGroup, warps) * 32);
    }
  };
  T* const output = at_start(static_cast<T*>(p.output), p.output_strides) + sub * kColumns;
  const int64_t output_step = step_of(p.output_strides);
  double sums[kColumns] = {};

  for (int64_t round = 0; round < rounds; ++round) {
    wait_for_copies<0>();
    __syncwarp();
    Word x[kInRegisters ? kCount : 1];
    const auto read = [&](int i) { return *reinterpret_cast<const Word*>(own_steps + i * kRowBytes); };
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = read(i);
      __syncwarp();
      if (round + 1 < rounds) fetch(round + 1);
    }

    float y[kColumns];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kColumns];
      unpack(kInRegisters ? x[kInRegisters ? i : 0] : read(i), values);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y[c] = i == 0 ? values[c] : gate[c].step(values[c], y[c]);
    }
    double* const totals = all_totals + (round & 1) * segments * kSplitBlockColumns;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) totals[segment * kSplitBlockColumns + c] = y[c];
    exchange_totals();

    // The first segment of all has no carry that a gamma which is no number could meet.
    double carry[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) carry[c] = into[c];
    const auto take_in = [&](int s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const double total = totals[s * kSplitBlockColumns + c];
        carry[c] = round == 0 && s == 0 ? total : fold(total, power[c], carry[c]);
      }
    };
#pragma unroll 8
    for (int s = 0; s < warp * kTogether; ++s) take_in(s);
    if (kTogether == 2 && lane >= kLanes) take_in(segment - 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] = static_cast<float>(carry[c]);
    float lost =
        0.f;  // what rounding takes from a float's carry and from its steps goes along, as in block_columns.cuh
    if constexpr (kSize == 4) lost = lost_in(carry[0], y[0]);

    const int64_t first = (round * segments + segment) * kCount;
    const int count = inside ? static_cast<int>(max(int64_t{0}, min(length - first, static_cast<int64_t>(kCount)))) : 0;
    T* to = output + first * output_step;
    if constexpr (kInRegisters) {
      // Half precision stays packed between the two readings: as floats they would take twice the registers.
#pragma unroll
      for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i].words[0]));
    }
    float sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kColumns];
      unpack(kInRegisters ? x[kInRegisters ? i : 0] : read(i), values);
      const bool starts = i == 0 && first == 0;
      if constexpr (kSize == 4) {
        const float next = careful_step(fmaf(gate[0].rest, y[0], values[0]), gate[0].value, y[0], lost);
        if (starts) lost = 0.f;
        values[0] = y[0] = starts ? values[0] : next;
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) values[c] = y[c] = starts ? values[c] : gate[c].step(values[c], y[c]);
      }
      const Word result = pack<float, T, kColumns>(values);
      if (i < count) *reinterpret_cast<Word*>(to) = result;
      to += output_step;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)], which is 0 beyond the end.
        float rounded[kColumns], after[kColumns];
        unpack(result, rounded);
        unpack(*reinterpret_cast<const Word*>(saved_here + (own_steps - here) + i * kRowBytes), after);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] = i < count ? fmaf(rounded[c], after[c], sum[c]) : sum[c];
      }
    }
    if constexpr (kBackward) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] += sum[c];
    }
    if (round + 1 < rounds) {
      if constexpr (!kInRegisters) {
        __syncwarp();
        fetch(round + 1);
      }
      // All totals are there. They are written over two rounds later, behind the next such barrier.
      __syncthreads();
      for (int s = segment; s < segments; ++s) take_in(s);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) into[c] = carry[c];
    }
  }
  if constexpr (kBackward) {
    // Those of a column's segments one after the other.
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) all_totals[segment * kSplitBlockColumns + c] = sums[c];
    __syncthreads();
    const int c = threadIdx.x;
    if (c < columns) {
      double whole = 0.0;
      for (int s = 0; s < segments; ++s)
        whole += reinterpret_cast<const double*>(split_shared)[s * kSplitBlockColumns + c];
      float* const to = static_cast<float*>(p.grad_gamma) + p.grad_gamma_strides.at(outer, first_column + c);
      to[0] = static_cast<float>(whole);
      for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
    }
  }
}

}  // namespace dcs
