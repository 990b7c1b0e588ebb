// few_rows.cuh for rows with a per-step gamma. What a segment of a row does to a carry is now a total and a product
// of gates, and the order of segments counts: a block reads again one segment of what lies before its cluster, and a
// warp a part of that, a vector a lane and load, which its lanes pass to each other through shared memory to join seven
// of them that lie side by side. A block stores what its own vectors and what that segment do to a carry in the shared
// memory of all blocks of its cluster. All that is in float, where totals are finite and gates at most 1: a product
// that leaves float then takes nothing along that could be seen. A warp where they are not joins its vectors in double,
// stores NaNs instead, and who meets a NaN takes the double instead: no other test is made, and products need not be
// kept above 0 at every join.
#pragma once

#include "scan/long_rows/few_rows.cuh"

namespace dcs {

struct FewRowsGatedParams {
  const void* input;
  const void* gamma;
  void* output;
  Strides input_strides, gamma_strides, output_strides;
  int64_t inner;
  int length;
  int clusters;  // of a row, each of kMaxCluster blocks
};

// What a segment makes of the carry into it: total + gates * carry.
template <typename Number>
struct alignas(2 * sizeof(Number)) Change {
  Number total, gates;
};
constexpr float kMostTotal = 1e33f;       // of a vector, of which a row has 32768
constexpr float kLeastGates = 0x1p-100f;  // of a vector, but for 0

template <typename Number>
__device__ __forceinline__ Change<Number> joined(const Change<Number>& before, const Change<Number>& after) {
  const Number total = fold(after.total, after.gates, before.total);
  if constexpr (std::is_same_v<Number, float>) return {total, before.gates * after.gates};
  else return {total, power_mul(before.gates, after.gates)};
}
template <typename Number>
__device__ __forceinline__ Change<Number> change_up(const Change<Number>& change, int distance) {
  return {shuffle_up(change.total, distance), shuffle_up(change.gates, distance)};
}
// A product is 0 only with a factor that is: an infinite carry stays infinite.
__device__ __forceinline__ Change<float> above_zero(const Change<float>& change, bool any_zero, uint32_t negative) {
  return {change.total, change.gates == 0.f && !any_zero ? __uint_as_float(1u | negative << 31) : change.gates};
}

// Changes in shared memory, at addresses.
__device__ __forceinline__ void store_at(uint32_t address, const Change<float>& change) {
  store_at(address, change.total, change.gates);
}
template <int kCount>
__device__ __forceinline__ void load_at(uint32_t address, Change<float> (&to)[kCount]) {
  float numbers[2 * kCount];
  load_at(address, numbers);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = {numbers[2 * i], numbers[2 * i + 1]};
}

// What joins in float could not hold is NaN there, and here instead.
struct Exact {
  const Change<float>* changes;
  const Change<double>* instead;
  __device__ __forceinline__ Change<double> operator[](int i) const {
    const Change<float> change = changes[i];
    if (isnan(change.gates)) return instead[i];
    return {change.total, change.gates};
  }
};

// A warp's own changes up to each lane, and in lane 31 all of its segment's, of which `change` has the lane's i-th.
template <int kCount, typename Number, typename ChangeAt>
__device__ __forceinline__ Change<Number> join_warp(int lane, Change<Number>& mine, const ChangeAt& change) {
  constexpr bool kUsual = std::is_same_v<Number, float>;  // double is kept short
  Change<Number> segment{0, 1};
#pragma unroll(kUsual&& kCount > 0 ? kCount : 1)
  for (int i = 0; i < kCount; ++i) segment = i == 0 ? change(i) : joined(segment, change(i));
#pragma unroll(kUsual ? 5 : 1)
  for (int d = 1; d < 32; d *= 2) {
    if constexpr (kCount > 0)
      segment = joined(change_up(segment, d), segment);  // right in every lane that the last one asks
    const Change<Number> before = change_up(mine, d);
    if (lane >= d) mine = joined(before, mine);
  }
  return segment;
}

// The product of a vector's gates, of which the `first`-th takes no part. A call: what is seldom needed is kept short,
// for the usual way leads past it.
template <typename T, bool kReverse, int kVec>
__device__ __noinline__ double exact_gates(Vector<T, kVec> word, int first) {
  float factors[kVec];
  unpack_in_order<kReverse>(word, factors);
  double gates = 1.0;
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i != first) gates = power_mul(gates, static_cast<double>(factors[i]));
  return gates;
}
// Of changes that lie in a row.
inline __device__ __noinline__ Change<double> exact_all(Exact changes, int count, Change<double> all) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) all = joined(all, changes[i]);
  return all;
}

template <typename T>
constexpr uint32_t kOnes = std::is_same_v<T, float> ? 0x3f800000u
    : std::is_same_v<T, __half>                     ? 0x3c003c00u
                                                    : 0x3f803f80u;

