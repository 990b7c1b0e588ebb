"""The node of a vocabulary-parallel loss, or of log-probabilities, in autograd's graph.

A mean or a sum forms its gradients in forward, where the logits are; everything else makes the logits again in
backward, from the statistics that forward has saved. What is left to communicate then is input's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...ops.linear_cross_entropy.scale import buffers_may_be_private, graph_is_being_freed, scaled
from ...reference.linear_cross_entropy.loss import zeroed_if_empty
from ...reference.linear_cross_entropy.rows import row_dtype
from ..common import check_not_differentiated_again
from .kernel_ops import STATISTICS, Numbers
from .rows import Slice

_LSE, _ENTROPY = STATISTICS.index("lse"), STATISTICS.index("entropy")


class Settings(NamedTuple):
    """What is no tensor in a call."""

    op: str
    kind: str  # the loss's reduction, or "log_probs"
    numbers: Numbers  # of the ops, but for what needs a gradient
    sequence_parallel: bool
    zero_if_empty: bool
    need_predictions: bool
    need_entropy: bool
    need_lse: bool


class Divisor(NamedTuple):
    """Of a mean, and the sum of all class weights; None where they are nobody's need."""

    mean: Tensor | None
    weights: Tensor | None


def divisor(target: Tensor, weight: Tensor | None, settings: Settings, count: int, dtype: torch.dtype) -> Divisor:
    """Of all rows of target (N, 1); `count` classes are this rank's. With class weights one all-reduce of two."""
    numbers, is_mean = settings.numbers, settings.kind == "mean"
    if weight is None:
        return Divisor((target != numbers.ignore_index).sum().to(dtype) if is_mean else None, None)
    if not (is_mean or numbers.label_smoothing):
        return Divisor(None, None)
    of = Slice(numbers.first_class, count, numbers.classes, weight.to(dtype))
    both = torch.stack((of.weights_at(target, numbers.ignore_index, dtype).sum(), weight.sum(dtype=dtype)))
    mean, weights = numbers.team.total(both).unbind(0)
    return Divisor(mean.clone() if is_mean else None, weights.clone())


class VocabParallel(torch.autograd.Function):
    """(loss, log_probs, lse, predictions, entropy); what is not wanted has no elements."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, ...]:
        team, kind, is_loss = settings.numbers.team, settings.kind, settings.kind != "log_probs"
        lead, dtype = input.shape[:-1], row_dtype(input.dtype)
        rows = input.reshape(lead.numel(), input.size(-1))
        ids = target.reshape(lead.numel(), 1 if target.dim() < input.dim() else target.size(-1))
        if settings.sequence_parallel:
            rows, ids = team.gather(rows).flatten(0, 1), team.gather(ids).flatten(0, 1)
        mean, weight_sum = divisor(ids, weight, settings, linear_weight.size(0), dtype)
        is_reduced = kind in ("mean", "sum")
        needs = ctx.needs_input_grad[:3]
        numbers = settings.numbers.needing(needs if is_reduced else (False,) * 3)
        scale = None if mean is None else mean.reciprocal().reshape(1)
        results = _registry.vocab_parallel_forward(
            rows, linear_weight, ids, linear_bias, weight, weight_sum, scale, *numbers, settings.need_predictions,
            settings.need_entropy,
        )  # fmt: skip
        loss, log_probs, predictions, statistics, grad_input, grad_weight, grad_bias = results
        if is_reduced and needs[0]:
            grad_input = grad_input.view(input.shape)
        gradients = (grad_input, grad_weight, grad_bias)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.needs, ctx.private = settings, needs, buffers_may_be_private()
        saved = [gradient for gradient, need in zip(gradients, needs, strict=True) if need] if is_reduced else []
        ctx.save_for_backward(input, linear_weight, linear_bias, ids, weight, weight_sum, scale, statistics, *saved)
        if kind == "mean":
            loss = loss.sum() / mean
            loss = zeroed_if_empty(loss, ids, numbers.ignore_index) if settings.zero_if_empty else loss
        elif kind == "sum":
            loss = loss.sum()
        empty: Tensor = loss.new_empty(0)

        def own(values: Tensor, wanted: bool, shape: Any = lead) -> Tensor:
            if not wanted:
                return empty.clone()
            if settings.sequence_parallel:
                values = values.view(team.size, -1)[team.rank]
            shaped: Tensor = values.reshape(shape)
            return shaped.clone()

        results = (
            loss if is_reduced else own(loss, is_loss),
            own(log_probs, not is_loss, target.shape),
            own(statistics[_LSE], settings.need_lse),
            own(predictions, settings.need_predictions).to(torch.int64),
            own(statistics[_ENTROPY], settings.need_entropy),
        )
        ctx.mark_non_differentiable(*(r for r, can in zip(results, _differentiable(settings), strict=True) if not can))
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        settings: Settings = ctx.settings
        check_not_differentiated_again(settings.op)
        input, linear_weight, linear_bias, ids, weight, weight_sum, scale, statistics, *saved = ctx.saved_tensors
        # A compiled graph has zeros for what is not differentiable.
        wanted = _differentiable(settings)
        grad_loss, grad_log_probs, grad_lse, _, grad_entropy = (
            grad if can else None for grad, can in zip(upstream, wanted, strict=True)
        )
        is_reduced, dtype = settings.kind in ("mean", "sum"), row_dtype(input.dtype)
        if grad_loss is None and grad_log_probs is None and grad_lse is None and grad_entropy is None:
            return (None,) * 6
        if is_reduced and grad_loss is not None and grad_lse is None and grad_entropy is None:
            may_overwrite = ctx.private and graph_is_being_freed()
            dtypes = (input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
            remaining, found = iter(saved), []
            for need, of in zip(ctx.needs, dtypes, strict=True):
                found.append(scaled(next(remaining), grad_loss, of, may_overwrite) if need else None)
            return (*found, None, None, None)
        if is_reduced and grad_loss is not None:
            grad_loss = grad_loss.reshape(1).to(dtype)
            grad_loss = grad_loss if scale is None else grad_loss * scale

        def rows(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            grad = grad.reshape(-1).to(dtype)
            return settings.numbers.team.gather(grad).flatten() if settings.sequence_parallel else grad

        grad_loss = grad_loss if is_reduced else rows(grad_loss)
        grad_log_probs = rows(grad_log_probs)
        every = input.reshape(-1, input.size(-1))
        if settings.sequence_parallel:
            every = settings.numbers.team.gather(every).flatten(0, 1)
        numbers = settings.numbers.needing(ctx.needs)
        gradients = _registry.vocab_parallel_backward(
            grad_loss, None if grad_log_probs is None else grad_log_probs.view(ids.shape), rows(grad_lse),
            rows(grad_entropy), every, linear_weight, ids, linear_bias, weight, weight_sum, statistics, *numbers,
        )  # fmt: skip
        grad_input, grad_weight, grad_bias = gradients
        if ctx.needs[0]:
            grad_input = grad_input.view(input.shape)
        results = (grad_input, grad_weight, grad_bias if linear_bias is None else grad_bias.to(linear_bias.dtype))
        return (*(g if need else None for g, need in zip(results, ctx.needs, strict=True)), None, None, None)


def _differentiable(settings: Settings) -> tuple[bool, ...]:
    """Which results of the node are."""
    is_loss = settings.kind != "log_probs"
    return is_loss, not is_loss, settings.need_lse, False, settings.need_entropy
