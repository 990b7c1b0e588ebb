// Small problems of contiguous time, whose time is latency: one trip to memory, one exchange, one trip back. A thread
// has 16 bytes of neighboring elements in registers and asks for all that they need at once, in a word where memory has
// one for it, element by element elsewhere. A block takes some whole rows, a cluster of blocks a longer one. Where rows
// start is arithmetic in 32 bits, as the problem has fewer elements. Of gates, one a row is as one a step.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/divisor.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/global_load.cuh"
#include "common/ptx/latency.cuh"
#include "common/vector.cuh"
#include "dcs/scan/plan/tuning.h"
#include "dcs/scan/problem.h"
#include "scan/rows/lane_state.cuh"

namespace dcs {

// An operand from the scan's first element on, with strides in the scan's direction. Rows of those with an element for
// every step lie equally far apart.
struct SmallOperand {
  const void* data;
  int pitch, time;
  // Of each kVec elements of a thread, that they are neighbors in memory which begin at a multiple of their size.
  bool in_words;
};
struct SmallRowOperand {
  const void* data;
  int outer, inner;
};

struct SmallRowsParams {
  SmallOperand input, gates, reset, output;  // null where there are none
  SmallRowOperand gamma, initial;
  Divisor length, inner, cluster;  // elements of a row, inner rows, blocks of a cluster
  int rows, group_rows;            // of all, of a block or cluster
  int levels;                      // of shuffles: 2^levels lanes are farther than a row reaches
  int back;                        // 1 where gates and resets are those of the step before
  bool reverse, by_step;
  ElementType gamma_dtype;
  double number, powers[6];  // gamma; over 1, 2, 4, ... lanes
};

// What a thread has asked for: a vector in the order of memory, or elements in the order of the scan, in registers of
// their own.
template <typename E, int kVec>
struct Asked {
  static constexpr int kWords = sizeof(E) == 8 ? 2 : 1;
  uint32_t words[kVec * kWords] = {};

  __device__ __forceinline__ void load_vector(bool wanted, const E* from) {
    load_words_where(wanted, reinterpret_cast<const Vector<E, kVec>*>(from), words);
  }
  __device__ __forceinline__ void load(bool wanted, const E* from, int i) {
    load_words_where(wanted, from, words + i * kWords);
  }
  __device__ __forceinline__ Vector<E, kVec> vector() const { return as<Vector<E, kVec>>(words); }
  __device__ __forceinline__ E operator[](int i) const { return as<E>(words + i * kWords); }

 private:
  template <typename To>
  __device__ __forceinline__ static To as(const uint32_t* from) {
    To to;
    memcpy(&to, from, sizeof to);
    return to;
  }
};

// A thread's places.
template <int kVec>
struct SmallPlaces {
  const SmallRowsParams& p;
  const int length = static_cast<int>(p.length.divisor);
  int rank = 0;             // of the block in its cluster
  int first_row, elements;  // of the block's rows, or the cluster's
  int at;                   // elements of these before the first place
  int row, done;            // of the first place, elements of its row before it; negative before the first row
  int low, high;            // places that are of these rows
  bool is_word;             // its words are in the tensor

  __device__ __forceinline__ explicit SmallPlaces(const SmallRowsParams& params) : p(params) {
    uint32_t group = blockIdx.x;
    if (p.cluster.divisor > 1) {
      group = p.cluster.of(blockIdx.x);
      rank = static_cast<int>(blockIdx.x - group * p.cluster.divisor);
    }
    first_row = static_cast<int>(group) * p.group_rows;
    elements = min(p.rows - first_row, p.group_rows) * length;
    // Places begin where words do, if rows lie one behind the other.
    const int from_word = (first_row - (p.reverse ? p.rows : 0)) * length & (kVec - 1);
    at = (rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec - from_word;
    const int rows_before = whole_rows(max(at, 0));
    row = first_row + rows_before;
    done = at - rows_before * length;
    low = max(0, -at);
    high = max(0, min(kVec, elements - at));
    const int place = first_row * length + at;
    is_word = high > 0 && place >= 0 && place + kVec <= p.rows * length;
  }
  __device__ __forceinline__ bool has(int i) const { return i >= low && i < high; }
  __device__ __forceinline__ int whole_rows(int count) const {
    return static_cast<int>(p.length.of(static_cast<uint32_t>(count)));
  }

  __device__ __forceinline__ int offset(const SmallRowOperand& of, int at_row) const {
    const int outer = static_cast<int>(p.inner.of(static_cast<uint32_t>(at_row)));
    return outer * of.outer + (at_row - outer * static_cast<int>(p.inner.divisor)) * of.inner;
  }
  // Calls `visit` with each place's number, row, and elements of the row before it.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    int at_row = row, at_done = done;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (at_done == length) at_done = 0, ++at_row;
      visit(i, at_row, at_done);
      ++at_done;
    }
  }

