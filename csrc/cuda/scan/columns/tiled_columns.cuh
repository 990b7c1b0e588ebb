// Scans along a strided time over columns that lie side by side, of any number and alignment. A block takes tiles, some
// steps of a span of columns, with the next ones on their way into its shared memory. Where there are enough columns a
// thread walks along all steps of a column. Elsewhere several threads share a column's steps in a tile and, where there
// are still too few columns, several blocks its tiles, in turn: a tile's total is published one or two tiles before its
// results are made, so that nobody waits long. Blocks wait for those before and behind them, so a launch with several
// blocks a walk is cooperative: all of them run. A block waits for totals of its own round and of rounds before, and
// publishes its total of a round before it waits for any of that round, so the least round that is not published
// everywhere always will be.
#pragma once

#include "common/ptx/named_barrier.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_scan.cuh"

namespace dcs {

__device__ __forceinline__ void wait_for_all_but(int groups) {
  switch (groups) {
    case 0: wait_for_copies<0>(); break;
    case 1: wait_for_copies<1>(); break;
    case 2: wait_for_copies<2>(); break;
    case 3: wait_for_copies<3>(); break;
    case 4: wait_for_copies<4>(); break;
    case 5: wait_for_copies<5>(); break;
    default: wait_for_copies<6>(); break;
  }
}

template <typename T, bool kStep, bool kBackward, int kUnit>
struct TiledColumns {
  using Part = ColumnPart<T, kStep, kBackward, kUnit>;
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = typename Part::Sum;
  static constexpr int kSize = sizeof(T);
  static constexpr bool kSums = kBackward && !kStep;

  const TileLayout& layout;
  const ScanProblem& p;
  const ColumnTiles& t;
  unsigned char* shared;
  TileBarriers& barriers;

  __device__ __forceinline__ TiledColumns(const TileLayout& given, unsigned char* memory, TileBarriers& of_block)
      : layout(given), p(given.p), t(given.t), shared(memory), barriers(of_block) {}

  __device__ __forceinline__ int shift() const { return p.shifted ? 1 : 0; }
  __device__ __forceinline__ unsigned char* stage_of(const TilePlace& at) const {
    return shared + at.stage * t.stage_bytes;
  }
  // Rows in memory that are `steps` further in the order of the scan.
  __device__ __forceinline__ int moved(int row, int steps) const { return p.reverse ? row - steps : row + steps; }
  __device__ __forceinline__ int flags_row(const TilePlace& at) const { return p.reverse ? at.row : at.row - shift(); }

  __device__ __forceinline__ void request(TileCursor& cursor) const {
    if (cursor.round < layout.rounds) {
      const TilePlace at = layout.place_of(cursor);
      cursor.advance(t);
      unsigned char* const stage = stage_of(at);
      layout.template bring<kSize>(stage, kTileInput, p.input, p.input_strides, at, at.row, at.count);
      if constexpr (kStep)
        layout.template bring<kSize>(
            stage, kTileGates, p.gamma, p.gamma_strides, at, moved(at.row, -shift()), at.count);
      if constexpr (kBackward)
        layout.template bring<kSize>(stage, kTileSaved, p.saved, p.saved_strides, at, moved(at.row, 1), at.count);
      if (p.reset)
        layout.template bring<1>(stage, kTileFlags, p.reset, p.reset_strides, at, flags_row(at), at.count + shift());
    }
    commit_copies();
  }

