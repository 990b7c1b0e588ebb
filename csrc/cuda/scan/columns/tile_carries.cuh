// How the totals of a tile's parts become what enters them: within the tile, and from block to block by way of global
// memory.
#pragma once

#include "common/ptx/mbarrier.cuh"
#include "scan/carry/piece_words.cuh"
#include "scan/columns/tile_layout.cuh"

namespace dcs {

constexpr int kMostTurns = 4;

// base^exponent, clamped.
template <typename Wide>
__device__ __forceinline__ Wide power_over(Wide base, uint32_t exponent) {
  Wide power = cast<Wide>(1.0);
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = power_mul(power, base);
    base = power_mul(base, base);
  }
  return power;
}

// A tile's parts, part by part and column by column: their totals, then what enters them.
template <typename Wide>
struct TileTotals {
  Wide* values;
  Wide* gates;  // products of gates; null where one gamma makes them
  uint8_t* closed;
};

template <typename Wide, bool kStep>
__device__ __forceinline__ TileTotals<Wide> totals_of(const ColumnTiles& t, unsigned char* shared, int turn) {
  const int items = t.parts * t.span, turns = t.ahead + 1;
  Wide* const values = reinterpret_cast<Wide*>(shared + t.state_at);
  Wide* const gates = values + turns * items;
  uint8_t* const closed = reinterpret_cast<uint8_t*>(values + (kStep ? 2 : 1) * turns * items);
  return {values + turn * items, kStep ? gates + turn * items : nullptr, closed + turn * items};
}

struct TileBarriers {
  uint64_t totals[kMostTurns], carries[kMostTurns];
};

// The warps that collect carries, kCarryThreads threads: a team of lanes has a column, each lane some of its parts. A
// tile's total is published as soon as it is known. What enters a tile is folded from what entered the block's group of
// tiles one round before, the totals of all groups since then, and those of the tiles before in the same group, always
// in this order. Words are reused after kWordSlots rounds: who publishes a round knows that all blocks published four
// rounds before, which each does after it has collected what entered its tile of the round before last.
template <typename T, bool kStep>
struct TileCarries {
  using Wide = typename Types<T>::Wide;
  using Words = PieceWords<Wide, kStep>;

  const TileLayout& layout;
  const ScanProblem& p;
  const ColumnTiles& t;
  unsigned char* shared;
  TileBarriers& barriers;
  int column, lane, team, each;  // parts of a lane
  uint32_t first_word, apart;    // the column's, and from one tile's to the next one's

  Wide part_power, chunk_power, group_power, last_power;
  Wide into_group, into_next;    // what entered the group's tiles of the round before; a walk's next tile, of one block
  Piece<Wide> before[2], whole;  // the tile's parts before the lane's own; all

  __device__ __forceinline__ TileCarries(const TileLayout& given, unsigned char* memory, TileBarriers& of_block)
      : layout(given), p(given.p), t(given.t), shared(memory), barriers(of_block) {
    const int thread = threadIdx.x - t.threads;
    team = t.team;
    column = thread / team;
    lane = thread % team;
    each = (t.parts + team - 1) / team;
    apart = static_cast<uint32_t>(t.walks) * t.span;
    first_word = static_cast<uint32_t>(layout.first_walk) * t.span + column;
    part_power = chunk_power = group_power = last_power = cast<Wide>(1.0);
    into_group = into_next = cast<Wide>(0.0);
    before[0] = before[1] = whole = identity<Wide>();
  }

  __device__ __forceinline__ void run() {
    const int rounds = layout.rounds, late = t.peers > 1 && t.ahead > 0 ? 1 : 0;
    TileCursor added, collected;
    for (int round = 0; round < rounds + late; ++round) {
      before[0] = before[1];
      if (round < rounds) {
        const TilePlace at = layout.place_of(added);
        added.advance(t);
        if (at.starts) set_powers(at);
        add_up(at);
        if (t.peers > 1) publish(at);
      }
      if (!late) before[0] = before[1];
      if (round < late) continue;
      collect(layout.place_of(collected));
      collected.advance(t);
    }
  }

