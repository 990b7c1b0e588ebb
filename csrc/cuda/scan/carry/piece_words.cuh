// Pieces of a scan that blocks leave each other in global memory while they run.
#pragma once

#include "scan/carry/segment.cuh"
#include "scan/carry/word.cuh"

namespace dcs {

// A piece as 16-byte words, which are written and read whole: a part of a value, and beside it which call wrote it. A
// call's tag is an even number that memory is unlikely to hold (`new_tag`), so nothing is cleared before a launch; its
// lowest bit says whether the piece is closed. With `kGates` the product of the gates goes along: where the reader
// knows it, as a power of one gamma, it does not.
template <typename Wide, bool kGates>
struct PieceWords {
  static constexpr int kValues = sizeof(Wide) / 8, kWords = kValues * (kGates ? 2 : 1);
  Word words[kWords];

  __device__ __forceinline__ void publish(const Piece<Wide>& piece, uint64_t tag) {
    const uint64_t state = tag | (piece.closed ? 1 : 0);
    const uint64_t* const total = reinterpret_cast<const uint64_t*>(&piece.total);
    const uint64_t* const gates = reinterpret_cast<const uint64_t*>(&piece.gates);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(&words[i], i < kValues ? total[i] : gates[i - kValues], state);
  }
  __device__ __forceinline__ void publish(const Piece<Wide> (&piece)[1], uint64_t tag) { publish(piece[0], tag); }
  // Loads what `from` holds where `wanted`, without a branch.
  __device__ __forceinline__ void load_if(bool wanted, const PieceWords& from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) load_word_if(wanted, &from.words[i], words[i]);
  }
  // Whether the piece is in these words, which have been loaded; of `piece.gates` nothing is touched without `kGates`.
  __device__ __forceinline__ bool get(Piece<Wide>& piece, uint64_t tag) const {
    uint64_t* const total = reinterpret_cast<uint64_t*>(&piece.total);
    uint64_t* const gates = reinterpret_cast<uint64_t*>(&piece.gates);
    bool there = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      (i < kValues ? total[i] : gates[i - kValues]) = words[i].value;
      there = there && (words[i].state & ~uint64_t{1}) == tag;
      piece.closed = words[i].state & 1;
    }
    return there;
  }
  __device__ __forceinline__ bool get(Piece<Wide> (&piece)[1], uint64_t tag) const { return get(piece[0], tag); }
  // Whether the piece is there, in memory.
  __device__ __forceinline__ bool read(Piece<Wide>& piece, uint64_t tag) const {
    PieceWords loaded;
#pragma unroll
    for (int i = 0; i < kWords; ++i) loaded.words[i] = load_word(&words[i]);
    return loaded.get(piece, tag);
  }
};

// Two columns' pieces in one word: totals of halves, which are sums of floats, keep a float's digits. The two lowest
// bits of the tag say which are closed.
struct PairWord {
  Word word;

  __device__ __forceinline__ void publish(const Piece<double> (&pieces)[2], uint64_t tag) {
    const auto bits = [](double total) { return uint64_t{__float_as_uint(static_cast<float>(total))}; };
    const uint64_t closed = (pieces[0].closed ? 1 : 0) | (pieces[1].closed ? 2 : 0);
    store_word(&word, bits(pieces[0].total) | bits(pieces[1].total) << 32, tag ^ closed);
  }
  __device__ __forceinline__ void load_if(bool wanted, const PairWord& from) { load_word_if(wanted, &from.word, word); }
  __device__ __forceinline__ bool get(Piece<double> (&pieces)[2], uint64_t tag) const {
    const uint64_t closed = word.state ^ tag;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      pieces[u].total = static_cast<double>(__uint_as_float(static_cast<uint32_t>(word.value >> 32 * u)));
      pieces[u].closed = closed >> u & 1;
    }
    return closed <= 3;
  }
};

}  // namespace dcs
