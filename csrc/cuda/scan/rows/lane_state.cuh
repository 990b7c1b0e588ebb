// What a lane knows of its elements of a slice (lane_passes.cuh).
#pragma once

#include <type_traits>

#include "scan/carry/segment.cuh"

namespace dcs {

// A lane's recurrence: float data in double, half precision in float, as the carries of others.
template <typename T>
using LaneAcc = std::conditional_t<sizeof(T) == 2, float, typename Types<T>::Wide>;

enum class Pass { kPlain, kCut, kGeneral };  // no cut in the warp; cuts; those, with gammas or initial values of rows

// What a lane has to ask of others' slices: before its tile has come, for memory answers late.
template <typename T>
struct LaneEdges {
  T gate_before, saved_after;
  bool reset_before;
};

// What rows have of their own: the next one's gamma, the initial values of the one at hand and of the next one.
template <typename T>
struct RowNumbers {
  typename Types<T>::Wide next_gamma;
  T initial, next_initial;
};

// Where the recurrence starts anew in a lane.
struct LaneCuts {
  int64_t row;      // of the element before the first one
  uint64_t starts;  // bits of elements, in the order of the scan: a row starts; one bit beyond the lane's own
  uint64_t cuts;    // a row starts, or a reset
  uint64_t resets;  // the reset flag of the element itself
};

// Powers of a row's gamma over 1, 2, 4, ... lanes, and over the lanes before this one.
template <typename Wide>
struct LanePowers {
  Wide powers[6], weight;
};

// What the second pass wants of the first one.
template <typename T>
struct LaneState {
  using Wide = typename Types<T>::Wide;
  Pass pass;
  bool enters;          // no cut lies in the warp's lanes before
  Wide before, weight;  // their total, and what takes a carry over them
  Wide gamma;           // of the first element's row
  LaneEdges<T> edges;   // the lane's own
};

// A row's part of gamma's gradient in a lane: before the first start, after the last.
template <typename Acc>
struct LaneSums {
  Acc head, tail;
};

}  // namespace dcs
