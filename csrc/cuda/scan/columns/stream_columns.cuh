// Long scans along a strided time over few columns, of a shared gamma, by blocks that stay: each takes tiles, some
// steps of all columns, in turn. A tile is one contiguous range of memory, whatever its alignment, and comes and goes
// by bulk copies while others are scanned. Tiles' totals are left for the other blocks as decoupled look-back does
// (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", NVIDIA NVR-2016-002), but a tile
// before they are needed.
//
// The blocks that share an outer row's columns take its tiles in turn, and all blocks run at once (the launch is
// cooperative). A tile's total needs its own elements only. A block publishes it before it waits for what enters that
// tile, and waits for totals of earlier tiles alone: the first tile waits for none, so none waits without end.
#pragma once

#include "scan/columns/stream_carries.cuh"

namespace dcs {

// A thread that scans: its part of every tile, of one column.
template <typename T>
struct StreamScan {
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kBatch = 8;
  using Cell = Vector<T, 1>;

  const StreamTile<T>& tiles;
  StreamShared<Wide>& shared;
  const ScanProblem& p = tiles.p;
  const StreamColumnsPlan& t = tiles.t;
  int part, column;
  bool works;
  Wide gamma, over_parts;
  Gate<float, kShort> gate;

  __device__ __forceinline__ StreamScan(
      const StreamColumnsParams& params, const StreamTile<T>& of, StreamShared<Wide>& with)
      : tiles(of), shared(with) {
    part = static_cast<int>(threadIdx.x) / static_cast<int>(p.inner);
    column = static_cast<int>(threadIdx.x) - part * static_cast<int>(p.inner);
    works = part < t.parts;
    // One for all, or the block has one outer row.
    gamma = ColumnValues<T, false>::gamma_of(p, {StreamCursor(t).outer, min(column, static_cast<int>(p.inner) - 1)}, 0);
    over_parts = whole_power(params.over_part_of(gamma), static_cast<unsigned>(part));
    if constexpr (kHalf) gate = make_gate<float, kShort>(gamma);
  }

