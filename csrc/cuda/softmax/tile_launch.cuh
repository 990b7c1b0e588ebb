// Which tiles a softmax of columns takes (launch.cuh has the table).
#pragma once

#include "softmax/slab_launch.cuh"

namespace dcs {

template <typename T>
class TileLaunch : protected SlabLaunch<T> {
 protected:
  using Base = SlabLaunch<T>;
  using Base::Base;
  using Base::device_;
  using Base::elements;
  using Base::groups_of;
  using Base::is_view;
  using Base::kHalf;
  using Base::kSize;
  using Base::kSlabStepBytes;
  using Base::kVec;
  using Base::launch_cluster_tiles;
  using Base::launch_groups;
  using Base::leaves_idle;
  using Base::p_;
  using Base::resident_blocks;
  using Base::resident_bytes;
  using Base::run_slabs;
  using Base::run_streamed;
  using Base::shared_of;
  using Base::slab_unit;
  using Base::tiles;
  using Base::whole;

  // Bytes of a column vector, and of a block, that more blocks are not worth it for; of a wide window, at most; of a
  // tensor that is large.
  static constexpr int64_t kShortLine = 4 << 10, kShortBytes = 8 << 10, kWideBytes = 28 << 10, kLargeBytes = 16 << 20;

  // Windows of a view that the blocks of a group hold, several groups at once: read twice, it would be copied first.
  // Without gaps they are as fast read twice. A window of 256 bytes where it begins inside of a sector of 32, as those
  // that a cluster holds, or of 128, of which a group holds twice as many steps.
  std::optional<cudaError_t> run_windows_together() {
    if (p_.inner * kSize % 32 != 0)
      if (const auto error = run_windows_together(16)) return error;
    return run_windows_together(8);
  }
  std::optional<cudaError_t> run_windows_together(int64_t across) {
    SoftmaxTiles<T> params = tiles();
    params.tiles = set_across(params, across);
    const int64_t columns = across * kVec, down = kTileThreads / across, room = shared_of(3),
                  beside = column_parts<T>(across, kTileThreads) + across * (kVec + 1);
    // The exchange's parts are a guess until the blocks are known.
    const int64_t most_each =
        (room - resident_bytes(0, beside + columns + resident_blocks())) / (resident_bytes(1, 0) * kTileThreads);
    if (most_each < 1) return std::nullopt;
    const int64_t least = ceil_div(p_.length, most_each * down);
    const auto groups = groups_of(params.tiles, least, resident_blocks(),
        std::min(resident_blocks() / params.tiles, ceil_div(p_.length, 2 * down)));
    if (!groups) return std::nullopt;
    params.down = static_cast<int>(down);
    params.by_down = Divisor(static_cast<uint32_t>(down));
    params.each = static_cast<int>(ceil_div(ceil_div(p_.length, groups->blocks), down));
    params.chunk = down * params.each;
    params.chunks = ceil_div(p_.length, params.chunk);
    const int64_t shared =
        resident_bytes(params.each * kTileThreads, beside + group_exchange_parts(columns, params.chunks));
    if (shared > room) return std::nullopt;
    return launch_groups(
        softmax_resident_kernel<T, false, ViewWindow>, params, groups->groups, columns, kTileThreads, shared);
  }

  // Takes windows of `across` vectors; the result is how many.
  int64_t set_across(SoftmaxTiles<T>& params, int64_t across) const {
    params.across_bits = 0;
    while (1 << params.across_bits < across) ++params.across_bits;
    params.unit = static_cast<int>(kVec / std::gcd<int64_t>(p_.inner, kVec));
    if (whole(p_.inner)) return ceil_div(p_.outer * (p_.inner / kVec), across);
    params.windows = ceil_div(p_.inner, (across - 1) * kVec);
    return p_.outer * params.windows;
  }

