// Where the operands of a tile of columns lie in shared memory, each of which is one contiguous range of memory
// (cuda/returns/tile_columns/flat.cuh). Host code without CUDA or torch types.
#pragma once

#include <cstdint>

#include "dcs/returns/plan.h"

namespace dcs {

// Operands, then results.
enum TileTensorOf {
  kRewardsTensor,
  kValuesTensor,
  kNextTensor,
  kRhosTensor,
  kTerminatedTensor,
  kTruncatedTensor,
  kGammaTensor,
  kTraceTensor,
  kTileOperands,
  kAdvantagesTensor = kTileOperands,
  kTargetsTensor,
  kPgTensor,
  kTileTensors
};

// Null: not there.
struct TileTensor {
  char* data = nullptr;  // of the whole tensor
  int row_bytes = 0;     // of a step
  int more = 0;          // steps behind a tile that are copied, too
  int slot = 0;          // in shared memory, of the vector of 16 bytes in which the tile begins
};
struct TileTensors {
  TileTensor of[kTileTensors];
  int64_t bytes = 0;
};

// Of a tile of so many steps. A tensor's part begins as far behind a whole vector as it does in memory; results take
// the place of operands that they agree with in that.
inline TileTensors tile_tensors(const ReturnsProblem& p, int64_t steps) {
  TileTensors tensors;
  const int64_t bytes = bytes_of(p.dtype);
  const auto add_slot = [&](TileTensor& tensor) {
    tensor.slot = static_cast<int>(tensors.bytes);
    tensors.bytes += (tensor.row_bytes * (steps + tensor.more) + 30) / 16 * 16;
  };
  const auto add = [&](TileTensorOf which, const ReturnsInput& input, int64_t size, int more = 0) {
    if (!input.data) return;
    tensors.of[which] = {static_cast<char*>(const_cast<void*>(input.data)), static_cast<int>(p.inner * size), more, 0};
    add_slot(tensors.of[which]);
  };
  // Values of next states alone are read as the only ones.
  const bool has_own = p.values.data && !p.values_are_next, is_one = !p.is_gradient && !has_own && p.next_values.data;
  add(kRewardsTensor, p.rewards, bytes);
  add(kValuesTensor, is_one ? p.next_values : p.values, bytes, p.next_values.data || p.is_gradient ? 0 : 1);
  if (!is_one) add(kNextTensor, p.next_values, bytes);
  add(kRhosTensor, p.rhos, bytes);
  add(kTerminatedTensor, p.terminated, p.terminated_is_bool ? 1 : bytes);
  add(kTruncatedTensor, p.truncated, p.truncated_is_bool ? 1 : bytes);
  if (p.gamma.kind == GammaKind::kStep) add(kGammaTensor, p.gamma.tensor, bytes_of(p.gamma.dtype));
  if (p.trace.kind == GammaKind::kStep) add(kTraceTensor, p.trace.tensor, bytes_of(p.trace.dtype));
  bool is_taken[kRhosTensor + 1] = {};
  const auto add_result = [&](TileTensorOf which, const ReturnsOutput& output) {
    if (!output.data) return;
    TileTensor& tensor = tensors.of[which];
    tensor = {static_cast<char*>(output.data), static_cast<int>(p.inner * bytes), 0, 0};
    const auto offset = [](const TileTensor& of) { return reinterpret_cast<uintptr_t>(of.data) % 16; };
    for (int i = 0; i <= kRhosTensor; ++i) {
      if (is_taken[i] || !tensors.of[i].data || offset(tensors.of[i]) != offset(tensor)) continue;
      is_taken[i] = true;
      tensor.slot = tensors.of[i].slot;
      return;
    }
    add_slot(tensor);
  };
  add_result(kAdvantagesTensor, p.advantages);
  add_result(kTargetsTensor, p.targets);
  add_result(kPgTensor, p.pg_advantages);
  return tensors;
}

}  // namespace dcs