  // A part of a tile, `first` steps from its beginning and `cell` columns, kUnit each, from the left.
  __device__ __forceinline__ void view(Part& part, const TilePlace& at, int first, int steps, int cell) const {
    unsigned char* const stage = stage_of(at);
    const int row = p.reverse ? at.count - 1 - first : first, sign = p.reverse ? -1 : 1;
    part.count = max(0, min(steps, at.count - first));
    const auto rows_of = [&](int which, const void* pointer, const Strides& strides, int in_memory) {
      const int pitch = t.operands[which].pitch;
      unsigned char* const begin = layout.template shared_of<kSize>(stage, which, pointer, strides, at, in_memory);
      return PartRows<unsigned char>{begin + row * pitch + cell * Part::kCellBytes, sign * pitch};
    };
    const auto read_only = [](const PartRows<unsigned char>& rows) {
      return PartRows<const unsigned char>{rows.at, rows.step};
    };
    const PartRows<unsigned char> input = rows_of(kTileInput, p.input, p.input_strides, at.row);
    part.input = read_only(input);
    const auto result = [&](void* pointer, const Strides& strides) {
      char* const to = const_cast<char*>(layout.template memory_of<kSize>(pointer, strides, at, at.row + row)) +
          cell * kUnit * strides.inner * kSize;
      return PartRows<unsigned char>{reinterpret_cast<unsigned char*>(to), sign * strides.time * kSize};
    };
    part.output = t.staged ? input : result(p.output, p.output_strides);
    if constexpr (kStep) part.gates = read_only(rows_of(kTileGates, p.gamma, p.gamma_strides, moved(at.row, -shift())));
    if constexpr (kBackward) part.saved = read_only(rows_of(kTileSaved, p.saved, p.saved_strides, moved(at.row, 1)));
    if constexpr (kBackward && kStep) part.grad_gamma = result(p.grad_gamma, p.grad_gamma_strides);
    part.has_flags = p.reset != nullptr;
    part.flag_apart = 1;
    if (p.reset) {
      const int pitch = t.operands[kTileFlags].pitch, own = row + (p.reverse ? shift() : 0);
      unsigned char* const begin =
          layout.template shared_of<1>(stage, kTileFlags, p.reset, p.reset_strides, at, flags_row(at));
      part.flags = {begin + own * pitch + cell * kUnit, sign * pitch};
      part.flags_after = shift() * sign * pitch;
    }
    const int period = static_cast<int>(t.period), position = at.first + first;
    const int over = t.period == t.steps ? position : position % period;
    part.cut = over == 0 && !(p.initial && !p.backward) ? 0 : period - over;
    part.period = period;
    part.conjugate = p.conjugate_gamma;
    if constexpr (kBackward) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) part.beyond[u] = initial_of(at, cell * kUnit + u);
    }
  }

  __device__ __forceinline__ Sum initial_of(const TilePlace& at, int column) const {
    if (!p.initial || column >= at.width) return cast<Sum>(0.0);
    return cast<Sum>(cast<Acc>(static_cast<const T*>(
        p.initial)[at.outer * p.initial_strides.outer + (at.column + column) * p.initial_strides.inner]));
  }
  __device__ __forceinline__ void set_gammas(Part& part, const TilePlace& at, int cell) const {
#pragma unroll
    for (int u = 0; u < (kStep ? 0 : kUnit); ++u) {
      Wide gamma = cast<Wide>(p.gamma_value);
      if (p.gamma_kind == GammaKind::kRow && cell * kUnit + u < at.width)
        gamma = load_gamma<Wide>(p.gamma, p.gamma_dtype,
            at.outer * p.gamma_strides.outer + (at.column + cell * kUnit + u) * p.gamma_strides.inner,
            p.conjugate_gamma);
      part.set_gamma(u, gamma);
    }
  }

  __device__ __forceinline__ void put_sum(const TilePlace& at, int column, Wide sum) const {
    Acc* const to = static_cast<Acc*>(p.grad_gamma) + at.outer * p.grad_gamma_strides.outer +
        (at.column + column) * p.grad_gamma_strides.inner;
    to[layout.rank] = cast<Acc>(sum);
    if (layout.rank == 0)
      for (int64_t j = t.peers; j < p.partials; ++j) to[j] = cast<Acc>(0.0);
  }

  __device__ __forceinline__ void wait_for_threads() const { wait_at(1, t.threads); }

  // A thread takes all steps of its columns.
  __device__ __forceinline__ void walk(Part& part, const TilePlace& at) const {
    Wide* const carries = reinterpret_cast<Wide*>(shared + t.state_at);
    Wide* const sums = sums_of_parts();
    const bool one = t.chunks == 1;
    for (int cell = threadIdx.x; cell * kUnit < at.width; cell += t.threads) {
      view(part, at, 0, at.count, cell);
      set_gammas(part, at, cell);
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const int column = cell * kUnit + u;
        Wide carry = cast<Wide>(0.0);
        if (!at.starts) carry = carries[column];
        else if (!kBackward) carry = cast<Wide>(initial_of(at, column));
        part.y[u] = cast<Sum>(carry);
        if constexpr (Part::kHalf) part.lost[u] = lost_in(carry, part.y[u]);
        part.sum[u] = cast<Wide>(0.0);
        if (kSums && !at.starts) part.sum[u] = sums[column];
      }
      part.template scan<Reading::kWalk>();
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const int column = cell * kUnit + u;
        if (!one) {
          Wide carry = cast<Wide>(part.y[u]);
          if constexpr (Part::kHalf) carry += static_cast<Wide>(part.lost[u]);
          carries[column] = carry;
        }
        if constexpr (kSums) {
          if (at.ends) put_sum(at, column, part.sum[u]);
          else sums[column] = part.sum[u];
        }
      }
    }
  }

  __device__ __forceinline__ void add_up(Part& part, const TilePlace& at, int own_part, int cell) const {
    if (own_part < t.parts && cell * kUnit < at.width) {
      view(part, at, own_part * t.part_steps, t.part_steps, cell);
      part.closed = 0;
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        part.y[u] = cast<Sum>(0.0);
        part.product[u] = cast<Wide>(1.0);
      }
      part.template scan<Reading::kTotals>();
      const TileTotals<Wide> totals = totals_of<Wide, kStep>(t, shared, at.turn);
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const int item = own_part * t.span + cell * kUnit + u;
        totals.values[item] = cast<Wide>(part.y[u]);
        totals.closed[item] = part.closed >> u & 1;
        if constexpr (kStep) totals.gates[item] = part.product[u];
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers.totals[at.turn]);
  }

  __device__ __forceinline__ void finish(Part& part, const TilePlace& at, int own_part, int cell) const {
    mbarrier_wait(&barriers.carries[at.turn], at.parity);
    if (own_part >= t.parts || cell * kUnit >= at.width) return;
    const TileTotals<Wide> totals = totals_of<Wide, kStep>(t, shared, at.turn);
    Wide* const sums = sums_of_parts();
    view(part, at, own_part * t.part_steps, t.part_steps, cell);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const int item = own_part * t.span + cell * kUnit + u;
      part.y[u] = cast<Sum>(totals.values[item]);
      part.sum[u] = cast<Wide>(0.0);
      if (kSums && !at.starts) part.sum[u] = sums[item];
    }
    part.template scan<Reading::kResults>();
    if constexpr (kSums) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) sums[own_part * t.span + cell * kUnit + u] = part.sum[u];
    }
  }
  __device__ __forceinline__ Wide* sums_of_parts() const { return reinterpret_cast<Wide*>(shared + t.sums_at); }

  __device__ __forceinline__ void run() const {
    const int rounds = layout.rounds, cells = (t.span + kUnit - 1) / kUnit;
    const int own_part = t.walks_alone ? 0 : threadIdx.x / cells, cell = threadIdx.x - own_part * cells;
    const bool several = t.walks > gridDim.x && p.gamma_kind == GammaKind::kRow;  // gammas, in turn
    Part part;
    TileCursor requested, scanned, finished;
    for (int i = 0; i < t.in_flight; ++i) request(requested);
    for (int round = 0; round < rounds + t.ahead; ++round) {
      wait_for_all_but(t.in_flight - 1);
      wait_for_threads();
      request(requested);
      if (!t.walks_alone && round < rounds) {
        const TilePlace at = layout.place_of(scanned);
        scanned.advance(t);
        if (at.starts || several) set_gammas(part, at, cell);
        add_up(part, at, own_part, cell);
      }
      if (round < t.ahead) continue;
      const TilePlace at = layout.place_of(finished);
      finished.advance(t);
      if (t.walks_alone) {
        walk(part, at);
      } else {
        if (at.starts || several) set_gammas(part, at, cell);
        finish(part, at, own_part, cell);
      }
      const bool ends = kSums && !t.walks_alone && at.ends;
      if (t.staged || ends) wait_for_threads();
      if (t.staged) layout.template put<T>(stage_of(at), at);
      if constexpr (kSums) {
        if (!ends) continue;
        for (int column = threadIdx.x; column < at.width; column += t.threads) {
          Wide all = sums_of_parts()[column];
          for (int i = 1; i < t.parts; ++i) all = all + sums_of_parts()[i * t.span + column];
          put_sum(at, column, all);
        }
      }
    }
  }
};