  // Where the thread's first element lies.
  template <typename E>
  __device__ __forceinline__ const E* first_of(const SmallOperand& of, int back = 0) const {
    return static_cast<const E*>(of.data) + (row * of.pitch + (done - back) * of.time);
  }
  // `back`: of the step before, where the row has one.
  template <typename E>
  __device__ __forceinline__ void ask(
      const SmallOperand& of, const E* first, Asked<E, kVec>& asked, int back = 0) const {
    if (of.in_words) {
      asked.load_vector(is_word, p.reverse ? first - (kVec - 1) : first);
      if (is_word || high == 0) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) asked.load(has(i), p.reverse ? first - i : first + i, i);
    } else {
      const int to_next_row = of.pitch - (length - 1) * of.time;
      int ahead = 0, row_before = row;
      each([&](int i, int at_row, int at_done) {
        if (i > 0) ahead += at_row != row_before ? to_next_row : of.time;
        row_before = at_row;
        asked.load(has(i) && at_done >= back, first + ahead, i);
      });
    }
  }
  // In the order of the scan.
  template <typename Acc, typename E>
  __device__ __forceinline__ void get(const SmallOperand& of, const Asked<E, kVec>& asked, Acc (&to)[kVec]) const {
    if (of.in_words && is_word) {
      Acc values[kVec];
      unpack(asked.vector(), values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = p.reverse ? values[kVec - 1 - i] : values[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(asked[i]);
    }
  }

  template <typename Acc>
  __device__ __forceinline__ void get_row_gammas(Acc (&to)[kVec]) const {
    const auto load = [&](const auto* gammas) {
      Asked<std::decay_t<decltype(*gammas)>, kVec> asked;
      each([&](int i, int at_row, int) { asked.load(has(i), gammas + offset(p.gamma, at_row), i); });
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(asked[i]);
    };
    switch (p.gamma_dtype) {
      case ElementType::Half: return load(static_cast<const __half*>(p.gamma.data));
      case ElementType::BFloat16: return load(static_cast<const __nv_bfloat16*>(p.gamma.data));
      case ElementType::Float: return load(static_cast<const float*>(p.gamma.data));
      default: return load(static_cast<const double*>(p.gamma.data));
    }
  }

  // `shared` has a word a thread, by way of which the warp's lanes take single elements in turn.
  template <typename T, typename Acc>
  __device__ __forceinline__ void store(const Acc (&values)[kVec], unsigned char* shared) const {
    T* const to = static_cast<T*>(const_cast<void*>(p.output.data));
    if (p.output.in_words) {
      T* const first = const_cast<T*>(first_of<T>(p.output));
      if (low == 0 && high == kVec) {
        Acc turned[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) turned[i] = p.reverse ? values[kVec - 1 - i] : values[i];
        *reinterpret_cast<Vector<T, kVec>*>(p.reverse ? first - (kVec - 1) : first) = pack<Acc, T, kVec>(turned);
        return;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (has(i)) *(p.reverse ? first - i : first + i) = cast<T>(values[i]);
      return;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    T* const warp = reinterpret_cast<T*>(shared) + (static_cast<int>(threadIdx.x) - lane) * kVec;
    reinterpret_cast<Vector<T, kVec>*>(warp)[lane] = pack<Acc, T, kVec>(values);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int own = 32 * i + lane, place = at - lane * kVec + own, rows_before = whole_rows(max(place, 0));
      if (place >= 0 && place < elements)
        to[(first_row + rows_before) * p.output.pitch + (place - rows_before * length) * p.output.time] = warp[own];
    }
  }
};

// How many lanes back a lane's carry comes from: as far as the nearest one that is closed.
__device__ __forceinline__ int reach_of(uint32_t closed) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t behind = closed & (0xffffffffu >> (31 - lane));
  return behind ? lane - (31 - __clz(behind)) : lane;
}
// The first `count` lanes' pieces, each with those before it.
__device__ __forceinline__ Piece<double> up_to_lane(Piece<double> piece, int count) {
  const uint32_t closed = __ballot_sync(0xffffffffu, piece.closed);
  const int reach = reach_of(closed);
#pragma unroll 1
  for (int d = 1; d < count; d *= 2) {
    const double other = shuffle_up(piece.total, d), other_gates = shuffle_up(piece.gates, d);
    if (reach >= d) {
      piece.total = fold(piece.total, piece.gates, other);
      piece.gates = clamped_mul(piece.gates, other_gates);
    }
  }
  piece.closed = (closed & (0xffffffffu >> (31 - static_cast<int>(threadIdx.x) % 32))) != 0;
  return piece;
}

// What the blocks of a cluster leave the later ones.
struct SmallMail {
  struct Letter {
    double total, gates, closed;
  };
  Letter letters[kMostRowCluster];
  uint64_t arrivals;

  __device__ __forceinline__ void open(int rank) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * static_cast<int>(sizeof(Letter)));
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  __device__ __forceinline__ void send(const Piece<double>& piece, int rank, uint32_t to) {
    Letter& letter = letters[rank];
    store_async_in_cluster(&letter.total, &arrivals, to, piece.total);
    store_async_in_cluster(&letter.gates, &arrivals, to, piece.gates);
    store_async_in_cluster(&letter.closed, &arrivals, to, piece.closed ? 1.0 : 0.0);
  }
  // The carry into a block.
  __device__ __forceinline__ double read(int rank) {
    if (rank == 0) return 0.0;
    Piece<double> piece = identity<double>();
    mbarrier_wait(&arrivals, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < rank) {
      const Letter& letter = letters[lane];
      piece = {letter.total, letter.gates, letter.closed != 0.0};
    }
    return shuffle(up_to_lane(piece, rank).total, rank - 1);
  }
};

