"""`dcs::linear_kl_div`: the divergence of every row of two linear heads, without holding the logits of either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import kl_div as reference
from ...reference.linear_cross_entropy.kl_div import NAMES, Divergence
from ...reference.linear_cross_entropy.loss import Needs, zeroed_if_empty
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import (
    Node,
    any_requires_grad,
    apply,
    below,
    in_forward_mode,
    is_plain_call,
    pull_back,
    run_below,
    tracked,
)
from .._common.validate import check_device, check_layouts, dtype_name, fail, known
from . import kl_chunks as driver
from .arguments import apply_scale, check_argument_types
from .gradients import Gradients
from .kernel_ops import gemm_flops
from .scale import buffers_may_be_private, graph_is_being_freed, scaled
from .validate import check_head, check_options_of_head, check_rows_target, check_upstream, normal_ignore_index

_OP = "linear_kl_div"
_TENSORS = len(NAMES)
_OPTIONS = len(Divergence._fields)
_DIRECTIONS = ("forward", "reverse", "jsd")
Operands = tuple[Tensor | None, ...]


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | Tensor = 1.0,
    zero_if_empty: bool = False,
    memory_budget: int | None = None,
) -> Tensor:
    """The divergence of a student's and a teacher's head over the whole vocabulary, without the logits in memory.

    With p the student's softmax of ``input·linear_weightᵀ / temperature``, q the teacher's, a row's loss is

    * "forward": KL(q ‖ p) = Σ q·(log q - log p), what distillation by F.kl_div minimizes;
    * "reverse": KL(p ‖ q) = Σ p·(log p - log q);
    * "jsd": beta·KL(q ‖ m) + (1 - beta)·KL(p ‖ m) with m = beta·q + (1 - beta)·p.

    Both heads' logits are made for some rows at a time; a mean or a sum in an eager call forms its gradients from them,
    in all other cases the backward makes them again. Everything behind them is float32 (float64 for a float64 student).

    Args:
        input: (..., D), the student's hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, D), input's dtype.
        teacher_input: (..., E), the teacher's, of the same leading shape; of any of these dtypes.
        teacher_weight: (V, E), teacher_input's dtype.
        direction: "forward", "reverse" or "jsd".
        beta: the teacher's share of the mixture, between 0 and 1; of "jsd" alone.
        temperature: divides both heads' logits, behind the softcap. The loss is not multiplied by its square.
        target: int64 (...); rows where it is `ignore_index` have the loss 0 and no gradient. None: there are none.
        ignore_index: None is -100.
        reduction: "mean" over the rows that are not ignored, "sum", or "none" for a loss per row.
        linear_bias, teacher_bias: (V,), in the dtypes of input and teacher_input.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: of each head, as of :func:`linear_cross_entropy`.
        zero_if_empty: a mean over no row is 0 instead of nan.
        memory_budget: bytes of both heads' logits to hold at a time. None: for each as in linear_cross_entropy.

    Returns:
        float32 for a half-precision student, else of input's dtype; 0-D, or input's leading shape for "none".
        Differentiable any number of times in both heads' operands, of which only those are formed that are needed: a
        teacher without gradients costs the GEMM of its logits.

    Raises:
        ValueError: direction or reduction is none of these, or leading shapes differ.
        TypeError, RuntimeError: an argument has a wrong type; a wrong dtype, shape, device or value.

    Example::

        >>> loss = torch_dcs_ops.linear_kl_div(hidden, head, teacher_hidden, teacher_head, target=labels)
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'{_OP}: reduction must be "none", "mean" or "sum", got "{reduction}"')
    input, linear_bias, logit_scale = apply_scale(_OP, input, linear_bias, logit_scale)
    teacher_input, teacher_bias, teacher_logit_scale = apply_scale(
        _OP, teacher_input, teacher_bias, teacher_logit_scale, "teacher_logit_scale"
    )
    keywords: dict[str, Any] = {
        "direction": direction, "beta": beta, "temperature": temperature, "softcap": softcap,
        "logit_scale": logit_scale, "teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale,
        "ignore_index": ignore_index, "memory_budget": memory_budget,
    }  # fmt: skip
    optional = {"linear_bias": linear_bias, "teacher_bias": teacher_bias, "target": target}
    operands = (input, linear_weight, teacher_input, teacher_weight, linear_bias, teacher_bias)
    reduced = _Reduction(reduction, zero_if_empty)
    try:
        if reduction != "none" and _forms_gradients(operands, target):
            if torch.is_autocast_enabled(input.device.type):
                operands = tuple(map(autocast.lowered, operands))
            options = _options(keywords)
            _checked(operands, target, options)
            loss: Tensor = apply(ReducedDivergenceFunction, *operands, target, options, reduced)
            return loss
        rows: Tensor = _registry.linear_kl_div(*operands, target, **keywords)
    except (AttributeError, RuntimeError, TypeError):
        tensors = dict(zip(NAMES[:4], operands[:4], strict=True))
        check_argument_types(_OP, tensors, {**optional, **keywords})
        raise
    return _reduced(rows, target, reduced, normal_ignore_index(ignore_index))


