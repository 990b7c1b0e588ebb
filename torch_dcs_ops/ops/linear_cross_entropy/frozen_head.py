"""`dcs::_linear_log_probs_forward`: log-probabilities under a frozen linear_weight, and their gradients, in one pass.

Rows scale: the gradient of a row's log-probability times its own upstream gradient is the row's part. So the logits are
made once, in eager calls and in graphs that are compiled: two products where forward and backward apart have three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import flops
from .._common.autograd import any_requires_grad, below
from .._common.validate import fail
from . import ids as driver
from .id_ops import OP, check_call, with_ids
from .kernel_ops import gemm_flops

Results = tuple[Tensor, ...]


def _checked(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any) -> Any:
    options = HeadOptions(*rest)
    check_call(input, linear_weight, target, linear_bias, options)
    ids, _ = with_ids(input, target)
    if ids.size(-1) != 1:
        fail(OP, f"target must have one id a row for a gradient in forward, got {ids.size(-1)}")
    return ids, options


def _forward(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any) -> Results:
    ids, options = _checked(input, linear_weight, target, linear_bias, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        log_probs, lse, unit = driver.forward_with_gradient(input, linear_weight, ids, linear_bias, options)
    return log_probs.view(target.shape), lse, unit


def _fake(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any) -> Results:
    _checked(input, linear_weight, target, linear_bias, *rest)
    dtype = row_dtype(input.dtype)
    return (
        input.new_empty(target.shape, dtype=dtype),
        input.new_empty(input.shape[:-1], dtype=dtype),
        input.new_empty(input.shape),
    )


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if any_requires_grad(*args):
        fail(OP, "tensors must not require a gradient here: linear_log_probs is the differentiable op")
    return below(_registry.linear_log_probs_forward, keyset, *args)


def _flops(input_shape: Any, linear_weight_shape: Any, *args: Any, **keywords: Any) -> int:
    return 2 * gemm_flops(input_shape, linear_weight_shape)


_NAME = "_linear_log_probs_forward"
_registry.LIBRARY.impl(_NAME, _forward, "CompositeExplicitAutograd")
torch.library.register_fake(f"dcs::{_NAME}", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_NAME, _autograd, "Autograd", with_keyset=True)
flops.register(torch.ops.dcs._linear_log_probs_forward, _flops)
