// Carries between the tiles of a long row in one pass over memory: decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with
// decoupled look-back", NVIDIA NVR-2016-002) with a fixed association, so that the bits of a result do not depend on timing.
// Tiles come in groups of 32. A tile folds the totals of the tiles before it in its group, always in the same tree, onto the prefix of the group
// before; the prefixes of groups are one sequential fold, P[m] = S[m] + A[m] * P[m - 1], whichever group's prefix a tile happens to find ready.
#pragma once

#include "types.cuh"

namespace dcs {

constexpr int kGroup = 32;

// A scanned piece: its total from a zero carry, the product of its gates, and whether a cut inside stops the carry.
template <typename Wide>
struct Piece {
  Wide total;
  Wide gates;
  bool closed;
};

// The carry after a piece.
template <typename Wide>
__device__ __forceinline__ Wide after(const Piece<Wide>& piece, Wide carry) {
  return piece.closed ? piece.total : fold(piece.total, piece.gates, carry);
}

enum : uint32_t { kEmpty = 0, kTotal = 1, kPrefix = 2, kClosedBit = 4 };

// A piece in global memory, as 16-byte words that are written and read whole, each with its own state: no fence orders them.
struct alignas(16) Word {
  uint64_t value;
  uint64_t state;
};

__device__ __forceinline__ void store_word(Word* to, uint64_t value, uint64_t state) {
  asm volatile(
      "{\n .reg .b128 word;\n mov.b128 word, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to), "l"(value), "l"(state)
      : "memory");
}
__device__ __forceinline__ Word load_word(const Word* from) {
  Word word;
  asm volatile(
      "{\n .reg .b128 word;\n ld.relaxed.gpu.global.b128 word, [%2];\n mov.b128 {%0, %1}, word;\n}"
      : "=l"(word.value), "=l"(word.state)
      : "l"(from)
      : "memory");
  return word;
}

template <typename Wide>
struct Status {
  static constexpr int kValues = sizeof(Wide) / 8;  // 8-byte parts of a wide value
  static constexpr int kWords = 2 * kValues;  // total, gates
  Word words[kWords];

  __device__ __forceinline__ void publish(const Piece<Wide>& piece, uint32_t state) {
    const uint64_t tag = state | (piece.closed ? kClosedBit : 0);
    const uint64_t* total = reinterpret_cast<const uint64_t*>(&piece.total);
    const uint64_t* gates = reinterpret_cast<const uint64_t*>(&piece.gates);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      store_word(&words[i], total[i], tag);
      store_word(&words[kValues + i], gates[i], tag);
    }
  }
  // One reading; the state is kEmpty while the words are not all of one state.
  __device__ __forceinline__ uint32_t read(Piece<Wide>& piece) const {
    uint64_t* total = reinterpret_cast<uint64_t*>(&piece.total);
    uint64_t* gates = reinterpret_cast<uint64_t*>(&piece.gates);
    uint64_t tag = 0;
    bool same = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const Word word = load_word(&words[i]);
      (i < kValues ? total[i] : gates[i - kValues]) = word.value;
      if (i == 0) tag = word.state;
      same = same && word.state == tag;
    }
    piece.closed = tag & kClosedBit;
    return same ? static_cast<uint32_t>(tag) & ~kClosedBit : kEmpty;
  }
};

template <typename Wide>
__device__ __forceinline__ Piece<Wide> identity() {
  return {cast<Wide>(0.0), cast<Wide>(1.0), false};
}

// The fold of the warp's pieces, lane 0 first, always in the same tree; every lane gets it.
template <typename Wide>
__device__ __forceinline__ Piece<Wide> fold_warp(Piece<Wide> piece, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Wide total = shuffle_up(piece.total, d);
    const Wide gates = shuffle_up(piece.gates, d);
    const bool closed = __shfl_up_sync(0xffffffffu, piece.closed, d);
    if (lane >= d) {
      if (!piece.closed) {
        piece.total = fold(piece.total, piece.gates, total);
        piece.closed = closed;
      }
      piece.gates = clamped_mul(piece.gates, gates);
    }
  }
  return {shuffle(piece.total, 31), shuffle(piece.gates, 31), static_cast<bool>(__shfl_sync(0xffffffffu, piece.closed, 31))};
}

