"""softmax and its gradient in float64, and how far a kernel may be from them."""

from __future__ import annotations

import torch
from torch import Tensor

# Half the distance of neighboring numbers at 1, of the arithmetic and of the results.
ARITHMETIC = {torch.float16: 2**-24, torch.bfloat16: 2**-24, torch.float32: 2**-24, torch.float64: 2**-53}
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0, torch.float64: 0.0}
# Below these a result may be rounded to 0, or to a subnormal number.
SMALLEST = {torch.float16: 2**-25, torch.bfloat16: 2**-125, torch.float32: 2**-125, torch.float64: 2**-1021}
DTYPES = tuple(ARITHMETIC)


def assert_softmax(output: Tensor, input: Tensor, dim: int) -> None:
    """Within the roundings of exp(x - max) / sum.

    x - max, and its product with log2(e), are each rounded in proportion to their size d; the exponential is 2 units
    off; a sum of positive terms, taken over 64 in turn and then in pairs, by less than 24, most of them not at once.
    """
    wide = input.double()
    expected = _softmax(wide, dim)
    largest = wide.amax(dim, keepdim=True) if wide.numel() else wide
    distance = (largest - wide).clamp(max=1000)
    relative = ARITHMETIC[input.dtype] * (24 + 3 * distance) + ROUNDING[input.dtype]
    _assert_within(output, expected, expected * relative + SMALLEST[input.dtype])


def assert_gradient(grad_input: Tensor, grad: Tensor, output: Tensor, dim: int) -> None:
    """Within the roundings of (grad - sum(grad·output))·output, whose sum cancels."""
    wide, y = grad.double(), output.double()
    expected = (wide - (wide * y).sum(dim, keepdim=True)) * y
    size = (wide.abs() + (wide * y).abs().sum(dim, keepdim=True)) * y.abs()
    bound = 40 * ARITHMETIC[grad.dtype] * size + ROUNDING[grad.dtype] * expected.abs() + SMALLEST[grad.dtype]
    _assert_within(grad_input, expected, bound)


def _softmax(wide: Tensor, dim: int) -> Tensor:
    """By short sums: torch's own along another dimension adds one row after the other, which for float64 results is no
    better than what is tested."""
    if wide.dim() == 0 or wide.numel() == 0:
        return torch.softmax(wide, dim)
    return torch.softmax(wide.movedim(dim, -1).contiguous(), -1).movedim(-1, dim)


def _assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    error = (actual.double() - expected).abs()
    assert bool(((error <= bound) | nan).all()), f"{float((error / bound)[~nan].max()):.2f} of the error budget"
