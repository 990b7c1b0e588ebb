"""The nodes of linear_cross_entropy and linear_log_probs in autograd's graph, for both modes and any order.

* A reduced loss (mean, sum) forms its gradients in forward, in the pass that has the logits: `_linear_cross_entropy_
  forward` with its need_* arguments. backward() scales them. One of few rows, and a compiled graph, may save the
  gradient of the logits for the backward instead (few_rows.py, compiled.py). Everything else (reduction none, a
  gradient of the lse, a backward that is itself differentiated, every level of torch.func) makes the logits again,
  chunk by chunk, in `_linear_cross_entropy_backward`.
* That op is a node of its own, whose derivative is taken of the reference over the full logits, and only when somebody
  asks for it: `create_graph=True` and torch.func.grad cost no memory until then.
* Forward mode, and gradients in class probabilities or in the class weights, run the reference instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import loss as reference
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from .._common.autograd import (
    Node,
    any_requires_grad,
    apply,
    below,
    in_forward_mode,
    is_direct_call,
    pull_back,
    run_below,
    tracked,
)
from . import chunks as driver
from . import few_rows
from .compiled import gradients_of_saved, saves_logits_gradient, tied_to_operand
from .gradients import SavedCall, Upstream
from .kernel_ops import forward_gradient_dtype
from .scale import buffers_may_be_private, graph_is_being_freed, scaled
from .valid_rows import Learned
from .validate import check_call

_functorch_active = torch._C._are_functorch_transforms_active
_OP = "linear_cross_entropy"

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def differentiable(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    need_predictions: bool,
    need_entropy: bool,
) -> Results:
    """(loss, lse, predictions, entropy) as a node of autograd's graph, of arguments that have been checked."""
    if in_forward_mode() or any_requires_grad(target, weight):
        _check_plain_targets(target, options, linear_weight.size(0))
        return reference.linear_cross_entropy(input, linear_weight, target, linear_bias, weight, options)
    results: Results = apply(
        LossFunction, keyset, input, linear_weight, linear_bias, target, weight, options, need_predictions, need_entropy
    )
    return results


