// What all softmax kernels share: the sums over a part of a row and how threads, warps and blocks join theirs, and
// vectors at a row's ends.
//
// Forward: largest x and the sum of exp(x - largest), the latter raised to a larger largest by one factor when two
// parts meet (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3). Backward: the sum
// of gradient times output. Joined in an order that depends on nothing but the launch.
#pragma once

#include "common/ptx/cluster.cuh"
#include "common/ptx/global_load.cuh"
#include "common/row_statistics.cuh"
#include "common/vector.cuh"

namespace dcs {

constexpr unsigned kAllLanes = 0xffffffffu;

// Exponents are kExponentFactor * (x - largest): a power of 2 in float, of e in double.
template <typename Acc>
constexpr Acc kExponentFactor = std::is_same_v<Acc, float> ? 1.44269504088896341 : 1.0;

// base^(factor * (x - largest)). The difference comes first: factor * x alone leaves float's range at 2.4e38, and loses
// digits well before.
template <typename Acc>
__device__ __forceinline__ Acc shifted_power(Acc x, Acc largest) {
  return power((x - largest) * kExponentFactor<Acc>);
}

__device__ __forceinline__ float inverse(float total) { return reciprocal(total); }
__device__ __forceinline__ double inverse(double total) { return 1 / total; }

// Drops a NaN in x: the sum of powers has it. fmax takes eight instructions.
__device__ __forceinline__ float larger(float largest, float x) { return fmaxf(largest, x); }
__device__ __forceinline__ double larger(double largest, double x) { return x > largest ? x : largest; }

// Starts from the lowest finite number: -inf beside it is a power of 0, not NaN, and a row of nothing else has the sum
// 0.
template <typename Acc>
struct alignas(2 * sizeof(Acc)) Part {
  Acc largest = kLowest<Acc>;
  Acc total = 0;
};

// What a cluster's blocks send each other.
template <typename Acc>
struct ClusterExchange {
  uint64_t arrivals;
  Part<Acc> parts[16];
};

// Says to the others of the cluster that this block is there and can be sent to, `bytes` in all. It ends when it has
// had the parts of all: none is sent to a block that has ended.
__device__ __forceinline__ void meet_cluster(uint64_t& arrivals, int bytes) {
  if (threadIdx.x == 0) init_transaction_barrier(&arrivals, bytes);
  __syncwarp();
  arrive_in_cluster_relaxed();
}

// Stores a part where block `rank` has what this block has at `to`; backward its sum alone. A part of floats goes as
// one word.
template <bool kBackward, typename Acc>
__device__ __forceinline__ void send_part(
    const Part<Acc>& to, const uint64_t& arrivals, uint32_t rank, const Part<Acc>& part) {
  if constexpr (!kBackward && sizeof(part) == sizeof(double)) {
    double word;
    memcpy(&word, &part, sizeof word);
    store_async_in_cluster(reinterpret_cast<const double*>(&to), &arrivals, rank, word);
  } else {
    if constexpr (!kBackward) store_async_in_cluster(&to.largest, &arrivals, rank, part.largest);
    store_async_in_cluster(&to.total, &arrivals, rank, part.total);
  }
}

// All lanes get the largest, or the sum, over groups of `width` neighboring lanes.
template <typename Acc>
__device__ __forceinline__ Acc lanes_largest(Acc value, int width) {
  for (unsigned d = static_cast<unsigned>(width) >> 1; d > 0; d >>= 1)
    value = larger(value, __shfl_xor_sync(kAllLanes, value, d));
  return value;
}
template <typename Acc>
__device__ __forceinline__ Acc lanes_total(Acc value, int width) {
  for (unsigned d = static_cast<unsigned>(width) >> 1; d > 0; d >>= 1) value += __shfl_xor_sync(kAllLanes, value, d);
  return value;
}

template <bool kBackward, typename Acc>
__device__ __forceinline__ Part<Acc> join_two(Part<Acc> a, Part<Acc> b) {
  if constexpr (kBackward) return {a.largest, a.total + b.total};
  const Acc largest = larger(a.largest, b.largest);
  return {largest, a.total * shifted_power(a.largest, largest) + b.total * shifted_power(b.largest, largest)};
}

// A thread's parts, of one line.
template <bool kBackward, typename Acc, int kCount>
__device__ __forceinline__ Part<Acc> join_all_of(const Part<Acc> (&parts)[kCount]) {
  Part<Acc> joined;
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) joined.largest = larger(joined.largest, parts[i].largest);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    joined.total += kBackward ? parts[i].total : parts[i].total * shifted_power(parts[i].largest, joined.largest);
  return joined;
}

