// The temporal difference scan of the known forms along time outside contiguous columns: one warp per group of columns,
// serial in time. The next segments of time are on their way into its shared memory meanwhile. Where columns are few,
// the warps of a block take the segments of its columns in turn: a warp makes its segment's total from nothing, waits
// for the carry of the warp before it, hands its own on, and goes through the segment again. No barrier is the whole
// block's.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/vector.cuh"
#include "returns/fixed_forms.cuh"

namespace dcs {

struct ReturnsColumnOperand {
  const char* data;
  Strides strides;  // in elements
};

template <typename Acc>
struct ReturnsWarpColumnsCall : ReturnsKnown<Acc> {
  ReturnsColumnOperand rewards, values, next_values, rhos, terminated, truncated;
  ReturnsInput bootstrap;
  ReturnsOutput advantages, targets, pg_advantages;
  int64_t inner, length;
  int blocks;  // of an outer index
  int stage_bytes;
};

// All but stage_bytes.
template <typename Acc>
ReturnsWarpColumnsCall<Acc> warp_columns_call(const ReturnsProblem& p, int columns, int steps) {
  ReturnsWarpColumnsCall<Acc> call{known_of<Acc>(p, steps)};
  const auto operand = [](const ReturnsInput& from) {
    return ReturnsColumnOperand{static_cast<const char*>(from.data), from.strides};
  };
  call.rewards = operand(p.rewards);
  call.values = operand(p.values);
  call.next_values = operand(p.next_values);
  call.rhos = operand(p.rhos);
  call.terminated = operand(p.terminated);
  call.truncated = operand(p.truncated);
  call.bootstrap = p.bootstrap_value;
  call.advantages = p.advantages;
  call.targets = p.targets;
  call.pg_advantages = p.pg_advantages;
  call.inner = p.inner;
  call.length = p.length;
  call.blocks = static_cast<int>(ceil_div(p.inner, 32 * columns));
  return call;
}

constexpr int kMaxColumnWarps = 16;  // more would wait in line longer than they hide

// Bytes of a warp's stage.
template <typename T, int kForm, int kColumns, int kCount, bool kShared>
constexpr int warp_columns_stage_bytes(bool terminated, bool truncated) {
  constexpr int kRow = 32 * kColumns;
  const int values = kForm & kWithValues ? kCount + (kShared && !(kForm & kWithNext) ? 1 : 0) : 0;
  const int words = kCount + values + (kForm & kWithNext ? kCount : 0) + (kForm & kWithRhos ? kCount : 0);
  return kRow * (words * static_cast<int>(sizeof(T)) + kCount * ((terminated ? 1 : 0) + (truncated ? 1 : 0)));
}

// What a warp of shared columns has beside its stages, a word a lane and column of each: its total and the product of
// its gates, the carry into it, the carry out of it; and the barrier that says when that is there.
template <int kColumns>
struct WarpColumnsCarries {
  static constexpr int kInto = 512 * kColumns, kOut = 768 * kColumns, kReady = 1024 * kColumns, kBytes = kReady + 16;
};

// By address in shared memory.
__device__ __forceinline__ void store_shared(uint32_t to, double x) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, double x, double y) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(to), "d"(x), "d"(y) : "memory");
}
__device__ __forceinline__ double load_shared(uint32_t from) {
  double value;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ double2 load_shared_pair(uint32_t from) {
  double2 value;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(value.x), "=d"(value.y) : "r"(from) : "memory");
  return value;
}

