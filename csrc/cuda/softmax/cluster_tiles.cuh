// Softmax of tiles of columns that a block, or the blocks of a cluster, hold in shared memory: one read and one write.
// Each thread keeps its vectors there as they came, adds them up while later ones are on their way, and reads what it
// has itself asked for, which takes no barrier. The parts of a block's columns meet in shared memory, those of a
// cluster's blocks by stores into each other's.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "softmax/columns.cuh"
#include "softmax/slabs.cuh"

namespace dcs {

// The parts of a tile's columns, joined over the `blocks` blocks of a cluster, which have met in `meet_cluster`; in
// shared memory at `exchange`, which has cluster_exchange_parts.
template <bool kBackward, typename Acc, typename Lines>
__device__ __forceinline__ const Part<Acc>* join_cluster(
    const Lines& lines, const Part<Acc>* of_block, int blocks, Part<Acc>* exchange, uint64_t& arrivals) {
  wait_for_cluster();
  const int columns = lines.columns;
  const Part<Acc>* const mine = exchange + cluster_rank() * columns;
  for (int p = threadIdx.x; p < blocks * columns; p += blockDim.x) {
    const int rank = lines.part_of(p), column = p - rank * columns;
    send_part<kBackward>(mine[column], arrivals, rank, of_block[lines.slot(column)]);
  }
  mbarrier_wait(&arrivals, 0);
  Part<Acc>* const joined = exchange + blocks * columns;
  join_rows<kBackward, Acc>(
      blocks, columns, [&](int block, int column) { return exchange[block * columns + column]; },
      [&](int column, Part<Acc> part) { joined[lines.slot(column)] = part; });
  __syncthreads();
  return joined;
}
inline int64_t cluster_exchange_parts(int64_t columns, int64_t blocks) {
  return blocks > 1 ? (blocks + 2) * columns : 0;
}

// Until at most `pending` of the thread's groups are on their way.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 0: return wait_for_copies<0>();
    case 1: return wait_for_copies<1>();
    case 2: return wait_for_copies<2>();
    case 3: return wait_for_copies<3>();
    default: return wait_for_copies<4>();
  }
}

// Vectors `first`, first + 1 ... of a thread in a view: `take(k, vector)` of those that there are.
template <int kCount, typename T, typename Lines, typename Take>
__device__ __forceinline__ void load_view_vectors(
    const SoftmaxTiles<T>& params, const Lines& lines, int first, const Take& take) {
  const T* from[kCount];
  bool is_there[kCount];
  AnyVector<T> pieces[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    from[k] = lines.source(params, min(first + k, lines.count - 1));
    is_there[k] = is_within(from[k], params.input, params.runs.span);
    pieces[k].ask(is_there[k], from[k]);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (first + k >= lines.count) break;
    Vector<T, 16 / sizeof(T)> raw = pieces[k].get(from[k]);
    if (!is_there[k]) load_existing(from[k], params.input, params.runs.span, raw);
    take(k, raw);
  }
}

// A thread's vectors of a tile, in shared memory from `resident` on; backward those of the output from `saved` on.
template <typename T, bool kBackward, typename Lines>
struct HeldVectors {
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = 16 / sizeof(T), kGroup = kGroupVectors<T>;
  using Vec = Vector<T, kVec>;
  const SoftmaxTiles<T>& params;
  const Lines& lines;
  Vec* resident;
  Vec* saved;
  int threads;

  __device__ __forceinline__ HeldVectors(const SoftmaxTiles<T>& of, const Lines& by, unsigned char* shared)
      : params(of), lines(by), threads(blockDim.x) {
    resident = reinterpret_cast<Vec*>(shared) + threadIdx.x;
    saved = resident + params.each * threads;
  }
  // The shared memory after them.
  __device__ __forceinline__ static Part<Acc>* parts_after(const SoftmaxTiles<T>& params, unsigned char* shared) {
    const int vectors = params.each * static_cast<int>(blockDim.x) * (kBackward ? 2 : 1);
    return reinterpret_cast<Part<Acc>*>(reinterpret_cast<Vec*>(shared) + vectors);
  }

