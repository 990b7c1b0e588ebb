// Rows of any length, cut anywhere: blocks that stay take tiles of the flat sequence (flat.cuh) in turn and leave each
// other the tiles' totals, as decoupled look-back does (Merrill and Garland, "Single-pass parallel prefix scan with
// decoupled look-back", NVIDIA NVR-2016-002), but two tiles before they are needed: a block finishes a tile only after
// the totals of the two next ones, so that it rarely waits.
//
// All blocks run at once (the launch is cooperative), or have a tile each and begin in the order of the tiles. A tile's
// total needs its own elements only, and a block publishes those of its next tiles before it waits for a carry; so
// every total that is waited for will come.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/carry/segment_words.cuh"
#include "scan/rows/apart_slice.cuh"
#include "scan/rows/lane_passes.cuh"

namespace dcs {

constexpr int kLongTurns = kLongAhead + 2;  // of what its warps leave each other

// Before the tiles.
template <typename Wide>
struct LongShared {
  Segment<Wide> totals[kLongTurns][kLongWarps];
  Wide carries[kLongTurns][kLongWarps];
  uint64_t full[kLongStages][kLongWarps], totals_ready[kLongTurns], carries_ready[kLongTurns];

  // By all threads. The launch before this one has ended behind it.
  __device__ __forceinline__ void begin(int load_arrivals, int rounds) {
    for (int i = threadIdx.x; i < kLongStages * kLongWarps; i += blockDim.x)
      mbarrier_init(&full[0][0] + i, load_arrivals);
    if (threadIdx.x < kLongTurns) {
      mbarrier_init(&totals_ready[threadIdx.x], kLongWarps);
      mbarrier_init(&carries_ready[threadIdx.x], kLongWarps);
    }
    mbarrier_fence_init();
    __syncthreads();
    if (rounds == 1) launch_dependents();  // blocks of more have work to do until all leave
    griddepcontrol_wait();
  }
};

// The same where the input's rows lie apart: also where the slices of the tiles have landed.
template <typename Wide>
struct ApartShared : LongShared<Wide> {
  RowLanding landings[kLongStages][kLongWarps];
};

// The warp that passes carries on: it publishes a tile's total as soon as it is known and then collects those that
// enter the block's tile before.
template <typename T, bool kStep, Direction kDirection>
struct CarryWarp {
  using Wide = typename Types<T>::Wide;
  using Words = SegmentWords<Wide, kStep>;
  const FlatParams& p;
  LongShared<Wide>& shared;
  const int lane = threadIdx.x % 32;
  uint64_t tag = 0;  // of this launch
  int64_t gamma_row = -1;
  Wide lane_weight = cast<Wide>(1.0), far_power = cast<Wide>(1.0), blocks_power = cast<Wide>(1.0);
  Wide carry = cast<Wide>(0.0);  // into the block's tile before

  // Powers of the row's gamma over so many tiles: this lane, 32, the blocks.
  __device__ __forceinline__ void set_row(int64_t row) {
    if (kStep || gamma_row == row || (gamma_row >= 0 && p.one_gamma)) return;
    gamma_row = row;
    const Wide tile_power = whole_power(gamma_of<kDirection, Wide>(p, row), static_cast<unsigned>(p.tile));
    lane_weight = whole_power(tile_power, lane);
    far_power = whole_power(tile_power, 32);
    blocks_power = whole_power(tile_power, gridDim.x);
  }

