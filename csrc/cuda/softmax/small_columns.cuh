// Softmax of columns of small tensors in registers, one read and one write, which latency bounds: one round trip to
// memory, at most one exchange between blocks, one store.
//
// Lane (slot, column) of a warp takes some steps of one column of a window, at any alignment and of any view, and asks
// for all of them at once. Neighboring lanes take neighboring columns, then neighboring steps: where a window is all
// columns, a warp reads a range. These are many instructions, but a thread leaves one part to join, where one of
// vectors leaves a part for each element.
//
// Slots join by shuffles: forward they find the largest first, so that each element takes one power and none is made
// for a factor. Warps meet in shared memory. In a cluster some of them join the block's parts and send them to all
// blocks, each of which joins those of all. Elements are numbered by 31 bits: addresses of 64 took more instructions
// than all else.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kSmallWarps = 16, kSmallBlocks = 16;  // of a block, and of a cluster, at most
constexpr int kSmallBatch = 4;                      // steps of a thread that one branch skips; parts joined at once
constexpr int kSmallSenders = 4;                    // warps that send a block's parts, one of each scheduler
constexpr int kSmallDirect = 8;                     // parts that each lane joins alone, at most
// Steps of a thread, at most: those of two tensors of doubles fit the registers.
template <typename T>
constexpr int kSmallSteps = sizeof(T) == 8 ? 12 : 24;

template <typename T>
struct SmallColumns {
  const T* input;
  const T* saved;
  T* output;
  int length, inner;
  int windows, width, slots;  // of an outer; columns of a window; slots of a warp, 32 / width
  int steps, each, blocks;    // of a block; of a thread, at most; blocks of a window
  int apart;                  // from a step of a thread to the next one, in elements
  int lanes, far;             // that have a slot; from a lane to the first one that it joins, 0 with one slot
  int joining;                // slots that join parts, 1, 2 or 4
  Divisor by_windows, by_width, by_groups;
  bool is_view;  // the input lies in runs, `gap` elements from each other
  Divisor by_run;
  int gap;
};