// The product that neither leaves the range of double nor vanishes but for a gate of 0.
template <typename Acc, int kVec>
__device__ __forceinline__ double product_of(const Acc (&gates)[kVec]) {
  Acc product = gates[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) product *= gates[i];
  constexpr double kMost = std::is_same_v<Acc, float> ? 0x1p100 : 0x1p1000;
  if (fabs(product) < static_cast<Acc>(kMost) && fabs(product) > static_cast<Acc>(1.0 / kMost)) return product;
  double careful = gates[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) careful = power_mul(careful, static_cast<double>(gates[i]));
  return careful;
}

// `kGates`: one gamma a row or a step.
template <typename T, bool kGates>
__global__ void __launch_bounds__(32 * kSmallRowsWarps, 1)
    small_rows_kernel(const __grid_constant__ SmallRowsParams p) {
  using Acc = LaneAcc<T>;
  constexpr int kVec = 16 / sizeof(T);
  extern __shared__ __align__(128) unsigned char small_shared[];
  __shared__ Piece<double> pieces[kSmallRowsWarps];
  __shared__ SmallMail mail;
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const SmallPlaces<kVec> places(p);
  const bool in_cluster = p.cluster.divisor > 1;
  if (in_cluster) mail.open(places.rank);
  uint32_t starts = 0;
  places.each([&](int i, int, int done) { starts |= (done == 0 ? 1u : 0u) << i; });
  double weight = 1.0;  // of a number gamma: over the lanes before
  if constexpr (!kGates) {
#pragma unroll
    for (int j = 0; j < 5; ++j) weight *= lane >> j & 1 ? p.powers[j] : 1.0;
    weight = bounded_product(weight, p.number);
  }
  const T* first = places.template first_of<T>(p.input);
  keep(first);
  griddepcontrol_wait();

  Asked<T, kVec> input, step_gates;
  Asked<uint8_t, kVec> flags;
  Asked<T, kVec> initial;
  places.ask(p.input, first, input);
  if (kGates && p.by_step) places.ask(p.gates, places.template first_of<T>(p.gates, p.back), step_gates, p.back);
  if (p.reset.data) places.ask(p.reset, places.template first_of<uint8_t>(p.reset, p.back), flags, p.back);
  if (p.initial.data) {
    places.each([&](int i, int row, int) {
      if (starts >> i & 1)
        initial.load(places.has(i), static_cast<const T*>(p.initial.data) + places.offset(p.initial, row), i);
    });
  }
  Acc gates[kGates ? kVec : 1] = {};
  if constexpr (kGates) {
    if (!p.by_step) places.get_row_gammas(gates);
  } else if constexpr (std::is_same_v<Acc, float>) {
    gates[0] = make_gate<float, true>(p.number).value;
  } else {
    gates[0] = p.number;
  }

  Acc x[kVec];
  places.get(p.input, input, x);
  if constexpr (kGates)
    if (p.by_step) places.get(p.gates, step_gates, gates);
  const auto gate = [&](int i) { return gates[kGates ? i : 0]; };
  uint32_t cuts = starts;
  if (p.reset.data) {
    int each[kVec];
    places.get(p.reset, flags, each);
    uint32_t resets = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) resets |= (each[i] != 0 ? 1u : 0u) << i;
    starts &= ~resets;
    cuts |= resets;
  }
  if (p.initial.data) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (starts >> i & 1) x[i] = fold(x[i], gate(i), cast<Acc>(initial[i]));
  }

  // The thread's piece from nothing, then those of the lanes up to its own, as far back as the nearest cut.
  Acc y = x[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) y = cuts >> i & 1 ? x[i] : fold(x[i], gate(i), y);
  Piece<double> piece{cast<double>(y), 1.0, false};
  if constexpr (kGates) piece.gates = product_of(gates);
  const uint32_t closed = __ballot_sync(0xffffffffu, cuts != 0);
  const int reach = reach_of(closed);