// Where a warp is, and what it reads and writes there. kColumns: of a lane, read as one word; kCount: steps of a
// segment; kShared: the block's warps share its columns; else it is one warp.
template <typename T, int kForm, int kColumns, int kCount, int kStages, bool kShared>
struct ReturnsWarpColumns {
  using Acc = typename Types<T>::Acc;
  using Steps = KnownSteps<Acc, kForm, kCount>;
  using Word = Vector<T, kColumns>;
  using Carries = WarpColumnsCarries<kColumns>;
  using Call = ReturnsWarpColumnsCall<Acc>;
  static constexpr int kRow = 32 * kColumns, kRowBytes = kRow * static_cast<int>(sizeof(T));
  static constexpr int kValueRows = Steps::kHasValues ? kCount + (kShared && !Steps::kHasNext ? 1 : 0) : 0;
  // Where the operands lie in a stage.
  static constexpr int kValuesAt = kCount * kRowBytes, kNextAt = kValuesAt + kValueRows * kRowBytes;
  static constexpr int kRhosAt = kNextAt + (Steps::kHasNext ? kCount * kRowBytes : 0);
  static constexpr int kFlagsAt = kRhosAt + (Steps::kHasRhos ? kCount * kRowBytes : 0);

  const Call& call;
  unsigned char* const ring;  // the warp's stages
  const int outer;
  const int64_t first_column;
  const int columns, segments;
  uint32_t own = 0, before = 0;  // shared memory of this warp, and of the one before it

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return kShared ? threadIdx.x / 32 : 0; }
  static __device__ __forceinline__ int warps() { return kShared ? blockDim.x / 32 : 1; }

  __device__ __forceinline__ ReturnsWarpColumns(const Call& call, unsigned char* shared)
      : call(call),
        ring(shared + warp() * kStages * call.stage_bytes),
        outer(static_cast<int>(blockIdx.x) / call.blocks),
        first_column(static_cast<int64_t>(static_cast<int>(blockIdx.x) - outer * call.blocks) * kRow),
        columns(static_cast<int>(min(call.inner - first_column, static_cast<int64_t>(kRow)))),
        segments(static_cast<int>((call.length + kCount - 1) / kCount)) {
    if constexpr (kShared) {
      // Behind the stages. The addresses go through a shuffle, or ptxas would make them again from the block's size
      // every time they are used, in the way of a carry.
      const uint32_t all = shared_address(shared) + warps() * kStages * call.stage_bytes;
      own = __shfl_sync(0xffffffffu, all + warp() * Carries::kBytes, 0);
      before = __shfl_sync(0xffffffffu, all + (warp() == 0 ? warps() - 1 : warp() - 1) * Carries::kBytes, 0);
    }
  }

  __device__ __forceinline__ bool inside() const { return lane() * kColumns < columns; }

  // kRows rows of an operand, from step `first` on, counted from the last one. A lane's chunks of 16 bytes are kEvery
  // rows apart.
  template <int kSize, int kRows>
  __device__ __forceinline__ void fetch_operand(
      unsigned char* to, const ReturnsColumnOperand& operand, int64_t first) const {
    constexpr int kChunks = kRow * kSize / 16, kEvery = kChunks < 32 ? 32 / kChunks : 1;
    static_assert(kChunks <= 32);
    const int row = lane() / kChunks, chunk = lane() % kChunks;
    const int64_t length = call.length;
    const bool exists = chunk * 16 < columns * kSize;
    const Strides& strides = operand.strides;
    const char* from = operand.data +
        ((length - 1 - first - row) * strides.time + outer * strides.outer + first_column) * kSize + chunk * 16;
    const bool whole = columns >= kRow && first >= 0 && first + kRows <= length;
    unsigned char* const destination = to + row * kRow * kSize + chunk * 16;
#pragma unroll
    for (int r = 0; r < kRows; r += kEvery) {
      if (kRows % kEvery == 0 || r + row < kRows)
        copy_async<16>(destination + r * kRow * kSize, from,
            whole || (exists && first + r + row >= 0 && first + r + row < length) ? 16 : 0);
      from -= kEvery * strides.time * kSize;
    }
  }
  __device__ __forceinline__ int truncated_at() const { return kFlagsAt + (call.terminated.data ? kCount * kRow : 0); }
  __device__ __forceinline__ void fetch(int segment, unsigned char* to) const {
    constexpr int kWide = sizeof(T);
    if (segment < segments) {
      const int64_t first = static_cast<int64_t>(segment) * kCount;
      fetch_operand<kWide, kCount>(to, call.rewards, first);
      if constexpr (Steps::kHasValues)
        fetch_operand<kWide, kValueRows>(to + kValuesAt, call.values, first - (kValueRows - kCount));
      if constexpr (Steps::kHasNext) fetch_operand<kWide, kCount>(to + kNextAt, call.next_values, first);
      if constexpr (Steps::kHasRhos) fetch_operand<kWide, kCount>(to + kRhosAt, call.rhos, first);
      if (call.terminated.data) fetch_operand<1, kCount>(to + kFlagsAt, call.terminated, first);
      if (call.truncated.data) fetch_operand<1, kCount>(to + truncated_at(), call.truncated, first);
    }
    commit_copies();
  }

  __device__ __forceinline__ void read(
      const unsigned char* from, Acc (Steps::*to)[kCount], Steps (&steps)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Word word =
          *reinterpret_cast<const Word*>(from + i * kRowBytes + lane() * kColumns * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) (steps[c].*to)[i] = cast<Acc>(word.get(c));
    }
  }
  __device__ __forceinline__ void read_flags(
      const unsigned char* from, uint32_t Steps::* to, Steps (&steps)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Vector<uint8_t, kColumns> word =
          *reinterpret_cast<const Vector<uint8_t, kColumns>*>(from + i * kRow + lane() * kColumns);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (word.get(c)) steps[c].*to |= 1u << i;
    }
  }
  // A segment's steps; in `behind` the values of the states after it, where the block's warps share its columns.
  __device__ __forceinline__ void load(const unsigned char* here, int segment, const T (&bootstraps)[kColumns],
      Steps (&steps)[kColumns], Acc (&behind)[kColumns]) const {
    read(here, &Steps::rewards, steps);
    if constexpr (Steps::kHasValues) read(here + kValuesAt + (kValueRows - kCount) * kRowBytes, &Steps::values, steps);
    if constexpr (Steps::kHasNext) read(here + kNextAt, &Steps::next, steps);
    if constexpr (Steps::kHasRhos) read(here + kRhosAt, &Steps::rhos, steps);
    if (call.terminated.data) read_flags(here + kFlagsAt, &Steps::terminates, steps);
    if (call.truncated.data) read_flags(here + truncated_at(), &Steps::truncates, steps);
    if constexpr (kShared && !Steps::kHasNext && Steps::kHasValues) {
      const Word word =
          *reinterpret_cast<const Word*>(here + kValuesAt + lane() * kColumns * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) behind[c] = cast<Acc>(segment == 0 ? bootstraps[c] : word.get(c));
    }
  }

  __device__ __forceinline__ T bootstrap_of(int c) const {
    const Strides& strides = call.bootstrap.strides;
    return static_cast<const T*>(call.bootstrap.data)[strides.at(outer, first_column + lane() * kColumns + c)];
  }

  // Nothing comes into the first segment.
  __device__ __forceinline__ void init_carries() const {
    if (lane() == 0) mbarrier_init(own + Carries::kReady, 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) store_shared(own + Carries::kOut + (c * 32 + lane()) * 8, 0.0);
    __syncthreads();
  }
  // The carry into a segment, in `entering`, and out of it, to the next warp. The total waits in shared memory, and the
  // segment's own carry goes there: ptxas keeps the order of those accesses and of the barrier's, but would move
  // arithmetic into the way from one warp's carry to the next.
  __device__ __forceinline__ void exchange_carries(
      const Steps (&steps)[kColumns], int segment, uint32_t parity, Acc (&entering)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const Segment<double> folded = steps[c].template total<double>(call);
      store_shared(own + (c * 32 + lane()) * 16, folded.total, folded.gates);
    }
    if (segment > 0) mbarrier_wait(before + Carries::kReady, warp() == 0 ? parity ^ 1 : parity);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int offset = (c * 32 + lane()) * 8;
      const double2 total = load_shared_pair(own + 2 * offset);
      const double carry = load_shared(before + Carries::kOut + offset);
      store_shared(own + Carries::kOut + offset, steps[c].cuts ? total.x : fold(total.x, total.y, carry));
      store_shared(own + Carries::kInto + offset, carry);
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(own + Carries::kReady);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      entering[c] = static_cast<Acc>(load_shared(own + Carries::kInto + (c * 32 + lane()) * 8));
  }

  __device__ __forceinline__ void store(
      const ReturnsOutput& output, int64_t first, int count, const Acc (&from)[kColumns][kCount]) const {
    if (!output.data) return;
    const Strides& strides = output.strides;
    T* to = static_cast<T*>(output.data) + (call.length - 1 - first) * strides.time + outer * strides.outer +
        first_column + lane() * kColumns;
    const auto store_step = [&](int i) {
      Acc word[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) word[c] = from[c][i];
      *reinterpret_cast<Word*>(to) = pack<Acc, T, kColumns>(word);
      to -= strides.time;
    };
    if (count == kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) store_step(i);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) store_step(i);
    }
  }
};

