// A thread's position in its tile of columns/resident_columns.cuh, and the addresses of its operands.
#pragma once

#include "common/ptx/known_address.cuh"
#include "scan/columns/columns_params.cuh"
#include "scan/columns/resident_cells.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, bool kFlat>
struct ResidentIndex {
  using Cell = Vector<T, 1>;
  static constexpr int kSize = sizeof(T);
  static constexpr int kSteps = resident_steps(kSize, kStep, kBackward),
                       kBatch = kSteps < kResidentBatch ? kSteps : kResidentBatch;
  static constexpr bool kCommon = kSize == 2 || std::is_floating_point_v<T>;  // rare types have no early steps
  // Whether some steps can be in shared memory (plan_resident_columns): of a contiguous tile, only the operands in it.
  static constexpr bool kEarly = kCommon && kSteps >= kEarlyBatch && !(kFlat && kBackward);

  const ScanProblem& p;
  const ResidentColumnsPlan& t;
  uint32_t tile, strip;  // `strip`: a span of an outer row, whose tiles follow each other in time
  int outer, first_column;
  int part, column, width;  // of the block's `width`; a thread without one of its own does what another does
  bool works;
  int missing;         // steps of a first part before the scan's first one (`lead_of`)
  int early, count;    // steps in shared memory and, after them, in registers
  int64_t first_step;  // of the latter, in the order of the scan

  __device__ __forceinline__ explicit ResidentIndex(const ResidentColumnsParams& params)
      : p(params.problem), t(params.plan) {
    tile = params.strips.of(blockIdx.x);
    strip = blockIdx.x - tile * params.strips.divisor;
    outer = static_cast<int>(kFlat ? strip : params.spans.of(strip));
    first_column = kFlat ? 0 : (static_cast<int>(strip) - outer * t.spans) * t.span;
    find_steps();
  }

  // The thread's position in the tile. Also after the exchange, which has no registers for what is quickly recomputed.
  __device__ __forceinline__ void find_steps() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(tile), "+r"(first_column));
    width = min(t.span, static_cast<int>(p.inner) - first_column);
    const int own_part = static_cast<int>(thread * t.span_inverse >> 16);
    const int own_column = static_cast<int>(thread) - own_part * t.span;
    works = own_part < t.parts && own_column < width;
    part = min(own_part, t.parts - 1);
    column = min(own_column, width - 1);
    first_step = (int64_t{tile} * t.parts + part) * t.part_steps;
    missing = 0;
    if constexpr (kFlat) {
      first_step -= lead_of(p, t, outer);
      missing = static_cast<int>(max(int64_t{0}, -first_step));
      first_step += missing;
    }
    count = static_cast<int>(max(int64_t{0}, min(int64_t{t.part_steps - missing}, p.length - first_step)));
    early = min(count, early_steps());
    count -= early;
    first_step += early_steps();
  }
  __device__ __forceinline__ int early_steps() const { return kEarly ? t.early_steps : 0; }
  __device__ __forceinline__ int late_steps() const { return t.part_steps - early_steps(); }
  __device__ __forceinline__ int64_t early_step() const { return first_step - early_steps(); }  // the part's first
  __device__ __forceinline__ ColumnIndex block_index() const { return {outer, first_column}; }
  __device__ __forceinline__ ColumnIndex index() const { return {outer, first_column + column}; }

  // The scan starts anew before the part's first step.
  __device__ __forceinline__ bool starts() const { return early_step() == 0 && !(p.initial && !p.backward); }

  __device__ __forceinline__ int64_t row_of(int64_t position) const {
    return p.reverse ? p.length - 1 - position : position;
  }
  // An operand from a step on in global memory, or from the part's first one on in a tile of shared memory.
  template <typename Byte>
  __device__ __forceinline__ CellSteps<Byte> in_memory(
      Byte* pointer, const Strides& strides, int64_t step, int bytes = kSize) const {
    const ColumnIndex at = index();
    const int64_t offset = strides.at(at.outer, row_of(step), at.column);
    return {known_address(pointer + offset * bytes), (p.reverse ? -1 : 1) * static_cast<int>(strides.time) * bytes};
  }
  template <typename Byte>
  __device__ __forceinline__ CellSteps<Byte> in_tile(Byte* tile_memory) const {
    const int row_bytes = t.span * kSize, from_part = p.reverse ? t.parts - 1 - part : part;
    return {tile_memory + from_part * t.part_pitch * 16 +
            (p.reverse ? t.part_steps - 1 - missing : missing) * row_bytes + column * kSize,
        p.reverse ? -row_bytes : row_bytes};
  }
  // The thread's early elements of the input, the gates, the saved output.
  enum Operand { kInput, kGates, kSaved };
  __device__ __forceinline__ EarlyCells<Cell, kFlat> early_cells(const TileMemory& memory, Operand operand) const {
    if constexpr (kFlat) {
      const CellSteps<char> part = in_tile(memory.tile_of(operand));
      return {part.at, part.apart};
    } else {
      const int slots = (operand == kSaved && !kStep ? 1 : operand) * early_steps() * kColumnThreads;
      return {memory.tile_of(0) + (slots + static_cast<int>(threadIdx.x)) * kSize, 0};
    }
  }
  // The bits of kEarlyBatch early steps, and of the one after, from a step on.
  __device__ __forceinline__ uint16_t* early_cuts(const TileMemory& memory, int step) const {
    return reinterpret_cast<uint16_t*>(memory.shared + t.cuts_at) + step / kEarlyBatch * kColumnThreads + threadIdx.x;
  }
};

}  // namespace dcs
