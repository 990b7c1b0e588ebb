// C = A B on the tensor cores in tf32, as exact as a float32 product: every operand is split in two (x = high + low, 11
// bits each), and three of the four products are summed (Markidis et al., "NVIDIA tensor core programmability,
// performance & precision", 2018, section 5). The tensor core truncates as it accumulates, so its sums are short, and
// added up in float32 outside.
#pragma once

#include <cstdint>

#include "common/ptx/async_copy.cuh"

namespace dcs {

constexpr int kProductThreads = 256;
constexpr int kStages = 4, kStageDepth = 16;
constexpr int kSumStages = 2;  // stages that the tensor core accumulates by itself: 32 terms

// A panel of an operand: `extent` vectors along m or n, `depth` terms. Along the depth (kAlong) a vector is contiguous,
// else the vectors lie side by side. ld is a multiple of 4, the data 16-byte aligned; what lies between extent and ld
// is zero, or is not used, and so are along the depth the elements up to the next multiple of 4.
struct Panel {
  const float* data;
  int64_t ld, extent, depth;
};

template <int kExtent, bool kAlong>
struct PanelTile {
  // The padding keeps the 32 lanes' reads of a fragment in 32 banks.
  static constexpr int kPitch = kAlong ? kStageDepth + 4 : kExtent + 8;
  static constexpr int kFloats = kAlong ? kExtent * kPitch : kStageDepth * kPitch;
  static constexpr int kChunks = kExtent * kStageDepth / 4 / kProductThreads;  // 16-byte words that a thread copies
  static_assert(kChunks * kProductThreads * 4 == kExtent * kStageDepth, "every thread copies the same number of words");

  // Where a thread copies from: the stages follow one another, so that a stage costs an addition and a comparison a
  // word.
  const float *base, *from[kChunks];
  int64_t advance;
  int position[kChunks], bound[kChunks];

  __device__ __forceinline__ PanelTile(const Panel& panel, int64_t first)
      : base(panel.data), advance(kAlong ? kStageDepth : kStageDepth * panel.ld) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int64_t vector = first + (kAlong ? slow(i) : fast(i));
      const bool inside = vector < (kAlong ? panel.extent : panel.ld);
      position[i] = kAlong ? fast(i) : slow(i);
      bound[i] = inside ? static_cast<int>(kAlong ? (panel.depth + 3) / 4 * 4 : panel.depth) : 0;
      from[i] = base + (kAlong ? vector * panel.ld + position[i] : position[i] * panel.ld + vector);
    }
  }
  __device__ __forceinline__ void load_next(float* to) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool inside = position[i] < bound[i];
      copy_async<16>(to + slow(i) * kPitch + fast(i), inside ? from[i] : base, inside ? 16 : 0);
      from[i] += advance;
      position[i] += kStageDepth;
    }
  }
  static constexpr int kWords = kAlong ? kStageDepth / 4 : kExtent / 4;
  static __device__ __forceinline__ int slow(int i) { return (threadIdx.x + i * kProductThreads) / kWords; }
  static __device__ __forceinline__ int fast(int i) { return (threadIdx.x + i * kProductThreads) % kWords * 4; }
  static __device__ __forceinline__ float at(const float* tile, int vector, int k) {
    return kAlong ? tile[vector * kPitch + k] : tile[k * kPitch + vector];
  }
};

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// To the nearest of tf32's 11 bits: truncation would bias every sum. An integer addition, as operands stay far below
// the largest float; the tensor core itself leaves the low bits out.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

template <int kBlockM, int kBlockN, bool kAlongA, bool kAlongB, bool kSplit>
struct Tf32Product {
  using TileA = PanelTile<kBlockM, kAlongA>;
  using TileB = PanelTile<kBlockN, kAlongB>;
  static constexpr int kStageFloats = TileA::kFloats + TileB::kFloats;
  static constexpr int kSharedBytes = kStages * kStageFloats * static_cast<int>(sizeof(float));
  static constexpr int kWarpRows = kBlockM / 32, kWarpColumns = kProductThreads / 32 / kWarpRows;
  static constexpr int kRows = kBlockM / kWarpRows / 16, kColumns = kBlockN / kWarpColumns / 8;  // a warp's mma tiles

