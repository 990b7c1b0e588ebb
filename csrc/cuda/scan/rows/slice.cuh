// A warp's slice of a tile of the flat sequence (flat.cuh): neighboring elements, `vectors` vectors of 16 bytes a lane,
// in shared memory in the order of memory: the input's elements, then the gates', the saved output's and the reset
// flags. A whole slice comes and goes by one copy an operand, which nobody waits for, a part of one by a copy and
// single elements, rows that are not flat in words and chunks (row_chunks.cuh).
#pragma once

#include <type_traits>

#include "common/ptx/async_copy.cuh"
#include "common/ptx/bulk_copy.cuh"
#include "scan/rows/row_chunks.cuh"

namespace dcs {

// Arrivals at the barrier that a slice's copies complete: of the lane that asks for bulk copies, and of all lanes where
// each copies on its own.
__device__ __forceinline__ int load_arrivals(const FlatParams& p) {
#if DCS_HAS_BULK_COPIES
  return p.all_flat ? 1 : 33;
#else
  return 32;
#endif
}

// Complex numbers are scanned too rarely for passes that are unrolled, which take nvcc a third of its time for them.
template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;

// `kLong`: of long_rows_kernel, whose loop has no registers left for slices in part or operands that are not flat:
// these are copied by functions that it calls.
template <typename T, bool kStep, bool kBackward, Direction kDirection, bool kLong>
struct Slice : InDirection<kDirection> {
  static constexpr int kVec = 16 / sizeof(T), kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0);
  static constexpr int kGatesAt = 1, kSavedAt = kTensors - 1;  // in tensors
  // Vectors of a lane that the passes are unrolled for, or 0.
  static constexpr int kUnrolled = kIsComplex<T> ? 0 : kLong ? long_vectors(kTensors) : kFlatTileVectors;

  using InDirection<kDirection>::reverse;
  const FlatParams& p;
  int64_t first;      // index
  int64_t low, high;  // indices of the tile, those of the slice among them
  unsigned char* shared;
  int lane = threadIdx.x % 32;

  // Elements of a slice, and bytes of all its operands.
  static __host__ __device__ __forceinline__ int elements_of(const FlatParams& p) { return 32 * p.vectors * kVec; }
  static __host__ __device__ __forceinline__ int bytes_of(const FlatParams& p) {
    return elements_of(p) * (kTensors * static_cast<int>(sizeof(T)) + (p.problem.reset ? 1 : 0));
  }
  __device__ __forceinline__ int elements() const { return elements_of(p); }
  __device__ __forceinline__ T* tensor(int index) const { return reinterpret_cast<T*>(shared) + index * elements(); }
  __device__ __forceinline__ bool* flags() const { return reinterpret_cast<bool*>(tensor(kTensors)); }

  // Where [from, to) of indices lies in memory, cut to the slice.
  struct Range {
    int64_t begin, end;
  };
  __device__ __forceinline__ int64_t memory_begin() const {  // of the slice
    return reverse ? p.count + p.phase - first - elements() : first;
  }
  __device__ __forceinline__ Range owned() const {
    const int64_t begin = reverse ? p.count + p.phase - high : low, end = reverse ? p.count + p.phase - low : high;
    return {max(begin, memory_begin()), min(end, memory_begin() + elements())};
  }

  // Of a range that begins at a whole grain, what goes in words of 16 bytes.
  template <typename E>
  static __device__ __forceinline__ int whole_bytes(bool is_flat, const Range& range) {
    constexpr int kWhole = 16 / sizeof(E);
    return is_flat ? static_cast<int>((range.end - range.begin) / kWhole) * 16 : 0;
  }
  static __device__ __forceinline__ int count_of(const Range& range) {
    return static_cast<int>(range.end - range.begin);
  }

  template <typename E>
  __device__ __forceinline__ void load_operand(
      E* to, const void* pointer, const Strides& strides, bool is_flat, const Range& range, uint64_t* barrier) const {
    const E* const from = static_cast<const E*>(pointer);
    E* const here = to - memory_begin();  // by index in memory
    if (!is_flat) return load_rows<kLong ? 3 : 2>(p, here + range.begin, from, strides, range.begin, count_of(range));
    const int bytes = whole_bytes<E>(is_flat, range);
    const int64_t whole = range.begin + bytes / static_cast<int>(sizeof(E));
    if (whole + lane < range.end) here[whole + lane] = from[whole + lane];
#if DCS_HAS_BULK_COPIES
    if (lane == 0 && bytes > 0) bulk_load(here + range.begin, from + range.begin, bytes, barrier);
#else
    constexpr int kWhole = 16 / sizeof(E);
    for (int64_t at = range.begin + lane * kWhole; at < whole; at += 32 * kWhole) copy_async(here + at, from + at);
#endif
  }

  // The same of a slice that lies in the tensor, where all operands are flat.
  template <typename E>
  __device__ __forceinline__ void load_whole(E* to, const void* pointer, uint64_t* barrier) const {
    const E* const from = static_cast<const E*>(pointer) + memory_begin();
#if DCS_HAS_BULK_COPIES
    bulk_load(to, from, elements() * static_cast<int>(sizeof(E)), barrier);
#else
    constexpr int kWhole = 16 / sizeof(E);
    for (int i = lane * kWhole; i < elements(); i += 32 * kWhole) copy_async(to + i, from + i);
#endif
  }
  __device__ __forceinline__ void load_all_whole(uint64_t* barrier) const {
    const ScanProblem& problem = p.problem;
#if DCS_HAS_BULK_COPIES
    if (lane != 0) return;
    mbarrier_arrive_expect_tx(barrier, bytes_of(p));
#endif
    load_whole(tensor(0), problem.input, barrier);
    if constexpr (kStep) load_whole(tensor(kGatesAt), problem.gamma, barrier);
    if constexpr (kBackward) load_whole(tensor(kSavedAt), problem.saved, barrier);
    if (problem.reset) load_whole(flags(), problem.reset, barrier);
#if !DCS_HAS_BULK_COPIES
    mbarrier_arrive_after_copies(barrier);
#endif
  }

