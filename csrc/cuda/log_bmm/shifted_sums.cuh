// Sums of products of exponentials whose terms are further apart than float32's range: kTileDepth neighboring elements
// of a vector share an exponent, and a sum has that of the largest parts so far. A lost term is then below
// 2^-126 2^exponent of the largest part, which ScaledSums' test is about, and not of the product of the two vectors'
// maxima. Exponents are whole numbers: scaling by them rounds nothing.
#pragma once

#include "log_bmm/scaled_sums.cuh"
#include "log_bmm/semiring_tile.cuh"

namespace dcs {

// The outputs of a tile whose sums are not certified.
constexpr int kListed = 2;  // of a list of them, a thread's: an eighth of the tile in all
struct Failures {
  uint32_t bits[kTile][kTile / 32];
  int count, listed;
  uint16_t list[kListed * kTileThreads];

  // By all threads of the block, which synchronize before they go on.
  __device__ __forceinline__ void clear() {
    if (threadIdx.x < kTile * 2) bits[threadIdx.x / 2][threadIdx.x % 2] = 0;
    if (threadIdx.x == 0) count = listed = 0;
  }
  __device__ __forceinline__ void add(int r, int c) {
    atomicOr(&bits[r][c / 32], 1u << c % 32);
    atomicAdd(&count, 1);
  }
  // Whether it was one.
  __device__ __forceinline__ bool remove(int r, int c) {
    const uint32_t bit = 1u << c % 32;
    if (!(atomicAnd(&bits[r][c / 32], ~bit) & bit)) return false;
    atomicAdd(&count, -1);
    return true;
  }
  __device__ __forceinline__ bool are_many() const { return count > kListed * kTileThreads; }
};

// So few of them that the block's threads share them out.
struct ListedOutputs {
  int count, r[kListed], c[kListed];

  // By all threads of the block.
  __device__ __forceinline__ explicit ListedOutputs(Failures& failures) : count(failures.count) {
    if (threadIdx.x < kTile * 2) {
      uint32_t left = failures.bits[threadIdx.x / 2][threadIdx.x % 2];
      for (int at = atomicAdd(&failures.listed, __popc(left)); left != 0; left &= left - 1)
        failures.list[at++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(left) - 1);
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kListed; ++s) {
      const int entry = has(s) ? failures.list[s * kTileThreads + threadIdx.x] : 0;
      r[s] = entry / kTile, c[s] = entry % kTile;
    }
  }
  __device__ __forceinline__ bool has(int s) const { return s * kTileThreads + threadIdx.x < count; }
  template <int kPass, bool kExact, typename Acc, typename Op>
  __device__ __forceinline__ void steps(Op& op, const TileMemory<Acc>& memory, int k0) const {
#pragma unroll
    for (int s = 0; s < kListed; ++s) {
      if (s * kTileThreads >= count) return;
#pragma unroll
      for (int k = 0; k < kTileDepth; ++k)
        op.template step<kPass, kExact>(s, memory.x[k][r[s]], memory.y[k][c[s]], k0 + k);
    }
  }
  // f(s, i, j) for the thread's outputs.
  template <typename F>
  __device__ __forceinline__ void each(const TileOrigin& origin, F&& f) const {
#pragma unroll
    for (int s = 0; s < kListed; ++s)
      if (has(s)) f(s, origin.row + r[s], origin.column + c[s]);
  }
};

// Sums of products in parts of kTileDepth terms, and then where one passes its target: both are the same additions.
template <int kCount>
struct ProductOp {
  static constexpr bool kMindsSpecial = false;
  float sum[kCount], part[kCount], target[kCount];  // in the second pass the sum stays as it is before the part that
  int32_t parts[kCount];                            // passes; that it has is said by the complement of their number

  static __device__ __forceinline__ float outside() { return 0.f; }
  __device__ __forceinline__ ProductOp() { restart(); }
  __device__ __forceinline__ void restart() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] = 0.f, parts[e] = 0;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) part[e] = 0.f;
  }
  template <int kPass, bool kExact>
  __device__ __forceinline__ void step(int e, float x, float y, int) {
    part[e] = fmaf(x, y, part[e]);
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float after = sum[e] + part[e];
      if constexpr (kPass == 0) sum[e] = after;
      else see(e, after);
    }
  }
  // The sum with the next part, in the second pass.
  __device__ __forceinline__ void see(int e, float after) {
    if (parts[e] < 0) return;
    if (after <= target[e]) sum[e] = after, ++parts[e];
    else parts[e] = ~parts[e];
  }
};

