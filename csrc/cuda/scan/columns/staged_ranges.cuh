// How the steps that columns/staged_parts.cuh stages come and go: bulk copies of whole vectors, and a warp copies what
// lies before and behind them. Where input and output begin differently behind vectors, threads write.
#pragma once

#include "common/ptx/bulk_copy.cuh"
#include "scan/columns/staged_slabs.cuh"

namespace dcs {

// Groups of neighboring threads take slabs in turn, or all take the one range that the slabs are.
template <typename T>
struct StagedRanges : StagedSlabs<T, 16, true> {
  using Slabs = StagedSlabs<T, 16, true>;
  using Slabs::p, Slabs::t, Slabs::inner, Slabs::slabs;

  uint64_t* const full;  // of each buffer: completes when its steps have come
  const int group_bits = 5 + t.slab_warp_bits, thread = static_cast<int>(threadIdx.x);
  const int group = t.flat ? 0 : thread >> group_bits, groups = t.flat ? 1 : t.threads >> group_bits;
  const int lane = t.flat ? thread : thread - (group << group_bits), lanes = t.flat ? t.threads : 1 << group_bits;

  // Barriers are ready when all threads have come here.
  __device__ __forceinline__ StagedRanges(const StagedColumnsParams& params, unsigned char* memory, uint64_t* barriers)
      : Slabs(params, memory), full(barriers) {
    if (thread < kStagedBuffers) mbarrier_init(full + thread, groups);
    mbarrier_fence_init();
  }

  // Visits the group's ranges: visit(slab, elements of `count` steps).
  template <typename Visit>
  __device__ __forceinline__ void each_range(int count, const Visit& visit) const {
    const int ranges = t.flat ? 1 : slabs, elements = count * inner * (t.flat ? slabs : 1);
#pragma unroll 1
    for (int s = group; s < ranges; s += groups) visit(s, elements);
  }

  // By a warp: elements [first, end). How many bytes come by a bulk copy.
  template <typename E>
  __device__ __forceinline__ int fetch_range(E* to, const E* from, int first, int end, uint64_t* barrier) const {
    const WholeWords whole = whole_words<16>(from + first, end - first);
    const int begin = first + whole.before, bytes = 16 * whole.words;
    if (lane == 0 && bytes > 0) bulk_load_once(to + begin, from + begin, bytes, barrier);
    if (whole.before + whole.behind > 0) {
      copy_words_async(to, from, first, begin, lane, 32);
      copy_words_async(to, from, end - whole.behind, end, lane, 32);
    }
    return bytes;
  }
  __device__ __forceinline__ void fetch(int buffer, int64_t begin) const {
    if (lane >= 32) return;
    const int count = this->count_of(begin);
    int bytes = 0;
    each_range(count, [&](int s, int elements) {
      bytes +=
          fetch_range(this->staged(buffer, s, begin, count), this->input(s, begin, count), 0, elements, full + buffer);
      if (!p.reset) return;
      this->known_flags(begin, elements, [&](int first, int end) {
        bytes += fetch_range(
            this->staged_flags(buffer, s, begin, count), this->flags(s, begin, count), first, end, full + buffer);
      });
    });
    if (lane == 0) mbarrier_arrive_expect_tx(full + buffer, bytes);
  }

  // When all threads have shown their results to bulk stores.
  __device__ __forceinline__ void store(int buffer, int64_t begin) const {
    const int count = this->count_of(begin);
    each_range(count, [&](int s, int elements) {
      const T* const values = this->staged(buffer, s, begin, count);
      T* const to = this->output(s, begin, count);
      const T* const from = this->input(s, begin, count);
      if (words_agree(to, from, 16)) {
        if (lane >= 32) return;
        const WholeWords whole = whole_words<16>(to, elements);
        if (lane == 0 && whole.words > 0) bulk_store(to + whole.before, values + whole.before, 16 * whole.words);
        if (whole.before + whole.behind == 0) return;
        const int last = elements - whole.behind;
        copy_words<sizeof(T)>(to, values, whole.before, lane, 32);
        copy_words<sizeof(T)>(to + last, values + last, whole.behind, lane, 32);
      } else if (sizeof(T) >= 4 || words_agree(to, from, 4)) {
        copy_words<4>(to, values, elements, lane, lanes);
      } else {
        copy_words<sizeof(T)>(to, values, elements, lane, lanes);
      }
    });
    if (lane == 0) commit_stores();
  }
  // Until shared memory is read.
  __device__ __forceinline__ void wait_for_reads() const {
    if (lane == 0) wait_for_stores_to_read();
  }
};

}  // namespace dcs
