// Tiles of columns in shared memory: where they lie in time and among the columns, and how their rows come and go.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/element_types.cuh"
#include "scan/plan/column_tiles.h"

namespace dcs {

struct TiledColumnsParams {
  ScanProblem problem;
  ColumnTiles tiles;
  void* words;  // of pieces that blocks leave each other (carry/piece_words.cuh)
  uint64_t tag;
};

// One tile of a block: some steps of a span of columns. `first` counts in the order of the scan, `row` in memory.
struct TilePlace {
  int64_t column;
  int outer, walk, first, row, round, count, width;
  int stage, turn;    // of shared memory
  uint32_t parity;    // of the turn's barriers
  bool starts, ends;  // the first and the last one of its walk that the block takes
};

// A block's tiles one after the other.
struct TileCursor {
  int round = 0, stage = 0, turn = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(const ColumnTiles& t) {
    ++round;
    if (++stage == t.stages) stage = 0;
    if (++turn > t.ahead) {
      turn = 0;
      parity ^= 1;
    }
  }
};

// Elements of so many bytes, as they are copied.
template <int kSize>
using Copied = std::conditional_t<kSize == 1, uint8_t,
    std::conditional_t<kSize == 2, uint16_t,
        std::conditional_t<kSize == 4, uint32_t, std::conditional_t<kSize == 8, uint64_t, uint4>>>>;

struct TileLayout {
  const TiledColumnsParams& params;
  const ScanProblem& p;
  const ColumnTiles& t;
  int rank, first_walk, rounds;  // of this block: its place among its peers, its first walk, its tiles

  __device__ __forceinline__ explicit TileLayout(const TiledColumnsParams& given)
      : params(given), p(given.problem), t(given.tiles) {
    const int block = static_cast<int>(blockIdx.x), walks = static_cast<int>(t.walks);
    rank = t.peers == 1 ? 0 : block / walks;
    first_walk = block - rank * walks;
    if (t.peers == 1) rounds = ((walks - 1 - block) / static_cast<int>(gridDim.x) + 1) * t.chunks;
    else rounds = (t.chunks - 1 - rank) / t.peers + 1;
  }

  __device__ __forceinline__ TilePlace place_of(const TileCursor& cursor) const {
    TilePlace at;
    const int round = cursor.round;
    int chunk, turn = 0;
    at.round = round;
    at.stage = cursor.stage;
    at.turn = cursor.turn;
    at.parity = cursor.parity;
    at.walk = first_walk;
    if (t.peers == 1) {
      if (t.walks > gridDim.x) turn = round / t.chunks;
      chunk = round - turn * t.chunks;
      at.walk += turn * static_cast<int>(gridDim.x);
      at.starts = chunk == 0;
      at.ends = chunk + 1 == t.chunks;
    } else {
      chunk = round * t.peers + rank;
      at.starts = round == 0;
      at.ends = chunk + t.peers >= t.chunks;
    }
    at.outer = t.outer == 1 ? 0 : t.spans == 1 ? at.walk : at.walk / t.spans;
    at.column = static_cast<int64_t>(at.walk - at.outer * t.spans) * t.span;
    at.width = static_cast<int>(min(static_cast<int64_t>(t.span), p.inner - at.column));
    at.first = chunk * t.tile_steps;
    const int steps = static_cast<int>(t.steps);
    at.count = min(t.tile_steps, steps - at.first);
    at.row = p.reverse ? steps - at.first - at.count : at.first;
    return at;
  }

  template <int kSize>
  __device__ __forceinline__ const char* memory_of(
      const void* pointer, const Strides& strides, const TilePlace& at, int row) const {
    return static_cast<const char*>(pointer) +
        (at.outer * strides.outer + at.column * strides.inner + row * strides.time) * kSize;
  }
  // Where in shared memory a tile's row 0 begins, which is `row` in memory: as far beyond a multiple of 16 bytes.
  template <int kSize>
  __device__ __forceinline__ unsigned char* shared_of(unsigned char* stage, int which, const void* pointer,
      const Strides& strides, const TilePlace& at, int row) const {
    const TileOperand& operand = t.operands[which];
    unsigned char* const to = stage + operand.at;
    if (operand.vectors == 0) return to;
    // Only the last bits count.
    const auto low = [](auto value) { return static_cast<uint32_t>(value); };
    const uint32_t elements = low(at.outer) * low(strides.outer) + low(at.column) + low(row) * low(strides.time);
    return to + ((low(reinterpret_cast<uintptr_t>(pointer)) + elements * kSize) & 15);
  }

