"""A compiled graph's linear_cross_entropy: forward saves the logits' gradient, backward makes the others of it.

`_linear_cross_entropy_forward` sums linear_weight's gradient over chunks of rows, in memory that does not grow with
them, and holds it until the optimizer has it. A graph whose backward is compiled with it saves the gradient of all
logits instead, where a memory_budget has room for them and it takes the place of float32 sums
(`plan.prefers_saved_gradient`): each gradient is one GEMM of the compiler's then, which places it, and adds to it what
else the weight is used for, as in a graph without this op. Ignored rows are multiplied with the others:
to leave them out takes the products 6 % longer where there are none (a 1.2-billion-parameter Llama's step on an H200:
1.009 of TorchInductor's time, and 0.993 without).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import flops
from .._common.autograd import any_requires_grad, below
from .._common.validate import dtype_name, fail
from . import chunks as driver
from .gradients import SavedCall
from .kernel_ops import gemm_flops
from .plan import make_plan, prefers_saved_gradient, single_chunk
from .scale import may_form_gradients, scaled
from .validate import check_call

_OP = "linear_cross_entropy"
# float16 has no room for 1/N in what is saved, and the op no result for the factor it lacks; other dtypes and CPUs sum
# over chunks at no cost.
_DTYPES = (torch.bfloat16,)
_DEVICES = ("cuda",)


_REFUSES_BY_ITSELF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def _never() -> bool:
    return False


# Whether a graph is being traced for the compiler. Set by compile/__init__.py, as nothing here imports anything there.
is_traced: Callable[[], bool] = _never


def saves_logits_gradient(input: Tensor, linear_weight: Tensor, options: Options, needs: Needs) -> bool:
    """Whether the graph that is being traced, if any, saves the logits' gradient for its backward."""
    if not is_traced() or input.device.type not in _DEVICES or input.dtype not in _DTYPES:
        return False
    if hasattr(input, "device_mesh"):  # a DTensor, of whose logits a rank holds a part
        return False
    sizes = (*input.shape, *linear_weight.shape)
    if not (needs.input and needs.linear_weight) or not all(isinstance(size, int) and size for size in sizes):
        return False
    if options.grad_filter_eps or options.memory_budget is None or options.accumulate_dtype == input.dtype:
        return False
    if options.logits_dtype not in (None, input.dtype):
        return False
    rows, (classes, features) = input.shape[:-1].numel(), linear_weight.shape
    if rows * single_chunk(rows, classes, input.dtype).stride * input.dtype.itemsize > options.memory_budget:
        return False
    plan = make_plan(rows, features, classes, input.dtype, input.dtype, input.device.type, need_weight_grad=True)
    return prefers_saved_gradient(rows, features, plan)


def keeps_logits(input: Tensor, linear_weight: Tensor, target: Tensor, options: HeadOptions) -> bool:
    """Whether the graph that is being traced, if any, keeps the logits of this call for its backward."""
    if options.memory_budget is None or not is_traced() or not may_form_gradients(input, linear_weight):
        return False
    sizes = (*input.shape, *linear_weight.shape, *target.shape)
    if not all(isinstance(size, int) and size for size in sizes):
        return False
    rows, classes, dtype = input.shape[:-1].numel(), linear_weight.size(0), options.logits_dtype or input.dtype
    return rows * single_chunk(rows, classes, dtype).stride * dtype.itemsize <= options.memory_budget


