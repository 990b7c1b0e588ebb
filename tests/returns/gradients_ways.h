// The kernels by which gradients of returns are made, each as it is launched, on a CPU (gradients_on_cpu.cpp).
#pragma once

#include "emulation.h"
#include "trials.h"
#include "gradients_cases.h"
#include "scan_on_cpu.h"
#include "dcs/limits.h"
#include "returns/gradients/stages.cuh"
#include "returns/gradients/flat_rows.cuh"
#include "returns/gradients/tile_columns.cuh"
#include "returns/gradients/flat_columns.cuh"
#include "returns/few_steps/kernel.cuh"
#include "returns/n_step_blocks.cuh"
#include "returns/n_step_windows.cuh"
#include "returns/serial_columns/kernel.cuh"

namespace gradients {

using namespace dcs;

template <typename T>
class Ways {
 protected:
  using Acc = typename Types<T>::Acc;

  explicit Ways(const Case& of) : c(of), random(of.seed) {}

  bool takes(Way way) const {
    if (way == Way::kThreeLaunches) return true;
    if (way == Way::kWindowBlocks) return scans_one_gradient(gradients);
    if (way >= Way::kFlatRows)
      return !c.n && is_contiguous(as_scan(gradients)) && GradientsShape(gradients).time_is_fast;
    if (c.n || GradientsShape(gradients).time_is_fast) return false;
    const ReturnsProblem scan = mirrored(as_scan(gradients));
    const bool is_plain = column_form(scan) == ColumnForm::kGradients;
    if (way == Way::kSerialPairs) return sizeof(T) == 2 && is_plain && columns_pair(scan);
    if (way == Way::kTileColumns && !plan_tiles(scan, 8, true, 227 << 10, false)) return false;
    if (way == Way::kSmallTiles) return plan_small_tiles(scan, {64, 227 << 10, 16}).has_value();
    if (way == Way::kFlatColumns) return plan_flat_columns(1, false).has_value();
    return way != Way::kFewSteps || (sizeof(T) < 8 && !(c.row_double && has_row_rates(scan)));
  }
  bool run_kernels(Way way) {
    if (way >= Way::kFlatRows) return run_flat(way == Way::kLinkedRows);
    if (way > Way::kWindowBlocks) {
      const ReturnsProblem scan = mirrored(as_scan(gradients));
      return (way == Way::kFewSteps ? few_form(scan) : column_form(scan)) == ColumnForm::kGradients
          ? run_columns<ColumnForm::kGradients>(way, scan)
          : run_columns<ColumnForm::kAnyGradients>(way, scan);
    }
    if (way == Way::kWindowBlocks) return run_windows();
    const GradientsMemory memory(gradients);
    std::vector<char> workspace(static_cast<size_t>(memory.bytes), 77);
    const GradientsParams<T> params(gradients, memory, workspace.data());
    const int64_t threads = ceil_div(gradients.count(), kSlots);
    if (memory.has_sources() && !launch(gradient_sources_kernel<T>, params, threads, kSlotThreads)) return false;
    trials::run_scan(scan_of(gradients, memory, workspace.data()));
    return by_form(params.form,
        [&](auto form) { return launch(gradients_kernel<T, decltype(form)::value>, params, threads, kSlotThreads); });
  }

  const Case c;
  std::mt19937 random;
  ReturnsGradientsProblem gradients{};