class LossFunction(Node):
    """A loss. Saves the operands and, where they are formed already, the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        need_predictions: bool,
        need_entropy: bool,
    ) -> Results:
        needs = Needs(*ctx.needs_input_grad[1:4])
        fused = options.reduction != "none" and not _functorch_active()
        saved = fused and saves_logits_gradient(input, linear_weight, options, needs)
        tensors = input, linear_weight, target, linear_bias, weight
        ctx.private = buffers_may_be_private()
        ctx.learned, gradients = None, ()
        if not saved and is_direct_call(*tensors):
            saved = fused and ctx.private and few_rows.saves_logits_gradient(
                input, linear_weight, target, weight, options, needs, need_predictions
            )  # fmt: skip
            # The arguments have been checked: the GPU waits for the first product.
            ctx.learned = Learned()
            formed = None if saved else needs if fused else Needs()
            with torch._C._AutoDispatchBelowAutograd():
                rows, found, scale = driver.forward(
                    *tensors, options, formed, need_predictions, need_entropy, ctx.learned
                )
            loss, lse, predictions, entropy = rows
            gradients = (found, *((scale,) if scale.numel() else ())) if saved else (*found, scale)
        else:
            op = _registry.linear_cross_entropy_logits if saved else _registry.linear_cross_entropy_forward
            wanted = () if saved else needs if fused else Needs()
            loss, lse, predictions, entropy, *gradients = run_below(
                op, keyset, *tensors, *options, *wanted, need_predictions, need_entropy
            )
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs, ctx.fused, ctx.is_saved = options, needs, fused, saved
        ctx.mark_non_differentiable(predictions, *(() if need_entropy else (entropy,)))
        ctx.save_for_backward(input, linear_weight, linear_bias, target, weight, *(gradients if fused else ()))
        return loss, lse, predictions, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, _: Any, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        if grad_loss is None and grad_lse is None and grad_entropy is None:
            return (None,) * 9
        input, linear_weight, linear_bias, target, weight, *gradients = ctx.saved_tensors
        needs: Needs = ctx.needs
        if ctx.fused and grad_loss is not None and grad_lse is None and grad_entropy is None and not (
            torch.is_grad_enabled()
        ):  # fmt: skip
            if ctx.is_saved:
                logits_gradient, *lacking = gradients
                found = _of_saved(
                    ctx, SavedCall(logits_gradient, grad_loss, input, linear_weight, linear_bias, *lacking)
                )
            else:
                *gradients, grad_scale = gradients
                grad_loss = tied_to_operand(grad_loss, (linear_weight, input, linear_bias))
                if grad_scale.numel():
                    grad_loss = grad_loss * grad_scale.view(())
                may_overwrite = ctx.private and graph_is_being_freed()
                dtypes = (input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
                found = [
                    scaled(gradient, grad_loss, dtype, may_overwrite) if need else None
                    for gradient, dtype, need in zip(gradients, dtypes, needs, strict=True)
                ]
        else:
            upstream = Upstream(grad_loss, grad_lse, grad_entropy)
            tensors = input, linear_weight, target, linear_bias, weight
            if ctx.learned is not None and not torch.is_grad_enabled() and is_direct_call(*upstream, *tensors):
                with torch._C._AutoDispatchBelowAutograd():
                    computed = driver.backward(upstream, *tensors, ctx.options, needs, ctx.learned)
            else:
                computed = _registry.linear_cross_entropy_backward(*upstream, *tensors, *ctx.options, *needs)
            found = [gradient if need else None for gradient, need in zip(computed, needs, strict=True)]
        return (None, *found, None, None, None, None, None)


def _of_saved(ctx: Any, saved: SavedCall) -> list[Tensor | None]:
    """The gradients of input, linear_weight and linear_bias that are needed."""
    needs: Needs = ctx.needs
    if not (ctx.private and is_direct_call(*saved)):
        return gradients_of_saved(saved, needs)
    with torch._C._AutoDispatchBelowAutograd():
        found = few_rows.gradients_of_saved(saved, needs, may_overwrite=graph_is_being_freed())
    return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]


class GradientFunction(Node):
    """The gradients of a loss, differentiable in the upstream gradients and the operands."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        grad_loss: Tensor | None,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        needs: Needs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = run_below(
            _registry.linear_cross_entropy_backward, keyset, grad_loss, grad_lse, grad_entropy, input, linear_weight,
            target, linear_bias, weight, *options, *needs,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs = options, needs
        ctx.mark_non_differentiable(*(g for g, need in zip(gradients, needs, strict=True) if not need))
        ctx.save_for_backward(grad_loss, grad_lse, grad_entropy, input, linear_weight, linear_bias, target, weight)
        return gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        *operands, target, weight = ctx.saved_tensors

        def gradients_of(values: Sequence[Any], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
            grad_loss, grad_lse, grad_entropy, input, linear_weight, bias = values
            results = grad_loss, grad_lse, grad_entropy
            return reference.linear_cross_entropy_gradients(
                *results, input, linear_weight, target, bias, weight, ctx.options, Needs(*needs)
            )

        return (None, *pull_back(ctx, operands, cotangents, gradients_of), None, None, None, None)


def forward_autograd(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: Any,
) -> Any:
    """`_linear_cross_entropy_forward` at the Autograd key: where it is differentiated, it is taken apart."""
    if not tracked(input, linear_weight, target, linear_bias, weight):
        return below(
            _registry.linear_cross_entropy_forward, keyset, input, linear_weight, target, linear_bias, weight, *rest
        )
    count = len(Options._fields)
    options, needs, (need_predictions, need_entropy) = Options(*rest[:count]), Needs(*rest[count:-2]), rest[-2:]
    check_call(_OP, input, linear_weight, target, linear_bias, weight, options)
    rows = differentiable(
        keyset, input, linear_weight, target, linear_bias, weight, options, need_predictions, need_entropy
    )
    empty = input.new_empty(0)
    gradients: tuple[Tensor, ...] = (empty, empty, empty)
    if any(needs):
        ones = torch.ones_like(rows[0])
        gradients = _registry.linear_cross_entropy_backward(
            ones, None, None, input, linear_weight, target, linear_bias, weight, *options, *needs
        )
    dtypes = (forward_gradient_dtype(input.dtype),) * 2 + (row_dtype(input.dtype),)
    loss, lse, predictions, entropy = rows
    lacks_scale = input.dtype == torch.float16 and any(needs)
    return (
        loss,
        lse,
        predictions if need_predictions else predictions.new_empty(0),
        entropy if need_entropy else entropy.new_empty(0),
        *(gradient.to(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)),
        empty.new_ones(1 if lacks_scale else 0, dtype=row_dtype(input.dtype)),
    )


def backward_autograd(
    keyset: torch._C.DispatchKeySet,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: Any,
) -> Any:
    """`_linear_cross_entropy_backward` at the Autograd key."""
    upstream = (grad_loss, grad_lse, grad_entropy)
    if not tracked(*upstream, input, linear_weight, target, linear_bias, weight):
        return below(
            _registry.linear_cross_entropy_backward, keyset, *upstream, input, linear_weight, target, linear_bias,
            weight, *rest,
        )  # fmt: skip
    count = len(Options._fields)
    options, needs = Options(*rest[:count]), Needs(*rest[count:])
    if in_forward_mode() or any_requires_grad(target, weight):
        return reference.linear_cross_entropy_gradients(
            *upstream, input, linear_weight, target, linear_bias, weight, options, needs
        )
    return apply(GradientFunction, keyset, *upstream, input, linear_weight, linear_bias, target, weight, options, needs)


def _check_plain_targets(target: Tensor, options: Options, classes: int) -> None:
    # Under a transform or a mode there are no values to look at: the reference's gather does.
    if not (target.is_floating_point() or _functorch_active() or torch._C._len_torch_dispatch_stack()):
        check_target_range(target, options.ignore_index, classes)


_registry.LIBRARY.impl("_linear_cross_entropy_forward", forward_autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl("_linear_cross_entropy_backward", backward_autograd, "Autograd", with_keyset=True)