  // Asks for all of them.
  __device__ __forceinline__ void load() const {
    if constexpr (Lines::kView) {
      load_view();
    } else if (lines.is_inside) {
      for (int k = 0; k < lines.count; ++k) {
        copy_async(resident + k * threads, params.input + lines.place(k));
        if constexpr (kBackward) copy_async(saved + k * threads, params.saved + lines.place(k));
        if (k % kGroup == kGroup - 1) commit_copies();
      }
    } else {
      for (int k = 0; k < lines.count; ++k) {
        const int64_t left = min(lines.left - k * lines.apart, static_cast<int64_t>(kVec));
        const int bytes = static_cast<int>(left) * static_cast<int>(sizeof(T));
        copy_existing<16, sizeof(T)>(resident + k * threads, params.input + lines.place(k), bytes);
        if constexpr (kBackward)
          copy_existing<16, sizeof(T)>(saved + k * threads, params.saved + lines.place(k), bytes);
        if (k % kGroup == kGroup - 1) commit_copies();
      }
    }
    commit_copies();
  }
  // Adds them up as they come.
  __device__ __forceinline__ void add(Part<Acc> (&parts)[kVec]) const {
    int first = 0;
    for (int pending = lines.count / kGroup; pending > 0; --pending, first += kGroup) {
      wait_for_copies(pending);
      add_group<kGroup>(first, parts);
    }
    wait_for_copies<0>();
    if constexpr (kGroup == 4) {
      if (lines.count - first >= 2) {
        add_group<2>(first, parts);
        first += 2;
      }
    }
    if (first < lines.count) add_group<1>(first, parts);
  }
  __device__ __forceinline__ void store(const Part<Acc> (&parts)[kVec]) const {
#pragma unroll 4
    for (int k = 0; k < lines.count; ++k)
      store_finished<kBackward, Lines::kReadTwice>(
          lines, params.output, k, resident[k * threads], kBackward ? saved[k * threads] : Vec{}, parts);
  }

 private:
  __device__ __forceinline__ void load_view() const {
    // Half precision may begin in the middle of a word, for which there are no asynchronous copies.
    if constexpr (sizeof(T) == 2) {
      for (int first = 0; first < lines.count; first += kGroup) load_pieces(first);
    } else {
      for (int k = 0; k < lines.count; ++k) {
        copy_elements(k);
        if (k % kGroup == kGroup - 1) commit_copies();
      }
    }
  }
  __device__ __forceinline__ void copy_elements(int k) const {
    const T* const from = lines.source(params, k);
    const int64_t first = from - params.input;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool exists = first + i >= 0 && first + i < params.runs.span;
      copy_async<sizeof(T)>(
          reinterpret_cast<T*>(resident + k * threads) + i, from + i, exists ? static_cast<int>(sizeof(T)) : 0);
    }
  }
  __device__ __forceinline__ void load_pieces(int first) const {
    load_view_vectors<kGroup>(
        params, lines, first, [&](int k, const Vec& raw) { resident[(first + k) * threads] = raw; });
  }

  template <int kCount>
  __device__ __forceinline__ void add_group(int first, Part<Acc> (&parts)[kVec]) const {
    Vec raw[kCount], raw_saved[kBackward ? kCount : 1];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      raw[k] = resident[(first + k) * threads];
      if constexpr (kBackward) raw_saved[k] = saved[(first + k) * threads];
    }
    mask_vectors<kBackward>(lines, first, raw);
    if constexpr (kBackward) mask_vectors<true>(lines, first, raw_saved);
    add_vectors<kBackward>(parts, raw, raw_saved);
  }
};

template <typename T, bool kBackward, template <typename> class Lines>
__global__ void __launch_bounds__(kTileThreads, 4)
    softmax_cluster_tiles_kernel(const __grid_constant__ SoftmaxTiles<T> params) {
  using Acc = typename Types<T>::Acc;
  using Vectors = HeldVectors<T, kBackward, Lines<T>>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ uint64_t arrivals;
  launch_dependents();
  const int blocks = static_cast<int>(cluster_blocks());
  const Lines<T> lines(params, blocks > 1 ? cluster_index() : blockIdx.x, blocks > 1 ? cluster_rank() : 0);
  const Vectors vectors(params, lines, softmax_shared);
  griddepcontrol_wait();
  vectors.load();
  if (blocks > 1)
    meet_cluster(arrivals, blocks * lines.columns * static_cast<int>(kBackward ? sizeof(Acc) : sizeof(Part<Acc>)));
  Part<Acc> parts[Vectors::kVec];
  vectors.add(parts);
  Part<Acc>* const of_block = lines.template join<kBackward>(parts, Vectors::parts_after(params, softmax_shared));
  const Part<Acc>* joined = of_block;
  if (blocks > 1)
    joined = join_cluster<kBackward>(lines, of_block, blocks, of_block + lines.slot(lines.columns), arrivals);
  lines.take(joined, parts);
  invert_totals<kBackward>(parts);
  vectors.store(parts);
}

}  // namespace dcs
