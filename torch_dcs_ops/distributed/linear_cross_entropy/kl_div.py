"""`vocab_parallel_linear_kl_div`: the divergence of two heads whose classes are shared out among ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _registry
from ...ops._common import autocast
from ...ops._common.validate import fail
from ...ops.linear_cross_entropy.arguments import check_argument_types, check_flags
from ...ops.linear_cross_entropy.kl_ops import checked
from ...ops.linear_cross_entropy.kl_reduced import Reduction, reduced
from ...ops.linear_cross_entropy.scale import buffers_may_be_private, graph_is_being_freed, scaled
from ...ops.linear_cross_entropy.validate import normal_ignore_index
from ...reference.linear_cross_entropy.kl_div import NAMES, Divergence
from ...reference.linear_cross_entropy.rows import row_dtype
from ..common import Ranks, check_not_differentiated_again
from .kl_kernel_ops import Numbers
from .loss import agreed_slice, one_class, wide_dtype

_OP = "vocab_parallel_linear_kl_div"
_INPUTS = {NAMES.index("input"), NAMES.index("teacher_input")}
_OF_ROWS = ("input", "teacher_input", "target")


def vocab_parallel_linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    group: dist.ProcessGroup,
    first_class: int | None = None,
    classes: int | None = None,
    direction: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    zero_if_empty: bool = False,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`torch_dcs_ops.linear_kl_div` where every rank of a group holds successive rows of both heads' weights.

    Args:
        input, teacher_input: (..., D) and (..., E), the same on all ranks; with sequence_parallel every rank's own
            rows, as many on all ranks. target, of which only `ignore_index` counts, is shared out as they are.
        linear_weight, teacher_weight: (V_r, D) and (V_r, E), of the same classes; see
            :func:`vocab_parallel_linear_cross_entropy`, as for group, first_class, classes, sequence_parallel and
            reduce_dtype (in which input's gradient is summed; teacher_input's in float32 at least).
        linear_bias, teacher_bias: (V_r,), of this rank's classes.
        logit_scale, teacher_logit_scale: numbers.
        The others: as of linear_kl_div; with sequence_parallel a mean or a sum is one over the rows of all ranks.

    Returns:
        The loss, the same bits on every rank; with reduction="none" one a row, of input's leading shape.

    One all-gather of five numbers a row; of "jsd" two, of four and of two. The gradients of both inputs are whole (with
    sequence_parallel of this rank's rows), those of weights and biases are this rank's. Differentiable once, in reverse
    mode, in all operands. Works under torch.compile(fullgraph=True) and autocast.

    Raises:
        RuntimeError, ValueError, TypeError: an argument is wrong, or ranks disagree (see the documentation).
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'{_OP}: reduction must be "none", "mean" or "sum", got "{reduction}"')
    options = Divergence(
        direction, beta, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale,
        normal_ignore_index(ignore_index), memory_budget,
    )  # fmt: skip
    operands = (input, linear_weight, teacher_input, teacher_weight, linear_bias, teacher_bias)
    has_autocast = isinstance(input, Tensor) and input.device.type in ("cpu", "cuda")
    if has_autocast and torch.is_autocast_enabled(input.device.type):
        operands = tuple(map(autocast.lowered, operands))
    named: dict[str, Any] = dict(zip(NAMES, operands, strict=True))
    tensors = {name: named.pop(name) for name in NAMES[:4]}
    optional = {**named, "target": target}

    def check() -> None:
        check_flags(_OP, sequence_parallel=sequence_parallel)
        check_argument_types(_OP, tensors, {**options._asdict(), **optional, "zero_if_empty": zero_if_empty})
        for name, scale in (("logit_scale", logit_scale), ("teacher_logit_scale", teacher_logit_scale)):
            if isinstance(scale, Tensor):
                fail(_OP, f"{name} must be a number, got a tensor")
        own, others = operands[1], operands[3]
        if isinstance(own, Tensor) and own.dim() == 2 and own.size(0) == 0 and others.shape[:1] != (0,):
            fail(_OP, f"teacher_weight must have as many classes as linear_weight, 0, got {others.size(0)}")
        of_class = {NAMES.index(name) for name in NAMES if not name.endswith("input")}
        shown = tuple(one_class(t) if at in of_class else t for at, t in enumerate(operands))
        checked(shown, target, options, _OP)

    same = {**options._asdict(), "reduction": reduction, "zero_if_empty": zero_if_empty}
    ranks, _, count = agreed_slice(
        _OP, group, tensors, optional, _OF_ROWS, (first_class, classes), (sequence_parallel, reduce_dtype), same, check
    )
    wide = wide_dtype(operands[0].dtype, reduce_dtype), wide_dtype(operands[2].dtype, None)
    numbers = Numbers(*wide, "own" if sequence_parallel else "all", count, ranks)
    settings = Settings(Reduction(reduction, zero_if_empty), options, numbers, sequence_parallel)
    loss: Tensor = VocabParallelDivergence.apply(*operands, target, settings)  # type: ignore[no-untyped-call]
    return loss


class Settings(NamedTuple):
    """What is no tensor in a call."""

    reduction: Reduction
    options: Divergence
    numbers: Numbers
    sequence_parallel: bool


def _every_row(tensor: Tensor, team: Ranks, sequence_parallel: bool, trailing: int) -> Tensor:
    """Flat, of all ranks where rows are shared out; the last `trailing` dimensions stay."""
    shape = tensor.shape[: tensor.dim() - trailing]
    flat = tensor.reshape(shape.numel(), *tensor.shape[tensor.dim() - trailing :])
    return team.gather(flat).flatten(0, 1) if sequence_parallel else flat


class VocabParallelDivergence(torch.autograd.Function):
    """A sum or a mean forms its gradients in forward but for float16, whose sums may leave it."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, target, settings = args
        team, options, numbers = settings.numbers.team, settings.options, settings.numbers
        needs, name = tuple(ctx.needs_input_grad[: len(NAMES)]), settings.reduction.name
        flat, ids = _flat(operands, target, settings)
        wanted = [t.dtype for t, need in zip(operands, needs, strict=True) if need]
        is_formed = name != "none" and bool(wanted) and torch.float16 not in wanted
        one = None
        if is_formed:
            one = flat[0].new_ones(1, dtype=row_dtype(flat[0].dtype))
            if name == "mean":
                one = one / (flat[0].size(0) if ids is None else (ids != options.ignore_index).sum())
        given = numbers._replace(needs=needs if is_formed else (False,) * len(NAMES))
        rows, statistics, *found = _registry.vocab_parallel_kl_div(one, *flat, ids, None, *options, *given.flat())
        saved = []
        if is_formed:
            saved = [g for g, need in zip(_finished(found, operands, needs), needs, strict=True) if need]
        ctx.settings, ctx.needs, ctx.private, ctx.is_formed = settings, needs, buffers_may_be_private(), is_formed
        ctx.save_for_backward(*operands, target, statistics, *saved)
        if name != "none":
            return reduced(rows, ids, settings.reduction, options.ignore_index)
        if settings.sequence_parallel:
            rows = rows.view(team.size, -1)[team.rank]
        own: Tensor = rows.reshape(operands[0].shape[:-1])
        return own.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        check_not_differentiated_again(_OP)
        settings: Settings = ctx.settings
        *operands, target, statistics = ctx.saved_tensors[: len(NAMES) + 2]
        if ctx.is_formed:
            may_overwrite, saved = ctx.private and graph_is_being_freed(), iter(ctx.saved_tensors[len(NAMES) + 2 :])
            scaled_ones = [
                scaled(next(saved), grad.to(row_dtype(t.dtype)), t.dtype, may_overwrite) if need else None
                for t, need in zip(operands, ctx.needs, strict=True)
            ]
            return (*scaled_ones, None, None)
        flat, ids = _flat(operands, target, settings)
        dtype = row_dtype(flat[0].dtype)
        if settings.reduction.name == "none":
            grad = _every_row(grad, settings.numbers.team, settings.sequence_parallel, 0).to(dtype)
        else:
            count: Any = 1
            if settings.reduction.name == "mean":
                count = flat[0].size(0) if ids is None else (ids != settings.options.ignore_index).sum()
            grad = (grad.to(dtype) / count).reshape(1)
        numbers = settings.numbers._replace(needs=ctx.needs)
        _, _, *found = _registry.vocab_parallel_kl_div(grad, *flat, ids, statistics, *settings.options, *numbers.flat())
        gradients = _finished(found, operands, ctx.needs)
        return (*(g if need else None for g, need in zip(gradients, ctx.needs, strict=True)), None, None)


def _flat(operands: Any, target: Tensor | None, settings: Settings) -> tuple[list[Any], Tensor | None]:
    team, shares = settings.numbers.team, settings.sequence_parallel
    flat = [_every_row(t, team, shares, 1) if at in _INPUTS else t for at, t in enumerate(operands)]
    return flat, None if target is None else _every_row(target, team, shares, 0)


def _finished(found: list[Tensor], operands: Any, needs: tuple[bool, ...]) -> list[Tensor]:
    """With the inputs' gradients in their shape."""
    return [
        gradient.view(operand.shape) if at in _INPUTS and need else gradient
        for at, (gradient, operand, need) in enumerate(zip(found, operands, needs, strict=True))
    ]