  float sums[kRows][kColumns][4];

  // The tile at (row, column). `shared`: kSharedBytes, free again when every thread has returned and synchronized.
  __device__ __forceinline__ void run(float* shared, const Panel& a, const Panel& b, int64_t row, int64_t column) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[r][c][e] = 0.f;
    const int stages = static_cast<int>((a.depth + kStageDepth - 1) / kStageDepth);
    TileA tile_a(a, row);
    TileB tile_b(b, column);
    const auto load = [&](int stage) {
      float* to = shared + stage % kStages * kStageFloats;
      tile_a.load_next(to);
      tile_b.load_next(to + TileA::kFloats);
    };
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < stages) load(s);
      commit_copies();
    }
    for (int s0 = 0; s0 < stages; s0 += kSumStages) {
      float part[kRows][kColumns][4] = {};
#pragma unroll
      for (int i = 0; i < kSumStages; ++i) {
        const int s = s0 + i;
        if (s < stages) {
          wait_for_copies<kStages - 2>();
          __syncthreads();
          if (s + kStages - 1 < stages) load(s + kStages - 1);
          commit_copies();
          multiply(shared + s % kStages * kStageFloats, part);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[r][c][e] += part[r][c][e];
    }
    wait_for_copies<0>();
  }

  // The tile's sums, in an order of its own, to and from memory: `to` of kBlockM * kBlockN.
  __device__ __forceinline__ void store(float* to) const {
    const float* const from = &sums[0][0][0];
#pragma unroll
    for (int e = 0; e < kRows * kColumns * 4; ++e) to[e * kProductThreads + threadIdx.x] = from[e];
  }
  // The sum of `count` such tiles, one after the other.
  __device__ __forceinline__ void load_all(const float* tiles, int count) {
    float* const to = &sums[0][0][0];
#pragma unroll
    for (int e = 0; e < kRows * kColumns * 4; ++e) to[e] = 0.f;
    for (int n = 0; n < count; ++n, tiles += kBlockM * kBlockN)
#pragma unroll
      for (int e = 0; e < kRows * kColumns * 4; ++e) to[e] += __ldcg(tiles + e * kProductThreads + threadIdx.x);
  }

  // f(row, column, sum) for every element of the tile that this thread holds, row and column within the tile.
  template <typename F>
  __device__ __forceinline__ void each(F&& f) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / kWarpColumns * (kBlockM / kWarpRows) + lane / 4,
              column = warp % kWarpColumns * (kBlockN / kWarpColumns) + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(row + r * 16 + e / 2 * 8, column + c * 8 + e % 2, sums[r][c][e]);
  }

 private:
  static __device__ __forceinline__ void multiply(const float* stage, float (&part)[kRows][kColumns][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int row = warp / kWarpColumns * (kBlockM / kWarpRows) + group,
              column = warp % kWarpColumns * (kBlockN / kWarpColumns) + group;
#pragma unroll
    for (int k = 0; k < kStageDepth; k += 8) {
      uint32_t a_high[kRows][4], a_low[kRows][4], b_high[kColumns][2], b_low[kColumns][2];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          split(TileA::at(stage, row + r * 16 + e % 2 * 8, k + t + e / 2 * 4), a_high[r][e], a_low[r][e]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          split(TileB::at(stage + TileA::kFloats, column + c * 8, k + t + e * 4), b_high[c][e], b_low[c][e]);
      if constexpr (kSplit) {
        all(part, a_low, b_high);
        all(part, a_high, b_low);
      }
      all(part, a_high, b_high);
    }
  }

  // Of the products that are left out, of two low parts, each is below 2^-24 of the whole, and their signs differ.
  static __device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
    high = round_tf32(x) & 0xffffe000u;
    if constexpr (kSplit) low = round_tf32(x - __uint_as_float(high));
  }

  static __device__ __forceinline__ void all(
      float (&part)[kRows][kColumns][4], const uint32_t (&a)[kRows][4], const uint32_t (&b)[kColumns][2]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) mma_tf32(part[r][c], a[r], b[c]);
  }
};

}  // namespace dcs