// All lanes' totals and products of gates up to their own, of kLanes of them.
template <int kLanes>
__device__ __forceinline__ void fold_lanes(double& total, double& gates, int lane) {
  const auto fold_with = [&](const auto& times) {
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      const double other = shuffle_up(total, d), other_gates = shuffle_up(gates, d);
      if (lane >= d) {
        total = fold(total, gates, other);
        gates = times(gates, other_gates);
      }
    }
  };
  if (__all_sync(0xffffffffu, fabs(gates) <= 1.0)) fold_with([](double a, double b) { return a * b; });
  else fold_with([](double a, double b) { return clamped_mul(a, b); });
}

// The row's pieces in global memory, zeroed before the launch. The tiles before a tile are in blocks that have started before its own: blocks of lower
// index.
template <typename Wide>
struct Chain {
  Status<Wide>* tiles;
  Status<Wide>* groups;
  int64_t tile;
  int64_t tile_count;

  __device__ __forceinline__ int64_t group() const { return tile / kGroup; }
  __device__ __forceinline__ int place() const { return static_cast<int>(tile % kGroup); }
  __device__ __forceinline__ bool closes_group() const { return place() == kGroup - 1 && tile + 1 < tile_count; }

  // One lane, as early as the total is known.
  __device__ __forceinline__ void publish(const Piece<Wide>& own) const {
    if (tile + 1 < tile_count) tiles[tile].publish(own, kTotal);
  }

  // One warp: the fold of the tiles before this one in its group. The group's last tile publishes the group's total and leaves it in `whole`.
  __device__ Piece<Wide> fold_before(const Piece<Wide>& own, Piece<Wide>& whole, int lane) const {
    const Piece<Wide> piece = lane < place() ? wait_for_total(group() * kGroup + lane) : identity<Wide>();
    __syncwarp();
    if (closes_group()) {
      whole = fold_warp(lane == place() ? own : piece, lane);
      if (lane == 0) groups[group()].publish(whole, group() == 0 || whole.closed ? kPrefix : kTotal);
    }
    return fold_warp(piece, lane);
  }

  // One warp: the total of the group before, from its tiles: sooner known than the group's own word, and folded in the same tree.
  __device__ Piece<Wide> group_before(int lane) const {
    if (group() == 0) return identity<Wide>();
    const Piece<Wide> piece = wait_for_total((group() - 1) * kGroup + lane);
    __syncwarp();
    return fold_warp(piece, lane);
  }

  // One warp: the carry after the groups before that, from the nearest published prefix folded forward group by group.
  __device__ Wide groups_before(int lane) const {
    if (group() < 2) return cast<Wide>(0.0);
    Piece<Wide> found = identity<Wide>();
    uint32_t state = kEmpty;
    int nearest;
    while (true) {
      const int64_t index = group() - 2 - lane;
      if (index >= 0 && state != kPrefix) state = groups[index].read(found);
      const uint32_t prefixes = __ballot_sync(0xffffffffu, state == kPrefix);
      const uint32_t ready = __ballot_sync(0xffffffffu, state != kEmpty);
      nearest = __ffs(prefixes) - 1;
      if (prefixes && (~ready & ((1u << nearest) - 1)) == 0) break;
      __nanosleep(100);
    }
    Wide prefix = shuffle(found.total, nearest);
    for (int i = nearest - 1; i >= 0; --i) {
      const Piece<Wide> next{shuffle(found.total, i), shuffle(found.gates, i), static_cast<bool>(__shfl_sync(0xffffffffu, found.closed, i))};
      prefix = after(next, prefix);
    }
    return prefix;
  }

  // One lane of a group's last tile.
  __device__ __forceinline__ void publish_prefix(const Piece<Wide>& whole, Wide prefix) const {
    if (group() > 0 && !whole.closed) groups[group()].publish({after(whole, prefix), whole.gates, false}, kPrefix);
  }

 private:
  __device__ __forceinline__ Piece<Wide> wait_for_total(int64_t index) const {
    Piece<Wide> piece;
    while (tiles[index].read(piece) == kEmpty) __nanosleep(100);
    return piece;
  }
};

}  // namespace dcs
