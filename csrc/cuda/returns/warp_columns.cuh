// The temporal difference scan of the known forms along time outside contiguous columns. A warp takes 32 lanes of columns and walks back in time; the next
// stretches are on their way into its shared memory meanwhile. Where columns are few, the warps of a block take the stretches of its columns in turn: a warp
// makes its stretch's total from nothing, waits for the carry of the warp before it, hands its own on, and goes through the stretch again. No barrier
// is the whole block's.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/mbarrier.cuh"
#include "returns/fixed_forms.cuh"
#include "common/vector.cuh"

namespace dcs {

struct WalkOperand {
  const char* data;
  Strides strides;  // in elements
};

template <typename Acc>
struct ReturnsWalkCall : ReturnsKnown<Acc> {
  WalkOperand rewards, values, next_values, rhos, terminated, truncated;
  ReturnsInput bootstrap;
  ReturnsOutput advantages, targets, pg_advantages;
  int64_t inner, length;
  int blocks;  // of an outer index
  int stage_bytes;
};

constexpr int kMaxWalkWarps = 16;  // more would wait in line longer than they hide

// Bytes of a warp's stage.
template <typename T, int kForm, int kColumns, int kCount, bool kShared>
constexpr int walk_stage_bytes(bool terminated, bool truncated) {
  constexpr int kRow = 32 * kColumns;
  const int values = kForm & kWithValues ? kCount + (kShared && !(kForm & kWithNext) ? 1 : 0) : 0;
  const int words = kCount + values + (kForm & kWithNext ? kCount : 0) + (kForm & kWithRhos ? kCount : 0);
  return kRow * (words * static_cast<int>(sizeof(T)) + kCount * ((terminated ? 1 : 0) + (truncated ? 1 : 0)));
}

// What a warp of shared columns has beside its stages, a word a lane and column of each: its total and the product of its gates, the carry into it, the carry
// out of it; and the barrier that says when that is there.
template <int kColumns>
struct WalkCarries {
  static constexpr int kInto = 512 * kColumns, kOut = 768 * kColumns, kReady = 1024 * kColumns, kBytes = kReady + 16;
};

// By address in shared memory.
__device__ __forceinline__ void store_shared(uint32_t to, double x) { asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(x) : "memory"); }
__device__ __forceinline__ void store_shared(uint32_t to, double x, double y) { asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(to), "d"(x), "d"(y) : "memory"); }
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

