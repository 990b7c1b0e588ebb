"""`dcs::_vocab_parallel_kl_div`: two heads whose classes are shared out, by chunks of rows; kernel and fake.

With gradients of a reduced loss the ranks exchange the statistics of one chunk at a time, while its logits are there;
without gradients those of all rows at once, but for "jsd", which needs the logits again. A backward knows them already.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...ops._common import autocast
from ...ops._common.triton import launchers_for
from ...ops.linear_cross_entropy.chunks import Logits
from ...ops.linear_cross_entropy.gradients import ExactGradients, Gradients
from ...ops.linear_cross_entropy.kl_chunks import RowsOfHead, finished, input_gradient, plans_of, rows_of_heads
from ...ops.linear_cross_entropy.kl_ops import of_heads, of_operands
from ...reference.linear_cross_entropy import kl_slices as reference
from ...reference.linear_cross_entropy.kl_div import Divergence
from ...reference.linear_cross_entropy.kl_rows import KlRows
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from ..common import Ranks
from .input_sums import InputSum, rows_of_sum
from .kl_rows import add_mixture_sums_, divergences, known_of, slice_columns
from .targets import check_targets


class Numbers(NamedTuple):
    """What is no tensor in the op, but for the options of the divergence."""

    grad_input_dtype: torch.dtype
    grad_teacher_dtype: torch.dtype
    input_sum: str  # see input_sums.py; of both inputs' gradients
    classes: int
    team: Ranks
    needs: tuple[bool, ...] = ()  # gradients of the operands, in the order of NAMES

    def flat(self) -> tuple[Any, ...]:
        dtypes = self.grad_input_dtype, self.grad_teacher_dtype
        return (*dtypes, self.input_sum, self.classes, *self.team, *self.needs)


_OPERANDS, _OPTIONS = 6, len(Divergence._fields)


class _Call(NamedTuple):
    grad: Tensor | None
    operands: tuple[Tensor | None, ...]
    target: Tensor | None
    statistics: Tensor | None
    options: Divergence
    numbers: Numbers


def _call_of(args: tuple[Any, ...]) -> _Call:
    operands, (target, statistics), rest = args[1 : 1 + _OPERANDS], args[7:9], args[9:]
    wide, wide_teacher, input_sum, classes, *team = rest[_OPTIONS:-_OPERANDS]
    numbers = Numbers(wide, wide_teacher, input_sum, classes, Ranks(*team), tuple(rest[-_OPERANDS:]))
    return _Call(args[0], operands, target, statistics, Divergence(*rest[:_OPTIONS]), numbers)


class _Chunks:
    """The rows of one call, some at a time: as many on all ranks, by their mean share of the classes."""

    def __init__(self, call: _Call, needs: tuple[Needs, Needs]) -> None:
        student, teacher, valid = rows_of_heads(call.operands, call.target, call.options, False)
        self.heads, self.valid, self.needs, self.options = (student, teacher), valid, needs, call.options
        self.count, self.slice = student.operand.size(0), student.linear_weight.size(0)
        share = -(-call.numbers.classes // call.numbers.team.size)
        plans = plans_of(self.heads, needs, call.options.memory_budget, share)
        # Only the room for a row is that of this slice.
        of_slice = plans_of(self.heads, needs, call.options.memory_budget, max(self.slice, 1))
        self.plans = [plan._replace(stride=own.stride) for plan, own in zip(plans, of_slice, strict=True)]
        grad = student.input.new_ones(1, dtype=student.dtype) if call.grad is None else call.grad.to(student.dtype)
        self.grad = grad if student.chosen is None or grad.numel() == 1 else student.chosen.gather(grad)
        self.kernels = launchers_for(self.grad, "linear_cross_entropy.kl_slices") or reference
        self.make = [Logits(plan, of.operand, of.linear_weight, of.word)
                     for plan, of in zip(self.plans, self.heads, strict=True)] if self.slice else []  # fmt: skip

    def parts(self) -> list[slice]:
        step = self.plans[0].rows
        return [slice(start, min(start + step, self.count)) for start in range(0, self.count, step)]

    def rows(self, part: slice) -> KlRows | None:
        """Their logits, in the memory of the last ones; None: this rank has no classes."""
        if not self.slice:
            return None
        student, teacher = (
            of.rows(make(part), need) for of, make, need in zip(self.heads, self.make, self.needs, strict=True)
        )
        grad = self.grad if self.grad.numel() == 1 else self.grad[part]
        valid, o = None if self.valid is None else self.valid[part], self.options
        return KlRows(student, teacher, grad, valid, o.direction, o.beta, o.temperature)

    def gradients(self, dtypes: tuple[torch.dtype, torch.dtype]) -> list[ExactGradients | None]:
        return [
            ExactGradients(
                plan, of.operand, of.linear_weight,
                of.input.new_empty(of.input.shape if need.input else (0, 0), dtype=dtype), need, of.input.dtype,
                of.word,
            )
            if self.slice and any(need)
            else None
            for plan, of, need, dtype in zip(self.plans, self.heads, self.needs, dtypes, strict=True)
        ]  # fmt: skip


def _kernel(*args: Any) -> tuple[Tensor, ...]:
    call = _call_of(args)
    with torch._C._AutoDispatchBelowAutograd():
        return _run(call)


def _run(call: _Call) -> tuple[Tensor, ...]:
    needs, team, direction = of_heads(call.numbers.needs), call.numbers.team, call.options.direction
    if call.target is not None and call.statistics is None:
        check_targets((call.target != call.options.ignore_index).long(), -1, 2, team)
    chunks = _Chunks(call, needs)
    student, chosen = chunks.heads[0], chunks.heads[0].chosen
    total = student.input.size(0)
    known = call.statistics
    if known is not None and chosen is not None:
        known = chosen.gather(known.t()).t().contiguous()
    dtypes = (call.numbers.grad_input_dtype, call.numbers.grad_teacher_dtype)
    gradients = chunks.gradients(dtypes)
    sums = [
        InputSum(partial(_input_part, of, found, dtype), team, call.numbers.input_sum, of.head.input.dtype)
        if need.input
        else None
        for of, found, dtype, need in zip(chunks.heads, gradients, dtypes, needs, strict=True)
    ]
    at_once = known is None and direction != "jsd" and not any(call.numbers.needs)
    every: list[Tensor] = []
    for part in chunks.parts():
        rows = chunks.rows(part)
        if call.statistics is None:
            columns = slice_columns(rows, part.stop - part.start, chunks.grad, direction, chunks.kernels)
            if at_once:
                every.append(columns)
                continue
            of_part = known_of(columns, direction, team)
            if direction == "jsd":
                add_mixture_sums_(of_part, rows, team, chunks.kernels)
            every.append(of_part)
        else:
            assert known is not None
            of_part = known[:, part].contiguous()
        if rows is not None and any(call.numbers.needs):
            chunks.kernels.gradients_(rows, of_part)
            for found, head, input_sum in zip(gradients, (rows.student, rows.teacher), sums, strict=True):
                if found is not None:
                    is_last = input_sum is not None and part.stop == chunks.count
                    found.add(head.logits, part, of_part[0], input_sum.begin if input_sum and is_last else None)
        del rows
    chunks.make.clear()  # its memory is room for the sums' last steps
    if known is None:
        known = torch.cat(every, 1) if every else chunks.grad.new_zeros((reference.COLUMNS, 0))
        known = known_of(known, direction, team) if at_once and every else known
    divergence = divergences(known, direction, call.options.beta)
    if chunks.valid is not None:
        divergence = torch.where(chunks.valid, divergence, 0)
    if chosen is not None:
        divergence, known = (_restored(chosen, values, total) for values in (divergence, known.t()))
        known = known.t().contiguous()
    heads = [_finished(of, found, need) for of, found, need in zip(chunks.heads, gradients, needs, strict=True)]
    # All begin before one is waited for: a sum in two steps would else come between them on ranks without classes.
    for input_sum in sums:
        if input_sum is not None:
            input_sum.begin()
    heads = [of if input_sum is None else of._replace(input=input_sum.result())
             for of, input_sum in zip(heads, sums, strict=True)]  # fmt: skip
    statistics = known if call.statistics is None else known.new_empty((reference.COLUMNS, 0))
    return divergence, statistics, *of_operands(*heads)


def _restored(chosen: Any, values: Tensor, total: int) -> Tensor:
    whole = values.new_empty((total, *values.shape[1:]))
    whole[: values.size(0)] = values
    chosen.restore_(whole)
    return whole


def _input_part(of: RowsOfHead, found: ExactGradients | None, dtype: torch.dtype) -> Tensor:
    """This rank's part of a head's input gradient."""
    if found is None:
        return of.head.linear_weight.new_zeros(of.head.input.shape, dtype=dtype)
    return input_gradient(of, found.grad_input)


def _finished(of: RowsOfHead, found: ExactGradients | None, need: Needs) -> Gradients:
    """But for input's."""
    if found is not None:
        return finished(of, found.result(), need._replace(input=False))
    weight, bias = of.head.linear_weight, of.head.linear_bias
    return Gradients(
        weight.new_zeros(0),
        weight.new_zeros(weight.shape if need.linear_weight else 0),
        weight.new_zeros(0) if bias is None or not need.linear_bias else torch.zeros_like(bias),
    )