// The same of elements with exponents; a sum times 2^top.
template <int kCount>
struct ShiftedOp : ProductOp<kCount> {
  float top[kCount];

  __device__ __forceinline__ ShiftedOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) top[e] = -0x1p22f;
  }
  // The end of a part whose elements' exponents add up to `shift`.
  template <int kPass>
  __device__ __forceinline__ void end(int e, float shift) {
    constexpr float kBias = 50.f, kScale = 0x1p-50f;  // 2^-above alone would leave float's range before what it scales
    const float above = shift - top[e], factor = power(kBias - fabsf(above)), sum = this->sum[e], part = this->part[e];
    if constexpr (kPass == 0) {
      this->sum[e] = fmaf((above > 0.f ? sum : part) * kScale, factor, above > 0.f ? part : sum);
      top[e] = fmaxf(top[e], shift);
    } else {
      this->see(e, fmaf(part * kScale, factor, sum));
    }
  }
};

struct ShiftedMemory {
  TileMemory<float> tile;
  alignas(16) float shifts[2][kTile];  // of x's vectors, of y's
};

// The elements in shared memory become e^x 2^(exponent - shift), half a vector a thread.
constexpr float kFarthest = 0x1p20f;  // of shifts
struct ShiftedVector {
  int side, index, first;  // which of shared memory; every other four elements from the first on
  Peak<float> peak;

  template <typename T>
  __device__ __forceinline__ ShiftedVector(const Vectors<T>& a, const Vectors<T>& b, const Peak<float>* peaks_a,
      const Peak<float>* peaks_b, const TileOrigin& at)
      : peak{0.f, kSpecial} {
    const int lane = threadIdx.x % 32, vector = threadIdx.x / 32 * 16 + lane % 16;
    side = vector / kTile, index = vector % kTile;
    first = lane / 16 * 4;  // the lanes of either half read other banks
    const int64_t n = (side == 0 ? at.row : at.column) + index;
    if (n < (side == 0 ? a.count : b.count)) peak = (side == 0 ? peaks_a : peaks_b)[n];
    if (fabsf(peak.shift) > kFarthest / 4) peak.flags |= kSpecial;
  }
  __device__ __forceinline__ void shift(ShiftedMemory& memory, int exponent) const {
    constexpr int kHalf = kTileDepth / 2;
    float (*const to)[kTile + 4] = side == 0 ? memory.tile.x : memory.tile.y;
    const auto k = [this](int i) { return i / 4 * 8 + first + i % 4; };
    float values[kHalf], most = -infinity<float>();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) most = fmaxf(most, values[i] = to[k(i)][index]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
    const float shift = fminf(fmaxf(ceilf(most * 1.44269504f), -kFarthest), kFarthest);
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      to[k(i)][index] = scaled_element({0.f, peak.flags}, values[i], exponent - static_cast<int>(shift), true);
    if (first == 0) memory.shifts[side][index] = shift;
  }
};
static_assert(kTileThreads == 4 * kTile && kTileDepth == 16, "two threads a vector, of eight elements each");

template <int kPass, typename T>
__device__ __forceinline__ void shifted_pass(ShiftedOp<kOwned>& op, ShiftedMemory& memory, const Vectors<T>& a,
    const Vectors<T>& b, const ShiftedVector& mine, const TileOrigin& origin, int depth, int exponent) {
  const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
  TileFetch<T, float> fetch_a(a, origin.row, 0, depth), fetch_b(b, origin.column, 0, depth);
  fetch_a.load(0), fetch_b.load(0);
  for (int k0 = 0; k0 < depth; k0 += kTileDepth) {
    __syncthreads();
    fetch_a.store(memory.tile.x, k0, -infinity<float>());
    fetch_b.store(memory.tile.y, k0, -infinity<float>());
    __syncthreads();
    fetch_a.load(k0 + kTileDepth), fetch_b.load(k0 + kTileDepth);
    mine.shift(memory, exponent);
    __syncthreads();
    op.template begin<kPass>();
    OwnOutputs().template steps<kPass, false>(op, memory.tile, k0);
    float x[kOwn], y[kOwn];
    load_own(&memory.shifts[0][ty], x);
    load_own(&memory.shifts[1][tx], y);
#pragma unroll
    for (int e = 0; e < kOwned; ++e) op.template end<kPass>(e, x[e / kOwn] + y[e % kOwn]);
  }
}

}  // namespace dcs
