// What enters a warp's steps of its columns in lookback_columns.cuh: from the totals of the block's warps before it, in
// shared memory, of the cluster's blocks before, which leave them there, and of the clusters before, in global memory
// (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", NVIDIA
// NVR-2016-002). A cluster's chunk of time leaves a word for each column, and the last one of a group another, with all
// that lies before. Each reads those of its group and the last one of the group before, always folded in the same
// order. Clusters begin in the order of their chunks, and a chunk's total needs its own elements only, so every total
// that is waited for will be published.
#pragma once

#include <cstring>

#include "common/ptx/cluster.cuh"
#include "common/word.cuh"
#include "scan/columns/lookback_params.cuh"

namespace dcs {

// A warp's place: lanes are neighboring words of a span of columns, warps neighboring spans, then neighbors in time.
struct LookbackPlace {
  const LookbackParams& p;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int across = 1 << p.across_bits, parts = kLookbackWarps >> p.across_bits;
  const int strip = warp & (across - 1), part = warp >> p.across_bits;  // in the block
  int rank, chunk;                                                      // of the block in its cluster; of time
  int outer, span;                                                      // the block's; the warp's
  uint32_t line;                                                        // the block's first span, of all outer rows'
  int first_column, columns;
  int64_t first_step;
  int count;  // of steps

  __device__ __forceinline__ explicit LookbackPlace(const LookbackParams& params) : p(params) {
    const uint32_t cluster = p.cluster.of(blockIdx.x), of_chunk = p.blocks_across.of(cluster);
    rank = static_cast<int>(blockIdx.x - cluster * p.cluster.divisor);
    chunk = static_cast<int>(of_chunk);
    const uint32_t group = cluster - of_chunk * p.blocks_across.divisor, row = p.outer_blocks.of(group);
    outer = static_cast<int>(row);
    line = group << p.across_bits;
    span = (static_cast<int>(group - row * p.outer_blocks.divisor) << p.across_bits) + strip;
    first_column = span * p.span;
    columns = min(p.span, p.columns - first_column);
    first_step = ((static_cast<int64_t>(chunk) * static_cast<int>(p.cluster.divisor) + rank) * parts + part) * p.steps;
    count = static_cast<int>(max(int64_t{0}, min(int64_t{p.steps}, p.length - first_step)));
  }
};

template <int kColumns>
struct LookbackShared {
  struct Lanes {
    float of[32][kColumns];
  };
  Lanes totals[kLookbackWarps];                               // of the warps
  Lanes messages[kMostLookbackCluster][kMostLookbackAcross];  // of the cluster's blocks before; of the first one's own
                                                              // folding, and to it the cluster's total
  Lanes carries[kMostLookbackAcross];                         // into the cluster
  uint64_t arrivals, carried;                                 // of messages, of the carry
  uint64_t tag;                                               // of this launch's words
};

template <typename T>
struct LookbackExchange {
  static constexpr int kColumns = 4 / sizeof(T);
  using Sum = std::conditional_t<kColumns == 1, double, float>;  // of chunks
  using Shared = LookbackShared<kColumns>;
  using Values = float[kColumns];
  static constexpr int kTotal = kMostLookbackCluster - 1;  // the message that is the cluster's total
  const LookbackParams& p;
  Shared& shared;

  // By all threads, before anything is read. Blocks of the cluster wait for each other in `enter`.
  __device__ __forceinline__ void begin(const LookbackPlace& at) const {
    const int blocks = static_cast<int>(p.cluster.divisor), bytes = sizeof(typename Shared::Lanes) << p.across_bits;
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      // The first block gets the cluster's total.
      init_transaction_barrier(&shared.arrivals, max(at.rank, 1) * bytes);
      init_transaction_barrier(&shared.carried, bytes);
    }
    __syncwarp();
    arrive_in_cluster();
  }