// `kMost` clusters of a row, a power of two.
template <typename T, bool kReverse, int kMost>
__global__ void __launch_bounds__(32 * kFewRowsWarps, 2)
    few_rows_gated_kernel(const __grid_constant__ FewRowsGatedParams params) {
  constexpr int kVec = 16 / sizeof(T), kEarlier = kMost - 1, kBytes = sizeof(Change<float>);
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(kFewRowsWarps == 8 && 2 * kMaxCluster == 32);
  using Word = Vector<T, kVec>;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int rank = blockIdx.x % kMaxCluster, number = static_cast<int>(blockIdx.x) / kMaxCluster;
  const int row = number / params.clusters, cluster = number - row * params.clusters;
  struct Addresses {
    uint32_t received, arrivals, of_warps;
  };
  // Of the blocks' segments of the row before and of their own vectors; of warps' own vectors and of their segments.
  __shared__ alignas(16) Change<float> received[2 * kMaxCluster], of_warps[2 * kFewRowsWarps];
  __shared__ Change<double> exact_received[2 * kMaxCluster], exact_of_warps[2 * kFewRowsWarps];
  __shared__ Change<double> exact_earlier[kEarlier > 0 ? kFewRowsWarps * 32 * kEarlier : 1];
  __shared__ alignas(8) uint64_t arrivals, exact_arrivals;
  __shared__ Addresses shared_addresses;
  launch_dependents();
  if (threadIdx.x == 0) {
    init_transaction_barrier(&arrivals, ((kEarlier > 0 ? kMaxCluster : 0) + rank) * kBytes);
    init_transaction_barrier(&exact_arrivals);
    shared_addresses = {shared_address(received), shared_address(&arrivals), shared_address(of_warps)};
  }
  if (threadIdx.x < 2 * kMaxCluster) received[threadIdx.x] = {0.f, 1.f};
  if (threadIdx.x < 2 * kFewRowsWarps) of_warps[threadIdx.x] = {0.f, 1.f};
  __syncthreads();
  arrive_in_cluster_relaxed();

  const int64_t outer = params.inner == 1 ? row : row / params.inner, inner = row - outer * params.inner;
  const auto row_of = [&](auto* pointer, const Strides& strides) { return pointer + strides.at(outer, inner); };
  const T* const input = row_of(static_cast<const T*>(params.input), params.input_strides);
  const T* const gamma = row_of(static_cast<const T*>(params.gamma), params.gamma_strides);
  T* const output = row_of(static_cast<T*>(params.output), params.output_strides);
  const int length = params.length, vectors = (length + kVec - 1) / kVec;
  const int own = (cluster * kMaxCluster + rank) * blockDim.x + threadIdx.x;
  const auto address = [&](int v) {
    return (kReverse ? vectors - 1 - v : v) * kVec;
  };  // of the v-th vector of the scan
  // A vector that is not whole is the last in memory: the row's first, or its last.
  const int at = address(own), share = (rank * warps + warp) * 32 * cluster + lane;
  int whole = own < vectors && at + kVec <= length, cut = own < vectors && !whole;
  int share_whole = !kReverse || address(share) + kVec <= length, share_cut = cluster > 0 && !share_whole;
  const Word* input_from = reinterpret_cast<const Word*>(input + at);
  const Word* gamma_from = reinterpret_cast<const Word*>(gamma + at);
  const Word* inputs_from = reinterpret_cast<const Word*>(input + address(share));
  const Word* gammas_from = reinterpret_cast<const Word*>(gamma + address(share));
  T* to = output + at;
  // No carry enters a row's first step, so that its gate, which may be a NaN, takes no part.
  const int pad = kReverse ? vectors * kVec - length : 0;
  int first_step = rank == 0 && threadIdx.x == 0 ? pad : -1;
  // One warp sends: half a lane each segments' changes and own vectors' changes, these to later blocks alone.
  const int block = lane % kMaxCluster, half = lane / kMaxCluster;
  int sends = warp == 0 && (half == 0 ? kEarlier > 0 : block > rank);
  const Addresses addresses = in_registers(shared_addresses);
  uint32_t own_at = addresses.of_warps + kBytes * warp,
           from_at = addresses.of_warps + (half == 0 ? kBytes * kFewRowsWarps : 0);
  uint32_t remote_at = cluster_address(addresses.received + kBytes * (half * kMaxCluster + rank), block),
           counter = cluster_address(addresses.arrivals, block);
  uint32_t received_at = addresses.received + lane % 4 * 8 * kBytes;
  Change<double>* const exact_changes = exact_earlier + warp * 32 * kEarlier;
  uint32_t own_store_at = shared_address(exact_changes) + kBytes * lane,
           own_load_at = shared_address(exact_changes) + kBytes * kEarlier * lane;
  keep(share_whole);
  keep(input_from);
  keep(gamma_from);
  keep(inputs_from);
  keep(gammas_from);
  keep(to);
  hold(lane);
  hold(warp);
  hold(whole);
  hold(cut);
  hold(share_cut);
  hold(first_step);
  hold(sends);
  hold(own_at);
  hold(from_at);
  hold(remote_at);
  hold(counter);
  hold(received_at);
  hold(own_store_at);
  hold(own_load_at);
  wait_for_cluster();
  griddepcontrol_wait();

  // The thread's own come last. What is not loaded changes nothing.
  Word words[kEarlier + 1], gate_words[kEarlier + 1];
  load_if(whole, input_from, words[kEarlier]);
  load_if(whole, gamma_from, gate_words[kEarlier], kOnes<T>);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) {
    const bool wanted = j < cluster && (j > 0 || share_whole);
    load_if(wanted, inputs_from + (kReverse ? -32 : 32) * j, words[j]);
    load_if(wanted, gammas_from + (kReverse ? -32 : 32) * j, gate_words[j], kOnes<T>);
  }
  if (cut) {
    words[kEarlier] = load_vector<T, kVec>(input, at, 0, length);
    gate_words[kEarlier] = load_vector<T, kVec>(gamma, at, 0, length);
  }
  if (kEarlier > 0 && kReverse && share_cut) {
    words[0] = load_vector<T, kVec>(input, address(share), 0, length);
    gate_words[0] = load_vector<T, kVec>(gamma, address(share), 0, length);
  }

  const auto read = [&](int j, float (&values)[kVec], float (&factors)[kVec]) {
    unpack_in_order<kReverse>(words[j], values);
    unpack_in_order<kReverse>(gate_words[j], factors);
    if (j == 0 || j == kEarlier) {
      const int first = j == (cluster > 0 ? 0 : kEarlier) ? first_step : -1;
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i == first) factors[i] = 1.f;
    }
  };
  // Whether float will do: finite totals, gates of at most 1, and no product of a vector that is close to 0 but not 0.
  float most = 0.f, least = 1.f;
  uint32_t signs = 0;
  bool fits = true;
  Change<float> changes[kEarlier + 1];