  __device__ __forceinline__ Sum advanced(const Cell& cell, Sum y) const {
    Sum value[1];
    values_of(cell, value);
    if constexpr (kHalf) return gate.step(value[0], y);
    else return fold(value[0], gamma, y);
  }
  __device__ __forceinline__ int steps_of_part(int steps) const {
    return works ? max(0, min(t.part_steps, steps - part * t.part_steps)) : 0;
  }
  // The thread's first step in a tile of so many, whose steps are so many bytes apart.
  template <typename Byte>
  __device__ __forceinline__ Byte* first_of(Byte* tile, int steps, int pitch) const {
    const int step = part * t.part_steps, row = p.reverse ? steps - 1 - step : step;
    return tile + row * pitch + column * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ int input_pitch() const {
    return static_cast<int>(p.input_strides.time) * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ int output_pitch() const {
    return static_cast<int>(p.inner) * static_cast<int>(sizeof(T));
  }

  // visit(y after each of `count` steps from `y` on), loads before the first use.
  template <typename Visit>
  __device__ __forceinline__ Sum scan(
      const unsigned char* from, int apart, int count, Sum y, const Visit& visit) const {
    int done = 0;
#pragma unroll 1
    for (; done + kBatch <= count; done += kBatch) {
      Cell cells[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        cells[i] = *reinterpret_cast<const Cell*>(from);
        from += apart;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        y = advanced(cells[i], y);
        visit(y);
      }
    }
#pragma unroll 1
    for (; done < count; ++done) {
      y = advanced(*reinterpret_cast<const Cell*>(from), y);
      from += apart;
      visit(y);
    }
    return y;
  }

  __device__ __forceinline__ void add_up(const StreamCursor& at) const {
    const int steps = tiles.steps_of(at.tile), count = steps_of_part(steps), pitch = input_pitch(),
              apart = p.reverse ? -pitch : pitch;
    if (count > 0) {
      const unsigned char* const from = first_of(tiles.stage(at, steps), steps, pitch);
      Sum first[1];
      values_of(*reinterpret_cast<const Cell*>(from), first);
      const Sum y = scan(from + apart, apart, count - 1, first[0], [](Sum) {});
      shared.parts[at.turn()][threadIdx.x] = cast<Wide>(y);
    } else if (works) {
      shared.parts[at.turn()][threadIdx.x] = cast<Wide>(0.0);
    }
  }
  __device__ __forceinline__ void finish(const StreamCursor& at) const {
    const int steps = tiles.steps_of(at.tile), count = steps_of_part(steps), pitch = input_pitch(),
              to_pitch = output_pitch(), apart = p.reverse ? -pitch : pitch,
              to_apart = p.reverse ? -to_pitch : to_pitch;
    if (count == 0) return;
    const unsigned char* const from = first_of(tiles.stage(at, steps), steps, pitch);
    unsigned char* to = first_of(tiles.results(at, steps), steps, to_pitch);
    const Sum entering =
        cast<Sum>(fold(shared.parts[at.turn()][threadIdx.x], over_parts, shared.carries[at.turn()][column]));
    const Cell cell = *reinterpret_cast<const Cell*>(from);
    Sum first[1];
    values_of(cell, first);
    // Nothing enters a row's first step, not even a 0.
    const bool starts = at.tile == 0 && part == 0 && !p.initial;
    const Sum y = starts ? first[0] : advanced(cell, entering);
    const auto store = [&](Sum y) {
      *reinterpret_cast<Cell*>(to) = packed<T>({y});
      to += to_apart;
    };
    store(y);
    scan(from + apart, apart, count - 1, y, store);
  }

  __device__ __forceinline__ void run() const {
    const int carry_threads = 32 * stream_carry_warps(p.inner);
    StreamCursor now(t), old(t);
    while (old.outer < p.outer) {
      if (now.outer < p.outer) {
        mbarrier_wait(&shared.full[now.stage()], now.parity());
        add_up(now);
        arrive_at(kTotalsBarrier + now.turn(), kStreamScanThreads + carry_threads);
      }
      now.next();
      if (now.number <= kStreamAhead) continue;
      mbarrier_wait(&shared.carries_ready[old.turn()], old.turn_parity());
      if (t.output_bytes > 0 && old.number >= 2)
        mbarrier_wait(&shared.output_free[old.number % 2], (old.number / 2 - 1) & 1);
      finish(old);
      show_to_bulk_stores();
      arrive_at(kResultsBarrier + old.stage(), kStreamScanThreads + 32);
      old.next();
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kStreamThreads, 1)
    stream_columns_kernel(const __grid_constant__ StreamColumnsParams params) {
  using Wide = typename Types<T>::Wide;
  extern __shared__ __align__(128) unsigned char stream_shared[];
  static_assert(sizeof(StreamShared<Wide>) <= kStreamSharedBytes);
  StreamShared<Wide>& shared = *reinterpret_cast<StreamShared<Wide>*>(stream_shared);
  if (threadIdx.x < kMostStreamStages) mbarrier_init(&shared.full[threadIdx.x], 1);
  if (threadIdx.x < kStreamTurns)
    mbarrier_init(&shared.carries_ready[threadIdx.x], 32 * stream_carry_warps(params.problem.inner));
  if (threadIdx.x < 2) mbarrier_init(&shared.output_free[threadIdx.x], 32);
  if (threadIdx.x == 0) shared.tag = tag_of_launch(params.tag);
  mbarrier_fence_init();
  __syncthreads();
  const StreamTile<T> tiles{params.problem, params.plan, stream_shared + kStreamSharedBytes};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kStreamWarps) StreamScan<T>(params, tiles, shared).run();
  else if (warp < kStreamWarps + kStreamCarryWarps) pass_stream_carries<T>(params, shared);
  else StreamCopies<T>{tiles, shared}.run();
}

}  // namespace dcs
