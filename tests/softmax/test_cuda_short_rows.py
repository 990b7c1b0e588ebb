"""softmax's CUDA kernel of short rows that are no whole vectors, and its neighbors."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import softmax

from softmax.cuda_checks import check
from softmax.oracle import DTYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [2, 3, 5, 6, 9, 13, 17, 30, 100, 333])
def test_many_short_rows(columns: int, dtype: torch.dtype) -> None:
    check((4 * torch.randn(1_000_003 // columns, columns, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 9), (1001, 13), (5003, 33), (301, 115), (70_001, 63), (33_001, 225), (20_001, 291)], ids=str
)
def test_short_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """That are no whole vectors, of up to 32 lanes."""
    check((4 * torch.randn(shape, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 11), (40, 27), (41, 115), (35_000, 203)], ids=str)
def test_what_is_not_finite_stays_in_its_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """As torch.softmax has it; rows of the largest finite numbers too."""
    x = torch.randn(shape, device="cuda").to(dtype)
    x[1, 0], x[3, -1], x[5, 4] = float("inf"), float("nan"), float("-inf")
    x[8], x[9] = float("-inf"), torch.finfo(dtype).max
    x[-1, -1] = float("nan")
    y, expected = softmax(x, 1), torch.softmax(x.double(), 1)
    assert torch.equal(y.isnan(), expected.isnan())
    fine = ~expected.isnan()
    torch.testing.assert_close(
        y.double()[fine], expected[fine], rtol=(2 if dtype.itemsize == 2 else 32) * torch.finfo(dtype).eps, atol=1e-7
    )