#pragma unroll
  for (int j = 0; j <= kEarlier; ++j) {
    float values[kVec], factors[kVec];
    read(j, values, factors);
    changes[j] = {0.f, 1.f};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      changes[j] = {plain_step(values[i], factors[i], changes[j].total), changes[j].gates * factors[i]};
      most = fmaxf(most, fabsf(factors[i]));
    }
    fits &= fabsf(changes[j].total) <= kMostTotal;
    least = fminf(least, fabsf(changes[j].gates));
    if (j < kEarlier) signs ^= __float_as_uint(changes[j].gates);
  }
  fits &= most <= 1.f;
  bool any_zero = false, own_zero = false;
  if (__builtin_expect(!(least >= kLeastGates), 0)) {
#pragma unroll
    for (int j = 0; j <= kEarlier; ++j) {
      if (fabsf(changes[j].gates) >= kLeastGates) continue;
      float values[kVec], factors[kVec];
      read(j, values, factors);
      bool zero = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) zero |= factors[i] == 0.f;
      fits &= zero;
      (j < kEarlier ? any_zero : own_zero) |= zero;
    }
  }
  const uint32_t zeros = __ballot_sync(kAll, own_zero), negatives = __ballot_sync(kAll, changes[kEarlier].gates < 0.f);
  Change<float> before;
  Change<double> exact_before{0.0, 1.0};
  if (__builtin_expect(__all_sync(kAll, fits), 1)) {
#pragma unroll
    for (int j = 0; j < kEarlier; ++j) store_at(own_store_at + 32 * kBytes * j, changes[j]);
    if (kEarlier > 0) __syncwarp();
    Change<float> through = changes[kEarlier];
    const Change<float> segment = join_warp<kEarlier>(lane, through, [&](int i) {
      Change<float> loaded[1];
      load_at(own_load_at + kBytes * i, loaded);
      return loaded[0];
    });
    if constexpr (kEarlier > 0) {
      const bool zero = __any_sync(kAll, any_zero);
      const uint32_t negative = __popc(__ballot_sync(kAll, static_cast<int>(signs) < 0));
      if (lane == 31) store_at(own_at + kBytes * kFewRowsWarps, above_zero(segment, zero, negative));
    }
    if (lane == 31) store_at(own_at, above_zero(through, zeros != 0, __popc(negatives)));
    before = change_up(through, 1);
    if (lane == 0) before = {0.f, 1.f};
  } else {
    const auto exact_change = [&](int j) -> Change<double> {
      const int first = j == (cluster > 0 ? 0 : kEarlier) ? first_step : -1;
      return {changes[j].total, exact_gates<T, kReverse>(gate_words[j], first)};
    };
#pragma unroll
    for (int j = 0; j < kEarlier; ++j) exact_changes[lane + 32 * j] = exact_change(j);
    if (kEarlier > 0) __syncwarp();
    Change<double> through = exact_change(kEarlier);
    const Change<double> segment =
        join_warp<kEarlier>(lane, through, [&](int i) { return exact_changes[lane * kEarlier + i]; });
    before = {NAN, NAN};
    if (lane == 31) {
      exact_of_warps[warp] = through;
      exact_of_warps[kFewRowsWarps + warp] = segment;
      of_warps[warp] = of_warps[kFewRowsWarps + warp] = before;
    }
    exact_before = change_up(through, 1);
    if (lane == 0) exact_before = {0.0, 1.0};
  }
  __syncthreads();

  if (warp == 0) {
    Change<float> changes_of[kFewRowsWarps];
    load_at(from_at, changes_of);
    Change<float> all = changes_of[0];
    float least_gates = fabsf(all.gates);
    uint32_t sign = __float_as_uint(all.gates);
#pragma unroll
    for (int w = 1; w < kFewRowsWarps; ++w) {
      all = joined(all, changes_of[w]);
      least_gates = fminf(least_gates, fabsf(changes_of[w].gates));
      sign ^= __float_as_uint(changes_of[w].gates);
    }
    if (__builtin_expect(isnan(all.total), 0)) {
      const int which = lane / kMaxCluster, first = which == 0 ? kFewRowsWarps : 0;
      const Exact exact{of_warps + first, exact_of_warps + first};
      const Change<double> exact_block = exact_all(exact, kFewRowsWarps, {0.0, 1.0});
      if (sends) {
        const Change<double>* const mine = &exact_received[which * kMaxCluster + rank];
        store_async_in_cluster(&mine->total, &exact_arrivals, lane % kMaxCluster, exact_block.total);
        store_async_in_cluster(&mine->gates, &exact_arrivals, lane % kMaxCluster, exact_block.gates);
      }
      all.gates = all.total;
    } else {
      all = above_zero(all, least_gates == 0.f, sign >> 31);
    }
    if (sends) store_async(remote_at, counter, all.total, all.gates);
  }
  Change<float> warps_before[kFewRowsWarps], block_before{0.f, 1.f};
  load_at(addresses.of_warps, warps_before);