  // The tiles before one in its row that a carry is collected from: no more than there are blocks, for the block itself
  // knows what entered its tile before.
  struct Window {
    int count, each;  // of tiles, of a lane's
    bool from_own;
  };
  __device__ __forceinline__ Window window_of(const FlatPosition& position) const {
    Window window;
    const int64_t whole = gridDim.x * p.tile;
    const auto tile = static_cast<uint32_t>(p.tile);
    window.from_own = position.done > whole;
    window.count = window.from_own ? gridDim.x : (static_cast<uint32_t>(position.done) + tile - 1) / tile;
    if (position.row < 0) window.count = 0;  // the first tile, from before the first row on
    window.each = (window.count + 31) / 32;
    return window;
  }
  // The tile of a lane's segment, counted back from the nearest one: with products of gates, lanes take neighbors.
  __device__ __forceinline__ int distance(const Window& window, int j) const {
    if (kStep) return j < window.each ? lane * window.each + j : 32 * kLongReads;
    return lane + 32 * j;
  }
  // All that is missing in one trip.
  __device__ __forceinline__ void ask(
      int64_t tile, const Window& window, uint32_t missing, Words (&words)[kLongReads]) const {
    const Words* const nearest = static_cast<const Words*>(p.segments) + (tile - 1);
#pragma unroll
    for (int j = 0; j < kLongReads; ++j) words[j].load_if(missing >> j & 1, *(nearest - distance(window, j)));
  }

  // Segments of lanes, the first lane's the nearest, folded into the first lane's.
  template <typename Times>
  __device__ __forceinline__ Segment<Wide> fold_window(
      const Segment<Wide> (&segments)[kLongReads], const Window& window, const Times& times) const {
    Segment<Wide> sum = identity<Wide>();
    bool is_first = true;
#pragma unroll
    for (int j = kLongReads - 1; j >= 0; --j) {
      if (distance(window, j) >= window.count) continue;
      sum.total = is_first ? segments[j].total : fold(segments[j].total, segments[j].gates, sum.total);
      sum.gates = is_first ? segments[j].gates : times(segments[j].gates, sum.gates);
      is_first = false;
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const Wide farther = move_parts(sum.total, [&](auto part) { return __shfl_down_sync(0xffffffffu, part, d); });
      const Wide gates = move_parts(sum.gates, [&](auto part) { return __shfl_down_sync(0xffffffffu, part, d); });
      if (lane + d < 32 && distance(window, 0) + d * window.each < window.count) {
        sum.total = fold(sum.total, sum.gates, farther);
        sum.gates = times(sum.gates, gates);
      }
    }
    return sum;
  }

  // The totals of a window, folded in an order of its own; closed where no carry from before them enters.
  __device__ __forceinline__ Segment<Wide> collect(
      int64_t tile, Window window, uint32_t missing, Words (&words)[kLongReads]) const {
    Segment<Wide> segments[kLongReads];
#pragma unroll
    for (int j = 0; j < kLongReads; ++j) segments[j] = identity<Wide>();
    while (true) {
#pragma unroll
      for (int j = 0; j < kLongReads; ++j)
        if ((missing >> j & 1) && words[j].get(segments[j], tag)) missing &= ~(1u << j);
      if (!__any_sync(0xffffffffu, missing != 0)) break;
      ask(tile, window, missing, words);
    }
    // Nothing from before the nearest closed tile comes through.
    int nearest = window.count;
#pragma unroll
    for (int j = 0; j < kLongReads; ++j)
      if (segments[j].closed) nearest = min(nearest, distance(window, j));
    nearest = -__reduce_max_sync(0xffffffffu, -nearest);
    Segment<Wide> sum = identity<Wide>();
    sum.closed = nearest < window.count;
    if (sum.closed) window.count = nearest + 1;
    if constexpr (kStep) {
      bool small = false;
      if constexpr (std::is_same_v<Wide, double>) {
        small = true;
#pragma unroll
        for (int j = 0; j < kLongReads; ++j) small = small && fabs(segments[j].gates) <= 1.0;
      }
      const Segment<Wide> folded = __all_sync(0xffffffffu, small)
          ? fold_window(segments, window, [](Wide a, Wide b) { return a * b; })
          : fold_window(segments, window, [](Wide a, Wide b) { return clamped_mul(a, b); });
      sum.total = shuffle(folded.total, 0);
      sum.gates = shuffle(folded.gates, 0);
    } else {
#pragma unroll
      for (int j = kLongReads - 1; j >= 0; --j)
        if (distance(window, j) < window.count) sum.total = fold(segments[j].total, far_power, sum.total);
      sum.total = warp_sum(fold(cast<Wide>(0.0), lane_weight, sum.total));
      sum.gates = blocks_power;
    }
    return sum;
  }