#pragma unroll
  for (int j = 0; j < 5; ++j) {
    const int d = 1 << j;
    if (j >= p.levels) break;
    const double other = shuffle_up(piece.total, d);
    if (reach >= d) piece.total = fold(piece.total, kGates ? piece.gates : p.powers[j], other);
    if constexpr (kGates) {
      const double other_gates = shuffle_up(piece.gates, d);
      if (reach >= d) piece.gates = clamped_mul(piece.gates, other_gates);
    }
  }
  double before = shuffle_up(piece.total, 1);
  if constexpr (kGates) weight = shuffle_up(piece.gates, 1);
  else piece.gates = p.powers[5];
  if (lane == 0) before = 0.0, weight = 1.0;
  piece.closed = closed != 0;
  if (lane == 31) pieces[warp] = piece;
  __syncthreads();

  // The same for warps, and for the blocks of a cluster. What is no cluster's begins with a row.
  const Piece<double> warps_before = up_to_lane(lane < warps ? pieces[lane] : identity<double>(), warps);
  double carry = shuffle(warps_before.total, max(warp - 1, 0));
  if (in_cluster) {
    const auto of_lane = [&](int from) {
      return Piece<double>{shuffle(warps_before.total, from), shuffle(warps_before.gates, from),
          __shfl_sync(0xffffffffu, static_cast<int>(warps_before.closed), from) != 0};
    };
    wait_for_cluster();  // until the others' mail is open
    const Piece<double> block = of_lane(warps - 1), own = of_lane(max(warp - 1, 0));
    if (warp == 0 && lane > places.rank && lane < static_cast<int>(p.cluster.divisor))
      mail.send(block, places.rank, lane);
    carry = mail.read(places.rank);
    if (warp > 0) carry = after(own, carry);
  }

  y = cast<Acc>(closed & ((1u << lane) - 1) ? before : fold(before, weight, carry));
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = y = cuts >> i & 1 ? x[i] : fold(x[i], gate(i), y);
  places.template store<T>(x, small_shared);
}

}  // namespace dcs