  // All operands from whole grains around what the tile has of the slice; a last one in part where the tensor ends.
  __device__ __forceinline__ void load(uint64_t* barrier) const {
    if (p.all_flat && first >= p.phase && first + elements() <= high) load_all_whole(barrier);
    else if constexpr (kLong) load_parts(*this, barrier);
    else load_range(barrier);
  }
  static __device__ __noinline__ void load_parts(const Slice slice, uint64_t* barrier) { slice.load_range(barrier); }
  __device__ __forceinline__ void load_range(uint64_t* barrier) const {
    Range range = owned();
    range.begin = range.begin / kFlatGrain * kFlatGrain;
    range.end = max(range.begin, min((range.end + kFlatGrain - 1) / kFlatGrain * kFlatGrain, p.count));
    const ScanProblem& problem = p.problem;
    int bytes = whole_bytes<T>(p.flat.input, range);
    if constexpr (kStep) bytes += whole_bytes<T>(p.flat.gates, range);
    if constexpr (kBackward) bytes += whole_bytes<T>(p.flat.saved, range);
    if (problem.reset) bytes += whole_bytes<bool>(p.flat.reset, range);
#if DCS_HAS_BULK_COPIES
    if (lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
#endif
#pragma unroll 1
    for (int i = 0; i < kTensors; ++i) {
      const bool is_gates = kStep && i == kGatesAt, is_saved = kBackward && i == kSavedAt;
      load_operand(tensor(i),
          is_gates       ? problem.gamma
              : is_saved ? problem.saved
                         : problem.input,
          is_gates       ? problem.gamma_strides
              : is_saved ? problem.saved_strides
                         : problem.input_strides,
          is_gates       ? p.flat.gates
              : is_saved ? p.flat.saved
                         : p.flat.input,
          range, barrier);
    }
    if (problem.reset) load_operand(flags(), problem.reset, problem.reset_strides, p.flat.reset, range, barrier);
    if (!DCS_HAS_BULK_COPIES || !p.all_flat) mbarrier_arrive_after_copies(barrier);
    __syncwarp();  // what was copied element by element is there for all lanes
  }

  __device__ __forceinline__ void store_operand(
      T* from, void* pointer, const Strides& strides, bool is_flat, const Range& range) const {
    T* const to = static_cast<T*>(pointer);
    const T* const here = from - memory_begin();
    if (!is_flat) return store_rows(p, to, here + range.begin, strides, range.begin, count_of(range));
    const int64_t begin = min((range.begin + kVec - 1) / kVec * kVec, range.end),
                  end = max(range.end / kVec * kVec, begin);
    if (range.begin + lane < begin) to[range.begin + lane] = here[range.begin + lane];
    if (end + lane < range.end) to[end + lane] = here[end + lane];
#if DCS_HAS_BULK_COPIES
    if (lane == 0 && end > begin) bulk_store(to + begin, here + begin, static_cast<int>(end - begin) * sizeof(T));
#else
    for (int64_t at = begin + lane * kVec; at < end; at += 32 * kVec)
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(here + at);
#endif
  }

  __device__ __forceinline__ void store_whole(const T* from, void* pointer) const {
    T* const to = static_cast<T*>(pointer) + memory_begin();
#if DCS_HAS_BULK_COPIES
    bulk_store(to, from, elements() * static_cast<int>(sizeof(T)));
#else
    for (int i = lane * kVec; i < elements(); i += 32 * kVec)
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
#endif
  }
  __device__ __forceinline__ void store_all_whole() const {
#if DCS_HAS_BULK_COPIES
    if (lane != 0) return;
#endif
    store_whole(tensor(0), p.problem.output);
    if constexpr (kStep && kBackward) store_whole(tensor(kGatesAt), p.problem.grad_gamma);
    commit_stores();
  }

  // What the tile has of the slice, once all lanes have written it.
  __device__ __forceinline__ void store() const {
    show_to_bulk_stores();
    __syncwarp();
    if (p.all_flat && first >= low && first + elements() <= high) store_all_whole();
    else if constexpr (kLong) store_parts(*this);
    else store_range();
  }
  static __device__ __noinline__ void store_parts(const Slice slice) { slice.store_range(); }
  __device__ __forceinline__ void store_range() const {
    const Range range = owned();
    if (range.begin >= range.end) return;
    const ScanProblem& problem = p.problem;
#pragma unroll 1
    for (int i = 0; i < (kStep && kBackward ? 2 : 1); ++i)
      store_operand(tensor(i), i ? problem.grad_gamma : problem.output,
          i ? problem.grad_gamma_strides : problem.output_strides, i ? p.flat.gradient : p.flat.output, range);
    if (lane == 0) commit_stores();
  }

  // An element of an operand outside the slice, or 0 where there is none.
  template <typename E>
  __device__ __forceinline__ E beyond(const void* pointer, const Strides& strides, const FlatPosition& at) const {
    if (at.row < 0 || at.row >= p.rows) return E{};
    const int64_t step = reverse ? p.problem.length - 1 - at.done : at.done;
    return static_cast<const E*>(
        pointer)[RowIndex(p, memory_row<kDirection>(p, at.row)).offset(strides) + step * strides.time];
  }
};

}  // namespace dcs
