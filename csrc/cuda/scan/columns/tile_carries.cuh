// What enters each part of a tile of columns: from the totals of the parts before it, by way of shared memory, and of
// the tiles before, by way of global memory (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix
// scan with decoupled look-back", NVIDIA NVR-2016-002). Tiles are in groups of `fan`, and these in groups of `fan`
// again. `fan` lanes take a cell: one has some of its parts, the word of a tile before in the group, and that of a
// group before, or what entered the group of groups. They fold by shuffles, always in the same tree. Blocks begin in
// the order of their tiles, and a tile's total needs its own elements only, so every total that is waited for will
// come. Where the tiles of a walk are one cluster of blocks they read each other's totals in shared memory instead.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/piece_words.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

template <typename Wide, bool kStep, int kUnit>
struct CarryExchange {
  static constexpr int kColumns = kUnit * kSpan, kPowers = kStep ? 0 : kColumns;
  static constexpr int kItems = kUnit * kColumnThreads * 3 / 2;  // rows of an odd pitch
  // Of the parts, then of the parts before them; with a gamma a row `gates` are powers over the parts before from the
  // start, and with a number `before` are those.
  Wide totals[kItems], gates[kItems];
  bool closed[kItems];
  Wide carries[kColumns];  // into the tile
  Piece<Wide> tiles[kColumns];
  Wide powers[kHeldPowers * kPowers + 1];  // a column's, or the first one's for all
  Wide before[kStep ? 1 : kColumnThreads];
};

// A thread's part in it. Its own part and cell in the tile may be others than those it folds for.
template <typename T, bool kStep, int kUnit>
struct TileCarries {
  using Wide = typename Types<T>::Wide;
  using Values = ColumnValues<T, kStep>;
  // Columns that lanes fold together, whose totals go in one word where they are two.
  static constexpr int kTogether = kStep ? 1 : kUnit;
  using Words = std::conditional_t<kTogether == 2, PairWord, PieceWords<Wide, kStep>>;

  enum Level { kParts = 0, kTiles = kPartPowers, kGroups = kPartPowers + kTilePowers };  // where its powers are

  const HeldColumnsParams& params;
  const HeldColumnsPlan& t = params.plan;
  CarryExchange<Wide, kStep, kUnit>& shared;
  uint32_t tile, walk;
  int width;  // cells of the block
  int pitch;  // of the parts' columns in shared memory
  int fan, lane;
  int before, groups_before;  // tiles before in the group, groups before in theirs

  __device__ __forceinline__ TileCarries(const HeldColumnsParams& given, CarryExchange<Wide, kStep, kUnit>& memory,
      uint32_t of_tile, uint32_t of_walk, int cells)
      : params(given), shared(memory), tile(of_tile), walk(of_walk), width(cells) {
    pitch = t.span * kUnit | 1;
    fan = 1 << t.fan_bits;
    lane = static_cast<int>(threadIdx.x) & (fan - 1);
    before = static_cast<int>(tile) & (fan - 1);
    groups_before = static_cast<int>(tile >> t.fan_bits) & (fan - 1);
  }

