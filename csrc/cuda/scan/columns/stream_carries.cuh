// The warps of columns/stream_columns.cuh that pass carries on: what enters a tile's parts from those before, and,
// once the tile's total is published, what enters the tile. Where many blocks share an outer row they are in groups,
// the last of which publishes the group's total, too, as soon as it knows the others'.
#pragma once

#include "scan/carry/segment_words.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/stream_tile.cuh"

namespace dcs {

// One of the words that are read for every tile: those between the block's last tile and this one, the nearest first.
struct StreamWord {
  bool exists, is_group, is_own;  // is_own: of a tile of the block's group and round
  int rounds_ago, member;         // or group
  int behind;                     // tiles of what is nearer

  __device__ __forceinline__ StreamWord() {}
  __device__ __forceinline__ StreamWord(const StreamColumnsPlan& t, int block, int number) {
    const int group = block / t.group, first = group * t.group, own = block - first,
              size = min(t.group, t.sharers - first), others = t.groups - 1;
    const int left = number - own;  // words before this one that are no own ones
    is_own = left < 0;
    is_group = !is_own && left < others;
    exists = left < others + size - 1 - own;
    rounds_ago = left < group ? 0 : 1;
    if (is_own) {
      member = block - 1 - number;
      behind = number;
    } else if (is_group) {
      // All groups but the last one are whole.
      const int last = t.sharers - others * t.group;
      member = left < group ? group - 1 - left : others - (left - group);
      behind = own + (left <= group ? left * t.group : (left - 1) * t.group + last);
    } else {
      member = first + size - 1 - (left - others);
      behind = t.sharers - size + own + left - others;
    }
  }
};

__device__ __forceinline__ int stream_carry_warps(int64_t columns) {
  const int bits = stream_carry_bits(columns);
  return static_cast<int>(columns + (1 << bits) - 1) >> bits;
}

// A warp has 2^kBits neighboring columns, of which neighboring lanes are; so many lanes, each with some parts and
// words, share one.
template <typename T, int kBits>
struct StreamCarries {
  using Wide = typename Types<T>::Wide;
  using Words = SegmentWords<Wide, false>;
  static constexpr int kColumns = 1 << kBits, kLanes = 32 >> kBits, kLevels = 5 - kBits,
                       kWords = stream_words(kBits) / kLanes;

  const StreamColumnsParams& params;
  const ScanProblem& p;
  const StreamColumnsPlan& t;
  StreamShared<Wide>& shared;
  Words* const memory;
  const uint64_t tag;
  const int share;        // of a column: the last lane of it has the last parts
  const int own, column;  // the lane's own column may not exist: then the last one stands for it
  StreamPowers<Wide>& powers;
  Wide* const behind;  // powers over what is behind each word
  StreamWord words[kWords];

  __device__ __forceinline__ StreamCarries(const StreamColumnsParams& given, StreamShared<Wide>& with, int warp)
      : params(given),
        p(given.problem),
        t(given.plan),
        shared(with),
        memory(static_cast<Words*>(given.workspace)),
        tag(with.tag),
        share(threadIdx.x % 32 >> kBits),
        own(warp * kColumns + static_cast<int>(threadIdx.x) % kColumns),
        column(min(own, static_cast<int>(p.inner) - 1)),
        powers(with.powers[column]),
        behind(with.behind + column * (kLanes * kWords)) {
    const int member = StreamCursor(t).member;
#pragma unroll
    for (int j = 0; j < kWords; ++j) words[j] = StreamWord(t, member, share + kLanes * j);
  }

  __device__ __forceinline__ bool exists() const { return own < p.inner; }
  __device__ __forceinline__ int lane_parts() const { return (t.parts + kLanes - 1) / kLanes; }

  // Of the only gamma, or of those of the block's only outer row.
  __device__ __forceinline__ void store_powers(const StreamCursor& at) const {
    if (exists()) {
      const Wide gamma = ColumnValues<T, false>::gamma_of(p, {at.outer, column}, 0);
      const Wide part = params.over_part_of(gamma), tile = params.over_tile_of(gamma);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        behind[share + kLanes * j] = whole_power(tile, static_cast<unsigned>(max(words[j].behind, 0)));
      if (share < kLevels) powers.lanes[share] = whole_power(part, static_cast<unsigned>(lane_parts()) << share);
      if (share == 0) {
        powers.part = part;
        powers.tile = tile;
        powers.first = whole_power(tile, static_cast<unsigned>(at.member));
        powers.round = whole_power(tile, static_cast<unsigned>(t.sharers - 1));
      }
    }
    __syncwarp();
  }

  // All columns' words of a tile or group are neighbors. Those of an outer row: of tiles, then of groups, round after
  // round. Blocks that are groups of their own leave the former alone.
  __device__ __forceinline__ Words& word_of(const StreamCursor& at, int64_t word) const {
    return memory[(at.outer * t.strip_words + word) * p.inner + column];
  }
  __device__ __forceinline__ int64_t tile_word(int round, int member) const {
    return int64_t{round} * t.sharers + member;
  }
  __device__ __forceinline__ int64_t group_word(int round, int group) const {
    return t.tiles + int64_t{round} * t.groups + group;
  }
  __device__ __forceinline__ void publish(const StreamCursor& at, int64_t word, Wide total) const {
    word_of(at, word).publish({total, cast<Wide>(1.0), false}, tag);
  }