// kColumns: of a lane, read as one word; kCount: steps of a stretch; kShared: the block's warps share its columns; else it is one warp.
template <typename T, int kForm, int kColumns, int kCount, int kStages, bool kShared, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) returns_walk_kernel(const __grid_constant__ ReturnsWalkCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  using Steps = KnownSteps<Acc, kForm, kCount>;
  using Word = Vector<T, kColumns>;
  constexpr int kRow = 32 * kColumns, kRowBytes = kRow * static_cast<int>(sizeof(T));
  constexpr int kValueRows = Steps::kHasValues ? kCount + (kShared && !Steps::kHasNext ? 1 : 0) : 0;
  // Where the operands lie in a stage.
  constexpr int kValuesAt = kCount * kRowBytes, kNextAt = kValuesAt + kValueRows * kRowBytes, kRhosAt = kNextAt + (Steps::kHasNext ? kCount * kRowBytes : 0),
                kFlagsAt = kRhosAt + (Steps::kHasRhos ? kCount * kRowBytes : 0);
  const int lane = threadIdx.x % 32, warp = kShared ? threadIdx.x / 32 : 0, warps = kShared ? blockDim.x / 32 : 1;
  extern __shared__ __align__(16) unsigned char walk_shared[];
  // Behind the stages of a block that shares its columns. The addresses go through a shuffle, or ptxas would make them again from the block's size every time
  // they are used, in the way of a carry.
  using Carries = WalkCarries<kColumns>;
  uint32_t own = 0, before = 0;
  if constexpr (kShared) {
    const uint32_t all = shared_address(walk_shared) + warps * kStages * call.stage_bytes;
    own = __shfl_sync(0xffffffffu, all + warp * Carries::kBytes, 0);
    before = __shfl_sync(0xffffffffu, all + (warp == 0 ? warps - 1 : warp - 1) * Carries::kBytes, 0);
  }
  unsigned char* const ring = walk_shared + warp * kStages * call.stage_bytes;

  const int outer = static_cast<int>(blockIdx.x) / call.blocks;
  const int64_t first_column = static_cast<int64_t>(static_cast<int>(blockIdx.x) - outer * call.blocks) * kRow;
  const int columns = static_cast<int>(min(call.inner - first_column, static_cast<int64_t>(kRow)));
  const int stretches = static_cast<int>((call.length + kCount - 1) / kCount);
  const bool inside = lane * kColumns < columns;

  // A lane's pieces of 16 bytes are `every` rows apart. Row r of stretch s is step s * kCount + r, counted from the last one.
  const auto bring = [&](unsigned char* to, const WalkOperand& operand, auto size, auto rows, int64_t first) {
    constexpr int kSize = decltype(size)::value, kRows = decltype(rows)::value, kPieces = kRow * kSize / 16, kEvery = kPieces < 32 ? 32 / kPieces : 1;
    static_assert(kPieces <= 32);
    const int row = lane / kPieces, piece = lane % kPieces;
    const bool exists = piece * 16 < columns * kSize;
    const Strides& strides = operand.strides;
    const char* from = operand.data + ((call.length - 1 - first - row) * strides.time + outer * strides.outer + first_column) * kSize + piece * 16;
    const bool whole = columns >= kRow && first >= 0 && first + kRows <= call.length;
    unsigned char* const place = to + row * kRow * kSize + piece * 16;
#pragma unroll
    for (int r = 0; r < kRows; r += kEvery) {
      if (kRows % kEvery == 0 || r + row < kRows)
        copy_async<16>(place + r * kRow * kSize, from, whole || (exists && first + r + row >= 0 && first + r + row < call.length) ? 16 : 0);
      from -= kEvery * strides.time * kSize;
    }
  };
  constexpr std::integral_constant<int, sizeof(T)> wide;
  constexpr std::integral_constant<int, 1> byte;
  constexpr std::integral_constant<int, kCount> all_rows;
  const auto fetch = [&](int stretch, unsigned char* to) {
    if (stretch < stretches) {
      const int64_t first = static_cast<int64_t>(stretch) * kCount;
      bring(to, call.rewards, wide, all_rows, first);
      if constexpr (Steps::kHasValues)
        bring(to + kValuesAt, call.values, wide, std::integral_constant<int, kValueRows>{}, first - (kValueRows - kCount));
      if constexpr (Steps::kHasNext) bring(to + kNextAt, call.next_values, wide, all_rows, first);
      if constexpr (Steps::kHasRhos) bring(to + kRhosAt, call.rhos, wide, all_rows, first);
      if (call.terminated.data) bring(to + kFlagsAt, call.terminated, byte, all_rows, first);
      if (call.truncated.data) bring(to + kFlagsAt + (call.terminated.data ? kCount * kRow : 0), call.truncated, byte, all_rows, first);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(warp + s * warps, ring + s * call.stage_bytes);

  T bootstraps[kColumns];
  Acc carried[kColumns], behind[kColumns];  // where a warp has its columns alone
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    bootstraps[c] = cast<T>(Acc(0));
    if (!Steps::kHasNext && call.bootstrap.data && inside && (!kShared || warp == 0))
      bootstraps[c] = static_cast<const T*>(call.bootstrap.data)[outer * call.bootstrap.strides.outer + (first_column + lane * kColumns + c) * call.bootstrap.strides.inner];
    carried[c] = Acc(0);
    behind[c] = cast<Acc>(bootstraps[c]);
  }
  if constexpr (kShared) {
    if (lane == 0) mbarrier_init(own + Carries::kReady, 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) store_shared(own + Carries::kOut + (c * 32 + lane) * 8, 0.0);  // nothing comes into the first stretch
    __syncthreads();
  }


  int stage = 0;
  uint32_t parity = 0;
  for (int stretch = warp; stretch < stretches; stretch += warps) {
    unsigned char* const here = ring + stage * call.stage_bytes;
    const int64_t first = static_cast<int64_t>(stretch) * kCount;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    Steps steps[kColumns];
    const auto read = [&](int at, Acc(Steps::*to)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Word word = *reinterpret_cast<const Word*>(here + at + i * kRowBytes + lane * kColumns * static_cast<int>(sizeof(T)));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) (steps[c].*to)[i] = cast<Acc>(word.get(c));
      }
    };
    const auto read_flags = [&](int at, uint32_t Steps::*to) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Vector<uint8_t, kColumns> word = *reinterpret_cast<const Vector<uint8_t, kColumns>*>(here + at + i * kRow + lane * kColumns);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (word.get(c)) steps[c].*to |= 1u << i;
      }
    };
    read(0, &Steps::rewards);
    if constexpr (Steps::kHasValues) read(kValuesAt + (kValueRows - kCount) * kRowBytes, &Steps::values);
    if constexpr (Steps::kHasNext) read(kNextAt, &Steps::next);
    if constexpr (Steps::kHasRhos) read(kRhosAt, &Steps::rhos);
    if (call.terminated.data) read_flags(kFlagsAt, &Steps::terminates);
    if (call.truncated.data) read_flags(kFlagsAt + (call.terminated.data ? kCount * kRow : 0), &Steps::truncates);
    if constexpr (kShared && !Steps::kHasNext && Steps::kHasValues) {
      const Word word = *reinterpret_cast<const Word*>(here + kValuesAt + lane * kColumns * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) behind[c] = cast<Acc>(stretch == 0 ? bootstraps[c] : word.get(c));
    }
    __syncwarp();
    fetch(stretch + kStages * warps, here);

    Acc advantages[kColumns][kCount], targets[kColumns][kCount], pg_advantages[kColumns][kCount];
    Acc entering[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      steps[c].make_differences(call, behind[c], stretch == 0);
      if constexpr (Steps::kHasValues) behind[c] = steps[c].values[kCount - 1];
      entering[c] = carried[c];
    }
    if constexpr (kShared) {
      // The total waits in shared memory, and the stretch's own carry goes there: ptxas keeps the order of those accesses and of the barrier's, but would
      // move arithmetic into the way from one warp's carry to the next.
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const Piece<double> piece = steps[c].template total<double>(call);
        store_shared(own + (c * 32 + lane) * 16, piece.total, piece.gates);
      }
      if (stretch > 0) mbarrier_wait(before + Carries::kReady, warp == 0 ? parity ^ 1 : parity);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int place = (c * 32 + lane) * 8;
        const double2 total = load_shared_pair(own + 2 * place);
        const double carry = load_shared(before + Carries::kOut + place);
        store_shared(own + Carries::kOut + place, steps[c].cuts ? total.x : fold(total.x, total.y, carry));
        store_shared(own + Carries::kInto + place, carry);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(own + Carries::kReady);
      parity ^= 1;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) entering[c] = static_cast<Acc>(load_shared(own + Carries::kInto + (c * 32 + lane) * 8));
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      carried[c] = steps[c].results(call, entering[c], [&](int i, Acc advantage, Acc target, Acc pg) {
        advantages[c][i] = advantage;
        targets[c][i] = target;
        pg_advantages[c][i] = pg;
      });
    const int count = inside ? static_cast<int>(min(call.length - first, static_cast<int64_t>(kCount))) : 0;
    const auto put = [&](const ReturnsOutput& output, const Acc(&from)[kColumns][kCount]) {
      if (!output.data) return;
      const Strides& strides = output.strides;
      T* to = static_cast<T*>(output.data) + (call.length - 1 - first) * strides.time + outer * strides.outer + first_column + lane * kColumns;
      const auto put_step = [&](int i) {
        Acc word[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) word[c] = from[c][i];
        *reinterpret_cast<Word*>(to) = pack<Acc, T, kColumns>(word);
        to -= strides.time;
      };
      if (count == kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) put_step(i);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (i < count) put_step(i);
      }
    };
    put(call.advantages, advantages);
    put(call.targets, targets);
    if constexpr (Steps::kHasRhos) put(call.pg_advantages, pg_advantages);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace dcs