  // The fold of the warps before the lane's in a tile, which is published.
  __device__ __forceinline__ Segment<Wide> publish(int round, int64_t tile) const {
    const int turn = round % kLongTurns;
    mbarrier_wait(&shared.totals_ready[turn], round / kLongTurns & 1);
    Segment<Wide> segment = lane < kLongWarps ? shared.totals[turn][lane] : identity<Wide>(), before = identity<Wide>();
    fold_segments_up<kLongWarps>(segment, lane);
    if (lane == kLongWarps - 1 && tile + 1 < p.tiles)
      const_cast<Words*>(static_cast<const Words*>(p.segments))[tile].publish(segment, tag);
    before.total = shuffle_up(segment.total, 1);
    before.gates = shuffle_up(segment.gates, 1);
    before.closed = __shfl_up_sync(0xffffffffu, static_cast<int>(segment.closed), 1);
    return lane == 0 ? identity<Wide>() : before;
  }

  __device__ __forceinline__ void run(int rounds) {
    const FlatPosition rows_apart = whole_rows(p, gridDim.x * p.tile);
    int64_t tile = blockIdx.x;
    FlatPosition position = locate(p, tile * p.tile);
    set_row(position.row);
    if (lane == 0) tag = tag_of_launch(p.tag);
    tag = __shfl_sync(0xffffffffu, tag, 0);
    Segment<Wide> entering = publish(0, tile);
    for (int round = 0; round < rounds; ++round) {
      // What is there already comes while the next tile's total does.
      const Window window = window_of(position);
      Words words[kLongReads]{};
      uint32_t missing = 0;
#pragma unroll
      for (int j = 0; j < kLongReads; ++j)
        if (distance(window, j) < window.count) missing |= 1u << j;
      ask(tile, window, missing, words);
      Segment<Wide> next = identity<Wide>();
      if (round + 1 < rounds) next = publish(round + 1, tile + gridDim.x);
      if (window.count > 0) {
        set_row(position.row);
        const Segment<Wide> sum = collect(tile, window, missing, words);
        carry = window.from_own && !sum.closed ? fold(sum.total, sum.gates, carry) : sum.total;
      } else {
        carry = cast<Wide>(0.0);
      }
      if (lane < kLongWarps) {
        shared.carries[round % kLongTurns][lane] = after(entering, carry);
        mbarrier_arrive(&shared.carries_ready[round % kLongTurns]);
      }
      entering = next;
      tile += gridDim.x;
      position = moved(p, position, rows_apart.done, rows_apart.row);
    }
  }
};

// A slice's part of gamma's gradient, as the partial of its number among those of a row: a slice has at most one start.
template <typename Passes>
__device__ __forceinline__ void store_slice_sums(
    const Passes& passes, const LaneCuts& at, const LaneSums<typename Passes::Acc>& sums) {
  using Wide = typename Passes::Wide;
  using Stored = typename Types<typename Passes::Element>::Acc;
  const FlatParams& p = passes.p;
  const ScanProblem& problem = p.problem;
  const int lane = passes.work.lane, elements = passes.work.elements();
  const uint64_t own = (uint64_t{1} << passes.own) - 1;
  const uint32_t all = __ballot_sync(0xffffffffu, (at.starts & own) != 0);
  const int start_lane = all ? __ffs(all) - 1 : 32;
  const Wide head = warp_sum(lane < start_lane ? cast<Wide>(sums.tail)
          : lane == start_lane                 ? cast<Wide>(sums.head)
                                               : cast<Wide>(0.0));
  const Wide tail = warp_sum(lane >= start_lane ? cast<Wide>(sums.tail) : cast<Wide>(0.0));
  const int64_t row = __shfl_sync(0xffffffffu, at.row, 0), slice = passes.work.first / elements;
  const bool starts_first = __shfl_sync(0xffffffffu, static_cast<int>(at.starts & 1), 0);
  const bool ends_last = __shfl_sync(0xffffffffu, static_cast<int>(at.starts >> passes.own & 1), 31);
  const auto store = [&](int64_t of_row, Wide sum, bool is_last) {
    if (of_row < 0 || of_row >= p.rows) return;
    Stored* const to = static_cast<Stored*>(problem.grad_gamma) +
        RowIndex(p, memory_row<Passes::kIn>(p, of_row)).offset(problem.grad_gamma_strides);
    const int64_t number = slice - (of_row * problem.length + p.phase) / elements;
    if (lane == 0) to[number] = cast<Stored>(sum);
    if (is_last)
      for (int64_t j = number + 1 + lane; j < problem.partials; j += 32) to[j] = cast<Stored>(cast<Wide>(0.0));
  };
  if (!starts_first) store(row, head, all != 0 || ends_last);
  if (all) store(row + 1, tail, ends_last);
}

// A warp's slices, one a round.
struct SliceCursor {
  int64_t first;          // index
  FlatPosition position;  // of the same
  int stage;
  uint32_t parity;

