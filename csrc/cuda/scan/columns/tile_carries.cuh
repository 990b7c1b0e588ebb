// What enters each part of a tile of columns: from the totals of the parts before it, by way of shared memory, and of
// the tiles before, by way of global memory (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix
// scan with decoupled look-back", NVIDIA NVR-2016-002). Tiles are in groups of kFan, and these in groups of kFan again.
// A tile's carry is folded from what entered its group of groups, the groups before its own there, and the tiles before
// it in its group, always in this order. Blocks begin in the order of their tiles, and a tile's total needs its own
// elements only, so every total that is waited for will come.
#pragma once

#include "scan/carry/piece_words.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

template <typename Wide, bool kStep>
struct CarryExchange {
  static constexpr int kGates = kStep ? 1 : 0, kPowers = kStep ? 0 : 1;
  // Of the parts, then of the parts before them; of the tiles before in the group and the groups before in theirs.
  Wide totals[kColumnThreads], gates[kColumnThreads * kGates + 1];
  bool closed[kColumnThreads];
  Wide near_totals[2][kFan - 1][kSpan], near_gates[2][kFan - 1][kSpan * kGates + 1];
  bool near_closed[2][kFan - 1][kSpan];
  Wide carries[kSpan];  // into the tile
  // Powers that take a carry over the parts before; over a tile, a group, the tiles and groups before.
  Wide over_parts[kColumnThreads * kPowers + 1], over_near[3][kSpan * kPowers + 1];
};

// A thread's part in it: `gamma` is that of its column.
template <typename Wide, bool kStep>
struct TileCarries {
  using Words = PieceWords<Wide, kStep>;
  enum Over { kTile, kGroup, kNear };

  const HeldColumnsParams& params;
  const HeldColumnsPlan& t = params.plan;
  CarryExchange<Wide, kStep>& shared;
  uint32_t tile, walk;
  int part, column, width;       // columns of the block
  int before, groups_before;     // tiles before in the group, groups before in theirs
  Wide power = cast<Wide>(1.0);  // over a part, without gates of steps

  __device__ __forceinline__ TileCarries(const HeldColumnsParams& given, CarryExchange<Wide, kStep>& memory,
      uint32_t of_tile, uint32_t of_walk, int of_part, int of_column, int columns, Wide gamma)
      : params(given), shared(memory), tile(of_tile), walk(of_walk), part(of_part), column(of_column), width(columns) {
    before = static_cast<int>(tile % kFan);
    groups_before = static_cast<int>(tile / kFan % kFan);
    if constexpr (!kStep) {
      power = part_power(gamma);
      shared.over_parts[threadIdx.x] = whole_power(power, static_cast<unsigned>(part));
      if (part > 0) return;
      const Wide over_tile = whole_power(power, static_cast<unsigned>(t.parts));
      shared.over_near[kTile][column] = over_tile;
      shared.over_near[kGroup][column] = power_of<kFan>(over_tile);
      shared.over_near[kNear][column] = whole_power(over_tile, static_cast<unsigned>(groups_before * kFan + before));
    }
  }

  // From the part's piece what enters it. `initial` enters the walk.
  __device__ __forceinline__ Wide exchange(const Piece<Wide>& piece, Wide initial) const {
    put(threadIdx.x, piece);
    __syncthreads();
    const bool folds = part == 0 && column < width;
    Piece<Wide> own = identity<Wide>();
    if (folds) own = fold_parts();
    if (t.tiles > 1) {
      if (folds && tile + 1 < t.tiles && before + 1 < kFan) word_of(0, tile)->publish(own, params.tag);
      if (part < kFan && column < width) collect();
      __syncthreads();
    }
    if (folds) shared.carries[column] = t.tiles > 1 ? carry_after(own, initial) : initial;
    __syncthreads();
    if (part >= t.parts) return cast<Wide>(0.0);
    Wide over_parts = cast<Wide>(1.0);
    if constexpr (!kStep) over_parts = shared.over_parts[threadIdx.x];
    return after(get(threadIdx.x, over_parts), shared.carries[column]);
  }

  // The parts' sums, in their order, in the first part.
  __device__ __forceinline__ Wide add_sums(Wide sum) const {
    __syncthreads();
    shared.totals[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0)
      for (int q = 1; q < t.parts; ++q) sum = sum + shared.totals[q * t.span + column];
    return sum;
  }

 private:
  __device__ __forceinline__ Wide part_power(Wide gamma) const {
    if constexpr (std::is_same_v<Wide, double>) {
      if (params.problem.gamma_kind == GammaKind::kNumber) return t.part_power;
    }
    return whole_power(gamma, static_cast<unsigned>(t.part_steps));
  }
  __device__ __forceinline__ Wide over(Over what) const {
    if constexpr (kStep) return cast<Wide>(1.0);
    else return shared.over_near[what][column];
  }

