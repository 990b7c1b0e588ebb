// Rows of half precision that all blocks together hold on the chip: seven eighths in shared memory, the rest in
// registers, a shared gamma for all rows. A row is cut into parts of one block, and a block takes one part in each of
// up to four rounds. A round's totals are exchanged while the next rounds are on their way, so that nobody waits for a
// carry as long as any other work is left; no part takes the shared memory of another, so that loads never wait for
// stores. A block waits for blocks of lower index only, which have started before it: the launch needs no room for all
// of them. A warp has its own segment of each part: `kVectors` vectors a lane in shared memory, side by side and odd in
// number so that the lanes' reads meet in no bank, then one vector a lane in registers. Both are scanned twice, as in
// bulk_stream.cuh: for totals, and from the carry. Rounds stay in a loop and powers in tables, to keep the code short:
// it comes from memory, too, behind the rows.
#pragma once

#include "common/ptx/bulk_copy.cuh"
#include "scan/long_rows/bulk_stream_carries.cuh"
#include "common/vector.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

struct ResidentShape {
  static constexpr int kWarps = kResidentWarps, kVectors = kResidentVectors, kRounds = kResidentRounds;
  static constexpr int kAhead = 3;  // rounds whose totals are known before one is finished
  static constexpr int kOnTheirWay =
      2;  // rounds at once: more of them would only make everything else late that a block reads
  static constexpr int kChunk = 32 * kVectors;  // vectors of a warp and round in shared memory
  static constexpr int kSegment = kChunk + 32;  // and with those in registers
  static constexpr int kThreads = 32 * kWarps + 64;
  static constexpr int kWindow = kMostResidentParts / 32;
  static_assert(kWarps * kSegment == kResidentPart && kWarps * kRounds * kChunk * 16 == kResidentSharedBytes &&
      kVectors % 2 == 1 && (kWarps & (kWarps - 1)) == 0);
};

struct ResidentShared {
  using Shape = ResidentShape;
  // A warp's chunk has arrived; the totals of all warps, and their carries, are there.
  uint64_t full[Shape::kRounds][Shape::kWarps], totals_ready[Shape::kRounds], carries_ready[Shape::kRounds];
  double totals[Shape::kRounds][Shape::kWarps], carries[Shape::kRounds][Shape::kWarps];  // of a round's warps
  enum { kOfChunk, kOfVectors, kOfWarps, kOfParts, kTables };
  double powers[kTables][33];  // of gamma over 0 .. 32 lanes in shared memory, lanes in registers, warps, and parts
};

// All lanes' totals up to their own; powers[d] is what a shared gamma is over d of them.
template <int kLanes>
__device__ __forceinline__ double fold_lanes(double total, const double (&powers)[33], int lane) {
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) {
    const double other = shuffle_up(total, d);
    if (lane >= d) total = fold(total, powers[d], other);
  }
  return total;
}

// Where a block's part of a round is.
struct ResidentPart {
  uint32_t index, row, part;
  __device__ __forceinline__ ResidentPart(const StreamParams& params, int round)
      : index(blockIdx.x + round * gridDim.x) {
    row = index / params.tiles;
    part = index - row * params.tiles;
  }
  __device__ __forceinline__ bool exists(const StreamParams& params) const { return row < params.rows; }
};

// Two warps: one publishes the totals of the block's parts, the other collects those before them and leaves each warp
// its carry.
__device__ __forceinline__ void pass_totals_on(const StreamParams& params, ResidentShared& shared, bool publishes) {
  using Shape = ResidentShape;
  using Tables = ResidentShared;
  constexpr int kWarps = Shape::kWarps;
  const int lane = threadIdx.x % 32;
  Word* const words = static_cast<Word*>(params.statuses);
  const double warp_power = shared.powers[Tables::kOfWarps][lane], lane_weight = shared.powers[Tables::kOfParts][lane];
  const double far_power = shared.powers[Tables::kOfParts][32];
#pragma unroll 1
  for (int round = 0; round < Shape::kRounds; ++round) {
    const ResidentPart at(params, round);
    if (!at.exists(params)) break;
    mbarrier_wait(&shared.totals_ready[round], 0);
    const double total =
        fold_lanes<kWarps>(shared.totals[round][min(lane, kWarps - 1)], shared.powers[Tables::kOfWarps], lane);
    if (publishes) {
      if (lane == kWarps - 1 && at.part + 1 < params.tiles)
        store_word(words + at.index, __double_as_longlong(total), params.tag);
      continue;
    }
    const double before = at.part > 0
        ? collect_totals<Shape::kWindow>(words, params.tag, at.index, at.part, far_power, lane_weight)
        : 0.0;
    const double earlier = shuffle_up(total, 1);
    if (lane < kWarps) {
      shared.carries[round][lane] = lane == 0 ? before : fold(earlier, warp_power, before);
      mbarrier_arrive(&shared.carries_ready[round]);  // each for what it wrote
    }
  }
  if (!publishes && params.replayed) wipe_marks(params, words, static_cast<int64_t>(params.rows) * params.tiles);
}

