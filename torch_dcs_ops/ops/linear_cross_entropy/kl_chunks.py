"""The divergence of two linear heads by chunks of rows: the logits of both for a chunk, and the rows' pass over them.

That leaves the gradients of the logits in their place, for whichever upstream gradient is known by then: that of a
reduced loss in forward, any other in backward, which makes the logits again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.linear_cross_entropy import kl_rows as reference
from ...reference.linear_cross_entropy.kl_div import Divergence
from ...reference.linear_cross_entropy.kl_rows import HeadRows, KlRows
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common.triton import launchers_for
from . import alignment
from .chunks import Logits
from .gradients import ExactGradients, Gradients
from .plan import Plan, make_plan
from .valid_rows import ValidRows, compacts, valid_rows


class Head(NamedTuple):
    """One of the two, with what its logits go through."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    softcap: float | None
    logit_scale: float


def heads(operands: tuple[Tensor | None, ...], options: Divergence) -> tuple[Head, Head]:
    """Student and teacher, of operands in the order of NAMES."""
    x, w, teacher_x, teacher_w, bias, teacher_bias = operands
    assert x is not None
    assert w is not None
    assert teacher_x is not None
    assert teacher_w is not None
    return (
        Head(x, w, bias, options.softcap, options.logit_scale),
        Head(teacher_x, teacher_w, teacher_bias, options.teacher_softcap, options.teacher_logit_scale),
    )


class RowsOfHead:
    """A head's rows as they are run."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, dtype
        lead, features = head.input.shape[:-1], head.input.size(-1)
        self.input, self.linear_weight = alignment.operands(
            head.input.reshape(lead.numel(), features), head.linear_weight
        )
        self.bias = None if head.linear_bias is None else head.linear_bias.to(dtype).contiguous()
        self.word = alignment.word(self.input.size(0), self.linear_weight)
        self.chosen: ValidRows | None = None
        self.operand: Tensor | ValidRows = self.input

    def leave_out(self, chosen: ValidRows) -> None:
        """Runs these rows alone, or before the others."""
        self.operand = self.chosen = chosen

    def plan(self, needs_weight: bool, is_forward: bool, memory_budget: int | None, classes: int) -> Plan:
        features, dtype = self.linear_weight.size(1), self.input.dtype
        return make_plan(
            self.operand.size(0), features, classes, dtype, dtype, self.input.device.type, needs_weight, memory_budget,
            is_forward=is_forward, is_fast=True,
        )  # fmt: skip

    def rows(self, logits: Tensor, need: Needs, saved_slices: tuple[Any, ...] = ()) -> HeadRows:
        """Some logits for the rows' pass."""
        return HeadRows(logits, self.bias, self.head.softcap, self.head.logit_scale, any(need), saved_slices)