  // What enters parts from those before; publishes the tile's total.
  __device__ __forceinline__ void fold_parts(const StreamCursor& at) const {
    const int many = lane_parts(), end = t.parts - (kLanes - 1 - share) * many, inner = static_cast<int>(p.inner);
    Wide* const parts = shared.parts[at.turn()] + column;
    const Wide over_part = powers.part;
    Wide total = cast<Wide>(0.0);
#pragma unroll 2
    for (int part = max(end - many, 0); part < end; ++part) total = fold(parts[part * inner], over_part, total);
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const Wide other = shuffle_up(total, kColumns << level);
      if (share >= 1 << level) total = fold(total, powers.lanes[level], other);
    }
    if (share == kLanes - 1 && exists()) {
      shared.totals[column] = total;
      if (t.sharers > 1 && at.tile + 1 < t.tiles)
        publish(at, t.group > 1 ? tile_word(at.round, at.member) : group_word(at.round, at.member), total);
    }
    total = shuffle_up(total, kColumns);
    if (share == 0) total = cast<Wide>(0.0);
    if (exists()) {
#pragma unroll 2
      for (int part = max(end - many, 0); part < end; ++part) {
        const Wide of_part = parts[part * inner];
        parts[part * inner] = total;
        total = fold(of_part, over_part, total);
      }
    }
    __syncwarp();
  }

  // What the other blocks' tiles since the block's last one add to a carry.
  __device__ __forceinline__ Wide gather(const StreamCursor& at) const {
    Words asked[kWords]{};
    Segment<Wide> segments[kWords];
    const Words* from[kWords];
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const StreamWord& word = words[j];
      const int round = at.round - word.rounds_ago;
      from[j] = &word_of(at, word.is_group ? group_word(round, word.member) : tile_word(round, word.member));
      segments[j] = identity<Wide>();
      if (word.exists && round >= 0) missing |= 1u << j;
    }
    const auto ask = [&](uint32_t now) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) asked[j].load_if(now >> j & 1, *from[j]);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if ((now >> j & 1) && asked[j].get(segments[j], tag)) missing &= ~(1u << j);
    };
    const auto add_up = [&](uint32_t which) {
      Wide sum = cast<Wide>(0.0);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if (which >> j & 1) sum = fold(sum, behind[share + kLanes * j], segments[j].total);
#pragma unroll
      for (int d = 16; d >= kColumns; d /= 2)
        sum = sum + move_parts(sum, [d](auto part) { return __shfl_xor_sync(0xffffffffu, part, d); });
      return sum;
    };
    const uint32_t wanted = missing;
    if (t.group > 1 && at.tile + 1 < t.tiles && (at.member + 1 == t.sharers || at.member % t.group + 1 == t.group)) {
      uint32_t of_group = 0;
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if (words[j].is_own) of_group |= 1u << j;
      while (__any_sync(0xffffffffu, (missing & of_group) != 0)) ask(missing & of_group);
      const Wide total = fold(shared.totals[column], powers.tile, add_up(of_group));
      if (share == 0 && exists()) publish(at, group_word(at.round, at.member / t.group), total);
    }
    while (__any_sync(0xffffffffu, missing != 0)) ask(missing);
    return add_up(wanted);
  }

  __device__ __forceinline__ void run() const {
    const int carry_threads = 32 * stream_carry_warps(p.inner);
    StreamCursor at(t);
    store_powers(at);
    for (; at.outer < p.outer; at.next()) {
      wait_at(kTotalsBarrier + at.turn(), kStreamScanThreads + carry_threads);
      fold_parts(at);
      Wide carry = t.sharers > 1 ? gather(at) : cast<Wide>(0.0);
      if (share == 0 && exists()) {
        if (at.round > 0) carry = fold(carry, powers.round, shared.ends[column]);
        else if (p.initial)
          carry = fold(carry, powers.first, ColumnValues<T, false>::initial_of(p, {at.outer, column}, 0));
        shared.carries[at.turn()][column] = carry;
        shared.ends[column] = fold(shared.totals[column], powers.tile, carry);
      }
      mbarrier_arrive(&shared.carries_ready[at.turn()]);
    }
  }
};

// A warp without any column has nothing to do.
template <typename T>
__device__ __forceinline__ void pass_stream_carries(
    const StreamColumnsParams& params, StreamShared<typename Types<T>::Wide>& shared) {
  const int bits = stream_carry_bits(params.problem.inner),
            warp = static_cast<int>(threadIdx.x - kStreamScanThreads) / 32;
  if (warp >= stream_carry_warps(params.problem.inner)) return;
  if (bits == 0) StreamCarries<T, 0>(params, shared, warp).run();
  else StreamCarries<T, 1>(params, shared, warp).run();
}

}  // namespace dcs
