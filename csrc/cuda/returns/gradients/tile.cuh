// All of it in one kernel, where time is contiguous: a block takes a tile of the flat sequence of
// steps. What is scanned and its gates lie in shared memory between the stages (stages.cuh), which take the slots of
// the tile some at a time and ask nothing of alignment or strides; between them each thread scans a run of neighboring
// steps. What rows carry from tile to tile goes through global memory (lookback.cuh), where tiles are not whole rows.
#pragma once

#include "returns/gradients/lookback.cuh"
#include "returns/gradients/stages.cuh"

namespace dcs {

template <typename T, GradientsForm kForm>
struct GradientTile {
  using Acc = typename Types<T>::Acc;

  const GradientTileParams<T>& params;
  unsigned char* const shared;
  const GradientsParams<T>& call = params.call;
  const GradientTilesPlan& plan = params.plan;
  const uint32_t tile = blockIdx.x;

  // In shared memory, in order: of the warps' segments, what enters them, what is scanned and then the scan of it,
  // gates of steps or of their rows, and where episodes end.
  __device__ __forceinline__ Segment<double>* segments() const { return reinterpret_cast<Segment<double>*>(shared); }
  __device__ __forceinline__ double* entering() const {
    return reinterpret_cast<double*>(shared + params.memory.entering);
  }
  __device__ __forceinline__ Acc* sources() const { return reinterpret_cast<Acc*>(shared + params.memory.sources); }
  __device__ __forceinline__ Acc* gates() const { return reinterpret_cast<Acc*>(shared + params.memory.gates); }
  __device__ __forceinline__ Gate<Acc>* row_gates() const {
    return reinterpret_cast<Gate<Acc>*>(shared + params.memory.gates);
  }
  __device__ __forceinline__ uint8_t* flags() const { return shared + params.memory.flags; }

  // Its steps, and, modulo 2^32, the first that it reads: the first tile has none before it.
  __device__ __forceinline__ uint32_t begin() const { return tile * params.tile_steps; }
  __device__ __forceinline__ uint32_t end() const { return min(begin() + params.tile_steps, params.steps); }
  __device__ __forceinline__ uint32_t first() const { return begin() - static_cast<uint32_t>(plan.before); }

  // Visits its slots, some of each thread's at once, `base` the first.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    const SlotRange range{tile == 0 ? 0 : first(), begin(), end()};
#pragma unroll 1
    for (int base = 0; base < params.slots; base += kSlotThreads * kSlots)
      visit(Slots<T, kForm>(call, first() + static_cast<uint32_t>(base) + threadIdx.x, range), base);
  }
  // A thread's slot of `base`, in shared memory.
  __device__ __forceinline__ int slot_index(int base, int j) const {
    return base + static_cast<int>(threadIdx.x) + j * kSlotThreads;
  }
  __device__ __forceinline__ bool has(int slot) const { return slot < params.slots; }

  struct Sources {
    const GradientTile& tile;
    const int base;

    template <typename Value>
    __device__ __forceinline__ void store_sources(const Value& value) const {
      store(tile.sources(), value);
    }
    __device__ __forceinline__ bool wants_gates() const { return tile.params.has_gates; }
    template <typename Value>
    __device__ __forceinline__ void store_gates(const Value& value) const {
      store(tile.gates(), value);
    }
    __device__ __forceinline__ bool wants_row_gates() const { return !tile.params.has_gates && tile.call.row_rates; }
    template <typename Value>
    __device__ __forceinline__ void store_row_gates(const Value& value) const {
      store(tile.row_gates(), [&](int j) { return make_gate<Acc>(value(j)); });
    }
    template <typename To, typename Value>
    __device__ __forceinline__ void store(To* to, const Value& value) const {
#pragma unroll
      for (int j = 0; j < kSlots; ++j)
        if (tile.has(tile.slot_index(base, j))) to[padded_slot(tile.slot_index(base, j))] = value(j);
    }
  };
  struct Scanned {
    const GradientTile& tile;
    const int base;