  // From the warp's totals what enters its steps.
  __device__ __forceinline__ void enter(const LookbackPlace& at, const Values& totals, Values& entering) const {
    const int blocks = static_cast<int>(p.cluster.divisor);
    copy(totals, shared.totals[at.warp].of[at.lane]);
    __syncthreads();
    Values block{}, cluster{}, carry{};
    each_column([&](int u) { entering[u] = 0.f; });
#pragma unroll 1
    for (int part = 0; part < at.parts; ++part) {
      if (part == at.part) copy(block, entering);
      fold(block, p.powers.parts[1], shared.totals[(part << p.across_bits) + at.strip].of[at.lane]);
    }
    if (blocks > 1) {
      wait_for_cluster();
#pragma unroll 1
      for (int to = at.rank + 1 + at.part; to < blocks; to += at.parts)
        send(&shared.messages[at.rank][at.strip].of[at.lane], &shared.arrivals, to, block,
            p.powers.blocks[to - at.rank - 1]);
      if (at.rank > 0) {
        mbarrier_wait(&shared.arrivals, 0);
#pragma unroll 1
        for (int rank = 0; rank < at.rank; ++rank) add(cluster, shared.messages[rank][at.strip].of[at.lane]);
      }
    }
    if (at.chunk == 0) load_initial(at, carry);
    if (p.chunks > 1) exchange_chunks(at, block, cluster, carry);
    each_column([&](int u) {
      const float before = fmaf(p.powers.blocks[at.rank], carry[u], cluster[u]);
      entering[u] = fmaf(p.powers.parts[at.part], before, entering[u]);
    });
  }

 private:
  template <typename Visit>
  static __device__ __forceinline__ void each_column(const Visit& visit) {
#pragma unroll
    for (int u = 0; u < kColumns; ++u) visit(u);
  }
  static __device__ __forceinline__ void copy(const Values& from, Values& to) {
    each_column([&](int u) { to[u] = from[u]; });
  }
  static __device__ __forceinline__ void add(Values& to, const Values& from) {
    each_column([&](int u) { to[u] += from[u]; });
  }
  // Of something earlier: it counts with a power behind what comes later.
  static __device__ __forceinline__ void fold(Values& earlier, float power, const Values& later) {
    each_column([&](int u) { earlier[u] = fmaf(power, earlier[u], later[u]); });
  }
  __device__ __forceinline__ void send(
      const Values* local, const uint64_t* barrier, int rank, const Values& values, float weight = 1.f) const {
    Values weighed;
    each_column([&](int u) { weighed[u] = values[u] * weight; });
    using Message = std::conditional_t<kColumns == 1, float, double>;
    Message message;
    memcpy(&message, weighed, sizeof message);
    store_async_in_cluster(reinterpret_cast<const Message*>(local), barrier, static_cast<uint32_t>(rank), message);
  }
  __device__ __forceinline__ void load_initial(const LookbackPlace& at, Values& to) const {
    const T* const from = static_cast<const T*>(p.initial);
    each_column([&](int u) {
      const int column = kColumns * at.lane + u;
      to[u] = from && column < at.columns
          ? cast<float>(from[at.outer * p.initial_outer + (at.first_column + column) * p.initial_inner])
          : 0.f;
    });
  }

  // A word's columns.
  static __device__ __forceinline__ uint64_t packed_sums(const Sum (&sums)[kColumns]) {
    uint64_t bits;
    static_assert(sizeof sums == sizeof bits);
    memcpy(&bits, sums, sizeof bits);
    return bits;
  }
  __device__ __forceinline__ Word* word_of(const LookbackPlace& at, int chunk) const {
    return p.words + static_cast<int64_t>(chunk) * p.chunk_words + (at.line + static_cast<uint32_t>(at.strip)) * 32 +
        at.lane;
  }
  // What the last chunk of a group leaves lies behind all chunks' own.
  __device__ __forceinline__ Word* group_word_of(const LookbackPlace& at, int group) const {
    return word_of(at, p.chunks + group);
  }

