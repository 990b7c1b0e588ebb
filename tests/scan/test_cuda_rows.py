"""Rows with gaps between them on a GPU."""

from __future__ import annotations

import pytest
import torch

from scan.cuda_checks import check_against_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# Rows, steps and elements between rows: rows of a lane, of some, of a part of a warp's, of a cluster's and of many
# blocks' steps, at every alignment.
PADDED_ROWS = (
    (3001, 22, 3),
    (2003, 130, 1),
    (1777, 300, 5),
    (777, 1433, 6),
    (300, 3001, 2),
    (41, 30_001, 9),
    (5, 400_003, 4),
)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("share", [0.0, 0.02], ids=["few resets", "resets"])
@pytest.mark.parametrize("shape", PADDED_ROWS, ids=str)
@pytest.mark.each_pair
def test_padded_rows(shape: tuple[int, int, int], share: float, kind: str, dtype: torch.dtype, direction: str) -> None:
    """With initial values: output and gradients, against the CPU's kernels in double."""
    rows, steps, gap = shape
    x = torch.randn(rows, steps + gap, device="cuda").to(dtype)[:, :steps].requires_grad_()
    size = {"number": (), "row": (rows, 1), "step": (rows, steps)}[kind]
    gamma = torch.empty(size, device="cuda").uniform_(0.9, 0.9995)
    gamma = (gamma.to(dtype) if kind == "step" or dtype.itemsize > 4 else gamma).requires_grad_()
    initial = torch.randn(rows, device="cuda").to(dtype).requires_grad_()
    reset = torch.rand(rows, steps, device="cuda") < max(share, 1 / (rows * steps))
    check_against_cpu(x, gamma, initial, reset, dim=1, direction=direction)
