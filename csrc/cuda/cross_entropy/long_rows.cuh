// Long rows of `_cross_entropy_rows_` on a GPU: class indices and logits as they are, with or without an entropy, or
// with a softcap, in float and half precision. rows.cuh has the rest.
//
// As many blocks as fit at a time take one row after another, alone or (sm_90) two to eight of a cluster together. A
// thread sums up its vectors of the row, the threads' sums are joined, and then it makes the gradient of the same
// vectors. These lie in shared memory as far as there is room, copied there while the row before is written: a vector's
// slot is free once its gradient is made. A thread reads back only what it has itself brought there, so that the one
// barrier a row is that of the sums. What has no room is read twice, the second time from L2.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <type_traits>

#include "cross_entropy/long_rows_parts.cuh"

namespace dcs {

template <typename T, bool kSoftcap, bool kEntropy, bool kGradient, bool kCluster, int kThreads>
struct LongBlock {
  static constexpr int kVec = 16 / sizeof(T), kBatch = kLongBatch, kStep = kBatch * kThreads;
  // float16 has digits to lose.
  static constexpr bool kFixed = kSoftcap && kGradient && std::is_same_v<T, __nv_bfloat16>;
  using Vec = Vector<T, kVec>;
  using Turn = LongTurn<T>;
  using E = Exponents<T, kSoftcap>;
  using Adder = LongAdder<T, kSoftcap, kEntropy, kFixed, kThreads>;
  using Sums = LongSums<kEntropy>;
  using Shared = Sums[2][kCluster ? kLongWarps : 32];

  const LongParams& params;
  const RowsProblem& problem;
  Vec* const stage;
  const E exponents;
  const int blocks, rank;
  const bool wants_predictions;

  __device__ __forceinline__ LongBlock(const LongParams& params, unsigned char* memory)
      : params(params),
        problem(params.problem),
        stage(reinterpret_cast<Vec*>(memory)),
        exponents{params.factor, params.squash},
        blocks(kCluster ? static_cast<int>(cluster_blocks()) : 1),
        rank(kCluster ? static_cast<int>(cluster_rank()) : 0),
        wants_predictions(params.problem.predictions != nullptr) {}

  static __device__ __forceinline__ int me() { return threadIdx.x; }
  __device__ __forceinline__ bool is_first() const { return me() == 0 && rank == 0; }

  __device__ __forceinline__ Turn turn_of(int row, int index) const {
    const LongShare<T, kCluster> share{LongRow<T>(problem, row)};
    return {row, index, share.body, share.count,
        kGradient && (index >= 0 || wants_predictions) ? min(share.count, params.staged) : 0};
  }
  __device__ __forceinline__ void copy_batch(const Vec* body, int v, int staged) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (v + u * kThreads < staged) copy_async<16>(stage + v + u * kThreads, body + v + u * kThreads, 16);
    commit_copies();
  }

  // An element of the row before or behind its vectors, which one thread of the first block has.
  __device__ __forceinline__ int edge_of(const LongRow<T>& all) const {
    return me() < all.head ? me() : static_cast<int>(problem.columns) - all.tail + me() - all.head;
  }

