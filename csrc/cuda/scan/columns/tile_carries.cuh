// The carry into each part of a tile of columns: from the totals of the parts before it, in shared memory, and of the
// tiles before, in global memory (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix
// scan with decoupled look-back", NVIDIA NVR-2016-002). Some lanes fold a column, always in the same tree: each has
// some of its parts, and the words of some tiles before. All tiles are one group where they are few; else these lanes'
// words are a group's, others read as many groups' at the same time, and a group of groups waits for the one before.
// Blocks begin in the order of their tiles, and a tile's total needs its own elements only, so every total that is
// waited for will be published.
#pragma once

#include "scan/carry/segment_words.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

// Of a block's columns, at most kColumns.
template <typename Wide, bool kStep, int kColumns = kSpan>
struct CarryExchange {
  static constexpr int kPowers = kStep ? 0 : kColumns;
  static constexpr int kItems = kColumnThreads * 3 / 2;  // rows of an odd pitch
  // Of the parts, then of the parts before them; with a per-row gamma `gates` are powers over the parts before from the
  // start, and with a shared gamma `before` are those.
  Wide totals[kItems], gates[kItems];
  bool closed[kItems];
  Segment<Wide> tiles[kColumns], near[kColumns];  // this one, those before in the group
  Wide carries[kColumns];                         // into the group
  Wide powers[kResidentPowers * kPowers + 1];     // a column's, or the first one's for all
  Wide before[kStep ? 1 : kColumnThreads];
  Wide over_tiles, over_groups;  // of a shared gamma: over the tiles, and groups, before
  uint64_t tag;                  // of this launch's words
};

// A thread's share of the exchange, which has registers for kMostReads loads in flight. Its own part and column in the
// tile may be others than those it folds for.
template <typename T, bool kStep, int kMostReads, int kColumns = kSpan>
struct TileCarries {
  using Wide = typename Types<T>::Wide;
  using Values = ColumnValues<T, kStep>;
  using Words = SegmentWords<Wide, kStep>;

  static constexpr int kReads = sizeof(Words) > 16 ? 1 : kMostReads;  // of a lane's words, in flight

  enum Level { kParts = 0, kTiles = kPartPowers, kGroups = kPartPowers + kTilePowers };  // offsets of its powers

  const ResidentColumnsParams& params;
  const ResidentColumnsPlan& t = params.plan;
  CarryExchange<Wide, kStep, kColumns>& shared;
  uint32_t tile, strip;
  int width;  // columns of the block
  int pitch;  // of the parts' columns in shared memory
  int fan, lane;
  int before, groups_before;  // tiles before in the group, groups before in theirs

  __device__ __forceinline__ TileCarries(const ResidentColumnsParams& given,
      CarryExchange<Wide, kStep, kColumns>& memory, uint32_t of_tile, uint32_t of_strip, int columns)
      : params(given), shared(memory), tile(of_tile), strip(of_strip), width(columns) {
    pitch = t.span | 1;
    fan = 1 << t.fan_bits;
    lane = static_cast<int>(threadIdx.x) & (fan - 1);
    before = static_cast<int>(tile) & ((fan << t.read_bits) - 1);
    groups_before = static_cast<int>(group()) & ((fan << t.read_bits) - 1);
  }

  __device__ __forceinline__ uint32_t group() const { return tile >> (t.fan_bits + t.read_bits); }
  __device__ __forceinline__ bool has_number() const {
    return !kStep && params.problem.gamma_kind == GammaKind::kNumber;
  }
  // The powers of gammas that folds multiply by. `part`, `column` and `gamma` are the thread's own.
  __device__ __forceinline__ void store_powers(bool works, int part, int column, Wide gamma) const {
    if constexpr (!kStep) {
      const int thread = static_cast<int>(threadIdx.x);
      if (has_number()) {
        if (thread < kResidentPowers) shared.powers[thread] = cast<Wide>(t.powers[thread]);
        if (thread < t.parts) shared.before[thread] = cast<Wide>(power_over<kPartPowers>(t.powers, thread));
        if (thread == kColumnThreads - 1) {
          shared.over_tiles = cast<Wide>(power_over<kTilePowers>(t.powers + kTiles, before));
          shared.over_groups = cast<Wide>(power_over<kMostFanBits>(t.powers + kGroups, groups_before));
        }
        return;
      }
      if (!works) return;
      // One tile has no others to fold. A thread has all powers of a level: each is the square of the one before.
      const int levels = t.tiles == 1 ? 1 : t.groups == 1 ? 2 : 3;
      shared.gates[part * pitch + column] = whole_power(gamma, static_cast<unsigned>(part * t.part_steps));
#pragma unroll 1
      for (int level = part; level < levels; level += t.parts) {
        Wide* const powers = shared.powers + column * kResidentPowers +
            (level == 0          ? kParts
                    : level == 1 ? kTiles
                                 : kGroups);
        Wide power = whole_power(gamma,
            static_cast<unsigned>(t.part_steps) * (level > 0 ? t.parts : 1)
                << (level == 2 ? t.fan_bits + t.read_bits : 0));
        const int count = t.fan_bits + (level == 0 ? t.lane_bits : t.read_bits);
#pragma unroll 1
        for (int i = 0; i < count; ++i, power = power_mul(power, power)) powers[i] = power;
      }
    }
  }