def gradients_of_saved(saved: SavedCall, needs: Needs) -> list[Tensor | None]:
    """Those of input, linear_weight and linear_bias, by the compiler's own operations."""
    logits_gradient, grad_loss, input, linear_weight, linear_bias, lacking = saved
    if lacking is not None:  # an eager call's, of which many gradients are asked for at once
        bias = None if linear_bias is None else linear_bias.float()
        wide = SavedCall(
            logits_gradient.float(), grad_loss * lacking.view(()), input.float(), linear_weight.float(), bias
        )
        return [None if t is None else t.to(input.dtype) for t in gradients_of_saved(wide, needs)]
    rows, grad_input = input.reshape(-1, input.size(-1)).contiguous(), None
    if needs.input:
        grad_input = scaled(torch.mm(logits_gradient, linear_weight), grad_loss, input.dtype, False).reshape(
            input.shape
        )
    # Of the loss's gradient there is as good as ever one rounding: that of 1 is none. Behind the product it would be
    # as large, and a compiler could do the product in forward, as it is smaller than its factor.
    grad_weight = torch.mm(logits_gradient.t(), scaled(rows, grad_loss, rows.dtype, False))
    grad_bias = None
    if linear_bias is not None and needs.linear_bias:
        total = logits_gradient.sum(0, dtype=row_dtype(input.dtype))
        grad_bias = scaled(total, grad_loss, linear_bias.dtype, False)
    return [grad_input, grad_weight, grad_bias]


def tied_to_operand(grad_loss: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """grad_loss, made so that a traced backward takes the first of the operands that requires a gradient.

    Before torch 2.13 a compiled graph refuses to be differentiated twice only where its backward takes such a tensor.
    This loss's takes the gradients from its forward alone, and a penalty on them had no gradient, without a word.
    linear_weight comes first, as it is there anyway.
    """
    if _REFUSES_BY_ITSELF or not is_traced():
        return grad_loss
    operand = next((t for t in operands if t is not None and t.requires_grad), None)
    tied: Tensor = grad_loss if operand is None else _registry.tied(grad_loss, operand)
    return tied


def _tied(value: Tensor, operand: Tensor) -> Tensor:
    return value.clone()


def _forward(input: Tensor, linear_weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    linear_bias, weight, options, wanted = _checked(input, linear_weight, target, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        rows, gradient, _ = driver.forward(input, linear_weight, target, linear_bias, weight, options, None, *wanted)
    assert isinstance(gradient, Tensor)
    return (*rows, gradient)


def _forward_fake(input: Tensor, linear_weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, (need_predictions, need_entropy) = _checked(input, linear_weight, target, *rest)
    lead, classes, dtype = input.shape[:-1], linear_weight.size(0), row_dtype(input.dtype)
    rows = lead.numel()
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(lead, dtype=dtype),
        input.new_empty(lead if need_predictions else 0, dtype=torch.int64),
        input.new_empty(lead if need_entropy else 0, dtype=dtype),
        input.new_empty(rows, single_chunk(rows, classes, input.dtype).stride)[:, :classes],
    )


def _checked(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Options, tuple[Any, ...]]:
    options = Options(*rest[:-2])
    check_call(_OP, input, linear_weight, target, linear_bias, weight, options)
    if options.reduction == "none":
        fail(_OP, 'reduction must be "mean" or "sum" for the gradient of the logits, got "none"')
    if input.dtype == torch.float16 or input.shape[:-1].numel() == 0:
        fail(_OP, f"input must have rows, and a range that holds 1 / N, for the gradient of the logits, "
                  f"got {tuple(input.shape)} of {dtype_name(input.dtype)}")  # fmt: skip
    if options.logits_dtype not in (None, input.dtype):
        fail(_OP, "logits_dtype must be None or input's dtype for the gradient of the logits, "
                  f"got {dtype_name(options.logits_dtype)}")  # fmt: skip
    return linear_bias, weight, options, rest[-2:]


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if any_requires_grad(*args):
        fail(_OP, "tensors must not require a gradient here: linear_cross_entropy is the differentiable op")
    return below(_registry.linear_cross_entropy_logits, keyset, *args)


_registry.LIBRARY.impl("_tied", _tied, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::_tied", _tied, lib=_registry.LIBRARY)
_NAME = "_linear_cross_entropy_logits"
_registry.LIBRARY.impl(_NAME, _forward, "CompositeExplicitAutograd")
torch.library.register_fake(f"dcs::{_NAME}", _forward_fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_NAME, _autograd, "Autograd", with_keyset=True)
flops.register(torch.ops.dcs._linear_cross_entropy_logits, gemm_flops)
