"""Small scans that between them launch every CUDA kernel that scans; those whose blocks or warps wait for each other in
each of their forms, long enough that their slots in shared memory are used again. For tools under which the whole
suite would take hours.

    compute-sanitizer --tool racecheck --kernel-name kernel_substring=3dcs python tests/scan/cuda_cases.py [KERNEL ...]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from torch_dcs_ops import discounted_cumsum

HALF, BFLOAT, FLOAT, DOUBLE, COMPLEX = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64


@dataclass(frozen=True)
class Problem:
    """A scan in both directions, with its gradients where `backward`."""

    # That it takes on an H200 (132 multiprocessors), the backward's behind the forward's where it takes another.
    kernels: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gamma: str | float = 0.99  # or "row", "step"; or "constant step", which has no gradient
    dim: int = -1
    backward: bool = False
    reset: bool = False
    initial: bool = False
    window: int | None = None
    gap: int = 0  # of the input, elements before each row

    def run(self) -> None:
        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, dtype=self.dtype, device="cuda").requires_grad_(self.backward)

        def gates(shape: tuple[int, ...]) -> torch.Tensor:
            dtype = torch.float32 if self.gamma == "row" and not self.dtype.is_complex else self.dtype
            drawn = (0.8 + 0.2 * torch.rand(shape, dtype=dtype.to_real(), device="cuda")).to(dtype)
            if self.gamma != "row":
                drawn.view(-1)[::1013] = 0
            return drawn.requires_grad_(self.backward and self.gamma != "constant step")

        x = draw((*self.shape[:-1], self.shape[-1] + self.gap))[..., self.gap :]
        gamma: float | torch.Tensor
        if isinstance(self.gamma, float):
            gamma = torch.tensor(self.gamma, device="cuda", requires_grad=True) if self.backward else self.gamma
        else:
            gamma = gates(x.narrow(self.dim, 0, 1).shape if self.gamma == "row" else self.shape)
        initial = draw(x.select(self.dim, 0).shape) if self.initial else None
        reset = torch.rand(self.shape, device="cuda") < 0.01 if self.reset else None
        for direction in ("left", "right"):
            y = discounted_cumsum(
                x, gamma, dim=self.dim, direction=direction, initial=initial, reset=reset, window=self.window
            )
            if self.backward:
                y.backward(torch.randn_like(y))


def _long_rows() -> list[Problem]:
    problems = []
    for dtype in (BFLOAT, FLOAT):
        full = 16 // dtype.itemsize
        # Each stage in shared memory is used again.
        problems += [
            Problem("bulk_stream_kernel", (3, 875_001 * full), dtype),
            Problem("bulk_stream_kernel", (3, 437_501 * full), dtype, "row", backward=True),
            Problem("bulk_stream_kernel", (3, 437_501 * full), dtype, "step", backward=True),
            Problem("bulk_stream_kernel", (600, 2561 * full), dtype, "step", backward=True),
            Problem("bulk_stream_kernel", (264, 8450 * full), dtype),
            Problem("bulk_stream_kernel", (264, 8450 * full), dtype, backward=True),
            Problem("bulk_stream_kernel", (264, 5122 * full), dtype, "step", backward=True),
            Problem("bulk_stream_kernel", (60, 5122 * full), dtype, "constant step", backward=True),
            Problem("bulk_stream_kernel", (264, 5122 * full), dtype, "constant step", backward=True),
            Problem("serial_columns_kernel", (16, 20_001 * full), dtype, 1.5),
            Problem("bulk_stream_kernel", (264, 10_240 * full), dtype),
            Problem("bulk_stream_kernel", (264, 10_240 * full), dtype, "step", backward=True),
        ]
    problems += [
        Problem("resident_rows_kernel", (16, 262_144), BFLOAT, backward=backward) for backward in (False, True)
    ]
    problems.append(Problem("bulk_stream_kernel", (16, 20_001 * 8), HALF, "step", backward=True))
    return problems


def _rows() -> list[Problem]:
    problems = []
    for dtype in (BFLOAT, FLOAT):
        full = 16 // dtype.itemsize
        problems += [
            Problem("thread_rows_kernel", (32, full), dtype),
            Problem("thread_rows_kernel", (32, full), dtype, "step"),
            Problem("few_rows_kernel", (1, 9998), dtype),
            Problem("few_rows_kernel", (1, 30_001 * full), dtype),
            Problem("float_rows_kernel", (3, 30_001), dtype),
            Problem("float_rows_kernel", (30, 1945), dtype, initial=True, gap=3),
            Problem("few_rows_gated_kernel", (1, 9998), dtype, "step"),
            Problem("few_rows_gated_kernel", (1, 65_536), dtype, "step"),
        ]
        for backward in (False, True):  # the gamma of a gradient is a tensor
            problems += [
                Problem("packed_rows_kernel", (1000, 8 * full), dtype, backward=backward),
                Problem("warp_rows_kernel", (300, 64 * full), dtype, backward=backward),
                Problem("small_rows_kernel", (40, 33 * full), dtype, backward=backward),
                Problem("tile_rows_kernel", (8, 60_000), dtype, "row", backward=backward),
                Problem("long_rows_kernel", (140, 20_001), dtype, reset=True, initial=True, backward=backward),
                Problem("long_rows_kernel", (3, 600_003), dtype, backward=backward),
                Problem("flat_rows_kernel", (500, 3001), dtype, reset=True, initial=True, backward=backward),
                Problem("flat_rows_kernel", (100_000, 13), dtype, backward=backward),
                Problem("flat_rows_kernel", (40, 30_001), dtype, reset=True, initial=True, backward=backward),
                Problem("small_rows_kernel", (40, 3001), dtype, reset=True, initial=True, backward=backward),
                Problem("small_rows_kernel", (3000, 13), dtype, backward=backward),
                Problem("small_rows_kernel", (3, 30_001), dtype, reset=True, initial=True, backward=backward),
            ]
        problems += [
            Problem("flat_rows_kernel", (40, 30_001), dtype, "row", reset=True, initial=True, backward=True),
            Problem("flat_rows_kernel", (40, 30_001), dtype, "step", backward=True),
            Problem("flat_rows_kernel", (500, 3001), dtype, "step", backward=True),
            Problem("small_rows_kernel", (3, 30_001), dtype, "row", reset=True, initial=True, backward=True),
            Problem("few_steps_kernel", (3001, 3), dtype, "row", reset=True, initial=True, backward=True),
            Problem("small_rows_kernel", (5, 30_001), dtype, "step", reset=True, initial=True, backward=True),
            Problem("small_rows_kernel", (1000, 8 * full), dtype, "step", backward=True),
            Problem("small_rows_kernel", (1000, 11 * full), dtype, "row", backward=True),
            Problem("flat_rows_kernel", (100_000, 11 * full), dtype, backward=True),
            Problem("small_rows_kernel tile_rows_kernel", (50, 4096), dtype, "step", backward=True),
            Problem("tile_rows_kernel", (400, 4096), dtype, "step", backward=True),
            Problem("small_rows_kernel", (2, 40_008), dtype, "row", backward=True),
            Problem("long_rows_kernel", (140, 20_000), dtype, "step", reset=True, backward=True),
            Problem("small_rows_kernel", (999, 77), dtype, "step", backward=True),
        ]
    problems.append(Problem("warp_rows_kernel", (40, 4096), BFLOAT, backward=True))
    for dtype in (DOUBLE, COMPLEX):
        for gamma in (0.99, "row", "step"):
            kernel = "long_rows_kernel" if dtype is DOUBLE else "resident_columns_kernel"
            problems.append(Problem(kernel, (300, 9000), dtype, gamma, reset=True, backward=True))
            problems.append(Problem("flat_rows_kernel", (300, 1000), dtype, gamma, initial=True, backward=True))
    for dtype in (HALF, FLOAT):  # of one tensor, apart: every stage is used again, slices of one row and of two
        for gap in (1, 4, 7):
            problems += [
                Problem("long_rows_kernel", (1201, 16_089), dtype, gap=gap),
                Problem("long_rows_kernel", (901, 20_003), dtype, "row", reset=True, initial=True, gap=gap),
            ]
    for gamma in (0.99, "row", "step"):  # doubles: clusters, a block a row, vectors that two blocks have a part of
        problems += [
            Problem("small_rows_kernel", (5, 9001), DOUBLE, gamma, reset=True),
            Problem("small_rows_kernel flat_rows_kernel", (30, 1000), DOUBLE, gamma, initial=True, backward=True),
            Problem("small_rows_kernel", (9001, 7), DOUBLE, gamma, initial=True),
        ]
    return problems


def _columns() -> list[Problem]:
    problems = []
    for dtype in (BFLOAT, FLOAT):
        full = 16 // dtype.itemsize
        problems += [
            Problem("warp_columns_kernel", (100, 16_384 * full // 2), dtype, backward=True),
            Problem("warp_columns_kernel", (100, 8192 * full // 2), dtype, "row"),
            Problem("split_columns_kernel", (64, 96), dtype, 1.001),
            Problem("block_columns_kernel", (200, 16_902), dtype, "step"),
            Problem("block_columns_kernel", (300, 4608), dtype, "step"),
            Problem("block_columns_kernel", (250, 5120), dtype, "step", backward=True),
            # More blocks than multiprocessors, in several rounds of 16 warps.
            Problem("block_columns_kernel", (700, 10_201), dtype, "step"),
            Problem("block_columns_kernel", (700, 10_201), dtype, "step", backward=True),
            Problem("small_columns_kernel", (2000, 33), dtype, backward=True),
            Problem("small_columns_kernel", (200, 33), dtype, "row", reset=True, initial=True, backward=True),
            Problem("float_columns_kernel", (15_000, 7), dtype),
            Problem("float_columns_kernel", (200, 96), dtype, initial=True),
            Problem("float_columns_kernel", (40_001, 9), dtype),
            Problem("small_columns_kernel", (9000, 12), dtype, reset=True),
            Problem("small_columns_kernel", (5000, 53), dtype, backward=True),
            Problem("small_columns_kernel", (15_000, 7), dtype, "row", initial=True, backward=True),
            Problem("small_columns_kernel", (3000, 7), dtype, "step", reset=True, initial=True, backward=True),
            Problem("resident_columns_kernel", (60_000, 40), dtype, "row"),
            # Time of a block, a cluster, a group of clusters and several; of outer rows, and from any address on.
            Problem("lookback_columns_kernel", (200, 3001 * full // 4), dtype),
            Problem("lookback_columns_kernel", (1500, 1511 * full // 4), dtype, initial=True),
            Problem("lookback_columns_kernel", (9001, 301 * full // 4), dtype),
            Problem("lookback_columns_kernel", (120_001, 29 * full // 4), dtype, initial=True, gap=1),
            # Time that all multiprocessors share.
            Problem("small_columns_kernel", (30_000, 7), dtype, "step", backward=True),
            Problem("small_columns_kernel", (70_001, 11), dtype, reset=True),
            Problem("small_columns_kernel", (40_000, 9), dtype, "row", reset=True, initial=True, backward=True),
            Problem("resident_columns_kernel", (200_000, 7), dtype, "step", backward=True),
            Problem("resident_columns_kernel", (400_001 * full // 4, 29), dtype, "row"),
            # Each stage in shared memory is used again; warps that pass carries on have one column, and two.
            Problem("stream_columns_kernel", (6_000_001, 2), dtype),
            Problem("stream_columns_kernel", (4_000_003, 3), dtype, "row", initial=True),
            Problem("stream_columns_kernel", (1_500_000 * full // 4, 7), dtype, gap=1),
            # Rounds of blocks of up to 64 columns.
            Problem("resident_columns_kernel", (60_000, 75 * full), dtype, "row", initial=True, backward=True),
            Problem("resident_columns_kernel", (50_001, 75 * full + 1), dtype, "step", backward=True),
            Problem("serial_columns_kernel", (100, 60_001), dtype, reset=True, backward=True),
            Problem("serial_columns_kernel", (11, 3001), dtype, "step", backward=True),
            Problem("few_steps_kernel", (2, 300_001), dtype, backward=True),
            Problem("few_steps_kernel", (2, 1_400_003), dtype),
            Problem("few_steps_kernel", (2, 811_009), dtype, "step", reset=True, backward=True),
            Problem("few_steps_kernel", (2, 811_009), dtype, "row", initial=True),
            Problem("few_steps_kernel", (7, 3002), dtype, "step", reset=True, initial=True, backward=True),
            Problem("few_steps_kernel", (3, 600_000), dtype, "row", reset=True, initial=True, backward=True),
        ]
    splits = {
        BFLOAT: ((500, 1600), (70, 4608), (200, 1600), (300, 1024)),
        FLOAT: ((500, 4608), (200, 9216), (300, 7040)),
    }
    problems.append(Problem("stream_columns_kernel", (1_600_003, 13), BFLOAT, initial=True, gap=2))
    # Of few elements and a number of at most 1 float columns take them.
    for dtype, shapes in splits.items():
        problems += [Problem("split_columns_kernel", shape, dtype, 1.001) for shape in shapes]
    problems += [Problem("split_columns_kernel", (1024, 2400), dtype, "row") for dtype in splits]
    problems += [Problem("split_columns_kernel", shape, BFLOAT, backward=True) for shape in ((100, 96), (1100, 2208))]
    problems += [Problem("split_columns_kernel", (steps, 96), BFLOAT, 1.001) for steps in (70, 200, 300, 512)]
    problems.append(Problem("split_columns_kernel", (512, 96), HALF, 1.001))
    problems.append(Problem("split_columns_kernel", (1200, 2208), HALF, "row"))
    problems.append(Problem("block_columns_kernel", (700, 10_201), BFLOAT, 1.001))
    problems.append(Problem("lookback_columns_kernel", (700, 10_201), HALF, gap=1))
    problems.append(Problem("block_columns_kernel", (700, 10_201), BFLOAT, "row", backward=True))
    problems.append(Problem("serial_columns_kernel", (46, 10_201), FLOAT, "row"))
    for dtype in (DOUBLE, COMPLEX):
        problems.append(Problem("resident_columns_kernel", (300, 40), dtype, "step", backward=True))
        problems.append(Problem("serial_columns_kernel", (20, 30_000), dtype, "row", backward=True))
        problems.append(Problem("few_steps_kernel", (8, 30_000), dtype, "row", backward=True))
    return [replace(problem, dim=0) for problem in problems]


def _slabs() -> list[Problem]:
    """Few neighboring columns of many outer rows: shorter than what is staged at a time, and of some such stages; of
    more steps in parts, of lanes and of warps."""
    problems = []
    for dtype, inner, stages in ((BFLOAT, 3, (50_001, 71)), (FLOAT, 3, (20_001, 61)), (DOUBLE, 5, (20_001, 61))):
        problems += [
            Problem(f"{'stream' if inner == 3 else 'resident'}_columns_kernel", (260, 24_900, inner), dtype),
            Problem("staged_columns_kernel", (20_001, 25, inner), dtype),
            Problem("staged_columns_kernel", (*stages, inner), dtype, "row", reset=True, initial=True),
            Problem("staged_parts_kernel", (10_001, 135, inner), dtype, "row", reset=True, initial=True),
            Problem("staged_parts_kernel", (3001, 700, inner), dtype, reset=True),
            Problem("staged_parts_kernel", (3001, 700, inner), dtype, "row", reset=True, initial=True),
            Problem("staged_parts_kernel", (301, 5003, inner), dtype, "row", reset=True),
            Problem("staged_parts_kernel", (301, 30_011, inner), dtype, reset=True, initial=True),
        ]
    return [replace(problem, dim=1) for problem in problems]


def _others() -> list[Problem]:
    problems = []
    for dtype in (BFLOAT, FLOAT, DOUBLE, COMPLEX):
        problems.append(Problem("window_direct_kernel", (30, 500), dtype, window=7))
        composed = "window_leaves_kernel window_compose_kernel window_store_kernel"
        problems.append(Problem(composed, (30, 500), dtype, "step", window=100, reset=True))
    problems.append(Problem("tile_rows_kernel total_kernel", (80, 3000), FLOAT, backward=True))
    return problems


PROBLEMS = [*_long_rows(), *_rows(), *_columns(), *_slabs(), *_others()]


def main(kernels: list[str]) -> None:
    torch.manual_seed(0)
    for problem in PROBLEMS:
        if not kernels or any(name in problem.kernels for name in kernels):
            problem.run()
            torch.cuda.synchronize()
            print(problem, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
