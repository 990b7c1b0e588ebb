"""`linear_policy_loss`: a loss that its caller writes over log-probabilities and entropy, in one pass over the logits.

It is a function and no operator: an operator takes no Python function. Where the gradients cannot form with the loss
(a graph that is traced, a transform, a loss for every row, float16) it is the composition of `linear_log_probs` and
the caller's loss, which makes the logits a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs, zeroed_if_empty
from .._common import autocast
from .._common.autograd import Node, any_requires_grad, apply, is_plain_call
from . import policy_chunks as driver
from .arguments import apply_scale, check_argument_types, check_flags, check_keyword_types, class_indices, named
from .id_ops import checked
from .log_probs import linear_log_probs
from .policy_chunks import Wanted
from .row_losses import RowLoss, Statistics, flat, row_loss
from .row_probe import check_rows_do_not_mix
from .scale import buffers_may_be_private, graph_is_being_freed, scaled
from .validate import check_ids, check_reduction, normal_ignore_index

_OP = "linear_policy_loss"
_BEFORE_ARGS = 7  # of PolicyFunction's arguments
Results = tuple[Tensor, ...]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Keywords(TypedDict, total=False):
        linear_bias: Tensor | None
        softcap: float | None
        logit_scale: float | Tensor
        ignore_index: int | None
        reduction: str
        zero_if_empty: bool
        need_entropy: bool
        memory_budget: int | None
        logits_dtype: torch.dtype | None


class _Result(NamedTuple):
    """What is returned."""

    reduction: str
    zero_if_empty: bool
    need_entropy: bool
    return_statistics: bool


@overload
def linear_policy_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, loss_fn: Callable[..., Tensor],
    *row_args: Tensor | float | None, return_statistics: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def linear_policy_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, loss_fn: Callable[..., Tensor],
    *row_args: Tensor | float | None, return_statistics: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def linear_policy_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, loss_fn: Callable[..., Tensor],
    *row_args: Tensor | float | None, return_statistics: bool, **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[..., Tensor],
    *row_args: Tensor | float | None,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    zero_if_empty: bool = False,
    need_entropy: bool = True,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The loss ``loss_fn(log_probs, entropy, *row_args)`` of a policy's tokens, reduced, without its logits in memory.

    PPO, GRPO and their relatives in plain PyTorch. `loss_fn` is called for some rows at a time, within the pass that
    has their logits, and the gradients form there: three products in all (logits, input's and linear_weight's gradient)
    where :func:`linear_log_probs` has four. A row's loss must come from that row alone.

    Args:
        input: (..., D), the hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, D), input's dtype.
        target: the tokens, int64 (...), or (..., K) for K of them a row.
        loss_fn: takes log_probs (n,), or (n, K), and entropy (n,) of n rows, float32 (float64 for float64 input), and
            their part of every row_args; returns a loss for each, (n,). Without random numbers or changes in place.
        row_args: tensors of input's leading shape, 1 in it where all are the same, and any dimensions behind it, of
            which loss_fn has (n, ...). 0-D tensors, numbers and None are for all rows. Those that require a gradient
            get one; a tensor that does must not come to loss_fn in another way.
        linear_bias, softcap, memory_budget, logits_dtype: as of :func:`linear_log_probs`.
        logit_scale: 1 / temperature; as of linear_log_probs.
        ignore_index: rows of no other targets have the loss 0 and no gradient, and are left out of the work where that
            can be. Of several targets a row, one that is this has the log-probability 0. None is -100.
        reduction: "mean" over the rows that are not ignored, "sum", or "none" for a loss per row.
        zero_if_empty: a mean over no row is 0 instead of nan.
        need_entropy: False: loss_fn has None for the entropy, which is not made.
        return_statistics: also returns the log-probabilities and, if it is made, the entropy, without gradients.

    Returns:
        The loss: float32 for half-precision input, else input's dtype; 0-D, or input's leading shape for "none". With
        return_statistics a tuple (loss, log_probs, entropy).

    Under torch.compile and torch.func, for the reduction "none" and for float16, loss_fn is called once, for all rows,
    behind linear_log_probs: the same values and gradients, with the logits made twice. Differentiable any number of
    times. In eager calls, once for each function, rows are looked at to refuse a loss_fn that mixes them, as by a mean
    over a sequence; under torch.compile and torch.func nothing is, and such a loss is right there alone.

    Raises:
        IndexError: a target is out of range, on a CPU. On CUDA that is a device-side assertion.
        ValueError: reduction is none of the three; target, a row argument or the result of loss_fn has a wrong shape.
        TypeError, RuntimeError: an argument has a wrong type; a wrong dtype, shape, device or value. loss_fn mixes
            rows.

    Example::

        >>> def ppo(log_probs, entropy, old_log_probs, advantages):
        ...     ratio = (log_probs - old_log_probs).exp()
        ...     return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.01 * entropy
        >>> loss = torch_dcs_ops.linear_policy_loss(hidden, head, tokens, ppo, old_log_probs, advantages)
    """
    check_reduction(_OP, reduction)
    wanted = _Result(reduction, zero_if_empty, need_entropy, return_statistics)
    check_flags(_OP, zero_if_empty=zero_if_empty, need_entropy=need_entropy, return_statistics=return_statistics)
    input, linear_bias, logit_scale = apply_scale(_OP, input, linear_bias, logit_scale)
    target = class_indices(target)
    options = HeadOptions(softcap, logit_scale, normal_ignore_index(ignore_index), memory_budget, logits_dtype)
    if not torch.compiler.is_compiling():  # There it is linear_log_probs that checks.
        check_keyword_types(_OP, {"ignore_index": ignore_index, "memory_budget": memory_budget})
        _check(*_autocast(input, linear_weight, linear_bias, target), options)
    of = row_loss(loss_fn, row_args, input)
    operands = (input, linear_weight, linear_bias, target)
    try:
        found = _call(operands, options, of, wanted)
    except IndexError as error:
        raise named(_OP, error) from None
    return found if return_statistics else found[0]