template <typename T, int kForm, int kColumns, int kCount, int kStages, bool kShared, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    returns_warp_columns_kernel(const __grid_constant__ ReturnsWarpColumnsCall<typename Types<T>::Acc> call) {
  using Warp = ReturnsWarpColumns<T, kForm, kColumns, kCount, kStages, kShared>;
  using Acc = typename Warp::Acc;
  using Steps = typename Warp::Steps;
  extern __shared__ __align__(16) unsigned char returns_columns_shared[];
  const Warp warp(call, returns_columns_shared);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) warp.fetch(Warp::warp() + s * Warp::warps(), warp.ring + s * call.stage_bytes);

  T bootstraps[kColumns];
  Acc carried[kColumns], behind[kColumns];  // where a warp has its columns alone
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    bootstraps[c] = cast<T>(Acc(0));
    if (!Steps::kHasNext && call.bootstrap.data && warp.inside() && (!kShared || Warp::warp() == 0))
      bootstraps[c] = warp.bootstrap_of(c);
    carried[c] = Acc(0);
    behind[c] = cast<Acc>(bootstraps[c]);
  }
  if constexpr (kShared) warp.init_carries();

  int stage = 0;
  uint32_t parity = 0;
  for (int segment = Warp::warp(); segment < warp.segments; segment += Warp::warps()) {
    unsigned char* const here = warp.ring + stage * call.stage_bytes;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    Steps steps[kColumns];
    warp.load(here, segment, bootstraps, steps, behind);
    __syncwarp();
    warp.fetch(segment + kStages * Warp::warps(), here);

    Acc advantages[kColumns][kCount], targets[kColumns][kCount], pg_advantages[kColumns][kCount];
    Acc entering[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      steps[c].make_differences(call, behind[c], segment == 0);
      if constexpr (Steps::kHasValues) behind[c] = steps[c].values[kCount - 1];
      entering[c] = carried[c];
    }
    if constexpr (kShared) {
      warp.exchange_carries(steps, segment, parity, entering);
      parity ^= 1;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      carried[c] = steps[c].results(call, entering[c], [&](int i, Acc advantage, Acc target, Acc pg) {
        advantages[c][i] = advantage;
        targets[c][i] = target;
        pg_advantages[c][i] = pg;
      });
    const int64_t first = static_cast<int64_t>(segment) * kCount;
    const int count = warp.inside() ? static_cast<int>(min(call.length - first, static_cast<int64_t>(kCount))) : 0;
    warp.store(call.advantages, first, count, advantages);
    warp.store(call.targets, first, count, targets);
    if constexpr (Steps::kHasRhos) warp.store(call.pg_advantages, first, count, pg_advantages);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace dcs
