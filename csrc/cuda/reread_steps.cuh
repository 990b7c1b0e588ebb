// reread.cuh for rows with a gamma a step. What a piece of a row does to a carry is now a total and a product of gates, and the order of pieces counts: a
// block reads again one stretch of what lies before its cluster, and a warp a part of that, a vector a lane and load. A block mails what its own piece and
// what its stretch do to a carry to all blocks of its cluster. Pieces are joined in float where its range allows that, else in double.
#pragma once

#include "reread.cuh"

namespace dcs {

struct RereadStepsParams {
  const void* input;
  const void* gamma;
  void* output;
  Strides input_strides, gamma_strides, output_strides;
  int64_t inner;
  int length;
  int clusters;  // of a row, each of kMaxCluster blocks
};

// What a piece makes of the carry into it: total + gates * carry.
template <typename Number>
struct Change {
  Number total, gates;
};
constexpr float kMostTotal = 1e35f;  // of a vector, of which a warp joins 256

// Not 0 but for a factor that is: an infinite carry stays infinite.
__device__ __forceinline__ float product_of(float a, float b) {
  const float product = a * b;
  return product == 0.f && a != 0.f && b != 0.f ? copysignf(0x1p-149f, product) : product;
}
__device__ __forceinline__ double product_of(double a, double b) { return power_mul(a, b); }

// By value: of two places the compiler would choose one in memory.
template <typename Number>
__device__ __forceinline__ Change<Number> chosen(bool first, const Change<Number>& a, const Change<Number>& b) {
  return {first ? a.total : b.total, first ? a.gates : b.gates};
}
template <typename Number>
__device__ __forceinline__ Change<Number> joined(const Change<Number>& before, const Change<Number>& after) {
  return {fold(after.total, after.gates, before.total), product_of(before.gates, after.gates)};
}
// `mine` with `other`, which lies before it if this one is `behind`.
template <typename Number>
__device__ __forceinline__ Change<Number> joined_in_order(bool behind, const Change<Number>& mine, const Change<Number>& other) {
  const Number total = fold(behind ? mine.total : other.total, behind ? mine.gates : other.gates, behind ? other.total : mine.total);
  return {total, product_of(mine.gates, other.gates)};
}
template <typename Number>
__device__ __forceinline__ Change<Number> shuffle_xor(const Change<Number>& change, int distance) {
  return {__shfl_xor_sync(0xffffffffu, change.total, distance), __shfl_xor_sync(0xffffffffu, change.gates, distance)};
}
template <typename Number>
__device__ __forceinline__ Change<Number> joined_with_lane(const Change<Number>& mine, int distance) {
  return joined_in_order((threadIdx.x & distance) != 0, mine, shuffle_xor(mine, distance));
}
// Of all lanes of a span.
template <int kSpan, typename Number>
__device__ __forceinline__ Change<Number> joined_span(Change<Number> mine) {
#pragma unroll
  for (int d = 1; d < kSpan; d *= 2) mine = joined_with_lane(mine, d);
  return mine;
}
// Of the lanes of a span up to this one.
template <int kSpan, typename Number>
__device__ __forceinline__ Change<Number> joined_up(Change<Number> mine) {
#pragma unroll
  for (int d = 1; d < kSpan; d *= 2) {
    const Change<Number> both = joined({shuffle_up(mine.total, d), shuffle_up(mine.gates, d)}, mine);
    mine = chosen(threadIdx.x % kSpan >= d, both, mine);
  }
  return mine;
}

__device__ __forceinline__ Change<double> widened(const Change<float>& change) { return {change.total, change.gates}; }
__device__ __forceinline__ Change<double> widened(const Change<double>& change) { return change; }

// `with` in float, if all lanes' changes allow that, else in double.
template <typename With>
__device__ __forceinline__ Change<double> in_range(const Change<double>& mine, const With& with) {
  if (__all_sync(0xffffffffu, fabs(mine.gates) <= 1.0 && fabs(mine.total) <= kMostTotal))
    return widened(with(Change<float>{static_cast<float>(mine.total), rounded(mine.gates)}));
  return with(mine);
}

// A warp's own changes up to each lane, and of the pieces of its stretch the whole; together, as each waits for the last shuffle.
template <int kPieces, typename Number>
__device__ __forceinline__ Change<Number> joined_both(Change<Number>& mine, Change<Number> (&pieces)[kPieces]) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Change<Number> before{shuffle_up(mine.total, d), shuffle_up(mine.gates, d)};
    const bool behind = (threadIdx.x & d) != 0;
    if (d < kPieces) {
      const int half = kPieces / 2 / d;
      Change<Number> others[kPieces / 2];
#pragma unroll
      for (int i = 0; i < half; ++i) others[i] = shuffle_xor(chosen(behind, pieces[i], pieces[i + half]), d);
#pragma unroll
      for (int i = 0; i < half; ++i) pieces[i] = joined_in_order(behind, chosen(behind, pieces[i + half], pieces[i]), others[i]);
    } else {
      pieces[0] = joined_with_lane(pieces[0], d);
    }
    mine = chosen(threadIdx.x % 32 >= d, joined(before, mine), mine);
  }
  Change<Number> whole = pieces[0];