  // Windows of `across` vectors, resident in clusters of so many blocks, if these have `room` bytes each.
  std::optional<cudaError_t> run_cluster_tiles(int64_t across, int cluster, int64_t room) const {
    SoftmaxTiles<T> params = tiles();
    const int64_t count = set_across(params, across);
    const int64_t vectors = p_.outer * p_.length * ceil_div(p_.inner, kVec), share = ceil_div(p_.length, cluster);
    // Of a thread, if a block has threads enough: more where joining their parts counts beside what they take.
    const int64_t each = std::clamp<int64_t>(
        vectors / (int64_t{2} * kTileThreads * device_.multiprocessors), 1, kHalf && !p_.backward ? 12 : 8);
    const int64_t rows = std::max<int64_t>(32 / across, 1) * params.unit;  // steps that `down` is a multiple of
    const int64_t down = round_up(std::min(ceil_div(share, each), kTileThreads / across), rows),
                  threads = across * down;
    params.down = static_cast<int>(down);
    params.by_down = Divisor(static_cast<uint32_t>(down));
    params.chunk = round_up(share, down), params.chunks = cluster;
    params.each = static_cast<int>(params.chunk / down);
    const int64_t shared = resident_bytes(
        params.each * threads, column_parts<T>(across, threads) + cluster_exchange_parts(across * kVec, cluster));
    if (threads > kTileThreads || shared > room) return std::nullopt;
    // Those of no whole vectors are faster as slabs, which more blocks hold.
    if (!whole(p_.inner) && slab_unit() <= kTileThreads && leaves_idle(count * cluster, params.each * threads))
      return std::nullopt;
    if (is_view())
      return launch_cluster_tiles(
          softmax_cluster_tiles_kernel<T, false, ViewWindow>, params, count, threads, shared, cluster);
    return launch_cluster_tiles(
        this->template cluster_tiles_kernel<ColumnWindow>(), params, count, threads, shared, cluster);
  }

  // Windows that a block or a cluster has room for.
  std::optional<cudaError_t> run_windows() const {
    const int64_t line = p_.length * (p_.backward ? 32 : 16);  // bytes of a column vector
    const int64_t vectors = p_.outer * ceil_div(p_.inner, kVec);
    const int most = std::min(device_.cluster, 8);
    // A window is 128 bytes of a step, or 256 where it begins inside of a sector of 32. Narrower ones, and clusters, if
    // the device is not busy otherwise, or a cluster has no room; where windows overlap, that is worth it only beside
    // the launches of another kernel.
    const bool large = elements() * kSize >= kLargeBytes;
    const int64_t narrowest = whole(p_.inner) ? 4 : large ? 16 : 8;
    int64_t across = p_.inner * kSize % 32 == 0 ? 8 : 16;
    if (vectors * most <= 8 * device_.multiprocessors && line > kShortLine) across = std::min(across, narrowest);
    int least = 1;
    while (least < most && vectors * least < across * device_.multiprocessors && line * across > kShortBytes * least)
      least *= 2;
    // Wider ones for short columns.
    for (int64_t wide = 32; least == 1 && wide > across; wide /= 2)
      if (wide * line <= kWideBytes && vectors >= wide * device_.multiprocessors)
        if (const auto error = run_cluster_tiles(wide, 1, shared_of(3))) return error;
    for (int64_t narrow = across; narrow >= narrowest; narrow /= 2) {
      for (int cluster = least; cluster <= most; cluster *= 2)
        if (const auto error = run_cluster_tiles(narrow, cluster, shared_of(3))) return error;
      if (const auto error = run_cluster_tiles(narrow, most, shared_of(2))) return error;
      // Half precision has too much to compute for a block alone on its multiprocessor.
      if (!kHalf && !whole(p_.inner) && large)
        if (const auto error = run_cluster_tiles(narrow, most, shared_of(1))) return error;
    }
    for (int64_t narrow = across; narrow >= narrowest; narrow /= 2)
      if (const auto error = run_cluster_tiles(narrow, device_.cluster, shared_of(3))) return error;
    return std::nullopt;
  }

  cudaError_t run_columns() {
    if (const std::optional<cudaError_t> error = run_windows()) return *error;
    // Slabs are read in whole vectors, which windows overlap. Short steps leave lanes of a window without a vector.
    if ((!whole(p_.inner) || p_.inner * kSize <= kSlabStepBytes) && slab_unit() <= kTileThreads) return run_slabs();
    const std::optional<cudaError_t> error = run_streamed();
    return error ? *error : run_column_chunks();
  }

  cudaError_t run_column_chunks() {
    SoftmaxTiles<T> params = tiles();
    const int64_t across = p_.inner >= 128 * kVec ? 32 : 16;
    params.down = static_cast<int>(kTileThreads / across);
    params.by_down = Divisor(static_cast<uint32_t>(params.down));
    const int64_t count = set_across(params, across), round = params.down * kGroupVectors<T>,
                  rounds = ceil_div(p_.length, round);
    const int64_t wanted =
        std::clamp<int64_t>(ceil_div(4 * device_.multiprocessors, count), 1, std::min<int64_t>(128, rounds));
    params.chunk = ceil_div(rounds, wanted) * round;
    params.chunks = ceil_div(p_.length, params.chunk);
    return this->template launch_chunks<ColumnWindow>(
        params, count, across * kVec, column_parts<T>(across, kTileThreads));
  }
};

}  // namespace dcs
