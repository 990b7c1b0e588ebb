"""Which kernels small returns and their gradients take along a strided time."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops.returns import gae

from support.launched_kernels import has_132_multiprocessors, launched_kernels


@pytest.mark.skipif(
    not has_132_multiprocessors(),
    reason="which kernel returns take depends on the GPU: these are for 132 multiprocessors of 9.0",
)
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