#pragma unroll
  for (int w = 0; w < kFewRowsWarps - 1; ++w)
    if (w < warp) block_before = joined(block_before, warps_before[w]);
  Change<float> row_before = joined(block_before, before);  // but for what lies before the block
  hold(row_before.total);
  hold(row_before.gates);

  mbarrier_wait(addresses.arrivals, 0);
  // Four lanes take eight of the blocks' changes each.
  Change<float> of_blocks[8];
  load_at(received_at, of_blocks);
  Change<float> carry = of_blocks[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) carry = joined(carry, of_blocks[i]);
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const Change<float> other{__shfl_xor_sync(kAll, carry.total, d), __shfl_xor_sync(kAll, carry.gates, d)};
    const bool behind = (lane & d) != 0;
    const float total = fold(
        behind ? carry.total : other.total, behind ? carry.gates : other.gates, behind ? other.total : carry.total);
    carry = {total, carry.gates * other.gates};
  }
  float y = fold(row_before.total, row_before.gates, carry.total);
  if (__builtin_expect(__any_sync(kAll, isnan(y)), 0)) {
    const uint32_t missing = __ballot_sync(kAll, isnan(received[lane].gates));  // the same for all warps
    if (missing != 0) {
      if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(&exact_arrivals, __popc(missing) * static_cast<int>(sizeof(Change<double>)));
      mbarrier_wait(&exact_arrivals, 0);
    }
    const Exact exact_blocks{received, exact_received}, exact_warps{of_warps, exact_of_warps};
    const Change<double> through = exact_all(exact_warps, warp, exact_all(exact_blocks, 2 * kMaxCluster, {0.0, 1.0}));
    const uint32_t lanes_before = (1u << lane) - 1;
    before = above_zero(before, (zeros & lanes_before) != 0, __popc(negatives & lanes_before));
    y = static_cast<float>(joined(through, Exact{&before, &exact_before}[0]).total);
  }
  float values[kVec], factors[kVec];
  read(kEarlier, values, factors);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = y = plain_step(values[i], factors[i], y);
  const Word result = pack_in_order<kReverse, T>(values);
  if (whole) *reinterpret_cast<Word*>(to) = result;
  if (cut) store_vector<T, kVec>(output, at, 0, length, result);
}

}  // namespace dcs