  // `block`: the block's total; `cluster`: what comes of the blocks before it.
  __device__ __forceinline__ void exchange_chunks(
      const LookbackPlace& at, const Values& block, const Values& cluster, Values& carry) const {
    const int blocks = static_cast<int>(p.cluster.divisor), group = at.chunk / p.group,
              place = at.chunk - group * p.group;
    const bool has_more = at.chunk + 1 < p.chunks, ends_group = has_more && place + 1 == p.group;
    Values total;  // the cluster's, in its last block
    copy(cluster, total);
    fold(total, p.powers.blocks[1], block);
    if (at.rank + 1 == blocks && has_more && at.part == 0) {
      if (!ends_group) {
        if (at.columns > 0) {
          Sum sums[kColumns];
          each_column([&](int u) { sums[u] = total[u]; });
          store_word(word_of(at, at.chunk), packed_sums(sums), shared.tag);
        }
      } else if (blocks > 1) {
        send(&shared.messages[kTotal][at.strip].of[at.lane], &shared.arrivals, 0, total);
      }
    }
    if (at.rank > 0) {
      if (at.chunk == 0) return;
      mbarrier_wait(&shared.carried, 0);
      copy(shared.carries[at.strip].of[at.lane], carry);
      return;
    }
    Sum sums[kColumns];
    each_column([&](int u) { sums[u] = carry[u]; });
    if (at.chunk > 0) look_back(at, group, place, sums);
    if (ends_group && at.part == 0) {
      if (blocks > 1) {
        mbarrier_wait(&shared.arrivals, 0);
        copy(shared.messages[kTotal][at.strip].of[at.lane], total);
      }
      Sum all[kColumns];
      each_column([&](int u) { all[u] = fold_sum(total[u], p.powers.chunks[1], sums[u]); });
      if (at.columns > 0) store_word(group_word_of(at, group), packed_sums(all), shared.tag);
    }
    if (at.chunk == 0) return;
    each_column([&](int u) { carry[u] = static_cast<float>(sums[u]); });
#pragma unroll 1
    for (int to = 1 + at.part; to < blocks; to += at.parts)
      send(&shared.carries[at.strip].of[at.lane], &shared.carried, to, carry);
  }
  static __device__ __forceinline__ Sum fold_sum(Sum later, float power, Sum earlier) {
    return fma(static_cast<Sum>(power), earlier, later);
  }

  // In the cluster's first block, whose warps read some words each: what all chunks before leave.
  __device__ __forceinline__ void look_back(
      const LookbackPlace& at, int group, int place, Sum (&sums)[kColumns]) const {
    constexpr int kReads = 2;
    // Of `place` chunks of the group before this one, from the nearest on, then of the group before.
    const int words = place + (group > 0 ? 1 : 0);
    Sum some[kColumns]{};
#pragma unroll 1
    for (int from = at.part; from < words && at.columns > 0; from += kReads * at.parts) {
      Word asked[kReads]{};
      uint32_t wanted = 0;
#pragma unroll
      for (int i = 0; i < kReads; ++i) wanted |= (from + i * at.parts < words ? 1u : 0u) << i;
      const uint32_t all = wanted;
      while (wanted) {
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          const int back = from + i * at.parts;
          load_word_if(wanted >> i & 1,
              back < place ? word_of(at, at.chunk - 1 - back) : group_word_of(at, max(group - 1, 0)), asked[i]);
        }
#pragma unroll
        for (int i = 0; i < kReads; ++i)
          if (asked[i].state == shared.tag) wanted &= ~(1u << i);
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        Sum read[kColumns];
        memcpy(read, &asked[i].value, sizeof read);
        if (all >> i & 1)
          each_column([&](int u) { some[u] = fold_sum(some[u], p.powers.chunks[from + i * at.parts], read[u]); });
      }
    }
    // By way of where messages would be.
    Sum(*const folded)[32][kColumns] = reinterpret_cast<Sum(*)[32][kColumns]>(&shared.messages[0][0]);
    static_assert(sizeof(Sum[kLookbackWarps][32][kColumns]) <= sizeof shared.messages - sizeof shared.messages[0]);
    each_column([&](int u) { folded[at.warp][at.lane][u] = some[u]; });
    __syncthreads();
    Values initial;
    load_initial(at, initial);
    each_column([&](int u) { sums[u] = group == 0 ? fold_sum(Sum{}, p.powers.chunks[place], initial[u]) : Sum{}; });
#pragma unroll 1
    for (int part = 0; part < at.parts; ++part)
      each_column([&](int u) { sums[u] += folded[(part << p.across_bits) + at.strip][at.lane][u]; });
  }
};

}  // namespace dcs