def _fake(*args: Any) -> tuple[Tensor, ...]:
    call = _call_of(args)
    input, teacher = call.operands[0], call.operands[2]
    assert input is not None
    assert teacher is not None
    rows, dtype = input.size(0), row_dtype(input.dtype)
    like = (input, input, teacher, teacher, input, teacher)
    numbers = call.numbers
    wide = {} if numbers.input_sum else {0: numbers.grad_input_dtype, 2: numbers.grad_teacher_dtype}

    def gradient(at: int, operand: Tensor | None, of: Tensor) -> Tensor:
        if operand is None or not numbers.needs[at]:
            return of.new_empty(0, dtype=wide.get(at, of.dtype))
        count = operand.size(0)
        own = rows_of_sum(count, numbers.team, numbers.input_sum) if at in (0, 2) else count
        return of.new_empty((own, *operand.shape[1:]), dtype=wide.get(at, of.dtype))

    gradients = (gradient(at, operand, of) for at, (operand, of) in enumerate(zip(call.operands, like, strict=True)))
    known = rows if call.statistics is None else 0
    return (input.new_empty(rows, dtype=dtype), input.new_empty((reference.COLUMNS, known), dtype=dtype), *gradients)


_NAME = "_vocab_parallel_kl_div"
_registry.LIBRARY.impl(_NAME, _kernel, "CompositeExplicitAutograd")
torch.library.register_fake(f"dcs::{_NAME}", _fake, lib=_registry.LIBRARY)
# The products here are of the dtypes that the caller has chosen.
autocast.register_cast(_NAME, _registry.vocab_parallel_kl_div, lambda args, keywords: (args, keywords))