class _Reduction(NamedTuple):
    name: str
    zero_if_empty: bool


def _reduced(rows: Tensor, target: Tensor | None, reduction: _Reduction, ignore_index: int) -> Tensor:
    if reduction.name == "none":
        return rows
    if reduction.name == "sum":
        return rows.sum()
    if target is None:
        target = torch.full_like(rows, ignore_index + 1, dtype=torch.int64)
    mean = rows.sum() / (target != ignore_index).sum()
    return zeroed_if_empty(mean, target, ignore_index) if reduction.zero_if_empty else mean


def _forms_gradients(operands: Operands, target: Tensor | None) -> bool:
    """Whether a reduced loss does so in forward: not where anybody looks on, nor in float16, which sums may leave."""
    if not (is_plain_call(*operands, target) and any_requires_grad(*operands)):
        return False
    wanted = [t for t in operands if isinstance(t, Tensor) and t.requires_grad]
    lowered = (autocast.lowered(t).dtype if torch.is_autocast_enabled(t.device.type) else t.dtype for t in wanted)
    return torch.float16 not in lowered


def _checked(operands: Operands, target: Tensor | None, options: Divergence) -> None:
    student, teacher = driver.heads(operands, options)
    check_head(_OP, student.input, student.linear_weight, student.linear_bias)
    check_head(_OP, teacher.input, teacher.linear_weight, teacher.linear_bias, "teacher_")
    check_device(_OP, "teacher_input", teacher.input, "input", student.input)
    if known(teacher.linear_weight.size(0) != student.linear_weight.size(0)):
        fail(_OP, f"teacher_weight must have as many classes as linear_weight, {student.linear_weight.size(0)}, got "
                  f"{teacher.linear_weight.size(0)}")  # fmt: skip
    check_rows_target(_OP, "teacher_input", teacher.input.shape[:-1], student.input)
    if target is not None:
        check_layouts(_OP, target=target)
        check_device(_OP, "target", target, "input", student.input)
        if target.dtype != torch.int64:
            fail(_OP, f"target must be int64, got {dtype_name(target.dtype)}")
        check_rows_target(_OP, "target", target.shape, student.input)
    if options.direction not in _DIRECTIONS:
        raise ValueError(f'{_OP}: direction must be "forward", "reverse" or "jsd", got "{options.direction}"')
    if not 0 < options.beta < 1:
        fail(_OP, f"beta must be above 0 and below 1, got {options.beta}")
    if not 0 < options.temperature < math.inf:
        fail(_OP, f"temperature must be a positive number, got {options.temperature}")
    check_options_of_head(_OP, options.softcap, options.logit_scale, options.memory_budget)
    check_options_of_head(_OP, options.teacher_softcap, options.teacher_logit_scale, None, "teacher_")


