"""`dcs::linear_kl_div` for rows and `dcs::_linear_kl_div_backward`: kernels, fakes, autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import kl_div as reference
from ...reference.linear_cross_entropy.kl_div import NAMES, Divergence
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import Node, apply, below, in_forward_mode, pull_back, run_below, tracked
from .._common.validate import check_device, check_layouts, dtype_name, fail, known
from . import kl_chunks as driver
from .gradients import Gradients
from .kernel_ops import gemm_flops
from .validate import check_head, check_options_of_head, check_rows_target, check_upstream, normal_ignore_index

OP = "linear_kl_div"
TENSORS = len(NAMES)
OPTIONS = len(Divergence._fields)
_DIRECTIONS = ("forward", "reverse", "jsd")
Operands = tuple[Tensor | None, ...]


def checked(operands: Operands, target: Tensor | None, options: Divergence, op: str = OP) -> None:
    # A dispatcher hands None on for a tensor.
    for name, operand in zip(NAMES[:4], operands[:4], strict=True):
        if operand is None:
            raise TypeError(f"{op}: {name} must be a tensor, got NoneType")
    student, teacher = driver.heads(operands, options)
    check_head(op, student.input, student.linear_weight, student.linear_bias)
    check_head(op, teacher.input, teacher.linear_weight, teacher.linear_bias, "teacher_")
    check_device(op, "teacher_input", teacher.input, "input", student.input)
    if known(teacher.linear_weight.size(0) != student.linear_weight.size(0)):
        fail(op, f"teacher_weight must have as many classes as linear_weight, {student.linear_weight.size(0)}, got "
                  f"{teacher.linear_weight.size(0)}")  # fmt: skip
    check_rows_target(op, "teacher_input", teacher.input.shape[:-1], student.input)
    if target is not None:
        check_layouts(op, target=target)
        check_device(op, "target", target, "input", student.input)
        if target.dtype != torch.int64:
            fail(op, f"target must be int64, got {dtype_name(target.dtype)}")
        check_rows_target(op, "target", target.shape, student.input)
    if options.direction not in _DIRECTIONS:
        raise ValueError(f'{op}: direction must be "forward", "reverse" or "jsd", got "{options.direction}"')
    if not 0 < options.beta < 1:
        fail(op, f"beta must be above 0 and below 1, got {options.beta}")
    if not 0 < options.temperature < math.inf:
        fail(op, f"temperature must be a positive number, got {options.temperature}")
    check_options_of_head(op, options.softcap, options.logit_scale, options.memory_budget)
    check_options_of_head(op, options.teacher_softcap, options.teacher_logit_scale, None, "teacher_")


def options_of(keywords: dict[str, Any]) -> Divergence:
    return Divergence(**keywords | {"ignore_index": normal_ignore_index(keywords.get("ignore_index", -100))})


def padded(tensors: tuple[Tensor | None, ...]) -> tuple[Operands, Tensor | None]:
    """The operands and the target of a call that may have left out the last ones."""
    every = (*tensors, *(None,) * (TENSORS + 1 - len(tensors)))
    return every[:TENSORS], every[TENSORS]


def _kernel(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    (operands, target), options = padded(tensors), options_of(keywords)
    checked(operands, target, options)
    with torch._C._AutoDispatchBelowAutograd():
        return driver.run(None, operands, target, options)[0]


def fake(*tensors: Tensor | None, **keywords: Any) -> Tensor:
    (operands, target), options = padded(tensors), options_of(keywords)
    checked(operands, target, options)
    input = driver.heads(operands, options)[0].input
    return input.new_empty(input.shape[:-1], dtype=row_dtype(input.dtype))


def _autograd(keyset: torch._C.DispatchKeySet, *tensors: Tensor | None, **keywords: Any) -> Any:
    operands, target = padded(tensors)
    if not tracked(*operands):
        return below(_registry.linear_kl_div, keyset, *tensors, **keywords)
    options = options_of(keywords)
    checked(operands, target, options)
    if in_forward_mode():
        by_name: dict[str, Any] = dict(zip(NAMES, operands, strict=True))
        return reference.linear_kl_div(target=target, options=options, **by_name)
    return apply(DivergenceFunction, keyset, *operands, target, options)


class DivergenceFunction(Node):
    """The rows' divergences. Saves the operands alone."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        *tensors, options = args
        rows: Tensor = run_below(_registry.linear_kl_div, keyset, *tensors, **options._asdict())
        ctx.options, ctx.needs = options, tuple(ctx.needs_input_grad[1 : 1 + TENSORS])
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
    tensors, rest = args[1 : 1 + TENSORS], args[2 + TENSORS :]
    return args[0], tensors, args[1 + TENSORS], Divergence(*rest[:OPTIONS]), tuple(rest[OPTIONS:])


def of_heads(needs: tuple[bool, ...]) -> tuple[Needs, Needs]:
    return Needs(needs[0], needs[1], needs[4]), Needs(needs[2], needs[3], needs[5])


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad, operands, target, options, needs = _split(args)
    checked(operands, target, options)
    check_upstream(OP, "grad", grad, lead_of(operands), grad)
    with torch._C._AutoDispatchBelowAutograd():
        return of_operands(*driver.run(grad, operands, target, options, of_heads(needs))[1:])


def of_operands(student: Gradients, teacher: Gradients) -> tuple[Tensor, ...]:
    """Both heads' gradients in the order of NAMES."""
    return student[0], student[1], teacher[0], teacher[1], student[2], teacher[2]


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    grad, operands, target, options, needs = _split(args)
    checked(operands, target, options)
    check_upstream(OP, "grad", grad, lead_of(operands), grad)
    return empty_gradients(operands, needs)


def empty_gradients(operands: Operands, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    student, _, teacher, *_ = operands
    assert student is not None
    assert teacher is not None
    like = (student, student, teacher, teacher, student, teacher)
    shapes = (tensor.shape if tensor is not None and need else 0 for tensor, need in zip(operands, needs, strict=True))
    return tuple(tensor.new_empty(shape) for tensor, shape in zip(like, shapes, strict=True))


def lead_of(operands: Operands) -> torch.Size:
    assert operands[0] is not None
    return operands[0].shape[:-1]


def _backward_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    grad, operands, target, options, needs = _split(args)
    if not tracked(grad, *operands):
        return below(_registry.linear_kl_div_backward, keyset, *args)
    if in_forward_mode():
        return reference.linear_kl_div_gradients(grad, operands, target, options, needs)
    return apply(DivergenceGradientFunction, keyset, grad, *operands, target, options, needs)


def lowered(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(autocast.lowered, args)), keywords


def _flops(*shapes: Any, out_shape: Any = None, **keywords: Any) -> int:
    return gemm_flops(shapes[0], shapes[1]) + gemm_flops(shapes[2], shapes[3])


def backward_flops(*args: Any, out_shape: Any = None, **keywords: Any) -> int:
    student, teacher = (1 + need.input + need.linear_weight for need in of_heads(args[-TENSORS:]))
    return student * gemm_flops(args[1], args[2]) + teacher * gemm_flops(args[3], args[4])


for _name, _of, _its_fake, _its_autograd, _formula in (
    ("linear_kl_div", _kernel, fake, _autograd, _flops),
    ("_linear_kl_div_backward", _backward, _backward_fake, _backward_autograd, backward_flops),
):
    _registry.LIBRARY.impl(_name, _of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _its_fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _its_autograd, "Autograd", with_keyset=True)
    flops.register(getattr(torch.ops.dcs, _name), _formula)
autocast.register_cast("linear_kl_div", _registry.linear_kl_div, lowered)