// A thread's column of a window, and its steps.
template <typename T>
struct SmallColumn {
  using Acc = typename Types<T>::Acc;
  static constexpr int kSteps = kSmallSteps<T>;
  const SmallColumns<T>& params;
  const int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32, width = params.width,
            slots = params.slots;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);  // so known to be all lanes'
  const int slot = static_cast<int>(params.by_width.of(lane)), column = lane - slot * width;
  int columns;  // of the window
  int count;    // steps
  int first;    // in elements
  uint32_t rank;

  __device__ __forceinline__ SmallColumn(const SmallColumns<T>& of, uint32_t window, uint32_t number)
      : params(of), rank(number) {
    const int outer = static_cast<int>(of.by_windows.of(window)), step = static_cast<int>(rank) * of.steps,
              begin = (static_cast<int>(window) - outer * of.windows) * width, group = warp * slots + slot;
    columns = min(width, of.inner - begin);
    const int steps = max(0, min(of.steps, of.length - step));
    count = is_there() ? static_cast<int>(of.by_groups.of(steps - group + warps * slots - 1)) : 0;
    first = (outer * of.length + step + group) * of.inner + begin + column;
  }
  __device__ __forceinline__ bool is_there() const { return slot < slots && column < columns; }

  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kSteps; k += kSmallBatch) {
      if (k >= params.each) break;
#pragma unroll
      for (int i = k; i < k + kSmallBatch; ++i) visit(i);
    }
  }
  __device__ __forceinline__ int at(int i) const { return first + i * params.apart; }

  // The largest of a column's slots; all of them get it. From a lane to the first one that it joins: `far`.
  __device__ __forceinline__ Acc largest_of_slots(Acc largest, int far) const {
#pragma unroll 1
    for (int apart = far; apart >= width; apart /= 2)
      largest = larger(largest, __shfl_down_sync(kAllLanes, largest, apart));
    return from_first_slot(largest);
  }
  // The sum, which the first slot gets, of the first `lanes`.
  __device__ __forceinline__ Acc total_of_slots(Acc total, int far, int lanes) const {
#pragma unroll 1
    for (int apart = far; apart >= width; apart /= 2) {
      const Acc other = __shfl_down_sync(kAllLanes, total, apart);
      if (lane + apart < lanes) total += other;
    }
    return total;
  }
  __device__ __forceinline__ Acc from_first_slot(Acc value) const {
    return slots == 1 ? value : __shfl_sync(kAllLanes, value, column);
  }

  // So many parts of each column of the window, joined; all lanes of the warp get it. Each lane takes all of a few
  // parts; of more up to four slots take some each, as shuffles take longer.
  template <bool kBackward>
  __device__ __forceinline__ Part<Acc> join(int parts, const Part<Acc>* from) const {
    constexpr int kAtOnce = sizeof(Acc) == 8 ? 2 : 4;
    const bool is_direct = parts <= kSmallDirect || slots == 1;
    const int joining = is_direct ? 1 : params.joining;
    Part<Acc> joined = join_every<kBackward, kAtOnce, Acc>(is_direct ? 0 : slot,
        is_direct || slot < joining ? parts : 0, joining, [&](int part) { return from[part * width + column]; });
    if (is_direct) return joined;
    const int far = joining / 2 * width;
    if constexpr (!kBackward) {
      const Acc largest = largest_of_slots(joined.largest, far);
      joined.total *= shifted_power(joined.largest, largest);
      joined.largest = largest;
    }
    joined.total = from_first_slot(total_of_slots(joined.total, far, joining * width));
    return joined;
  }
  // Some warps join the block's parts and send them to all blocks of the cluster.
  template <bool kBackward>
  __device__ __forceinline__ void send(
      const Part<Acc>* of_warps, const Part<Acc>* of_blocks, const uint64_t& arrivals) const {
    if (warp >= kSmallSenders) return;
    const Part<Acc> of_block = join<kBackward>(warps, of_warps);
    if (!is_there()) return;
    for (int to = warp * slots + slot; to < params.blocks; to += min(warps, kSmallSenders) * slots)
      send_part<kBackward>(of_blocks[rank * width + column], arrivals, to, of_block);
  }
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(32 * kSmallWarps, 1)
    softmax_small_columns_kernel(const __grid_constant__ SmallColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  using Column = SmallColumn<T>;
  __shared__ Part<Acc> of_warps[32 * kSmallWarps], of_blocks[32 * kSmallBlocks];
  __shared__ uint64_t arrivals;
  launch_dependents();
  const int blocks = params.blocks;
  const Column mine(params, blocks > 1 ? cluster_index() : blockIdx.x, blocks > 1 ? cluster_rank() : 0);
  griddepcontrol_wait();

  WordRegisters<T, 1> raw[Column::kSteps], saved[kBackward ? Column::kSteps : 1];
  const auto load = [&](const auto& place) {
    mine.each([&](int i) {
      raw[i].set(neutral<T, 1, kBackward>());
      raw[i].load_where(i < mine.count, params.input + place(mine.at(i)));
      if constexpr (kBackward) saved[i].load_where(i < mine.count, params.saved + mine.at(i));
    });
  };
  if (params.is_view)
    load([&](int at) { return at + static_cast<int>(params.by_run.of(static_cast<uint32_t>(at))) * params.gap; });
  else load([](int at) { return at; });
  if (blocks > 1)
    meet_cluster(arrivals, blocks * mine.columns * static_cast<int>(kBackward ? sizeof(Acc) : sizeof(Part<Acc>)));

  Acc x[Column::kSteps], y[kBackward ? Column::kSteps : 1];
  Part<Acc> part;
  mine.each([&](int i) {
    x[i] = cast<Acc>(raw[i].get().get(0));
    if constexpr (kBackward) part.total += x[i] * (y[i] = cast<Acc>(saved[i].get().get(0)));
    else part.largest = larger(part.largest, x[i]);
  });
  if constexpr (!kBackward) {
    part.largest = mine.largest_of_slots(part.largest, params.far);
    mine.each([&](int i) { part.total += x[i] = shifted_power(x[i], part.largest); });
  }

  part.total = mine.total_of_slots(part.total, params.far, params.lanes);
  Part<Acc> joined = part;
  if (blocks == 1 && mine.warps == 1) {
    joined.total = mine.from_first_slot(part.total);
  } else {
    if (mine.slot == 0) of_warps[mine.warp * mine.width + mine.column] = part;
    __syncthreads();
    if (blocks > 1) {
      wait_for_cluster();
      mine.template send<kBackward>(of_warps, of_blocks, arrivals);
      mbarrier_wait(&arrivals, 0);
    }
    joined = mine.template join<kBackward>(blocks > 1 ? blocks : mine.warps, blocks > 1 ? of_blocks : of_warps);
  }
  const Acc factor = kBackward ? Acc(1) : shifted_power(part.largest, joined.largest) * inverse(joined.total);
  mine.each([&](int i) {
    Acc value;
    if constexpr (kBackward) value = (x[i] - joined.total) * y[i];
    else value = x[i] * factor;
    Vector<T, 1> rounded;
    rounded.set(0, cast<T>(value));
    raw[i].set(rounded);
    raw[i].store_where(i < mine.count, params.output + mine.at(i));
  });
}

}  // namespace dcs