// One gamma for all rows, which are of whole vectors.
template <typename T, bool kBackward, bool kReverse>
__global__ void __launch_bounds__(ResidentShape::kThreads, 1)
    resident_rows_kernel(const __grid_constant__ StreamParams params) {
#if DCS_HAS_BULK_COPIES
  using Shape = ResidentShape;
  using Tables = ResidentShared;
  constexpr int kVec = 16 / sizeof(T), kWarps = Shape::kWarps, kVectors = Shape::kVectors, kChunk = Shape::kChunk,
                kRounds = Shape::kRounds;
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  extern __shared__ __align__(128) unsigned char resident_bytes[];
  __shared__ ResidentShared shared;
  static_assert(sizeof(shared) <= kStaticBytes);
  const auto chunk_of = [&](int round) {
    return reinterpret_cast<Chunk*>(resident_bytes) + (round * kWarps + warp) * kChunk;
  };

  // A warp's segment in vectors of a row's memory; what lies outside the row comes after its last step, and enters
  // nothing.
  const int64_t vectors = p.length / kVec;
  const auto segment_at = [&](const ResidentPart& at) {
    const int64_t first = static_cast<int64_t>(at.part) * kResidentPart + warp * Shape::kSegment;
    return kReverse ? vectors - first - Shape::kSegment : first;
  };
  constexpr int kChunkAt = kReverse ? 32 : 0, kLooseAt = kReverse ? 0 : kChunk;
  const auto address = [&](auto* tensor, const Strides& strides, const ResidentPart& at) {
    return tensor + row_offset(at.row, p.inner, strides) / kVec;
  };
  const auto* const input = static_cast<const Chunk*>(p.input);
  auto* const output = static_cast<Chunk*>(p.output);
  // The vectors from `first` on, kChunk of them, that are the row's.
  const auto clip = [&](int64_t first, const auto& move) {
    const int64_t begin = max(first, int64_t{0}), end = min(first + kChunk, vectors);
    if (end > begin) move(begin, static_cast<int>(begin - first), static_cast<int>(end - begin) * 16);
  };
  const auto load_round = [&](int round) {  // by one lane
    const ResidentPart at(params, round);
    if (round >= kRounds || !at.exists(params)) return;
    uint64_t* const full = &shared.full[round][warp];
    const int64_t first = segment_at(at) + kChunkAt;
    int bytes = 0;
    clip(first, [&](int64_t, int, int of) { bytes = of; });
    mbarrier_arrive_expect_tx(full, bytes);
    clip(first, [&](int64_t begin, int skipped, int of) {
      bulk_load_once(chunk_of(round) + skipped, address(input, p.input_strides, at) + begin, of, full);
    });
  };
  Chunk loose[kRounds]{};
  if (warp < kWarps) {
    // These first: a round that waits for its registers would wait for all rounds', as they are picked among.
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const ResidentPart at(params, round);
      const int64_t vector = segment_at(at) + kLooseAt + lane;
      if (at.exists(params) && vector >= 0 && vector < vectors)
        loose[round] = load_once(address(input, p.input_strides, at) + vector);
    }
    if (lane == 0) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) mbarrier_init(&shared.full[round][warp], 1);
      mbarrier_fence_init();