    template <typename Which>
    __device__ __forceinline__ void read(Acc (&to)[kSlots], int later, const Which& which) const {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int slot = tile.slot_index(base, j) + later;
        to[j] = which(j) && slot >= 0 && tile.has(slot) ? tile.sources()[padded_slot(slot)] : Acc(0);
      }
    }
  };

  __device__ __forceinline__ void make_all_sources() const {
    each([&](const Slots<T, kForm>& slots, int base) {
      if (call.ends.data) {
        bool ends[kSlots];
        slots.read(call.ends, ends);
#pragma unroll
        for (int j = 0; j < kSlots; ++j)
          if (has(slot_index(base, j))) flags()[slot_index(base, j)] = ends[j];
      }
      make_sources(slots, Sources{*this, base});
    });
  }
  __device__ __forceinline__ void write_all_gradients() const {
    each([&](const Slots<T, kForm>& slots, int base) { write_gradients<false>(slots, Scanned{*this, base}); });
  }

  // The tile with the first step of the row that this one begins within.
  __device__ __forceinline__ uint32_t first_of_row() const {
    const uint32_t row = params.by_length.of(begin());
    return params.by_tile.of(row * params.by_length.divisor);
  }
};

// A thread's run of steps, between the stages.
template <typename T, GradientsForm kForm>
struct GradientRun {
  using Acc = typename Types<T>::Acc;
  static constexpr int kRun = kGradientRun;

  const GradientTile<T, kForm>& tile;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int part;
  bool works;
  int slot;           // of the first step
  uint32_t cuts = 0;  // bit i: nothing is carried to step i

  __device__ __forceinline__ explicit GradientRun(const GradientTile<T, kForm>& of) : tile(of) {
    const int thread = static_cast<int>(threadIdx.x);
    works = thread < tile.plan.parts;
    // A thread without steps takes those of another.
    part = min(thread, tile.plan.parts - 1);
    slot = tile.plan.before + kRun * part;
    find_cuts();
  }
  __device__ __forceinline__ bool has_gates() const { return tile.params.has_gates; }
  // In shared memory, of a step or of the one before it.
  __device__ __forceinline__ int slot_of(int i, int later = 0) const { return max(slot + i + later, 0); }
  __device__ __forceinline__ int offset(int i, int later = 0) const { return padded_slot(slot_of(i, later)); }

  __device__ __forceinline__ void find_cuts() {
    const uint32_t step = tile.begin() + static_cast<uint32_t>(kRun * part), length = tile.params.by_length.divisor;
    const uint32_t done = step - tile.params.by_length.of(step) * length;
#pragma unroll 1
    for (uint32_t start = done == 0 ? 0 : length - done; start < kRun; start += length) cuts |= 1u << start;
    if (!tile.call.ends.data) return;
    const uint8_t* const flags = tile.flags();
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (flags[slot_of(i, -1)]) cuts |= 1u << i;
  }

