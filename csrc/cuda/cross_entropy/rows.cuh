// The rows of `_cross_entropy_rows_` on a GPU; dcs/cross_entropy/problem.h has the formulas.
//
// A warp, a block, or (sm_90) a cluster of 2, 4 or 8 blocks takes a row. It reads the row once: every thread sums up
// its vectors relative to the largest logit that it has met, keeps them in shared memory, and the threads' sums are
// joined. Then it writes the gradient from shared memory. What a block has no room for is read again, from L2 while
// that lasts. A thread reads back only what it has itself written, so this needs no barrier.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "common/row_statistics.cuh"
#include "cross_entropy/launch.h"
#include "cross_entropy/softcap.cuh"
#include "cross_entropy/target_assertion.cuh"

namespace dcs {

constexpr int kRowWarps = 8;        // rows of a block in Scope::kWarp
constexpr int kWarpColumns = 1024;  // up to which a warp takes a row
constexpr int kShareBytes =
    74 << 10;  // of a row to a block: three blocks on a multiprocessor of sm_90 load, sum and store in turn

struct CrossEntropyRowsParams {
  RowsProblem problem;
  int staged = 0;    // vectors of its share that a block (a warp) keeps in shared memory
  float scale = 1;   // z = scale * y in the plain kernel, whose y are the logits as they are; else 1
  float factor = 1;  // exponents are factor * (y - largest): powers of 2 in float, of e in double
  float softcap = 0, inverse_softcap = 0;
};

// One row, as seen by one thread. kFull: bias, softcap, any scale, class weights in label smoothing, class
// probabilities; without it y are the logits as they are.
template <typename T, bool kFull>
struct Row {
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;

  const CrossEntropyRowsParams& params;
  Acc factor;
  T* tile;        // the row's first element, down to a whole vector
  int low, high;  // the row's positions in the tile
  int target;     // the target's position, or -1
  OptionalSums optional;
  const Acc* probabilities;  // the row's class probabilities, or null

  __device__ __forceinline__ Vec load(int vector) const { return load_vector<T, kVec>(tile, vector * kVec, low, high); }

  // Whether all of a vector's elements count alike.
  __device__ __forceinline__ bool is_whole(int vector) const {
    const int first = vector * kVec;
    return first >= low && first + kVec <= high && !(target >= first && target < first + kVec);
  }

  __device__ __forceinline__ bool counts(int position) const {
    return position >= low && position < high && position != target;
  }

  __device__ __forceinline__ Acc column(const void* numbers, int position) const {
    return position >= low && position < high ? __ldg(static_cast<const Acc*>(numbers) + (position - low)) : Acc(0);
  }

  // w, for class probabilities v.
  __device__ __forceinline__ Acc weight(int position) const {
    Acc w = 1;
    if constexpr (kFull) {
      if (params.problem.weight) w = column(params.problem.weight, position);
      if (probabilities) {
        const Acc eps = static_cast<Acc>(params.problem.label_smoothing);
        w *= (Acc(1) - eps) * column(probabilities, position) + eps / static_cast<Acc>(high - low);
      }
    }
    return w;
  }