#pragma unroll 1
      for (int round = 0; round < Shape::kOnTheirWay; ++round) load_round(round);
    }
  }
  if (threadIdx.x == 32 * kWarps) {
    for (int round = 0; round < kRounds; ++round) {
      mbarrier_init(&shared.totals_ready[round], kWarps);
      mbarrier_init(&shared.carries_ready[round], kWarps);
    }
    mbarrier_fence_init();
  }
  const double gamma = gamma_of_row(p, 0);
  if (threadIdx.x < Tables::kTables * 33) {
    const int table = threadIdx.x / 33, count = threadIdx.x % 33;
    const int each = table == Tables::kOfChunk ? kVectors
        : table == Tables::kOfVectors          ? 1
        : table == Tables::kOfWarps            ? Shape::kSegment
                                               : kResidentPart;
    shared.powers[table][count] = whole_power(gamma, static_cast<unsigned>(count * each * kVec));
  }
  __syncthreads();
  if (warp >= kWarps) {
    pass_totals_on(params, shared, warp == kWarps);
    return;
  }

  const Gate<float, sizeof(T) == 2> gate = make_gate<float, sizeof(T) == 2>(gamma);
  const int own = kReverse ? kChunk - 1 - lane * kVectors : lane * kVectors, lane_order = kReverse ? 31 - lane : lane;
  const auto at_k = [&](int k) { return kReverse ? own - k : own + k; };
  const auto& chunk_powers = shared.powers[Tables::kOfChunk];
  const auto& vector_powers = shared.powers[Tables::kOfVectors];
  // What a round leaves for later. Rounds are not unrolled, so they are picked one by one.
  double totals[kRounds], loose_totals[kRounds];
  const auto pick = [](const auto& of, int round) {
    auto value = of[0];
#pragma unroll
    for (int i = 1; i < kRounds; ++i)
      if (i == round) value = of[i];
    return value;
  };
  const auto set = [](auto& of, int round, const auto& value) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (i == round) of[i] = value;
  };
  // Registers are in the order of memory, totals in that of the scan: the lane that holds what follows is another.
  const auto turned = [](auto value, int to) { return kReverse ? shuffle(value, to) : value; };

  const auto prepare = [&](int round) {
    const Chunk* const here = chunk_of(round);
    mbarrier_wait(&shared.full[round][warp], 0);
    if (lane == 0) load_round(round + Shape::kOnTheirWay);
    __syncwarp();
    float y = 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kVec];
      unpack_in_order<kReverse>(here[at_k(k)], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y = k == 0 && i == 0 ? values[i] : gate.step(values[i], y);
    }
    const double total = fold_lanes<32>(y, chunk_powers, lane);
    float values[kVec];
    unpack_in_order<kReverse>(pick(loose, round), values);
    float z = values[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) z = gate.step(values[i], z);
    const double loose_total = fold_lanes<32>(turned(z, lane_order), vector_powers, lane);
    set(totals, round, total);
    set(loose_totals, round, loose_total);
    if (lane == 31) {
      shared.totals[round][warp] = fold(loose_total, vector_powers[32], total);
      mbarrier_arrive(&shared.totals_ready[round]);
    }
  };

  const auto finish = [&](int round) {
    const ResidentPart at(params, round);
    Chunk* const here = chunk_of(round);
    const double total = pick(totals, round), loose_total = pick(loose_totals, round);
    const double before = shuffle_up(total, 1), loose_before = shuffle_up(loose_total, 1);
    const int64_t first = segment_at(at), loose_at = first + kLooseAt + lane;
    const auto inside = [&](int64_t vector) { return vector >= 0 && vector < vectors; };
    Chunk near[kBackward ? kVectors : 1]{}, loose_near{};
    if constexpr (kBackward) {  // on their way while a carry is
      const auto* const saved = address(static_cast<const Chunk*>(p.saved), p.saved_strides, at);
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        if (inside(first + kChunkAt + at_k(k))) near[k] = saved[first + kChunkAt + at_k(k)];
      if (inside(loose_at)) loose_near = saved[loose_at];
    }
    mbarrier_wait(&shared.carries_ready[round], 0);
    const double carry = shared.carries[round][warp];
    const bool starts = at.part == 0 && threadIdx.x == 0;  // no carry enters the row's first step
    float sum = 0.f;
    // The steps of a vector from the output before them; gamma's gradient is the sum of output times saved one step on.
    const auto go_through = [&](Chunk chunk, const Chunk& beside, bool counts, bool from_start, float& y) {
      float values[kVec], others[kVec];
      unpack_in_order<kReverse>(chunk, values);
      if constexpr (kBackward) unpack_in_order<kReverse>(beside, others);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const bool is_first = i == 0 && from_start;
        if constexpr (kBackward)
          if (counts && !is_first) sum = fmaf(y, others[i], sum);
        values[i] = y = is_first ? values[i] : gate.step(values[i], y);
      }
      return pack_in_order<kReverse, T>(values);
    };
    float y = static_cast<float>(fold(lane == 0 ? 0.0 : before, chunk_powers[lane], carry));
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      here[at_k(k)] =
          go_through(here[at_k(k)], near[kBackward ? k : 0], inside(first + kChunkAt + at_k(k)), k == 0 && starts, y);
    show_to_bulk_stores();
    __syncwarp();
    Chunk* const row = address(output, p.output_strides, at);
    if (lane == 0) {
      clip(first + kChunkAt,
          [&](int64_t begin, int skipped, int bytes) { bulk_store(row + begin, here + skipped, bytes); });
      commit_stores();
    }
    const double into = fold(shuffle(total, 31), chunk_powers[32], carry);  // the carry into the vectors in registers
    float z = turned(static_cast<float>(fold(lane == 0 ? 0.0 : loose_before, vector_powers[lane], into)), lane_order);
    const Chunk result = go_through(pick(loose, round), loose_near, inside(loose_at), false, z);
    if (inside(loose_at)) row[loose_at] = result;
    if constexpr (kBackward) {
      sum = warp_sum(sum);
      float* const partials = static_cast<float*>(p.grad_gamma) + row_offset(at.row, p.inner, p.grad_gamma_strides);
      if (lane == 0) partials[at.part * kWarps + warp] = sum;
      if (at.part == 0)
        for (int64_t j = params.tiles * kWarps + threadIdx.x; j < p.partials; j += 32 * kWarps) partials[j] = 0.f;
    }
  };

  int rounds = 0;
  while (rounds < kRounds && ResidentPart(params, rounds).exists(params)) ++rounds;
#pragma unroll 1
  for (int i = 0; i < rounds + Shape::kAhead; ++i) {
    if (i < rounds) prepare(i);
    if (i >= Shape::kAhead) finish(i - Shape::kAhead);
  }
  if (lane == 0) wait_for_stores();
#endif
}

}  // namespace dcs
