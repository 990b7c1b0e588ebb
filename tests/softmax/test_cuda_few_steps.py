"""softmax's CUDA kernel of few steps of many columns: words of every width, views of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import softmax

from softmax.cuda_checks import backward, check, poison
from softmax.oracle import DTYPES, assert_gradient, assert_softmax

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pad", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 16])
def test_few_steps_at_any_alignment(length: int, pad: int, dtype: torch.dtype) -> None:
    """More columns than are small, whose steps begin at multiples of 16, 8, 4 or 2 bytes, in inputs and gradients."""
    columns = 4_400_000 // length // 16 * 16

    def wide(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda").to(dtype)

    check(wide(length, columns + pad), 0)
    for x, dim in (
        (wide(length, columns + pad)[:, :columns], 0),
        (wide(length, columns + 16)[:, pad : columns + pad], 0),
        (wide(length, columns + 5)[:, : columns - pad], 0),
        (wide(length * columns + pad)[pad:].view(length, columns), 0),
        (wide(5, length + 1, columns // 5)[:, :length], 1),
        (wide(length, 1000, columns // 1000 + pad)[..., :-pad], 0),
        (wide(columns // 40, length, 40 + pad)[..., :40], 1),
        (wide(length, 1).expand(length, columns + pad), 0),
    ):
        check(x, dim)
        y = softmax(wide(*x.shape), dim)
        poison()
        assert_gradient(backward(x, y, dim), x, y, dim)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [1, 2, 8])
def test_few_steps_of_a_view_past_two_to_the_31(pad: int) -> None:
    x = torch.zeros(2, 2**30 + 8 + pad, dtype=torch.bfloat16, device="cuda")[:, :-pad]
    x[-1, -1] = 5
    y = softmax(x, 0)
    assert float(y[:, :-1].min()) == float(y[:, :-1].max()) == 0.5
    assert_softmax(y[:, -1:], x[:, -1:], 0)
    dx = backward(x, y, 0)
    assert float(dx[:, :-1].abs().max()) == 0
    assert_gradient(dx[:, -1:], x[:, -1:], y[:, -1:], 0)