  // Four vectors at a time, where they are there and none of them is the target's.
  template <bool kStaged>
  __device__ __forceinline__ void add_batch(
      Adder& adder, const Vec* body, int begin, Vec (&raw)[kBatch], int v, int limit) const {
    constexpr bool kKeep = kFixed && kStaged;
    const bool whole = v + (kBatch - 1) * kThreads < limit,
               aside = adder.skipped < v || adder.skipped > v + (kBatch - 1) * kThreads;
    if (whole && aside) {
      adder.template add<kBatch>(raw, v);
      if constexpr (kKeep) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) stage[v + u * kThreads] = raw[u];
      }
    } else {
#pragma unroll 1
      for (int at = v; at < min(v + kStep, limit); at += kThreads) {
        Vec one = kStaged ? stage[at] : body[at];
        if (at == adder.skipped) {
          adder.add_around(reinterpret_cast<const T*>(kStaged ? stage + at : body + at), begin + kVec + at);
          if constexpr (kKeep) {
            float y[kVec];
            unpack(one, y);
#pragma unroll
            for (int i = 0; i < kVec; i += 4) exponents.values(y + i);
            one = pack_fixed<Vec>(y);
          }
        } else {
          adder.template add<1>(&one, at);
        }
        if constexpr (kKeep) stage[at] = one;
      }
    }
  }
  // The thread's vectors of the row.
  __device__ __forceinline__ void add_vectors(Adder& adder, const Turn& turn, int begin) const {
    if constexpr (kGradient) {
      int pending = (turn.staged + kStep - 1) / kStep;
      for (int v = me(); pending > 0; v += kStep) {
        wait_for_all_but(--pending);
        Vec raw[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) raw[u] = stage[v + u * kThreads < turn.staged ? v + u * kThreads : me()];
        add_batch<true>(adder, turn.body, begin, raw, v, turn.staged);
      }
    }
    for (int v = turn.staged + me(); v < turn.count; v += kStep) {
      Vec raw[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) raw[u] = turn.body[v + u * kThreads < turn.count ? v + u * kThreads : v];
      add_batch<false>(adder, turn.body, begin, raw, v, turn.count);
    }
  }

  // The thread's part of a row's sums relative to its largest element, where the exponents' rounding is not small.
  __device__ __forceinline__ Sums far_sums(
      const Adder& adder, const Turn& turn, const T* edge, bool has_edge, float far) const {
    Sums sums{0.f, 0.f, ~0u};
    const auto add = [&](float value) { add_power(sums, (value - far) * params.factor); };
#pragma unroll 1
    for (int v = me(); v < turn.count; v += kThreads) {
      float y[kVec];
      unpack(v < turn.staged ? stage[v] : turn.body[v], y);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (v != adder.skipped || i != adder.skipped_element) add(y[i]);
    }
    if (has_edge) add(cast<float>(*edge));
    return sums;
  }

  // The thread that reads a vector here is the one to overwrite it.
  __device__ __forceinline__ void predict(const Adder& adder, const Turn& turn, const LongRow<T>& all, int begin,
      const Sums& sums, int edge, bool has_edge, uint32_t edge_at, float logit_target) const {
    const int v = static_cast<int>(sums.largest_at) - kVec - begin;
    const bool is_found = sums.largest_at != ~0u,
               in_body = is_found && v >= 0 && v < turn.count && v % kThreads == me();
    if (!(is_found ? in_body || (has_edge && sums.largest_at == edge_at) : is_first())) return;
    int position = is_found ? edge : 0;
    if (in_body) {
      float y[kVec];
      unpack(turn.body[v], y);
#pragma unroll
      for (int i = kVec - 1; i >= 0; --i)
        if ((v != adder.skipped || i != adder.skipped_element) && is_same(y[i], sums.largest))
          position = all.head + (begin + v) * kVec + i;
    }
    if (turn.index >= 0) {
      const bool equal = !is_larger(sums.largest, logit_target) && turn.index < position;
      if (is_larger(logit_target, sums.largest) || equal) position = turn.index;
    }
    problem.predictions[turn.row] = position;
  }

  __device__ __forceinline__ void write_results(int row, float loss, float lse, float entropy) const {
    static_cast<float*>(problem.loss)[row] = loss;
    static_cast<float*>(problem.lse)[row] = lse;
    if (kEntropy && problem.entropy) static_cast<float*>(problem.entropy)[row] = entropy;
  }

  // A row's loss, and what its gradient takes. grad_loss, ..., weight, the target's logit: of the row.
  __device__ __forceinline__ void finish(int row, Sums sums, float logit_target, float grad_loss, float grad_lse,
      float grad_entropy, float weight, LongGradient& gradient) const {
    const bool is_far = gradient.is_far;
    const float reference = gradient.reference, far = gradient.far;
    const auto exponent_of = [&](float value) { return exponents.exponent(is_far ? value - far : value, reference); };
    const float value_target = exponents.value(logit_target), largest_value = exponents.value(sums.largest);
    const bool target_is_largest = value_target >= largest_value;
    const float up = exponent_of(value_target), top = target_is_largest ? up : 0.f;
    // In units of base^top.
    shift(sums, -top);
    const float others = sums.total,
                exponent = target_is_largest ? value_target - value_target : up;  // NaN for inf
    const float target_power = power(exponent), total = others + target_power;
    float a = grad_lse, log_total = 0, entropy = 0;
    if (kEntropy || is_first() || problem.z_loss != 0) {
      log_total = target_is_largest ? log1pf(others) : logf(total);
      const float base = target_is_largest ? value_target : largest_value;
      // The largest's own exponent is not quite 0.
      const float rest =
          target_is_largest || E::kExact || is_far ? 0.f : exponent_of(largest_value) * kLogOfBase<float>;
      const float lse = fmaf(base, params.scale, log_total - rest), z_loss = static_cast<float>(problem.z_loss);
      float loss = weight * fmaf(exponent, -kLogOfBase<float>, log_total);
      if (problem.z_loss != 0) {
        loss += z_loss * lse * lse;
        a += grad_loss * 2.f * z_loss * lse;
      }
      if constexpr (kEntropy) {
        const float weighted = fmaf(target_power, bounded(exponent), sums.weighted);
        entropy = fmaf(weighted / total, -kLogOfBase<float>, log_total);
        a -= grad_entropy * entropy;
      }
      if (is_first()) write_results(row, loss, lse, entropy);
    }
    const float hit = grad_loss * weight, slope = static_cast<float>(problem.logit_scale) / total;
    float constant = slope * (a + hit), own = a;
    if constexpr (kEntropy) {
      const float scale = slope * grad_entropy, linear = -scale * kLogOfBase<float>;
      constant = fmaf(scale, log_total, fmaf(-linear, fminf(top, 1000.f), constant));
      gradient.linear = linear * power(-top);
      own -= grad_entropy * fmaxf(fmaf(exponent, kLogOfBase<float>, -log_total), -1000.f);
    }
    gradient.scaled = constant * power(-top);
    gradient.target = slope * (target_power * own - hit * others);
    if (kSoftcap) gradient.target *= fmaf(-value_target, value_target, 1.f);
  }

  // The row's sums, and what is made of them. `next`: the next row, or -1; its class goes to `next_index`.
  __device__ __forceinline__ void reduce(
      const Turn& turn, int next, int& next_index, Shared& of_warps, int& parity, LongGradient& gradient) const {
    const int row = turn.row, index = turn.index;
    const bool ignored = index < 0;
    const LongRow<T> all(problem, row);
    const int begin = LongShare<T, kCluster>(all).begin;
    Adder adder{
        exponents, {-FLT_MAX, 0.f, ~0u}, exponents.reference(-FLT_MAX), wants_predictions, begin + kVec, INT_MAX, 0};
    if (!ignored) {
      const int behind = index - all.head - begin * kVec, vector = behind >= 0 ? behind / kVec : -1;
      gradient.owns_target = vector >= 0 && vector < turn.count && vector % kThreads == me();
      if (gradient.owns_target) adder.skipped = vector, adder.skipped_element = behind % kVec;
    }
    add_vectors(adder, turn, begin);
    const int edge = edge_of(all);
    const bool has_edge = rank == 0 && me() < all.head + all.tail && edge != index;
    const uint32_t edge_at = me() < all.head ? me() : INT_MAX - 2 * kVec + me();
    if (has_edge) adder.add_element(cast<float>(all.start[edge]), edge_at);

    // Asked for here, to be there behind the barrier.
    if (next >= 0) next_index = read_class(problem, next);
    float grad_loss = 1, grad_lse = 0, grad_entropy = 0, weight = 1, logit_target = 0;
    if (!ignored) {
      logit_target = cast<float>(all.start[index]);
      if (kGradient && problem.grad_loss.data)
        grad_loss = static_cast<const float*>(problem.grad_loss.data)[row * problem.grad_loss.stride];
      if (kGradient && problem.grad_lse.data)
        grad_lse = static_cast<const float*>(problem.grad_lse.data)[row * problem.grad_lse.stride];
      if (kGradient && kEntropy && problem.grad_entropy.data)
        grad_entropy = static_cast<const float*>(problem.grad_entropy.data)[row * problem.grad_entropy.stride];
      if (problem.weight) weight = static_cast<const float*>(problem.weight)[index];
    }
    Sums sums = join_row<kCluster>(exponents, adder.sums, of_warps[parity], wants_predictions);
    parity ^= 1;
    gradient.reference = exponents.reference(sums.largest);
    if (!E::kExact && !kSoftcap && !(fabsf(gradient.reference) <= kFarReference)) {
      gradient.is_far = true;
      gradient.far = sums.largest;
      gradient.reference = 0;
      const Sums own = far_sums(adder, turn, all.start + edge, has_edge, gradient.far),
                 joined = join_row<kCluster>(exponents, own, of_warps[parity], false);
      sums.total = joined.total;
      if constexpr (kEntropy) sums.weighted = joined.weighted;
      parity ^= 1;
    }
    if (wants_predictions) predict(adder, turn, all, begin, sums, edge, has_edge, edge_at, logit_target);
    if (!ignored) finish(row, sums, logit_target, grad_loss, grad_lse, grad_entropy, weight, gradient);
  }

  __device__ __forceinline__ void store(const Turn& turn, int begin, int v, const Vec& gradient) const {
    turn.body[v] = gradient;
    if (sizeof(T) == 2 && params.saved.beside) *params.saved.at<Vec>(turn.row, begin + v) = gradient;
  }
  __device__ __forceinline__ void store_element(int row, T* start, int position, float gradient) const {
    start[position] = cast<T>(gradient);
    if (sizeof(T) == 2 && params.saved.beside)
      reinterpret_cast<T*>(params.saved.at<Vec>(row, position / kVec))[position % kVec] = cast<T>(gradient);
  }
  template <bool kIsFixed>
  __device__ __forceinline__ Vec gradient_of(const Vec& raw, const LongGradient& gradient) const {
    const float reference = gradient.reference;
    float g[kVec];
    if constexpr (kIsFixed) {
      unpack_fixed(raw, g);
      const float factor = params.factor / kFixedOne;
      constexpr float kLess = -1.f / (kFixedOne * kFixedOne);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        g[i] = gradient.at<kEntropy>(fmaf(g[i], factor, -reference)) * fmaf(g[i] * kLess, g[i], 1.f);
    } else {
      unpack(raw, g);
#pragma unroll
      for (int i = 0; i < kVec; i += 4) exponents.values(g + i);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float p = gradient.at<kEntropy>(exponents.exponent(g[i], reference));
        g[i] = kSoftcap ? p * fmaf(-g[i], g[i], 1.f) : p;
      }
    }
    return pack<float, T, kVec>(g);
  }
  // The gradient in the logits' place; the next row's vectors are on their way into shared memory meanwhile.
  __device__ __forceinline__ void write_gradient(
      const Turn& turn, const Turn& next, const LongGradient& gradient) const {
    const bool ignored = turn.index < 0;
    const int begin = kCluster ? rank * ((LongRow<T>(problem, turn.row).vectors + blocks - 1) / blocks) : 0;
    if (ignored || gradient.is_far) {
#pragma unroll 1
      for (int v = me(); v < turn.count; v += kThreads) {
        float g[kVec] = {};
        if (!ignored) {
          unpack(v < turn.staged ? stage[v] : turn.body[v], g);
#pragma unroll
          for (int i = 0; i < kVec; ++i) g[i] = gradient.at<kEntropy>((g[i] - gradient.far) * params.factor);
        }
        store(turn, begin, v, pack<float, T, kVec>(g));
      }
      for (int v = me(); v - me() < next.staged; v += kStep) copy_batch(next.body, v, next.staged);
    } else {
      for (int v = turn.staged + me(); v < turn.count; v += kStep) {
        Vec raw[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) raw[u] = turn.body[v + u * kThreads < turn.count ? v + u * kThreads : v];
#pragma unroll
        for (int u = 0; u < kBatch; ++u)
          if (v + u * kThreads < turn.count) store(turn, begin, v + u * kThreads, gradient_of<false>(raw[u], gradient));
      }
      const int most = max(turn.staged, next.staged);
      for (int v = me(); v - me() < most; v += kStep) {
        Vec raw[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) raw[u] = stage[v + u * kThreads < turn.staged ? v + u * kThreads : me()];
        if (v - me() < next.staged) copy_batch(next.body, v, next.staged);
        if (v + (kBatch - 1) * kThreads < turn.staged) {
#pragma unroll
          for (int u = 0; u < kBatch; ++u) store(turn, begin, v + u * kThreads, gradient_of<kFixed>(raw[u], gradient));
        } else {
#pragma unroll
          for (int u = 0; u < kBatch - 1; ++u)
            if (v + u * kThreads < turn.staged)
              store(turn, begin, v + u * kThreads, gradient_of<kFixed>(raw[u], gradient));
        }
      }
    }
    if (gradient.owns_target || rank == 0) write_elements(turn, gradient);
  }
  // The target's, and those before and behind the vectors.
  __device__ __forceinline__ void write_elements(const Turn& turn, const LongGradient& gradient) const {
    const LongRow<T> all(problem, turn.row);
    if (gradient.owns_target) store_element(turn.row, all.start, turn.index, gradient.target);
    if (rank == 0 && me() < all.head + all.tail) {
      const int position = edge_of(all);
      const float value = exponents.value(cast<float>(all.start[position]));
      const float exponent =
          gradient.is_far ? (value - gradient.far) * params.factor : exponents.exponent(value, gradient.reference);
      float g = gradient.at<kEntropy>(exponent);
      if (kSoftcap) g *= fmaf(-value, value, 1.f);
      store_element(turn.row, all.start, position, turn.index < 0 ? 0.f : position == turn.index ? gradient.target : g);
    }
  }
};