template <typename T, bool kStep, bool kBackward, int kUnit>
__device__ __forceinline__ void tiled_columns(
    const TiledColumnsParams& params, unsigned char* shared, TileBarriers& barriers) {
  const TileLayout layout(params);
  if (!params.tiles.walks_alone) {
    if (threadIdx.x == 0) {
      for (int i = 0; i <= params.tiles.ahead; ++i) {
        mbarrier_init(&barriers.totals[i], params.tiles.threads / 32);
        mbarrier_init(&barriers.carries[i], kCarryThreads / 32);
      }
      mbarrier_fence_init();
    }
    __syncthreads();
  }
  if (threadIdx.x < params.tiles.threads) TiledColumns<T, kStep, kBackward, kUnit>(layout, shared, barriers).run();
  else TileCarries<T, kStep>(layout, shared, barriers).run();
}

template <typename T, bool kStep, bool kBackward, int kUnit>
__global__ void __launch_bounds__(kMostColumnThreads + kCarryThreads, 1)
    tiled_columns_kernel(const __grid_constant__ TiledColumnsParams params) {
  extern __shared__ __align__(16) unsigned char columns_shared[];
  __shared__ TileBarriers barriers;
  tiled_columns<T, kStep, kBackward, kUnit>(params, columns_shared, barriers);
}

}  // namespace dcs