 private:
  __device__ __forceinline__ void set_powers(const TilePlace& at) {
    if constexpr (!kStep) {
      Wide gamma = cast<Wide>(p.gamma_value);
      if (p.gamma_kind == GammaKind::kRow && column < at.width)
        gamma = load_gamma<Wide>(p.gamma, p.gamma_dtype,
            at.outer * p.gamma_strides.outer + (at.column + column) * p.gamma_strides.inner, p.conjugate_gamma);
      part_power = power_over(gamma, t.part_steps);
      if (t.peers == 1) return;
      chunk_power = power_over(part_power, t.parts);
      group_power = power_over(chunk_power, t.group);
      last_power = power_over(chunk_power, t.peers - (t.groups - 1) * t.group);
    }
  }

  static __device__ __forceinline__ Piece<Wide> joined(const Piece<Wide>& first, const Piece<Wide>& then) {
    return {after(then, first.total), power_mul(first.gates, then.gates), first.closed || then.closed};
  }
  __device__ __forceinline__ Piece<Wide> part_of(const TileTotals<Wide>& totals, int part) const {
    const int item = part * t.span + column;
    Piece<Wide> piece{totals.values[item], part_power, totals.closed[item] != 0};
    if constexpr (kStep) piece.gates = totals.gates[item];
    return piece;
  }
  __device__ __forceinline__ Piece<Wide> from_lane(const Piece<Wide>& piece, int source) const {
    const auto moved = [&](Wide value) {
      return move_parts(value, [&](auto number) { return __shfl_sync(0xffffffffu, number, source); });
    };
    return {
        moved(piece.total), moved(piece.gates), __shfl_sync(0xffffffffu, static_cast<int>(piece.closed), source) != 0};
  }

  // The pieces of the team's lanes up to each one's own, of which there are `count`, `each` of a lane.
  __device__ __forceinline__ Piece<Wide> up_to_own(Piece<Wide> own, int each, int count) const {
    const int warp_lane = threadIdx.x % 32;
    for (int d = 1; d < team; d *= 2) {
      const Piece<Wide> other = from_lane(own, max(warp_lane - d, 0));
      const bool is_empty = (lane - d + 1) * each >= count;
      if (lane >= d) own = is_empty ? other : joined(other, own);
    }
    return own;
  }

  // The tile's total, and of each lane's parts what is before them.
  __device__ __forceinline__ void add_up(const TilePlace& at) {
    const int warp_lane = threadIdx.x % 32;
    mbarrier_wait(&barriers.totals[at.turn], at.parity);
    const TileTotals<Wide> totals = totals_of<Wide, kStep>(t, shared, at.turn);
    Piece<Wide> own = identity<Wide>();
    for (int q = 0; q < each; ++q) {
      const int part = lane * each + q;
      if (part >= t.parts || column >= at.width) break;
      const Piece<Wide> piece = part_of(totals, part);
      own = q == 0 ? piece : joined(own, piece);
    }
    own = up_to_own(own, each, t.parts);
    before[1] = from_lane(own, max(warp_lane - 1, 0));
    whole = from_lane(own, warp_lane - lane + team - 1);
  }