template <typename T, bool kSoftcap, bool kEntropy, bool kGradient, bool kCluster, int kThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    cross_entropy_long_kernel(const __grid_constant__ LongParams params) {
#if __CUDA_ARCH__ < 900
  if constexpr (kCluster) return;
#endif
  using Block = LongBlock<T, kSoftcap, kEntropy, kGradient, kCluster, kThreads>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Block::Shared of_warps;
  const RowsProblem& problem = params.problem;
  const Block block(params, memory);
  const int rows = static_cast<int>(problem.rows), first_row = blockIdx.x / block.blocks;
  if (first_row >= rows) return;
  if constexpr (kCluster) arrive_in_cluster_unaligned();
  LongTurn<T> turn = block.turn_of(first_row, read_class(problem, first_row));
  int parity = 0;
  if constexpr (kGradient) {
    for (int v = Block::me(); v - Block::me() < turn.staged; v += Block::kStep)
      block.copy_batch(turn.body, v, turn.staged);
  }
  // The shared memory of a cluster's blocks can be written from when all of them have started.
  if constexpr (kCluster) wait_for_cluster_unaligned();
  for (;;) {
    const int next_row = turn.row + gridDim.x / block.blocks;
    const bool has_next = next_row < rows, ignored = turn.index < 0;
    int next_index = -1;
    LongGradient gradient;
    if (ignored && !block.wants_predictions) {
      if (has_next) next_index = read_class(problem, next_row);
    } else {
      block.reduce(turn, has_next ? next_row : -1, next_index, of_warps, parity, gradient);
    }
    if (ignored && block.is_first()) block.write_results(turn.row, 0.f, 0.f, 0.f);
    LongTurn<T> next{next_row, next_index, turn.body, 0, 0};
    if (has_next) next = block.turn_of(next_row, next_index);
    if constexpr (kGradient) block.write_gradient(turn, next, gradient);
    if (!has_next) break;
    turn = next;
  }
}

}  // namespace dcs