def _call(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor], options: HeadOptions, of: RowLoss, wanted: _Result
) -> Results:
    is_plain = is_plain_call(*operands, *of.args)
    if is_plain and wanted.reduction != "none" and any_requires_grad(*operands, *of.args):
        operands = _autocast(*operands)
        if operands[0].dtype != torch.float16:
            found: Results = apply(PolicyFunction, *operands, options, of._replace(args=()), wanted, *of.args)
            return found
    return _composed(*operands, options, of, wanted, is_plain)


def _check(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, options: HeadOptions
) -> None:
    try:
        checked(_OP, input, linear_weight, linear_bias, **options._asdict())
        check_ids(_OP, target, input)
    except (AttributeError, RuntimeError, TypeError):
        tensors = {"input": input, "linear_weight": linear_weight, "target": target}
        check_argument_types(_OP, tensors, {"linear_bias": linear_bias, **options._asdict()})
        raise


def _autocast(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As F.linear has them."""
    device = input.device.type if isinstance(input, Tensor) else None
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):  # no other device has it
        input, linear_weight, linear_bias = map(autocast.lowered, (input, linear_weight, linear_bias))
    return input, linear_weight, linear_bias, target


def _composed(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    options: HeadOptions,
    of: RowLoss,
    wanted: _Result,
    may_probe: bool,
) -> Results:
    """(loss, log_probs, entropy), the loss behind the statistics of all rows."""
    results = linear_log_probs(
        input, linear_weight, target, linear_bias=linear_bias, **options._asdict(), need_entropy=wanted.need_entropy
    )
    rows = results if isinstance(results, tuple) else (results,)
    dims = input.dim() - 1
    statistics = Statistics(flat(rows[0], dims), flat(rows[1], dims) if wanted.need_entropy else None)
    if may_probe:
        check_rows_do_not_mix(of, statistics, of.args)
    is_valid = target != options.ignore_index
    if target.dim() == input.dim():
        is_valid = is_valid.any(-1)
    args = tuple(
        _differentiable_where(flat(is_valid, dims), arg) if is_of_rows and (arg.requires_grad or not may_probe) else arg
        for arg, is_of_rows in zip(of.args, of.of_rows, strict=True)
    )
    loss = torch.where(flat(is_valid, dims), of(statistics, args), 0)
    if wanted.reduction == "none":
        loss = loss.reshape(input.shape[:-1])
    elif wanted.reduction == "sum":
        loss = loss.sum()
    else:
        loss = _mean(loss.sum() / is_valid.sum(), target, options, wanted)
    return loss, *(values.detach() for values in rows)


def _differentiable_where(valid: Tensor, arg: Tensor) -> Tensor:
    """arg, whose gradient in other rows is 0, whatever loss_fn makes of what is there."""
    if not (arg.is_floating_point() or arg.is_complex()):
        return arg
    return torch.where(valid.view(-1, *(1,) * (arg.dim() - 1)), arg, arg.detach())


def _mean(mean: Tensor, target: Tensor, options: HeadOptions, wanted: _Result) -> Tensor:
    return zeroed_if_empty(mean, target, options.ignore_index) if wanted.zero_if_empty else mean


class PolicyFunction(Node):
    """A reduced loss. Saves its gradients, and its operands for those who differentiate a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        options: HeadOptions,
        of: RowLoss,
        wanted: _Result,
        *args: Any,
    ) -> Results:
        needs, needs_args = Needs(*ctx.needs_input_grad[:3]), ctx.needs_input_grad[_BEFORE_ARGS:]
        parts = Wanted(wanted.reduction == "mean", wanted.need_entropy, wanted.return_statistics, needs, needs_args)
        found = driver.forward(
            input.detach(), linear_weight.detach(), target, None if linear_bias is None else linear_bias.detach(),
            options, of._replace(args=args), parts,
        )  # fmt: skip
        loss = found.loss if wanted.reduction == "sum" else _mean(found.loss, target, options, wanted)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.of, ctx.wanted = options, of, wanted
        ctx.needs, ctx.needs_args = needs, needs_args
        ctx.private = buffers_may_be_private()
        # Autograd saves no tensor of inference mode: old log-probabilities may come from there.
        is_saved = [isinstance(arg, Tensor) and not arg.is_inference() for arg in args]
        ctx.others = [None if saved else arg for arg, saved in zip(args, is_saved, strict=True)]
        tensors = [arg if saved else None for arg, saved in zip(args, is_saved, strict=True)]
        ctx.save_for_backward(input, linear_weight, linear_bias, target, *tensors, *found.gradients, *found.args)
        fixed = [loss] if found.is_constant else []
        if not wanted.return_statistics:
            ctx.mark_non_differentiable(*fixed)
            return (loss,)
        rows = [found.log_probs.view(target.shape)]
        if wanted.need_entropy:
            rows.append(found.entropy.view(input.shape[:-1]))
        ctx.mark_non_differentiable(*rows, *fixed)
        return loss, *rows

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        count = len(ctx.others)
        if grad_loss is None:
            return (None,) * (_BEFORE_ARGS + count)
        input, linear_weight, linear_bias, target, *rest = ctx.saved_tensors
        operands = [input, linear_weight, linear_bias]
        args = [other if t is None else t for t, other in zip(rest[:count], ctx.others, strict=True)]
        every_need = (*ctx.needs, *ctx.needs_args)
        if torch.is_grad_enabled():
            found = _gradients_of_composed(grad_loss, operands, target, args, every_need, ctx)
        else:
            may_overwrite = ctx.private and graph_is_being_freed()
            found = [
                scaled(gradient, grad_loss, of.dtype, may_overwrite) if need else None
                for of, gradient, need in zip(operands, rest[count : count + 3], ctx.needs, strict=True)
            ]
            # These are in float32 at least, where a 0-D factor loses nothing.
            found += [
                (gradient * grad_loss).to(of.dtype) if need else None
                for of, gradient, need in zip(args, rest[count + 3 :], ctx.needs_args, strict=True)
            ]
        return (*found[:3], None, None, None, None, *found[3:])


def _gradients_of_composed(
    grad_loss: Tensor, operands: list[Any], target: Tensor, args: list[Any], needs: tuple[bool, ...], ctx: Any
) -> list[Tensor | None]:
    """Differentiable in turn. Aliases keep an argument that was computed from another operand apart from that."""
    every = [value.view_as(value) if need else value for value, need in zip((*operands, *args), needs, strict=True)]
    input, linear_weight, linear_bias, *of_rows = every
    of = ctx.of._replace(args=tuple(of_rows))
    loss = _composed(input, linear_weight, linear_bias, target, ctx.options, of, ctx.wanted, False)[0]
    indices = [index for index, need in enumerate(needs) if need]
    gradients = torch.autograd.grad(
        loss, [every[index] for index in indices], grad_loss, create_graph=True, allow_unused=True
    )
    found: list[Tensor | None] = [None] * len(needs)
    for index, gradient in zip(indices, gradients, strict=True):
        found[index] = gradient
    return found
