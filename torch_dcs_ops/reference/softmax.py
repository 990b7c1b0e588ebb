"""softmax and its derivative in plain PyTorch: torch's own, in the layout of `torch.empty_like`.

A row is a line along `dim`: ``y = exp(x - max(x)) / Σ exp(x - max(x))``. A row that holds a NaN or a +inf, or nothing
but -inf, is NaN throughout, as with torch.softmax. What follows from y's Jacobian ``diag(y) - y·yᵀ``, which is
symmetric: ``(v - Σ v·y)·y`` is the gradient of x for a gradient v of y, and the tangent of y for a tangent v of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_PRECISION = (torch.float16, torch.bfloat16)


def softmax(input: Tensor, dim: int) -> Tensor:
    """Half precision is computed in float32 and rounded once."""
    return _in_layout_of(input, torch.softmax(_wide(input), dim))


def softmax_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """In output's layout: a gradient is often an expanded number."""
    wide_grad, wide_output = _wide(grad), _wide(output)
    result = torch.ops.aten._softmax_backward_data.default(wide_grad, wide_output, dim, wide_grad.dtype)
    return _in_layout_of(output, result)


def differentiable_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """`softmax_backward` of operations that autograd knows, for derivatives of a higher order."""
    wide_grad, wide_output = _wide(grad), _wide(output)
    mean = (wide_grad * wide_output).sum(dim, keepdim=True)
    return ((wide_grad - mean) * wide_output).to(output.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF_PRECISION else tensor


def _in_layout_of(tensor: Tensor, result: Tensor) -> Tensor:
    layout = torch.empty_like(tensor)
    if result.dtype == tensor.dtype and result.stride() == layout.stride():
        return result
    return layout.copy_(result)