  __device__ __forceinline__ bool has_number() const {
    return !kStep && params.problem.gamma_kind == GammaKind::kNumber;
  }
  // The powers of gammas that folds multiply by. `part`, `cell` and `gammas` are the thread's own.
  __device__ __forceinline__ void put_powers(bool works, int part, int cell, const Wide (&gammas)[kUnit]) const {
    if constexpr (!kStep) {
      const int thread = static_cast<int>(threadIdx.x);
      if (has_number()) {
        if (thread < kHeldPowers) shared.powers[thread] = cast<Wide>(t.powers[thread]);
        if (thread < t.parts) shared.before[thread] = cast<Wide>(power_over<kPartPowers>(t.powers, thread));
        return;
      }
      if (!works) return;
      // One tile has no others to fold. A thread has all powers of a level: each is the square of the one before.
      const int levels = t.tiles > 1 ? 3 : 1;
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        shared.gates[part * pitch + cell * kUnit + u] =
            whole_power(gammas[u], static_cast<unsigned>(part * t.part_steps));
#pragma unroll 1
        for (int level = part; level < levels; level += t.parts) {
          Wide* const powers = shared.powers + (cell * kUnit + u) * kHeldPowers +
              (level == 0          ? kParts
                      : level == 1 ? kTiles
                                   : kGroups);
          Wide power = whole_power(gammas[u],
              static_cast<unsigned>(t.part_steps) * (level > 0 ? t.parts : 1) << (level == 2 ? t.fan_bits : 0));
          const int count = level == 0 ? t.fan_bits + t.lane_bits : t.fan_bits;
#pragma unroll 1
          for (int i = 0; i < count; ++i, power = power_mul(power, power)) powers[i] = power;
        }
      }
    }
  }

  __device__ __forceinline__ void put(int part, int column, const Piece<Wide>& piece) const {
    const int item = part * pitch + column;
    shared.totals[item] = piece.total;
    if constexpr (kStep) shared.gates[item] = piece.gates;
    shared.closed[item] = piece.closed;
  }
  __device__ __forceinline__ Piece<Wide> get(int part, int column) const {
    const int item = part * pitch + column;
    return {shared.totals[item], has_number() ? shared.before[part] : shared.gates[item], shared.closed[item]};
  }

  // From the parts' pieces (`put`) what enters each (`get`) and the tile (`shared.carries`), by all threads.
  __device__ __forceinline__ void exchange(const ColumnPlace& block) const {
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x >> t.fan_bits) * kTogether, columns = width * kUnit;
    if (__any_sync(0xffffffffu, column < columns))
      fold_columns(min(column, columns - kTogether), column < columns, block);
    else if (t.cluster) meet_cluster();
    if (t.cluster) arrive_in_cluster_relaxed();  // nothing is read from here on (`leave`)
    __syncthreads();
  }
  // A block of a cluster stays until the others have read what it leaves them.
  __device__ __forceinline__ void leave() const {
    if (t.cluster) wait_for_cluster();
  }

  // The parts' sums (`put`): `take` gets that of a column.
  template <typename Take>
  __device__ __forceinline__ void add_sums(const Take& take) const {
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int column = static_cast<int>(threadIdx.x >> t.fan_bits) * kTogether + u, columns = width * kUnit;
      Wide sum = cast<Wide>(0.0);
#pragma unroll 1
      for (int part = lane; part < t.parts; part += fan)
        sum = sum + shared.totals[part * pitch + min(column, columns - 1)];
      for (int d = fan / 2; d > 0; d /= 2) sum = sum + shuffle_down(sum, d);
      if (lane == 0 && column < columns) take(column, sum);
    }
  }

 private:
  __device__ __forceinline__ const Wide* powers_of(int column) const {
    if constexpr (kStep) return nullptr;
    else return shared.powers + (params.problem.gamma_kind == GammaKind::kNumber ? 0 : column * kHeldPowers);
  }
  // From the powers over 1, 2, 4, ... pieces that over so many.
  template <int kBits, typename Power>
  static __device__ __forceinline__ Power power_over(const Power* powers, int pieces) {
    Power power = cast<Power>(1.0);
#pragma unroll
    for (int d = 0; d < kBits; ++d) {
      if (!(pieces >> d & 1)) continue;
      if constexpr (std::is_same_v<Power, double>) power *= powers[d];
      else power = power_mul(power, powers[d]);
    }
    if constexpr (std::is_same_v<Power, double>) power = bounded_product(power, powers[0]);
    return power;
  }
  // Of pieces one after the other; where powers take carries over them, without the product.
  static __device__ __forceinline__ Piece<Wide> joined(const Piece<Wide>& first, const Piece<Wide>& then) {
    return {after(then, first.total), kStep ? power_mul(first.gates, then.gates) : first.gates,
        first.closed || then.closed};
  }

  // Each lane's piece with those of the lanes before it. `powers` take a carry over 1, 2, 4, ... lanes' pieces; lanes
  // without one come first.
  __device__ __forceinline__ void fold_lanes(Piece<Wide>& piece, const Wide* powers) const {
    const unsigned closed = __ballot_sync(0xffffffffu, piece.closed) >> (threadIdx.x % 32 - lane) & ((2u << lane) - 1);
    const int reach = closed ? lane - 31 + __clz(static_cast<int>(closed)) : lane;  // lanes up to the last closed piece
#pragma unroll 1
    for (int bit = 0; bit < t.fan_bits; ++bit) {
      const int d = 1 << bit;
      const Wide total = shuffle_up(piece.total, d, fan);
      Wide power = cast<Wide>(1.0), gates = power;
      if constexpr (kStep) power = piece.gates, gates = shuffle_up(piece.gates, d, fan);
      else power = powers[bit];
      if (d > reach) continue;
      piece.total = fold(piece.total, power, total);
      if constexpr (kStep) piece.gates = power_mul(piece.gates, gates);
    }
    piece.closed = closed != 0;
  }

  // The pieces of the parts up to a lane's last one; before each part is left what is before it in the tile.
  __device__ __forceinline__ Piece<Wide> fold_parts(int column, bool exists) const {
    const Wide* const powers = powers_of(column);
    const int many = 1 << t.lane_bits, first = ((lane - fan) << t.lane_bits) + t.parts;
    Wide over_part = cast<Wide>(1.0);
    if constexpr (!kStep) over_part = powers[kParts];
    const auto piece_of = [&](int part) {
      Piece<Wide> piece = get(part, column);
      if constexpr (!kStep) piece.gates = over_part;
      return piece;
    };
    Piece<Wide> own = identity<Wide>();
#pragma unroll 1
    for (int part = max(first, 0); part < first + many; ++part) own = joined(own, piece_of(part));
    fold_lanes(own, powers + kParts + t.lane_bits);
    Piece<Wide> running{shuffle_up(own.total, 1, fan), cast<Wide>(1.0), false};
    if constexpr (kStep) running.gates = shuffle_up(own.gates, 1, fan);
    running.closed = __shfl_up_sync(0xffffffffu, static_cast<int>(own.closed), 1, fan) != 0;
    if (lane == 0) running = identity<Wide>();
#pragma unroll 1
    for (int part = max(first, 0); part < first + many; ++part) {
      const Piece<Wide> piece = piece_of(part);
      const int item = part * pitch + column;
      if (exists) {
        shared.totals[item] = running.total;
        shared.closed[item] = running.closed;
        if constexpr (kStep) shared.gates[item] = running.gates;
      }
      running = joined(running, piece);
    }
    return own;
  }

  // The lanes' words of one level, asked for before: those that are not there yet are asked for again.
  __device__ __forceinline__ void wait_for(
      bool wanted, Words& lanes, uint32_t from, Piece<Wide> (&pieces)[kTogether]) const {
    while (!lanes.get(pieces, params.tag) && wanted) lanes.load_if(true, words()[from]);
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (!wanted) pieces[u] = identity<Wide>();
  }

  static __device__ __forceinline__ void meet_cluster() {
    arrive_in_cluster();
    wait_for_cluster();
  }

  // The share of some neighboring columns in the exchange. The last lane folds all of it.
  __device__ __forceinline__ void fold_columns(int column, bool exists, const ColumnPlace& block) const {
    const int back = fan - lane;
    const uint32_t group = tile >> t.fan_bits, above = group >> t.fan_bits;
    const bool is_last = back == 1 && exists, publishes = is_last && tile + 1 < t.tiles && !t.cluster;
    const bool ends_group = before + 1 == fan, ends_above = ends_group && groups_before + 1 == fan;
    // What entered the group of groups is the first of its groups' pieces.
    const bool wants_tile = back <= before, wants_above = above > 0 && back == groups_before + 1,
               wants_group = back <= groups_before || wants_above;
    const uint32_t of_tile = index_of(0, tile - (wants_tile ? back : 0), column);
    const uint32_t of_group =
        wants_above ? index_of(2, above - 1, column) : index_of(1, group - (wants_group ? back : 0), column);
    Words of_lane_tile{}, of_lane_group{};
    Piece<Wide> near[kTogether], far[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      far[u] = fold_parts(column + u, exists);
      if constexpr (!kStep) far[u].gates = powers_of(column + u)[kTiles];
      if (is_last) shared.tiles[column + u] = far[u];
    }
    if (t.tiles == 1) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (is_last) shared.carries[column + u] = initial_of({block.outer, block.column + column}, u);
      return;
    }
    if (publishes && !ends_group) words()[index_of(0, tile, column)].publish(far, params.tag);
    if (t.cluster) meet_cluster();
    // Without a branch, at whose end they would be waited for.
    of_lane_tile.load_if(wants_tile && !t.cluster, words()[of_tile]);
    of_lane_group.load_if(wants_group && !t.cluster, words()[of_group]);
    // Until the carry is known its place has the power over the tiles before in the group.
    if constexpr (!kStep) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const Wide over_near = power_over<kTilePowers>(powers_of(column + u) + kTiles, before);
        if (is_last) shared.carries[column + u] = over_near;
      }
    }
    if (t.cluster) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        near[u] = wants_tile ? in_cluster(shared.tiles[column + u], before - back) : identity<Wide>();
    } else {
      wait_for(wants_tile, of_lane_tile, of_tile, near);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (before > 0) fold_lanes(near[u], powers_of(column + u) + kTiles);
      far[u] = joined(near[u], shared.tiles[column + u]);
    }
    if (publishes && ends_group && !ends_above) words()[index_of(1, group, column)].publish(far, params.tag);
    if (t.cluster) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u) far[u] = identity<Wide>();
    } else {
      wait_for(wants_group, of_lane_group, of_group, far);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (above == 0 && back == groups_before + 1)
        far[u] = {initial_of({block.outer, block.column + column}, u), cast<Wide>(1.0), true};
      if (groups_before > 0) fold_lanes(far[u], powers_of(column + u) + kGroups);
      if constexpr (!kStep) near[u].gates = shared.carries[column + u];
      far[u].total = after(near[u], far[u].total);
      if (is_last) shared.carries[column + u] = far[u].total;
      far[u] = {after(shared.tiles[column + u], far[u].total), cast<Wide>(1.0), true};
    }
    if (publishes && ends_above) words()[index_of(2, above, column)].publish(far, params.tag);
  }
  __device__ __forceinline__ Wide initial_of(const ColumnPlace& at, int u) const {
    return params.problem.backward ? cast<Wide>(0.0) : Values::initial_of(params.problem, at, u);
  }
  // Of tiles, of groups, of groups of groups.
  __device__ __forceinline__ Words* words() const { return static_cast<Words*>(params.workspace); }
  __device__ __forceinline__ uint32_t index_of(int level, uint32_t number, int column) const {
    const uint32_t tiles = static_cast<uint32_t>(t.tiles), groups = static_cast<uint32_t>(t.groups);
    const uint32_t at = number + (level > 0 ? tiles : 0) + (level > 1 ? groups : 0);
    return (at * static_cast<uint32_t>(t.walks) + walk) * static_cast<uint32_t>(t.span * kUnit / kTogether) +
        static_cast<uint32_t>(column / kTogether);
  }
};

}  // namespace dcs
