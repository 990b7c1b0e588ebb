// csrc/cuda/common/ptx/async_copy.cuh on a CPU, where kernels have bulk copies in its place.
#pragma once
