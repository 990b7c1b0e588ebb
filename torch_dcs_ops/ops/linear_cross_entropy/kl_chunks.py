"""The divergence of two linear heads by chunks of rows: the logits of both for a chunk, made again in the backward.

With g a row's gradient, the gradients of the student's and of the teacher's z / temperature are

    forward     g·(p - q)                       g·q·(log q - log p - divergence)
    reverse     g·p·(log p - log q - divergence)    g·(q - p)
    jsd         g·(1 - beta)·p·(log p - log m - sum p·(log p - log m)), and so the teacher's with beta and q
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.kl_div import Divergence, divergence, log_mixture
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from . import alignment
from .chunks import Logits
from .gradients import ExactGradients, Gradients
from .plan import Plan, make_plan
from .valid_rows import ValidRows, valid_rows

_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}  # of logits in the rows' dtype at a time


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


class _Rows:
    """A head's rows as they are run."""

    def __init__(self, head: Head, target: Tensor | None, ignore_index: int, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, dtype
        lead, features = head.input.shape[:-1], head.input.size(-1)
        self.input, self.linear_weight = alignment.operands(
            head.input.reshape(lead.numel(), features), head.linear_weight
        )
        self.bias = None if head.linear_bias is None else head.linear_bias.to(dtype)
        self.chosen: ValidRows | None = None
        if target is not None and target.device.type == "cpu":
            self.chosen = valid_rows(self.input, target, ignore_index, "host")
        self.operand: Tensor | ValidRows = self.input if self.chosen is None else self.chosen
        self.word = alignment.word(self.input.size(0), self.linear_weight)

    def plan(self, needs_weight: bool, is_forward: bool, memory_budget: int | None) -> Plan:
        (classes, features), dtype = self.linear_weight.shape, self.input.dtype
        return make_plan(
            self.operand.size(0), features, classes, dtype, dtype, self.input.device.type, needs_weight, memory_budget,
            is_forward=is_forward,
        )  # fmt: skip

    def values(self, logits: Tensor) -> Tensor:
        """z of some logits."""
        z = logits.to(self.dtype)
        if self.bias is not None:
            z = z + self.bias
        if self.head.logit_scale != 1:
            z = z * self.head.logit_scale
        softcap = self.head.softcap
        return z if softcap is None else torch.tanh(z / softcap) * softcap

    def slope(self, z: Tensor) -> Tensor | float:
        """dz / dlogits."""
        scale, softcap = self.head.logit_scale, self.head.softcap
        return scale if softcap is None else scale * (1 - (z / softcap).square())


def _plans(rows: tuple[_Rows, _Rows], needs: tuple[Needs, Needs], is_forward: bool, budget: int | None) -> list[Plan]:
    """One for each head, with chunks of the same rows; half of the budget is for each."""
    half = None if budget is None else max(budget // 2, 1)
    plans = [of.plan(need.linear_weight, is_forward, half) for of, need in zip(rows, needs, strict=True)]
    least = min(plan.rows for plan in plans)
    if all(plan.rows == least for plan in plans):
        return plans
    return [
        of.plan(need.linear_weight, is_forward, least * plan.stride * of.input.itemsize)
        for of, need, plan in zip(rows, needs, plans, strict=True)
    ]


def _blocks(count: int, classes: int, device: torch.device) -> list[slice]:
    elements = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])
    step = max(elements // classes, 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _setup(
    operands: tuple[Tensor | None, ...], target: Tensor | None, options: Divergence
) -> tuple[_Rows, _Rows, Tensor | None]:
    """Both heads' rows, and which of these are valid, where ignored ones are among them."""
    student, teacher = heads(operands, options)
    dtype = row_dtype(student.input.dtype)
    flat = None if target is None else target.reshape(-1)
    both = [_Rows(head, flat, options.ignore_index, dtype) for head in (student, teacher)]
    valid = None if flat is None or both[0].chosen is not None else flat != options.ignore_index
    return both[0], both[1], valid


