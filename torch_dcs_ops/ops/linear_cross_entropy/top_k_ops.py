"""`dcs::linear_top_k`: kernel, fake, autograd. The log-probabilities' gradients are those at the ids that are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import log_probs as reference
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import Node, apply, below, in_forward_mode, run_below, tracked
from .._common.validate import fail, known
from .id_ops import checked
from .ids import IGNORED, Call, chunks_of, columns_of, make_call
from .kernel_ops import gemm_flops
from .loss import autocast_operands

_OP = "linear_top_k"
_ELEMENTS = 1 << 23  # of logits whose largest are looked for at a time
Results = tuple[Tensor, ...]


def _checked(
    input: Tensor, linear_weight: Tensor, k: int, linear_bias: Tensor | None, keywords: dict[str, Any]
) -> HeadOptions:
    options = checked(_OP, input, linear_weight, linear_bias, **keywords)
    if known(k < 1) or known(k > linear_weight.size(0)):
        fail(_OP, f"k must be in [1, {linear_weight.size(0)}], the number of classes, got {k}")
    return options


def _kernel(
    input: Tensor, linear_weight: Tensor, k: int, *, linear_bias: Tensor | None = None, **keywords: Any
) -> Results:
    options = _checked(input, linear_weight, k, linear_bias, keywords)
    with torch._C._AutoDispatchBelowAutograd():
        return _run(input, linear_weight, k, linear_bias, options)


def _run(
    input: Tensor, linear_weight: Tensor, k: int, linear_bias: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """(log_probs, indices) of the k largest, (..., k), in descending order."""
    lead = input.shape[:-1]
    call = make_call(input, linear_weight, linear_bias, options)
    total, classes = call.input.size(0), linear_weight.size(0)
    log_probs = input.new_empty((total, k), dtype=row_dtype(input.dtype))
    indices = input.new_empty((total, k), dtype=torch.int64)
    step = max(_ELEMENTS // classes, 1)
    for part, logits in chunks_of(call, call.input, False, True)[1]:
        for block, some in zip(indices[part].split(step), logits.split(step), strict=True):
            block.copy_(_largest(some, k, call))
        columns = columns_of(logits, indices[part], call.linear_bias, options._replace(ignore_index=IGNORED))
        loss = call.rows(logits, columns.target, (None, None, None), False, False, False)[0]
        log_probs[part] = columns.log_probs(loss)
        del logits
    return log_probs.view(*lead, k), indices.view(*lead, k)


def _largest(logits: Tensor, k: int, call: Call) -> Tensor:
    """The indices of the k largest z of every row; softcap changes no order."""
    if call.linear_bias is not None:
        logits = logits.to(call.linear_bias.dtype) + call.linear_bias
    return logits.topk(k, 1, largest=call.options.logit_scale >= 0)[1]


def _fake(
    input: Tensor, linear_weight: Tensor, k: int, *, linear_bias: Tensor | None = None, **keywords: Any
) -> Results:
    _checked(input, linear_weight, k, linear_bias, keywords)
    log_probs = input.new_empty((*input.shape[:-1], k), dtype=row_dtype(input.dtype))
    return log_probs, torch.empty_like(log_probs, dtype=torch.int64)


def _autograd(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    **keywords: Any,
) -> Any:
    if not tracked(input, linear_weight, linear_bias):
        return below(_registry.linear_top_k, keyset, input, linear_weight, k, linear_bias=linear_bias, **keywords)
    options = _checked(input, linear_weight, k, linear_bias, keywords)
    if in_forward_mode():
        return reference.linear_top_k(input, linear_weight, k, linear_bias, options)
    return apply(TopKFunction, keyset, input, linear_weight, linear_bias, k, options)


class TopKFunction(Node):
    """The largest log-probabilities: those at the ids that forward finds."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        k: int,
        options: HeadOptions,
    ) -> Results:
        keywords = options._asdict()
        del keywords["ignore_index"]
        log_probs, indices = run_below(
            _registry.linear_top_k, keyset, input, linear_weight, k, linear_bias=linear_bias, **keywords
        )
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs = options, Needs(*ctx.needs_input_grad[1:4])
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(input, linear_weight, linear_bias, indices)
        return log_probs, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 6
        input, linear_weight, linear_bias, indices = ctx.saved_tensors
        computed = _registry.linear_log_probs_backward(
            grad, None, None, input, linear_weight, indices, linear_bias, *ctx.options, *ctx.needs
        )
        found = [gradient if need else None for gradient, need in zip(computed, ctx.needs, strict=True)]
        return (None, *found, None, None)


_registry.LIBRARY.impl(_OP, _kernel, "CompositeExplicitAutograd")
torch.library.register_fake(f"dcs::{_OP}", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_OP, _autograd, "Autograd", with_keyset=True)
autocast.register_cast(_OP, _registry.linear_top_k, autocast_operands)
flops.register(torch.ops.dcs.linear_top_k, gemm_flops)