  // Of pieces one after the other; where powers take carries over them, without the product.
  static __device__ __forceinline__ Piece<Wide> joined(const Piece<Wide>& first, const Piece<Wide>& then) {
    return {after(then, first.total), kStep ? power_mul(first.gates, then.gates) : first.gates,
        first.closed || then.closed};
  }
  __device__ __forceinline__ void put(int item, const Piece<Wide>& piece) const {
    shared.totals[item] = piece.total;
    if constexpr (kStep) shared.gates[item] = piece.gates;
    shared.closed[item] = piece.closed;
  }
  __device__ __forceinline__ Piece<Wide> get(int item, Wide over_it) const {
    if constexpr (kStep) over_it = shared.gates[item];
    return {shared.totals[item], over_it, shared.closed[item]};
  }
  __device__ __forceinline__ Piece<Wide> near(int level, int q, Wide over_it) const {
    if constexpr (kStep) over_it = shared.near_gates[level][q][column];
    return {shared.near_totals[level][q][column], over_it, shared.near_closed[level][q][column]};
  }

  // The tile's piece; before each part is left what is before it in the tile.
  __device__ __forceinline__ Piece<Wide> fold_parts() const {
    Piece<Wide> own = identity<Wide>();
    for (int q = 0; q < t.parts; ++q) {
      const int item = q * t.span + column;
      const Piece<Wide> piece = get(item, power);
      put(item, own);
      own = joined(own, piece);
    }
    if constexpr (!kStep) own.gates = over(kTile);
    return own;
  }

  // Of tiles, of groups, of groups of groups.
  __device__ __forceinline__ Words* word_of(int level, int64_t number) const {
    const int64_t at = level == 0 ? number : level == 1 ? t.tiles + number : t.tiles + t.groups + number;
    return static_cast<Words*>(params.workspace) + (at * t.walks + walk) * t.span + column;
  }

  // What the tile needs of other tiles and of groups, a word of each for every part: to shared memory.
  __device__ __forceinline__ void collect() const {
    const uint32_t group = tile / kFan, above = group / kFan;
    const bool wants_tile = part < before, wants_group = part < groups_before;
    const Words* const of_tile = word_of(0, group * kFan + (wants_tile ? part : 0));
    const Words* const of_group = word_of(1, above * kFan + (wants_group ? part : 0));
    Words words[2]{};
    Piece<Wide> pieces[2]{identity<Wide>(), identity<Wide>()};
    bool all = false;
    while (!all) {
      words[0].load_if(wants_tile, *of_tile);
      words[1].load_if(wants_group, *of_group);
      const bool has_tile = words[0].get(pieces[0], params.tag), has_group = words[1].get(pieces[1], params.tag);
      all = (has_tile || !wants_tile) && (has_group || !wants_group);
    }
#pragma unroll
    for (int level = 0; level < 2; ++level) {
      if (!(level == 0 ? wants_tile : wants_group)) continue;
      const Piece<Wide>& piece = pieces[level];
      shared.near_totals[level][part][column] = piece.total;
      if constexpr (kStep) shared.near_gates[level][part][column] = piece.gates;
      shared.near_closed[level][part][column] = piece.closed;
    }
  }

  // What enters the tile, from its own piece and what was collected. All but a step is done before it is known what
  // enters its group of groups.
  __device__ __forceinline__ Wide carry_after(const Piece<Wide>& own, Wide initial) const {
    const uint32_t group = tile / kFan, above = group / kFan;
    const bool ends_group = before + 1 == kFan && tile + 1 < t.tiles,
               ends_above = ends_group && groups_before + 1 == kFan;
    Piece<Wide> in_group = identity<Wide>(), in_above = identity<Wide>();
    for (int q = 0; q < before; ++q) in_group = joined(in_group, near(0, q, over(kTile)));
    if (ends_group && !ends_above) word_of(1, group)->publish(joined(in_group, own), params.tag);
    for (int q = 0; q < groups_before; ++q) in_above = joined(in_above, near(1, q, over(kGroup)));
    if constexpr (!kStep) in_group.gates = whole_power(over(kTile), static_cast<unsigned>(before));
    Piece<Wide> all = joined(in_above, in_group);
    if constexpr (!kStep) all.gates = over(kNear);
    Piece<Wide> entered{initial, cast<Wide>(1.0), true};
    while (above > 0 && !word_of(2, above - 1)->read(entered, params.tag)) {
    }
    const Wide carry = after(all, entered.total);
    if (ends_above) word_of(2, above)->publish({after(own, carry), cast<Wide>(1.0), true}, params.tag);
    return carry;
  }
};

}  // namespace dcs