def forward(operands: tuple[Tensor | None, ...], target: Tensor | None, options: Divergence) -> Tensor:
    """The divergence of every row."""
    student, teacher, valid = _setup(operands, target, options)
    lead, none = student.head.input.shape[:-1], (Needs(), Needs())
    plans = _plans((student, teacher), none, True, options.memory_budget)
    rows = student.input.new_empty(lead.numel(), dtype=student.dtype)
    make = [
        Logits(plan, of.operand, of.linear_weight, of.word) for plan, of in zip(plans, (student, teacher), strict=True)
    ]
    count, classes = student.operand.size(0), student.linear_weight.size(0)
    for start in range(0, count, plans[0].rows):
        part = slice(start, min(start + plans[0].rows, count))
        logits, teacher_logits = (one(part) for one in make)
        for block in _blocks(part.stop - part.start, classes, rows.device):
            log_p, log_q = (
                (of.values(some[block]) / options.temperature).log_softmax(-1)
                for of, some in ((student, logits), (teacher, teacher_logits))
            )
            rows[part][block] = divergence(log_p, log_q, options.direction, options.beta)
        del logits, teacher_logits
    if student.chosen is not None:
        student.chosen.restore_(rows)
    elif valid is not None:
        rows.masked_fill_(~valid, 0)
    return rows.view(lead)


def backward(
    grad: Tensor,
    operands: tuple[Tensor | None, ...],
    target: Tensor | None,
    options: Divergence,
    needs: tuple[Needs, Needs],
) -> tuple[Gradients, Gradients]:
    """The student's and the teacher's gradients, in the operands' dtypes."""
    student, teacher, valid = _setup(operands, target, options)
    rows = (student, teacher)
    grad = grad.reshape(-1).to(student.dtype)
    if student.chosen is not None:
        grad = student.chosen.gather(grad)
    plans = _plans(rows, needs, False, options.memory_budget)
    make = [Logits(plan, of.operand, of.linear_weight, of.word) for plan, of in zip(plans, rows, strict=True)]
    gradients = [
        ExactGradients(
            plan, of.operand, of.linear_weight, of.input.new_empty(of.input.shape if need.input else (0, 0)), need,
            of.input.dtype, of.word,
        )
        for plan, of, need in zip(plans, rows, needs, strict=True)
    ]  # fmt: skip
    count, classes = student.operand.size(0), student.linear_weight.size(0)
    for start in range(0, count, plans[0].rows):
        part = slice(start, min(start + plans[0].rows, count))
        both = [one(part) for one in make]
        for block in _blocks(part.stop - part.start, classes, grad.device):
            is_valid = None if valid is None else valid[part][block].unsqueeze(1)
            _to_gradients_(
                rows, [some[block] for some in both], grad[part][block].unsqueeze(1), is_valid, options, needs
            )
        for index, need in enumerate(needs):
            if any(need):
                gradients[index].add(both[index], part, grad)
        del both
    student_found, teacher_found = (
        _finished(of, gradient.result(), need) for of, gradient, need in zip(rows, gradients, needs, strict=True)
    )
    return student_found, teacher_found


def _to_gradients_(
    rows: tuple[_Rows, _Rows],
    logits: list[Tensor],
    grad: Tensor,
    valid: Tensor | None,
    options: Divergence,
    needs: tuple[Needs, Needs],
) -> None:
    """Turns both heads' logits (n, V) into their gradients, where they are needed."""
    z = [of.values(some) for of, some in zip(rows, logits, strict=True)]
    log_p, log_q = ((values / options.temperature).log_softmax(-1) for values in z)
    log_m = log_mixture(log_p, log_q, options.beta) if options.direction == "jsd" else None
    grad = grad / options.temperature
    sides = ((log_p, log_q, "forward", 1 - options.beta), (log_q, log_p, "reverse", options.beta))
    for of, some, values, side, need in zip(rows, logits, z, sides, needs, strict=True):
        if not any(need):
            continue
        own, other, plain, share = side
        p = own.exp()
        if log_m is None and options.direction == plain:
            found = p - other.exp()
        else:
            # p·(log p - log of the other, less its mean)
            found = torch.where(own == -torch.inf, 0, own - (other if log_m is None else log_m))
            found = p * (found - (p * found).sum(-1, keepdim=True))
            found = found if log_m is None else found * share
        found = found * grad * of.slope(values)
        some.copy_(found if valid is None else torch.where(valid, found, 0))


def _finished(of: _Rows, found: Gradients, need: Needs) -> Gradients:
    if of.chosen is not None:
        of.chosen.restore_(found.input)
    features, bias, empty = of.head.input.size(-1), of.head.linear_bias, of.input.new_empty
    return Gradients(
        found.input[:, :features].contiguous().view(of.head.input.shape) if need.input else empty(0),
        found.linear_weight[:, :features].contiguous() if need.linear_weight else empty(0),
        empty(0) if bias is None or not need.linear_bias else found.linear_bias.to(bias.dtype),
    )