  __device__ __forceinline__ Capped<Acc> value(Acc logit, int position) const {
    if constexpr (kFull) {
      Acc u = logit;
      if (params.problem.bias) u += column(params.problem.bias, position);
      u *= static_cast<Acc>(params.problem.logit_scale);
      if (params.problem.softcap > 0) {
        if constexpr (std::is_same_v<Acc, double>) return cap<true>(u, params.problem.softcap);
        else return cap<sizeof(T) == 4>(u, params.softcap, params.inverse_softcap);
      }
      return {u, Acc(1)};
    } else {
      return {logit, Acc(1)};
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void add(RowSums<Acc>& sums, const Vec& raw, int vector) const {
    Acc y[kVec];
    unpack(raw, y);
    if constexpr (kFull) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = value(y[i], vector * kVec + i).value;
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (!counts(vector * kVec + i)) y[i] = -INFINITY;
    }
    Acc largest;
    if constexpr (sizeof(T) == 2 && !kFull && kWhole) {
      largest = largest_half(raw);
    } else {
      largest = y[0];
#pragma unroll
      for (int i = 1; i < kVec; ++i) largest = maximum(largest, y[i]);
    }
    if (is_larger(largest, sums.largest)) {
      raise(sums, largest, factor, optional);
      sums.vector = vector;
    }
    Acc total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += power((y[i] - sums.largest) * factor);
    sums.total += total;
    if (optional.weighted) {
      Acc weighted = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc d = (y[i] - sums.largest) * factor;
        weighted += power(d) * bounded(d);
      }
      sums.weighted += weighted;
    }
    if (optional.distance) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (kWhole || counts(vector * kVec + i)) {
          const Acc w = weight(vector * kVec + i);
          sums.distance += w * (sums.largest - y[i]);
          sums.weight += w;
        }
      }
    }
  }

  // The first position in the vector of its largest y, the target left out.
  __device__ __forceinline__ int find(int vector, Acc largest) const {
    Acc y[kVec];
    unpack(load(vector), y);
    int found = -1;
#pragma unroll
    for (int i = kVec - 1; i >= 0; --i) {
      const int position = vector * kVec + i;
      const Acc z = value(y[i], position).value;
      if (counts(position) && (z == largest || (z != z && largest != largest))) found = position;
    }
    return found;
  }
};

// d/dlogit = base^d (power + slope d) - even w, times the softcap's slope.
template <typename Acc>
struct GradientForm {
  Acc largest, power, slope, even;
};

// What the gradient at the target takes beside it.
template <typename Acc>
struct TargetForm {
  Acc nll, a, c, others, total, power, weight;  // others: the total without the target
  Acc grad_loss, grad_entropy, slope;
};

template <typename Acc>
__device__ __forceinline__ Acc read(const RowScalar& scalar, int64_t row, Acc otherwise) {
  return scalar.data ? static_cast<const Acc*>(scalar.data)[row * scalar.stride] : otherwise;
}

template <typename Acc>
__device__ __forceinline__ void write(void* results, int64_t row, Acc value) {
  static_cast<Acc*>(results)[row] = value;
}

// The vectors begin ... end - 1 of a row, which a warp or a block takes: thread `me` of `threads` has every threads-th
// from begin + me on.
template <typename T, bool kFull, Scope kScope>
struct RowShare {
  using Acc = typename Types<T>::Acc;
  using R = Row<T, kFull>;
  using Vec = typename R::Vec;
  static constexpr int kVec = R::kVec;
  static constexpr int kUnroll = kFull ? 2 : 4;  // vectors that a thread loads before it uses the first

  const CrossEntropyRowsParams& params;
  const RowsProblem& problem;
  const R& one;
  Vec* const stage;
  const int64_t row, class_index;
  const int begin, end, me, threads;
  const bool first_thread, has_target, mixed;

  __device__ __forceinline__ RowSums<Acc> sum() const {
    RowSums<Acc> sums = no_sums<Acc>();
    for (int from = begin + me; from < end; from += kUnroll * threads) {
      Vec raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (from + u * threads < end) raw[u] = one.load(from + u * threads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int vector = from + u * threads;
        if (vector < end) {
          if (vector - begin < params.staged) stage[vector - begin] = raw[u];
          if (one.is_whole(vector)) one.template add<true>(sums, raw[u], vector);
          else one.template add<false>(sums, raw[u], vector);
        }
      }
    }
    join_threads<kScope>(sums, one.factor, one.optional);
    return sums;
  }

  __device__ __forceinline__ void predict(const RowSums<Acc>& sums, const Capped<Acc>& at_target) const {
    const bool found = sums.vector != ~0u;
    const int vector = static_cast<int>(sums.vector);
    const bool owner = found ? vector >= begin && vector < end && (vector - begin) % threads == me : first_thread;
    if (!owner) return;
    int position = found ? one.find(vector, sums.largest) : one.low;
    if (has_target) {
      const bool equal = !is_larger(sums.largest, at_target.value) && one.target < position;
      if (is_larger(at_target.value, sums.largest) || equal) position = one.target;
    }
    problem.predictions[row] = position - one.low;
  }

