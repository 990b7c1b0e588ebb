// csrc/cuda/common/ptx/dependent_launch.cuh on a CPU, where a launch has ended before the next one begins.
#pragma once

namespace dcs {

inline void griddepcontrol_wait() {}
inline void launch_dependents() {}
inline void overlap_launches() {}

}  // namespace dcs