// The parts of groups of `width` neighboring lanes, joined; all lanes get it.
template <bool kBackward, typename Acc>
__device__ __forceinline__ Part<Acc> join_group(Part<Acc> part, int width) {
  if constexpr (!kBackward) {
    const Acc largest = lanes_largest(part.largest, width);
    part.total *= shifted_power(part.largest, largest);
    part.largest = largest;
  }
  part.total = lanes_total(part.total, width);
  return part;
}
// Of all lanes of a warp.
template <bool kBackward, typename Acc>
__device__ __forceinline__ Part<Acc> join_lanes(Part<Acc> part) {
  return join_group<kBackward>(part, 32);
}

// Each warp's part, joined over the block.
template <bool kBackward, typename Acc>
__device__ __forceinline__ Part<Acc> join_warps(Part<Acc> part) {
  __shared__ Part<Acc> of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (warps == 1) return part;
  if (lane == 0) of_warps[warp] = part;
  __syncthreads();
  return join_lanes<kBackward>(lane < warps ? of_warps[lane] : Part<Acc>{});
}

// The block's part, joined over the `blocks` blocks of a cluster, which have met in `meet_cluster`.
template <bool kBackward, typename Acc>
__device__ __forceinline__ Part<Acc> join_cluster(Part<Acc> part, int blocks, ClusterExchange<Acc>& exchange) {
  if (blocks == 1) return part;
  const int lane = threadIdx.x % 32;
  wait_for_cluster();
  if (threadIdx.x < 32 && lane < blocks)
    send_part<false>(exchange.parts[cluster_rank()], exchange.arrivals, lane, part);
  mbarrier_wait(&exchange.arrivals, 0);
  return join_lanes<kBackward>(lane < blocks ? exchange.parts[lane] : Part<Acc>{});
}

// A vector of half precision that the compiler takes for another one (`zero` is 0, which it does not know): it keeps
// the vector rather than the floats that were made of it before, twice the registers.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> renewed(Vector<T, kVec> raw, uint32_t zero) {
  if constexpr (sizeof(T) == 2 && kVec > 1) {
#pragma unroll
    for (int w = 0; w < kVec / 2; ++w) raw.words[w] ^= zero;
  }
  return raw;
}

// A load that is not put off until its first use where the vector has 16 bytes.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> load_soon(const Vector<T, kVec>* from) {
  if constexpr (sizeof(*from) == 16) return load_now(from);
  else return *from;
}

// A vector that adds nothing: of -inf forward, of 0 backward.
template <typename T, int kVec, bool kBackward>
__device__ __forceinline__ Vector<T, kVec> neutral() {
  using Acc = typename Types<T>::Acc;
  Vector<T, kVec> raw;
#pragma unroll
  for (int i = 0; i < kVec; ++i) raw.set(i, cast<T>(kBackward ? Acc(0) : Acc(-INFINITY)));
  return raw;
}

// All elements one index down; the last is `next`, the first comes back.
template <typename T, int kVec>
__device__ __forceinline__ T push(Vector<T, kVec>& raw, T next) {
  const T first = raw.get(0);
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w + 1 < kVec / 2; ++w) raw.words[w] = __funnelshift_r(raw.words[w], raw.words[w + 1], 16);
    raw.words[kVec / 2 - 1] =
        raw.words[kVec / 2 - 1] >> 16 | static_cast<uint32_t>(*reinterpret_cast<const unsigned short*>(&next)) << 16;
  } else {
#pragma unroll
    for (int i = 0; i + 1 < kVec; ++i) raw.set(i, raw.get(i + 1));
    raw.set(kVec - 1, next);
  }
  return first;
}

// A row's elements are low ... high - 1 of `tile`, which is aligned to whole vectors. A vector at either end of a row
// is partly another row's, or beyond the tensor: it goes by single elements, in a loop that is not unrolled (at most
// two vectors of a row do this).
template <typename T, int kVec, bool kBackward>
__device__ __forceinline__ Vector<T, kVec> load_end(const T* tile, int first, int low, int high) {
  Vector<T, kVec> raw = neutral<T, kVec, kBackward>();
  const T nothing = raw.get(0);
#pragma unroll 1
  for (int i = first; i < first + kVec; ++i) push(raw, i >= low && i < high ? tile[i] : nothing);
  return raw;
}
template <typename T, int kVec>
__device__ __forceinline__ void store_end(T* tile, int first, int low, int high, Vector<T, kVec> raw) {
#pragma unroll 1
  for (int i = first; i < first + kVec; ++i) {
    const T value = push(raw, raw.get(0));
    if (i >= low && i < high) tile[i] = value;
  }
}

// The largest element of a vector.
template <typename Acc, typename T, int kVec>
__device__ __forceinline__ Acc largest_of(const Vector<T, kVec>& raw, Acc least) {
  if constexpr (sizeof(T) == 2 && kVec > 1) {
    return larger(least, largest_half(raw));
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) least = larger(least, cast<Acc>(raw.get(i)));
    return least;
  }
}

}  // namespace dcs