#pragma unroll
  for (int d = kPieces / 2; d > 0; d /= 2) whole = joined_with_lane(whole, d);
  return whole;
}

// `kMost` clusters of a row, a power of two.
template <typename T, bool kReverse, int kMost>
__global__ void __launch_bounds__(32 * kRereadWarps) reread_steps_kernel(const __grid_constant__ RereadStepsParams params) {
  constexpr int kVec = 16 / sizeof(T), kEarlier = kMost - 1;
  static_assert(kRereadWarps == 8);
  using Word = Vector<T, kVec>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % kMaxCluster, place = static_cast<int>(blockIdx.x) / kMaxCluster;
  const int row = place / params.clusters, cluster = place - row * params.clusters;
  __shared__ Change<double> mail[2 * kMaxCluster];  // of the blocks' stretches of the row before, and of their own pieces
  __shared__ alignas(8) uint64_t arrivals;
  __shared__ Change<double> own_of_warps[kRereadWarps], shares_of_warps[kRereadWarps];
  let_next_launch_begin();
  if (threadIdx.x == 0) expect_mail(&arrivals, static_cast<int>(sizeof(mail)) / (kEarlier > 0 ? 1 : 2));
  if (threadIdx.x < kRereadWarps) own_of_warps[threadIdx.x] = shares_of_warps[threadIdx.x] = {0.0, 1.0};
  __syncthreads();
  arrive_in_cluster_relaxed();

  const int64_t outer = params.inner == 1 ? row : row / params.inner, inner = row - outer * params.inner;
  const auto row_of = [&](auto* pointer, const Strides& strides) { return pointer + (outer * strides.outer + inner * strides.inner); };
  const T* const input = row_of(static_cast<const T*>(params.input), params.input_strides);
  const T* const gamma = row_of(static_cast<const T*>(params.gamma), params.gamma_strides);
  T* const output = row_of(static_cast<T*>(params.output), params.output_strides);
  const int length = params.length, vectors = (length + kVec - 1) / kVec;
  const int own = (cluster * kMaxCluster + rank) * blockDim.x + threadIdx.x;
  const auto address = [&](int v) { return (kReverse ? vectors - 1 - v : v) * kVec; };  // of the v-th vector of the scan
  // A vector that is not whole is the last in memory: the row's first, or its last.
  const int at = address(own), share = (rank * warps + warp) * 32 * cluster + lane;
  int whole = own < vectors && at + kVec <= length, share_whole = !kReverse || address(share) + kVec <= length;
  const Word* input_from = reinterpret_cast<const Word*>(input + at);
  const Word* gamma_from = reinterpret_cast<const Word*>(gamma + at);
  const Word* inputs_from = reinterpret_cast<const Word*>(input + address(share));
  const Word* gammas_from = reinterpret_cast<const Word*>(gamma + address(share));
  T* to = output + at;
  // No carry enters a row's first step, so that its gate, which may be a NaN, takes no part.
  const int pad = kReverse ? vectors * kVec - length : 0;
  int first_step = rank == 0 && threadIdx.x == 0 ? pad : -1;
  keep(whole);
  keep(share_whole);
  keep(input_from);
  keep(gamma_from);
  keep(inputs_from);
  keep(gammas_from);
  keep(to);
  keep(first_step);
  wait_for_cluster();
  wait_for_launches_before();

  Word words[kEarlier + 1], gate_words[kEarlier + 1];  // the thread's own come last
  load_if(whole, input_from, words[kEarlier]);
  load_if(whole, gamma_from, gate_words[kEarlier]);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) {
    const bool wanted = j < cluster && (j > 0 || share_whole);
    load_if(wanted, inputs_from + (kReverse ? -32 : 32) * j, words[j]);
    load_if(wanted, gammas_from + (kReverse ? -32 : 32) * j, gate_words[j]);
  }
  if (!whole && own < vectors) {
    words[kEarlier] = load_vector<T, kVec>(input, at, 0, length);
    gate_words[kEarlier] = load_vector<T, kVec>(gamma, at, 0, length);
  }
  if (kEarlier > 0 && kReverse && cluster > 0 && !share_whole) {
    words[0] = load_vector<T, kVec>(input, address(share), 0, length);
    gate_words[0] = load_vector<T, kVec>(gamma, address(share), 0, length);
  }

  const auto read = [&](int j, float(&values)[kVec], float(&factors)[kVec]) {
    unpack_in_order<kReverse>(words[j], values);
    unpack_in_order<kReverse>(gate_words[j], factors);
    if (j == 0 || j == kEarlier) {
      const int first = j == (cluster > 0 ? 0 : kEarlier) ? first_step : -1;
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i == first) factors[i] = 1.f;
    }
  };
  // Whether float will do: finite totals, gates of at most 1, and no product that is close to 0 but not 0. What has not been loaded is 0.
  bool fits = true;
  Change<float> changes[kEarlier + 1];
