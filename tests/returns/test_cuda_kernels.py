"""Which kernels small returns take along rows, and they and their gradients along a strided time."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops.returns import gae

from support.launched_kernels import has_132_multiprocessors, launched_kernels

pytestmark = pytest.mark.skipif(
    not has_132_multiprocessors(),
    reason="which kernel returns take depends on the GPU: these are for 132 multiprocessors of 9.0",
)


@pytest.mark.parametrize(
    ("shape", "dtype", "kernel"),
    [
        # Blocks take rows; a cluster takes one; there is no room for all threads, or for a row; no kernel is for it.
        ((8, 128), torch.float32, "small_returns_rows_kernel"),
        ((3740, 230), torch.float32, "small_returns_rows_kernel"),
        ((10, 65_536), torch.bfloat16, "small_returns_rows_kernel"),
        ((5000, 230), torch.float32, "flat_returns_kernel"),
        ((2, 140_000), torch.float32, "flat_returns_kernel"),
        ((8, 128), torch.float64, "flat_returns_kernel"),
    ],
    ids=str,
)
def test_rows(shape: tuple[int, int], dtype: torch.dtype, kernel: str) -> None:
    rewards, values = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    terminated = torch.rand(shape, device="cuda") < 0.01
    last = torch.randn(shape[0], device="cuda", dtype=dtype)
    launched = launched_kernels(lambda: gae(rewards, values, bootstrap_value=last, terminated=terminated, time_dim=1))
    assert launched[kernel] == 1, launched


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        # A block has all of time; a cluster of blocks; tiles that look back, as there are too many steps.
        ((300, 700), ("small_tile_columns_kernel", "small_gradient_columns_kernel")),
        ((3000, 60), ("small_tile_columns_kernel", "small_gradient_columns_kernel")),
        ((17_000, 60), ("tile_columns_kernel", "gradients_tile_columns_kernel")),
        # Few columns, one range of memory.
        ((200_000, 2), ("flat_columns_kernel", "flat_gradient_columns_kernel")),
    ],
    ids=str,
)
def test_columns(shape: tuple[int, int], kernels: tuple[str, str]) -> None:
    rewards, values = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(2))
    last = torch.randn(shape[1], device="cuda")
    terminated = torch.rand(shape, device="cuda") < 0.01
    upstream = torch.randn(shape, device="cuda")

    def run() -> None:
        advantages, _ = gae(rewards, values, bootstrap_value=last, terminated=terminated)
        advantages.backward(upstream)

    launched = launched_kernels(run)
    assert all(launched[name] == 1 for name in kernels), launched