  // To the next round's, so many indices and rows on.
  __device__ __forceinline__ void advance(const FlatParams& p, int64_t indices, const FlatPosition& rows) {
    first += indices;
    position = moved(p, position, rows.done, rows.row);
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
};

// `kApart`: of one tensor that is not flat. An instance of its own, as that of flat ones has no registers for it: on an
// H200 these would take 1.01 of the time in the mean, 1.1 at worst.
template <typename T, bool kStep, bool kBackward, Direction kDirection, bool kApart = false>
__global__ void __launch_bounds__(32 * (kLongWarps + 1), 1) long_rows_kernel(const __grid_constant__ FlatParams p) {
  using Work = typename LongSlice<T, kStep, kBackward, kDirection, kApart>::type;
  using Passes = LanePasses<T, kStep, kBackward, kDirection, true>;
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  using Shared = std::conditional_t<kApart, ApartShared<Wide>, LongShared<Wide>>;
  extern __shared__ __align__(128) unsigned char flat_shared[];
  static_assert(sizeof(Shared) <= kLongSharedBytes);
  Shared& shared = *reinterpret_cast<Shared*>(flat_shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rounds = static_cast<int>((p.tiles - 1 - blockIdx.x) / gridDim.x) + 1;
  shared.begin(kApart ? 1 : load_arrivals(p), rounds);
  if (warp == kLongWarps) {
    CarryWarp<T, kStep, kDirection>{p, shared}.run(rounds);
    return;
  }

  // A block's tiles lie equally far apart. Rows are longer than slices, which the tensor's ends alone cut.
  const int64_t apart = gridDim.x * p.tile, first = blockIdx.x * p.tile + warp * Work::elements_of(p);
  const FlatPosition rows_apart = whole_rows(p, apart);
  SliceCursor loaded{first, {}, 0, 0}, now{first, locate(p, first), 0, 0}, old = now;
  const auto work_of = [&](const SliceCursor& at) {
    if constexpr (kApart)
      return Work::at(p, at.first, flat_shared + kLongSharedBytes, at.stage * kLongWarps + warp, *shared.landings);
    else
      return Work{InDirection<kDirection>(p), p, at.first, p.phase, p.count + p.phase,
          flat_shared + kLongSharedBytes + (at.stage * kLongWarps + warp) * Work::bytes_of(p)};
  };
  int requested = 0;
  [[maybe_unused]] ApartRounds coming;
  const auto request = [&] {
    if constexpr (kApart) coming.load(requested, rounds, work_of(loaded), apart, &shared.full[loaded.stage][warp]);
    else if (requested < rounds) work_of(loaded).load(&shared.full[loaded.stage][warp]);
    ++requested;
    loaded.advance(p, apart, rows_apart);
  };
  for (int i = 0; i < p.stages - kLongAhead - 1; ++i) request();
  const auto gamma_at = [&](int64_t row) { return kStep ? cast<Wide>(1.0) : gamma_of<kDirection, Wide>(p, row); };
  int64_t gamma_row = p.one_gamma ? -1 : now.position.row;  // that the warp's lanes have the gamma of
  Wide gamma = gamma_at(gamma_row);
  typename Passes::Powers powers = Passes{InDirection<kDirection>(p), work_of(now)}.powers_of(gamma);
  typename Passes::State states[kLongAhead + 1];
#pragma unroll 1
  for (int round = 0; round < rounds + kLongAhead; ++round) {
    if (round < rounds) {
      const Work work = work_of(now);
      const Passes passes{InDirection<kDirection>(p), work};
      const FlatPosition lane_position = moved(p, now.position, lane * passes.own);
      const typename Passes::Edges edges = passes.ask(
          [&] { return moved(p, now.position, -1); }, [&] { return moved(p, now.position, work.elements()); });
      if (!kStep && !p.one_gamma && __any_sync(0xffffffffu, lane_position.row != gamma_row)) {
        gamma = gamma_at(lane_position.row);
        powers = passes.powers_of(gamma);
        gamma_row = lane_position.row;
      }
      mbarrier_wait(&shared.full[now.stage][warp], now.parity);
      if constexpr (kApart) work.settle();
      LaneCuts cuts{now.position.row, 0, 0, 0};
      Pass pass = Pass::kPlain;
      if (p.problem.reset || passes.has_start(now.position)) {
        cuts = passes.find_cuts(lane_position, edges.reset_before);
        pass = passes.pass_of(cuts);
      }
      states[kLongAhead] = passes.prepare(edges, pass, gamma);
      RowNumbers<T> numbers{};
      if (pass == Pass::kGeneral) numbers = passes.ask_rows(cuts.row);
      const Segment<Wide> segment = passes.total(states[kLongAhead], cuts, numbers, [&] { return powers; });
      if (lane == 31) {
        shared.totals[round % kLongTurns][warp] = segment;
        mbarrier_arrive(&shared.totals_ready[round % kLongTurns]);
      }
      now.advance(p, apart, rows_apart);
    }
    if (lane == 0) wait_for_stores_to_read();
    __syncwarp();
    request();
    if (round >= kLongAhead) {
      const int turn = (round - kLongAhead) % kLongTurns;
      const Work work = work_of(old);
      const Passes passes{InDirection<kDirection>(p), work};
      const typename Passes::State& at = states[0];
      LaneCuts cuts{old.position.row, 0, 0, 0};
      if (at.pass != Pass::kPlain)
        cuts = passes.find_cuts(moved(p, old.position, lane * passes.own), at.edges.reset_before);
      RowNumbers<T> numbers{};
      if (at.pass == Pass::kGeneral) numbers = passes.ask_rows(cuts.row);
      mbarrier_wait(&shared.carries_ready[turn], (round - kLongAhead) / kLongTurns & 1);
      // Read by the lane that arrives with later totals, behind which the carry warp writes here again.
      const Wide carry = shuffle(lane == 31 ? shared.carries[turn][warp] : cast<Wide>(0.0), 31);
      const LaneSums<Acc> sums = passes.finish(at, cuts, numbers, carry, [](int64_t, Acc) {});
      work.store();
      if constexpr (kBackward && !kStep) store_slice_sums(passes, cuts, sums);
      old.advance(p, apart, rows_apart);
    }
#pragma unroll
    for (int i = 0; i < kLongAhead; ++i) states[i] = states[i + 1];
  }
  if (lane == 0) wait_for_stores_to_read();
}

}  // namespace dcs