  __device__ __forceinline__ void store(int part, int column, const Segment<Wide>& segment) const {
    const int item = part * pitch + column;
    shared.totals[item] = segment.total;
    if constexpr (kStep) shared.gates[item] = segment.gates;
    shared.closed[item] = segment.closed;
  }

  // The carry into a part, after `exchange`.
  __device__ __forceinline__ Wide entering(int part, int column) const {
    Wide carry = shared.carries[column];
    if (t.tiles > 1) carry = after(shared.near[column], carry);
    return after(get(part, column), carry);
  }
  // From the parts' segments (`store`) the carry into each, by all threads.
  __device__ __forceinline__ void exchange(const ColumnIndex& block) const {
    __syncthreads();
    const int folding = t.groups > 1 ? kColumnThreads / 2 : kColumnThreads, thread = static_cast<int>(threadIdx.x);
    const bool folds_groups = thread >= folding;
    const int lanes_column = (folds_groups ? thread - folding : thread) >> t.fan_bits,
              column = min(lanes_column, width - 1);
    const bool is_last = lanes_column < width && lane + 1 == fan;
    if (__any_sync(0xffffffffu, lanes_column < width)) {
      if (folds_groups) fold_groups(column, is_last, block);
      else fold_tiles(column, lanes_column < width, is_last, block);
    }
    __syncthreads();
    if (ends_above() && is_last && !folds_groups && tile + 1 < t.tiles) {
      const Wide carry = after(shared.near[column], shared.carries[column]);
      const Segment<Wide> segment{after(shared.tiles[column], carry), cast<Wide>(1.0), true};
      words()[index_of(2, group() >> (t.fan_bits + t.read_bits), column)].publish(segment, shared.tag);
    }
  }

