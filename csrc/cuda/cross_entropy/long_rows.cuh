// Long rows of `_cross_entropy_rows_` on a GPU: class indices and logits as they are, or with a softcap, in float and halves. rows.cuh has the rest.
//
// As many blocks as fit at a time take one row after another, alone or (sm_90) two to eight of a cluster together. A thread sums up its vectors of the row,
// the threads' sums are joined, and then it makes the gradient of the same vectors. These lie in shared memory as far as there is room, copied there while
// the row before is written: a vector's place is free once its gradient is made. A thread reads back only what it has itself brought there, so that the
// one barrier a row is that of the sums. What has no room is read twice, the second time from L2.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <type_traits>

#include "cross_entropy/long_rows_parts.cuh"

namespace dcs {

template <typename T, bool kSoftcap, bool kGradient, bool kCluster, int kThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kThreads, kLeastBlocks) cross_entropy_long_kernel(const __grid_constant__ LongParams params) {
#if __CUDA_ARCH__ < 900
  if constexpr (kCluster) return;
#endif
  constexpr int kVec = 16 / sizeof(T), kBatch = kLongBatch, kStep = kBatch * kThreads;
  constexpr bool kFixed = kSoftcap && kGradient && std::is_same_v<T, __nv_bfloat16>;  // float16 has digits to lose
  using Vec = Vector<T, kVec>;
  using E = Exponents<T, kSoftcap>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ LongSums of_warps[2][kCluster ? kLongWarps : 32];
  Vec* const stage = reinterpret_cast<Vec*>(memory);
  const RowsProblem& problem = params.problem;
  const E exponents{params.factor, params.squash};
  const int blocks = kCluster ? static_cast<int>(cluster_blocks()) : 1, rank = kCluster ? static_cast<int>(cluster_rank()) : 0;
  const int me = threadIdx.x, rows = static_cast<int>(problem.rows);
  const bool wants_predictions = problem.predictions != nullptr;

  int row = blockIdx.x / blocks;
  if (row >= rows) return;
  if constexpr (kCluster) cluster_arrive();
  int index = read_class(problem, row);
  const auto copy_batch = [&](const Vec* body, int v, int staged) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (v + u * kThreads < staged) copy_async<16>(stage + v + u * kThreads, body + v + u * kThreads, 16);
    commit_copies();
  };
  const auto to_stage = [&](int count, int class_index) {
    return kGradient && (class_index >= 0 || wants_predictions) ? min(count, params.staged) : 0;
  };

  Vec* body;
  int count, staged, parity = 0;
  {
    const LongShare<T, kCluster> share{LongRow<T>(problem, row)};
    body = share.body, count = share.count, staged = to_stage(count, index);
    if constexpr (kGradient) {
      for (int v = me; v - me < staged; v += kStep) copy_batch(body, v, staged);
    }
  }

  // The shared memory of a cluster's blocks can be written from when all of them have started.
  if constexpr (kCluster) cluster_wait();
  for (;;) {
    const int next = row + gridDim.x / blocks;
    const bool has_next = next < rows;
    const bool ignored = index < 0;
    int next_index = -1;
    float scaled = 0, reference = 0, far = 0;  // the gradient is scaled * base^exponent
    float target_gradient = 0;
    bool is_far = false, owns_target = false;

    if (ignored && !wants_predictions) {
      if (has_next) next_index = read_class(problem, next);
    } else {
      const LongRow<T> all(problem, row);
      const int begin = LongShare<T, kCluster>(all).begin;
      LongAdder<T, kSoftcap, kFixed, kThreads> adder{exponents, {-FLT_MAX, 0.f, ~0u}, exponents.reference(-FLT_MAX), wants_predictions, begin + kVec, INT_MAX, 0};
      if (!ignored) {
        const int behind = index - all.head - begin * kVec, vector = behind >= 0 ? behind / kVec : -1;
        owns_target = vector >= 0 && vector < count && vector % kThreads == me;
        if (owns_target) adder.skipped = vector, adder.skipped_element = behind % kVec;
      }
      // Four vectors at a time, where they are there and none of them is the target's.
      const auto add_batch = [&](Vec* raw, int v, int limit, auto is_staged) {
        constexpr bool kKeep = kFixed && decltype(is_staged)::value;
        const bool whole = v + (kBatch - 1) * kThreads < limit, aside = adder.skipped < v || adder.skipped > v + (kBatch - 1) * kThreads;
        if (whole && aside) {
          adder.template add<kBatch>(raw, v);
          if constexpr (kKeep) {
#pragma unroll
            for (int u = 0; u < kBatch; ++u) stage[v + u * kThreads] = raw[u];
          }
        } else {
#pragma unroll 1
          for (int at = v; at < min(v + kStep, limit); at += kThreads) {
            Vec one = decltype(is_staged)::value ? stage[at] : body[at];
            if (at == adder.skipped) {
              adder.add_around(reinterpret_cast<const T*>(decltype(is_staged)::value ? stage + at : body + at), begin + kVec + at);
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
      };
      if constexpr (kGradient) {
        int pending = (staged + kStep - 1) / kStep;
        for (int v = me; pending > 0; v += kStep) {
          wait_for_all_but(--pending);
          Vec raw[kBatch];
#pragma unroll
          for (int u = 0; u < kBatch; ++u) raw[u] = stage[v + u * kThreads < staged ? v + u * kThreads : me];
          add_batch(raw, v, staged, std::true_type());
        }
      }
      for (int v = staged + me; v < count; v += kStep) {
        Vec raw[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) raw[u] = body[v + u * kThreads < count ? v + u * kThreads : v];
        add_batch(raw, v, count, std::false_type());
      }
      // An element before or behind the vectors.
      const int edge = me < all.head ? me : static_cast<int>(problem.columns) - all.tail + me - all.head;
      const bool has_edge = rank == 0 && me < all.head + all.tail && edge != index;
      const uint32_t edge_place = me < all.head ? me : INT_MAX - 2 * kVec + me;
      if (has_edge) adder.add_element(cast<float>(all.start[edge]), edge_place);

      // Asked for here, to be there behind the barrier.
      if (has_next) next_index = read_class(problem, next);
      float grad_loss = 1, grad_lse = 0, weight = 1, logit_target = 0;
      if (!ignored) {
        logit_target = cast<float>(all.start[index]);
        if (kGradient && problem.grad_loss.data) grad_loss = static_cast<const float*>(problem.grad_loss.data)[row * problem.grad_loss.stride];
        if (kGradient && problem.grad_lse.data) grad_lse = static_cast<const float*>(problem.grad_lse.data)[row * problem.grad_lse.stride];
        if (problem.weight) weight = static_cast<const float*>(problem.weight)[index];
      }
      LongSums sums = join_row<kCluster>(exponents, adder.sums, of_warps[parity], wants_predictions);
      parity ^= 1;
      reference = exponents.reference(sums.largest);
      if (!E::kExact && !kSoftcap && !(fabsf(reference) <= kFarReference)) {
        is_far = true;
        far = sums.largest;
        reference = 0;
        float total = 0;
#pragma unroll 1
        for (int v = me; v < count; v += kThreads) {
          float y[kVec];
          unpack(v < staged ? stage[v] : body[v], y);
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (v != adder.skipped || i != adder.skipped_element) total += power((y[i] - far) * params.factor);
        }
        if (has_edge) total += power((cast<float>(all.start[edge]) - far) * params.factor);
        sums.total = join_row<kCluster>(exponents, {0.f, total, ~0u}, of_warps[parity], false).total;
        parity ^= 1;
      }
      if (wants_predictions) {
        // The thread that reads a vector here is the one to overwrite it.
        const int v = static_cast<int>(sums.place) - kVec - begin;
        const bool is_found = sums.place != ~0u, in_body = is_found && v >= 0 && v < count && v % kThreads == me;
        if (is_found ? in_body || (has_edge && sums.place == edge_place) : me == 0 && rank == 0) {
          int position = is_found ? edge : 0;
          if (in_body) {
            float y[kVec];
            unpack(body[v], y);
#pragma unroll
            for (int i = kVec - 1; i >= 0; --i)
              if ((v != adder.skipped || i != adder.skipped_element) && is_same(y[i], sums.largest)) position = all.head + (begin + v) * kVec + i;
          }
          if (!ignored) {
            const bool equal = !is_larger(sums.largest, logit_target) && index < position;
            if (is_larger(logit_target, sums.largest) || equal) position = index;
          }
          problem.predictions[row] = position;
        }
      }

      if (!ignored) {
        const auto exponent_of = [&](float value) { return exponents.exponent(is_far ? value - far : value, reference); };
        const float value_target = exponents.value(logit_target), largest_value = exponents.value(sums.largest);
        const bool target_is_largest = value_target >= largest_value;
        const float up = exponent_of(value_target), top = target_is_largest ? up : 0.f;
        // In units of base^top.
        const float others = sums.total * power(-top), exponent = target_is_largest ? value_target - value_target : up;  // NaN for inf
        const float target_power = power(exponent), total = others + target_power;
        float a = grad_lse;
        const bool is_first = me == 0 && rank == 0;
        if (is_first || problem.z_loss != 0) {
          const float log_total = target_is_largest ? log1pf(others) : logf(total), base = target_is_largest ? value_target : largest_value;
          // The largest's own exponent is not quite 0.
          const float rest = target_is_largest || E::kExact || is_far ? 0.f : exponent_of(largest_value) * kLogOfBase<float>;
          const float lse = fmaf(base, params.scale, log_total - rest), z_loss = static_cast<float>(problem.z_loss);
          float loss = weight * fmaf(exponent, -kLogOfBase<float>, log_total);
          if (problem.z_loss != 0) {
            loss += z_loss * lse * lse;
            a += grad_loss * 2.f * z_loss * lse;
          }
          if (is_first) {
            static_cast<float*>(problem.loss)[row] = loss;
            static_cast<float*>(problem.lse)[row] = lse;
          }
        }
        const float hit = grad_loss * weight, slope = static_cast<float>(problem.logit_scale) / total;
        scaled = slope * (a + hit) * power(-top);
        target_gradient = slope * (target_power * a - hit * others);
        if (kSoftcap) target_gradient *= fmaf(-value_target, value_target, 1.f);
      }
    }
    if (ignored && me == 0 && rank == 0) static_cast<float*>(problem.loss)[row] = static_cast<float*>(problem.lse)[row] = 0.f;

    Vec* next_body = body;
    int next_count = 0, next_staged = 0;
    if (has_next) {
      const LongShare<T, kCluster> share{LongRow<T>(problem, next)};
      next_body = share.body, next_count = share.count, next_staged = to_stage(next_count, next_index);
    }
    if constexpr (kGradient) {
      const int begin = kCluster ? rank * ((LongRow<T>(problem, row).vectors + blocks - 1) / blocks) : 0;
      const auto store = [&](int v, const Vec& gradient) {
        body[v] = gradient;
        if (sizeof(T) == 2 && params.kept.within) *params.kept.at<Vec>(row, begin + v) = gradient;
      };
      const auto store_element = [&](T* start, int position, float gradient) {
        start[position] = cast<T>(gradient);
        if (sizeof(T) == 2 && params.kept.within) reinterpret_cast<T*>(params.kept.at<Vec>(row, position / kVec))[position % kVec] = cast<T>(gradient);
      };
      const auto make = [&](const Vec& raw, auto is_fixed) {
        float g[kVec];
        if constexpr (decltype(is_fixed)::value) {
          unpack_fixed(raw, g);
          const float factor = params.factor / kFixedOne;
          constexpr float kLess = -1.f / (kFixedOne * kFixedOne);
#pragma unroll
          for (int i = 0; i < kVec; ++i) g[i] = power(fmaf(g[i], factor, -reference)) * scaled * fmaf(g[i] * kLess, g[i], 1.f);
        } else {
          unpack(raw, g);
#pragma unroll
          for (int i = 0; i < kVec; i += 4) exponents.values(g + i);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const float p = power(exponents.exponent(g[i], reference)) * scaled;
            g[i] = kSoftcap ? p * fmaf(-g[i], g[i], 1.f) : p;
          }
        }
        return pack<float, T, kVec>(g);
      };
      if (ignored || is_far) {
#pragma unroll 1
        for (int v = me; v < count; v += kThreads) {
          float g[kVec] = {};
          if (!ignored) {
            unpack(v < staged ? stage[v] : body[v], g);
#pragma unroll
            for (int i = 0; i < kVec; ++i) g[i] = power((g[i] - far) * params.factor) * scaled;
          }
          store(v, pack<float, T, kVec>(g));
        }
        for (int v = me; v - me < next_staged; v += kStep) copy_batch(next_body, v, next_staged);
      } else {
        for (int v = staged + me; v < count; v += kStep) {
          Vec raw[kBatch];
#pragma unroll
          for (int u = 0; u < kBatch; ++u) raw[u] = body[v + u * kThreads < count ? v + u * kThreads : v];
#pragma unroll
          for (int u = 0; u < kBatch; ++u)
            if (v + u * kThreads < count) store(v + u * kThreads, make(raw[u], std::false_type()));
        }
        const int most = max(staged, next_staged);
        for (int v = me; v - me < most; v += kStep) {
          Vec raw[kBatch];
#pragma unroll
          for (int u = 0; u < kBatch; ++u) raw[u] = stage[v + u * kThreads < staged ? v + u * kThreads : me];
          if (v - me < next_staged) copy_batch(next_body, v, next_staged);
          if (v + (kBatch - 1) * kThreads < staged) {
#pragma unroll
            for (int u = 0; u < kBatch; ++u) store(v + u * kThreads, make(raw[u], std::integral_constant<bool, kFixed>()));
          } else {
#pragma unroll
            for (int u = 0; u < kBatch - 1; ++u)
              if (v + u * kThreads < staged) store(v + u * kThreads, make(raw[u], std::integral_constant<bool, kFixed>()));
          }
        }
      }
      if (owns_target || rank == 0) {
        const LongRow<T> all(problem, row);
        if (owns_target) store_element(all.start, index, target_gradient);
        if (rank == 0 && me < all.head + all.tail) {
          T* const at = all.start + (me < all.head ? me : static_cast<int>(problem.columns) - all.tail + me - all.head);
          const float value = exponents.value(cast<float>(*at));
          float g = power(is_far ? (value - far) * params.factor : exponents.exponent(value, reference)) * scaled;
          if (kSoftcap) g *= fmaf(-value, value, 1.f);
          const int position = static_cast<int>(at - all.start);
          store_element(all.start, position, ignored ? 0.f : position == index ? target_gradient : g);
        }
      }
    }
    if (!has_next) break;
    row = next, index = next_index, body = next_body, count = next_count, staged = next_staged;
  }
}

}  // namespace dcs