  // The words of tile `which` of a round, then of its groups.
  __device__ __forceinline__ Words* words_of(int round, int which) const {
    const uint32_t slot = static_cast<uint32_t>(round % kWordSlots) * (t.peers + t.groups) + which;
    return static_cast<Words*>(layout.params.words) + first_word + slot * apart;
  }
  __device__ __forceinline__ uint64_t tag_of(int round) const {
    return layout.params.tag + 2 * static_cast<uint64_t>(round);
  }
  struct Source {
    const Words* words;
    uint64_t tag;
    Wide power;
  };
  // `count` pieces as one, folded in order. The team's lanes share them, and ask for several before they wait.
  template <typename From>
  __device__ __forceinline__ Piece<Wide> read(bool exists, int count, const From& from) const {
    constexpr int kTogether = Words::kWords > 2 ? 2 : Words::kWords > 1 ? 4 : 6;
    const int each = (count + team - 1) / team, first = lane * each, end = exists ? min(first + each, count) : 0;
    Piece<Wide> own = identity<Wide>();
#pragma unroll 1
    for (int base = first; base < end; base += kTogether) {
      Words words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Source source = from(base + i);
#pragma unroll
        for (int k = 0; k < Words::kWords; ++k) {
          words[i].words[k] = {0, 0};
          load_word_if(base + i < end, &source.words->words[k], words[i].words[k]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (base + i >= end) break;
        const Source source = from(base + i);
        Piece<Wide> piece{cast<Wide>(0.0), source.power, false};
        if (!is_piece(words[i], source.tag, piece))
          while (!source.words->read(piece, source.tag)) {
          }
        own = base + i == first ? piece : joined(own, piece);
      }
    }
    __syncwarp();
    return from_lane(up_to_own(own, each, count), threadIdx.x % 32 - lane + team - 1);
  }
  // PieceWords::read of words that have been loaded.
  static __device__ __forceinline__ bool is_piece(const Words& loaded, uint64_t tag, Piece<Wide>& piece) {
    uint64_t* const total = reinterpret_cast<uint64_t*>(&piece.total);
    uint64_t* const gates = reinterpret_cast<uint64_t*>(&piece.gates);
    bool there = true;
#pragma unroll
    for (int k = 0; k < Words::kWords; ++k) {
      (k < Words::kValues ? total[k] : gates[k - Words::kValues]) = loaded.words[k].value;
      there = there && (loaded.words[k].state & ~uint64_t{1}) == tag;
    }
    piece.closed = loaded.words[0].state & 1;
    return there;
  }

  __device__ __forceinline__ void publish(const TilePlace& at) const {
    const bool exists = column < at.width;
    const int group = layout.rank / t.group, place = layout.rank - group * t.group;
    const bool ends_group = place + 1 == t.group || layout.rank + 1 == t.peers;
    const uint64_t tag = tag_of(at.round);
    if (!ends_group) {
      if (exists && lane == 0) words_of(at.round, layout.rank)->publish(whole, tag);
      return;
    }
    Piece<Wide> all = whole;
    if (place > 0) {
      const auto source = [&](int i) { return Source{words_of(at.round, group * t.group + i), tag, chunk_power}; };
      all = joined(read(exists, place, source), whole);
    }
    if (exists && lane == 0) words_of(at.round, t.peers + group)->publish(all, tag);
  }

  __device__ __forceinline__ Wide initial_of(const TilePlace& at) const {
    if (!p.initial || p.backward || column >= at.width) return cast<Wide>(0.0);
    return cast<Wide>(cast<typename Types<T>::Acc>(static_cast<const T*>(
        p.initial)[at.outer * p.initial_strides.outer + (at.column + column) * p.initial_strides.inner]));
  }

  // What enters the tile.
  __device__ __forceinline__ Wide into(const TilePlace& at) {
    if (t.peers == 1) {
      const Wide carry = at.starts ? initial_of(at) : into_next;
      into_next = after(whole, carry);
      return carry;
    }
    const bool exists = column < at.width;
    const int group = layout.rank / t.group, place = layout.rank - group * t.group;
    if (at.starts) into_group = initial_of(at);
    const int first = at.starts ? 0 : group;  // the next group to fold, of this round or of the one before
    const auto of_groups = [&](int i) {
      int which = first + i, round = at.round - (at.starts ? 0 : 1);
      if (which >= t.groups) which -= t.groups, ++round;
      const Wide power = which + 1 == t.groups ? last_power : group_power;
      return Source{words_of(round, t.peers + which), tag_of(round), power};
    };
    const int groups = at.starts ? group : t.groups;
    if (groups > 0) into_group = after(read(exists, groups, of_groups), into_group);
    if (place == 0) return into_group;
    const auto of_tiles = [&](int i) {
      return Source{words_of(at.round, group * t.group + i), tag_of(at.round), chunk_power};
    };
    return after(read(exists, place, of_tiles), into_group);
  }

  // Leaves what enters each part where its total was.
  __device__ __forceinline__ void collect(const TilePlace& at) {
    const TileTotals<Wide> totals = totals_of<Wide, kStep>(t, shared, at.turn);
    Wide carry = into(at);
    if (lane > 0) carry = after(before[0], carry);
    for (int q = 0; q < each; ++q) {
      const int part = lane * each + q;
      if (part >= t.parts || column >= at.width) break;
      const Piece<Wide> piece = part_of(totals, part);
      totals.values[part * t.span + column] = carry;
      carry = after(piece, carry);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers.carries[at.turn]);
  }
};

}  // namespace dcs