  // The parts' sums (`store`): `take` gets that of a column.
  template <typename Take>
  __device__ __forceinline__ void add_sums(const Take& take) const {
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x >> t.fan_bits);
    Wide sum = cast<Wide>(0.0);
#pragma unroll 1
    for (int part = lane; part < t.parts; part += fan) sum = sum + shared.totals[part * pitch + min(column, width - 1)];
    for (int d = fan / 2; d > 0; d /= 2) sum = sum + shuffle_down(sum, d);
    if (lane == 0 && column < width) take(column, sum);
  }

  __device__ __forceinline__ Segment<Wide> get(int part, int column) const {
    const int item = part * pitch + column;
    return {shared.totals[item], has_number() ? shared.before[part] : shared.gates[item], shared.closed[item]};
  }

 private:
  __device__ __forceinline__ bool ends_group() const { return before + 1 == fan << t.read_bits; }
  __device__ __forceinline__ bool ends_above() const { return ends_group() && groups_before + 1 == fan << t.read_bits; }
  __device__ __forceinline__ const Wide* powers_of(int column) const {
    if constexpr (kStep) return nullptr;
    else return shared.powers + (params.problem.gamma_kind == GammaKind::kNumber ? 0 : column * kResidentPowers);
  }
  // From the powers over 1, 2, 4, ... segments that over so many.
  template <int kBits, typename Power>
  static __device__ __forceinline__ Power power_over(const Power* powers, int segments) {
    Power power = cast<Power>(1.0);
#pragma unroll
    for (int d = 0; d < kBits; ++d) {
      if (!(segments >> d & 1)) continue;
      if constexpr (std::is_same_v<Power, double>) power *= powers[d];
      else power = power_mul(power, powers[d]);
    }
    if constexpr (std::is_same_v<Power, double>) power = bounded_product(power, powers[0]);
    return power;
  }
  // Of segments one after the other; where powers take carries over them, without the product.
  static __device__ __forceinline__ Segment<Wide> joined(const Segment<Wide>& first, const Segment<Wide>& then) {
    return {after(then, first.total), kStep ? power_mul(first.gates, then.gates) : first.gates,
        first.closed || then.closed};
  }

  // Each lane's segment with those of the lanes before it. `powers` take a carry over 1, 2, 4, ... lanes' segments;
  // lanes without one come first.
  __device__ __forceinline__ void fold_lanes(Segment<Wide>& segment, const Wide* powers) const {
    const unsigned closed =
        __ballot_sync(0xffffffffu, segment.closed) >> (threadIdx.x % 32 - lane) & ((2u << lane) - 1);
    const int reach =
        closed ? lane - 31 + __clz(static_cast<int>(closed)) : lane;  // lanes up to the last closed segment
#pragma unroll
    for (int bit = 0; bit < kMostFanBits; ++bit) {
      if (bit >= t.fan_bits) break;
      const int d = 1 << bit;
      const Wide total = shuffle_up(segment.total, d, fan);
      Wide power = cast<Wide>(1.0), gates = power;
      if constexpr (kStep) power = segment.gates, gates = shuffle_up(segment.gates, d, fan);
      else power = powers[bit];
      if (d > reach) continue;
      segment.total = fold(segment.total, power, total);
      if constexpr (kStep) segment.gates = power_mul(segment.gates, gates);
    }
    segment.closed = closed != 0;
  }

  // Visits the lane's parts of a column.
  template <typename Visit>
  __device__ __forceinline__ void each_part(int column, const Visit& visit) const {
    const int many = 1 << t.lane_bits, first = ((lane - fan) << t.lane_bits) + t.parts;
    Wide over_part = cast<Wide>(1.0);
    if constexpr (!kStep) over_part = powers_of(column)[kParts];
#pragma unroll 1
    for (int part = max(first, 0); part < first + many; ++part) {
      const int item = part * pitch + column;
      visit(item, Segment<Wide>{shared.totals[item], kStep ? shared.gates[item] : over_part, shared.closed[item]});
    }
  }
  // The segments of the parts up to a lane's last one.
  __device__ __forceinline__ Segment<Wide> fold_parts(int column) const {
    Segment<Wide> own = identity<Wide>();
    each_part(column, [&](int, const Segment<Wide>& segment) { own = joined(own, segment); });
    fold_lanes(own, powers_of(column) + kParts + t.lane_bits);
    return own;
  }
  // Stores over each of a lane's parts the segment of all before it in the tile; `folded` is what fold_parts gave.
  __device__ __forceinline__ void store_before(int column, bool exists, const Segment<Wide>& folded) const {
    Segment<Wide> running{shuffle_up(folded.total, 1, fan), cast<Wide>(1.0), false};
    if constexpr (kStep) running.gates = shuffle_up(folded.gates, 1, fan);
    running.closed = __shfl_up_sync(0xffffffffu, static_cast<int>(folded.closed), 1, fan) != 0;
    if (lane == 0) running = identity<Wide>();
    if (!exists) return;  // such lanes would read what those of the last column write
    each_part(column, [&](int item, const Segment<Wide>& segment) {
      shared.totals[item] = running.total;
      shared.closed[item] = running.closed;
      if constexpr (kStep) shared.gates[item] = running.gates;
      running = joined(running, segment);
    });
  }

  // The lanes' words of one level, `count` of them up to `end`, folded in the last lane: a lane has 2^read_bits of
  // them, of which the first ones may not exist. All that are missing are loaded at once, as each would take a round
  // trip to memory.
  __device__ __forceinline__ void fold_words(
      int column, int level, uint32_t end, int count, Level powers, Segment<Wide>& folded) const {
    const int first = count + ((lane - fan) << t.read_bits);
    const uint32_t apart = words_apart();
    // Of the lane's next word, which may not exist; words from `least` on do, and so many are left.
    uint32_t index = index_of(level, end, column) + static_cast<uint32_t>(first - count) * apart;
    int least = -first, left = 1 << t.read_bits;
    Words asked[kReads]{};
    bool missing[kReads];
    const auto ask = [&] {  // without a branch, at whose end they would be waited for
#pragma unroll
      for (int i = 0; i < kReads; ++i) asked[i].load_if(missing[i], words()[index + static_cast<uint32_t>(i) * apart]);
    };
    const auto ask_first = [&] {
#pragma unroll
      for (int i = 0; i < kReads; ++i) missing[i] = i >= least && i < left;
      ask();
    };
    ask_first();
    folded = identity<Wide>();
#pragma unroll 1
    while (true) {
      Segment<Wide> segment;
#pragma unroll 1
      while (true) {
        bool is_complete = true;
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          missing[i] = missing[i] && !asked[i].get(segment, shared.tag);
          is_complete = is_complete && !missing[i];
        }
        if (is_complete) break;
        ask();
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        if (i >= left) break;
        asked[i].get(segment, shared.tag);
        if (i < least) segment = identity<Wide>();
        if constexpr (!kStep) segment.gates = powers_of(column)[powers];
        folded = joined(folded, segment);
      }
      if (kReads >= 1 << most_read_bits(kStep) || (left -= kReads) <= 0) break;
      least -= kReads;
      index += kReads * apart;
      ask_first();
    }
    if (count > 0) fold_lanes(folded, powers_of(column) + powers + t.read_bits);
  }

  // Of a column: the tile's total, what is before each part in it, and the tiles before in the group.
  __device__ __forceinline__ void fold_tiles(int column, bool exists, bool is_last, const ColumnIndex& block) const {
    Segment<Wide> own = fold_parts(column), near;
    const bool publishes = is_last && tile + 1 < t.tiles;
    if (publishes && !ends_group()) words()[index_of(0, tile, column)].publish(own, shared.tag);
    // Before the words are loaded, as most are published later: a word that is missing takes another round trip.
    store_before(column, exists, own);
    if (is_last) {
      if constexpr (!kStep) {
        own.gates = powers_of(column)[kTiles];
        shared.near[column].gates =
            has_number() ? shared.over_tiles : power_over<kTilePowers>(powers_of(column) + kTiles, before);
      }
      shared.tiles[column] = own;
      if (t.groups == 1) shared.carries[column] = initial_of({block.outer, block.column + column});
    }
    if (t.tiles == 1) return;
    fold_words(column, 0, tile, before, kTiles, near);
    if (!is_last) return;
    shared.near[column].total = near.total;
    shared.near[column].closed = near.closed;
    if constexpr (kStep) shared.near[column].gates = near.gates;
    near = joined(near, shared.tiles[column]);
    if (publishes && ends_group() && !ends_above()) words()[index_of(1, group(), column)].publish(near, shared.tag);
  }
  // The carry into their group.
  __device__ __forceinline__ void fold_groups(int column, bool is_last, const ColumnIndex& block) const {
    const uint32_t above = group() >> (t.fan_bits + t.read_bits);
    Segment<Wide> groups, carry;
    fold_words(column, 1, group(), groups_before, kGroups, groups);
    if (!is_last) return;
    if (above > 0) {
      Words word{};
      do word.load_if(true, words()[index_of(2, above - 1, column)]);
      while (!word.get(carry, shared.tag));
    }
    if (above == 0) carry.total = initial_of({block.outer, block.column + column});
    if constexpr (!kStep)
      groups.gates =
          has_number() ? shared.over_groups : power_over<kMostFanBits>(powers_of(column) + kGroups, groups_before);
    shared.carries[column] = after(groups, carry.total);
  }
  __device__ __forceinline__ Wide initial_of(const ColumnIndex& at) const {
    return params.problem.backward ? cast<Wide>(0.0) : Values::initial_of(params.problem, at, 0);
  }
  // Of tiles, of groups, of groups of groups.
  __device__ __forceinline__ Words* words() const { return static_cast<Words*>(params.workspace); }
  __device__ __forceinline__ uint32_t words_apart() const {  // from a tile to the next
    return static_cast<uint32_t>(t.strips) * static_cast<uint32_t>(t.span);
  }
  __device__ __forceinline__ uint32_t index_of(int level, uint32_t number, int column) const {
    const uint32_t at =
        number + (level > 0 ? static_cast<uint32_t>(t.tiles) : 0) + (level > 1 ? static_cast<uint32_t>(t.groups) : 0);
    return at * words_apart() + strip * static_cast<uint32_t>(t.span) + static_cast<uint32_t>(column);
  }
};

}  // namespace dcs
