// Launches gradients as a temporal difference scan that begins with a row's first step (`as_scan`,
// dcs/returns/gradients_plan.h).
#pragma once

#include "returns/few_steps/launch.cuh"
#include "returns/flat_rows/launch.cuh"
#include "returns/gradients/flat_columns.cuh"
#include "returns/gradients/flat_rows.cuh"
#include "returns/gradients/launch.h"
#include "returns/gradients/tile_columns.cuh"
#include "returns/n_step_shared_launch.cuh"
#include "returns/serial_columns/launch.cuh"
#include "returns/tile_columns/launch.cuh"

namespace dcs {

template <typename T, FlatForm kForm>
cudaError_t launch_gradient_rows(
    const GradientScanPlan& plan, const Device& device, void* workspace, cudaStream_t stream) {
  const auto params = [&](const CallTag& tag) {
    return flat_gradients_params<T>(plan.scan, *plan.rows, workspace, tag);
  };
  const auto kernel = plan.rows->vectors == 1 ? flat_gradients_kernel<T, kForm, 1>
                                              : flat_gradients_kernel<T, kForm, flat_vectors(sizeof(T))>;
  return launch_flat_rows(kernel, params, *plan.rows, device, workspace, stream);
}

// By threads that take columns serially, or several of few steps.
template <typename T, ColumnForm kForm>
cudaError_t launch_serial_gradients(
    const ReturnsProblem& scan, bool are_few, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (are_few) return launch_few_returns_in<T, kForm>(scan, few_returns_word(scan), device, stream);
  }
  if constexpr (sizeof(T) == 2 && kForm == ColumnForm::kGradients) {
    if (takes_serial_pairs(scan, device)) return launch_serial_returns_as<T, 2, kForm>(scan, device, stream);
  }
  return launch_serial_returns_as<T, 1, kForm>(scan, device, stream);
}

template <typename T, ColumnForm kForm>
auto gradient_tiles_of(bool flat) {
  return flat ? flat_gradient_columns_kernel<T, kForm> : gradients_tile_columns_kernel<T, kForm>;
}

template <typename T>
cudaError_t launch_gradient_scan(
    const GradientScanPlan& plan, const Device& device, void* workspace, cudaStream_t stream) {
  if (plan.scan.steps) return launch_shared_windows<T, true>(plan.scan, device, stream);
  if (plan.rows) {
    switch (flat_form(plan.scan)) {
      case FlatForm::kGradients: return launch_gradient_rows<T, FlatForm::kGradients>(plan, device, workspace, stream);
      case FlatForm::kRowGradients:
        return launch_gradient_rows<T, FlatForm::kRowGradients>(plan, device, workspace, stream);
      case FlatForm::kStepGradients:
        return launch_gradient_rows<T, FlatForm::kStepGradients>(plan, device, workspace, stream);
      default: return launch_gradient_rows<T, FlatForm::kAnyGradients>(plan, device, workspace, stream);
    }
  }
  const ReturnsProblem& scan = plan.scan;
  const bool are_few = !plan.tiles && takes_few_returns(scan, device.multiprocessors);
  const bool is_plain = (are_few ? few_form(scan) : column_form(scan)) == ColumnForm::kGradients;
  if (plan.tiles) {
    if constexpr (sizeof(T) <= 4) {
      if (plan.tiles->small)
        return launch_small_tiles<T>(small_gradient_columns_kernel<T>, scan, *plan.tiles->small, stream);
    }
    const ResidentColumnsPlan& tiles = *plan.tiles->resident;
    const auto kernel = is_plain ? gradient_tiles_of<T, ColumnForm::kGradients>(tiles.flat)
                                 : gradient_tiles_of<T, ColumnForm::kAnyGradients>(tiles.flat);
    return launch_tile_columns<T>(kernel, scan, tiles, workspace, stream);
  }
  return is_plain ? launch_serial_gradients<T, ColumnForm::kGradients>(scan, are_few, device, stream)
                  : launch_serial_gradients<T, ColumnForm::kAnyGradients>(scan, are_few, device, stream);
}

}  // namespace dcs