def _options(keywords: dict[str, Any]) -> Divergence:
    return Divergence(**keywords | {"ignore_index": normal_ignore_index(keywords.get("ignore_index", -100))})


def _padded(tensors: tuple[Tensor | None, ...]) -> tuple[Operands, Tensor | None]:
    """The operands and the target of a call that may have left out the last ones."""
    every = (*tensors, *(None,) * (_TENSORS + 1 - len(tensors)))
    return every[:_TENSORS], every[_TENSORS]


def _kernel(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    (operands, target), options = _padded(tensors), _options(keywords)
    _checked(operands, target, options)
    with torch._C._AutoDispatchBelowAutograd():
        return driver.run(None, operands, target, options)[0]


def _fake(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    (operands, target), options = _padded(tensors), _options(keywords)
    _checked(operands, target, options)
    input = driver.heads(operands, options)[0].input
    return input.new_empty(input.shape[:-1], dtype=row_dtype(input.dtype))


def _autograd(keyset: torch._C.DispatchKeySet, *tensors: Tensor | None, **keywords: Any) -> Any:
    operands, target = _padded(tensors)
    if not tracked(*operands):
        return below(_registry.linear_kl_div, keyset, *tensors, **keywords)
    options = _options(keywords)
    _checked(operands, target, options)
    if in_forward_mode():
        by_name: dict[str, Any] = dict(zip(NAMES, operands, strict=True))
        return reference.linear_kl_div(target=target, options=options, **by_name)
    return apply(DivergenceFunction, keyset, *operands, target, options)


class ReducedDivergenceFunction(Node):
    """A sum or a mean. Saves its gradients, and the operands for those who differentiate a gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, target, options, reduction = args
        needs = tuple(ctx.needs_input_grad[:_TENSORS])
        one: Tensor = operands[0].new_ones(1, dtype=row_dtype(operands[0].dtype))
        if reduction.name == "mean":
            rows = operands[0].shape[:-1].numel()
            one = one / (rows if target is None else (target != options.ignore_index).sum())
        found = driver.run(one, tuple(operands), target, options, _of_heads(needs))
        ctx.options, ctx.reduction, ctx.needs = options, reduction, needs
        ctx.private = buffers_may_be_private()
        ctx.save_for_backward(*operands, target, *_of_operands(*found[1:]))
        return _reduced(found[0], target, reduction, options.ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        operands, target = ctx.saved_tensors[:_TENSORS], ctx.saved_tensors[_TENSORS]
        gradients = ctx.saved_tensors[_TENSORS + 1 :]
        if torch.is_grad_enabled():
            # Differentiable in turn. Aliases keep an operand that was computed from another one apart from that.
            every = [t.view_as(t) if need else t for t, need in zip(operands, ctx.needs, strict=True)]
            rows = _registry.linear_kl_div(*every, target, **ctx.options._asdict())
            loss = _reduced(rows, target, ctx.reduction, ctx.options.ignore_index)
            wanted = [t for t, need in zip(every, ctx.needs, strict=True) if need]
            differentiable = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
            found = [next(differentiable) if need else None for need in ctx.needs]
        else:
            may_overwrite = ctx.private and graph_is_being_freed()
            found = [
                scaled(gradient, grad.to(row_dtype(t.dtype)), t.dtype, may_overwrite) if need else None
                for t, gradient, need in zip(operands, gradients, ctx.needs, strict=True)
            ]
        return (*found, None, None, None)


class DivergenceFunction(Node):
    """The rows' divergences. Saves the operands alone."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        *tensors, options = args
        rows: Tensor = run_below(_registry.linear_kl_div, keyset, *tensors, **options._asdict())
        ctx.options, ctx.needs = options, tuple(ctx.needs_input_grad[1 : 1 + _TENSORS])
        ctx.save_for_backward(*tensors)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        computed = _registry.linear_kl_div_backward(grad, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        found = [gradient if need else None for gradient, need in zip(computed, ctx.needs, strict=True)]
        return (None, *found, None, None)


class DivergenceGradientFunction(Node):
    """The gradients of the rows' divergences, differentiable in the upstream gradient and the operands."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        *tensors, options, needs = args
        gradients: tuple[Tensor, ...] = run_below(_registry.linear_kl_div_backward, keyset, *tensors, *options, *needs)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs = options, needs
        ctx.mark_non_differentiable(*(g for g, need in zip(gradients, needs, strict=True) if not need))
        ctx.save_for_backward(*tensors)
        return gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        *tensors, target = ctx.saved_tensors

        def gradients_of(values: Sequence[Any], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
            grad, *operands = values
            return reference.linear_kl_div_gradients(grad, tuple(operands), target, ctx.options, needs)

        return (None, *pull_back(ctx, tensors, cotangents, gradients_of), None, None, None)


def _split(args: tuple[Any, ...]) -> tuple[Tensor, Operands, Tensor | None, Divergence, tuple[bool, ...]]:
    tensors, rest = args[1 : 1 + _TENSORS], args[2 + _TENSORS :]
    return args[0], tensors, args[1 + _TENSORS], Divergence(*rest[:_OPTIONS]), tuple(rest[_OPTIONS:])


def _of_heads(needs: tuple[bool, ...]) -> tuple[Needs, Needs]:
    return Needs(needs[0], needs[1], needs[4]), Needs(needs[2], needs[3], needs[5])


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad, operands, target, options, needs = _split(args)
    _checked(operands, target, options)
    check_upstream(_OP, "grad", grad, _lead(operands), grad)
    with torch._C._AutoDispatchBelowAutograd():
        return _of_operands(*driver.run(grad, operands, target, options, _of_heads(needs))[1:])


def _of_operands(student: Gradients, teacher: Gradients) -> tuple[Tensor, ...]:
    """Both heads' gradients in the order of NAMES."""
    return student[0], student[1], teacher[0], teacher[1], student[2], teacher[2]


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    grad, operands, target, options, needs = _split(args)
    _checked(operands, target, options)
    check_upstream(_OP, "grad", grad, _lead(operands), grad)
    student, teacher = (head.input for head in driver.heads(operands, options))
    like = (student, student, teacher, teacher, student, teacher)
    shapes = (tensor.shape if tensor is not None and need else 0 for tensor, need in zip(operands, needs, strict=True))
    return tuple(tensor.new_empty(shape) for tensor, shape in zip(like, shapes, strict=True))


def _lead(operands: Operands) -> torch.Size:
    assert operands[0] is not None
    return operands[0].shape[:-1]


def _backward_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    grad, operands, target, options, needs = _split(args)
    if not tracked(grad, *operands):
        return below(_registry.linear_kl_div_backward, keyset, *args)
    if in_forward_mode():
        return reference.linear_kl_div_gradients(grad, operands, target, options, needs)
    return apply(DivergenceGradientFunction, keyset, grad, *operands, target, options, needs)


def _autocast(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(autocast.lowered, args)), keywords


def _flops(*shapes: Any, out_shape: Any = None, **keywords: Any) -> int:
    return gemm_flops(shapes[0], shapes[1]) + gemm_flops(shapes[2], shapes[3])


def _backward_flops(*args: Any, out_shape: Any = None, **keywords: Any) -> int:
    student, teacher = (1 + need.input + need.linear_weight for need in _of_heads(args[-_TENSORS:]))
    return student * gemm_flops(args[1], args[2]) + teacher * gemm_flops(args[3], args[4])


for _name, _of, _its_fake, _its_autograd, _formula in (
    ("linear_kl_div", _kernel, _fake, _autograd, _flops),
    ("_linear_kl_div_backward", _backward, _backward_fake, _backward_autograd, _backward_flops),
):
    _registry.LIBRARY.impl(_name, _of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _its_fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _its_autograd, "Autograd", with_keyset=True)
    flops.register(getattr(torch.ops.dcs, _name), _formula)
autocast.register_cast("linear_kl_div", _registry.linear_kl_div, _autocast)