def plans_of(
    rows: tuple[RowsOfHead, RowsOfHead], needs: tuple[Needs, Needs], budget: int | None, classes: int
) -> list[Plan]:
    """One for each head of so many classes, with chunks of the same rows; half of the budget is for each."""
    half, is_forward = None if budget is None else max(budget // 2, 1), not any(map(any, needs))
    plans = [of.plan(need.linear_weight, is_forward, half, classes) for of, need in zip(rows, needs, strict=True)]
    least = min(plan.rows for plan in plans)
    if all(plan.rows == least for plan in plans):
        return plans
    return [
        of.plan(need.linear_weight, is_forward, least * plan.stride * of.input.itemsize, classes)
        for of, need, plan in zip(rows, needs, plans, strict=True)
    ]


def rows_of_heads(
    operands: tuple[Tensor | None, ...], target: Tensor | None, options: Divergence, may_count_on_device: bool
) -> tuple[RowsOfHead, RowsOfHead, Tensor | None]:
    """Both heads' rows, and which of these are valid, where ignored ones are among them.

    may_count_on_device: whether these may come behind the others, which is decided by this call's own operands.
    """
    student, teacher = heads(operands, options)
    dtype = row_dtype(student.input.dtype)
    both = [RowsOfHead(head, dtype) for head in (student, teacher)]
    if target is None:
        return both[0], both[1], None
    target = target.reshape(-1)
    compaction = {compacts(of.input, of.linear_weight, target, False) for of in both}
    where = compaction.pop() if len(compaction) == 1 else None
    chosen = None
    if where == "host" or (where == "device" and may_count_on_device):
        chosen = valid_rows(both[0].input, target, options.ignore_index, where, may_count_on_device)
    if chosen is not None:
        both[0].leave_out(chosen)
        both[1].leave_out(chosen.of(both[1].input))
    valid = target != options.ignore_index
    if where == "host":
        return both[0], both[1], None
    return both[0], both[1], valid if chosen is None else chosen.gather(valid)


def run(
    grad: Tensor | None,
    operands: tuple[Tensor | None, ...],
    target: Tensor | None,
    options: Divergence,
    needs: tuple[Needs, Needs] = (Needs(), Needs()),
) -> tuple[Tensor, Gradients, Gradients]:
    """The divergence of every row, and the student's and the teacher's gradients, in the operands' dtypes.

    grad: of the rows, in their shape, or of one element for all; None where no gradient is needed.
    """
    student, teacher, valid = rows_of_heads(operands, target, options, True)
    heads_rows = (student, teacher)
    plans = plans_of(heads_rows, needs, options.memory_budget, student.linear_weight.size(0))
    make = [
        Logits(plan, of.operand, of.linear_weight, of.word).begin() for plan, of in zip(plans, heads_rows, strict=True)
    ]
    grad = student.input.new_ones(1, dtype=student.dtype) if grad is None else grad.reshape(-1).to(student.dtype)
    if student.chosen is not None:
        grad = student.chosen.gather(grad) if grad.numel() > 1 else grad
    gradients = [
        ExactGradients(
            plan, of.operand, of.linear_weight, of.input.new_empty(of.input.shape if need.input else (0, 0)), need,
            of.input.dtype, of.word,
        )
        for plan, of, need in zip(plans, heads_rows, needs, strict=True)
    ]  # fmt: skip
    lead, kernel = student.head.input.shape[:-1], launchers_for(grad, "linear_cross_entropy.kl_div")
    rows = student.input.new_empty(lead.numel(), dtype=student.dtype)
    for part, logits in make[0].chunks():
        both = [logits, make[1](part)]
        # Both heads' linear_weights seldom have gradients: the kernel writes the student's where its sum wants it.
        saved_slices = gradients[0].slice_arguments(both[0], part, can_write=kernel is not None)
        of_student, of_teacher = student.rows(both[0], needs[0], saved_slices), teacher.rows(both[1], needs[1])
        call = KlRows(
            of_student, of_teacher, grad if grad.numel() == 1 else grad[part], None if valid is None else valid[part],
            options.direction, options.beta, options.temperature,
        )  # fmt: skip
        rows[part] = (reference if kernel is None else kernel).kl_rows_(call)
        for index, need in enumerate(needs):
            if any(need):
                gradients[index].add(both[index], part, rows[part])
        del logits, both, of_student, of_teacher, call
    del make  # its memory is room for the sums' last steps
    if student.chosen is not None:
        student.chosen.restore_(rows)
    student_found, teacher_found = (
        finished(of, gradient.result(), need) for of, gradient, need in zip(heads_rows, gradients, needs, strict=True)
    )
    return rows.view(lead), student_found, teacher_found


def finished(of: RowsOfHead, found: Gradients, need: Needs) -> Gradients:
    features, bias, empty = of.head.input.size(-1), of.head.linear_bias, of.input.new_empty
    return Gradients(
        input_gradient(of, found.input) if need.input else empty(0),
        found.linear_weight[:, :features].contiguous() if need.linear_weight else empty(0),
        empty(0) if bias is None or not need.linear_bias else found.linear_bias.to(bias.dtype),
    )


def input_gradient(of: RowsOfHead, found: Tensor) -> Tensor:
    """Of all rows, in input's shape."""
    if of.chosen is not None:
        of.chosen.restore_(found)
    return found[:, : of.head.input.size(-1)].contiguous().view(of.head.input.shape)