  // Visits the scan of the run's steps. kGates: of steps; else a number, or of rows.
  template <bool kGates, typename Visit>
  __device__ __forceinline__ Acc scan(Acc entering, const Visit& visit) const {
    const Acc* const sources = tile.sources();
    Gate<Acc> gate = tile.call.rates.gate;
    Acc y = entering;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const Acc x = sources[offset(i)];
      Acc next;
      if constexpr (kGates) {
        next = plain_step(x, tile.gates()[offset(i, -1)], y);
      } else {
        if (kForm == GradientsForm::kAny && tile.call.row_rates) gate = tile.row_gates()[offset(i)];
        next = gate.step(x, y);
      }
      y = cuts >> i & 1 ? x : next;
      visit(i, y);
    }
    return y;
  }
  // The scan takes the place of what is scanned.
  __device__ __forceinline__ void scan_in_place(Acc entering) const {
    const auto put = [&](int i, Acc y) { tile.sources()[offset(i)] = y; };
    if (has_gates()) scan<true>(entering, put);
    else scan<false>(entering, put);
  }
  __device__ __forceinline__ Segment<double> add_up() const {
    const auto nothing = [](int, Acc) {};
    const Acc total = has_gates() ? scan<true>(Acc(0), nothing) : scan<false>(Acc(0), nothing);
    return {static_cast<double>(total), product(), cuts != 0};
  }
  __device__ __forceinline__ double product() const {
    if (!has_gates()) {
      double gate = tile.call.rates.carried;
      if (kForm == GradientsForm::kAny && tile.call.row_rates) gate = whole_gate(tile.row_gates()[offset(0)]);
      return power_of<kRun>(gate);
    }
    const Acc* const gates = tile.gates();
    double all = 1.0;
    if constexpr (sizeof(Acc) > 4) {
#pragma unroll 1
      for (int i = 0; i < kRun; ++i) all = power_mul(all, gates[offset(i, -1)]);
    } else {  // four floats' product is within a double
#pragma unroll
      for (int i = 0; i < kRun; i += 4) {
        double some = gates[offset(i, -1)];
#pragma unroll
        for (int j = i + 1; j < i + 4; ++j) some *= static_cast<double>(gates[offset(j, -1)]);
        all = power_mul(all, some);
      }
    }
    return all;
  }
  static __device__ __forceinline__ double whole_gate(const Gate<float>& gate) { return whole_gamma(gate); }
  static __device__ __forceinline__ double whole_gate(const Gate<double>& gate) { return gate.value; }

  // By all threads, between barriers.
  __device__ __forceinline__ void run(uint64_t tag) const {
    Segment<double> segment = add_up();
    if (!works) segment = identity<double>();
    fold_segments_up<32>(segment, lane);
    if (lane == 31) tile.segments()[warp] = segment;
    const Segment<double> before = segment_before(segment);
    __syncthreads();
    if (warp == 0) carry_into_warps(tag);
    __syncthreads();
    if (!works) return;
    const double* const entering = tile.entering();
    // The last step before the tile, which has its result, too.
    if (part == 0 && tile.plan.before) tile.sources()[offset(0, -1)] = static_cast<Acc>(entering[0]);
    scan_in_place(static_cast<Acc>(after(before, entering[warp])));
  }

 private:
  // Of the lane before.
  __device__ __forceinline__ Segment<double> segment_before(const Segment<double>& segment) const {
    const Segment<double> before{shuffle_up(segment.total, 1), shuffle_up(segment.gates, 1),
        __shfl_up_sync(0xffffffffu, static_cast<int>(segment.closed), 1) != 0};
    return lane == 0 ? identity<double>() : before;
  }
  // By a warp.
  __device__ __forceinline__ void carry_into_warps(uint64_t tag) const {
    Segment<double> segment = lane < kGradientTileWarps ? tile.segments()[lane] : identity<double>();
    fold_segments_up<32>(segment, lane);
    double carry = 0.0;
    if (tile.plan.before)
      carry = GradientLookback{tile.plan, tile.params.words, tag, tile.tile, lane}.carry(
          segment_of_lane(segment, 31), tile.first_of_row());
    const Segment<double> before = segment_before(segment);
    if (lane < kGradientTileWarps) tile.entering()[lane] = after(before, carry);
  }
};

template <typename T, GradientsForm kForm>
__global__ void __launch_bounds__(kGradientTileThreads, sizeof(T) > 4 ? 2 : 4)
    gradients_tile_kernel(const __grid_constant__ GradientTileParams<T> params) {
  static_assert(kGradientTileThreads == kSlotThreads);
  extern __shared__ __align__(16) unsigned char gradients_shared[];
  __shared__ uint64_t tag;
  overlap_launches();
  if (params.plan.before && threadIdx.x == 0) tag = tag_of_launch(params.tag);
  const GradientTile<T, kForm> tile{params, gradients_shared};
  tile.make_all_sources();
  __syncthreads();
  GradientRun<T, kForm>(tile).run(tag);
  __syncthreads();
  tile.write_all_gradients();
}

}  // namespace dcs