  // The row's results, and its gradient.
  __device__ __forceinline__ void finish(RowSums<Acc>& sums, const Capped<Acc>& at_target) const {
    const Acc scale = kFull ? Acc(1) : static_cast<Acc>(params.scale);
    const Acc z_loss = static_cast<Acc>(problem.z_loss);
    const Acc even = has_target
        ? static_cast<Acc>(problem.label_smoothing / static_cast<double>(static_cast<int>(problem.columns)))
        : Acc(1);
    Acc way = 0, exponent = 0, target_power = 0, target_weight = 0;
    bool target_is_largest = false;
    if (has_target) {
      target_is_largest = at_target.value >= sums.largest;
      raise(sums, target_is_largest ? at_target.value : sums.largest, one.factor, one.optional);
      way = sums.largest - at_target.value;
      exponent = -way * one.factor;
      target_power = power(exponent);
      target_weight = problem.weight ? static_cast<const Acc*>(problem.weight)[class_index] : Acc(1);
    }
    const Acc total = sums.total + target_power, log_total = target_is_largest ? log1p(sums.total) : log(total);
    const Acc gap = way * scale, nll = gap + log_total, lse = sums.largest * scale + log_total;
    const Acc hit = (Acc(1) - static_cast<Acc>(problem.label_smoothing)) * target_weight,
              weight = sums.weight + target_weight;
    Acc loss = has_target ? hit * nll : Acc(0), entropy = 0;
    if (mixed) loss += even * (sums.distance * scale + target_weight * gap + weight * log_total);
    if (problem.z_loss != 0) loss += z_loss * lse * lse;
    if (one.optional.weighted)
      entropy = log_total - kLogOfBase<Acc> * (sums.weighted + target_power * bounded(exponent)) / total;
    write_results(loss, lse, entropy);
    if (problem.gradient) {
      const Acc grad_loss = read(problem.grad_loss, row, Acc(1)),
                grad_entropy = read(problem.grad_entropy, row, Acc(0));
      Acc a = read(problem.grad_lse, row, Acc(0));
      if (one.optional.weighted) a -= grad_entropy * entropy;
      if (mixed) a += grad_loss * even * weight;
      if (problem.z_loss != 0) a += grad_loss * Acc(2) * z_loss * lse;
      const Acc c = grad_loss * hit, slope = static_cast<Acc>(problem.logit_scale);
      const GradientForm<Acc> form{sums.largest, slope / total * (a + c + grad_entropy * log_total),
          -slope / total * grad_entropy * kLogOfBase<Acc>, mixed ? slope * grad_loss * even : Acc(0)};
      write_gradient(form, {nll, a, c, sums.total, total, target_power, target_weight, grad_loss, grad_entropy, slope},
          even, at_target.slope);
    }
  }
  __device__ __forceinline__ void write_results(Acc loss, Acc lse, Acc entropy) const {
    if (!first_thread) return;
    write(problem.loss, row, loss);
    write(problem.lse, row, lse);
    if (problem.entropy) write(problem.entropy, row, entropy);
  }

  __device__ __forceinline__ void write_gradient(
      const GradientForm<Acc>& form, const TargetForm<Acc>& at, Acc even, Acc target_slope) const {
    const bool entropic = problem.grad_entropy.data != nullptr;
    for (int vector = begin + me; vector < end; vector += threads) {
      const Vec raw = vector - begin < params.staged ? stage[vector - begin] : one.load(vector);
      Acc g[kVec];
      unpack(raw, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int position = vector * kVec + i;
        const Capped<Acc> z = one.value(g[i], position);
        const Acc d = (z.value - form.largest) * one.factor;
        Acc factor = form.power, less = form.even;
        if (entropic) factor += form.slope * bounded(d);
        if (kFull && mixed) less *= one.weight(position);
        g[i] = power(d) * factor - less;
        if (kFull) g[i] *= z.slope;
      }
      store_vector<T, kVec>(one.tile, vector * kVec, one.low, one.high, pack<Acc, T, kVec>(g));
      if (has_target && one.target / kVec == vector) {
        // The same thread, after its store.
        const Acc log_p = at.nll > Acc(1000) ? Acc(-1000) : -at.nll;
        const Acc others = -at.c * (at.others / at.total), own = at.power / at.total * (at.a - at.grad_entropy * log_p);
        Acc gradient = at.slope * (others + own - (mixed ? at.grad_loss * even * at.weight : Acc(0)));
        if (kFull) gradient *= target_slope;
        one.tile[one.target] = cast<T>(gradient);
      }
    }
  }

