// How small tensors' columns are cut into windows and those into blocks (launch.cuh has the table).
#pragma once

#include <limits>
#include <optional>

#include "softmax/launch_base.cuh"
#include "softmax/small_columns.cuh"

namespace dcs {

template <typename T>
class SmallLaunch : protected SoftmaxLaunchBase<T> {
 protected:
  using Base = SoftmaxLaunchBase<T>;
  using Base::Base;
  using Base::device_;
  using Base::elements;
  using Base::is_dependent;
  using Base::is_view;
  using Base::kSize;
  using Base::launch_clusters;
  using Base::p_;

  // Whether columns are few elements in all, which 31 bits number, also of a view.
  bool is_small() const {
    const int64_t most = (is_view() ? kViewElements : kSmallElements) * device_.multiprocessors;
    return p_.inner > 1 && elements() <= most && this->runs().span <= std::numeric_limits<int>::max();
  }
  // If threads can hold them.
  std::optional<cudaError_t> run_small() const {
    for (int most = std::min(device_.cluster, kSmallBlocks);; most = 8) {
      const Plan plan = best_plan(most);
      if (plan.each == 0) return std::nullopt;
      const auto error = run_plan(plan);
      if (error || plan.blocks <= 8) return error;
    }
  }

 private:
  // Elements of a small tensor to a multiprocessor, at most; of a view, as it is not copied first.
  static constexpr int64_t kSmallElements = 10000, kViewElements = 32000;
  // Bytes that memory gives at once; a request of one takes as long as of one and a half. Windows of less than a sector
  // ask for each several times: so many of a tensor to a multiprocessor, at most.
  static constexpr int64_t kSector = 32, kLeastRequest = 48, kMostSectors = 2000;
  // Steps of a thread, about, or two or three times as many.
  static constexpr int64_t kUsualSteps = kSmallSteps<T> / 3;

  // What decides between plans, in cycles of an H200. Instructions of a step of a thread, and all others, of which a
  // multiprocessor issues four a cycle if it has three warps for each.
  static constexpr int64_t kStepInstructions = kSize == 8 ? 50 : 20, kOtherInstructions = 150;
  static constexpr int64_t kIssued = 4, kBusyWarps = 12;
  // A shuffle and what is done with it; a few parts that a lane joins, and their instructions; an exchange in a
  // cluster.
  static constexpr int64_t kShuffleCycles = 35, kPartsCycles = 90, kPartsInstructions = 60, kExchangeCycles = 500;

  struct Plan {
    int64_t windows, width, blocks, warps;
    int64_t each = 0;  // steps of a thread, at most; 0: none holds them
    int64_t slots() const { return 32 / width; }
    int64_t joining() const { return slots() >= 4 ? 4 : slots() >= 2 ? 2 : 1; }
  };

  // Bytes from one step of the input to the next one.
  int64_t pitch() const {
    const int64_t gaps = is_view() && p_.run <= p_.inner ? std::max<int64_t>(0, p_.inner / p_.run * p_.gap) : 0;
    return (p_.inner + gaps) * kSize;
  }
  // Sectors that all windows ask for of one tensor. Steps of a window that share sectors are of one warp.
  int64_t sectors(const Plan& plan) const {
    const int64_t bytes = plan.width * kSize, places = bytes | pitch() | kSector, grain = places & -places,
                  of_step = std::min(std::max(bytes + kSector - grain, kLeastRequest), pitch());
    return p_.outer * p_.length * plan.windows * of_step / kSector;
  }
  // What a plan takes, about, beside what all do.
  int64_t cycles(const Plan& plan) const {
    const int64_t multiprocessors = device_.multiprocessors, blocks = p_.outer * plan.windows * plan.blocks,
                  warps = ceil_div(blocks, multiprocessors) * plan.warps, busy = std::min(blocks, multiprocessors);
    // A multiprocessor gets two sectors a cycle, all together three for four of them.
    const int64_t memory =
        sectors(plan) * (p_.backward ? 3 : 2) / std::max<int64_t>(1, std::min(2 * busy, 3 * multiprocessors / 4));
    const int64_t instructions = round_up(plan.each, kSmallBatch) * kStepInstructions + kOtherInstructions;
    int64_t joins = join_cycles(plan, plan.blocks > 1 ? plan.blocks : plan.warps, warps);
    if (plan.blocks > 1) joins += kExchangeCycles + join_cycles(plan, plan.warps, kSmallSenders);
    return memory + std::max(warps, kBusyWarps) * instructions / kIssued + shuffle_cycles(plan.slots()) + joins;
  }
  int64_t shuffle_cycles(int64_t slots) const {
    int64_t levels = 0;
    while (int64_t{1} << levels < slots) ++levels;
    return levels * (p_.backward ? 1 : 2) * kShuffleCycles;
  }
  // Of parts of a block's warps, or a cluster's blocks, by so many warps.
  int64_t join_cycles(const Plan& plan, int64_t parts, int64_t warps) const {
    const int64_t joining = parts <= kSmallDirect ? 1 : plan.joining();
    return ceil_div(ceil_div(parts, joining), kSmallBatch) *
        std::max(kPartsCycles, warps * kPartsInstructions / kIssued) +
        shuffle_cycles(joining);
  }

