"""softmax's CUDA kernel of small tensors' columns: many steps, views, numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from torch_dcs_ops import softmax

from softmax.cuda_checks import backward, check, poison
from softmax.oracle import DTYPES, assert_gradient, assert_softmax

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pad", [0, 1, 8])
@pytest.mark.parametrize("columns", [2, 3, 5, 7, 11, 14, 16, 17, 22, 32, 33, 53, 57, 64, 87, 129])
def test_small_tall_columns(columns: int, pad: int, dtype: torch.dtype) -> None:
    """Few steps of a thread to many, of which lanes, warps and blocks join; views that are read in place."""
    for elements in (3000, 30_000, 260_000, 890_000):
        wide = 4 * torch.randn(elements // columns, columns + pad, device="cuda")
        x = wide.to(dtype)[:, :columns]
        check(x, 0)
        assert torch.equal(softmax(x, 0), softmax(x, 0))
        y = softmax(wide[:, :columns].to(dtype).contiguous(), 0)
        poison()
        assert_gradient(backward(x, y, 0), x, y, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(20_001, 5), (5001, 14), (300, 200), (40, 300, 8)], ids=str)
def test_small_columns_that_are_not_finite(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A column with inf or NaN is NaN, as is one of -inf alone; -inf beside other numbers is 0."""
    x = torch.randn(shape, device="cuda").to(dtype)
    x[..., 7, 0] = math.inf
    x[..., 9, 1] = math.nan
    x[..., :, 2] = -math.inf
    x[..., 11, 3] = -math.inf
    y = softmax(x, -2)
    assert y[..., :3].isnan().all()
    assert (y[..., 11, 3] == 0).all()
    assert_softmax(y[..., 3:], x[..., 3:], -2)