  // Visits the 16-byte vectors of lines of `bytes` bytes, in memory and `pitch` apart in shared memory: where a vector
  // lies in its line, which may be before it or reach beyond it.
  template <typename Visit>
  __device__ __forceinline__ void each_vector(const char* memory, int64_t apart, unsigned char* shared, int pitch,
      int vectors, int low, int high, int bytes, const Visit& visit) const {
    const int thread = threadIdx.x;
    const auto start_of = [](const char* line) { return -static_cast<int>(reinterpret_cast<uintptr_t>(line) & 15); };
    if (vectors < 0) {  // lines that lie one behind the other, in both
      const char* const line = memory + low * apart;
      unsigned char* const here = shared + low * pitch;
      const int all = (high - low) * pitch;
      for (int at = start_of(line) + 16 * thread; at < all; at += 16 * t.threads) visit(line, here, at, all);
    } else {
      const int together = vectors >= t.threads ? 1 : t.threads / vectors, own = thread / vectors;
      const int first = vectors >= t.threads ? thread : thread - own * vectors;
      if (vectors < t.threads && own >= together) return;
      const char* line = memory + (low + (vectors >= t.threads ? 0 : own)) * apart;
      unsigned char* here = shared + (low + (vectors >= t.threads ? 0 : own)) * pitch;
      for (int r = low + (vectors >= t.threads ? 0 : own); r < high; r += together) {
        for (int v = first; v < vectors; v += t.threads) {
          const int at = start_of(line) + 16 * v;
          if (at < bytes) visit(line, here, at, bytes);
        }
        line += together * apart;
        here += together * pitch;
      }
    }
  }

  // Brings rows `row` to `row` + `rows`, as far as they exist. A vector holds some of the tile's bytes at least, so
  // that all of it can be read.
  template <int kSize>
  __device__ __forceinline__ void bring(unsigned char* stage, int which, const void* pointer, const Strides& strides,
      const TilePlace& at, int row, int rows) const {
    const TileOperand& operand = t.operands[which];
    const char* const from = memory_of<kSize>(pointer, strides, at, row);
    unsigned char* const to = shared_of<kSize>(stage, which, pointer, strides, at, row);
    const int64_t pitch = strides.time * kSize;
    const int low = max(0, -row), high = min(rows, static_cast<int>(t.steps) - row);
    if (operand.vectors == 0) {
      using Element = Copied<kSize>;
      const int64_t apart = strides.inner * kSize;
      for (int i = threadIdx.x; i < (high - low) * at.width; i += t.threads) {
        const int r = low + i / at.width, c = i % at.width;
        *reinterpret_cast<Element*>(to + r * operand.pitch + c * kSize) =
            *reinterpret_cast<const Element*>(from + r * pitch + c * apart);
      }
      return;
    }
    each_vector(from, pitch, to, operand.pitch, operand.vectors, low, high, at.width * kSize,
        [](const char* line, unsigned char* here, int place, int bytes) {
          copy_async<16>(here + place, line + place, min(bytes - place, 16));
        });
  }

  // The results, which lie in the input's place, back: whole vectors, then the elements at both ends of lines.
  template <typename T>
  __device__ __forceinline__ void put(unsigned char* stage, const TilePlace& at) const {
    constexpr int kSize = sizeof(T), kVec = 16 / kSize;
    const TileOperand& operand = t.operands[kTileInput];
    char* const to = const_cast<char*>(memory_of<kSize>(p.output, p.output_strides, at, at.row));
    unsigned char* const from = shared_of<kSize>(stage, kTileInput, p.input, p.input_strides, at, at.row);
    const int64_t pitch = p.output_strides.time * kSize;
    each_vector(to, pitch, from, operand.pitch, operand.vectors, 0, at.count, at.width * kSize,
        [](const char* line, unsigned char* here, int place, int bytes) {
          if (place >= 0 && place + 16 <= bytes)
            *reinterpret_cast<uint4*>(const_cast<char*>(line) + place) = *reinterpret_cast<const uint4*>(here + place);
        });
    if (t.whole_vectors) return;
    const bool flat = operand.vectors < 0;
    const int lines = flat ? 1 : at.count, bytes = flat ? at.count * operand.pitch : at.width * kSize;
    for (int i = threadIdx.x; i < lines * 2 * kVec; i += t.threads) {
      const int r = i / (2 * kVec), e = i % kVec;
      char* const line = to + r * pitch;
      const int over = static_cast<int>(reinterpret_cast<uintptr_t>(line) & 15), head = min((16 - over) & 15, bytes);
      const bool is_head = i % (2 * kVec) < kVec;
      const int tail = max(head, (bytes + over & ~15) - over);
      const int place = (is_head ? 0 : tail) + e * kSize;
      if (place < (is_head ? head : bytes))
        *reinterpret_cast<T*>(line + place) = *reinterpret_cast<const T*>(from + r * operand.pitch + place);
    }
  }
};

}  // namespace dcs