  // About so many windows, of whole sectors where steps are.
  Plan windows_of(int64_t about) const {
    constexpr int64_t kSectorElements = kSector / kSize;
    Plan plan{};
    plan.width = ceil_div(p_.inner, about);
    if (p_.inner % kSectorElements == 0 && plan.width > kSectorElements)
      plan.width = round_up(plan.width, kSectorElements);
    plan.windows = ceil_div(p_.inner, plan.width);
    return plan;
  }
  // Blocks and windows are not made more once there are enough for all multiprocessors.
  Plan best_plan(int most_blocks) const {
    Plan best{};
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t about = ceil_div(p_.inner, int64_t{32});; about *= 2) {
      Plan plan = windows_of(about);
      const int64_t tiles = p_.outer * plan.windows;
      const bool is_narrow = plan.width * kSize < std::min(kSector, p_.inner * kSize);
      if (is_narrow && sectors(plan) > kMostSectors * device_.multiprocessors) return best;
      for (plan.blocks = 1; plan.blocks <= most_blocks; plan.blocks *= 2) {
        const int64_t steps = ceil_div(p_.length, plan.blocks);
        for (int64_t usual = kUsualSteps; usual <= kSmallSteps<T>; usual += kUsualSteps) {
          plan.warps = std::min<int64_t>(ceil_div(steps, plan.slots() * usual), kSmallWarps);
          plan.each = ceil_div(steps, plan.warps * plan.slots());
          if (plan.each > kSmallSteps<T>) break;
          const int64_t cost = cycles(plan);
          if (cost < least) best = plan, least = cost;
          if (plan.warps == 1) break;
        }
        if (best.each > 0 && tiles * plan.blocks >= device_.multiprocessors) break;
      }
      if (plan.width == 1 || (best.each > 0 && tiles >= device_.multiprocessors)) return best;
    }
  }

  std::optional<cudaError_t> run_plan(const Plan& plan) const {
    auto params = this->template operands<SmallColumns<T>>();
    const int64_t groups = plan.warps * plan.slots(), grid = p_.outer * plan.windows * plan.blocks;
    params.length = static_cast<int>(p_.length), params.inner = static_cast<int>(p_.inner);
    params.windows = static_cast<int>(plan.windows), params.width = static_cast<int>(plan.width);
    params.slots = static_cast<int>(plan.slots());
    params.steps = static_cast<int>(ceil_div(p_.length, plan.blocks));
    params.each = static_cast<int>(plan.each), params.blocks = static_cast<int>(plan.blocks);
    params.lanes = params.slots * params.width;
    for (int slots = 1; slots < params.slots; slots *= 2) params.far = slots * params.width;
    params.joining = static_cast<int>(plan.joining());
    params.apart = static_cast<int>(groups * p_.inner);
    params.by_windows = Divisor(static_cast<uint32_t>(plan.windows));
    params.by_width = Divisor(static_cast<uint32_t>(plan.width));
    params.by_groups = Divisor(static_cast<uint32_t>(groups));
    params.is_view = is_view();
    if (is_view()) params.by_run = Divisor(static_cast<uint32_t>(p_.run)), params.gap = static_cast<int>(p_.gap);
    const auto kernel = p_.backward ? softmax_small_columns_kernel<T, true> : softmax_small_columns_kernel<T, false>;
    return launch_clusters(is_dependent(grid), kernel, params, grid, 32 * plan.warps, 0, static_cast<int>(plan.blocks));
  }
};

}  // namespace dcs