 private:
  std::optional<ResidentColumnsPlan> plan_flat_columns(int64_t multiprocessors, bool has_clusters) const {
    const auto plan = plan_tiles(as_scan(gradients), multiprocessors, has_clusters, 227 << 10, true);
    return plan && plan->flat ? plan : std::nullopt;
  }
  // As a scan of columns, of either form.
  template <ColumnForm kForm>
  bool run_columns(Way way, const ReturnsProblem& scan) {
    if (way == Way::kTileColumns || way == Way::kFlatColumns) return run_tile_columns<kForm>(way, scan);
    if constexpr (sizeof(T) < 8 && kForm == ColumnForm::kGradients) {
      if (way == Way::kSmallTiles) return run_small_tiles(scan);
    }
    if (way == Way::kFewSteps) {
      if constexpr (sizeof(T) < 8) {
        constexpr int kWidest = few_returns_wide(sizeof(T), kForm);
        const int wide = few_returns_word(scan);
        if (kWidest > 1 && wide == kWidest) return run_few<kWidest, kForm>(scan);
        const bool are_two = c.length <= 2 && random() % 4;
        if constexpr (sizeof(T) == 2) {
          if (wide == 2) return are_two ? run_few<2, kForm, true>(scan) : run_few<2, kForm>(scan);
        }
        return are_two ? run_few<1, kForm, true>(scan) : run_few<1, kForm>(scan);
      }
    }
    if constexpr (sizeof(T) == 2 && kForm == ColumnForm::kGradients) {
      if (way == Way::kSerialPairs) return run_serial<2, kForm>(scan);
    }
    return run_serial<1, kForm>(scan);
  }
  template <int kUnit, ColumnForm kForm>
  bool run_serial(const ReturnsProblem& scan) const {
    const auto params = returns_column_params<T>(scan, kUnit);
    return emulation::launch(ceil_div(params.cells, kSerialReturnsThreads), kSerialReturnsThreads, 0, false, c.seed,
        [&] { returns_serial_columns_kernel<T, kUnit, kForm>(params); });
  }
  template <int kWide, ColumnForm kForm, bool kTwo = false>
  bool run_few(const ReturnsProblem& scan) const {
    const auto params = few_returns_params<T>(scan, kWide, kTwo);
    return emulation::launch(ceil_div(params.call.cells, kFewReturnsBlock), kFewReturnsBlock, 0, false, c.seed,
        [&] { few_returns_kernel<T, kWide, kForm, kTwo>(params); });
  }
  template <ColumnForm kForm>
  bool run_tile_columns(Way way, const ReturnsProblem& mirror) {
    const auto multiprocessors = static_cast<int64_t>(1 + random() % 40);
    const bool is_flat = way == Way::kFlatColumns, has_clusters = random() % 2;
    const ReturnsProblem scan = is_flat ? as_scan(gradients) : mirror;
    const auto plan = is_flat ? plan_flat_columns(multiprocessors, has_clusters)
                              : plan_tiles(scan, multiprocessors, has_clusters, 227 << 10, false);
    if (!plan) return false;
    std::vector<Word> words(static_cast<size_t>(plan->workspace_bytes / 16) + 1, Word{7, 7});
    uint32_t launches = 0;
    const auto params =
        tile_columns_params<T>(scan, *plan, words.data(), {2 * uint64_t{random()}, random() % 3 ? nullptr : &launches});
    return emulation::launch(
        plan->strips * plan->tiles, kColumnThreads, plan->shared_bytes, plan->tiles > 1, c.seed, [&] {
          if (is_flat) flat_gradient_columns_kernel<T, kForm>(params);
          else gradients_tile_columns_kernel<T, kForm>(params);
        });
  }
  bool run_small_tiles(const ReturnsProblem& mirror) {
    auto plan = plan_small_tiles(mirror, {64, 227 << 10, random() % 3 ? 16 : 0});
    if (!plan) plan = plan_small_tiles(mirror, {64, 227 << 10, 16});
    const auto params = small_tile_params<T>(mirror, *plan);
    return emulation::launch(
        plan->blocks, 32 * plan->warps, 0, plan->cluster > 1, c.seed, [&] { small_gradient_columns_kernel<T>(params); },
        plan->cluster);
  }
  // Rows as they are planned, in clusters or not, or in small tiles that no cluster holds.
  bool run_flat(bool are_linked) {
    const ReturnsProblem scan = with_rows_together(as_scan(gradients));
    const auto found = random() % 4 ? plan_flat_returns(scan, static_cast<int64_t>(1 + random() % 40), 224 << 10, 16)
                                    : plan_flat_returns(scan, static_cast<int64_t>(1 + random() % 40), 96 << 10, 1);
    if (!found) return false;
    constexpr int kMany = flat_vectors(sizeof(T));
    FlatReturnsPlan plan = *found;
    if (are_linked) {
      const FlatReturnsSizes sizes{sizeof(T), sizeof(Acc), random() % 2 ? 1 : kMany};
      plan = *plan_linked_returns(scan, sizes, 224 << 10, 1 + random() % 3, 1 + static_cast<int>(random() % 3));
    }
    switch (flat_form(scan)) {
      case FlatForm::kGradients: return run_flat<FlatForm::kGradients>(scan, plan);
      case FlatForm::kRowGradients: return run_flat<FlatForm::kRowGradients>(scan, plan);
      case FlatForm::kStepGradients: return run_flat<FlatForm::kStepGradients>(scan, plan);
      default: return run_flat<FlatForm::kAnyGradients>(scan, plan);
    }
  }
  template <FlatForm kForm>
  bool run_flat(const ReturnsProblem& scan, const FlatReturnsPlan& plan) {
    return plan.vectors == 1 ? run_flat<kForm, 1>(scan, plan) : run_flat<kForm, flat_vectors(sizeof(T))>(scan, plan);
  }
  template <FlatForm kForm, int kVectors>
  bool run_flat(const ReturnsProblem& scan, const FlatReturnsPlan& plan) {
    std::vector<Word> words(static_cast<size_t>(plan.workspace_bytes / 16), Word{7, 7});
    uint32_t launches = 0;
    const auto params = flat_gradients_params<T>(
        scan, plan, words.data(), {2 * uint64_t{random()}, random() % 3 ? nullptr : &launches});
    return emulation::launch(
        plan.tiles, 32 * plan.warps, plan.shared_bytes, plan.cluster > 1 || (plan.is_linked() && random() % 2), c.seed,
        [&] { flat_gradients_kernel<T, kForm, kVectors>(params); }, plan.cluster);
  }
  // In float where that is enough for the window.
  bool run_windows() const {
    const auto plan = plan_gradient_scan(gradients, {1, 227 << 10, 16}, 1 << 10);
    if (!plan || !plan->scan.steps) return false;
    if (takes_n_step_windows(plan->scan) && c.seed % 4) return run_tiles_of_windows(plan->scan);
    if constexpr (sizeof(T) <= 4) {
      if (is_plain(plan->scan) && plan->scan.steps <= kFloatSteps && float_holds_window(plan->scan))
        return run_windows_in<Acc, true>(plan->scan);
    }
    return run_windows_in<double, false>(plan->scan);
  }
  bool run_tiles_of_windows(const ReturnsProblem& windows) const {
    const auto params = n_step_windows_params<T>(windows);
    return emulation::launch(ceil_div(params.count, params.outputs), kNStepWindowThreads, n_step_windows_bytes<T>(),
        false, c.seed, [&] { n_step_windows_kernel<T, true>(params); });
  }
  template <typename Number, bool kPlain>
  bool run_windows_in(const ReturnsProblem& windows) const {
    const auto params = n_step_blocks_params<T, Number>(windows, n_step_rates<Number>(windows));
    return emulation::launch(params.blocks(), kNStepThreads, params.shared_bytes(), false, c.seed,
        [&] { n_step_blocks_kernel<T, Number, kPlain, true>(params); });
  }
  bool launch(void (*kernel)(GradientsParams<T>), const GradientsParams<T>& params, int64_t count, int threads) const {
    return emulation::launch(ceil_div(count, threads), threads, 0, false, c.seed, [&] { kernel(params); });
  }
};

}  // namespace gradients