#pragma unroll
  for (int j = 0; j <= kEarlier; ++j) {
    float values[kVec], factors[kVec], most = 0.f;
    read(j, values, factors);
    Change<float> change{0.f, 1.f};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      change = {plain_step(values[i], factors[i], change.total), change.gates * factors[i]};
      most = fmaxf(most, fabsf(factors[i]));
    }
    bool in_full = fabsf(change.gates) >= 0x1p-100f;
    if (!in_full) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) in_full |= factors[i] == 0.f;
    }
    fits &= (most <= 1.f) & in_full & (fabsf(change.total) <= kMostTotal);
    changes[j] = chosen(j == kEarlier || j < cluster, change, {0.f, 1.f});
  }
  const auto join_warp = [&](const auto& change) {
    using Number = decltype(change(0).gates);
    Change<Number> through = change(kEarlier);
    if constexpr (kEarlier > 0) {
      Change<Number> pieces[kMost];
#pragma unroll
      for (int j = 0; j < kEarlier; ++j) pieces[j] = change(j);
      pieces[kEarlier] = {0, 1};
      const Change<Number> stretch = joined_both(through, pieces);
      if (lane == 0) shares_of_warps[warp] = widened(stretch);
    } else {
      through = joined_up<32>(through);
    }
    if (lane == 31) own_of_warps[warp] = widened(through);
    return widened(Change<Number>{shuffle_up(through.total, 1), shuffle_up(through.gates, 1)});
  };
  Change<double> before;
  if (__all_sync(0xffffffffu, fits)) {
    before = join_warp([&](int j) { return changes[j]; });
  } else {
    before = join_warp([&](int j) {
      Change<double> change{changes[j].total, 1.0};
      if (j == kEarlier || j < cluster) {
        float values[kVec], factors[kVec];
        read(j, values, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) change.gates = power_mul(change.gates, static_cast<double>(factors[i]));
      }
      return change;
    });
  }
  if (lane == 0) before = {0.0, 1.0};
  __syncthreads();

  const auto send = [&](const Change<double>(&of_warps)[kRereadWarps], int place) {
    const Change<double> block = in_range(of_warps[lane % kRereadWarps], [](const auto& mine) { return joined_span<kRereadWarps>(mine); });
    if (lane < kMaxCluster) {
      send_in_cluster(&mail[place].total, &arrivals, lane, block.total);
      send_in_cluster(&mail[place].gates, &arrivals, lane, block.gates);
    }
  };
  if (warp == 0) send(own_of_warps, kMaxCluster + rank);
  if (kEarlier > 0 && warp == warps - 1) send(shares_of_warps, rank);
  const Change<double> in_block = in_range(own_of_warps[lane % kRereadWarps], [](const auto& mine) { return joined_up<kRereadWarps>(mine); });
  const Change<double> warps_before{shuffle(in_block.total, max(warp - 1, 0)), shuffle(in_block.gates, max(warp - 1, 0))};
  if (warp > 0) before = joined(warps_before, before);

  wait_for_mail(&arrivals);
  Change<double> row_before{0.0, 1.0};
  if (lane >= (kEarlier > 0 ? 0 : kMaxCluster) && lane < kMaxCluster + rank) row_before = mail[lane];
  const double carry = in_range(row_before, [](const auto& mine) { return joined_span<32>(mine); }).total;
  float values[kVec], factors[kVec];
  read(kEarlier, values, factors);
  float y = static_cast<float>(fold(before.total, before.gates, carry));
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = y = plain_step(values[i], factors[i], y);
  const Word result = pack_in_order<kReverse, T>(values);
  if (whole) *reinterpret_cast<Word*>(to) = result;
  else if (own < vectors) store_vector<T, kVec>(output, at, 0, length, result);
}

}  // namespace dcs