  __device__ __forceinline__ void write_ignored() const {
    write_results(Acc(0), Acc(0), Acc(0));
    if (!problem.gradient) return;
    Acc zeros[kVec] = {};
    const Vec none = pack<Acc, T, kVec>(zeros);
    for (int vector = begin + me; vector < end; vector += threads)
      store_vector<T, kVec>(one.tile, vector * kVec, one.low, one.high, none);
  }
};

template <typename T, bool kFull, Scope kScope>
__global__ void __launch_bounds__(kScope == Scope::kWarp ? 32 * kRowWarps : kRowThreads, kFull ? 2 : 3)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyRowsParams params) {
#if __CUDA_ARCH__ < 900
  if constexpr (kScope == Scope::kCluster) return;
#endif
  using Share = RowShare<T, kFull, kScope>;
  using Acc = typename Share::Acc;
  using Vec = typename Share::Vec;
  constexpr int kVec = Share::kVec;
  extern __shared__ __align__(16) unsigned char memory[];
  const RowsProblem& problem = params.problem;
  overlap_launches();

  const int blocks = kScope == Scope::kCluster ? static_cast<int>(cluster_blocks()) : 1;
  const int rank = kScope == Scope::kCluster ? static_cast<int>(cluster_rank()) : 0;
  const int threads = kScope == Scope::kWarp ? 32 : blockDim.x,
            me = kScope == Scope::kWarp ? threadIdx.x % 32 : threadIdx.x;
  int64_t row = blockIdx.x;
  Vec* stage = reinterpret_cast<Vec*>(memory);
  if constexpr (kScope == Scope::kWarp) {
    row = row * kRowWarps + threadIdx.x / 32;
    if (row >= problem.rows) return;
    stage += static_cast<int>(threadIdx.x / 32) * params.staged;
  }
  if constexpr (kScope == Scope::kCluster) row /= blocks;
  const bool first_thread = me == 0 && rank == 0;

  const bool has_index = !kFull || problem.target;  // class indices, not class probabilities
  const int64_t class_index = has_index ? problem.target[row * problem.target_stride] : -1;
  const bool ignored = has_index && class_index == problem.ignore_index, has_target = has_index && !ignored;
  if (has_target && (class_index < 0 || class_index >= problem.columns)) {
    if (first_thread) fail_target(__FILE__, __LINE__);
    return;
  }

  T* const start = static_cast<T*>(problem.logits) + row * problem.stride;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 16 / sizeof(T));
  const int columns = static_cast<int>(problem.columns);
  const bool mixed = problem.label_smoothing != 0 || !has_index;
  Row<T, kFull> one{params, static_cast<Acc>(params.factor), start - shift, shift, shift + columns,
      has_target ? shift + static_cast<int>(class_index) : -1,
      {problem.entropy != nullptr || problem.grad_entropy.data != nullptr, mixed},
      has_index ? nullptr : static_cast<const Acc*>(problem.probabilities) + row * problem.probabilities_stride};
  if constexpr (std::is_same_v<Acc, double>) one.factor = 1.0;
  const int vectors = (one.high + kVec - 1) / kVec, each = (vectors + blocks - 1) / blocks;
  const int begin = rank * each, end = min(begin + each, vectors);
  const Share share{
      params, problem, one, stage, row, class_index, begin, end, me, threads, first_thread, has_target, mixed};

  if (!ignored || problem.predictions) {
    Capped<Acc> at_target{0, 1};
    if (has_target) at_target = one.value(cast<Acc>(one.tile[one.target]), one.target);
    RowSums<Acc> sums = share.sum();
    if (problem.predictions) share.predict(sums, at_target);
    if (!ignored) share.finish(sums, at_target);
  }
  if (ignored) share.write_ignored();
  if constexpr (kScope == Scope::kCluster) {
    if (!ignored || problem.predictions) wait_for_cluster_unaligned();
  }
}

}  // namespace dcs
