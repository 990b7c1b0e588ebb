"""`dcs::_linear_cross_entropy_forward` and `_backward`: kernels, fakes and FLOPs.

Autograd is in autograd.py, vmap in vmap.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import flops
from . import chunks as driver
from .gradients import Gradients, Upstream
from .validate import check_call, check_upstream

_OP = "linear_cross_entropy"
_OPTIONS = len(Options._fields)


def forward_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the forward leaves the gradients of input and linear_weight: float16 has no room for sums."""
    return torch.float32 if dtype == torch.float16 else dtype


def _forward(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    options, needs = Options(*rest[:_OPTIONS]), Needs(*rest[_OPTIONS:-2])
    _check_forward(input, linear_weight, target, linear_bias, weight, options, needs)
    with torch._C._AutoDispatchBelowAutograd():
        rows, gradients, grad_scale = driver.forward(
            input, linear_weight, target, linear_bias, weight, options, needs, *rest[-2:]
        )
    assert isinstance(gradients, Gradients)
    return (*rows, *gradients, grad_scale)


def _forward_fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    options, needs = Options(*rest[:_OPTIONS]), Needs(*rest[_OPTIONS:-2])
    need_predictions, need_entropy = rest[-2:]
    _check_forward(input, linear_weight, target, linear_bias, weight, options, needs)
    lead, dtype, grad_dtype = input.shape[:-1], row_dtype(input.dtype), forward_gradient_dtype(input.dtype)
    return (
        input.new_empty(lead if options.reduction == "none" else (), dtype=dtype),
        input.new_empty(lead, dtype=dtype),
        input.new_empty(lead if need_predictions else 0, dtype=torch.int64),
        input.new_empty(lead if need_entropy else 0, dtype=dtype),
        input.new_empty(input.shape if needs.input else 0, dtype=grad_dtype),
        input.new_empty(linear_weight.shape if needs.linear_weight else 0, dtype=grad_dtype),
        input.new_empty(linear_weight.size(0) if needs.linear_bias else 0, dtype=dtype),
        input.new_empty(1 if input.dtype == torch.float16 and any(needs) else 0, dtype=dtype),
    )


def _check_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs,
) -> None:
    check_call(_OP, input, linear_weight, target, linear_bias, weight, options)
    if options.reduction == "none" and any(needs):
        raise RuntimeError(f'{_OP}: reduction must be "mean" or "sum" for gradients in forward, got "none"')


def _backward(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    options, needs = Options(*rest[:_OPTIONS]), Needs(*rest[_OPTIONS:])
    upstream = Upstream(grad_loss, grad_lse, grad_entropy)
    _check_backward(upstream, input, linear_weight, target, linear_bias, weight, options)
    with torch._C._AutoDispatchBelowAutograd():
        return driver.backward(upstream, input, linear_weight, target, linear_bias, weight, options, needs)


def _backward_fake(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    options, needs = Options(*rest[:_OPTIONS]), Needs(*rest[_OPTIONS:])
    upstream = Upstream(grad_loss, grad_lse, grad_entropy)
    _check_backward(upstream, input, linear_weight, target, linear_bias, weight, options)
    bias_dtype = row_dtype(input.dtype) if linear_bias is None else linear_bias.dtype
    return (
        input.new_empty(input.shape if needs.input else 0),
        input.new_empty(linear_weight.shape if needs.linear_weight else 0),
        input.new_empty(linear_weight.size(0) if needs.linear_bias else 0, dtype=bias_dtype),
    )


def _check_backward(
    upstream: Upstream,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
) -> None:
    check_call(_OP, input, linear_weight, target, linear_bias, weight, options)
    lead = input.shape[:-1]
    loss_shape = lead if options.reduction == "none" else torch.Size(())
    check_upstream(_OP, "grad_loss", upstream.loss, loss_shape, input)
    check_upstream(_OP, "grad_lse", upstream.lse, lead, input)
    check_upstream(_OP, "grad_entropy", upstream.entropy, lead, input)


def gemm_flops(input_shape: Any, linear_weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """One GEMM of all rows: 2·N·D·V."""
    return 2 * int(torch.Size(input_shape).numel()) * int(linear_weight_shape[0])


def _forward_flops(input_shape: Any, linear_weight_shape: Any, *args: Any, out_shape: Any = None, **kw: Any) -> int:
    needs = Needs(*args[-5:-2])
    return (1 + needs.input + needs.linear_weight) * gemm_flops(input_shape, linear_weight_shape)


def _backward_flops(
    loss_shape: Any, lse_shape: Any, entropy_shape: Any, input_shape: Any, linear_weight_shape: Any, *args: Any,
    out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    needs = Needs(*args[-3:])
    return (1 + needs.input + needs.linear_weight) * gemm_flops(input_shape, linear_weight_shape)


for _name, _kernel, _fake, _formula in (
    ("_linear_cross_entropy_forward", _forward, _forward_fake, _forward_flops),
    ("_linear_cross_entropy_backward", _backward, _backward_fake, _backward_flops),
):
    _registry.LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _fake, lib=_registry.LIBRARY)
    flops.register(getattr(torch.ops.dcs, _name), _formula)
