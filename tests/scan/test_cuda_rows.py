"""Rows with gaps between them on a GPU."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

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
    (600, 17_003, 5),
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


# The last two are tiles that blocks take in turn, as often as each place in shared memory is used again.
LONG_AND_SHORT = ((400, 2003), (160, 7000), (2, 33, 9001), (5, 200_003), (1201, 16_089), (2, 9, 1_000_003))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gap", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("shape", LONG_AND_SHORT, ids=str)
@pytest.mark.each_pair
def test_padded_rows_of_one_tensor(shape: tuple[int, ...], gap: int, dtype: torch.dtype, reverse: bool) -> None:
    """From any address on, what lies between them NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 2 * gap), float("nan"), device="cuda", dtype=dtype)
    x = wide[..., gap:-gap].copy_(torch.randn(shape, device="cuda"))
    eps = torch.finfo(dtype).eps + (1e-6 if dtype != torch.float64 else 1e-12)
    exact = x.double().cpu()
    for found, expected in (
        (cumsum(x, -1, reverse=reverse), cumsum(exact, -1, reverse=reverse)),
        (
            discounted_cumsum(x, 0.97, dim=-1, direction="right" if reverse else "left"),
            discounted_cumsum(exact, 0.97, dim=-1, direction="right" if reverse else "left"),
        ),
    ):
        assert (found.double().cpu() - expected).abs().max() <= eps * expected.abs().max()
